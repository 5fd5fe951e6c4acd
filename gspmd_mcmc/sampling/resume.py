"""One call from a checkpoint to the draws of its run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.processes import spans_processes
from gspmd_mcmc.sampling import arguments
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.keeping import carry_out, kept_in, reserved
from gspmd_mcmc.sampling.memory import explained
from gspmd_mcmc.sampling.observing import ChunkReport
from gspmd_mcmc.sampling.rebuilding import rebuild
from gspmd_mcmc.sampling.same_run import require_same_run
from gspmd_mcmc.sampling.sample import common_mesh, warn_of
from gspmd_mcmc.targets.retracing import traced_with


@on_any_mesh
def resume(
    path: str | Path,
    target: Any,
    *,
    mesh: Mesh | None = None,
    num_samples: int | None = None,
    progress: bool = True,
    callback: Callable[[ChunkReport], Any] | None = None,
) -> Draws:
    """Go on with a run from its newest checkpoint.

    Kernel, warm-up and settings are those of the run, and so are the draws: on a mesh of the same shape
    they are to the bit those that the run would have made had it not ended, on another one to rounding.
    Draws that the run wrote after its newest checkpoint are made once more, in their places.

    Parameters
    ----------
    path
        What the run was given as ``checkpoint``.
    target
        The target, built anew: its data and functions are not saved. Those of another shape or name are
        refused, and so are those of another log density where the chains stand.
    mesh
        The mesh, which may be another one than before; by default that of the target's data.
    num_samples
        Draws in all, if they are to be more than the run was given.
    progress
        Whether to show progress, as in `sample`.
    callback
        Called with a `ChunkReport` after each chunk, as in `sample`.

    Returns
    -------
    Draws
        All of the run; of one that had ended those that it made.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError
        If the checkpoints are of another model, or none can be read: the message says what differs.
        A damaged one is put aside, with a warning, and the one before is taken.
    CheckpointNotSaved
        If the folder cannot be written to, or another process that lives writes to it.
    Preempted
        After SIGTERM: the run is saved first.
    ProcessesDisagree
        If the processes of a run on several are given different things, or see no common folder.
    """
    arguments.check_path("path", path)
    if num_samples is not None:
        arguments.check_counts({"num_samples": 0}, {"num_samples": num_samples})
        num_samples = int(num_samples)
    arguments.check_observers(progress, callback)
    mesh = common_mesh(mesh, target)
    is_there = Path(path).is_dir()
    if mesh is not None and spans_processes(mesh):
        # A folder of one machine that the others do not share is no place for a run.
        settings = {"path": str(path), "path is a folder": is_there, "num_samples": num_samples}
        require_same_run("resume", mesh, target, {}, settings)
    if not is_there:
        raise FileNotFoundError(f"path: there is no folder {path}")
    promoting = jax.numpy_dtype_promotion("standard")
    with promoting, explained(target) as known, kept_in(path, is_resumed=True) as checkpoints:
        assert checkpoints is not None
        run, document = rebuild(checkpoints, target, mesh, num_samples)
        known.run = run
        traced = traced_with(run.phase.kernel, run.plan.adaptation)
        with traced, reserved(run.sink, is_resumed=True):
            draws = carry_out(run, checkpoints, document["every"], progress=progress, callback=callback)
    warn_of(draws, run.plan)
    return draws
