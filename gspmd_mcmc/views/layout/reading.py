"""Read the layouts of a tree's leaves. Shapes and shardings are read, never data."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from gspmd_mcmc.placement.padding import Padded
from gspmd_mcmc.placement.positional import PositionalSharding
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.tree import PyTree, is_traced, path_str
from gspmd_mcmc.views.layout.devices import Devices, device_names, devices_of, mesh_devices
from gspmd_mcmc.views.layout.grid import Grid, cut_by_indices, cut_by_spec, spec_entries
from gspmd_mcmc.views.layout.layouts import DELETED, DEVICE, HOST, NO_ARRAY, NOWHERE, LeafLayout
from gspmd_mcmc.views.layout.notation import spec_text
from gspmd_mcmc.views.layout.remarks import remarks

NUMBERS = (bool, int, float, complex)


def read_tree(tree: PyTree, shape: tuple[int, ...] | None = None) -> tuple[LeafLayout, ...]:
    """Read the layout of every leaf; ``shape`` is given to shardings that stand alone."""
    return tuple(read_leaf(path_str(path), leaf, shape) for path, leaf in _leaves(tree))


def read_leaf(path: str, leaf: Any, shape: tuple[int, ...] | None) -> LeafLayout:
    """Read one leaf, with the remarks on it."""
    if isinstance(leaf, Padded):
        layout = replace(_read(path, leaf.values, shape), num_rows=leaf.num_rows)
    else:
        layout = _read(path, leaf, shape)
    return replace(layout, notes=layout.notes + remarks(layout))


def _leaves(tree: PyTree, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Leaves with their paths; our own objects that are no pytrees, or know their padding, opened."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda n: isinstance(n, Padded | Plate))
    for path, node in nodes:
        if hasattr(type(node), "__layout_tree__"):
            yield from _leaves(node.__layout_tree__(), prefix + path)
        elif isinstance(node, Plate):
            yield from _plate_leaves(node, prefix + path)
        else:
            yield prefix + path, node


def _plate_leaves(plate: Plate, prefix: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Leaves of a plate; its data know from it which of their rows are padding."""
    is_uneven = plate.rows.num_padded != plate.rows.num_rows
    for path, leaf in jax.tree_util.tree_leaves_with_path(plate):
        is_data = getattr(path[0], "name", None) == "data"
        yield prefix + path, Padded(leaf, plate.rows.num_rows) if is_uneven and is_data else leaf


def _read(path: str, leaf: Any, shape: tuple[int, ...] | None) -> LeafLayout:
    if isinstance(leaf, Mesh | AbstractMesh):
        return _read_mesh(path, leaf)
    if isinstance(leaf, Sharding):
        return _laid_out(path, shape, "", leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        return LeafLayout(path, leaf.shape, leaf.dtype, HOST, "host")
    if isinstance(leaf, NUMBERS):
        return LeafLayout(path, (), np.asarray(leaf).dtype, HOST, "host")
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return _read_array(path, leaf)
    return LeafLayout(path, None, type(leaf).__name__, NOWHERE, NO_ARRAY)


def _read_array(path: str, leaf: Any) -> LeafLayout:
    """Read a jax array, a tracer, a `ShapeDtypeStruct`, or whatever else has a shape."""
    shape = tuple(leaf.shape)
    if is_traced(leaf):
        sharding, label = _explicit_sharding(jax.typeof(leaf)), "traced"
    else:
        sharding, label = getattr(leaf, "sharding", None), "not placed"
    if not isinstance(sharding, Sharding) or _is_empty(sharding):
        return LeafLayout(path, shape, leaf.dtype, NOWHERE, label)
    layout = _laid_out(path, shape, leaf.dtype, sharding)
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted():
        return replace(layout, memory=DELETED)
    return layout


def _explicit_sharding(aval: Any) -> Sharding | None:
    """Return a tracer's sharding where its type has one: on a mesh whose axes are all Explicit."""
    sharding = getattr(aval, "sharding", None)
    types = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    return sharding if types and all(t == AxisType.Explicit for t in types) else None


def _is_empty(sharding: Sharding) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.mesh.empty


def _read_mesh(path: str, mesh: Mesh | AbstractMesh) -> LeafLayout:
    """Read a mesh as the layout that lays one axis over each of its axes."""
    devices, spec = mesh_devices(mesh), P(*mesh.axis_names)
    grid = cut_by_spec(devices.axes, spec_entries(spec, len(mesh.axis_names)))
    return LeafLayout(
        path, None, type(mesh).__name__, DEVICE, _label(spec, devices), spec, devices, grid
    )


def _laid_out(path: str, shape: tuple[int, ...] | None, dtype: Any, sharding: Sharding) -> LeafLayout:
    dtype = dtype or type(sharding).__name__
    if isinstance(sharding, PositionalSharding):
        return _positional(path, shape, dtype, sharding)
    if isinstance(sharding, NamedSharding):
        return _named(path, shape, dtype, sharding)
    is_single = len(sharding.device_set) == 1
    devices, grid, note = _by_indices(sharding, () if shape is None and is_single else shape)
    label = f"device {device_names(devices, [0])}" if is_single else type(sharding).__name__
    memory = _memory(sharding)
    return LeafLayout(path, shape, dtype, memory, label, None, devices, grid, notes=note)


def _positional(
    path: str, shape: tuple[int, ...] | None, dtype: Any, sharding: PositionalSharding
) -> LeafLayout:
    """Read a positional sharding through its named form, whose mesh axes mean nothing to a reader."""
    label, memory = f"Positional{sharding.shape}", _memory(sharding)
    try:
        layout = _named(path, shape, dtype, sharding.named(None if shape is None else len(shape)))
    except ValueError as error:
        return LeafLayout(path, shape, dtype, NOWHERE, label, notes=(f"does not fit: {error}",))
    devices = replace(layout.devices, axes=()) if layout.devices else None
    return LeafLayout(path, shape, dtype, memory, label, None, devices, layout.grid)


def _named(path: str, shape: tuple[int, ...] | None, dtype: Any, sharding: NamedSharding) -> LeafLayout:
    devices, spec = mesh_devices(sharding.mesh), sharding.spec
    ndim = len(spec) if shape is None else len(shape)
    if len(spec) > ndim:
        note = (f"its spec has {len(spec)} entries, it has {ndim} axes: JAX will refuse it",)
        return LeafLayout(path, shape, dtype, NOWHERE, _label(spec, devices), spec, devices, notes=note)
    grid = cut_by_spec(devices.axes, spec_entries(spec, ndim))
    return LeafLayout(path, shape, dtype, _memory(sharding), _label(spec, devices), spec, devices, grid)


def _label(spec: P, devices: Devices) -> str:
    return spec_text(spec, dict(devices.axes))


def _memory(sharding: Sharding) -> str:
    return sharding.memory_kind or DEVICE


@lru_cache(maxsize=256)
def _by_indices(
    sharding: Sharding, shape: tuple[int, ...] | None
) -> tuple[Devices, Grid | None, tuple[str, ...]]:
    """Ask a sharding for each device's slices of a shape."""
    ordered = sorted(sharding.device_set, key=lambda d: d.id)
    devices = devices_of(ordered)
    if shape is None:
        return devices, None, ()
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError as error:
        return devices, None, (f"its sharding refuses the shape: {error}",)
    grid = cut_by_indices([indices[d] for d in ordered], shape)
    return devices, grid, () if grid else ("its blocks are no grid of equal blocks: not drawn",)
