"""Estimators of metrics: what a window of warm-up teaches about the scales of the position.

An estimator is a frozen pytree (settings static, arrays leaves) of pure functions of positions with
leaves [chains, ...]:

    moments = estimator.init(positions)
    moments = estimator.update(moments, positions)      # each step, all chains
    metric = estimator.final(moments, positions)        # pooled over chains, regularised
    metric = estimator.identity(positions)              # the first one, of the same structure

`update` keeps moments of each chain apart, so that it sends nothing; `final` reduces them once.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from gspmd_mcmc import moments as streaming
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import PyTree, pytree

# Chains agree on an element if its potential scale reduction is under this.
AGREEMENT = 1.2
# Stan's regularisation: as much as PRIOR_DRAWS draws weigh, towards a variance of PRIOR_VARIANCE.
PRIOR_DRAWS, PRIOR_VARIANCE = 5.0, 1e-3


class MetricEstimator(Protocol):
    """What a warm-up asks of an estimator; see the module."""

    def init(self, positions: PyTree) -> Any:
        """Return the moments of no draws."""
        ...

    def update(self, moments: Any, positions: PyTree) -> Any:
        """Take in one step of all chains."""
        ...

    def final(self, moments: Any, positions: PyTree) -> Any:
        """Return the metric that the moments give, in the dtypes of the positions."""
        ...

    def identity(self, positions: PyTree) -> Any:
        """Return a metric of the structure of `final`'s before anything is known."""
        ...


@pytree
@dataclass(frozen=True)
class Diagonal:
    """The variance of each element: a tree like the position."""

    def init(self, positions: PyTree) -> Moments:
        """Return the moments of no draws."""
        return streaming.init(positions)

    def update(self, moments: Moments, positions: PyTree) -> Moments:
        """Take in one step of all chains."""
        return streaming.update(moments, positions)

    def final(self, moments: Moments, positions: PyTree) -> PyTree:
        """Return the regularised variances."""
        return like(regularised_variance(moments), positions)

    def identity(self, positions: PyTree) -> PyTree:
        """Return ones."""
        return jax.tree.map(lambda x: jnp.ones(x.shape[1:], x.dtype), positions)


def like(metric: PyTree, positions: PyTree) -> PyTree:
    """Turn the leaves of a tree like the positions into their dtypes."""
    return jax.tree.map(lambda v, x: v.astype(x.dtype), metric, positions)


def pooled_variance(moments: Moments, agreement: float = AGREEMENT) -> PyTree:
    """Variance of the position over all chains, without the chain axis.

    Element by element it is the mean of the chains' own variances (within), to which the variance of
    their means (between) is added where the chains agree: where the potential scale reduction
    sqrt((within + between) / within) is under ``agreement``. A stuck chain, far from the others, so
    does not stretch the metric for the rest.
    """

    def pool(mean, variance):
        within = jnp.mean(variance, axis=0)
        between = jnp.sum(deviation(mean) ** 2, axis=0) / max(mean.shape[0] - 1, 1)
        return jnp.where(agrees(within, between, agreement), within + between, within)

    return jax.tree.map(pool, moments.mean, streaming.variance(moments))


def deviation(mean: jax.Array) -> jax.Array:
    """Return the chains' means [chains, ...] less the mean of them."""
    return mean - jnp.mean(mean, axis=0, keepdims=True)


def agrees(within: jax.Array, between: jax.Array, agreement: float = AGREEMENT) -> jax.Array:
    """Tell of each element whether chains agree: sqrt((within + between) / within) < agreement."""
    return within + between < agreement**2 * within


def regularised_variance(moments: Moments) -> PyTree:
    """Shrink the pooled variance towards 1e-3, by as much as five draws weigh, as Stan does."""
    keep = weight_of_draws(moments)
    return jax.tree.map(
        lambda v: keep.astype(v.dtype) * v + (1 - keep.astype(v.dtype)) * PRIOR_VARIANCE,
        pooled_variance(moments),
    )


def own_variance(variances: PyTree) -> PyTree:
    """Return variances as they are; where nothing has moved, what nothing is known to be.

    For metrics of correlations: a shrinkage of one scale for all elements would undo correlations of
    elements whose scale is smaller, and so stretch what should be stiff.
    """
    return jax.tree.map(lambda v: jnp.where(v > 0, v, PRIOR_VARIANCE), variances)


def weight_of_draws(moments: Moments) -> jax.Array:
    """Return n / (n + 5) for the n draws of all chains: their weight against the prior's, []."""
    num_draws = moments.count * jax.tree.leaves(moments.mean)[0].shape[0]
    return num_draws / (num_draws + PRIOR_DRAWS)
