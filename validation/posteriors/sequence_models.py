"""Posteriors whose observations read each other: plain log densities, their data whole.

Each goes from an unconstrained position to its parameters by hand, and adds the logarithm of the
Jacobian. Draws are positions, so the same map, in NumPy, gives the reference's parameters.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import log_sigmoid, sigmoid
from jax.scipy.special import logsumexp

from validation.posteriors.model import HALF_LOG_TWO_PI, Model, half_normal, normal, whole_target


def _expit(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


# GARCH(1, 1): flat on alpha0 > 0 and on the triangle alpha1 + beta1 < 1


def garch(x, columns):
    y = columns["y"]
    alpha0, alpha1 = jnp.exp(x["log_alpha0"]), sigmoid(x["logit_alpha1"])
    beta1 = (1 - alpha1) * sigmoid(x["logit_share"])

    def advance(variance, earlier):
        following = alpha0 + alpha1 * (earlier - x["mu"]) ** 2 + beta1 * variance
        return following, following

    first = columns["sigma1"] ** 2
    _, later = jax.lax.scan(advance, first, y[:-1])
    return {
        "first": normal(y[0], x["mu"], columns["sigma1"]),
        "later": normal(y[1:], x["mu"], jnp.sqrt(later)),
        "jacobian": (
            x["log_alpha0"],
            # beta1 is a share of 1 - alpha1, so that has a power more.
            log_sigmoid(x["logit_alpha1"]) + 2 * log_sigmoid(-x["logit_alpha1"]),
            log_sigmoid(x["logit_share"]) + log_sigmoid(-x["logit_share"]),
        ),
    }


def _garch_columns(data):
    return {"y": np.asarray(data["y"], float), "sigma1": np.asarray(data["sigma1"], float)}


def _build_garch(columns, mesh):
    return whole_target(garch, columns, mesh)


def _garch_shapes(columns):
    return {"mu": (), "log_alpha0": (), "logit_alpha1": (), "logit_share": ()}


def _garch_derived(draws):
    alpha1 = _expit(draws["logit_alpha1"])
    return {
        "mu": draws["mu"],
        "alpha0": np.exp(draws["log_alpha0"]),
        "alpha1": alpha1,
        "beta1": (1 - alpha1) * _expit(draws["logit_share"]),
    }


GARCH = Model("garch-garch11", _garch_columns, _build_garch, _garch_shapes, _garch_derived)

# A Gaussian process with a squared-exponential kernel


def gaussian_process(x, columns):
    y, n = columns["y"], len(columns["y"])
    rho, alpha, sigma = (jnp.exp(x[f"log_{name}"]) for name in ("rho", "alpha", "sigma"))
    covariance = alpha**2 * jnp.exp(-0.5 * columns["squared_distance"] / rho**2)
    cholesky = jnp.linalg.cholesky(covariance + sigma * jnp.eye(n, dtype=y.dtype))
    white = jax.scipy.linalg.solve_triangular(cholesky, y, lower=True)
    return {
        "rho": 24 * x["log_rho"] - 4 * rho + 25 * math.log(4) - math.lgamma(25),
        "alpha": half_normal(alpha, 2.0),
        "sigma": half_normal(sigma, 1.0),
        "y": -0.5 * white**2 - jnp.log(jnp.diagonal(cholesky)) - HALF_LOG_TWO_PI,
        "jacobian": (x["log_rho"], x["log_alpha"], x["log_sigma"]),
    }


def _process_columns(data):
    x = np.asarray(data["x"], float)
    return {"squared_distance": (x[:, None] - x[None]) ** 2, "y": np.asarray(data["y"], float)}


def _build_process(columns, mesh):
    return whole_target(gaussian_process, columns, mesh)


def _process_shapes(columns):
    return {"log_rho": (), "log_alpha": (), "log_sigma": ()}


def _process_derived(draws):
    return {name: np.exp(draws[f"log_{name}"]) for name in ("rho", "alpha", "sigma")}


GP_REGRESSION = Model(
    "gp_pois_regr-gp_regr", _process_columns, _build_process, _process_shapes, _process_derived
)

# A hidden Markov model of two states


def hidden_markov(x, columns):
    log_theta = jnp.stack([jnp.stack([log_sigmoid(u), log_sigmoid(-u)]) for u in x["logit_theta"]])
    low = jnp.exp(x["log_mu"][0])
    mu = jnp.stack([low, low + jnp.exp(x["log_mu"][1])])
    emission = normal(columns["y"][:, None], mu[None], 1.0)

    def advance(log_state, log_emission):
        joint = logsumexp(log_state[:, None] + log_theta, axis=0) + log_emission
        evidence = logsumexp(joint)
        return joint - evidence, evidence

    first = logsumexp(emission[0])
    _, later = jax.lax.scan(advance, emission[0] - first, emission[1:])
    return {
        "first": first,
        "later": later,
        "mu": (normal(mu[0], 3.0, 1.0), normal(mu[1], 10.0, 1.0)),
        "jacobian": (x["log_mu"], log_sigmoid(x["logit_theta"]) + log_sigmoid(-x["logit_theta"])),
    }


def _markov_columns(data):
    return {"y": np.asarray(data["y"], float)}


def _build_markov(columns, mesh):
    return whole_target(hidden_markov, columns, mesh)


def _markov_shapes(columns):
    return {"logit_theta": (2,), "log_mu": (2,)}


def _markov_derived(draws):
    theta = _expit(draws["logit_theta"])
    low = np.exp(draws["log_mu"][..., 0])
    return {
        "theta1": np.stack([theta[..., 0], 1 - theta[..., 0]], axis=-1),
        "theta2": np.stack([theta[..., 1], 1 - theta[..., 1]], axis=-1),
        "mu": np.stack([low, low + np.exp(draws["log_mu"][..., 1])], axis=-1),
    }


HMM = Model("hmm_example-hmm_example", _markov_columns, _build_markov, _markov_shapes, _markov_derived)
