"""Monte Carlo standard errors of means and standard deviations.

References
----------
Vehtari, Gelman, Simpson, Carpenter and Bürkner, Bayesian Analysis 16 (2021). The error of the standard
deviation follows from that of the variance by the delta method, with the effective size of squares.
"""

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import nan_columns, needs_draws, per_leaf
from gspmd_mcmc.diagnostics.ess import column_ess_mean, column_ess_sd, in_own_unit
from gspmd_mcmc.diagnostics.rhat import LEAST_DRAWS
from gspmd_mcmc.tree import PyTree


def mcse_mean(draws: PyTree) -> PyTree:
    """Monte Carlo standard error of the mean of each column: sd / sqrt(`ess_mean`).

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...].

    Returns
    -------
    tree
        Like ``draws`` with leaves [...], in the unit of the draws. NaN where a draw is not finite and
        for fewer than four draws; 0 where all are equal.
    """
    return per_leaf(column_mcse_mean, draws)


def mcse_sd(draws: PyTree) -> PyTree:
    """Monte Carlo standard error of the standard deviation; arguments and result as of `mcse_mean`.

    The effective sample size is that of squared distances from the mean (`ess_sd`). arviz-stats takes
    that of the draws, which is too large where chains are antithetic.
    """
    return per_leaf(column_mcse_sd, draws)


@needs_draws(LEAST_DRAWS)
def column_mcse_mean(x: jax.Array, size: jax.Array | None = None) -> jax.Array:
    """Monte Carlo error [...] of the mean of draws [chains, draws, ...]; see `mcse_mean`.

    ``size`` is `column_ess_mean`, where it is known.
    """
    return column_sd(x) / jnp.sqrt(column_ess_mean(x) if size is None else size)


@needs_draws(LEAST_DRAWS)
def column_mcse_sd(x: jax.Array, size: jax.Array | None = None) -> jax.Array:
    """Monte Carlo error [...] of the sd of draws [chains, draws, ...]; see `mcse_sd`.

    ``size`` is `column_ess_sd`, where it is known.
    """
    size = column_ess_sd(x) if size is None else size
    centered, unit = in_own_unit(x)
    variance = jnp.mean(centered**2, axis=(0, 1))
    of_squares = jnp.mean((centered**2 - variance[None, None]) ** 2, axis=(0, 1))
    is_constant = variance == 0
    error = jnp.sqrt(of_squares / size / jnp.where(is_constant, 1, variance)) / 2
    return error * unit


@needs_draws(1)
def column_mean(x: jax.Array) -> jax.Array:
    """Return the mean [...] over all chains of draws [chains, draws, ...]."""
    return jnp.mean(x - x[:1, :1], axis=(0, 1)) + x[0, 0]


def column_sd(x: jax.Array) -> jax.Array:
    """Return the standard deviation [...] over all chains of draws [chains, draws, ...]."""
    freedom = x.shape[0] * x.shape[1] - 1
    if freedom < 1:
        return nan_columns(x)
    centered, unit = in_own_unit(x)
    return jnp.sqrt(jnp.sum(centered**2, axis=(0, 1)) / freedom) * unit
