"""Draws to disk as they are made."""

import concurrent.futures
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.rows import named_leaves
from gspmd_mcmc.extras import need
from gspmd_mcmc.placement.agreement import of_all, on_first
from gspmd_mcmc.sampling import zarr_format
from gspmd_mcmc.sampling.lock import NAME as LOCK
from gspmd_mcmc.sampling.lock import FolderLock, Locked
from gspmd_mcmc.sampling.reporting import marked
from gspmd_mcmc.sampling.saved import saved_arrays, saved_stats
from gspmd_mcmc.sampling.zarr_arrays import ArrayOnDisk, Leaves, chosen, write_coordinates
from gspmd_mcmc.tree import PyTree

DTYPES = ("float16", "float32", "float64")


class DrawsNotSaved(RuntimeError):
    """Draws cannot be written; the message says why, and how many are safe on disk.

    Attributes
    ----------
    num_saved
        Draws of each chain that are on disk and can be opened.
    """

    def __init__(self, message: str, num_saved: int = 0):
        super().__init__(message)
        self.num_saved = num_saved


class ZarrSink:
    """A Zarr v3 store that `sample` writes its draws to as they are made.

    The run needs memory for two chunks of draws, however many there are: while one fills on the
    devices, the other is copied to the host and written, every process its own shards. The store can
    be opened at any time, during the run too, by ``xarray.open_datatree(path, engine="zarr")``, by
    ArviZ and by `open_draws`: groups ``posterior`` and ``sample_stats`` with dims (chain, draw, ...),
    as `Draws.to_datatree` has them. A reader sees whole draws, as many in every array; of a run that
    was killed, those that were written by then, at most ``flush_seconds`` and a write behind.

    Needs the extra ``storage``. Two more ways to keep little of large latents: ``sample(collect=...)``
    keeps functions of the position alone, and ``gspmd_mcmc.diagnostics`` has streaming moments.

    Parameters
    ----------
    path
        A folder that does not exist yet; of several processes, on a file system that all of them share.
    leaves
        Which leaves of the draws are kept: names as in `Draws.summary`, or beginnings of names. A
        name that a leaf has stands for that leaf alone. All by default.
    dtype
        "float16", "float32" or "float64" for the floats among the leaves, or a dict of names to such;
        by default as they were drawn, bfloat16 as float32. float16 holds three digits, to 65504. Stats
        keep theirs.
    compression
        Level of zstd, 1 to 9; 0 for none: then a file has its full size from its first draw on.
    chunk_bytes
        Bytes of a buffer of draws, of each process.
    flush_seconds
        Draws are written when a buffer is full, and at least so often.

    Raises
    ------
    ValueError
        For settings that do not fit, or names that no leaf has.
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
        self.path = Path(path).absolute()
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
        """Raise unless leaves of these shapes [chains, ...] can be written as the settings say.

        Raises
        ------
        ValueError, TypeError
            For a name that no leaf has, or a leaf that is not of numbers.
        """
        names = list(named_leaves(collected))
        chosen("leaves", self.leaves, names)
        if isinstance(self.dtype, Mapping):
            chosen("dtype", self.dtype, names)
        for name, leaf in named_leaves(collected).items():
            if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                raise TypeError(
                    f"collect: leaf {name} is of dtype {leaf.dtype}; draws on disk are numbers"
                )

    def buffer_rows(self, shapes: PyTree) -> int:
        """Return how many draws, of these shapes [chains, ...], a buffer of `chunk_bytes` holds."""
        draw = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes))
        return max(1, int(self.chunk_bytes * jax.process_count() // max(draw, 1)))

    def reserve(self, is_resumed: bool = False) -> None:
        """Make the folder and lock it, before anything is computed.

        Parameters
        ----------
        is_resumed
            Whether draws of this run may be there already.

        Raises
        ------
        DrawsNotSaved
            If the folder holds something else, another run writes there, or nobody may.
        ImportError
            Without the extra ``storage``.
        """
        need("tensorstore", "storage")
        self._on_first(lambda: self._reserve(is_resumed))
        self._is_reserved = True

    def begin(
        self,
        buffers: PyTree,
        num_samples: int,
        attributes: dict[str, Any],
        *,
        first_draw: int = 0,
        is_resumed: bool = False,
    ) -> None:
        """Create the store, or cut that of a run which goes on.

        Parameters
        ----------
        buffers
            What was collected, and the stats: arrays [chains, draws of a buffer, ...] where they lie.
        num_samples
            Draws that are asked for, those on disk included.
        attributes
            What the run is; a store of another ``rng_key_data`` is not gone on with.
        first_draw
            Draws on disk to keep; what is beyond will be written again.
        is_resumed
            Whether the run goes on with the store that is there; so it does after ``first_draw``.

        Raises
        ------
        DrawsNotSaved
            As `reserve`, and if the store on disk is of another run or has fewer draws.
        """
        is_resumed = is_resumed or first_draw > 0
        if not self._is_reserved:
            self.reserve(is_resumed)
        self._leaves = Leaves.of(buffers, self.leaves, self.dtype)
        position = {"position": json.dumps(self._leaves.entries)}
        self.attributes = attributes | position | {"draws_format": zarr_format.VERSION}
        planned = self._leaves.documents(buffers, num_samples, self.compression)
        self._on_first(lambda: self._prepare(planned, num_samples, first_draw, is_resumed))
        self._documents = zarr_format.cut(zarr_format.read_root(self.path)[0], num_samples)
        paths = [path for path in self._leaves.paths if path is not None]
        self._arrays = {path: ArrayOnDisk(self.path, path, self._documents[path]) for path in paths}
        self.num_saved = self._num_given = first_draw
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="draws")
        self._written_at = time.monotonic()

    def is_due(self) -> bool:
        """Tell whether draws should be written now: it is time, or a write has failed."""
        failed = self._pending is not None and self._pending.done() and self._pending.exception()
        is_due = bool(failed) or time.monotonic() - self._written_at >= self.flush_seconds
        return bool(of_all(is_due).any())

    def write(self, buffers: PyTree, count: int, start: int = 0) -> None:
        """Write ``count`` draws of the buffers, from draw ``start``; return while that goes on.

        One write is under way at most: the one before is waited for. Until the next call the buffers
        must stay as they are.

        Raises
        ------
        DrawsNotSaved
            If the write before has failed.
        """
        self._settle()
        if not count:
            return
        first, self._num_given = self._num_given, self._num_given + count
        self._pending = self._thread.submit(self._save, buffers, start, count, first)
        self._written_at = time.monotonic()

    def flush(self) -> int:
        """Wait until all draws given are on disk and seen; return how many.

        Raises
        ------
        DrawsNotSaved
            If they could not be written.
        """
        self._settle()
        return self.num_saved

    def close(self) -> None:
        """Wait for the write under way, and free the folder; draws on disk stay. Never raises."""
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
        arrays = saved_arrays(self.path, zarr_format.read_root(self.path)[0])
        return self._leaves.position(arrays), saved_stats(arrays)

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
        # TensorStore writes to such a file, then renames it; into one that a killed writer has left it
        # writes without cutting what is longer, and the chunk cannot be read any more.
        for left in self.path.rglob("*.__lock"):
            left.unlink()
        if not is_resumed and any(path.name != LOCK for path in self.path.iterdir()):
            self._lock.free()
            raise DrawsNotSaved(f"{self.path} exists already and {self._what_is_there()}")

    def _what_is_there(self) -> str:
        try:
            count = zarr_format.read_root(self.path)[1]["num_draws"]
        except zarr_format.NotOurStore:
            return "holds other files; give ZarrSink another path"
        return (
            f"holds {count} draws of another run (gspmd_mcmc.open_draws reads them); give ZarrSink "
            "another path, or remove that folder"
        )

    def _prepare(self, planned: dict, num_samples: int, first_draw: int, is_resumed: bool) -> None:
        """Create the store, or cut the one that is there."""
        documents = planned
        if is_resumed and (self.path / zarr_format.ROOT).exists():
            documents = zarr_format.cut(self._there(planned, first_draw), num_samples)
        elif first_draw:
            raise DrawsNotSaved(
                f"{self.path}: {first_draw} draws were to be there, and it has no store"
            )
        try:
            write_coordinates(self.path, documents)
            zarr_format.publish(self.path, documents, self.attributes, first_draw)
        except (OSError, ValueError) as error:
            raise DrawsNotSaved(f"{self.path}: the store cannot be made, {error}") from error

    def _there(self, planned: dict, first_draw: int) -> dict[str, zarr_format.Document]:
        """Read the store on disk; raise unless it is of this run and has the draws to keep."""
        try:
            documents, attributes = zarr_format.read_root(self.path)
        except zarr_format.NotOurStore as error:
            raise DrawsNotSaved(f"{error}; give the path that the run began with") from error
        theirs, ours = (found.get("rng_key_data") for found in (attributes, self.attributes))
        differs = zarr_format.difference(documents, planned)
        if theirs != ours:
            differs = f"its rng_key_data is {theirs}, this run's {ours}"
        if differs:
            raise DrawsNotSaved(f"{self.path} holds draws of another run: {differs}")
        count = attributes["num_draws"]
        if count < first_draw:
            raise DrawsNotSaved(
                f"{self.path} has {count} draws; the run goes on from {first_draw}", count
            )
        return documents

    def _save(self, buffers: PyTree, start: int, count: int, first: int) -> None:
        """Write draws, and let them count where no other process is to be waited for."""
        with marked("I/O"):
            self._leaves.write(self._arrays, buffers, start, count, first)
        if jax.process_count() == 1:
            self._publish(first + count)

    def _publish(self, num_draws: int) -> None:
        zarr_format.publish(self.path, self._documents, self.attributes, num_draws)
        self.num_saved = num_draws

    def _settle(self) -> None:
        """Wait for the write under way; raise on every process if one of them has failed."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.exception()
        failed = of_all(error is not None)
        if failed.any():
            raise self._failure(int(np.argmax(failed)), error) from error
        if jax.process_count() > 1:
            self._on_first(lambda: self._publish(self._num_given))
            self.num_saved = self._num_given

    def _failure(self, process: int, error: BaseException | None) -> DrawsNotSaved:
        why = f"process {process} failed" if error is None else f"{type(error).__name__}: {error}"
        return DrawsNotSaved(
            f"{self.path}: draws could not be written, {why.splitlines()[0]}. {self.num_saved} draws "
            "of each chain are safe there: gspmd_mcmc.open_draws reads them",
            self.num_saved,
        )

    def _on_first(self, act: Callable[[], Any]) -> None:
        message = f"{self.path}: process 0 could not write there; its own error says why"
        on_first(act, DrawsNotSaved(message))


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
