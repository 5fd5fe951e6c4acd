"""Means and variances of chains, one draw at a time, in the layout of the position.

References
----------
Welford, "Note on a method for calculating corrected sums of squares and products", Technometrics 4
(1962).
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


def variance(moments: Moments) -> PyTree:
    """Variance of each chain, leaves [chains, ...]; 0 before the second draw."""
    freedom = jnp.maximum(moments.count - 1, 1)
    return jax.tree.map(lambda s: s / freedom.astype(s.dtype), moments.sum_of_squares)
