"""Means and variances of chains, by single draws or by chunks, in the layout of the position.

References
----------
Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4
(1962): one draw at a time. Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", COMPSTAT (1982): the merge of the moments of two parts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc.tree import Pad, PyTree, like_position, pytree


@pytree
@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of each chain so far.

    Attributes
    ----------
    count
        Draws of a chain, [].
    mean, sum_of_squares
        Trees like the positions, leaves [chains, ...], float32 at least; squares are about the mean.
    """

    count: jax.Array
    mean: PyTree = like_position(has_chains=True, pad=Pad.STAYS)
    sum_of_squares: PyTree = like_position(has_chains=True, pad=Pad.ZERO)


def init(positions: PyTree) -> Moments:
    """Return the moments of no draws, for positions with leaves [chains, ...], laid out as they are."""

    def zeros():
        return jax.tree.map(
            lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, "float32")), positions
        )

    return Moments(count=jnp.zeros((), jnp.int32), mean=zeros(), sum_of_squares=zeros())


def update(moments: Moments, positions: PyTree) -> Moments:
    """Take in one draw of every chain, leaves [chains, ...]."""
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


def update_many(moments: Moments, draws: PyTree) -> Moments:
    """Take in draws of every chain, leaves [chains, draws, ...] with at least one draw."""
    num_draws = jax.tree.leaves(draws)[0].shape[1]
    count = moments.count + num_draws

    def merge(mean, squares, x):
        new_mean, new_squares = _mean_and_squares(x.astype(mean.dtype))
        share = num_draws / count.astype(mean.dtype)
        change = new_mean - mean
        between = change**2 * share * moments.count.astype(mean.dtype)
        return mean + change * share, squares + new_squares + between

    pairs = jax.tree.map(merge, moments.mean, moments.sum_of_squares, draws)
    mean, squares = jax.tree.transpose(jax.tree.structure(draws), jax.tree.structure((0, 0)), pairs)
    return Moments(count=count, mean=mean, sum_of_squares=squares)


def variance(moments: Moments) -> PyTree:
    """Variance of each chain, leaves [chains, ...]; 0 before the second draw."""
    freedom = jnp.maximum(moments.count - 1, 1)
    return jax.tree.map(lambda s: s / freedom.astype(s.dtype), moments.sum_of_squares)


def _mean_and_squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and sum of squares about it, [chains, ...], of draws [chains, draws, ...].

    They are taken about the first draw, so that the squares of a chain that does not move are exactly
    0.
    """
    first = x[:, :1]
    mean = jnp.mean(x - first, axis=1, keepdims=True)
    squares = jnp.sum((x - first - mean) ** 2, axis=1)
    return (first + mean)[:, 0], squares
