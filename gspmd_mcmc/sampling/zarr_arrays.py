"""The arrays of a store of draws: which leaves they are, and how a device's shard is written."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.rows import named_leaves
from gspmd_mcmc.sampling import zarr_format
from gspmd_mcmc.sampling.zarr_format import ARVIZ_NAMES, POSTERIOR, STATS, Document
from gspmd_mcmc.targets.local import is_row_values, without
from gspmd_mcmc.tree import PyTree


def chosen(argument: str, asked: Iterable[str] | None, names: list[str]) -> dict[str, str]:
    """Return the names that are asked for, each with what asked for it: a name or its beginning.

    Raises
    ------
    ValueError
        If something asks for no leaf.
    """
    if asked is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for item in asked:
        fits = [item] if item in names else [name for name in names if name.startswith(item)]
        if not fits:
            raise ValueError(
                f"{argument}: no leaf has a name that begins with {item!r}; there are {names}"
            )
        found |= {name: item for name in fits if found.get(name) != name}
    if not found:
        raise ValueError(
            f"{argument}: expected one name of a leaf or more, got none; there are {names}"
        )
    return found


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a run's draws, and where each is in the store.

    Attributes
    ----------
    treedef
        The structure of what is collected, local latents as leaves.
    names, paths, dtypes
        Of each leaf, those of what is collected first and the stats then: its plain name; its path in
        the store, None of what is not kept; what its floats are to be on disk, None for as they are.
    entries
        Name, array and path in the tree of each leaf that is collected and kept, for JSON.
    """

    treedef: Any
    names: list[str]
    paths: list[str | None]
    dtypes: list[str | None]
    entries: list[dict[str, Any]]

    @classmethod
    def of(cls, buffers: PyTree, asked: Iterable[str] | None, dtype: Any) -> "Leaves":
        """Read them off buffers, with what a user asked for; the errors are those of `chosen`."""
        steps, treedef = jax.tree_util.tree_flatten_with_path(buffers[0], is_leaf=is_row_values)
        names = list(named_leaves(jax.tree.unflatten(treedef, range(len(steps)))))
        kept, arrays = chosen("leaves", asked, names), zarr_format.disk_names(names)
        entries = [
            {"name": name, "array": array, "path": zarr_format.steps_of(path)}
            for (path, _), name, array in zip(steps, names, arrays, strict=True)
            if name in kept
        ]
        paths = [f"{POSTERIOR}/{a}" if n in kept else None for n, a in zip(names, arrays, strict=True)]
        stats = sorted(buffers[1])
        paths += [f"{STATS}/{ARVIZ_NAMES.get(name, name)}" for name in stats]
        dtypes = [*_dtypes(dtype, names), *(None for _ in stats)]
        return cls(treedef, [*names, *stats], paths, dtypes, entries)

    def documents(self, buffers: PyTree, num_samples: int, compression: int) -> dict[str, Document]:
        """Return the documents of a store for so many draws, by path."""
        found: dict[str, Document] = {}
        num_chains = buffers[1]["log_density"].shape[0]
        for group in (POSTERIOR, STATS):
            found[group] = zarr_format.group_document({"inference_library": "gspmd_mcmc"})
            found[f"{group}/chain"] = zarr_format.coordinate_document("chain", num_chains)
            found[f"{group}/draw"] = zarr_format.coordinate_document("draw", num_samples)
        leaves = _leaves_of(buffers, is_leaf=is_row_values)
        for path, leaf, dtype in zip(self.paths, leaves, self.dtypes, strict=True):
            if path is not None:
                found[path] = _document(path, leaf, num_samples, dtype, compression)
        return found

    def write(
        self, arrays: "dict[str, ArrayOnDisk]", buffers: PyTree, start: int, count: int, first: int
    ) -> None:
        """Write draws of buffers to the arrays, by path; see `ArrayOnDisk.write`."""
        for path, leaf in zip(self.paths, _leaves_of(buffers), strict=True):
            if path is not None:
                arrays[path].write(leaf, start, count, first)

    def position(self, arrays: dict[str, Any]) -> PyTree:
        """Return the tree of what was collected, of arrays by path, without the leaves not kept."""
        paths = self.paths[: self.treedef.num_leaves]
        leaves = [path and arrays[path] for path in paths]
        return without(
            jax.tree.unflatten(self.treedef, [x or 0 for x in leaves]), [not p for p in paths]
        )


def _leaves_of(buffers: PyTree, is_leaf: Callable | None = None) -> list:
    """Return the leaves of what was collected, and the stats in the order of their names."""
    collected, stats = buffers
    return [*jax.tree.leaves(collected, is_leaf=is_leaf), *(stats[name] for name in sorted(stats))]


def _dtypes(dtype: Any, names: list[str]) -> list[str | None]:
    if not isinstance(dtype, Mapping):
        return [dtype] * len(names)
    found = chosen("dtype", dtype, names)
    return [dtype[found[name]] if name in found else None for name in names]


def _document(path: str, leaf: Any, num_samples: int, dtype: str | None, compression: int) -> Document:
    array = leaf.values if is_row_values(leaf) else leaf
    chains, rows, *rest = array.shape
    if is_row_values(leaf):
        rest[0] = leaf.rows.num_rows
    on_disk = disk_dtype(array.dtype, dtype)
    shard = array.sharding.shard_shape(array.shape)
    chunks = zarr_format.chunk_shape(shard, max(rows, 1), num_samples, on_disk.itemsize)
    shape = (chains, num_samples, *rest)
    return zarr_format.array_document(path.split("/")[1], shape, on_disk, chunks, compression)


def disk_dtype(dtype: Any, asked: str | None) -> np.dtype:
    """Return the dtype of a leaf on disk: floats as asked; as float32 what NumPy does not know."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(dtype)
    return np.dtype(asked or (np.float32 if np.dtype(dtype).kind == "V" else dtype))


class ArrayOnDisk:
    """One array of the store, open for writing.

    Parameters
    ----------
    folder, path
        Where the store is, and the array in it.
    document
        Its document, for all draws that are asked for.
    """

    def __init__(self, folder: Path, path: str, document: Document):
        self._store = zarr_format.open_array(folder / path, document, is_written=True)
        self.shape, self.dtype = tuple(document["shape"]), np.dtype(document["data_type"])

    def write(self, buffer: jax.Array, start: int, count: int, first: int) -> None:
        """Write ``count`` draws of a buffer from its draw ``start`` on, as draws ``first`` and on.

        Each shard goes to its place; of shards that are copies of each other one process writes one.
        """
        under_way: list = []
        for shard in buffer.addressable_shards:
            if shard.replica_id == 0:
                chains, _, *rest = shard.index
                values = np.asarray(shard.data)[:, start : start + count]
                under_way += self._write((chains, slice(first, first + count), *rest), values)
        for write in under_way:
            write.result()

    def _write(self, region: tuple[slice, ...], values: np.ndarray) -> list:
        """Begin to write values to a region; what is beyond the array is a pad, and is left out."""
        place = tuple(slice(*s.indices(n)[:2]) for s, n in zip(region, self.shape, strict=True))
        sizes = [s.stop - s.start for s in place]
        if min(sizes) <= 0:
            return []
        real = values[tuple(slice(size) for size in sizes)].astype(self.dtype, copy=False)
        return [self._store[place].write(real)]


def write_coordinates(folder: Path, documents: dict[str, Document]) -> None:
    """Write 0, 1, 2, ... to the coordinates, ahead of the draws."""
    for path, document in documents.items():
        if path.endswith(("/chain", "/draw")):
            store = zarr_format.open_array(folder / path, document, is_written=True)
            store.write(np.arange(document["shape"][0])).result()
