"""Potential scale reduction, which tells whether chains agree."""

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import nan_columns, per_leaf
from gspmd_mcmc.diagnostics.ranks import folded, has_nan, scored, split
from gspmd_mcmc.tree import PyTree

LEAST_DRAWS = 4
MANY_CHAINS = 32
LEAST_TO_SETTLE = 100  # draws of a chain from which on R-hat needs no excuse, and a start stands out
LONGEST_CORRELATION = 10  # draws, in which those of a short chain may be taken for one
MOST_NOISE = 4.0  # standard errors


def rhat(draws: PyTree) -> PyTree:
    """R-hat of each column: split, rank-normalised, and the larger of bulk and folded.

    1 if chains, and the halves of each, are of one distribution. Chains that have converged are under
    1.01. The folded form, of distances from the median, sees chains that differ in scale alone.

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...].

    Returns
    -------
    tree
        Like ``draws`` with leaves [...]. NaN where a draw is NaN, where all draws are equal, and for
        fewer than four draws; infinite where every half chain stays at a value of its own. Infinite
        draws are ranked as any other. A single chain is judged by its halves.

    References
    ----------
    Vehtari, Gelman, Simpson, Carpenter and Bürkner, Bayesian Analysis 16 (2021), section 4.
    """
    return per_leaf(column_rhat, draws)


def column_rhat(x: jax.Array) -> jax.Array:
    """R-hat [...] of draws [chains, draws, ...]; see `rhat`."""
    if x.shape[1] < LEAST_DRAWS:
        return nan_columns(x)
    halves = split(x)
    bulk = scored(halves)
    tail = scored(folded(halves, bulk.ordered))
    # Draws of two values have one distance from the median, and then no folded R-hat.
    largest = jnp.fmax(scale_reduction(bulk.scores), scale_reduction(tail.scores))
    return jnp.where(has_nan(x), jnp.nan, largest)


def column_rhat_beyond_noise(x: jax.Array) -> jax.Array:
    """R-hat [...] of draws [chains, draws, ...] where chains disagree, and 1 where they are but short.

    The mean of a short chain is noisy: of t draws that are worth one, R-hat of N draws is about
    1 + (t - 1) / N, however well chains agree. So much is forgiven where chains differ hardly more from
    each other than each, in its halves, from itself, and the halves show no common drift. Then what
    disagreement there may be is less than the Monte Carlo error that ESS tells of. Of under 32 chains
    or 100 draws, too few to tell, it is `rhat`.
    """
    if len(x) < MANY_CHAINS or x.shape[1] < LEAST_TO_SETTLE:
        return column_rhat(x)
    halves = split(x)
    bulk = scored(halves)
    tail = scored(folded(halves, bulk.ordered))
    largest = jnp.fmax(*(_beyond_noise(s.scores, x.shape[1]) for s in (bulk, tail)))
    return jnp.where(has_nan(x), jnp.nan, largest)


def _beyond_noise(x: jax.Array, num_draws: int) -> jax.Array:
    """R-hat [...] of half chains [2 x chains, ...], 1 where their noise explains it."""
    found = scale_reduction(x)
    means = jnp.mean(x, axis=1)
    change, total = means[1::2] - means[::2], means[1::2] + means[::2]
    own = jnp.var(change, axis=0, ddof=1)
    # The logarithm of a ratio of two variances of n means has a variance of 4 / (n - 1).
    disagreement = jnp.log(jnp.var(total, axis=0, ddof=1) / own) * jnp.sqrt(len(change) - 1) / 2
    drift = jnp.mean(change, axis=0) / jnp.sqrt(own / len(change))
    is_noise = (disagreement <= MOST_NOISE) & (jnp.abs(drift) <= MOST_NOISE)
    is_noise &= found <= 1 + LONGEST_CORRELATION / num_draws
    return jnp.where(is_noise, 1, found)


def scale_reduction(x: jax.Array) -> jax.Array:
    """Plain R-hat [...] of draws [chains, draws, ...] as they are."""
    mean, variance = chain_moments(x)
    return from_moments(mean, variance, x.shape[1])


def from_moments(mean: jax.Array, variance: jax.Array, num_draws) -> jax.Array:
    """R-hat [...] of the means and variances [chains, ...] of chains of ``num_draws`` draws.

    sqrt((N - 1) / N + B / W): W is the mean of the chains' variances, B the variance of their means
    (Gelman and Rubin 1992, as in Stan).
    """
    within = jnp.mean(variance, axis=0)
    between = jnp.var(mean, axis=0, ddof=1) if len(mean) > 1 else jnp.full_like(within, jnp.nan)
    return jnp.sqrt(between / within + (num_draws - 1) / num_draws)


def chain_moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and variance [chains, ...] of draws [chains, draws, ...].

    They are taken about the first draw: of a chain that stays where it is the variance is exactly 0.
    """
    first = x[:, :1]
    mean = jnp.mean(x - first, axis=1, keepdims=True)
    variance = jnp.sum((x - first - mean) ** 2, axis=1) / max(x.shape[1] - 1, 1)
    return (first + mean)[:, 0], variance
