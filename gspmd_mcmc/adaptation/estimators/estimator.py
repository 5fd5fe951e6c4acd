"""The contract of an estimator of metrics, the diagonal one, and the variances that all share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import moments as streaming
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import PyTree, pytree

# Chains agree on an element if sqrt((within + between) / within) is under this.
AGREEMENT = 1.2
# Stan's regularization: the weight of PRIOR_DRAWS draws, towards a variance of PRIOR_VARIANCE.
PRIOR_DRAWS, PRIOR_VARIANCE = 5.0, 1e-3


class MetricEstimator(ABC):
    """What a window of warm-up learns about the scales of the position.

    A frozen pytree (settings static, arrays leaves) of pure functions of positions with leaves
    [chains, ...]. An estimator of your own has `final` and `identity`; `init` and `update` are by
    default those of the `Moments` of each chain, which send nothing. `final` reduces them once.
    """

    def init(self, positions: PyTree) -> Any:
        """Return the moments of no draws."""
        return streaming.init(positions)

    def update(self, moments: Any, positions: PyTree) -> Any:
        """Take in one step of all chains."""
        return streaming.update(moments, positions)

    @abstractmethod
    def final(self, moments: Any, positions: PyTree) -> PyTree:
        """Return the metric, pooled over chains, in the dtypes of the positions."""

    @abstractmethod
    def identity(self, positions: PyTree) -> PyTree:
        """Return the first metric, of the same structure as that of `final`."""


def unit_variances(positions: PyTree) -> PyTree:
    """Return ones, without the chain axis of the positions."""
    return jax.tree.map(lambda x: jnp.ones(x.shape[1:], x.dtype), positions)


def like(metric: PyTree, positions: PyTree) -> PyTree:
    """Cast the leaves of a tree like the positions to their dtypes."""
    return jax.tree.map(lambda v, x: v.astype(x.dtype), metric, positions)


def pooled_variance(moments: Moments) -> PyTree:
    """Variance of the position over all chains, without the chain axis.

    For each element it is the mean of the variances of chains, plus the variance of their means where
    chains agree (`agrees`): a chain that is stuck far away does not stretch the metric of the rest.
    """

    def pool(mean, variance):
        within = jnp.mean(variance, axis=0)
        between = jnp.sum(deviation(mean) ** 2, axis=0) / max(mean.shape[0] - 1, 1)
        return jnp.where(agrees(within, between), within + between, within)

    return jax.tree.map(pool, moments.mean, streaming.variance(moments))


def deviation(mean: jax.Array) -> jax.Array:
    """Return the means of chains [chains, ...] minus their mean."""
    return mean - jnp.mean(mean, axis=0, keepdims=True)


def agrees(within: jax.Array, between: jax.Array) -> jax.Array:
    """Tell of each element whether its potential scale reduction is under `AGREEMENT`."""
    return within + between < AGREEMENT**2 * within


def regularized_variance(moments: Moments) -> PyTree:
    """Shrink the pooled variance towards 1e-3, with the weight of five draws, as Stan does."""
    keep = weight_of_draws(moments)
    return jax.tree.map(
        lambda v: keep.astype(v.dtype) * v + (1 - keep.astype(v.dtype)) * PRIOR_VARIANCE,
        pooled_variance(moments),
    )


def own_variance(variances: PyTree) -> PyTree:
    """Return the variances, without shrinkage; 1e-3 where nothing has moved.

    For metrics of correlations: shrinking all elements towards one scale would undo correlations of
    elements of a smaller scale, and so stretch stiff directions.
    """
    return jax.tree.map(lambda v: jnp.where(v > 0, v, PRIOR_VARIANCE), variances)


def weight_of_draws(moments: Moments) -> jax.Array:
    """Return n / (n + 5) for the n draws of all chains: their weight against that of the prior, []."""
    num_draws = moments.count * jax.tree.leaves(moments.mean)[0].shape[0]
    return num_draws / (num_draws + PRIOR_DRAWS)


@pytree
@dataclass(frozen=True)
class Diagonal(MetricEstimator):
    """The variance of each element: a tree like the position."""

    def final(self, moments: Moments, positions: PyTree) -> PyTree:
        """Return the regularized variances."""
        return like(regularized_variance(moments), positions)

    def identity(self, positions: PyTree) -> PyTree:
        """Return ones."""
        return unit_variances(positions)
