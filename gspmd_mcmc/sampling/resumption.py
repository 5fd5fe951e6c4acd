"""When a run is saved, and how a script that is run again goes on with it."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.adaptation.stuck_chains import Move
from gspmd_mcmc.errors import CheckpointNotSaved, Preempted, SamplingWarning
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.agreement import least, naming_lost
from gspmd_mcmc.multihost.processes import spans_processes, to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.identity import Facts, require_same, row_cuts
from gspmd_mcmc.sampling.reporting import LOGGER, ChunkReport, Report, marked
from gspmd_mcmc.sampling.run import Run, Stop, stop_on_interrupt
from gspmd_mcmc.sampling.run_state import RunState, end_stage, run_roles
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.storage.attributes import version_of
from gspmd_mcmc.storage.checkpoint import Checkpoints, Damaged
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.storage.zarr_store import ZarrSink
from gspmd_mcmc.tree import PyTree, path_str

DRAWS = "draws"
LIBRARIES = ("gspmd_mcmc", "jax", "jaxlib", "orbax-checkpoint")
# What a mesh, or a compiler, may change of a sum of terms: this share of their absolute values, and so
# many nats. Other data change it by about one part in the square root of their rows.
MOST_CHANGE, MOST_NATS = 1e-4, 1e-3


@contextlib.contextmanager
def opened(path: str | Path | None) -> Iterator[Checkpoints | None]:
    """Hold the folder of a run's checkpoints; None where there is to be none.

    Raises
    ------
    CheckpointNotSaved
        If it cannot be written to, or another process that lives writes to it.
    """
    if path is None:
        yield None
        return
    checkpoints = Checkpoints(path)
    try:
        yield checkpoints
    finally:
        checkpoints.close()


@contextlib.contextmanager
def reserved(to: Sink | None, checkpoints: Checkpoints | None) -> Iterator[Sink | None]:
    """Hold the folder of a sink from before anything is computed until the draws are on disk.

    With checkpoints there is a sink always.
    """
    is_resumed = checkpoints is not None and bool(checkpoints.steps())
    sink = to
    if to is None and checkpoints is not None:
        sink = ZarrSink(checkpoints.path / DRAWS)
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
    facts: Facts,
    every: float,
    *,
    progress: bool,
    callback: Callable[[ChunkReport], Any] | None,
) -> Draws:
    """Run to the end, or to a stop, from the newest checkpoint if there is one; save on the way.

    Raises
    ------
    ValueError
        If the checkpoints are of another run, or none can be read.
    CheckpointNotSaved
        If a new run cannot be saved before its first step.
    Preempted
        After SIGTERM.
    """
    is_multiprocess = spans_processes(run.layout.mesh)
    is_shown = progress and not (is_multiprocess and jax.process_index())
    handled = stop_on_interrupt(is_multiprocess, is_kept=checkpoints is not None)
    reporting = Report(is_shown=is_shown, callback=callback)
    with naming_lost(), handled as stop, reporting as report:
        if is_multiprocess and run.sink is None:
            run.require_room()
        if checkpoints is None:
            return run.go(report, stop)
        saver = Saver(run, checkpoints, facts, every, stop)
        if checkpoints.steps():
            resume(run, checkpoints, facts)
        else:
            saver.begin()
        draws = run.go(report, stop, saver.after_chunk)
        if not stop.is_asked:
            saver.save()
        return draws


class Saver:
    """Saves a run between its chunks: when it is time, and before it ends early.

    Parameters
    ----------
    run
        The run.
    checkpoints
        Where it is saved.
    facts
        What the run was given.
    every
        Seconds from one checkpoint to the next.
    stop
        Whether the run is to end.
    """

    def __init__(self, run: Run, checkpoints: Checkpoints, facts: Facts, every: float, stop: Stop):
        self.run, self.checkpoints, self.every, self.stop = run, checkpoints, every, stop
        self._saved_at = time.monotonic()
        self._document = {
            "versions": {name: version_of(name) for name in LIBRARIES},
            "facts": facts,
            "lies": _lies(run),
        }

    def begin(self) -> None:
        """Save the run before its first step, and wait for it.

        Raises
        ------
        CheckpointNotSaved
            If that fails.
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
                f"the run was told to end (SIGTERM). It is saved in {self.checkpoints.path}: run the "
                "script again to continue it"
            )

    def save(self) -> None:
        """Save the run; draws first, so that those that the checkpoint counts are on disk."""
        self._saved_at = time.monotonic()
        with marked("I/O"):
            self.run.flush()
            self.checkpoints.try_to_save(*self._content())
        num_steps = int(self.run.done.num_steps)
        LOGGER.info("checkpoint in %s, after %d steps", self.checkpoints.path, num_steps)

    def _is_due(self) -> bool:
        """Tell whether it is time, and the checkpoint before is whole; on every process the same."""
        is_time = time.monotonic() - self._saved_at >= self.every
        is_due = is_time and not self.checkpoints.is_saving()
        return bool(least(int(is_due))[0]) if self.stop.is_multiprocess else is_due

    def _content(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, and its document."""
        run = self.run
        saved = jax.tree_util.tree_leaves_with_path(tree.replace(run.state, draws=()))
        leaves = [
            {"path": path_str(path), "shape": list(x.shape), "dtype": np.dtype(x.dtype).name}
            for path, x in saved
        ]
        where = {
            "is_warm": run.is_warm,
            "num_windows": int(run.done.num_windows),
            "num_draws": int(run.done.num_draws),
            "moves": [list(move) for move in run.moves],
        }
        return [x for _, x in saved], self._document | where | {"leaves": leaves}


def _lies(run: Run) -> dict[str, Any]:
    """Return what makes two meshes the same for a run's arrays."""
    mesh = run.layout.mesh
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    return {
        "axes": {} if mesh is None else {name: int(size) for name, size in mesh.shape.items()},
        "platform": devices[0].platform,
        "processes": len({d.process_index for d in devices}),
        "plates": row_cuts(run.target),
    }


def resume(run: Run, checkpoints: Checkpoints, facts: Facts) -> None:
    """Bring a run that has taken no step to where its newest checkpoint is.

    Damaged ones are put aside, with a warning.

    Raises
    ------
    ValueError
        If none can be read, or they are of another run.
    """
    failures: dict[int, Exception] = {}
    for number in checkpoints.steps():
        try:
            _resume_from(run, checkpoints, number, facts)
        except (Damaged, OSError) as error:
            failures[number] = error
            continue
        _put_aside(checkpoints, failures)
        return
    shown = "\n".join(f"  {number}: {error}" for number, error in failures.items())
    raise ValueError(f"checkpoint: none in {checkpoints.path} can be read:\n{shown}")


def _put_aside(checkpoints: Checkpoints, failures: dict[int, Exception]) -> None:
    for number, error in failures.items():
        checkpoints.put_aside(number)
        warnings.warn(
            f"checkpoint {number} in {checkpoints.path} is damaged: {error}. It was put aside, and the "
            "run continues from the one before",
            SamplingWarning,
            stacklevel=5,
        )


def _resume_from(run: Run, checkpoints: Checkpoints, number: int, facts: Facts) -> None:
    document = checkpoints.read(number)
    require_same(document["facts"], facts, checkpoints.path)
    num_draws, num_samples = document["num_draws"], run.plan.num_samples
    if num_samples < num_draws:
        raise ValueError(
            f"num_samples: the run in {checkpoints.path} has {num_draws} draws already; expected no "
            f"fewer, got {num_samples}"
        )
    is_moved = document["lies"] != _lies(run)
    stage = run.stage_of(document["num_windows"], document["is_warm"])
    adaptation = run.stages[stage].adaptation
    template = _template(run, stage)
    of_leaves = run_roles(adaptation, template, run.layout)
    wanted = run.layout.templates(template, of_leaves)
    _check_leaves(document, template, of_leaves, checkpoints.path, is_moved=is_moved)
    shapes = _as_saved(document, wanted, of_leaves, is_moved=is_moved)
    read = checkpoints.restore(number, shapes)
    state = jax.tree.unflatten(jax.tree.structure(template), read)
    run.continue_from(
        _continued(run, state, adaptation, checkpoints.path, is_moved=is_moved),
        [Move(*move) for move in document["moves"]],
        is_warm=document["is_warm"],
    )


def _template(run: Run, last: int) -> RunState:
    """Return the run as shapes, in that stage of warm-up."""
    template = jax.eval_shape(lambda run: run, tree.replace(run.state, draws=()))
    for stage, following in zip(run.stages[:last], run.stages[1:], strict=False):
        template = jax.eval_shape(
            lambda state, a, b: end_stage(state, a, run.fixed, following=b, learns_metric=None)[0],
            template,
            stage.adaptation,
            following.adaptation,
        )
    return template


def _check_leaves(
    document: dict[str, Any], template: RunState, of_leaves: RunState, path: Any, *, is_moved: bool
) -> None:
    """Raise where the arrays of a checkpoint are not those of the run."""
    found = jax.tree_util.tree_leaves_with_path(template)
    saved = {x["path"]: x for x in document["leaves"]}
    if list(saved) != [path_str(p) for p, _ in found]:
        differs = sorted(saved.keys() ^ {path_str(p) for p, _ in found})
        raise ValueError(
            f"checkpoint: {path} holds arrays of another kind of run; {', '.join(differs[:3])} "
            "are in one of the two alone. Give another folder"
        )
    for (leaf_path, leaf), role in zip(found, jax.tree.leaves(of_leaves), strict=True):
        name, has = path_str(leaf_path), saved[path_str(leaf_path)]
        if has["dtype"] != np.dtype(leaf.dtype).name:
            raise ValueError(
                f"checkpoint: {name} in {path} was computed in {has['dtype']}, and now is "
                f"{leaf.dtype}: set jax_enable_x64 as it was"
            )
        may_differ = is_moved and (role.is_derived or role.is_like_position)
        if tuple(has["shape"]) != leaf.shape and not may_differ:
            raise ValueError(
                f"checkpoint: {name} in {path} has shape {has['shape']}, and here {list(leaf.shape)}. "
                "Where an array of a kernel or a warm-up has the rows of the position, its field says "
                "so by gspmd_mcmc.like_position()"
            )


def _as_saved(
    document: dict[str, Any], wanted: RunState, of_leaves: RunState, *, is_moved: bool
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes to read; of terms that another mesh has cut otherwise those that were saved."""

    def one(x, role, has):
        is_cut = is_moved and role.is_derived and not role.is_like_position
        return jax.ShapeDtypeStruct(tuple(has["shape"]), x.dtype) if is_cut else x

    return list(map(one, jax.tree.leaves(wanted), jax.tree.leaves(of_leaves), document["leaves"]))


def _continued(
    run: Run, state: RunState, adaptation: Adaptation, path: Any, *, is_moved: bool
) -> RunState:
    """Return the state that was read; on another mesh filled up, and evaluated anew."""
    layout = run.layout
    kept = _filled(adaptation, state, layout=layout) if is_moved else state
    kernel = tree.replace(state.kernel, target=run.target)
    fresh = evaluated_anew(kernel, kept.states, layout)
    what = f"checkpoint: the run in {path} cannot be continued"
    require_same_density(what, state.states, fresh)
    if not is_moved:
        return state
    of_states = run_roles(adaptation, kept, layout).states
    states = jax.tree.map(
        lambda role, new, old: new if role.is_derived else old, of_states, fresh, kept.states
    )
    return tree.replace(kept, states=states)


@partial(jax.jit, static_argnames="layout")
def _filled(adaptation: Adaptation, state: RunState, *, layout: Layout) -> RunState:
    """Fill the pad rows: those of the positions first, which others copy."""
    of_leaves = run_roles(adaptation, state, layout)
    position, of_position = state.states.position, of_leaves.states.position
    positions = layout.filled(position, of_position, position)
    return layout.filled(state, of_leaves, positions)


def evaluated_anew(kernel: Kernel, states: Any, layout: Layout) -> Any:
    """Return the states that the kernel begins with where chains stand."""
    # What a chain begins with does not depend on the metric, which each may have one of its own.
    kernel = tree.replace(kernel, inverse_mass_matrix=None)
    return init_chains(kernel, states.position, layout=layout)


def require_same_density(what: str, earlier: Any, anew: Any) -> None:
    """Raise where states and those `evaluated_anew` have other log densities, by leaves of the terms.

    Raises
    ------
    ValueError
        If the sums of a leaf's terms differ by more than rounding, or are not finite any more.
    """
    olds, news = (to_host(_sums(states.terms)) for states in (earlier, anew))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(anew.terms)]
    for path, (old, size), (new, _) in zip(paths, olds, news, strict=True):
        bad = np.flatnonzero(~(np.abs(new - old) <= MOST_CHANGE * size + MOST_NATS))
        if bad.size:
            raise ValueError(
                f"{what}: the target is another one than the chains were drawn from. Where "
                f"chain {bad[0]} stands, the terms {path_str(path)} of its log density add up to "
                f"{new[bad[0]]:.7g}, and did to {old[bad[0]]:.7g}: its data, or what its functions "
                "read, have changed. Give the target that the run was begun with; to sample this one, "
                "begin a new run, at gspmd_mcmc.per_chain(position) of the last draws if you like"
            )


@jax.jit
def _sums(terms: PyTree) -> list[tuple[jax.Array, jax.Array]]:
    """Return of each leaf [chains, ...] the sums of its terms and of their sizes, each [chains]."""
    flat = [x.reshape(len(x), -1) for x in jax.tree.leaves(terms)]
    return [(jnp.sum(x, axis=1), jnp.sum(jnp.abs(x), axis=1)) for x in flat]
