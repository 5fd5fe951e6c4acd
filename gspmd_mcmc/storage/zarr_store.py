"""Draws written to disk as they are made: a Zarr v3 store, and one file that says how many it has.

A store has the arrays ``posterior/NAME`` [chain, draw, ...] and ``sample_stats/NAME`` [chain, draw].
zarr-python makes the documents of arrays and groups; TensorStore writes chunks. ``zarr.json`` at the
root holds the attributes and, as consolidated metadata, all documents: replacing that one file makes
draws count, in every array at once. Chunks that it does not cover yet are on disk, but no reader sees
them.
"""

import concurrent.futures
import contextlib
import copy
import functools
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import SequenceKey

from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.errors import CALLER_OF_SAMPLE, SamplingWarning
from gspmd_mcmc.extras import need, require
from gspmd_mcmc.multihost.agreement import of_all, on_first
from gspmd_mcmc.storage.datatree import (
    ARVIZ_NAMES,
    CONSTANT,
    POSTERIOR,
    STATS,
    dim_of,
    disk_names,
    rows_of,
)
from gspmd_mcmc.storage.lock import NAME as LOCK
from gspmd_mcmc.storage.lock import FolderLock, Locked
from gspmd_mcmc.storage.paths import local_path
from gspmd_mcmc.storage.rounding import Rounding
from gspmd_mcmc.storage.saved_draws import (
    LOSSES,
    ROOT,
    VERSION,
    Document,
    NotOurStore,
    nodes_of,
    open_array,
    read_root,
    saved_arrays,
    saved_stats,
)
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.targets.local import is_row_values, without
from gspmd_mcmc.tree import PyTree

DTYPES = ("float16", "float32", "float64")
# Parts of a chunk that are read and decompressed alone, and the least that a file should hold.
PIECE_BYTES = 2**20
COORDINATE_ROWS = 2**16
# The filters of warnings are those of all threads: a second one would put back what the first has set.
_FILTERS = threading.Lock()


class DrawsNotSaved(RuntimeError):
    """Draws cannot be written; the message says why, and how many draws are safe on disk.

    Attributes
    ----------
    num_saved
        Draws of each chain that are on disk and can be opened.
    """

    def __init__(self, message: str, num_saved: int = 0):
        super().__init__(message)
        self.num_saved = num_saved


class ZarrSink(Sink):
    """A Zarr v3 store that `sample` writes its draws to as they are made.

    However many draws there are, the run needs memory for two buffers of them: while one fills on the
    devices, the other is copied to the host and written, by every process its own shards. The store
    can be opened at any time, also during the run, by ``xarray.open_datatree(path, engine="zarr")``, by
    ArviZ and by `open_draws`. It has the groups ``posterior`` and ``sample_stats`` with dims
    (chain, draw, ...), as `Draws.to_datatree` does. Readers see whole draws, as many in every array.
    After a kill they see those that were written by then, at most ``flush_seconds`` and a write behind.

    Needs the extra ``storage``. There are two more ways to keep little of large latents:
    ``sample(collect=...)`` keeps functions of the position, and ``gspmd_mcmc.diagnostics`` has
    streaming moments.

    Parameters
    ----------
    path
        A folder that does not exist yet; ``~`` is your home folder. Several processes must share its
        file system. Buckets (``gs://``, ``s3://``) are refused: copy the folder there.
    leaves
        Which leaves of the draws are kept: names as in `Draws.summary`, or beginnings of names. A
        name that a leaf has stands for that leaf alone. All by default.
    dtype
        "float16", "float32" or "float64" for the floats among the leaves, or a dict of names to such;
        by default as they were drawn, bfloat16 as float32. float16 holds three digits, up to 65504.
        The run warns, and so do summaries of these draws, where a dtype loses more than the draws can
        bear: 5 % of a standard deviation. Stats keep their dtypes.
    compression
        Level of zstd, 1 to 9; with 0, for none, a file has its full size from its first draw on.
    chunk_bytes
        Bytes of a buffer of draws, on each process.
    flush_seconds
        Draws are written when a buffer is full, and at least this often.

    Raises
    ------
    ValueError
        For settings out of their range, or names that no leaf has.
    """

    def __init__(
        self,
        path: str | Path,
        leaves: str | Sequence[str] | None = None,
        dtype: str | Mapping[str, str] | None = None,
        compression: int = 1,
        chunk_bytes: float = 64 * 2**20,
        flush_seconds: float = 30.0,
    ):
        _check_settings(dtype, compression, chunk_bytes, flush_seconds)
        self.path = local_path("path", path)
        self.leaves = (leaves,) if isinstance(leaves, str) else leaves
        self.dtype, self.compression = dtype, compression
        self.chunk_bytes, self.flush_seconds = chunk_bytes, flush_seconds
        self._lock = FolderLock(self.path)
        self._is_reserved = False
        self._thread: Any = None
        self._pending: concurrent.futures.Future | None = None

    def __repr__(self) -> str:
        return f"ZarrSink({str(self.path)!r})"

    def check(self, collected: PyTree) -> None:
        """Raise unless leaves of these shapes [chains, ...] can be written as the settings say."""
        named = named_leaves(collected)
        chosen("leaves", self.leaves, list(named))
        if isinstance(self.dtype, Mapping):
            chosen("dtype", self.dtype, list(named))
        for name, leaf in named.items():
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise TypeError(
                    f"collect: leaf {name} is of dtype {leaf.dtype}; draws on disk are numbers"
                )

    def buffer_rows(self, shapes: PyTree) -> int:
        """Return how many draws, of these shapes [chains, ...], a buffer of `chunk_bytes` holds."""
        draw = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))
        return max(1, int(self.chunk_bytes * jax.process_count() // max(draw, 1)))

    def reserve(self, is_resumed: bool = False) -> None:
        """Make the folder and lock it, and import the libraries that write in the background."""
        require("tensorstore", "zarr", extra="storage")
        self._on_first(lambda: self._reserve(is_resumed))
        self._is_reserved, self._is_resumed = True, is_resumed
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="draws")
        for module in ("tensorstore", "zarr"):
            self._thread.submit(need, module, "storage")

    def begin(
        self, buffers: PyTree, num_samples: int, attributes: dict[str, Any], *, first_draw: int = 0
    ) -> None:
        """Create the store, or cut that of the run that continues; one with another key is refused."""
        if not self._is_reserved:
            self.reserve(first_draw > 0)
        steps, self._treedef = jax.tree_util.tree_flatten_with_path(buffers[0], is_leaf=is_row_values)
        names = list(named_leaves(buffers[0], is_leaf=is_row_values))
        kept = chosen("leaves", self.leaves, names)
        taken = [groups.name for groups in self.groups.values() if groups.name]
        arrays = dict(zip(names, disk_names(names, taken), strict=True))
        # Of each leaf its path in the store; None of one that is not kept.
        self._paths = {name: f"{POSTERIOR}/{arrays[name]}" if name in kept else None for name in names}
        self._groups = {arrays[name]: x for name, x in self.groups.items() if name in kept}
        position = [
            {"array": arrays[name], "path": [_json_step(key) for key in path]}
            for (path, _), name in zip(steps, names, strict=True)
            if name in kept
        ]
        for leaf in position:
            if groups := self._groups.get(leaf["array"]):
                leaf["groups"] = {"axis": dim_of(leaf["array"], groups), "name": groups.name}
        about = attributes | {"position": json.dumps(position), "draws_format": VERSION}
        self._on_first(lambda: self._prepare(buffers, num_samples, about, first_draw))
        self._root = cut(read_root(self.path), num_samples)
        if losses := self._root["attributes"].get(LOSSES):
            about |= {LOSSES: losses}
        self.attributes = self._root["attributes"] = about
        self._arrays = {
            path: open_array(self.path / path, nodes_of(self._root)[path], _few_threads())
            for path in self._kept(buffers)
        }
        names = {path: name for name, path in self._paths.items()}
        self._roundings = {
            path: Rounding(names[path], self._arrays[path].dtype.numpy_dtype)
            for path, leaf in self._kept(buffers).items()
            if not np.can_cast(_values(leaf).dtype, self._arrays[path].dtype.numpy_dtype)
        }
        self.num_saved = self._num_given = first_draw
        self._written_at = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether draws should be written now: it is time, or a write has failed."""
        failed = self._pending is not None and self._pending.done() and self._pending.exception()
        is_due = bool(failed) or time.monotonic() - self._written_at >= self.flush_seconds
        return bool(of_all(is_due).any())

    def write(self, buffers: PyTree, count: int, start: int = 0) -> None:
        """Begin to write ``count`` draws of the buffers, once the write before has ended."""
        self.flush()
        if not count:
            return
        first, self._num_given = self._num_given, self._num_given + count
        self._pending = self._thread.submit(self._save, buffers, start, count, first)
        self._written_at = time.monotonic()

    def flush(self) -> int:
        """Wait until all draws given are on disk; if one process could not write, all of them raise."""
        if self._pending is None:
            return self.num_saved
        pending, self._pending = self._pending, None
        error = pending.exception()
        failed = of_all(error is not None)
        if failed.any():
            why = f"process {np.argmax(failed)} failed"
            why = why if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
            raise DrawsNotSaved(
                f"{self.path}: draws could not be written, {why}. {self.num_saved} draws of each chain "
                "are safe there: gspmd_mcmc.open_draws reads them",
                self.num_saved,
            ) from error
        if jax.process_count() > 1:
            self._on_first(lambda: publish(self.path, self._root, self._num_given))
            self.num_saved = self._num_given
        self._tell_of_rounding(is_final=False)
        return self.num_saved

    def close(self) -> None:
        """Wait for the write under way, and release the folder; draws on disk stay. Never raises."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = self._pending = None
        with contextlib.suppress(OSError):
            self._lock.free()
            if self._is_reserved and not any(self.path.iterdir()):
                self.path.rmdir()
        self._is_reserved = False

    def saved(self) -> tuple[PyTree, dict[str, Any]]:
        """Return what was collected and the stats, arrays [chains, draws, ...] on disk."""
        self._tell_of_rounding(is_final=True)
        arrays = saved_arrays(self.path, read_root(self.path))
        paths = list(self._paths.values())
        tree = jax.tree.unflatten(self._treedef, [arrays[path] if path else 0 for path in paths])
        return without(tree, [path is None for path in paths]), saved_stats(arrays)

    def _tell_of_rounding(self, *, is_final: bool) -> None:
        """Warn of what the dtypes on disk have lost, and write it into the store for its summaries."""
        texts = [x for r in self._roundings.values() for x in r.warnings(is_final=is_final)]
        if not self._roundings or not of_all(bool(texts)).any():
            return
        self.attributes[LOSSES] = [*self.attributes.get(LOSSES, ()), *texts]
        self._on_first(lambda: publish(self.path, self._root, self.num_saved))
        for text in texts:
            warnings.warn(text, SamplingWarning, stacklevel=CALLER_OF_SAMPLE)

    def _reserve(self, is_resumed: bool) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except FileExistsError as error:
            raise DrawsNotSaved(f"{self.path} is a file; give ZarrSink another path") from error
        except Locked as error:
            raise DrawsNotSaved(str(error)) from error
        except OSError as error:
            raise DrawsNotSaved(
                f"{self.path}: no draws can be written there, {error}; give a folder that this process "
                "may write to"
            ) from error
        # TensorStore writes to such a file, then renames it. If a killed writer has left one, a shorter
        # chunk would keep the end of the old one, and could not be read any more.
        for left in self.path.rglob("*.__lock"):
            left.unlink()
        if is_resumed or all(path.name == LOCK for path in self.path.iterdir()):
            return
        self._lock.free()
        found, cure = "other files", "give ZarrSink another path"
        with contextlib.suppress(NotOurStore):
            count = read_root(self.path)["attributes"]["num_draws"]
            found = f"{count} draws of another run (gspmd_mcmc.open_draws reads them)"
            cure += ", or remove that folder"
        raise DrawsNotSaved(f"{self.path} exists already and holds {found}; {cure}")

    def _prepare(self, buffers: PyTree, num_samples: int, about: dict, first_draw: int) -> None:
        """Create the store, or cut the one that is there."""
        root, labels = self._plan(buffers, num_samples)
        if self._is_resumed and (self.path / ROOT).exists():
            there = _require_same_run(self.path, root, about, first_draw)
            root = cut(there, num_samples)
            if first_draw and (losses := there["attributes"].get(LOSSES)):
                about = about | {LOSSES: losses}
        elif first_draw:
            raise DrawsNotSaved(
                f"{self.path}: the run has {first_draw} draws, and there is no store of them; give the "
                "path that the run began with"
            )
        try:
            for path, document in nodes_of(root).items():
                if path.endswith(("/chain", "/draw")):
                    store = open_array(self.path / path, document, _few_threads())
                    store.write(np.arange(document["shape"][0])).result()
            for path, chunk in labels.items():
                (self.path / path).parent.mkdir(parents=True, exist_ok=True)
                (self.path / path).write_bytes(chunk)
            publish(self.path, root | {"attributes": about}, first_draw)
        except (OSError, ValueError) as error:
            raise DrawsNotSaved(f"{self.path}: the store cannot be made, {error}") from error

    def _plan(self, buffers: PyTree, num_samples: int) -> tuple[Document, dict[str, bytes]]:
        """Return the document of a store for this many draws, as zarr-python writes it, in memory.

        Also the chunks, by path, of the arrays that are there before any draw: labels of groups, which
        are text that TensorStore does not write.
        """
        zarr, store = need("zarr", "storage"), {}
        root = zarr.create_group(store)
        num_chains = buffers[1]["log_density"].shape[0]
        for group in (POSTERIOR, STATS):
            root.create_group(group, attributes={"inference_library": "gspmd_mcmc"})
            for name, length in (("chain", num_chains), ("draw", num_samples)):
                layout = {"shape": (length,), "chunks": (COORDINATE_ROWS,), "dimension_names": [name]}
                root.create_array(f"{group}/{name}", dtype="int64", **layout)
        names, asked = list(self._paths), self.dtype
        asked = asked if isinstance(asked, Mapping) else dict.fromkeys(names, asked)
        dtypes = {self._paths[n]: asked[item] for n, item in chosen("dtype", asked, names).items()}
        dims = {name: dim_of(name, groups) for name, groups in self._groups.items()}
        for path, leaf in self._kept(buffers).items():
            name = path.removeprefix(f"{POSTERIOR}/")
            dim = (self._groups[name].axis, dims[name]) if name in dims else None
            _create_array(root, path, leaf, num_samples, dtypes.get(path), self.compression, dim)
        for dim, groups in {dims[name]: x for name, x in self._groups.items()}.items():
            for group in (POSTERIOR, CONSTANT):
                _create_labels(root.require_group(group), dim, dim, groups.labels)
            _create_labels(root[CONSTANT], rows_of(dim), dim, groups.sizes)
        with _FILTERS, warnings.catch_warnings():
            # The specification of Zarr v3 has no consolidated metadata yet; zarr-python and xarray do.
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(store)
        chunks = {path: store[path].to_bytes() for path in store if not path.endswith(ROOT)}
        return json.loads(store[ROOT].to_bytes()), chunks

    def _kept(self, buffers: PyTree) -> dict[str, Any]:
        """Return the leaves that are kept, and the stats, by their paths in the store."""
        collected, stats = named_leaves(buffers[0], is_leaf=is_row_values), buffers[1]
        kept = {path: collected[name] for name, path in self._paths.items() if path is not None}
        return kept | {f"{STATS}/{ARVIZ_NAMES.get(name, name)}": x for name, x in stats.items()}

    def _save(self, buffers: PyTree, start: int, count: int, first: int) -> None:
        """Write draws, and let them count where no other process is to be waited for."""
        with jax.profiler.TraceAnnotation("gspmd_mcmc I/O"):
            for path, leaf in self._kept(buffers).items():
                compared = [self._roundings[path]] if path in self._roundings else []
                write_shards(self._arrays[path], _values(leaf), start, count, first, *compared)
        if jax.process_count() == 1:
            publish(self.path, self._root, first + count)
            self.num_saved = first + count

    def _on_first(self, act: Callable[[], Any]) -> None:
        on_first(act, DrawsNotSaved(f"{self.path}: process 0 could not write there; see its error"))


def _check_settings(dtype: Any, compression: int, chunk_bytes: float, flush_seconds: float) -> None:
    asked = dtype.values() if isinstance(dtype, Mapping) else () if dtype is None else (dtype,)
    for name in asked:
        if name not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    if isinstance(compression, bool) or compression not in range(10):
        raise ValueError(f"compression: expected a level from 0 to 9, got {compression!r}")
    if not chunk_bytes > 0:
        raise ValueError(f"chunk_bytes: expected a number of bytes above 0, got {chunk_bytes!r}")
    if not flush_seconds >= 0:
        raise ValueError(f"flush_seconds: expected seconds of at least 0, got {flush_seconds!r}")


def chosen(argument: str, asked: Iterable[str] | None, names: list[str]) -> dict[str, str]:
    """Return the names that are asked for, each with the item that asks: a name or its beginning."""
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


def _values(leaf: Any) -> jax.Array:
    return leaf.values if is_row_values(leaf) else leaf


def _json_step(key: Any) -> Any:
    """Write a step of a leaf's path for JSON: ``"w"`` of a dict or class, ``[0]`` of a list."""
    if isinstance(key, SequenceKey):
        return [key.idx]
    name = getattr(key, "key", getattr(key, "name", None))
    return name if isinstance(name, int) else str(name)


def chunk_shape(shard: tuple[int, ...], rows: int, num_rows: int, itemsize: int) -> tuple[int, ...]:
    """Return the shape of chunks that no two devices' shards [chains, draws, ...] of a buffer share.

    A chunk has the rows of a buffer, so that a full buffer writes whole chunks, or a multiple of them
    where the file would be small.
    """
    num_bytes = rows * itemsize * math.prod((shard[0], *shard[2:]))
    most = -(-max(num_rows, 1) // rows)
    times = max(1, min(most, PIECE_BYTES // max(num_bytes, 1)))
    return (max(shard[0], 1), rows * times, *(max(n, 1) for n in shard[2:]))


def _pieces(chunks: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Cut the longest latent axis of a chunk into even pieces of about `PIECE_BYTES`."""
    wanted = -(-math.prod(chunks) * itemsize // PIECE_BYTES)
    if len(chunks) == 2 or wanted == 1:
        return chunks
    axis = 2 + int(np.argmax(chunks[2:]))
    length = chunks[axis]
    wanted = min(wanted, length)
    even = (n for n in range(wanted, min(4 * wanted, length) + 1) if length % n == 0)
    return (*chunks[:axis], length // next(even, 1), *chunks[axis + 1 :])


def _create_array(
    root: Any,
    path: str,
    leaf: Any,
    num_samples: int,
    dtype: str | None,
    compression: int,
    groups: tuple[int, str] | None,
) -> None:
    """Create the array of a leaf in a group of zarr-python; each chunk is of one device's shard.

    ``groups`` is the axis of a leaf with a row for each group, and its name.
    """
    array = _values(leaf)
    chains, rows, *rest = array.shape
    if is_row_values(leaf):
        rest[leaf.axis] = leaf.rows.num_rows
    on_disk, shard = np.dtype(array.dtype), array.sharding.shard_shape(array.shape)
    if jnp.issubdtype(on_disk, jnp.floating):  # as float32 those that NumPy does not know
        on_disk = np.dtype(dtype or (np.float32 if on_disk.kind == "V" else on_disk))
    chunks = chunk_shape(shard, max(rows, 1), num_samples, on_disk.itemsize)
    pieces = _pieces(chunks, on_disk.itemsize)
    codecs = need("zarr.codecs", "storage")
    packing = [codecs.Crc32cCodec()]
    if compression:
        shuffle = "shuffle" if on_disk.itemsize > 1 else "noshuffle"
        how = {"clevel": compression, "shuffle": shuffle, "typesize": on_disk.itemsize}
        packing.insert(0, codecs.BloscCodec(cname="zstd", **how))
    dims = [f"{path.split('/')[1]}_dim_{i}" for i in range(len(rest))]
    if groups is not None:
        dims[groups[0]] = groups[1]
    root.create_array(
        path,
        shape=(chains, num_samples, *rest),
        dtype=on_disk,
        chunks=pieces,
        shards=None if pieces == chunks else chunks,
        compressors=packing,
        dimension_names=["chain", "draw", *dims],
    )


def _create_labels(group: Any, name: str, dim: str, values: np.ndarray) -> None:
    """Create an array [groups] of text or integers in a group of zarr-python, with its values."""
    is_text = values.dtype.kind in "US"
    array = group.create_array(
        name,
        shape=values.shape,
        dtype="string" if is_text else values.dtype,
        chunks=(COORDINATE_ROWS,),
        dimension_names=[dim],
    )
    array[:] = values.astype(object) if is_text else values


def write_shards(
    array: Any,
    buffer: jax.Array,
    start: int,
    count: int,
    first: int,
    compared: Rounding | None = None,
) -> None:
    """Write ``count`` draws of a buffer, from its draw ``start`` on, as draws ``first`` and on.

    Each shard goes to its place in an array of TensorStore; of shards that are copies, one is written.
    What is beyond the array is pad, and is left out. ``compared`` is given the draws as they are drawn
    and as they are stored.
    """
    under_way: list = []
    for shard in buffer.addressable_shards:
        if shard.replica_id:
            continue
        values = np.asarray(shard.data)[:, start : start + count]
        starts = [axis.start or 0 for axis in shard.index]
        starts[1] = first
        room = [length - at for length, at in zip(array.shape, starts, strict=True)]
        sizes = [min(pair) for pair in zip(values.shape, room, strict=True)]
        if min(sizes) > 0:
            place = tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))
            real = values[tuple(slice(size) for size in sizes)]
            with np.errstate(over="ignore"):
                stored = real.astype(array.dtype.numpy_dtype, copy=False)
            under_way.append(array[place].write(stored))
            if compared is not None:
                compared.add(tuple(starts[2:]), real, stored)
    for write in under_way:
        write.result()


@functools.cache
def _few_threads() -> Any:
    """Return the context of all writes: one thread that packs, one that writes, fast enough for a run.

    C's allocator would give each further thread memory for good: about 20 MB that grow for a while.
    """
    limits = {name: {"limit": 1} for name in ("data_copy_concurrency", "file_io_concurrency")}
    return need("tensorstore", "storage").Context(limits)


def cut(root: Document, num_draws: int) -> Document:
    """Return the document of a store with this many draws."""
    root = copy.deepcopy(root)
    for node in nodes_of(root).values():
        for axis, name in enumerate(node.get("dimension_names", ())):
            if name == "draw":
                node["shape"][axis] = num_draws
    return root


def _require_same_run(
    folder: Path, planned: Document, about: dict[str, Any], first_draw: int
) -> Document:
    """Read the store on disk; raise unless it is of this run and has the draws to keep.

    Its arrays must be those that are planned, but for their chunks, which follow the mesh.
    """
    try:
        root = read_root(folder)
    except NotOurStore as error:
        raise DrawsNotSaved(f"{error}; give the path that the run began with") from error
    theirs, ours = (found.get("rng_key_data") for found in (root["attributes"], about))
    differs = [] if theirs == ours else [f"its rng_key_data is {theirs}, this run's {ours}"]
    theirs, ours = nodes_of(cut(root, 0)), nodes_of(cut(planned, 0))
    for path in sorted(theirs.keys() ^ ours.keys()):
        differs.append(f"only {'the store' if path in theirs else 'this run'} has {path}")
    for path in sorted(theirs.keys() & ours.keys()):
        for key in ("shape", "data_type", "dimension_names"):
            if (there := theirs[path].get(key)) != (here := ours[path].get(key)):
                differs.append(f"{path} has {key} {there} in the store and {here} in this run")
    if differs:
        raise DrawsNotSaved(f"{folder} holds draws of another run: {'; '.join(differs[:3])}")
    count = root["attributes"]["num_draws"]
    if count < first_draw:
        raise DrawsNotSaved(f"{folder} has {count} draws; the run continues from {first_draw}", count)
    return root


def publish(folder: Path, root: Document, num_draws: int) -> None:
    """Make this many draws count, in every array at once, by replacing the root's document.

    The arrays' own documents go first, for readers that ignore consolidated metadata: the draws that
    they cover are on disk by then.
    """
    root = cut(root, num_draws)
    root["attributes"]["num_draws"] = num_draws
    for path, node in nodes_of(root).items():
        (folder / path).mkdir(parents=True, exist_ok=True)
        # That of a group is empty, and would say that it has no arrays.
        own = {key: value for key, value in node.items() if key != "consolidated_metadata"}
        replace_file(folder / path / ROOT, own)
    replace_file(folder / ROOT, root)


def replace_file(path: Path, document: Document) -> None:
    """Replace a JSON file; whenever the process may end, the old or the new one is there."""
    draft = path.with_name(path.name + ".partial")
    try:
        with open(draft, "w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
