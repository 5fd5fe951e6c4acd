"""Where the arrays of a run lie on a mesh, read once from a target and a position."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.placement.mapped_axes import vmap_over
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.tree import Pad, PyTree, Role, classes_of, path_str, roles

CHAINS = "chains"


@dataclass(frozen=True)
class Layout:
    """The position of one chain, leaf by leaf, and how chains lie; hashable, so static in programs.

    Attributes
    ----------
    mesh
        The mesh, or None for one device.
    num_chains
        The number of chains.
    treedef
        The structure of a position.
    classes
        The classes of its nodes, so that another class with the same fields is another layout.
    shapes
        Shape, pad rows included, and dtype of each leaf of one chain's position.
    specs
        The spec of each leaf.
    rows
        For each leaf the rows of the plate that it is local to, or None.
    """

    mesh: Mesh | None
    num_chains: int
    treedef: Any
    classes: tuple[type, ...]
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    specs: tuple[P, ...]
    rows: tuple[Any, ...]

    @property
    def chain_axis(self) -> str | None:
        """The mesh axis that chains lie over, if there is one."""
        return CHAINS if self.mesh is not None and CHAINS in self.mesh.shape else None

    @property
    def num_parts(self) -> int:
        """The number of parts in which the chains lie."""
        return self.mesh.shape[CHAINS] if self.mesh is not None and self.chain_axis else 1

    @property
    def is_whole(self) -> bool:
        """Whether a position is whole on every device."""
        return not any(rows is not None for rows in self.rows) and not any(map(any, self.specs))

    def vmap(self, function: Callable, in_axes: tuple) -> Callable:
        """Map over chains, each on its part of the mesh."""
        return vmap_over(self.chain_axis, function, in_axes)

    def pin(self, tree: PyTree, roles: PyTree) -> PyTree:
        """Constrain every leaf of a tree to where its role says that it lies.

        What a run carries must lie in the same place before and after each program; were that the
        compiler's choice, programs would be compiled twice.
        """
        if self.mesh is None:
            return tree
        shardings = jax.tree.map(self._sharding, roles)
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)

    def pin_positions(self, tree: PyTree) -> PyTree:
        """Constrain a tree like the position, leaves [chains, ...]."""
        role = Role(is_like_position=True, has_chains=True)
        return self.pin(tree, roles(tree, jax.tree.structure(tree), role))

    def templates(self, tree: PyTree, roles: PyTree) -> PyTree:
        """Return the shapes of a tree with the shardings that it has in this layout."""

        def template(leaf, role):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding(role))

        return jax.tree.map(template, tree, roles)

    def filled(self, tree: PyTree, roles: PyTree, positions: PyTree) -> PyTree:
        """Fill the pad rows of a tree that was saved on another mesh, where they may hold anything.

        ``positions`` have leaves [chains, ...], with pad rows that are filled already.
        """
        fill = partial(self._fill, jax.tree.leaves(positions))
        return self.pin(jax.tree.map(fill, tree, roles), roles)

    def _sharding(self, role: Role) -> NamedSharding | None:
        if self.mesh is None:
            return None
        lead = [self.chain_axis] if role.has_chains else []
        spec = () if role.leaf is None else self.specs[role.leaf]
        return NamedSharding(self.mesh, P(*lead, *[None] * role.num_axes, *spec))

    def _fill(self, positions: list, leaf: jax.Array, role: Role) -> jax.Array:
        rows = None if role.leaf is None else self.rows[role.leaf]
        if role.leaf is None or rows is None or rows.num_rows == rows.num_padded:
            return leaf
        axis = role.has_chains + role.num_axes
        if role.pad is Pad.STAYS and role.has_chains:
            # [chains, 1, ...] where the leaf has further axes before the rows.
            row = _last_row(positions[role.leaf], 1, rows)
            row = jnp.expand_dims(row, tuple(range(1, axis)))
        else:
            row = _last_row(leaf, axis, rows) if role.pad is Pad.COPY else jnp.zeros((), leaf.dtype)
        is_real = jnp.expand_dims(rows.is_real(leaf.ndim - axis), tuple(range(axis)))
        return jnp.where(is_real, leaf, row.astype(leaf.dtype))


def _last_row(x: jax.Array, axis: int, rows: Any) -> jax.Array:
    return jax.lax.slice_in_dim(x, rows.num_rows - 1, rows.num_rows, axis=axis)


def read_layout(
    mesh: Mesh | None, target: Any, position: PyTree, num_chains: int, has_chains: bool
) -> Layout:
    """Read where a position's leaves lie; a leaf that no mesh has placed is whole on every device.

    Leaves that are local to a plate of the target lie where its rows do, and have its pad rows.

    Raises
    ------
    ValueError
        If the mesh does not divide the chains, or a leaf lies on another mesh or over the chain axis.
    """
    if mesh is not None and num_chains % (size := mesh.shape.get(CHAINS, 1)):
        raise ValueError(
            f"num_chains={num_chains} does not divide over mesh axis {CHAINS!r} of size {size}; "
            f"use a multiple of {size}, or a mesh with fewer chain devices"
        )
    found = jax.tree_util.tree_leaves_with_path(position, is_leaf=is_padded)
    rows = tuple(target.local_rows(position))
    specs, shapes, laid = [], [], []
    for (path, leaf), r in zip(found, rows, strict=True):
        values = leaf.values if is_padded(leaf) else leaf
        spec = _spec(mesh, path_str(path), values, has_chains)
        shape = jnp.shape(values)[has_chains:]
        specs.append(spec if r is None else P(r.axes, *spec[1:]))
        shapes.append((shape if r is None else (r.num_padded, *shape[1:]), jnp.result_type(values)))
        like = jax.ShapeDtypeStruct(*shapes[-1])
        laid.append(like if r is None else r.hold(like))
    treedef = jax.tree.structure(jax.tree.structure(position, is_leaf=is_padded).unflatten(laid))
    structure = (treedef, classes_of(treedef))
    return Layout(mesh, num_chains, *structure, tuple(shapes), tuple(specs), rows)


def _spec(mesh: Mesh | None, name: str, leaf: Any, has_chains: bool) -> P:
    sharding = getattr(leaf, "sharding", None)
    if mesh is None or not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return P()
    if sharding.mesh != mesh:
        raise ValueError(f"position {name} lies on {sharding.mesh}, but mesh={mesh}; place it there")
    spec = sharding.spec[1:] if has_chains else sharding.spec
    if CHAINS in jax.tree.leaves(tuple(spec)):
        raise ValueError(
            f"position {name} has spec {sharding.spec}: only a leading axis of num_chains lies over "
            f"{CHAINS!r}"
        )
    return P(*spec)


@dataclass(frozen=True)
class Pins:
    """The shardings of a tree of arrays, to hold a program's outputs to those of its inputs."""

    shardings: tuple[NamedSharding | None, ...]

    @classmethod
    def of(cls, tree: PyTree) -> "Pins":
        """Read the shardings of concrete arrays."""
        found = (leaf.sharding for leaf in jax.tree.leaves(tree))
        return cls(tuple(s if isinstance(s, NamedSharding) else None for s in found))

    def __call__(self, tree: PyTree) -> PyTree:
        """Constrain a tree of the same structure to these shardings."""
        leaves, treedef = jax.tree.flatten(tree)
        pinned = [
            x if s is None else jax.lax.with_sharding_constraint(x, s)
            for x, s in zip(leaves, self.shardings, strict=True)
        ]
        return jax.tree.unflatten(treedef, pinned)
