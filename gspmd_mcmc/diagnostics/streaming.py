"""Means, variances and R-hat of chains too long to keep: chunk by chunk, in the layout of the position.

    moments = init(position)
    for chunk in ...:                       # leaves [chains, draws of the chunk, ...]
        moments = update(moments, chunk)
    rhat(moments)

The moments of parts are merged in `gspmd_mcmc.moments`.
"""

from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc import moments as chain_moments
from gspmd_mcmc.diagnostics.columns import as_float, num_draws_of
from gspmd_mcmc.diagnostics.rhat import check_superchains, nested_rhat_of_moments, rhat_of_moments
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.tree import PyTree


@on_any_mesh
def init(position: PyTree) -> Moments:
    """Return the moments of no draws, for a position with leaves [chains, ...], laid out as it is."""
    return chain_moments.init(jax.tree.map(lambda x: as_float(jnp.zeros_like(x)), position))


@partial(on_any_mesh, like=lambda out, moments, chunk: moments)
@jax.jit
def update(moments: Moments, chunk: PyTree) -> Moments:
    """Take in draws, leaves [chains, draws, ...]; chunks may differ in length.

    Raises
    ------
    ValueError
        If a leaf has not the shape [chains, draws, ...], or not as many draws as the others.
    """
    return chain_moments.update_many(moments, chunk) if num_draws_of(chunk) else moments


@on_any_mesh
def mean(moments: Moments) -> PyTree:
    """Mean over all draws of all chains, leaves [...]."""
    return jax.tree.map(lambda m: jnp.mean(m, axis=0), moments.mean)


@on_any_mesh
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


@on_any_mesh
def rhat(moments: Moments) -> PyTree:
    """Plain R-hat of whole chains, leaves [...]: between and within them, from means and variances.

    It is neither split nor rank-normalized, since both need the draws: it misses chains that drift
    together and chains that differ only in scale, and means nothing where there is no variance. NaN for
    one chain and before the second draw.
    """
    return jax.tree.map(
        lambda m, v: rhat_of_moments(m, v, moments.count.astype(m.dtype)),
        moments.mean,
        chain_moments.variance(moments),
    )


@on_any_mesh
def nested_rhat(moments: Moments, num_superchains: int) -> PyTree:
    """Nested R-hat, leaves [...], of chains grouped as in `gspmd_mcmc.diagnostics.rhat.nested_rhat`."""
    check_superchains(moments.mean, num_superchains)
    return jax.tree.map(
        lambda m, v: nested_rhat_of_moments(m, v, num_superchains),
        moments.mean,
        chain_moments.variance(moments),
    )
