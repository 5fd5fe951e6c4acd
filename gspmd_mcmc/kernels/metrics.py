"""Euclidean metrics: momenta p ~ N(0, M) for an inverse mass matrix shaped like the position.

The inverse mass matrix is the identity (None) or diagonal: a tree like the position, whose elements
are the variances that the position is believed to have.
"""

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.tree import PyTree


def sample_momentum(rng_key: jax.Array, inverse_mass_matrix: PyTree | None, position: PyTree) -> PyTree:
    """Draw p ~ N(0, M), shaped like the position."""
    normals = tree.normal_like(rng_key, position)
    if inverse_mass_matrix is None:
        return normals
    return jax.tree.map(lambda z, m: z * jax.lax.rsqrt(m), normals, inverse_mass_matrix)


def velocity(inverse_mass_matrix: PyTree | None, momentum: PyTree) -> PyTree:
    """Return M⁻¹ p."""
    if inverse_mass_matrix is None:
        return momentum
    return jax.tree.map(jnp.multiply, inverse_mass_matrix, momentum)


def kinetic_energy(inverse_mass_matrix: PyTree | None, momentum: PyTree) -> jax.Array:
    """Return ½ p·M⁻¹p."""
    return 0.5 * tree.dot(momentum, velocity(inverse_mass_matrix, momentum))


def kinetic_energy_difference(
    inverse_mass_matrix: PyTree | None, new: PyTree, old: PyTree
) -> jax.Array:
    """Return ½ (p′−p)·M⁻¹(p′+p): the kinetic energies' difference as a sum over differences."""
    return 0.5 * tree.dot(tree.sub(new, old), velocity(inverse_mass_matrix, tree.add(new, old)))
