"""Models of sequences: an autoregression, a Gaussian process, stochastic volatility."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import posteriordb
from benchmarks.ess_models.model import (
    HALF_LOG_TWO_PI,
    Model,
    half_cauchy,
    half_normal,
    normal,
    single,
)

# An autoregression: each row holds its own lags


def autoregression_prior(params):
    sigma = jnp.exp(params["log_sigma"])
    return {
        "alpha": normal(params["alpha"], 0.0, 10.0),
        "beta": normal(params["beta"], 0.0, 10.0),
        "sigma": half_cauchy(sigma, 2.5) + params["log_sigma"],
    }


def autoregression(params, rows):
    mean = params["alpha"] + rows["lags"] @ params["beta"]
    return normal(rows["y"], mean, jnp.exp(params["log_sigma"]))


def _load_autoregression(data_dir):
    data = posteriordb.load("arK-arK", data_dir).data
    y, order = np.asarray(data["y"], float), data["K"]
    lags = [y[order - k : len(y) - k] for k in range(1, order + 1)]
    return single({"lags": np.column_stack(lags), "y": y[order:]})


ARK = Model(
    name="arK",
    about="autoregression of posteriordb: 7 latents",
    load=_load_autoregression,
    shapes=lambda data: {"alpha": (), "beta": data["lags"].shape[1:], "log_sigma": ()},
    log_prior=autoregression_prior,
    log_likelihood=autoregression,
    data_set="posteriordb",
)

# A Gaussian process with a squared-exponential kernel


def gaussian_process(params, data):
    y = data["y"]
    rho, alpha, sigma = (jnp.exp(params[f"log_{name}"]) for name in ("rho", "alpha", "sigma"))
    covariance = alpha**2 * jnp.exp(-0.5 * data["squared_distance"] / rho**2)
    cholesky = jnp.linalg.cholesky(covariance + sigma * jnp.eye(len(y), dtype=y.dtype))
    white = jax.scipy.linalg.solve_triangular(cholesky, y, lower=True)
    return {
        "rho": 24 * params["log_rho"] - 4 * rho + 25 * math.log(4) - math.lgamma(25),
        "alpha": half_normal(alpha, 2.0),
        "sigma": half_normal(sigma, 1.0),
        "y": -0.5 * white**2 - jnp.log(jnp.diagonal(cholesky)) - HALF_LOG_TWO_PI,
        "jacobian": (params["log_rho"], params["log_alpha"], params["log_sigma"]),
    }


def _load_process(data_dir):
    data = posteriordb.load("gp_pois_regr-gp_regr", data_dir).data
    x = np.asarray(data["x"], float)
    squared_distance = (x[:, None] - x[None]) ** 2
    return single({"squared_distance": squared_distance, "y": np.asarray(data["y"], float)})


GP_REGRESSION = Model(
    name="gp_regr",
    about="Gaussian process of posteriordb: 3 latents",
    load=_load_process,
    shapes=lambda data: {"log_rho": (), "log_alpha": (), "log_sigma": ()},
    log_prior=None,
    log_likelihood=gaussian_process,
    data_set="posteriordb",
)

# Stochastic volatility, not centred: the latents are the innovations of an autoregressive log variance

NUM_DAYS = 2497


def stochastic_volatility(params, data):
    phi = jnp.tanh(params["atanh_phi"])
    sigma = jnp.exp(params["log_sigma"])
    # The first day is of the stationary distribution.
    size = jnp.full_like(params["shock"], sigma).at[0].divide(jnp.sqrt(1 - phi**2))
    log_variance = params["mu"] + _filtered(phi, size * params["shock"])
    return {
        "mu": normal(params["mu"], 0.0, 5.0),
        "phi": normal(params["atanh_phi"], 1.5, 0.5),
        "sigma": half_normal(sigma, 0.5) + params["log_sigma"],
        "shock": normal(params["shock"]),
        # Normal of mean 0 and log variance h.
        "y": -0.5 * (data["y"] ** 2 * jnp.exp(-log_variance) + log_variance) - HALF_LOG_TWO_PI,
    }


def _filtered(phi, shocks):
    """Return h with h_t = phi h_{t-1} + shock_t, in log2(days) steps instead of a scan over days."""

    def combine(earlier, later):
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    return jax.lax.associative_scan(combine, (jnp.full_like(shocks, phi), shocks))[1]


def _simulate_returns(data_dir):
    rng = np.random.default_rng(2500)
    mu, phi, sigma = -1.0, 0.95, 0.2
    shocks = sigma * rng.standard_normal(NUM_DAYS)
    shocks[0] /= math.sqrt(1 - phi**2)
    log_variance = np.zeros(NUM_DAYS)
    for day, shock in enumerate(shocks):
        log_variance[day] = phi * log_variance[day - 1] + shock if day else shock
    return single({"y": np.exp((mu + log_variance) / 2) * rng.standard_normal(NUM_DAYS)})


STOCHASTIC_VOLATILITY = Model(
    name="stochastic_volatility",
    about="stochastic volatility of 2,497 days, not centred: 2,500 latents",
    load=_simulate_returns,
    shapes=lambda data: {"mu": (), "atanh_phi": (), "log_sigma": (), "shock": data["y"].shape},
    log_prior=None,
    log_likelihood=stochastic_volatility,
)
