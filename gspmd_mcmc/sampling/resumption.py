"""When a run is saved, and how a script that is run again continues it."""

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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.adaptation.stuck_chains import Move
from gspmd_mcmc.errors import CALLER_OF_SAMPLE, CheckpointNotSaved, Preempted, SamplingWarning
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.agreement import least, lost_process_explained
from gspmd_mcmc.multihost.processes import spans_processes, to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.sampling.digests import data_digests, kept_sums, require_same_data, require_same_kept
from gspmd_mcmc.sampling.identity import Facts, require_same, versions_of_libraries
from gspmd_mcmc.sampling.reporting import LOGGER, Report, marked
from gspmd_mcmc.sampling.run import Run, Stop
from gspmd_mcmc.sampling.run_state import RunState, end_stage, run_roles
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.storage.checkpoint import Checkpoints, Damaged
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.storage.zarr_store import ZarrSink
from gspmd_mcmc.tree import PyTree, path_str

DRAWS = "draws"
# What another mesh or compiler may change of a sum of terms: this share of their absolute values, and
# this many nats. Other data change it by about one part in the square root of their rows.
MOST_CHANGE, MOST_NATS = 1e-4, 1e-3


@contextlib.contextmanager
def opened(
    path: str | Path | None, to: Sink | None
) -> Iterator[tuple[Checkpoints | None, Sink | None]]:
    """Hold the folders of a run, from before anything is computed until all is on disk.

    A run with a folder for checkpoints always writes its draws to disk, by default there.
    """
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if path is not None:
            checkpoints = Checkpoints(path)
            stack.callback(checkpoints.close)
            to = ZarrSink(checkpoints.path / DRAWS) if to is None else to
        if to is not None:
            to.reserve(is_resumed=checkpoints is not None and bool(checkpoints.numbers()))
            stack.callback(to.close)
        yield checkpoints, to


@contextlib.contextmanager
def supervised(
    run: Run, checkpoints: Checkpoints | None, facts: Facts, every: float, report: Report
) -> Iterator[tuple[Report, Stop, Callable[[], None]]]:
    """Bring a run to its newest checkpoint, if it has any; report, stop and save it as it goes.

    Yields what `Run.go` takes.
    """
    is_multiprocess = spans_processes(run.layout.mesh)
    with (
        lost_process_explained(),
        Stop(is_multiprocess, is_kept=checkpoints is not None) as stop,
        report,
    ):
        if is_multiprocess and run.sink is None:
            run.require_room()
        if checkpoints is None:
            yield report, stop, lambda: None
            return
        saver = Saver(run, checkpoints, facts, every, stop)
        if checkpoints.numbers():
            resume(run, checkpoints, saver.identity)
        else:
            saver.begin()
        yield report, stop, saver.after_chunk
        if not stop.is_asked:
            saver.save()


class Saver:
    """Saves a run between its chunks: when it is time, and before it ends early."""

    def __init__(self, run: Run, checkpoints: Checkpoints, facts: Facts, every: float, stop: Stop):
        self.run, self.checkpoints, self.every, self.stop = run, checkpoints, every, stop
        self._saved_at = time.monotonic()
        data, placement = data_digests(run.fixed.target), _placement(run)
        self.identity = {"facts": facts, "data": data, "placement": placement}
        self._versions = versions_of_libraries()

    def begin(self) -> None:
        """Save the run before its first step, and wait; raise CheckpointNotSaved if that fails."""
        try:
            self.checkpoints.save(*self._content())
            self.checkpoints.finish()
        except Exception as error:  # Orbax raises whatever its threads met.
            raise CheckpointNotSaved(f"checkpoint: {self.checkpoints.path}: {error}") from error

    def after_chunk(self) -> None:
        """Save the run if it is time or it is to end; raise Preempted after SIGTERM."""
        if self.stop.is_asked or self.stop.is_preempted or self._is_due():
            self.save()
        if self.stop.is_preempted:
            self.checkpoints.attempt(self.checkpoints.finish)
            raise Preempted(
                f"the run was told to end (SIGTERM). It is saved in {self.checkpoints.path}: run the "
                "script again to continue it"
            )

    def save(self) -> None:
        """Save the run; draws first, so that those that the checkpoint counts are on disk."""
        self._saved_at = time.monotonic()
        with marked("I/O"):
            self.run.flush()
            self.checkpoints.attempt(lambda: self.checkpoints.save(*self._content()))
        num_steps = int(self.run.done.num_steps)
        LOGGER.info("checkpoint in %s, after %d steps", self.checkpoints.path, num_steps)

    def _is_due(self) -> bool:
        """Tell whether it is time and the last checkpoint is whole; the same on every process."""
        is_time = time.monotonic() - self._saved_at >= self.every
        is_due = is_time and not self.checkpoints.is_saving()
        return bool(least(int(is_due))[0]) if self.stop.is_multiprocess else is_due

    def _content(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the arrays of a checkpoint, and its document."""
        run = self.run
        saved = jax.tree_util.tree_leaves_with_path(tree.replace(run.state, draws=()))
        progress = {
            "is_warm": run.is_warm,
            "num_windows": int(run.done.num_windows),
            "num_draws": int(run.done.num_draws),
            "moves": [list(move) for move in run.moves],
            "kept": _kept(run, run.state.states) if run.done.num_draws else None,
            "leaves": [
                {"path": path_str(path), "shape": list(x.shape), "dtype": np.dtype(x.dtype).name}
                for path, x in saved
            ],
        }
        document = {"versions": self._versions} | self.identity | progress
        return [x for _, x in saved], document


def _placement(run: Run) -> dict[str, Any]:
    """Return what two meshes must share for a run's arrays to be the same, to the bit, on both."""
    mesh = run.layout.mesh
    devices = jax.devices()[:1] if mesh is None else mesh.devices.ravel()
    return {
        "axes": {} if mesh is None else {name: int(size) for name, size in mesh.shape.items()},
        "platform": devices[0].platform,
        "processes": len({d.process_index for d in devices}),
        "plates": [
            [p.rows.num_rows, p.rows.num_padded, list(p.rows.axes)] for p in run.fixed.target.plates
        ],
    }


def _kept(run: Run, states: Any) -> dict[str, list[float]]:
    return kept_sums(run.fixed.target, run.draw, states, run.layout)


def resume(run: Run, checkpoints: Checkpoints, identity: dict[str, Any]) -> None:
    """Bring a run that has taken no step to its newest checkpoint that is not damaged.

    Damaged checkpoints are put aside, with a warning.
    """
    failures: dict[int, Exception] = {}
    for number in checkpoints.numbers():
        try:
            _resume_from(run, checkpoints, number, identity)
        except (Damaged, OSError) as error:
            failures[number] = error
            continue
        for bad, error in failures.items():
            checkpoints.put_aside(bad)
            warnings.warn(
                f"checkpoint {bad} in {checkpoints.path} is damaged: {error}. It was put aside, and "
                f"the run continues from checkpoint {number}",
                SamplingWarning,
                stacklevel=CALLER_OF_SAMPLE,
            )
        return
    shown = "\n".join(f"  {number}: {error}" for number, error in failures.items())
    raise ValueError(
        f"checkpoint: none in {checkpoints.path} can be read:\n{shown}\nThe draws in it are whole "
        "(gspmd_mcmc.open_draws); begin a new run in another folder"
    )


def _resume_from(run: Run, checkpoints: Checkpoints, number: int, identity: dict[str, Any]) -> None:
    document, path = checkpoints.read(number), checkpoints.path
    require_same(document["facts"], identity["facts"], path)
    num_draws, num_samples = document["num_draws"], run.plan.num_samples
    if num_samples < num_draws:
        raise ValueError(
            f"num_samples: the run in {path} has {num_draws} draws already; expected at least as many, "
            f"got {num_samples}"
        )
    is_moved = document["placement"] != identity["placement"]
    stage = run.stage_of(document["num_windows"], document["is_warm"])
    adaptation = run.stages[stage].adaptation
    template = _template(run, stage)
    of_leaves = run_roles(adaptation, template, run.layout)
    wanted = run.layout.templates(template, of_leaves)
    shapes = _shapes_to_read(document["leaves"], wanted, of_leaves, path, is_moved)
    read = checkpoints.restore(number, shapes)
    # Another number of cores cuts the terms otherwise: a tile on a CPU is of a size that they share.
    is_moved |= any(s.shape != x.shape for s, x in zip(shapes, jax.tree.leaves(wanted), strict=True))
    state = jax.tree.unflatten(jax.tree.structure(template), read)
    full = _filled(adaptation, state, layout=run.layout) if is_moved else state
    states = recomputed_states(run.fixed.kernel(full), full.states, run.layout)
    what = f"checkpoint: the run in {path} cannot be continued"
    require_same_density(what, state.states, states)
    require_same_data(what, document["data"], identity["data"])
    if num_draws:
        require_same_kept(what, document["kept"], _kept(run, full.states))
    if is_moved:
        states = jax.tree.map(
            lambda role, new, old: new if role.is_derived else old,
            *(of_leaves.states, states, full.states),
        )
        state = tree.replace(full, states=states)
    moves = [Move(*move) for move in document["moves"]]
    run.continue_from(state, moves, is_warm=document["is_warm"])


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


def _shapes_to_read(
    leaves: list[dict[str, Any]], template: RunState, of_leaves: RunState, folder: Path, is_moved: bool
) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and shardings to read a checkpoint's leaves in; raise if they do not fit.

    Terms that are cut otherwise here are read as they were saved, whole: they are computed anew.
    """
    wanted, shapes = jax.tree_util.tree_leaves_with_path(template), []
    theirs, ours = [x["path"] for x in leaves], [path_str(path) for path, _ in wanted]
    if theirs != ours:
        differs = sorted(set(theirs) ^ set(ours)) or ["their order"]
        raise ValueError(
            f"checkpoint: {folder} holds the arrays of another kind of run; what differs: "
            f"{', '.join(differs[:3])}. Give another folder"
        )
    for (path, x), role, saved in zip(wanted, jax.tree.leaves(of_leaves), leaves, strict=True):
        if saved["dtype"] != np.dtype(x.dtype).name:
            raise ValueError(
                f"checkpoint: {path_str(path)} in {folder} was computed in {saved['dtype']}, and is "
                f"{x.dtype} now: set jax_enable_x64 as it was"
            )
        is_like_position = is_moved and role.leaf is not None
        is_cut = role.is_derived and role.leaf is None and tuple(saved["shape"]) != x.shape
        if tuple(saved["shape"]) != x.shape and not is_like_position and not is_cut:
            raise ValueError(
                f"checkpoint: {path_str(path)} in {folder} has shape {saved['shape']}, and here "
                f"{list(x.shape)}. Where an array of a kernel or a warm-up has the rows of the "
                "position, its field says so by gspmd_mcmc.like_position()"
            )
        if is_cut:
            whole = None if x.sharding is None else NamedSharding(x.sharding.mesh, P())
            x = jax.ShapeDtypeStruct(tuple(saved["shape"]), x.dtype, sharding=whole)
        shapes.append(x)
    return shapes


@partial(jax.jit, static_argnames="layout")
def _filled(adaptation: Adaptation, state: RunState, *, layout: Layout) -> RunState:
    """Fill the pad rows: those of the positions first, which others copy."""
    of_leaves = run_roles(adaptation, state, layout)
    position, of_position = state.states.position, of_leaves.states.position
    positions = layout.filled(position, of_position, position)
    return layout.filled(state, of_leaves, positions)


def recomputed_states(kernel: Kernel, states: Any, layout: Layout) -> Any:
    """Return the states with which a kernel would start where the chains are."""
    # A first state does not depend on the metric, which may differ between chains.
    kernel = tree.replace(kernel, inverse_mass_matrix=None)
    return init_chains(kernel, states.position, layout=layout)


def require_same_density(what: str, earlier: Any, now: Any) -> None:
    """Raise unless states and their `recomputed_states` have the same log density, term by term."""
    olds, news = (to_host(_sums(states.terms)) for states in (earlier, now))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(now.terms)]
    for path, (old, size), (new, _) in zip(paths, olds, news, strict=True):
        bad = np.flatnonzero(~(np.abs(new - old) <= MOST_CHANGE * size + MOST_NATS))
        if bad.size:
            raise ValueError(
                f"{what}: the target is not the one that the chains were drawn from. Where chain "
                f"{bad[0]} is, the terms {path_str(path)} of its log density add up to "
                f"{new[bad[0]]:.7g}, and added up to {old[bad[0]]:.7g}: its data, or what its "
                "functions read, have changed. Give the target that the run began with; to sample this "
                "one, begin a new run, at gspmd_mcmc.per_chain(position) of the last draws if you like"
            )


@jax.jit
def _sums(terms: PyTree) -> list[tuple[jax.Array, jax.Array]]:
    """Return the sums of the terms of each leaf [chains, ...] and of their sizes, each [chains]."""
    flat = [x.reshape(len(x), -1) for x in jax.tree.leaves(terms)]
    return [(jnp.sum(x, axis=1), jnp.sum(jnp.abs(x), axis=1)) for x in flat]
