"""Effective sample sizes: how many independent draws the draws are worth.

References
----------
Geyer, "Practical Markov chain Monte Carlo", Statistical Science 7 (1992): the initial positive and
monotone sequences. Vehtari, Gelman, Simpson, Carpenter and Bürkner, Bayesian Analysis 16 (2021):
several chains, bulk and tails.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.autocovariance import mean_autocovariance
from gspmd_mcmc.diagnostics.columns import nan_columns, needs_draws, per_leaf
from gspmd_mcmc.diagnostics.ranks import folded, has_nan, ordered, scored, split
from gspmd_mcmc.diagnostics.rhat import LEAST_DRAWS
from gspmd_mcmc.tree import PyTree

TAILS = (0.05, 0.95)
LEAST_OF_CHAIN = 100.0  # effective draws that are enough, of each chain


def ess_bulk(draws: PyTree) -> PyTree:
    """Effective sample size of the normal scores of ranks: of the bulk, even where no moments exist.

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...].

    Returns
    -------
    tree
        Like ``draws`` with leaves [...]. Chains are split first. NaN where a draw is NaN and for fewer
        than four draws; where all draws are equal, their number. At most S log10(S) of S draws.
    """
    return per_leaf(column_ess_bulk, draws)


def ess_tail(draws: PyTree, probabilities: tuple[float, ...] = TAILS) -> PyTree:
    """Smallest effective sample size of the estimates of the levels of some quantiles.

    Parameters
    ----------
    draws
        Tree with leaves [chains, draws, ...].
    probabilities
        Of the quantiles, each in [0, 1].

    Returns
    -------
    tree
        Like ``draws`` with leaves [...]; NaN as of `ess_bulk`.
    """
    if not probabilities or not all(0 <= p <= 1 for p in probabilities):
        raise ValueError(f"ess_tail: expected probabilities in [0, 1], got {probabilities}.")
    return per_leaf(column_ess_tail, draws, probabilities=tuple(map(float, probabilities)))


def ess_mean(draws: PyTree) -> PyTree:
    """Effective sample size of the estimate of the mean; arguments and result as of `ess_bulk`.

    NaN also where a draw is infinite.
    """
    return per_leaf(column_ess_mean, draws)


def ess_sd(draws: PyTree) -> PyTree:
    """Effective sample size of squared distances from the mean, hence of the standard deviation.

    Arguments and result as of `ess_mean`.
    """
    return per_leaf(column_ess_sd, draws)


class Sizes(NamedTuple):
    """Effective sample sizes [...] of columns, each named after its estimate."""

    mean: jax.Array
    sd: jax.Array
    bulk: jax.Array
    bulk_within: jax.Array  # by the correlation within chains only, as if all chains agreed
    folded_within: jax.Array  # likewise, of normal scores of distances from the median
    tail: jax.Array


def column_sizes(x: jax.Array) -> Sizes:
    """All effective sample sizes [...] of draws [chains, draws, ...], in one program."""
    if x.shape[1] < LEAST_DRAWS:
        return Sizes(*[nan_columns(x)] * len(Sizes._fields))
    halves = split(x)
    ranked = scored(halves)
    distances = scored(folded(halves, ranked.ordered))
    chains = [*_moments(x), ranked.scores, distances.scores, *_levels(x, TAILS)]
    beside = jnp.stack(chains, axis=2)
    covariance = mean_autocovariance(beside)
    mean, sd, bulk, _, *tails = _effective_size(beside, covariance, _between(beside))
    within = _size_within(beside[:, :, 2:4], covariance[:, 2:4])
    nan = has_nan(x)
    return Sizes(
        mean=mean,
        sd=sd,
        bulk=jnp.where(nan, jnp.nan, bulk),
        bulk_within=jnp.where(nan, jnp.nan, within[0]),
        folded_within=jnp.where(nan, jnp.nan, within[1]),
        tail=jnp.where(nan, jnp.nan, jnp.stack(tails).min(axis=0)),
    )


@needs_draws(LEAST_DRAWS)
def column_ess_bulk(x: jax.Array) -> jax.Array:
    """Bulk effective sample size [...] of draws [chains, draws, ...]; see `ess_bulk`."""
    return jnp.where(has_nan(x), jnp.nan, effective_size(scored(split(x)).scores))


@needs_draws(LEAST_DRAWS)
def column_ess_tail(x: jax.Array, probabilities: tuple[float, ...] = TAILS) -> jax.Array:
    """Tail effective sample size [...] of draws [chains, draws, ...]; see `ess_tail`."""
    sizes = [effective_size(level) for level in _levels(x, probabilities)]
    return jnp.where(has_nan(x), jnp.nan, jnp.stack(sizes).min(axis=0))


@needs_draws(LEAST_DRAWS)
def column_ess_mean(x: jax.Array) -> jax.Array:
    """Effective sample size [...] for the mean of draws [chains, draws, ...]; see `ess_mean`."""
    return effective_size(_moments(x)[0])


@needs_draws(LEAST_DRAWS)
def column_ess_sd(x: jax.Array) -> jax.Array:
    """Effective sample size [...] for the sd of draws [chains, draws, ...]; see `ess_sd`."""
    return effective_size(_moments(x)[1])


def _moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    centered, _ = in_own_unit(x)
    return split(centered), split(centered**2)


def _levels(x: jax.Array, probabilities: tuple[float, ...]) -> list[jax.Array]:
    in_order = ordered(x)
    # A draw is at most the interpolated quantile if it is at most the draw below that.
    below = [in_order[math.floor((len(in_order) - 1) * p)] for p in probabilities]
    return [split((x <= level[None, None]).astype(x.dtype)) for level in below]


def in_own_unit(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Subtract the mean of each column; in a unit [...] whose squares neither over- nor underflow."""
    first = x[:1, :1]
    centered = (x - first) - jnp.mean(x - first, axis=(0, 1), keepdims=True)
    largest = jnp.max(jnp.abs(centered), axis=(0, 1))
    return centered / jnp.where(largest > 0, largest, 1.0)[None, None], largest


def effective_size(x: jax.Array) -> jax.Array:
    """Effective sample size [...] of chains [chains, draws, ...], two or more, taken as they are."""
    return _effective_size(x, mean_autocovariance(x), _between(x))


def _between(x: jax.Array) -> jax.Array:
    return jnp.var(jnp.mean(x, axis=1), axis=0, ddof=1)


def _size_within(x: jax.Array, covariance: jax.Array) -> jax.Array:
    """Effective sample size [...] if all chains agree, whether they do or not.

    The variance between chains is not that of these draws, but what the correlation within chains makes
    of it, which the first step underestimates.
    """
    size = _effective_size(x, covariance, jnp.zeros_like(covariance[0]))
    return _effective_size(x, covariance, covariance[0] * x.shape[0] / size)


def _effective_size(x: jax.Array, covariance: jax.Array, between: jax.Array) -> jax.Array:
    """Effective sample size [...], given the variance [...] of the means of chains."""
    num_chains, num_draws = x.shape[:2]
    within = covariance[0] * num_draws / (num_draws - 1)
    total = covariance[0] + between
    num_pairs = max(0, (num_draws - 3) // 2) + 1
    correlation = 1 - (within[None] - covariance[: 2 * num_pairs]) / total[None]
    correlation = jnp.concatenate([jnp.ones_like(correlation[:1]), correlation[1:]])
    size = num_chains * num_draws
    time = jnp.maximum(_autocorrelation_time(correlation), 1 / math.log10(size))
    is_constant = (x == x[:1, :1]).all(axis=(0, 1))
    return jnp.where(is_constant, size, size / time)


def _autocorrelation_time(correlation: jax.Array) -> jax.Array:
    """Sum of autocorrelations [lags, ...] over both signs of the lag, as far as they can be estimated.

    In a reversible chain sums of two neighbors are positive and decrease. They are added up to the
    first that is not positive, each limited to the ones before; the remainder at that lag counts once.
    """
    pairs = correlation.reshape(-1, 2, *correlation.shape[1:])
    even, pair = pairs[:, 0], pairs.sum(axis=1)
    least = jax.lax.cummin(pair, axis=0)
    is_in = (least > 0).at[-1].set(False)
    is_end = ~is_in & jnp.concatenate([jnp.ones_like(is_in[:1]), is_in[:-1]])
    rest = jnp.where((even > 0) | (pair >= 0), even, 0.0)
    added = jnp.sum(jnp.where(is_in, 2 * least, 0.0), axis=0)
    time = added + jnp.sum(jnp.where(is_end, rest, 0.0), axis=0) - 1
    return jnp.where(jnp.isnan(correlation).any(axis=0), jnp.nan, time)
