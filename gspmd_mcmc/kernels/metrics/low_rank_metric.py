"""A low-rank plus diagonal metric, for positions of any size and layout."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.metrics.metric import Metric, as_array, is_known, product
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Pad, PyTree, like_position, pytree


@pytree
@dataclass(frozen=True, eq=False)
class LowRankMetric(Metric):
    """M⁻¹ = D^½ (I + U (Λ - I) Uᵀ) D^½ for a diagonal D and a few orthonormal directions U.

    Nothing is dense: a velocity and a momentum draw each send ``rank`` inner products, and everything
    else stays where the position lies.

    Attributes
    ----------
    variances
        D, a tree like the position.
    vectors
        The columns of U, a tree like the position with leaves [rank, ...], each column over the whole
        tree, orthonormal, zero in the pad of local leaves.
    eigenvalues
        The diagonal of Λ, [rank]: the variances along the columns, in units of D. Where it is 1 the
        column does nothing.
    """

    variances: PyTree = like_position()
    vectors: PyTree = like_position(pad=Pad.ZERO, num_axes=1)
    eigenvalues: jax.Array

    def velocity(self, momentum: PyTree) -> PyTree:
        """Return M⁻¹ p."""
        scaled = jax.tree.map(lambda p, v: p * jnp.sqrt(v), momentum, self.variances)
        stretched = self._stretch(scaled, self.eigenvalues)
        return jax.tree.map(lambda x, v: x * jnp.sqrt(v), stretched, self.variances)

    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        """Draw p = D^-½ (I + U (Λ^-½ - I) Uᵀ) z ~ N(0, M)."""
        normals = tree.normal_like(rng_key, position)
        stretched = self._stretch(normals, jax.lax.rsqrt(self.eigenvalues))
        return jax.tree.map(lambda x, v: x * jax.lax.rsqrt(v), stretched, self.variances)

    def _stretch(self, x: PyTree, factors: jax.Array) -> PyTree:
        """Multiply the part of x along each column of U by a factor."""
        along = coefficients(self.vectors, x)
        return combine(self.vectors, (factors - 1) * along, x)

    def laid_out(self, target: Target, what: str) -> "LowRankMetric":
        """Lay variances and vectors out as positions are; pad rows take no part in U."""
        rank = np.shape(self.eigenvalues)
        like, got = local.real_shapes(self.variances, rank), local.real_shapes(self.vectors)
        if len(rank) != 1 or got != like:
            raise ValueError(
                f"{what}: expected eigenvalues of shape (rank,) and vectors of shapes {like}, got "
                f"{rank} and {got}"
            )
        if is_known(self.eigenvalues) and not jnp.all(self.eigenvalues > 0):
            raise ValueError(f"{what}: expected positive eigenvalues, got {self.eigenvalues}")
        laid = super().laid_out(target, what)
        vectors = _lay_out_vectors(target, self.vectors, laid.variances, f"{what} vectors")
        return tree.replace(laid, vectors=vectors, eigenvalues=as_array(self.eigenvalues))


def coefficients(vectors: PyTree, x: PyTree) -> jax.Array:
    """Return the inner products of vectors [rank, ...] with x, shape [rank]; one reduction."""
    dtype = jnp.result_type(*jax.tree.leaves(vectors))
    parts = jax.tree.map(lambda u, xi: product(u, xi, xi.ndim).astype(dtype), vectors, x)
    return sum(jax.tree.leaves(parts), start=jnp.zeros((), dtype))


def combine(vectors: PyTree, along: jax.Array, x: PyTree) -> PyTree:
    """Return x plus the combination of vectors [rank, ...] with coefficients [rank]."""
    return jax.tree.map(
        lambda u, xi: xi + product(along.astype(u.dtype), u, 1).astype(xi.dtype), vectors, x
    )


def _lay_out_vectors(target: Target, vectors: PyTree, variances: PyTree, what: str) -> PyTree:
    """Lay each vector out as a position, zero in its pad."""
    if any(isinstance(u, jax.ShapeDtypeStruct) for u in jax.tree.leaves(vectors)):
        pairs = zip(*map(jax.tree.leaves, (vectors, variances)), strict=True)
        laid = [_shape_beside(*pair) for pair in pairs]
    else:
        last = local.lay_out(target, local.positions_last(vectors), what)
        laid = [jnp.moveaxis(u, -1, 0) for u in jax.tree.leaves(local.zero_pad(target, last))]
    return jax.tree.unflatten(jax.tree.structure(variances), laid)


def _shape_beside(vectors: Any, variances: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of vectors that lie as variances do."""
    placed = getattr(variances, "sharding", None)
    if isinstance(placed, NamedSharding):
        placed = NamedSharding(placed.mesh, P(None, *placed.spec))
    shape = (vectors.shape[0], *variances.shape)
    return jax.ShapeDtypeStruct(shape, vectors.dtype, sharding=placed)
