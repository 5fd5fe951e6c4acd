"""The estimator of variances in rotated coordinates."""

from dataclasses import dataclass

import jax

from gspmd_mcmc.adaptation.estimators.estimator import (
    MetricEstimator,
    like,
    regularized_variance,
    unit_variances,
)
from gspmd_mcmc.kernels.metrics.rotated_metric import (
    RotatedMetric,
    Rotations,
    check_rotations,
    read_rotations,
    rotate_back,
)
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import PyTree, pytree, set_fields


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Rotated(MetricEstimator):
    """The variance of each element after given rotations of the axes of leaves.

    ``Rotated({"w": (left, right), "b": (right,)})``: orthogonal matrices, or None for an axis that is
    not rotated; their columns are the new coordinates, as in `RotatedMetric`. For a matrix-shaped leaf
    they may be the eigenvectors of known covariances of its rows and of its columns.
    """

    rotations: dict[str, tuple[jax.Array | None, ...]]

    def __init__(self, rotations: Rotations):
        set_fields(self, rotations=read_rotations("Rotated", rotations))

    def init(self, positions: PyTree) -> Moments:
        """Return the moments of no draws."""
        check_rotations("Rotated", self.rotations, positions, batch=1)
        return super().init(positions)

    def update(self, moments: Moments, positions: PyTree) -> Moments:
        """Take in one step of all chains."""
        return super().update(moments, rotate_back(self.rotations, positions, batch=1))

    def final(self, moments: Moments, positions: PyTree) -> RotatedMetric:
        """Return the regularized variances, and the rotations."""
        return RotatedMetric(like(regularized_variance(moments), positions), self.rotations)

    def identity(self, positions: PyTree) -> RotatedMetric:
        """Return unit variances, and the rotations."""
        check_rotations("Rotated", self.rotations, positions, batch=1)
        return RotatedMetric(unit_variances(positions), self.rotations)
