"""Posteriors whose likelihood is a sum over rows: plates, their rows laid over the data axis.

Constrained parameters go through NumPyro's bijections (extra ``models``), so that draws come back
constrained, and only what the reference computes from parameters is left to derive.
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import beta as beta_distribution
from numpyro.distributions import biject_to, constraints

from validation.posteriors.model import (
    Model,
    half_cauchy,
    half_normal,
    normal,
    rows_target,
    student,
)

POSITIVE = biject_to(constraints.positive)


def _as_they_are(draws):
    return dict(draws)


# Linear regressions with flat priors


def flat(params):
    return jnp.zeros_like(params["sigma"])


def regression(params, rows):
    return normal(rows["y"], rows["x"] @ params["beta"], params["sigma"])


def _build_regression(columns, mesh):
    return rows_target(flat, regression, columns, mesh, {"sigma": POSITIVE})


def _regression_shapes(columns):
    return {"beta": columns["x"].shape[1:], "sigma": ()}


def flat_regression(name, columns) -> Model:
    """Return a normal linear regression with flat priors on coefficients and on sigma > 0."""
    return Model(name, columns, _build_regression, _regression_shapes, _as_they_are)


def _kidiq_columns(data):
    def standardised(name):
        x = np.asarray(data[name], float)
        return (x - x.mean()) / (2 * x.std(ddof=1))

    hs, iq = standardised("mom_hs"), standardised("mom_iq")
    return {
        "x": np.column_stack([np.ones_like(hs), hs, iq, hs * iq]),
        "y": np.asarray(data["kid_score"], float),
    }


def _nes_columns(data):
    age = np.asarray(data["age_discrete"])
    plain = {
        k: np.asarray(data[k], float) for k in ("real_ideo", "race_adj", "educ1", "gender", "income")
    }
    columns = [
        np.ones(len(age)),
        plain["real_ideo"],
        plain["race_adj"],
        *((age == group).astype(float) for group in (2, 3, 4)),
        plain["educ1"],
        plain["gender"],
        plain["income"],
    ]
    return {"x": np.column_stack(columns), "y": np.asarray(data["partyid7"], float)}


KIDIQ = flat_regression("kidiq_with_mom_work-kidscore_interaction_z", _kidiq_columns)
NES = flat_regression("nes1980-nes", _nes_columns)

# Diamonds


def diamonds_prior(params):
    return {
        "b": normal(params["b"], 0.0, 1.0),
        "intercept": student(params["Intercept"], 3.0, 8.0, 10.0),
        "sigma": student(params["sigma"], 3.0, 0.0, 10.0) + np.log(2.0),
    }


def diamonds_likelihood(params, rows):
    mean = params["Intercept"] + rows["x"] @ params["b"]
    return normal(rows["y"], mean, params["sigma"])


def _diamonds_columns(data):
    x = np.asarray(data["X"], float)[:, 1:]
    return {"x": x - x.mean(axis=0), "y": np.asarray(data["Y"], float)}


def _build_diamonds(columns, mesh):
    return rows_target(diamonds_prior, diamonds_likelihood, columns, mesh, {"sigma": POSITIVE})


def _diamonds_shapes(columns):
    return {"b": columns["x"].shape[1:], "Intercept": (), "sigma": ()}


DIAMONDS = Model(
    "diamonds-diamonds", _diamonds_columns, _build_diamonds, _diamonds_shapes, _as_they_are
)

# Eight schools: a latent for each row


def schools_prior(params):
    return normal(params["mu"], 0.0, 5.0), half_cauchy(params["tau"], 5.0)


def schools_likelihood(params, rows):
    effect = params["mu"] + params["tau"] * params["theta_trans"]
    return normal(rows["y"], effect, rows["sigma"]) + normal(params["theta_trans"], 0.0, 1.0)


def _schools_columns(data):
    return {name: np.asarray(data[name], float) for name in ("y", "sigma")}


def _build_schools(columns, mesh):
    bijections = {"tau": POSITIVE}
    return rows_target(
        schools_prior, schools_likelihood, columns, mesh, bijections, local="theta_trans"
    )


def _schools_shapes(columns):
    return {"theta_trans": columns["y"].shape, "mu": (), "tau": ()}


def _schools_derived(draws):
    theta = draws["mu"][..., None] + draws["tau"][..., None] * draws["theta_trans"]
    return {"theta": theta, "mu": draws["mu"], "tau": draws["tau"]}


EIGHT_SCHOOLS = Model(
    "eight_schools-eight_schools_noncentered",
    _schools_columns,
    _build_schools,
    _schools_shapes,
    _schools_derived,
)

# An autoregression: each row holds its own lags


def autoregression_prior(params):
    return {
        "alpha": normal(params["alpha"], 0.0, 10.0),
        "beta": normal(params["beta"], 0.0, 10.0),
        "sigma": half_cauchy(params["sigma"], 2.5),
    }


def autoregression(params, rows):
    return normal(rows["y"], params["alpha"] + rows["lags"] @ params["beta"], params["sigma"])


def _autoregression_columns(data):
    y, order = np.asarray(data["y"], float), data["K"]
    lags = [y[order - k : len(y) - k] for k in range(1, order + 1)]
    return {"lags": np.column_stack(lags), "y": y[order:]}


def _build_autoregression(columns, mesh):
    return rows_target(autoregression_prior, autoregression, columns, mesh, {"sigma": POSITIVE})


def _autoregression_shapes(columns):
    return {"alpha": (), "beta": columns["lags"].shape[1:], "sigma": ()}


ARK = Model(
    "arK-arK", _autoregression_columns, _build_autoregression, _autoregression_shapes, _as_they_are
)

# A mixture of two normals


def mixture_prior(params):
    return {
        "mu": normal(params["mu"], 0.0, 2.0),
        "sigma": half_normal(params["sigma"], 2.0),
        "theta": beta_distribution.logpdf(params["theta"], 5.0, 5.0),
    }


def mixture(params, rows):
    y, theta = rows["y"], params["theta"]
    first = jnp.log(theta) + normal(y, params["mu"][0], params["sigma"][0])
    second = jnp.log1p(-theta) + normal(y, params["mu"][1], params["sigma"][1])
    return jnp.logaddexp(first, second)


def _mixture_columns(data):
    return {"y": np.asarray(data["y"], float)}


def _build_mixture(columns, mesh):
    bijections = {
        "mu": biject_to(constraints.ordered_vector),
        "sigma": POSITIVE,
        "theta": biject_to(constraints.unit_interval),
    }
    return rows_target(mixture_prior, mixture, columns, mesh, bijections)


def _mixture_shapes(columns):
    return {"mu": (2,), "sigma": (2,), "theta": ()}


MIXTURE = Model(
    "low_dim_gauss_mix-low_dim_gauss_mix",
    _mixture_columns,
    _build_mixture,
    _mixture_shapes,
    _as_they_are,
)
