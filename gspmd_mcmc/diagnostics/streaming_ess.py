"""Effective sample size of chains that are too long to store, by means of batches of doubling length.

    state = init(position)
    for chunk in ...:                       # leaves [chains, draws of the chunk, ...]
        state = update(state, chunk)
    ess(state)

Batches begin with one draw. When the last one is full, neighbors are merged in pairs, and from then on
batches are twice as long: between half of them and all are in use, for any length of run. Draws are
taken in one by one, so that the chunks do not change a bit of the result.

References
----------
Gupta and Vats, "Estimating Monte Carlo variance from multiple Markov chains", arXiv:2007.04229 (2020):
batches of several chains about the mean of all. Vats, Flegal and Jones, Biometrika 106 (2019): the
effective sample size.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics import streaming
from gspmd_mcmc.diagnostics.columns import as_float, num_draws_of
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True, eq=False)
class BatchMeans:
    """Batches of each chain so far; the one after the full ones is being filled."""

    moments: Moments  # of all draws
    means: PyTree  # of the batches, leaves [chains, batches, ...]
    length: jax.Array  # draws of a full batch, []
    num_full: jax.Array  # full batches, []
    num_partial: jax.Array  # draws in the batch that is being filled, []


@on_any_mesh
def init(position: PyTree, num_batches: int = 64) -> BatchMeans:
    """Return the state of no draws.

    Parameters
    ----------
    position
        Leaves [chains, ...]; the state is laid out likewise, and as large as ``num_batches`` of it.
    num_batches
        An even number, 4 or more. With more batches the estimate varies less, but they are shorter.
    """
    if num_batches < 4 or num_batches % 2:
        raise ValueError(f"num_batches={num_batches}: expected an even number, 4 or more.")

    def zeros(x):
        beside = jnp.expand_dims(as_float(jnp.zeros_like(x)), 1)
        return jnp.broadcast_to(beside, (x.shape[0], num_batches, *x.shape[1:]))

    return BatchMeans(
        moments=streaming.init(position),
        means=jax.tree.map(zeros, position),
        length=jnp.ones((), jnp.int32),
        num_full=jnp.zeros((), jnp.int32),
        num_partial=jnp.zeros((), jnp.int32),
    )


@partial(on_any_mesh, like=lambda out, state, chunk: state)
@jax.jit
def update(state: BatchMeans, chunk: PyTree) -> BatchMeans:
    """Take in draws, leaves [chains, draws, ...]; chunks may differ in length.

    Raises
    ------
    ValueError
        If a leaf has not the shape [chains, draws, ...], or not as many draws as the others.
    """

    def take(i, state):
        draw = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1), chunk)
        return _take(state, draw)

    num_draws = num_draws_of(chunk)
    return jax.lax.fori_loop(0, num_draws, take, state) if num_draws else state


def _take(state: BatchMeans, draw: PyTree) -> BatchMeans:
    """Take in one draw, leaves [chains, 1, ...]."""
    count = state.num_partial + 1

    def put(means, x):
        mean = jax.lax.dynamic_slice_in_dim(means, state.num_full, 1, axis=1)
        mean = mean + (as_float(x) - mean) / count.astype(mean.dtype)
        return jax.lax.dynamic_update_slice_in_dim(means, mean, state.num_full, axis=1)

    is_full = count == state.length
    taken = replace(
        state,
        moments=streaming.update(state.moments, draw),
        means=jax.tree.map(put, state.means, draw),
        num_full=state.num_full + is_full,
        num_partial=jnp.where(is_full, 0, count),
    )
    num_batches = jax.tree.leaves(taken.means)[0].shape[1]
    return jax.lax.cond(taken.num_full == num_batches, _merge, lambda same: same, taken)


def _merge(state: BatchMeans) -> BatchMeans:
    """Merge neighbors into half as many batches of twice the length."""

    def merge(means):
        pairs = means.reshape(means.shape[0], -1, 2, *means.shape[2:])
        half = jnp.mean(pairs, axis=2)
        return jnp.concatenate([half, jnp.zeros_like(half)], axis=1)

    means = jax.tree.map(merge, state.means)
    return replace(state, means=means, length=2 * state.length, num_full=state.num_full // 2)


@on_any_mesh
def ess(state: BatchMeans) -> PyTree:
    """Effective sample size for the mean, leaves [...]: all draws times their variance over `_spread`.

    It is too large while batches are not much longer than the autocorrelation time: if the run is twice
    as long, it should double. The number of draws if all are equal; NaN before the second batch.
    """

    def size(mean, squares, means):
        count = state.moments.count.astype(mean.dtype)
        variance = streaming.total_variance(mean, squares, count)
        spread = _spread(state, means)
        num_draws = count * len(mean)
        is_constant = (variance == 0) & (spread == 0)
        return jnp.where(is_constant, num_draws, num_draws * variance / spread)

    return jax.tree.map(size, state.moments.mean, state.moments.sum_of_squares, state.means)


@on_any_mesh
def mcse(state: BatchMeans) -> PyTree:
    """Monte Carlo standard error of the mean, leaves [...], in the unit of the draws."""

    def error(means):
        num_draws = state.moments.count.astype(means.dtype) * len(means)
        return jnp.sqrt(_spread(state, means) / num_draws)

    return jax.tree.map(error, state.means)


def _spread(state: BatchMeans, means: jax.Array) -> jax.Array:
    """Variance [...] of the mean of all draws, times their number: of full batches about their mean."""
    shape = (1, means.shape[1], *[1] * (means.ndim - 2))
    is_full = (jnp.arange(means.shape[1]) < state.num_full).reshape(shape)
    number = (state.num_full * means.shape[0]).astype(means.dtype)
    # Relative to the first batch, so that equal means cancel exactly.
    apart = jnp.where(is_full, means - means[:1, :1], 0.0)
    mean = jnp.sum(apart, axis=(0, 1), keepdims=True) / number
    squares = jnp.sum(jnp.where(is_full, apart - mean, 0.0) ** 2, axis=(0, 1))
    freedom = jnp.where(state.num_full > 1, number - 1, jnp.nan)
    return state.length.astype(means.dtype) * squares / freedom
