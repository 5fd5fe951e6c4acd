"""Quantiles, and all statistics of a summary in one program, which sorts the draws once."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.chance import column_chance
from gspmd_mcmc.diagnostics.columns import needs_draws, per_leaf
from gspmd_mcmc.diagnostics.ess import column_sizes
from gspmd_mcmc.diagnostics.mcse import column_mcse_mean, column_mcse_sd, column_mean, column_sd
from gspmd_mcmc.diagnostics.ranks import has_nan, ordered
from gspmd_mcmc.diagnostics.rhat import column_rhat, column_rhat_beyond_noise
from gspmd_mcmc.tree import PyTree

COPIES = 28  # see `per_leaf`


def quantile(draws: PyTree, probability: float) -> PyTree:
    """Quantile of each column, interpolated between the two draws next to it.

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...].
    probability
        In [0, 1].

    Returns
    -------
    tree
        Like ``draws`` with leaves [...], in the unit of the draws; NaN where a draw is NaN, or there is
        none.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"quantile: expected a probability in [0, 1], got {probability}.")
    return per_leaf(column_quantile, draws, probability=float(probability))


@needs_draws(1)
def column_quantile(x: jax.Array, probability: float) -> jax.Array:
    """Quantile [...] of draws [chains, draws, ...]; see `quantile`."""
    in_order = ordered(x) if x.shape[1] > 1 else jnp.sort(x[:, 0], axis=0)
    place = (len(in_order) - 1) * probability
    share = place - math.floor(place)
    found = in_order[math.floor(place)]
    if share:  # otherwise an infinite draw next to it would give NaN
        above = in_order[math.ceil(place)]
        found = jnp.where(found == above, found, found + (above - found) * share)
    return jnp.where(has_nan(x), jnp.nan, found)


class Statistics(NamedTuple):
    """Statistics of columns, each a tree like the draws with leaves [...]; q5 and q95 are quantiles.

    ``spacings`` is the standard deviation over the spacing of floating-point numbers near the mean;
    infinite for draws that are all equal.
    """

    mean: PyTree
    sd: PyTree
    mcse_mean: PyTree
    mcse_sd: PyTree
    q5: PyTree
    q95: PyTree
    ess_bulk: PyTree
    ess_tail: PyTree
    rhat: PyTree
    rhat_beyond_noise: PyTree
    rhat_by_chance: PyTree
    rhat_p_value: PyTree
    spacings: PyTree


def statistics(draws: PyTree) -> Statistics:
    """Compute the `Statistics` of draws, a tree with leaves [chains, draws, ...]."""
    found = per_leaf(column_statistics, draws, copies=COPIES)
    inner = jax.tree.structure(Statistics(*range(len(Statistics._fields))))
    return jax.tree.transpose(jax.tree.structure(draws), inner, found)


def column_statistics(x: jax.Array) -> Statistics:
    """Statistics [...] of draws [chains, draws, ...]."""
    mean, sd, sizes = column_mean(x), column_sd(x), column_sizes(x)
    rhat = column_rhat(x)
    chance = column_chance(x, sizes, rhat)
    spacing = jnp.abs(mean) * jnp.finfo(x.dtype).eps
    return Statistics(
        mean=mean,
        sd=sd,
        mcse_mean=column_mcse_mean(x, sizes.mean),
        mcse_sd=column_mcse_sd(x, sizes.sd),
        q5=column_quantile(x, 0.05),
        q95=column_quantile(x, 0.95),
        ess_bulk=sizes.bulk,
        ess_tail=sizes.tail,
        rhat=rhat,
        rhat_beyond_noise=column_rhat_beyond_noise(x),
        rhat_by_chance=chance.over,
        rhat_p_value=chance.as_large,
        spacings=jnp.where(sd > 0, sd / spacing, jnp.inf),
    )
