"""Estimators of dense metrics: the covariance of all elements, or of groups of leaves."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import moments as streaming
from gspmd_mcmc.adaptation.estimators import estimator
from gspmd_mcmc.kernels.metrics.dense_metric import DenseMetric, Groups, read_groups
from gspmd_mcmc.kernels.metrics.metric import names_of, product
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import PyTree, each_chain, pytree, set_fields, static


@pytree
@dataclass(frozen=True, eq=False)
class DenseMoments:
    """Moments of each chain so far, with the products of elements within groups."""

    moments: Moments  # of each element by itself
    products: tuple[jax.Array, ...] = each_chain()  # sums about the mean, of a group [chains, d, d]


@pytree
@dataclass(frozen=True, init=False)
class DenseBlock(estimator.MetricEstimator):
    """Covariances within groups of leaves, variances of the others.

    ``DenseBlock("w", "b")`` couples two leaves, or all the leaves under these names at the top of the
    position; ``DenseBlock(("w", "b"), ("c",))`` has two groups. Leaves of a group must be whole on
    every device; their d elements cost d² numbers a chain and d² operations a leapfrog.

    The shrinkage differs from Stan's n/(n+5) Σ + 5/(n+5) 1e-3 I, which assumes one scale: on a
    posterior whose standard deviations are all 1e-2 it stretches stiff directions hundreds of times.
    Here the variances are those of the draws, and correlations are shrunk towards zero by 5/(n+5) times
    max(1e-3, min(1, (d/n)⁴)): with many draws no more than in Stan at unit scale; strongly where there
    are fewer draws than dimensions and the covariance is singular.
    """

    groups: tuple[tuple[str, ...], ...] = static()

    def __init__(self, *groups: Any):
        are_names = groups and all(isinstance(group, str) for group in groups)
        set_fields(self, groups=read_groups("DenseBlock", (groups,) if are_names else groups))

    def init(self, positions: PyTree) -> DenseMoments:
        """Return the moments of no draws."""
        # Zeros made of the positions are laid out with their chains, as later moments are.
        nothing = [x - x for x in self._groups(positions).vectors(positions, batch=1)]
        return DenseMoments(streaming.init(positions), tuple(_outer(x) for x in nothing))

    def update(self, moments: DenseMoments, positions: PyTree) -> DenseMoments:
        """Take in one step of all chains."""
        count = moments.moments.count
        change = jax.tree.map(lambda x, m: x.astype(m.dtype) - m, positions, moments.moments.mean)
        changes = self._groups(positions).vectors(change, batch=1)
        products = tuple(
            sums + (count / (count + 1)).astype(sums.dtype) * _outer(x)
            for sums, x in zip(moments.products, changes, strict=True)
        )
        return DenseMoments(streaming.update(moments.moments, positions), products)

    def final(self, moments: DenseMoments, positions: PyTree) -> DenseMetric:
        """Return the metric that the draws of all chains give."""
        groups = self._groups(positions)
        means = groups.vectors(moments.moments.mean, batch=1)
        keep = estimator.weight_of_draws(moments.moments)
        freedom = jnp.maximum(moments.moments.count - 1, 1)
        pooled = [
            _pooled_covariance(sums / freedom.astype(sums.dtype), mean)
            for sums, mean in zip(moments.products, means, strict=True)
        ]
        factors = [
            _factor(covariance, keep, freedom * len(mean)).astype(groups.dtype)
            for covariance, mean in zip(pooled, means, strict=True)
        ]
        own = [estimator.own_variance(jnp.diagonal(covariance)) for covariance in pooled]
        variances = groups.replace(estimator.regularized_variance(moments.moments), own)
        return DenseMetric(estimator.like(variances, positions), factors, self._names(positions))

    def identity(self, positions: PyTree) -> DenseMetric:
        """Return the metric of unit variances and no correlations."""
        groups = self._groups(positions)
        factors = [jnp.eye(size, dtype=groups.dtype) for size in groups.sizes]
        return DenseMetric(estimator.unit_variances(positions), factors, self._names(positions))

    def _names(self, positions: PyTree) -> tuple[tuple[str, ...], ...]:
        return self.groups

    def _groups(self, positions: PyTree) -> Groups:
        one = jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), positions)
        return Groups.of(type(self).__name__, one, self._names(positions))


@pytree
@dataclass(frozen=True, init=False)
class Dense(DenseBlock):
    """The covariance of the whole position, which must be whole on every device; see `DenseBlock`."""

    def __init__(self):
        set_fields(self, groups=())

    def _names(self, positions: PyTree) -> tuple[tuple[str, ...], ...]:
        return (tuple(dict.fromkeys(names_of(positions))),)


def _outer(x: jax.Array) -> jax.Array:
    """Return x xᵀ of each chain, [chains, d, d]; float32 at least."""
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x[:, :, None] * x[:, None, :]


def _pooled_covariance(covariances: jax.Array, means: jax.Array) -> jax.Array:
    """Covariance [d, d] over chains, from those within chains [chains, d, d] and means [chains, d].

    That of the means is added where chains agree in every element: a part of it would have other
    correlations than the whole, and so stretch stiff directions.
    """
    within, chains = jnp.mean(covariances, axis=0), means.shape[0]
    spread = estimator.deviation(means)
    between = product(spread.T, spread, 1) / max(chains - 1, 1)
    do_agree = jnp.all(estimator.agrees(jnp.diagonal(within), jnp.diagonal(between)))
    return within + jnp.where(do_agree, between, 0)


def _factor(covariance: jax.Array, keep: jax.Array, num_draws: jax.Array) -> jax.Array:
    """Return the Cholesky factor of the shrunk correlations; the identity, if rounding prevents it."""
    size, variances = len(covariance), jnp.diagonal(covariance)
    inverse = jnp.where(variances > 0, jax.lax.rsqrt(variances), 0)
    correlations = covariance * inverse[:, None] * inverse[None]
    shortage = jnp.clip((size / num_draws) ** 4, estimator.PRIOR_VARIANCE, 1)
    rounding = 2 * math.sqrt(size) * jnp.finfo(covariance.dtype).eps
    shrink = jnp.maximum((1 - keep) * shortage, rounding).astype(covariance.dtype)
    shrunk = (1 - shrink) * correlations
    factor = jnp.linalg.cholesky(
        shrunk - jnp.diag(jnp.diagonal(shrunk)) + jnp.eye(size, dtype=shrunk.dtype)
    )
    return jnp.where(jnp.all(jnp.isfinite(factor)), factor, jnp.eye(size, dtype=factor.dtype))
