"""Meshes of devices, with axes named for what they carry."""

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from gspmd_mcmc.tree import is_traced

MOST_CORES = 2  # what was measured; tiles for more would only take more memory


def make_mesh(
    *,
    chains: int | None = None,
    data: int | None = None,
    model: int | None = None,
    devices: Sequence[Any] | np.ndarray | None = None,
) -> Mesh:
    """Make a mesh with Auto axes over devices.

    Parameters
    ----------
    chains, data, model
        Sizes of the axes ``"chains"``, ``"data"`` and ``"model"``, which the mesh has in this
        order. At most one may be -1: it takes the devices that are left. None leaves an axis out;
        with all three left out, the mesh is ``data=-1``.
    devices
        The devices to lay out; all of ``jax.devices()`` when None. A list is laid out as TPU chips are
        joined: neighbors on an axis are neighbors on the chips, and the first axes go over slices and
        processes. An array, or nested lists, is a grid of the mesh's shape, taken as it is.

    Returns
    -------
    jax.sharding.Mesh
        A plain mesh, every axis of type Auto, so that the compiler places the collectives.

    Raises
    ------
    ValueError
        If the sizes do not multiply to the number of devices, or a grid has another shape.
    """
    given = jax.devices() if devices is None else devices
    grid = np.asarray(given, object)
    if not grid.size or not all(isinstance(device, jax.Device) for device in grid.flat):
        raise ValueError(
            "make_mesh: expected devices, at least one, such as jax.devices()[:4], got "
            f"devices={given!r}"
        )
    sizes = _given({"chains": chains, "data": data, "model": model}) or {"data": -1}
    sizes = _fill_in(sizes, grid.size)
    shape = tuple(map(int, sizes.values()))
    if grid.ndim < 2 and not isinstance(given, np.ndarray):
        grid = joined_on_chips(grid.ravel().tolist(), shape)
    if grid.shape != shape:
        raise ValueError(
            f"make_mesh({_shown(sizes)}): an array of devices is a grid that is taken as it is: "
            f"expected shape {shape}, got {grid.shape}. Reshape it, or pass a list, "
            "devices.ravel().tolist(), which is laid out as the chips are joined"
        )
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def joined_on_chips(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Lay devices out so that neighbors on the mesh are neighbors on the chips; CPUs as they come.

    The devices of a slice, and in it those of a process, stay side by side: links between slices are
    slow, and a process holds rows that follow each other (`local_rows`). The first axes go over them.
    """
    as_they_come = np.asarray(devices, object).reshape(shape)
    if devices[0].platform == "cpu":
        return as_they_come
    groups: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for device in devices:
        groups[getattr(device, "slice_index", 0), device.process_index].append(device)
    among, rest = [], len(groups)
    for size in shape:
        among.append(math.gcd(size, rest))
        rest //= among[-1]
    within = [size // parts for size, parts in zip(shape, among, strict=True)]
    try:
        blocks = [
            mesh_utils.create_device_mesh(within, group, allow_split_physical_axes=True)
            for _, group in sorted(groups.items())
        ]
    except (AssertionError, NotImplementedError, ValueError):  # They are no box of chips.
        return as_they_come
    # [*among, *within] -> an axis of the mesh for each pair
    grid = np.asarray(blocks, object).reshape(*among, *within)
    order = [axis + part for axis in range(len(shape)) for part in (0, len(shape))]
    return grid.transpose(order).reshape(shape)


def make_abstract_mesh(
    *, chains: int | None = None, data: int | None = None, model: int | None = None
) -> AbstractMesh:
    """Make a mesh with Auto axes of devices that are not there, to plan a layout for.

    `place` on it gives shapes instead of arrays; `plan` and `visualize` take them.

    Parameters
    ----------
    chains, data, model
        Sizes of the axes, as in `make_mesh`; at least one.

    Raises
    ------
    ValueError
        If no size is given, or one is less than 1.
    """
    sizes = _given({"chains": chains, "data": data, "model": model})
    if not sizes or any(not isinstance(n, int | np.integer) or n < 1 for n in sizes.values()):
        raise ValueError(
            f"make_abstract_mesh({_shown(sizes)}): expected the size of at least one axis, each an "
            "integer of at least 1"
        )
    axis_types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes), axis_types=axis_types)


def _given(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if size is not None}


def _shown(sizes: dict[str, Any]) -> str:
    return ", ".join(f"{name}={size!r}" for name, size in sizes.items())


def _fill_in(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Replace -1 by the devices that are left, and check the product."""
    call, given = f"make_mesh({_shown(sizes)})", list(sizes.values())
    if not all(isinstance(size, int | np.integer) for size in given):
        raise ValueError(f"{call}: expected integers")
    if any(size != -1 and size < 1 for size in given):
        raise ValueError(f"{call}: an axis has at least 1 device; -1 takes what is left")
    if given.count(-1) > 1:
        raise ValueError(f"{call}: only one axis can be -1")
    fixed = math.prod(size for size in given if size != -1)
    if -1 in given and num_devices % fixed == 0:
        return {n: num_devices // fixed if s == -1 else s for n, s in sizes.items()}
    if fixed != num_devices:
        raise ValueError(
            f"{call}: the axes multiply to {fixed}, but there are {num_devices} devices. Change the "
            "sizes, or pass devices=jax.devices()[:n]; on a CPU, "
            'jax.config.update("jax_num_cpu_devices", n) before the first use of JAX gives n devices.'
        )
    return sizes


def is_auto(mesh: Mesh | AbstractMesh) -> bool:
    """Tell whether all axes of a mesh are Auto, as those of no mesh at all are."""
    return all(kind == AxisType.Auto for kind in mesh.axis_types)


def auto_mesh(what: str, mesh: Any) -> Any:
    """Return a mesh with Auto axes, where the compiler places the reductions.

    Raises
    ------
    TypeError
        If this is no mesh; ``what`` is what it is called.
    ValueError
        If an axis is Manual, as inside `jax.shard_map`.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{what}: expected a mesh (gspmd_mcmc.make_mesh, jax.make_mesh), got {mesh!r}, a "
            f"{type(mesh).__name__}"
        )
    if is_auto(mesh):
        return mesh
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(
            f"{what}: axes of {dict(mesh.shape)} are Manual, as inside jax.shard_map, where each "
            "device runs a program of its own. Call this outside; the compiler places the collectives"
        )
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def cores_of_device(mesh: Mesh | AbstractMesh | None) -> int:
    """Return how many cores of this machine a CPU device of a mesh has; None is a mesh of one."""
    cores = (os.cpu_count() or 1) // (1 if mesh is None else mesh.size)
    return max(1, min(cores, MOST_CORES))


def named_sharding(x: Any) -> NamedSharding | None:
    """Return the named sharding of an array or a shape; None where it has none, or is traced."""
    if is_traced(x) or not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return None
    return x.sharding if isinstance(x.sharding, NamedSharding) else None


def axes_of(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a `PartitionSpec` names, or a user's name or names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
