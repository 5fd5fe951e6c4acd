"""Nested R-hat: convergence of many short chains, in groups that start at one point each.

References
----------
Margossian, Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman, "Nested R-hat: assessing the convergence
of Markov chain Monte Carlo when running many short chains", Bayesian Analysis (2024), equations 4 to 8.
"""

from numbers import Integral

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import nan_columns, per_leaf
from gspmd_mcmc.diagnostics.ranks import folded, has_nan, scored, split
from gspmd_mcmc.diagnostics.rhat import LEAST_DRAWS, chain_moments
from gspmd_mcmc.tree import PyTree


def nested_rhat(draws: PyTree, num_superchains: int) -> PyTree:
    """Nested R-hat of the draws as they are.

    A superchain is a group of chains with one starting point. Plain R-hat of chains of few draws is
    large however well they mix, since the mean of a short chain is noisy; the mean of a superchain of
    many chains is not.

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...], one draw or more; chains of a superchain follow one
        another.
    num_superchains
        Two or more; it divides the number of chains.

    Returns
    -------
    tree
        Like ``draws`` with leaves [...]. With one chain in each superchain it is
        sqrt(1 + B / W), R-hat without its (N - 1) / N.

    Raises
    ------
    ValueError
        If superchains are fewer than two, or not of equal numbers of chains.
    """
    check_superchains(draws, num_superchains)
    return per_leaf(column_nested_rhat, draws, num_superchains=num_superchains)


def rank_nested_rhat(draws: PyTree, num_superchains: int) -> PyTree:
    """Nested R-hat of split chains' normal scores of ranks, the larger of bulk and folded.

    As `nested_rhat`, for draws with heavy tails and chains that differ in scale. Four draws or more;
    NaN for fewer.
    """
    check_superchains(draws, num_superchains)
    return per_leaf(column_rank_nested_rhat, draws, num_superchains=num_superchains)


def column_nested_rhat(x: jax.Array, num_superchains: int) -> jax.Array:
    """Nested R-hat [...] of draws [chains, draws, ...]; see `nested_rhat`."""
    if not x.shape[1]:
        return nan_columns(x)
    mean, variance = chain_moments(x)
    return from_moments(mean, variance, num_superchains)


def column_rank_nested_rhat(x: jax.Array, num_superchains: int) -> jax.Array:
    """Nested R-hat [...] of ranks of draws [chains, draws, ...]; see `rank_nested_rhat`."""
    if x.shape[1] < LEAST_DRAWS:
        return nan_columns(x)
    halves = split(x)
    bulk = scored(halves)
    tail = scored(folded(halves, bulk.ordered))
    found = [column_nested_rhat(s, num_superchains) for s in (bulk.scores, tail.scores)]
    return jnp.where(has_nan(x), jnp.nan, jnp.fmax(*found))


def from_moments(mean: jax.Array, variance: jax.Array, num_superchains: int) -> jax.Array:
    """Nested R-hat [...] of the means and variances [chains, ...] of chains.

    sqrt(1 + B / W): B is the variance of superchains' means; W the mean over superchains of the
    variance of their chains' means plus the mean of their chains' variances.
    """
    mean, variance = (x.reshape(num_superchains, -1, *x.shape[1:]) for x in (mean, variance))
    between = jnp.var(jnp.mean(mean, axis=1), axis=0, ddof=1)
    among_chains = jnp.var(mean, axis=1, ddof=1) if mean.shape[1] > 1 else 0.0
    within = jnp.mean(among_chains + jnp.mean(variance, axis=1), axis=0)
    return jnp.sqrt(1 + between / within)


def check_superchains(draws: PyTree, num_superchains: int) -> None:
    """Raise if the chains, axis 0 of every leaf, do not make equal superchains, two or more."""
    if not isinstance(num_superchains, Integral) or isinstance(num_superchains, bool):
        raise TypeError(f"num_superchains: expected an integer, got {num_superchains!r}")
    numbers = {x.shape[0] for x in jax.tree.leaves(draws) if x.shape}
    uneven = [n for n in sorted(numbers) if num_superchains < 2 or n % num_superchains]
    if uneven:
        raise ValueError(
            f"num_superchains={num_superchains} with {uneven[0]} chains: expected two superchains or "
            "more of equally many chains. Choose a divisor of the number of chains."
        )
