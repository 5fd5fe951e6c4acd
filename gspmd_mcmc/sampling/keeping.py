"""When a run is saved, and what the document of a checkpoint says of it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from gspmd_mcmc.placement.agreement import least, naming_lost
from gspmd_mcmc.placement.processes import spans_processes
from gspmd_mcmc.sampling.checkpoint import Checkpoints
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.encoding import encode
from gspmd_mcmc.sampling.errors import CheckpointNotSaved, Preempted
from gspmd_mcmc.sampling.fingerprint import fingerprint, plates
from gspmd_mcmc.sampling.moving import describe_mesh, write_spec
from gspmd_mcmc.sampling.observing import LOGGER, ChunkReport, marked
from gspmd_mcmc.sampling.progress import Report, Stop, stop_on_interrupt
from gspmd_mcmc.sampling.run import Run
from gspmd_mcmc.storage.attributes import version_of
from gspmd_mcmc.storage.zarr_store import ZarrSink

DRAWS = "draws"
LIBRARIES = ("gspmd_mcmc", "jax", "jaxlib", "orbax-checkpoint")


@contextlib.contextmanager
def kept_in(path: str | Path | None, *, is_resumed: bool = False) -> Iterator[Checkpoints | None]:
    """Hold the folder of a run's checkpoints; None where there is to be none.

    Raises
    ------
    CheckpointNotSaved
        If it cannot be written to, or, of a new run, there is another one in it.
    """
    if path is None:
        yield None
        return
    checkpoints = Checkpoints(path)
    try:
        if checkpoints.steps() and not is_resumed:
            raise CheckpointNotSaved(
                f"checkpoint: {checkpoints.path} holds a run already; go on with it by "
                "gspmd_mcmc.resume(path, target), give another path, or remove that folder"
            )
        yield checkpoints
    finally:
        checkpoints.close()


def sink_of(to: ZarrSink | None, checkpoints: Checkpoints | None) -> ZarrSink | None:
    """Return the sink of a run's draws: with checkpoints there is one always."""
    if to is None and checkpoints is not None:
        return ZarrSink(checkpoints.path / DRAWS)
    return to


@contextlib.contextmanager
def reserved(sink: ZarrSink | None, *, is_resumed: bool = False) -> Iterator[ZarrSink | None]:
    """Hold the folder of a sink from before anything is computed until the draws are on disk."""
    if sink is None:
        yield None
        return
    sink.reserve(is_resumed)
    try:
        yield sink
    finally:
        sink.close()


def carry_out(
    run: Run,
    checkpoints: Checkpoints | None,
    every: float,
    *,
    progress: bool,
    callback: Callable[[ChunkReport], Any] | None,
) -> Draws:
    """Run to the end, or to a stop, and save the run on the way.

    Raises
    ------
    CheckpointNotSaved
        If a new run cannot be saved before its first step.
    Preempted
        After SIGTERM.
    """
    in_company = spans_processes(run.layout.mesh)
    is_shown = progress and not (in_company and jax.process_index())
    handled = stop_on_interrupt(in_company, is_kept=checkpoints is not None)
    telling = Report(is_shown=is_shown, callback=callback)
    with naming_lost(), handled as stop, telling as report:
        if checkpoints is None:
            return run.go(report, stop)
        keeper = Keeper(run, checkpoints, every, stop)
        if not run.is_resumed:
            keeper.begin()
        draws = run.go(report, stop, keeper.after_chunk)
        if not stop.is_asked:
            keeper.save()
        return draws


class Keeper:
    """Saves a run between its chunks: when it is time, and before it ends early.

    Parameters
    ----------
    run
        The run.
    checkpoints
        Where it is saved.
    every
        Seconds from one checkpoint to the next.
    stop
        Whether the run is to end.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints, every: float, stop: Stop):
        self.run, self.checkpoints, self.every, self.stop = run, checkpoints, every, stop
        self._saved_at = time.monotonic()
        self._facts = _facts(run, every, checkpoints.path)

    def begin(self) -> None:
        """Save the run before its first step, and wait for it.

        Raises
        ------
        CheckpointNotSaved
            If that fails, or the run has parts that no checkpoint can hold.
        """
        try:
            self.checkpoints.save(*self._content())
            self.checkpoints.finish()
        except Exception as error:  # Orbax raises whatever its threads met.
            raise CheckpointNotSaved(f"checkpoint: {self.checkpoints.path}: {error}") from error

    def after_chunk(self) -> None:
        """Save the run if it is time, or it is to end; raise if it was told to end.

        Raises
        ------
        Preempted
            After SIGTERM.
        """
        if self.stop.is_asked or self.stop.is_preempted or self._is_due():
            self.save()
        if self.stop.is_preempted:
            self.checkpoints.try_to_finish()
            raise Preempted(
                "the run was told to end (SIGTERM). It is saved: go on by "
                f"gspmd_mcmc.resume({str(self.checkpoints.path)!r}, target)"
            )

    def save(self) -> None:
        """Save the run; draws first, so that those that the checkpoint counts are on disk."""
        self._saved_at = time.monotonic()
        with marked("I/O"):
            self.run.flush()
            self.checkpoints.try_to_save(*self._content())
        LOGGER.info("checkpoint in %s, after %d steps", self.checkpoints.path, self.run.phase.num_steps)

    def _is_due(self) -> bool:
        """Tell whether it is time, and the checkpoint before is whole; on every process the same."""
        is_time = time.monotonic() - self._saved_at >= self.every
        is_due = is_time and not self.checkpoints.is_saving()
        return bool(least(int(is_due))[0]) if self.stop.in_company else is_due

    def _content(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, and its document."""
        run = self.run
        arrays, counts = run.state()
        tree, leaves = encode({"state": arrays, "plan": run.plan})
        return leaves, self._facts | {"tree": tree, "counts": counts}


def _facts(run: Run, every: float, folder: Path) -> dict[str, Any]:
    """Return what documents of all checkpoints of a run say."""
    return {
        "versions": {name: version_of(name) for name in LIBRARIES},
        "every": every,
        "sink": _write_sink(run.sink, folder),
        "rng_impl": str(jax.random.key_impl(run.rng_key)),
        "fingerprint": fingerprint(run.target, run.phase.states.position),
        "mesh": describe_mesh(run.layout.mesh),
        "specs": [write_spec(spec) for spec in run.layout.specs],
        "plates": plates(run.target),
    }


def _write_sink(sink: ZarrSink | None, folder: Path) -> dict[str, Any]:
    """Describe a sink; one inside the folder of the checkpoints may move with it."""
    assert sink is not None
    path = sink.path.relative_to(folder) if sink.path.is_relative_to(folder) else sink.path
    dtype = dict(sink.dtype) if isinstance(sink.dtype, Mapping) else sink.dtype
    return {
        "path": str(path),
        "leaves": None if sink.leaves is None else list(sink.leaves),
        "dtype": dtype,
        "compression": sink.compression,
        "chunk_bytes": sink.chunk_bytes,
        "flush_seconds": sink.flush_seconds,
    }


def read_sink(written: dict[str, Any], folder: Path) -> ZarrSink:
    """Return the sink that a document describes."""
    return ZarrSink(**written | {"path": folder / written["path"]})
