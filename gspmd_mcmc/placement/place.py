"""Put a tree of arrays on a mesh."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.multihost.agreement import require_agreement
from gspmd_mcmc.multihost.processes import is_local, spans_processes
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.mesh import axes_of
from gspmd_mcmc.placement.numbers import check_numbers, converted, is_sparse, refuse_sparse
from gspmd_mcmc.placement.padding import (
    Padded,
    is_padded,
    padded_rows,
    real_rows,
    refuse_laid_by_groups,
    values_of,
)
from gspmd_mcmc.tree import PyTree, path_str


@on_any_mesh
def place(tree: PyTree, mesh: Mesh | AbstractMesh | NamedSharding, specs: PyTree = None) -> PyTree:
    """Lay a tree of arrays over a mesh.

    On a mesh of several processes, each process passes the same whole arrays and its devices take their
    parts. For rows that one process alone holds see `place_local` and `place_from_reader`.

    Parameters
    ----------
    tree
        NumPy arrays (memory-mapped ones are read shard by shard), jax arrays, scalars, or
        ``jax.ShapeDtypeStruct``, of which nothing is made.
    mesh
        A mesh (`make_mesh`, `jax.make_mesh`, or an abstract one), or one sharding for all leaves, a
        ``NamedSharding`` or a `PositionalSharding`, which states mesh, spec and kind of memory.
    specs
        A `PartitionSpec`, or a prefix tree of them: one spec serves the whole subtree below it. None:
        whole on every device.

    Returns
    -------
    PyTree
        The same tree of jax arrays, each with a `NamedSharding`; of ``ShapeDtypeStruct`` if a leaf was
        only a shape, or the mesh is abstract. A leaf whose leading axis the mesh does not divide comes
        back as `Padded`: rows at its end copy its last row, and `Plate` masks them.

    Raises
    ------
    TypeError
        If the mesh is neither a mesh nor such a sharding, or a leaf is a sparse matrix (one of JAX may
        be whole on every device).
    ValueError
        If a spec has more entries than a leaf has axes, names no axis of the mesh, or splits an axis
        other than the leading one unevenly; if the prefix tree does not fit; if a positional sharding
        does not fit a leaf's rank. The message names the leaf.
    ProcessesDisagree
        If processes give leaves of other names, shapes or dtypes, or other specs.
    """
    refuse_laid_by_groups(tree, "place:", "Groups(keys, mesh, spec) lays them on another mesh")
    memory_kind = None
    if isinstance(mesh, NamedSharding):
        if specs is not None:
            raise ValueError(
                f"place: the sharding has its spec, {mesh.spec}; expected no specs, got {specs}"
            )
        leaf_specs, mesh, memory_kind = _specs_of(mesh, tree), mesh.mesh, mesh.memory_kind
    elif isinstance(mesh, Mesh | AbstractMesh):
        leaf_specs = _broadcast(P() if specs is None else specs, tree)
    else:
        raise TypeError(
            "place: expected a mesh (gspmd_mcmc.make_mesh), a NamedSharding or a PositionalSharding, "
            f"got a {type(mesh).__name__}"
        )
    refuse_sparse("leaf ", _without_whole_sparse(tree, leaf_specs))
    if spans_processes(mesh):
        require_agreement("place", _facts(tree, mesh, leaf_specs))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, spec: _place_leaf(path_str(path), real_rows(leaf), mesh, spec, memory_kind),
        tree,
        leaf_specs,
        is_leaf=is_padded,
    )


def _facts(tree: PyTree, mesh: Any, specs: PyTree) -> dict[str, str]:
    """State what processes have to give alike; of the arrays their kind, not their values."""
    facts = {"mesh": str(dict(mesh.shape))}
    given = jax.tree.leaves(specs, is_leaf=_is_spec)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded)
    for (path, leaf), spec in zip(leaves, given, strict=True):
        array = values_of(leaf)
        kind = f"{getattr(array, 'dtype', type(array).__name__)}{list(np.shape(array))}"
        facts[f"leaf {path_str(path)}"] = f"{kind} under {spec}"
    return facts


def _specs_of(sharding: NamedSharding, tree: PyTree) -> PyTree:
    """Give every leaf the spec of a sharding, or what its ``spec_at(ndim)`` returns for the leaf."""
    spec_at = getattr(sharding, "spec_at", None)

    def spec_of(path: Any, leaf: Any) -> P:
        if spec_at is None:
            return sharding.spec
        try:
            return spec_at(np.ndim(values_of(leaf)))
        except ValueError as error:
            raise ValueError(f"leaf {path_str(path)}: {error}") from error

    return jax.tree_util.tree_map_with_path(spec_of, tree, is_leaf=is_padded)


def _broadcast(specs: PyTree, tree: PyTree) -> PyTree:
    """Give every leaf of the tree the spec that stands above it."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=_is_spec):
        if not _is_spec(spec):
            raise ValueError(
                f"specs{path_str(path)}: expected a PartitionSpec, got {type(spec).__name__}"
            )

    def fill(spec: P, below: PyTree) -> PyTree:
        return jax.tree.map(lambda _: spec, below, is_leaf=is_padded)

    try:
        return jax.tree.map(fill, specs, tree, is_leaf=_is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "specs is no prefix of the tree: give one PartitionSpec, or a tree of them whose nodes "
            f"are the tree's own. specs {jax.tree.structure(specs, is_leaf=_is_spec)}, "
            f"tree {jax.tree.structure(tree)}"
        ) from error


def _without_whole_sparse(tree: PyTree, specs: PyTree) -> PyTree:
    """Leave sparse matrices of JAX out that are to be whole on every device, as their arrays may be."""

    def kept(node: Any, spec: PyTree) -> Any:
        is_cut = any(map(any, jax.tree.leaves(spec, is_leaf=_is_spec)))
        return node if is_cut or jax.tree_util.all_leaves([node]) else None

    return jax.tree.map(kept, tree, specs, is_leaf=lambda x: is_padded(x) or is_sparse(x))


def _is_spec(node: Any) -> bool:
    return isinstance(node, P)


def _place_leaf(name: str, leaf: Any, mesh: Mesh | AbstractMesh, spec: P, memory_kind: Any) -> Any:
    is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    array = leaf if is_array else np.asarray(leaf)
    if isinstance(array, jax.Array) and is_local(array) and spans_processes(mesh):
        array = np.asarray(array)  # Each process cuts its parts of it, and nothing is sent.
    check_numbers(f"leaf {name}", array)
    splits = check_spec(name, array.shape, mesh, spec)
    sharding = NamedSharding(mesh, spec, memory_kind=memory_kind)
    shape = (padded_rows(array.shape[0], splits[0]), *array.shape[1:]) if splits else array.shape
    if isinstance(array, jax.ShapeDtypeStruct) or isinstance(mesh, AbstractMesh):
        dtype = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
        values: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    elif isinstance(array, jax.Array):
        if shape != array.shape:
            last = jnp.broadcast_to(array[-1:], (shape[0] - array.shape[0], *array.shape[1:]))
            array = jnp.concatenate([array, last])
        values = jax.device_put(array, sharding)
    else:  # Each device's shard is read by itself, so that no device and no copy holds the whole.
        dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
        values = jax.make_array_from_callback(
            shape, sharding, lambda index: _read_shard(name, array, shape, index, dtype)
        )
    return values if shape == np.shape(leaf) else Padded(values, np.shape(leaf)[0])


def check_spec(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, spec: P) -> list[int]:
    """Return in how many parts the spec cuts each axis it names; raise where it does not fit."""
    where = f"leaf {name} of shape {shape} under {spec} on mesh {dict(mesh.shape)}"
    if len(spec) > len(shape):
        raise ValueError(f"{where}: the spec has {len(spec)} entries, the leaf {len(shape)} axes")
    splits = []
    for axis, entry in enumerate(spec):
        names = axes_of(entry)
        unknown = [n for n in names if n not in mesh.shape]
        if unknown:
            raise ValueError(f"{where}: the mesh has no axis {unknown[0]!r}")
        splits.append(math.prod(mesh.shape[n] for n in names))
        if axis > 0 and shape[axis] % splits[-1]:
            raise ValueError(
                f"{where}: axis {axis} has {shape[axis]} elements, which {splits[-1]} devices do not "
                "divide; only the leading axis (rows) is padded"
            )
    if splits and shape[0] == 0 and splits[0] > 1:
        raise ValueError(f"{where}: there are no rows to lay over {splits[0]} devices")
    return splits


def _read_shard(name: str, array: np.ndarray, shape: tuple[int, ...], index, dtype) -> np.ndarray:
    """Return a shard's real rows, then copies of the array's last row. Always a fresh copy."""
    if not shape:
        return converted(f"leaf {name}", array, dtype)
    start, stop, _ = index[0].indices(shape[0])
    real = converted(f"leaf {name}", array[(slice(start, stop), *index[1:])], dtype)
    missing = stop - start - real.shape[0]
    if not missing:
        return real
    last = converted(f"leaf {name}", array[(slice(-1, None), *index[1:])], dtype)
    return np.concatenate([real, np.repeat(last, missing, axis=0)])
