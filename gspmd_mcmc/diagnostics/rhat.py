"""R-hat, plain and nested: whether chains agree.

References
----------
Vehtari, Gelman, Simpson, Carpenter and Bürkner, "Rank-normalization, folding, and localization: an
improved R-hat for assessing convergence of MCMC", Bayesian Analysis 16 (2021), section 4. Margossian,
Hoffman, Sountsov, Riou-Durand, Vehtari and Gelman, "Nested R-hat: assessing the convergence of Markov
chain Monte Carlo when running many short chains", Bayesian Analysis (2024), equations 4 to 8.
"""

from collections.abc import Callable
from functools import partial
from numbers import Integral

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import needs_draws, per_leaf
from gspmd_mcmc.diagnostics.ranks import folded, has_nan, scored, split
from gspmd_mcmc.tree import PyTree

MOST_RHAT = 1.01  # of chains that have converged
LEAST_DRAWS = 4
MANY_CHAINS = 32
LEAST_TO_SETTLE = 100  # draws of a chain from which R-hat is no longer noise, and a late arrival shows
LONGEST_CORRELATION = 10  # draws of a short chain that may be worth only one
MOST_NOISE = 4.0  # standard errors


def rhat(draws: PyTree) -> PyTree:
    """R-hat of each column: split, rank-normalized, the larger of bulk and folded.

    It is 1 if all chains, and the halves of each, have one distribution, and under 1.01 for chains that
    have converged. The folded form, of distances from the median, detects chains that differ only in
    scale.

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...].

    Returns
    -------
    tree
        Like ``draws`` with leaves [...]. NaN where a draw is NaN, where all draws are equal, and for
        fewer than four draws; infinite where every half chain stays at its own value. Infinite draws
        are ranked like any other. A single chain is judged by its halves.
    """
    return per_leaf(column_rhat, draws)


@needs_draws(LEAST_DRAWS)
def column_rhat(x: jax.Array) -> jax.Array:
    """R-hat [...] of draws [chains, draws, ...]; see `rhat`."""
    return _larger_of_scores(scale_reduction, x)


def column_rhat_beyond_noise(x: jax.Array) -> jax.Array:
    """R-hat [...] of draws [chains, draws, ...] where chains disagree, 1 where they are only short.

    The mean of a short chain is noisy: if t draws are worth one, R-hat of N draws is about 1 + (t - 1)
    / N even where chains agree. This is forgiven where chains differ from each other hardly more than
    the halves of each chain do, and the halves show no common drift: any disagreement is then smaller
    than the Monte Carlo error. With fewer than 32 chains or 100 draws, too few to tell, it is `rhat`.
    """
    if len(x) < MANY_CHAINS or x.shape[1] < LEAST_TO_SETTLE:
        return column_rhat(x)
    return _larger_of_scores(partial(_beyond_noise, num_draws=x.shape[1]), x)


def _larger_of_scores(function: Callable, x: jax.Array) -> jax.Array:
    """Return the larger of ``function`` of the normal scores of split chains, bulk and folded."""
    halves = split(x)
    bulk = scored(halves)
    tail = scored(folded(halves, bulk.ordered))
    # Draws of two values have one distance from the median, and then no folded R-hat.
    largest = jnp.fmax(function(bulk.scores), function(tail.scores))
    return jnp.where(has_nan(x), jnp.nan, largest)


def _beyond_noise(x: jax.Array, num_draws: int) -> jax.Array:
    """R-hat [...] of half chains [2 x chains, ...], 1 where their noise explains it."""
    found = scale_reduction(x)
    means = jnp.mean(x, axis=1)
    change, total = means[1::2] - means[::2], means[1::2] + means[::2]
    own = jnp.var(change, axis=0, ddof=1)
    # The log of the ratio of two variances of n means has a variance of 4 / (n - 1).
    disagreement = jnp.log(jnp.var(total, axis=0, ddof=1) / own) * jnp.sqrt(len(change) - 1) / 2
    drift = jnp.mean(change, axis=0) / jnp.sqrt(own / len(change))
    is_noise = (disagreement <= MOST_NOISE) & (jnp.abs(drift) <= MOST_NOISE)
    is_noise &= found <= 1 + LONGEST_CORRELATION / num_draws
    return jnp.where(is_noise, 1, found)


def scale_reduction(x: jax.Array) -> jax.Array:
    """Plain R-hat [...] of draws [chains, draws, ...] as they are."""
    mean, variance = chain_moments(x)
    return rhat_of_moments(mean, variance, x.shape[1])


def rhat_of_moments(mean: jax.Array, variance: jax.Array, num_draws) -> jax.Array:
    """R-hat [...] of the means and variances [chains, ...] of chains of ``num_draws`` draws.

    sqrt((N - 1) / N + B / W): W is the mean of the variances of chains, B the variance of their means
    (Gelman and Rubin 1992, as in Stan).
    """
    within = jnp.mean(variance, axis=0)
    between = jnp.var(mean, axis=0, ddof=1) if len(mean) > 1 else jnp.full_like(within, jnp.nan)
    return jnp.sqrt(between / within + (num_draws - 1) / num_draws)


def chain_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance [chains, ...] of draws [chains, draws, ...].

    They are taken about the first draw, so that a chain that does not move has a variance of exactly 0.
    """
    first = x[:, :1]
    mean = jnp.mean(x - first, axis=1, keepdims=True)
    variance = jnp.sum((x - first - mean) ** 2, axis=1) / max(x.shape[1] - 1, 1)
    return (first + mean)[:, 0], variance


# Nested R-hat


def nested_rhat(draws: PyTree, num_superchains: int) -> PyTree:
    """Nested R-hat of the draws, which judges many short chains.

    A superchain is a group of chains with one starting point. Plain R-hat of chains of few draws is
    large however well they mix, because the mean of a short chain is noisy; the mean of a superchain of
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
        Like ``draws`` with leaves [...]. With one chain in each superchain it is sqrt(1 + B / W), R-hat
        without its (N - 1) / N.

    Raises
    ------
    ValueError
        If there are fewer than two superchains, or they do not have equal numbers of chains.
    """
    check_superchains(draws, num_superchains)
    return per_leaf(column_nested_rhat, draws, num_superchains=num_superchains)


def rank_nested_rhat(draws: PyTree, num_superchains: int) -> PyTree:
    """Nested R-hat of normal scores of split chains, the larger of bulk and folded.

    As `nested_rhat`, for draws with heavy tails and chains that differ in scale; NaN for fewer than
    four draws.
    """
    check_superchains(draws, num_superchains)
    return per_leaf(column_rank_nested_rhat, draws, num_superchains=num_superchains)


@needs_draws(1)
def column_nested_rhat(x: jax.Array, num_superchains: int) -> jax.Array:
    """Nested R-hat [...] of draws [chains, draws, ...]; see `nested_rhat`."""
    mean, variance = chain_moments(x)
    return nested_rhat_of_moments(mean, variance, num_superchains)


@needs_draws(LEAST_DRAWS)
def column_rank_nested_rhat(x: jax.Array, num_superchains: int) -> jax.Array:
    """Nested R-hat [...] of ranks of draws [chains, draws, ...]; see `rank_nested_rhat`."""
    return _larger_of_scores(partial(column_nested_rhat, num_superchains=num_superchains), x)


def nested_rhat_of_moments(mean: jax.Array, variance: jax.Array, num_superchains: int) -> jax.Array:
    """Nested R-hat [...] of the means and variances [chains, ...] of chains.

    sqrt(1 + B / W): B is the variance of the means of superchains; W is the mean over superchains of
    the variance of the means of their chains plus the mean of the variances of their chains.
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
