"""Quantiles of the draws of all chains."""

import math

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import nan_columns, per_leaf
from gspmd_mcmc.diagnostics.ranks import has_nan, ordered
from gspmd_mcmc.tree import PyTree


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
        Like ``draws`` with leaves [...], in the unit of the draws; NaN where a draw is NaN, and of no
        draws.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"quantile: expected a probability in [0, 1], got {probability}.")
    return per_leaf(column_quantile, draws, probability=float(probability))


def column_quantile(x: jax.Array, probability: float) -> jax.Array:
    """Quantile [...] of draws [chains, draws, ...]; see `quantile`."""
    if not x.shape[1]:
        return nan_columns(x)
    in_order = ordered(x) if x.shape[1] > 1 else jnp.sort(x[:, 0], axis=0)
    place = (len(in_order) - 1) * probability
    share = place - math.floor(place)
    found = in_order[math.floor(place)]
    if share:  # and not else: an infinite draw next to it would give NaN
        above = in_order[math.ceil(place)]
        found = jnp.where(found == above, found, found + (above - found) * share)
    return jnp.where(has_nan(x), jnp.nan, found)
