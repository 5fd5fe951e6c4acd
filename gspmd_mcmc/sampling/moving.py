"""Where the arrays of a checkpoint are to lie: as they lay, or anew on another mesh.

An array of a state is like the position, [*leading, ...], or small. On another mesh local latents have
another pad: what is like the position is cut or filled up, in the reading already, and what a new pad
row holds follows from what a row is that never moves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.kernels.metrics import is_metric
from gspmd_mcmc.sampling.layout import Layout, Like
from gspmd_mcmc.targets.local import rows_of
from gspmd_mcmc.targets.rows import Rows
from gspmd_mcmc.tree import PyTree

# What a pad row holds, by the field that a leaf belongs to: the position's pad row, where it stays; any
# positive number, here that of the last real row; and zeros else, for what does not move.
STAYS = ("position", "mean", "draws")
POSITIVE = ("inverse_mass_matrix", "variances")


def describe_mesh(mesh: Mesh | None) -> dict[str, Any]:
    """Return what makes two meshes the same for a program: axes, platform, number of processes."""
    if mesh is None:
        return {"axes": {}, "platform": jax.default_backend(), "processes": 1}
    devices = mesh.devices.ravel()
    return {
        "axes": {name: int(size) for name, size in mesh.shape.items()},
        "platform": devices[0].platform,
        "processes": len({d.process_index for d in devices}),
    }


def spec_of(array: Any) -> list | None:
    """Return an array's spec as a document has it; None where no mesh has placed it."""
    sharding = getattr(array, "sharding", None)
    return write_spec(sharding.spec) if isinstance(sharding, NamedSharding) else None


def write_spec(spec: P) -> list:
    """Write a spec for a document."""
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def read_spec(entries: list) -> P:
    """Read what `write_spec` has written."""
    return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in entries))


def moved_layout(mesh: Mesh | None, specs: list[list], target: Any, positions: PyTree) -> Layout:
    """Return the layout on a mesh of positions that had these specs on another.

    Axes that the mesh does not have, or that do not divide a leaf any more, are left out.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
    found, leaves = rows_of(target, one), jax.tree.leaves(one)
    return Layout(mesh, tuple(_spec(mesh, *x) for x in zip(specs, leaves, found, strict=True)))


def _spec(mesh: Mesh | None, entries: list, leaf: Any, rows: Rows | None) -> P:
    kept = [_entry(mesh, *pair) for pair in zip(entries, leaf.shape, strict=False)]
    if rows is not None:
        kept[:1] = [rows.axes]
    return P(*kept) if mesh is not None and any(kept) else P()


def _entry(mesh: Mesh | None, entry: Any, length: int) -> tuple[str, ...] | None:
    names = tuple(entry) if isinstance(entry, list) else (entry,) if entry else ()
    if mesh is None or not names or not set(names) <= set(mesh.shape):
        return None
    parts = math.prod(mesh.shape[name] for name in names)
    return names if length % parts == 0 else None


@dataclass(frozen=True)
class Move:
    """From the positions of a checkpoint to those of a run on another mesh.

    Attributes
    ----------
    like
        What the positions of the checkpoint are like.
    rows
        For each leaf the rows that it is local to on the new mesh, or None.
    layout
        The new layout.
    """

    like: Like
    rows: tuple[Rows | None, ...]
    layout: Layout

    @classmethod
    def of(cls, positions: PyTree, target: Any, layout: Layout) -> "Move":
        """Read the move of positions that have the checkpoint's shapes, leaves [chains, ...].

        Raises
        ------
        ValueError
            If numbers of chains could be taken for those of rows.
        """
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
        rows = tuple(rows_of(target, one))
        is_bare = jax.tree.structure(positions) == jax.tree.structure(0)
        if is_bare and rows[0] is not None and positions.shape == (positions.shape[0],) * 2:
            raise ValueError(
                f"mesh: the position is one array of {rows[0]}, as many as there are chains, and what "
                "belongs to which cannot be told; resume on a mesh of the shape that the run began with"
            )
        return cls(Like.of(positions), rows, layout)

    def shapes(self, tree: PyTree) -> PyTree:
        """Return the new shapes and shardings of a tree of shapes."""
        return self.map(tree, self._part_shape, self._other_shape)

    def fill(self, tree: PyTree, positions: PyTree) -> PyTree:
        """Fill the pad rows of a tree that has the new shapes; ``positions`` have theirs already.

        Parameters
        ----------
        tree
            As `shapes` has it, arrays.
        positions
            The new positions, leaves [chains, ...].
        """
        if all(rows is None or rows.num_rows == rows.num_padded for rows in self.rows):
            return tree
        filled = _fill(tree, positions, move=replace(self, like=Like.of(positions)))
        return jax.tree.map(_laid_as, filled, tree)

    def map(self, tree: PyTree, part: Callable, other: Callable) -> PyTree:
        """Map ``part(path, part, is_of_metric)`` over what is like the positions, ``other`` else."""

        def is_leaf(x):
            return is_metric(x) or self.like.fits(x)

        def one(path, x, inside_metric=False):
            if is_metric(x) and not inside_metric:
                inner = jax.tree_util.tree_flatten_with_path(x, is_leaf=self.like.fits)
                return jax.tree.unflatten(inner[1], [one((*path, *p), y, True) for p, y in inner[0]])
            if self.like.fits(x):
                return part(path, x, inside_metric)
            return other(x)

        paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        return jax.tree.unflatten(treedef, [one(path, x) for path, x in paths])

    def _part_shape(self, path: Any, part: PyTree, is_of_metric: bool) -> PyTree:
        count, first = self.like.leading(part)
        leads = first == self.like.num_chains and not is_of_metric
        lead = (self.layout.chain_axis if leads else None, *(None,) * (count - 1)) if count else ()
        leaves, treedef = jax.tree.flatten(part)
        shapes = [
            self._shape(_resized(x.shape, count, rows), x.dtype, P(*lead, *spec))
            for x, rows, spec in zip(leaves, self.rows, self.layout.specs, strict=True)
        ]
        return jax.tree.unflatten(treedef, shapes)

    def _other_shape(self, x: Any) -> Any:
        leads = x.ndim and x.shape[0] == self.like.num_chains
        return self._shape(x.shape, x.dtype, P(self.layout.chain_axis) if leads else P())

    def _shape(self, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        if self.layout.mesh is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.layout.mesh, spec))

    def fill_part(self, positions: PyTree, path: Any, part: PyTree) -> PyTree:
        """Fill the pad rows of a part that is like the positions."""
        count, first = self.like.leading(part)
        names = [getattr(key, "name", None) for key in path]
        stays = bool(count) and first == self.like.num_chains and names[-1:] and names[-1] in STAYS
        is_positive = not {*names}.isdisjoint(POSITIVE) and "vectors" not in names

        def fill(x, at, rows):
            if rows is None or rows.num_rows == rows.num_padded:
                return x
            if stays:
                # [chains, 1, ...] where the part has further axes before the rows.
                row = jnp.expand_dims(_last_row(at, 1, rows), tuple(range(1, count)))
            else:
                row = _last_row(x, count, rows) if is_positive else jnp.zeros((), x.dtype)
            is_real = jnp.expand_dims(rows.is_real(x.ndim - count), tuple(range(count)))
            return jnp.where(is_real, x, row.astype(x.dtype))

        leaves, treedef = jax.tree.flatten(part)
        filled = map(fill, leaves, jax.tree.leaves(positions), self.rows)
        return jax.tree.unflatten(treedef, filled)


def _last_row(x: jax.Array, axis: int, rows: Rows) -> jax.Array:
    return jax.lax.slice_in_dim(x, rows.num_rows - 1, rows.num_rows, axis=axis)


def _laid_as(array: jax.Array, other: jax.Array) -> jax.Array:
    return jax.device_put(array, other.sharding) if spec_of(other) is not None else array


def _resized(shape: tuple[int, ...], axis: int, rows: Rows | None) -> tuple[int, ...]:
    return shape if rows is None else (*shape[:axis], rows.num_padded, *shape[axis + 1 :])


@partial(jax.jit, static_argnames="move")
def _fill(tree: PyTree, positions: PyTree, *, move: Move) -> PyTree:
    def fill(path, part, is_of_metric):
        return move.fill_part(positions, path, part)

    return move.map(tree, fill, lambda x: x)
