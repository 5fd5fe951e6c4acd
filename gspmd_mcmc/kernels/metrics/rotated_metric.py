"""A metric that is diagonal in rotated coordinates: Kronecker-factored for leaves that are matrices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.metrics.metric import (
    Metric,
    check_named,
    is_known,
    local_names,
    names_of,
    product,
)
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields

Rotations = Mapping[str, tuple[Any, ...]]


@pytree
@dataclass(frozen=True, eq=False, init=False)
class RotatedMetric(Metric):
    """M⁻¹ = Q diag(v) Qᵀ, where Q rotates each axis of a leaf by an orthogonal matrix of its own.

    For a matrix-shaped leaf Q is the Kronecker product of two: velocity = Q_l (v ∘ (Q_lᵀ p Q_r)) Q_rᵀ.

    Parameters
    ----------
    variances
        A tree like the position: the variances of its elements after rotation, Qᵀ x.
    rotations
        ``{"w": (Q_l, Q_r), "b": (Q_r,)}``: by the name at the top of the position (``x`` for a bare
        array) of a single leaf, an orthogonal matrix for each of its axes, or None for an axis that
        is not rotated. Columns are the new coordinates. Leaves that are not named are not rotated. The
        rows of a local leaf, its first axis, cannot be rotated.
    """

    variances: PyTree = like_position()
    rotations: dict[str, tuple[jax.Array | None, ...]]

    def __init__(self, variances: PyTree, rotations: Rotations):
        set_fields(self, variances=variances, rotations=read_rotations("RotatedMetric", rotations))

    def velocity(self, momentum: PyTree) -> PyTree:
        """Return M⁻¹ p."""
        rotated = rotate_back(self.rotations, momentum)
        return rotate(self.rotations, jax.tree.map(jnp.multiply, self.variances, rotated))

    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        """Draw p = Q v^-½ z ~ N(0, M)."""
        normals = tree.normal_like(rng_key, position)
        scaled = jax.tree.map(lambda z, v: z * jax.lax.rsqrt(v), normals, self.variances)
        return rotate(self.rotations, scaled)

    def laid_out(self, target: Target, what: str) -> "RotatedMetric":
        """Lay the variances out as positions are; raise if a rotation does not fit its leaf."""
        check_rotations(what, self.rotations, self.variances)
        for name, rows in local_names(target, self.variances).items():
            if self.rotations.get(name, (None,))[0] is not None:
                raise ValueError(
                    f"{what}: rotates the first axis of {name!r}, which is local to a plate of {rows}; "
                    "give None for that axis"
                )
        return super().laid_out(target, what)


def rotate(rotations: Rotations, x: PyTree, batch: int = 0) -> PyTree:
    """Return Q x: from the new coordinates to the position's, after ``batch`` leading axes."""
    return _along_axes(rotations, x, batch, 1)


def rotate_back(rotations: Rotations, x: PyTree, batch: int = 0) -> PyTree:
    """Return Qᵀ x: from the position's coordinates to the new ones."""
    return _along_axes(rotations, x, batch, 0)


def _along_axes(rotations: Rotations, x: PyTree, batch: int, contracted: int) -> PyTree:
    leaves, treedef = jax.tree.flatten(x)
    for i, name in enumerate(names_of(x)):
        for axis, matrix in enumerate(rotations.get(name, ()), start=batch):
            if matrix is not None:
                matrix = matrix.astype(leaves[i].dtype)  # Under x64 a matrix of NumPy has 64 bits.
                turned = product(leaves[i], matrix, ((axis,), (contracted,)))
                leaves[i] = jnp.moveaxis(turned, -1, axis)
    return jax.tree.unflatten(treedef, leaves)


def read_rotations(what: str, rotations: Rotations) -> dict[str, tuple[jax.Array | None, ...]]:
    """Turn rotations into arrays; raise unless those that are known are orthogonal."""
    if not isinstance(rotations, Mapping) or not all(
        isinstance(axes, tuple | list) for axes in rotations.values()
    ):
        raise TypeError(
            f"{what}: expected rotations {{name: (matrix or None, ...)}}, got {rotations!r}"
        )
    return {
        name: tuple(_read_rotation(f"{what}: rotation of {name!r}", q) for q in axes)
        for name, axes in rotations.items()
    }


def _read_rotation(what: str, matrix: Any) -> Any:
    if matrix is None or isinstance(matrix, jax.ShapeDtypeStruct):
        return matrix
    matrix = jnp.asarray(matrix)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{what}: expected a square matrix, got shape {matrix.shape}")
    if is_known(matrix):
        error = np.max(np.abs(np.asarray(product(matrix.T, matrix, 1)) - np.eye(len(matrix))))
        if not error < 1e-3:
            raise ValueError(f"{what}: expected an orthogonal matrix, but QᵀQ is off by {error:.2g}")
    return matrix


def check_rotations(what: str, rotations: Rotations, position: PyTree, batch: int = 0) -> None:
    """Raise unless each rotation is of one leaf, with a matrix of its size or None for each axis."""
    check_named(what, list(rotations), position)
    leaves, names = jax.tree.leaves(position), names_of(position)
    for name, axes in rotations.items():
        if names.count(name) > 1:
            raise ValueError(f"{what}: {name!r} has {names.count(name)} leaves; rotations are of one")
        shape = np.shape(leaves[names.index(name)])[batch:]
        sizes = tuple(n if q is None else len(q) for n, q in zip(shape, axes, strict=False))
        if len(axes) != len(shape) or sizes != shape:
            got = [None if q is None else np.shape(q) for q in axes]
            raise ValueError(
                f"{what}: {name!r} has shape {shape}: expected as many square matrices (or None) of "
                f"these sizes, got {got}"
            )
