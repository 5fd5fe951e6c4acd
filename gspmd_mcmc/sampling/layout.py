"""The layout of chains: which mesh axis they lie over, and where a position's leaves lie."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.kernels.metrics import is_metric
from gspmd_mcmc.targets.local import is_row_values, rows_of
from gspmd_mcmc.tree import PyTree, path_str

CHAINS = "chains"


@dataclass(frozen=True)
class Layout:
    """Where positions live; hashable, so that a program is compiled once for it.

    Attributes
    ----------
    mesh
        The mesh, or None for one device.
    specs
        For each leaf of a position without chains, its spec.
    """

    mesh: Mesh | None
    specs: tuple[P, ...]

    @property
    def chain_axis(self) -> str | None:
        """The mesh axis that chains lie over, if there is one."""
        return CHAINS if self.mesh is not None and CHAINS in self.mesh.shape else None

    def vmap(self, function: Callable, in_axes: tuple) -> Callable:
        """Map over chains, each on its part of the mesh."""
        return jax.vmap(function, in_axes=in_axes, spmd_axis_name=self.chain_axis)

    def pin(self, tree: PyTree, *leading: str | None) -> PyTree:
        """Constrain a tree like the position, its leaves [*leading, ...], to the position's layout."""
        if self.mesh is None:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        pinned = [
            jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*leading, *spec)))
            for x, spec in zip(leaves, self.specs, strict=True)
        ]
        return jax.tree.unflatten(treedef, pinned)

    def pin_like(self, tree: PyTree, positions: PyTree, *, of_each_chain: bool = False) -> PyTree:
        """Pin those parts of a tree that are like the positions or a number a chain; leave the others.

        What a warm-up carries must lie in every window as it does in the first: were it the compiler's
        choice, all programs of a window would be compiled twice.

        Parameters
        ----------
        tree
            Any tree. A part is like the positions when it has their structure and its leaves end in the
            shapes of one chain's position, [*leading, ...]. A first axis as long as there are chains is
            theirs, but for metrics: all chains share them. A vector as long as there are chains is
            theirs too.
        positions
            Leaves [chains, ...].
        of_each_chain
            Whether every leaf has a first axis of chains, metrics too.
        """
        if self.mesh is None:
            return tree
        like = Like.of(positions)

        def pin(chain_axis: str | None, part: PyTree) -> PyTree:
            if like.fits(part):
                return self._pin_part(like, chain_axis, part)
            is_of_chains = of_each_chain or jnp.shape(part) == (like.num_chains,)
            return self.pin_chains(part) if chain_axis and is_of_chains else part

        def pin_all(part: PyTree) -> PyTree:
            chain_axis = None if is_shared(part) else self.chain_axis
            return jax.tree.map(partial(pin, chain_axis), part, is_leaf=like.fits)

        def is_shared(part: PyTree) -> bool:
            return is_metric(part) and not of_each_chain

        return jax.tree.map(pin_all, tree, is_leaf=lambda part: is_shared(part) or like.fits(part))

    def _pin_part(self, like: "Like", chain_axis: str | None, part: PyTree) -> PyTree:
        num_leading, first = like.leading(part)
        leads = chain_axis if first == like.num_chains else None
        return self.pin(part, *((leads, *(None,) * (num_leading - 1)) if num_leading else ()))

    def of_kept(self, kept: PyTree, position: PyTree) -> "Layout":
        """Return the layout of what is kept of positions: theirs where it is like them."""
        leaves = jax.tree.leaves(kept, is_leaf=is_row_values)
        if jax.tree.structure(kept, is_leaf=is_row_values) == jax.tree.structure(position):
            return self
        specs = tuple(P(x.rows.axes) if is_row_values(x) else P() for x in leaves)
        return replace(self, specs=specs)

    def pin_chains(self, tree: PyTree) -> PyTree:
        """Constrain leaves [chains, ...] of any shape to lie over the chain axis, whole otherwise."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, P(self.chain_axis))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)


@dataclass(frozen=True)
class Like:
    """The structure and the shapes of one chain's position; hashable."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    num_chains: int

    @classmethod
    def of(cls, positions: PyTree) -> "Like":
        """Read them off positions with leaves [chains, ...]."""
        leaves, treedef = jax.tree.flatten(positions)
        return cls(treedef, tuple(x.shape[1:] for x in leaves), leaves[0].shape[0])

    def fits(self, part: PyTree) -> bool:
        """Tell whether a tree is like the position, its leaves [*leading, ...]."""
        if jax.tree.structure(part) != self.treedef:
            return False
        heads = {x.shape[: x.ndim - len(s)] for x, s in self._pairs(part)}
        return len(heads) == 1 and all(x.shape[x.ndim - len(s) :] == s for x, s in self._pairs(part))

    def leading(self, part: PyTree) -> tuple[int, int | None]:
        """Return how many leading axes there are, and the length of the first."""
        x, shape = next(self._pairs(part))
        count = x.ndim - len(shape)
        return count, x.shape[0] if count else None

    def _pairs(self, part: PyTree):
        return zip(jax.tree.leaves(part), self.shapes, strict=True)


def read_layout(
    mesh: Mesh | None, target: Any, position: PyTree, num_chains: int, has_chains: bool
) -> Layout:
    """Read where a position's leaves lie; what no mesh has placed is whole on every device.

    Leaves that are local to a plate of the target lie where its rows do.
    """
    if mesh is not None:
        size = mesh.shape.get(CHAINS, 1)
        if num_chains % size:
            raise ValueError(
                f"num_chains={num_chains} does not divide over mesh axis {CHAINS!r} of size {size}; "
                f"use a multiple of {size}, or a mesh with fewer chain devices"
            )
    leaves = jax.tree_util.tree_leaves_with_path(position)
    specs = [_spec(mesh, path_str(path), leaf, has_chains) for path, leaf in leaves]
    found = rows_of(target, position)
    specs = [s if r is None else P(r.axes, *s[1:]) for s, r in zip(specs, found, strict=True)]
    return Layout(mesh, tuple(specs))


def _spec(mesh: Mesh | None, name: str, leaf, has_chains: bool) -> P:
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
    """The shardings of a tree of arrays, to hold a program's outputs to those of its inputs.

    A carry whose layout the compiler chose anew would compile the next chunk again.
    """

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
