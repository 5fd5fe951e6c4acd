"""A run: warm-up, then sampling, in chunks of steps of about a second."""

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation, Stage
from gspmd_mcmc.adaptation.stuck_chains import Move, are_stuck_below
from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.functions.function import changes, meanings
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.agreement import least
from gspmd_mcmc.multihost.processes import spans_processes, to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.sampling.buffers import HostDraws, capacity
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.interrupts import Stop
from gspmd_mcmc.sampling.reporting import Report, marked
from gspmd_mcmc.sampling.run_state import (
    HELD,
    LEARNED,
    NONE,
    Counters,
    DrawShapes,
    RunState,
    advance,
    empty_buffers,
    finish,
    help_stuck_chains,
    set_up,
    turn,
)
from gspmd_mcmc.storage.saved_draws import SavedDraws
from gspmd_mcmc.storage.zarr_store import ZarrSink
from gspmd_mcmc.targets.local import fill_pad, is_row_values, unwrap
from gspmd_mcmc.tree import PyTree

CHUNK_SECONDS = 1.0
# What a chunk may be expected to take that is more than `MOST_GROWTH` times as long as the one before:
# were its steps a hundred times as slow, it would still end soon.
SHORT_SECONDS = 0.05
MOST_GROWTH = 8


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run is to do, and keep of it; see `sample`."""

    adaptation: Adaptation
    collect: Partial
    num_warmup: int
    num_samples: int
    thin: int
    device_bytes: int | None
    attributes: dict[str, Any]  # what the store of its draws says of it


class Run:
    """Warm-up and sampling of all chains: a `RunState`, and the loop that moves it.

    Parameters
    ----------
    plan
        What is to be done.
    kernel, states
        The kernel to tune, and the chains' states, whose buffers are taken over.
    rng_key, first_step
        Step i draws from ``fold_in(rng_key, i)``; the first is ``first_step``.
    layout
        The layout of the chains.
    sink
        Where draws are written as they are made, if anywhere.
    moves
        Of chains in the warm-up of an earlier run that this one goes on from.
    """

    def __init__(
        self,
        plan: Plan,
        kernel: Kernel,
        states: Any,
        rng_key: jax.Array,
        first_step: int,
        layout: Layout,
        sink: ZarrSink | None = None,
        moves: Sequence[Move] = (),
    ):
        self.plan, self.target, self.rng_key, self.layout = plan, kernel.target, rng_key, layout
        self.sink, self.moves = sink, list(moves)
        self.stages: list[Stage] = plan.adaptation.stages(plan.num_warmup) if plan.num_warmup else []
        self.is_resumed = self.is_warm = False
        self.draw = DrawShapes.of(kernel, states, plan.collect, layout)
        if not jax.tree.leaves(self.draw.tree[0]):
            collected = self.draw.tree[0]
            raise TypeError(f"collect: expected arrays to keep, got {collected}; does it return them?")
        if sink is not None:
            sink.check(self.draw.tree[0])
        self.capacity, self._chunk_size = self._capacity(), 1
        self.state: RunState = set_up(
            plan.adaptation,
            self.stages[0].adaptation if self.stages else None,
            kernel,
            states,
            first_step,
            size=bucket(plan.num_warmup),
            layout=layout,
        )
        self.done: Counters = to_host(self.state.counters)  # the state's, on the host

    def go(self, report: Report, stop: Stop, after: Callable[[], None] = lambda: None) -> Draws:
        """Run to the end, or to a stop; call ``after`` when a chunk has ended.

        Returns
        -------
        Draws
            Those that were made.
        """
        self._meanings = meanings((self.target, self.plan.collect))

        def after_chunk() -> None:
            after()
            self._end_if_changed(stop)

        self.state = tree.replace(self.state, draws=empty_buffers(self.draw, self.capacity))
        self.sampling = Sampling(self)
        WarmUp(self).go(report, stop, after_chunk)
        self.sampling.go(report, stop, after_chunk)
        return self._draws(self.sampling)

    def require_room(self) -> None:
        """Raise, on every process, unless the devices hold all draws: no host could take them over."""
        num_samples = self.plan.num_samples
        room, *_ = least(self._capacity(is_limited=True))
        if room < bucket(num_samples):
            raise ValueError(
                f"num_samples={num_samples}: draws of several processes stay on their devices, which "
                f"have room for {room}. Raise thin, collect less, or raise device_bytes"
            )

    @property
    def kernel(self) -> Kernel:
        """The kernel of the next step."""
        return tree.replace(self.state.kernel, target=self.target)

    @property
    def adaptation(self) -> Adaptation | None:
        """The adaptation of the stage that the run is in; after warm-up of the last one."""
        if not self.stages:
            return None
        return self.stages[self.stage_of(int(self.done.num_windows), self.is_warm)].adaptation

    def stage_of(self, num_windows: int, is_warm: bool) -> int:
        """Return the number of the stage that a run is in, from the windows that have begun."""
        ends = np.cumsum([len(stage.windows) for stage in self.stages])
        number = np.searchsorted(ends, max(num_windows - 1, 0), side="right")
        return len(self.stages) - 1 if is_warm else min(int(number), len(self.stages) - 1)

    def continue_from(self, state: RunState, moves: list[Move], *, is_warm: bool) -> None:
        """Continue from the state of another such run."""
        self.state, self.done = state, to_host(state.counters)
        self.moves, self.is_warm, self.is_resumed = moves, is_warm, True

    def chunk(self, report: Report, count: int, *, slot: int = 0, thin: int = 1) -> None:
        """Take ``count`` steps of warm-up, or of ``thin`` steps a draw, and report them."""
        is_warmup = not self.is_warm
        self.state, told = advance(
            self.adaptation,
            self.target,
            self.plan.collect,
            self.state,
            self.rng_key,
            is_warmup,
            slot,
            count * thin,
            thin,
            draw=self.draw,
            layout=self.layout,
        )
        self.done, told = to_host((self.state.counters, told))
        report.advance(
            count,
            leapfrogs=int(told["leapfrogs"]),
            acceptance_rate=float(told["acceptance_rate"].mean()) / (count * thin),
            divergences=int(told["divergent"].sum()),
            step_size=float(told["step_size"]),
        )

    def without_draws(self, program: Callable, *args: Any, **keywords: Any) -> Any:
        """Move the state by a program that does not touch the draws; return what else it returns."""
        draws = self.state.draws
        moved = program(*args, tree.replace(self.state, draws=()), **keywords, layout=self.layout)
        moved, *rest = moved if isinstance(moved, tuple) else (moved,)
        self.state = tree.replace(moved, draws=draws)
        self.done = to_host(self.state.counters)
        return rest

    def chunks(
        self,
        num_steps: int,
        done: int,
        run: Callable[[int, int], None],
        stop: Stop,
        after: Callable[[], None],
        capacity: int | None = None,
    ) -> None:
        """Run steps in chunks sized to about a second, until done or asked to stop.

        Parameters
        ----------
        num_steps, done
            Steps in all, and those that were taken before.
        run
            ``run(start, count)``: take ``count`` steps from step ``start``, and wait for them.
        stop
            Looked at between chunks.
        after
            Called when a chunk has ended.
        capacity
            Chunks do not straddle multiples of it.
        """
        # Steps with another metric may take longer.
        size = self._chunk_size = max(1, self._chunk_size // MOST_GROWTH)
        while done < num_steps and not stop.is_asked:
            room = num_steps if capacity is None else capacity - done % capacity
            count = min(size, num_steps - done, room)
            began = time.perf_counter()
            run(done, count)
            done += count
            size = self._chunk_size = stop.agreed(next_size(count, time.perf_counter() - began))
            after()

    def flush(self) -> None:
        """Wait until all draws that were made are on disk, where that is where they go."""
        if self.is_warm:
            self.sampling.flush()

    def _capacity(self, *, is_limited: bool = False) -> int:
        """Return how many draws the buffers have room for."""
        size, plan = bucket(self.plan.num_samples), self.plan
        if self.sink is not None or is_limited or not spans_processes(self.layout.mesh):
            size = capacity(self.draw.tree, size, self.layout.num_parts, plan.device_bytes)
        if self.sink is not None:
            # Of two buffers, so that a sink takes no more memory than none would.
            size = min(size // 2, self.sink.buffer_rows(self.draw.tree))
        return max(1, size)

    def _end_if_changed(self, stop: Stop) -> None:
        """End the run where the next chunk would be of another model than those before."""
        what = "" if stop.is_asked else changes(self._meanings)
        if what:
            stop.end()
            warnings.warn(
                f"the target changed while the run was going on ({what}), so it ends here: draws until "
                "now are of the target that it began with. A callback may not set what a target reads",
                SamplingWarning,
                stacklevel=2,
            )

    def _draws(self, sampling: "Sampling") -> Draws:
        collected, stats, padded_rows = sampling.draws()
        draws = Draws(
            position=collected,
            stats=stats,
            warmup=self._warmup_summary(),
            kernel=self.kernel,
            state=self.state.states,
            num_steps=int(self.done.num_steps),
            padded_rows=padded_rows,
            meanings=self._meanings,
        )
        if self.sink is None:
            return draws
        return SavedDraws(**vars(draws), path=self.sink.path, attributes=self.sink.attributes)

    def _warmup_summary(self) -> dict[str, Any]:
        """Return what `Draws.warmup` holds."""
        count = int(self.done.num_warmup)
        traces = {k: np.asarray(to_host(x))[..., :count] for k, x in self.state.traces.items()}
        return traces | {
            "num_divergent": np.asarray(self.done.warmup_divergent),
            "leapfrogs": int(np.asarray(self.done.leapfrogs, np.int64).sum()),
            "moves": self.moves,
        }


class WarmUp:
    """The phase that tunes the kernel: windows of steps, each stage's with its adaptation."""

    def __init__(self, run: Run):
        self.run = run

    def go(self, report: Report, stop: Stop, after: Callable[[], None]) -> None:
        """Run all windows, or as many steps as there are before a stop."""
        run, total = self.run, self.run.plan.num_warmup
        if total and not run.is_warm:
            report.phase("warm-up", total, int(run.done.num_warmup))
            with marked("warm-up"):
                number = 0
                for i, stage in enumerate(run.stages):
                    following = run.stages[i + 1].adaptation if i + 1 < len(run.stages) else None
                    self._run_stage(stage, following, number, report, stop, after)
                    number += len(stage.windows)
        run.is_warm = True

    def _run_stage(self, stage, following, number, report, stop, after) -> None:
        """Run the windows of a stage, of which the first has a number, and end the stage."""
        run, windows = self.run, stage.windows
        if run.done.num_windows > number + len(windows) or (stop.is_asked and number):
            return
        for i, window in enumerate(windows):
            if run.done.num_windows > number + i + 1 or stop.is_asked:
                continue
            if run.done.num_windows == number + i:
                self._begin_window(stage, i)
            self._run_window(window, report, stop, after)
            # Draws never begin as copies of another chain's, and R-hat sees who is stuck.
            if run.done.num_warmup < run.plan.num_warmup and not stop.is_asked:
                self._help_stuck_chains(stage.adaptation)
        self._end_stage(stage, following, stop)

    def _begin_window(self, stage: Stage, i: int) -> None:
        before = NONE if i == 0 else LEARNED if stage.windows[i - 1].learns_metric else HELD
        with marked("adaptation"):
            run = self.run
            run.without_draws(
                lambda state, layout: turn(
                    stage.adaptation, run.target, state, run.rng_key, before, layout=layout
                )
            )

    def _run_window(self, window, report, stop, after) -> None:
        run = self.run
        done = int(run.done.num_warmup) - window.start

        def chunk(_: int, count: int) -> None:
            run.chunk(report, count)

        run.chunks(window.end - window.start, done, chunk, stop, after)

    def _end_stage(self, stage: Stage, following: Adaptation | None, stop: Stop) -> None:
        is_whole = bool(stage.windows) and not stop.is_asked
        learns = stage.windows[-1].learns_metric if is_whole else None
        run = self.run
        with marked("adaptation"):
            run.without_draws(
                lambda state, layout: finish(
                    stage.adaptation,
                    None if stop.is_asked else following,
                    run.target,
                    state,
                    learns_metric=learns,
                    layout=layout,
                )
            )

    def _help_stuck_chains(self, adaptation: Adaptation) -> None:
        run = self.run
        if run.state.kernel.is_per_chain:
            return
        count = int(run.done.num_warmup)
        seen = to_host(run.state.traces["acceptance_rate"])[:, :count]
        before = to_host(run.state.states.log_density)
        is_stuck = are_stuck_below(seen, before)
        if not is_stuck.any():
            return
        (moves,) = run.without_draws(
            lambda state, layout: help_stuck_chains(
                adaptation, run.target, state, run.rng_key, jnp.asarray(is_stuck), layout=layout
            )
        )
        moves, after = to_host((moves, run.state.states.log_density))
        step = int(run.done.num_steps)
        run.moves += [
            Move(int(c), step, float(before[c]), float(after[c])) for c in np.flatnonzero(moves)
        ]


class Sampling:
    """The phase that draws; draws leave the buffers for the sink, or the host."""

    def __init__(self, run: Run):
        self.run = run
        self.host: HostDraws | None = None
        self._spare: PyTree = ()
        self._num_written = 0

    def go(self, report: Report, stop: Stop, after: Callable[[], None]) -> None:
        """Draw until there are enough, or a stop."""
        run, total = self.run, self.run.plan.num_samples
        done = self._num_written = int(run.done.num_draws)
        if run.sink is not None:
            self._spare = empty_buffers(run.draw, run.capacity)
            attributes = run.plan.attributes | {"moves": json.dumps(run.moves)}
            run.sink.begin(
                run.state.draws, total, attributes, first_draw=done, is_resumed=run.is_resumed
            )
        elif run.capacity < total:
            self.host = HostDraws(run.state.draws, total)
        if total:
            report.phase("sampling", total, done)
        with marked("sampling"):
            run.chunks(
                total,
                done,
                lambda start, count: self._chunk(report, start, count),
                stop,
                after,
                run.capacity,
            )

    def flush(self) -> None:
        """Wait until all draws that were made are on disk."""
        if self.run.sink is not None:
            self._write()
            self.run.sink.flush()

    def draws(self) -> tuple[PyTree, dict[str, Any], dict[str, int]]:
        """Return what was collected and the stats, leaves [chains, draws, ...].

        And the number of real rows of each leaf, by its name, that has pad: on several processes, where
        rows cannot be cut off, the pad copies the last real row.
        """
        if self.run.sink is not None:
            self.flush()
            return *self.run.sink.saved(), {}
        collected, stats = self._filled()
        if not spans_processes(self.run.layout.mesh):
            return unwrap(collected, axis=2), stats, {}
        return fill_pad(collected, axis=2), to_host(stats), _padded_rows(collected)

    def _filled(self) -> PyTree:
        run = self.run
        count = int(run.done.num_draws)
        if self.host is not None:
            self._to_host(count % run.capacity)
            return self.host.draws(count)
        return run.state.draws if count == run.capacity else _first(run.state.draws, count)

    def _chunk(self, report: Report, start: int, count: int) -> None:
        run = self.run
        slot = start % run.capacity
        run.chunk(report, count, slot=slot, thin=run.plan.thin)
        is_full = slot + count == run.capacity
        if self.host is not None and is_full:
            self._to_host(run.capacity)
        if run.sink is not None and (run.sink.is_due() or is_full):
            self._write()

    def _to_host(self, count: int) -> None:
        """Copy the first ``count`` draws of the buffers, the latest there are, to the host."""
        if self.host is not None and count:
            self.host.fill(self.run.state.draws, int(self.run.done.num_draws) - count, count)

    def _write(self) -> None:
        """Give the sink what it has not had yet, and go on in the other buffer, at the same slot."""
        run, num_draws = self.run, int(self.run.done.num_draws)
        count = num_draws - self._num_written
        if count and run.sink is not None:
            run.sink.write(run.state.draws, count, self._num_written % run.capacity)
            self._num_written, full = num_draws, run.state.draws
            run.state, self._spare = tree.replace(run.state, draws=self._spare), full


def next_size(count: int, seconds: float) -> int:
    """Size the next chunk by what the last one took; a long one grows by `MOST_GROWTH` at most."""
    in_a_second = count / max(seconds, 1e-9)
    most = max(MOST_GROWTH * count, int(SHORT_SECONDS * in_a_second))
    return max(1, min(int(CHUNK_SECONDS * in_a_second), most))


def bucket(count: int) -> int:
    """Round a count up to three binary digits, so that few counts need a program of their own."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step


@partial(jax.jit, static_argnames="count")
def _first(buffers: PyTree, count: int) -> PyTree:
    """Return the first draws; as one program, and by a slice, which is faster than an index."""
    return jax.tree.map(lambda b: jax.lax.slice_in_dim(b, 0, count, axis=1), buffers)


def _padded_rows(collected: PyTree) -> dict[str, int]:
    """Return the number of real rows of the leaves that have pad."""
    rows = jax.tree.map(
        lambda x: x.rows if is_row_values(x) else None, collected, is_leaf=is_row_values
    )
    named = named_leaves(rows, is_leaf=lambda x: x is None)
    return {name: r.num_rows for name, r in named.items() if r and r.num_rows < r.num_padded}
