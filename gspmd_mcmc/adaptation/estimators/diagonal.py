"""The estimator of diagonal metrics."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc.adaptation.estimators.estimator import MetricEstimator, like, regularized_variance
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True)
class Diagonal(MetricEstimator):
    """The variance of each element: a tree like the position."""

    def final(self, moments: Moments, positions: PyTree) -> PyTree:
        """Return the regularized variances."""
        return like(regularized_variance(moments), positions)

    def identity(self, positions: PyTree) -> PyTree:
        """Return ones."""
        return jax.tree.map(lambda x: jnp.ones(x.shape[1:], x.dtype), positions)
