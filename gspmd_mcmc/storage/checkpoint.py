"""Checkpoints on disk: a document and arrays, written by Orbax while the run goes on.

A folder holds the newest two, each in a folder of its own that appears whole or not at all; checksums
of their files, which tell one that was damaged later; and the lock of the process that writes.
"""

import hashlib
import json
import shutil
import warnings
import zlib
from collections.abc import Sequence
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

NUM_KEPT = 2
FORMAT = 4  # leaves of a run in the order of its template
STEPS, SUMS, DAMAGED = "steps", "checksums", "damaged"


class Damaged(ValueError):
    """A checkpoint is not what was written."""


class Checkpoints:
    """The checkpoints of one run in a folder, held by one process from `__init__` to `close`.

    Parameters
    ----------
    path
        The folder; made if there is none.

    Raises
    ------
    CheckpointNotSaved
        If the folder cannot be written to, or another process that lives writes to it.
    ImportError
        Without the extra ``checkpoint``.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        self._orbax = need("orbax.checkpoint", "checkpoint")
        self._lock = FolderLock(self.path)
        self._manager: Any = None
        self._unsummed: int | None = None
        self._has_warned = False
        on_first(
            self._take, CheckpointNotSaved("checkpoint: process 0 cannot use the folder; it says why")
        )
        self._pool = ThreadPoolExecutor(1, "checksums")

    def _take(self) -> None:
        try:
            for name in (STEPS, SUMS):
                (self.path / name).mkdir(parents=True, exist_ok=True)
            self._lock.take()
        except (OSError, Locked) as error:
            raise CheckpointNotSaved(f"checkpoint: {error}") from error

    def steps(self) -> list[int]:
        """Return the numbers of the checkpoints there are, the newest first."""
        return sorted(
            (int(p.name) for p in (self.path / STEPS).iterdir() if p.name.isdigit()), reverse=True
        )

    def save(self, arrays: Sequence[Any], document: dict[str, Any]) -> None:
        """Begin to write a checkpoint; what is on the devices is copied before this returns."""
        self.finish()
        number = max(self.steps(), default=0) + 1
        args = self._orbax.args
        written = {str(i): _to_write(x) for i, x in enumerate(arrays) if np.size(x)}
        document = document | {"format": FORMAT}
        self._open().save(
            number,
            args=args.Composite(
                arrays=args.StandardSave(written), document=args.JsonSave(_with_sum(document))
            ),
        )
        self._unsummed = number

    def try_to_save(self, arrays: Sequence[Any], document: dict[str, Any]) -> None:
        """Begin to write a checkpoint; warn, once, where that or the last one's end failed."""
        try:
            self.save(arrays, document)
        except Exception as error:  # Orbax raises whatever its threads met.
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Warn, once, that checkpoints are not written; a next one is begun afresh."""
        self._manager, self._unsummed = None, None
        if not self._has_warned:
            self._has_warned = True
            newest = "the newest that is whole" if self.steps() else "none"
            warnings.warn(
                f"checkpoint: {self.path} could not be written to: {_first_line(error)}. The run goes "
                f"on, and tries again; until then it can be resumed from {newest}",
                SamplingWarning,
                stacklevel=2,
            )

    def is_saving(self) -> bool:
        """Tell whether a checkpoint is being written; sum up one that has been."""
        if self._manager is None or self._manager.is_saving_in_progress():
            return self._manager is not None
        if self._unsummed is not None:
            number, self._unsummed = self._unsummed, None
            if jax.process_index() == 0:
                self._pool.submit(self._write_sums, number)
        return False

    def finish(self) -> None:
        """Wait until the checkpoint that was begun is whole on disk; raise if it failed."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self.is_saving()

    def try_to_finish(self) -> None:
        """Wait as `finish` does; warn, once, where it failed."""
        try:
            self.finish()
        except Exception as error:  # Orbax raises whatever its threads met.
            self.give_up(error)

    def read(self, number: int) -> dict[str, Any]:
        """Return the document of a checkpoint whose files are as they were written.

        Raises
        ------
        Damaged, OSError
            If it cannot be read, or is not what was written.
        """
        self._check_sums(number)
        try:
            document = json.loads(
                (self.path / STEPS / str(number) / "document" / "metadata").read_text()
            )
        except ValueError as error:
            raise Damaged(f"its document is no JSON: {error}") from error
        if not isinstance(document, dict) or _with_sum(document) != document:
            raise Damaged("its document is not what was written")
        if document["format"] != FORMAT:
            raise ValueError(
                f"checkpoint: {self.path} has format {document['format']}, of gspmd_mcmc "
                f"{document['versions']['gspmd_mcmc']}; this version reads format {FORMAT}"
            )
        return document

    def restore(self, number: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Read the arrays of a checkpoint in these shapes and shardings; zeros where they are longer.

        Those without a sharding come back as arrays that no device is bound to.
        """
        args = self._orbax.args
        wanted = {str(i): s for i, s in enumerate(shapes) if np.prod(s.shape)}
        try:
            found = self._open().restore(
                number, args=args.Composite(arrays=args.StandardRestore(wanted, strict=False))
            )["arrays"]
        except Exception as error:
            # Files that are as they were written give no such error by themselves.
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
        on_first(lambda: self._put_aside(number), RuntimeError("process 0 could not move a checkpoint"))

    def _put_aside(self, number: int) -> None:
        aside = self.path / DAMAGED
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / str(number), ignore_errors=True)
        (self.path / STEPS / str(number)).rename(aside / str(number))
        self._sums_of(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Wait for what is being written, and let go of the folder."""
        self.try_to_finish()
        if self._manager is not None:
            self._manager.close()
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
        """Note checksums of a checkpoint that is whole; those of others that are no more go."""
        kept = {f"{n}.json" for n in self.steps()}
        for path in (self.path / SUMS).iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)
        temporary = self._sums_of(number).with_suffix(".tmp")
        temporary.write_text(json.dumps(_sums(self.path / STEPS / str(number))))
        temporary.rename(self._sums_of(number))

    def _check_sums(self, number: int) -> None:
        # A run that was killed between the two has left a checkpoint that is whole, and no sums of it.
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
    """Return what Orbax can write: of what each process has by itself, that of the first."""
    if jax.process_count() == 1 or isinstance(getattr(array, "sharding", None), NamedSharding):
        return array
    return np.asarray(array)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
