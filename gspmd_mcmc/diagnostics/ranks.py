"""Split chains, normal scores of ranks, and folded draws, column by column.

References
----------
Vehtari, Gelman, Simpson, Carpenter and Bürkner, "Rank-normalization, folding, and localization: an
improved R-hat for assessing convergence of MCMC", Bayesian Analysis 16 (2021).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri


class Scored(NamedTuple):
    """Draws of each column in order of size, and by rank."""

    ordered: jax.Array  # of all chains, from least to largest, [draws x chains, ...]
    scores: jax.Array  # normal scores of the draws' ranks, [chains, draws, ...]


def split(x: jax.Array) -> jax.Array:
    """Split each chain in two, [2 x chains, draws // 2, ...], without a draw in the middle."""
    num_chains, num_draws = x.shape[:2]
    half = num_draws // 2
    if num_draws % 2:
        x = jnp.concatenate([x[:, :half], x[:, half + 1 :]], axis=1)
    return x.reshape(2 * num_chains, half, *x.shape[2:])


def merged(x: jax.Array) -> jax.Array:
    """Put the draws of all chains in one row, [draws x chains, ...].

    Chains are the inner axis: if they lie over devices, XLA gathers them here, once. With chains as the
    outer axis the row would lie over devices, and each sort and sum would communicate.
    """
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])


def scored(x: jax.Array) -> Scored:
    """Order draws [chains, draws, ...], and replace each by the normal score of its rank.

    Ranks are among the draws of all chains; equal draws share the mean of their ranks. The score of
    rank r of S is Φ⁻¹((r - 3/8) / (S + 1/4)) (Blom 1958).
    """
    row = merged(x)
    place = jax.lax.broadcasted_iota(jnp.int32, row.shape, 0)
    ordered, origin = jax.lax.sort((row, place), dimension=0, num_keys=1, is_stable=False)
    scores = _put_back(_normal_score(_mean_places(ordered), len(row), x.dtype), origin)
    return Scored(ordered, jnp.swapaxes(scores.reshape(-1, len(x), *x.shape[2:]), 0, 1))


def ordered(x: jax.Array) -> jax.Array:
    """Put the draws [chains, draws, ...] of each column in order of size, [draws x chains, ...].

    An even number of draws is sorted as the scores of its halves need it: a program that has both sorts
    once.
    """
    return jnp.sort(merged(x), axis=0) if x.shape[1] % 2 else scored(split(x)).ordered


def _put_back(values: jax.Array, places: jax.Array) -> jax.Array:
    """Move values [places, ...], column by column, to the places that are given.

    Mapped over columns it stays on the devices that hold them; a scatter over columns would gather.
    """

    def put(column, to):
        zeros = jnp.zeros_like(column)
        return zeros.at[to].set(column, unique_indices=True, mode="promise_in_bounds")

    for _ in values.shape[1:]:
        put = jax.vmap(put, in_axes=1, out_axes=1)
    return put(values, places)


def _mean_places(ordered: jax.Array) -> jax.Array:
    """Twice the place, from 0, of each ordered value; equal values have their mean place."""
    place = jax.lax.broadcasted_iota(jnp.int32, ordered.shape, 0)
    differs = ordered[1:] != ordered[:-1]
    border = jnp.ones_like(differs, shape=(1, *ordered.shape[1:]))
    first = jnp.concatenate([border, differs]) * place
    last = jnp.where(jnp.concatenate([differs, border]), place, len(ordered))
    return jax.lax.cummax(first, axis=0) + jax.lax.cummin(last, axis=0, reverse=True)


def _normal_score(twice_place: jax.Array, size: int, dtype) -> jax.Array:
    """Return normal scores, from the nearer end, as a probability near 1 has few digits."""
    from_end = jnp.minimum(twice_place, 2 * (size - 1) - twice_place).astype(dtype)
    score = ndtri((from_end / 2 + 5 / 8) / (size + 1 / 4))
    return jnp.where(twice_place < size, score, -score)


def folded(x: jax.Array, ordered: jax.Array) -> jax.Array:
    """Distance of draws [chains, draws, ...] from the median of all chains."""
    middle = len(ordered) // 2
    low = ordered[middle] if len(ordered) % 2 else ordered[middle - 1]
    return jnp.abs(x - ((low + ordered[middle]) / 2)[None, None])


def has_nan(x: jax.Array) -> jax.Array:
    """Tell which columns [...] of draws [chains, draws, ...] hold a NaN."""
    return jnp.isnan(x).any(axis=(0, 1))
