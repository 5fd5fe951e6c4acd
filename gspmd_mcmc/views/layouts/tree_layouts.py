"""Read the layouts of a tree's leaves, with remarks. Shapes and shardings are read, never data."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from gspmd_mcmc.compat.positional import PositionalSharding
from gspmd_mcmc.placement.padding import Padded
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.tree import PyTree, is_traced, path_str
from gspmd_mcmc.views.layouts.leaf_layout import (
    DELETED,
    DEVICE,
    HOST,
    NOWHERE,
    Devices,
    Grid,
    LeafLayout,
    cut_by_indices,
    cut_by_spec,
    mesh_devices,
)
from gspmd_mcmc.views.notation import LARGE_BYTES, partitions, spec_text

TRACED, NOT_PLACED = "traced", "not placed"


def read_tree(tree: PyTree, shape: tuple[int, ...] | None = None) -> tuple[LeafLayout, ...]:
    """Read the layout of every leaf; ``shape`` is given to shardings that stand alone."""
    layouts = []
    for path, leaf in _leaves(tree):
        is_padded = isinstance(leaf, Padded)
        layout = _read(path_str(path), leaf.values if is_padded else leaf, shape)
        is_rows_first = is_padded and np.ndim(leaf.values) == 1 + leaf.num_axes_after
        layout = replace(layout, num_rows=leaf.num_rows if is_rows_first else None)
        layouts.append(replace(layout, notes=(*layout.notes, *_remarks(layout))))
    return tuple(layouts)


def _leaves(tree: PyTree, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Leaves with their paths; our own objects that are no pytrees, or know their padding, opened."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda n: isinstance(n, Padded | Plate))
    for path, node in nodes:
        if hasattr(type(node), "__layout_tree__"):
            yield from _leaves(node.__layout_tree__(), prefix + path)
        elif isinstance(node, Plate):  # it knows which rows of its data are padding
            num_rows, is_uneven = node.rows.num_rows, node.rows.num_padded != node.rows.num_rows
            for inner, leaf in jax.tree_util.tree_leaves_with_path(node):
                is_data = getattr(inner[0], "name", None) == "data"
                padded = Padded(leaf, num_rows) if is_uneven and is_data else leaf
                yield prefix + path + inner, padded
        else:
            yield prefix + path, node


def _read(path: str, leaf: Any, shape: tuple[int, ...] | None) -> LeafLayout:
    """Read a mesh, a sharding, an array or its shape, a tracer, a number, or what has no layout."""
    if isinstance(leaf, Mesh | AbstractMesh):  # as the layout that lays one axis over each of its axes
        fields = _named(leaf, P(*leaf.axis_names), None)
        return LeafLayout(path, None, type(leaf).__name__, DEVICE, **fields)
    if isinstance(leaf, Sharding):
        return LeafLayout(path, shape, type(leaf).__name__, **_laid_out(leaf, shape))
    if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic):
        array = np.asarray(leaf)
        return LeafLayout(path, array.shape, array.dtype, HOST, "host")
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return LeafLayout(path, None, type(leaf).__name__, NOWHERE, "no array")
    sharding, label = getattr(leaf, "sharding", None), NOT_PLACED
    if is_traced(
        leaf
    ):  # it has a sharding where its type has one: on a mesh whose axes are all Explicit
        sharding, label = getattr(jax.typeof(leaf), "sharding", None), TRACED
        types = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
        sharding = sharding if types and set(types) == {AxisType.Explicit} else None
    is_empty = isinstance(sharding, NamedSharding) and sharding.mesh.empty
    if not isinstance(sharding, Sharding) or is_empty:
        return LeafLayout(path, tuple(leaf.shape), leaf.dtype, NOWHERE, label)
    fields = _laid_out(sharding, tuple(leaf.shape))
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
        fields["memory"] = DELETED
    return LeafLayout(path, tuple(leaf.shape), leaf.dtype, **fields)


def _laid_out(sharding: Sharding, shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the fields of a `LeafLayout` that follow from a sharding, and a shape if there is one."""
    memory = {"memory": sharding.memory_kind or DEVICE}
    if isinstance(sharding, PositionalSharding):  # the mesh axes of its named form mean nothing
        label = f"Positional{sharding.shape}"
        try:
            named = sharding.named(None if shape is None else len(shape))
        except ValueError as error:
            return {"memory": NOWHERE, "label": label, "notes": (f"does not fit: {error}",)}
        devices = replace(mesh_devices(named.mesh), axes=())
        grid = _named(named.mesh, named.spec, shape)["grid"]
        return memory | {"label": label, "devices": devices, "grid": grid}
    if isinstance(sharding, NamedSharding):
        return memory | _named(sharding.mesh, sharding.spec, shape)
    is_single = len(sharding.device_set) == 1
    devices, grid, notes = _by_indices(sharding, () if shape is None and is_single else shape)
    label = f"device {devices.names([0])}" if is_single else type(sharding).__name__
    return memory | {"label": label, "devices": devices, "grid": grid, "notes": notes}


def _named(mesh: Mesh | AbstractMesh, spec: P, shape: tuple[int, ...] | None) -> dict[str, Any]:
    devices, ndim = mesh_devices(mesh), len(spec) if shape is None else len(shape)
    fields = {"label": spec_text(spec, dict(devices.axes)), "spec": spec, "devices": devices}
    if len(spec) > ndim:
        note = f"its spec has {len(spec)} entries, it has {ndim} axes: JAX will refuse it"
        return fields | {"memory": NOWHERE, "notes": (note,)}
    return fields | {"grid": cut_by_spec(devices.axes, spec, ndim)}


@lru_cache(maxsize=256)
def _by_indices(
    sharding: Sharding, shape: tuple[int, ...] | None
) -> tuple[Devices, Grid | None, tuple[str, ...]]:
    """Ask a sharding for each device's slices of a shape."""
    ordered = sorted(sharding.device_set, key=lambda d: d.id)
    devices = Devices.of(ordered)
    if shape is None:
        return devices, None, ()
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError as error:
        return devices, None, (f"its sharding refuses the shape: {error}",)
    grid = cut_by_indices([indices[d] for d in ordered], shape)
    return devices, grid, () if grid else ("its blocks are not a grid of equal blocks: not drawn",)


def _remarks(leaf: LeafLayout) -> Iterator[str]:
    """Yield remarks on a leaf; the same words for the same thing, so that they can be gathered."""
    if leaf.memory == DELETED:
        yield "deleted or donated to a program: it no longer holds memory"
    elif leaf.label == TRACED:
        yield "traced: the compiler chooses its layout, so look at it outside jit"
    elif leaf.label == NOT_PLACED:
        yield "has no sharding: give it one or place it on a mesh"
    elif leaf.shape is None and leaf.grid is None and leaf.devices:
        yield "a sharding alone: visualize(sharding, shape=...) draws its blocks"
    elif leaf.memory not in (DEVICE, HOST, NOWHERE):
        yield f"in the memory {leaf.memory}, not counted in the total"
    if leaf.shape is not None and leaf.num_rows is not None:
        num_pad = leaf.shape[0] - leaf.num_rows
        yield f"{leaf.num_rows} rows + {num_pad} pad (copies of the last real row)"
    if leaf.shape is not None and leaf.grid is not None:
        for axis, (size, parts) in enumerate(zip(leaf.shape, leaf.grid.parts, strict=True)):
            if size % parts:
                yield (
                    f"axis {axis} has {size} elements, not a multiple of its {parts} blocks: pad it by "
                    f"{-size % parts} to {size + -size % parts} (JAX refuses it as it is)"
                )
    if leaf.spec is not None and P.UNCONSTRAINED in partitions(leaf.spec):
        yield "any: an axis that is left to the compiler"
    if leaf.spec is not None and leaf.spec.unreduced:
        axes = ", ".join(sorted(leaf.spec.unreduced))
        yield f"not yet summed over {axes}: its copies are partial sums"
    is_whole = leaf.num_shards == 1 and leaf.replication > 1 and leaf.memory == DEVICE
    if is_whole and (leaf.bytes_per_device or 0) >= LARGE_BYTES:
        yield "large and whole on every device: lay it over a mesh axis if it does not have to be"
