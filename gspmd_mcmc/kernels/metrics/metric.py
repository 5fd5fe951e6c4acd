"""Euclidean metrics: momenta p ~ N(0, M) for an inverse mass matrix M⁻¹ that the position is given.

An inverse mass matrix is the identity (None), diagonal (a tree like the position, whose elements are
the variances that the position is believed to have), or an object: `DenseMetric`, `LowRankMetric`,
`RotatedMetric`, or one of your own that answers as `Metric` does. Kernels ask the functions here.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.tree import PyTree


class Metric(Protocol):
    """What a metric object answers: a frozen pytree, its matrix symmetric and positive definite.

    The first two must be of one matrix M: energies come from the velocity, momenta from the draws.
    """

    def velocity(self, momentum: PyTree) -> PyTree:
        """Return M⁻¹ p, zero in the pad of local leaves where the momentum is."""
        ...

    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        """Draw p ~ N(0, M), shaped like the position."""
        ...

    def laid_out(self, target: Any, what: str) -> "Metric":
        """Return the metric laid out as the target's positions are; raise if it cannot be."""
        ...

    def check_fits(self, kernel: str, position: PyTree) -> None:
        """Raise, in the kernel's name, if the metric is for a position of other shapes."""
        ...


def is_metric(inverse_mass_matrix: Any) -> bool:
    """Tell a metric object from None and from a tree of variances."""
    kind = type(inverse_mass_matrix)
    return all(callable(getattr(kind, name, None)) for name in ("velocity", "sample_momentum"))


def sample_momentum(rng_key: jax.Array, inverse_mass_matrix: Any, position: PyTree) -> PyTree:
    """Draw p ~ N(0, M), shaped like the position."""
    if is_metric(inverse_mass_matrix):
        return inverse_mass_matrix.sample_momentum(rng_key, position)
    normals = tree.normal_like(rng_key, position)
    if inverse_mass_matrix is None:
        return normals
    return jax.tree.map(lambda z, m: z * jax.lax.rsqrt(m), normals, inverse_mass_matrix)


def velocity(inverse_mass_matrix: Any, momentum: PyTree) -> PyTree:
    """Return M⁻¹ p."""
    if inverse_mass_matrix is None:
        return momentum
    if is_metric(inverse_mass_matrix):
        return inverse_mass_matrix.velocity(momentum)
    return jax.tree.map(jnp.multiply, inverse_mass_matrix, momentum)


def kinetic_energy(inverse_mass_matrix: Any, momentum: PyTree) -> jax.Array:
    """Return ½ p·M⁻¹p."""
    return 0.5 * tree.dot(momentum, velocity(inverse_mass_matrix, momentum))


def kinetic_energy_difference(inverse_mass_matrix: Any, new: PyTree, old: PyTree) -> jax.Array:
    """Return ½ (p′−p)·M⁻¹(p′+p): the kinetic energies' difference as a sum over differences."""
    return 0.5 * tree.dot(tree.sub(new, old), velocity(inverse_mass_matrix, tree.add(new, old)))
