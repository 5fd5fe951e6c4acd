"""Means, variances and R-hat of chains too long to keep: chunk by chunk, in the layout of the position.

    moments = init(position)
    for chunk in ...:                       # leaves [chains, draws of the chunk, ...]
        moments = update(moments, chunk)
    rhat(moments)

References
----------
Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
COMPSTAT (1982): the merge of the moments of two parts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import as_float, num_draws_of
from gspmd_mcmc.diagnostics.nested_rhat import check_superchains
from gspmd_mcmc.diagnostics.nested_rhat import from_moments as nested_from_moments
from gspmd_mcmc.diagnostics.rhat import chain_moments
from gspmd_mcmc.diagnostics.rhat import from_moments as rhat_from_moments
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
        Trees like the position, leaves [chains, ...]; squares are about the mean.
    """

    count: jax.Array
    mean: PyTree
    sum_of_squares: PyTree


def init(position: PyTree) -> Moments:
    """Return the moments of no draws, for a position with leaves [chains, ...], laid out as it is."""

    def zeros():
        return jax.tree.map(lambda x: as_float(jnp.zeros_like(x)), position)

    return Moments(count=jnp.zeros((), jnp.int32), mean=zeros(), sum_of_squares=zeros())


@jax.jit
def update(moments: Moments, chunk: PyTree) -> Moments:
    """Take in draws, leaves [chains, draws, ...]; chunks may differ in length.

    Raises
    ------
    ValueError
        If a leaf has not the shape [chains, draws, ...], or not as many draws as the others.
    """
    num_draws = num_draws_of(chunk)
    if not num_draws:
        return moments
    count = moments.count + num_draws

    def merge(mean, squares, x):
        new_mean, new_variance = chain_moments(as_float(x))
        share = num_draws / count.astype(mean.dtype)
        change = new_mean - mean
        between = change**2 * share * moments.count.astype(mean.dtype)
        return mean + change * share, squares + new_variance * (num_draws - 1) + between

    pairs = jax.tree.map(merge, moments.mean, moments.sum_of_squares, chunk)
    mean, squares = jax.tree.transpose(jax.tree.structure(chunk), jax.tree.structure((0, 0)), pairs)
    return Moments(count=count, mean=mean, sum_of_squares=squares)


def mean(moments: Moments) -> PyTree:
    """Mean over all draws of all chains, leaves [...]."""
    return jax.tree.map(lambda m: jnp.mean(m, axis=0), moments.mean)


def variance(moments: Moments) -> PyTree:
    """Variance over all draws of all chains together, leaves [...]; NaN before the second draw."""

    def pool(mean, squares):
        return total_variance(mean, squares, moments.count.astype(mean.dtype))

    return jax.tree.map(pool, moments.mean, moments.sum_of_squares)


def total_variance(mean: jax.Array, squares: jax.Array, count: jax.Array) -> jax.Array:
    """Variance [...] of all draws, from the means and sums of squares [chains, ...] of chains."""
    between = jnp.sum((mean - jnp.mean(mean, axis=0, keepdims=True)) ** 2, axis=0)
    freedom = len(mean) * count - 1
    return (jnp.sum(squares, axis=0) + count * between) / jnp.where(freedom > 0, freedom, jnp.nan)


def rhat(moments: Moments) -> PyTree:
    """Plain R-hat of whole chains, leaves [...]: between and within them, from means and variances.

    It is neither split nor rank-normalised, since both need the draws: chains that drift together and
    chains that differ in scale alone look fine, and it means nothing for tails without a variance. NaN
    for one chain and before the second draw.
    """
    return jax.tree.map(
        lambda m, v: rhat_from_moments(m, v, moments.count.astype(m.dtype)),
        moments.mean,
        _chain_variance(moments),
    )


def nested_rhat(moments: Moments, num_superchains: int) -> PyTree:
    """Nested R-hat, leaves [...], of chains grouped as in `diagnostics.nested_rhat.nested_rhat`."""
    check_superchains(moments.mean, num_superchains)
    return jax.tree.map(
        lambda m, v: nested_from_moments(m, v, num_superchains), moments.mean, _chain_variance(moments)
    )


def _chain_variance(moments: Moments) -> PyTree:
    freedom = jnp.maximum(moments.count - 1, 1)
    return jax.tree.map(lambda s: s / freedom.astype(s.dtype), moments.sum_of_squares)
