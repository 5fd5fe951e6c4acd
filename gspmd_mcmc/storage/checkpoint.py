"""Checkpoints on disk: a document and arrays, which Orbax writes while the run continues.

A folder holds the newest two checkpoints, each in a folder of its own that appears whole or not at all;
checksums of their files, which reveal later damage; and the lock of the process that writes.
"""

import contextlib
import hashlib
import json
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd_mcmc.errors import CheckpointNotSaved, SamplingWarning
from gspmd_mcmc.extras import need
from gspmd_mcmc.multihost.agreement import on_first
from gspmd_mcmc.storage.lock import FolderLock, Locked
from gspmd_mcmc.storage.paths import local_path

NUM_KEPT = 2
FORMAT = 5  # the leaves of a run in the order of its template, with digests of its data and draws
STEPS, SUMS, DAMAGED = "steps", "checksums", "damaged"

# Orbax numbers the saves of a process, and the threads of a save wait for signals by the newest number:
# a second save would take the signals of the first. So the runs of a process save one at a time.
_TURN = threading.Lock()
_saving: list[Any] = []  # the manager whose save may be under way


class Damaged(ValueError):
    """A checkpoint is not what was written."""


class Checkpoints:
    """The checkpoints of one run in a folder, which one process holds from `__init__` to `close`."""

    def __init__(self, path: str | Path):
        self.path = local_path("checkpoint", path)
        self._orbax = need("orbax.checkpoint", "checkpoint")
        self._lock = FolderLock(self.path)
        self._manager: Any = None
        self._without_sums: int | None = None
        self._has_warned = False
        on_first(
            self._take, CheckpointNotSaved("checkpoint: process 0 cannot use the folder; see its error")
        )
        self._pool = ThreadPoolExecutor(1, "checksums")

    def _take(self) -> None:
        try:
            for name in (STEPS, SUMS):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except (OSError, Locked) as error:
            raise CheckpointNotSaved(f"checkpoint: {error}") from error

    def numbers(self) -> list[int]:
        """Return the numbers of the checkpoints in the folder, the newest first."""
        names = (path.name for path in (self.path / STEPS).iterdir())
        return sorted((int(name) for name in names if name.isdigit()), reverse=True)

    def save(self, arrays: Sequence[Any], document: dict[str, Any]) -> None:
        """Begin to write a checkpoint; arrays on the devices are copied before this returns."""
        self.finish()
        number = max(self.numbers(), default=0) + 1
        args = self._orbax.args
        written = {str(i): _to_write(x) for i, x in enumerate(arrays) if np.size(x)}
        document = _with_sum(document | {"format": FORMAT})
        both = args.Composite(arrays=args.StandardSave(written), document=args.JsonSave(document))
        with _TURN:
            while _saving:
                # Orbax raises its failure in the thread of its run too.
                with contextlib.suppress(Exception):
                    _saving.pop().wait_until_finished()
            _saving.append(self._open())
            self._open().save(number, args=both)
        self._without_sums = number

    def is_saving(self) -> bool:
        """Tell whether a checkpoint is being written; begin the checksums of one that is whole."""
        if self._manager is None or self._manager.is_saving_in_progress():
            return self._manager is not None
        if self._without_sums is not None:
            number, self._without_sums = self._without_sums, None
            if jax.process_index() == 0:
                self._pool.submit(self._write_sums, number)
        return False

    def finish(self) -> None:
        """Wait until the checkpoint under way is whole on disk; raise if it failed."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self.is_saving()

    def attempt(self, act: Callable[[], None]) -> None:
        """Call ``act``, which saves or finishes; where it fails, warn once and start anew."""
        try:
            act()
        except Exception as error:  # Orbax raises whatever its threads met.
            self._manager, self._without_sums = None, None
            if not self._has_warned:
                self._has_warned = True
                newest = "the newest whole checkpoint" if self.numbers() else "no checkpoint"
                warnings.warn(
                    f"checkpoint: {self.path} could not be written to: {_first_line(error)}. The run "
                    f"continues and will try again; until then the folder holds {newest}",
                    SamplingWarning,
                    stacklevel=3,
                )

    def read(self, number: int) -> dict[str, Any]:
        """Return the document of a checkpoint; raise `Damaged` where a file is not what was written."""
        self._check_sums(number)
        try:
            path = self.path / STEPS / str(number) / "document" / "metadata"
            document = json.loads(path.read_text())
        except ValueError as error:
            raise Damaged(f"its document is not JSON: {error}") from error
        if not isinstance(document, dict) or _with_sum(document) != document:
            raise Damaged("its document is not what was written")
        if document["format"] != FORMAT:
            raise ValueError(
                f"checkpoint: {self.path} has format {document['format']}, of gspmd_mcmc "
                f"{document['versions']['gspmd_mcmc']}; this version reads format {FORMAT}. Continue "
                "the run with that version, or give another folder"
            )
        return document

    def restore(self, number: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Read the arrays of a checkpoint in these shapes, bound to no device without a sharding.

        Where a shape is longer than what was saved, zeros fill it.
        """
        args = self._orbax.args
        # Without a sharding Orbax asks for the devices that the arrays were saved on.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            str(i): jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding or here)
            for i, s in enumerate(shapes)
            if np.prod(s.shape)
        }
        try:
            arrays = args.Composite(arrays=args.StandardRestore(wanted, strict=False))
            found = self._open().restore(number, args=arrays)["arrays"]
        except Exception as error:
            # Files that are as they were written cause no such error.
            if self._sums_of(number).exists():
                raise
            raise Damaged(_first_line(error)) from error
        restored = [found.get(str(i), np.zeros(s.shape, s.dtype)) for i, s in enumerate(shapes)]
        return [
            x if s.sharding is not None else jnp.asarray(np.asarray(x))
            for x, s in zip(restored, shapes, strict=True)
        ]

    def put_aside(self, number: int) -> None:
        """Move a damaged checkpoint to a folder of its own, so that it is not taken for the newest."""

        def act() -> None:
            aside = self.path / DAMAGED
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(number), ignore_errors=True)
            (self.path / STEPS / str(number)).rename(aside / str(number))
            self._sums_of(number).unlink(missing_ok=True)

        on_first(act, RuntimeError("process 0 could not move a checkpoint; see its error"))

    def close(self) -> None:
        """Wait for the checkpoint under way, and release the folder."""
        self.attempt(self.finish)
        if self._manager is not None:
            self._manager.close()
            with _TURN, contextlib.suppress(ValueError):
                _saving.remove(self._manager)
        self._manager = None
        self._pool.shutdown()
        self._lock.free()

    def _open(self) -> Any:
        if self._manager is None:
            options = self._orbax.CheckpointManagerOptions(
                max_to_keep=NUM_KEPT, cleanup_tmp_directories=True
            )
            self._manager = self._orbax.CheckpointManager(self.path / STEPS, options=options)
        return self._manager

    def _sums_of(self, number: int) -> Path:
        return self.path / SUMS / f"{number}.json"

    def _write_sums(self, number: int) -> None:
        """Write the checksums of a whole checkpoint; remove those of checkpoints that are gone."""
        kept = {f"{n}.json" for n in self.numbers()}
        for path in (self.path / SUMS).iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)
        temporary = self._sums_of(number).with_suffix(".tmp")
        temporary.write_text(json.dumps(_sums(self.path / STEPS / str(number))))
        temporary.rename(self._sums_of(number))

    def _check_sums(self, number: int) -> None:
        # A run that was killed between the two has left a whole checkpoint without checksums.
        if not self._sums_of(number).exists():
            return
        try:
            written = json.loads(self._sums_of(number).read_text())
        except ValueError as error:
            raise Damaged("its checksums cannot be read") from error
        found = _sums(self.path / STEPS / str(number))
        bad = sorted(name for name in written if found.get(name) != written[name])
        if bad:
            state = "missing" if bad[0] not in found else "damaged"
            raise Damaged(f"{len(bad)} of its files are not what was written ({bad[0]} is {state})")


def _sums(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): _sum_of(path) for path in files}


def _sum_of(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def _with_sum(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with its own checksum."""
    content = {name: value for name, value in document.items() if name != "checksum"}
    text = json.dumps(content, sort_keys=True)
    return content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}


def _to_write(array: Any) -> Any:
    """Return what Orbax can write: where each process has an array of its own, that of the first."""
    if jax.process_count() == 1 or isinstance(getattr(array, "sharding", None), NamedSharding):
        return array
    return np.asarray(array)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
