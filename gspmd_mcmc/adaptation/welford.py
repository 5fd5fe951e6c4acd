"""Streaming means and variances of chains, leaf by leaf, in the layout of the position.

References
----------
Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4
(1962).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of each chain so far.

    Attributes
    ----------
    count
        Draws of a chain, [].
    mean, sum_of_squares
        Trees like the positions, leaves [chains, ...]; squares are about the mean.
    """

    count: jax.Array
    mean: PyTree
    sum_of_squares: PyTree


def init(positions: PyTree) -> Moments:
    """Return the moments of no draws, for positions with leaves [chains, ...]."""
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), positions
    )
    return Moments(count=jnp.zeros(()), mean=zeros, sum_of_squares=zeros)


def update(moments: Moments, positions: PyTree) -> Moments:
    """Take in one draw of every chain."""
    count = moments.count + 1
    mean = jax.tree.map(lambda m, x: m + (x - m) / count.astype(m.dtype), moments.mean, positions)
    squares = jax.tree.map(
        lambda s, m, new, x: s + (x - m) * (x - new),
        moments.sum_of_squares,
        moments.mean,
        mean,
        positions,
    )
    return Moments(count=count, mean=mean, sum_of_squares=squares)


def pooled_variance(moments: Moments, agreement: float = 1.2) -> PyTree:
    """Variance of the position over all chains, without the chain axis.

    Element by element it is the mean of the chains' own variances (within), to which the variance of
    their means (between) is added where the chains agree: where the potential scale reduction
    sqrt((within + between) / within) is under ``agreement``. A stuck chain, far from the others, so
    does not stretch the metric for the rest.
    """
    freedom = jnp.maximum(moments.count - 1, 1)

    def pool(mean, squares):
        within = jnp.mean(squares, axis=0) / freedom.astype(squares.dtype)
        spread = mean - jnp.mean(mean, axis=0, keepdims=True)
        between = jnp.sum(spread**2, axis=0) / max(mean.shape[0] - 1, 1)
        return jnp.where(within + between < agreement**2 * within, within + between, within)

    return jax.tree.map(pool, moments.mean, moments.sum_of_squares)


def regularised_variance(moments: Moments) -> PyTree:
    """Shrink the pooled variance towards 1e-3, by as much as five draws weigh, as Stan does."""
    chains = jax.tree.leaves(moments.mean)[0].shape[0]
    num_draws = moments.count * chains
    keep = num_draws / (num_draws + 5.0)
    return jax.tree.map(
        lambda v: keep.astype(v.dtype) * v + (1 - keep.astype(v.dtype)) * 1e-3,
        pooled_variance(moments),
    )
