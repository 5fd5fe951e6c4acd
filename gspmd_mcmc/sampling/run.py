"""A run: warm-up, then sampling, in chunks of steps of about a second."""

import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation, Stage, Untuned
from gspmd_mcmc.adaptation.stuck_chains import Move, are_stuck_below
from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.agreement import least
from gspmd_mcmc.multihost.processes import spans_processes, to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.sampling.reporting import Report, marked
from gspmd_mcmc.sampling.run_state import (
    HELD,
    LEARNED,
    NONE,
    Counters,
    DrawSpec,
    Fixed,
    RunState,
    advance,
    advance_in_graphs,
    begin_window,
    empty_buffers,
    end_stage,
    help_stuck_chains,
    set_up,
)
from gspmd_mcmc.storage.draws import Draws
from gspmd_mcmc.storage.saved_draws import SavedDraws
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.targets.function import changes, meanings
from gspmd_mcmc.targets.local import RowValues, fill_pad, is_row_values, unwrap
from gspmd_mcmc.tree import PyTree

CHUNK_SECONDS = 1.0
# A chunk may always grow until it is expected to take this long, and beyond that by `MOST_GROWTH`: if
# its steps turn out a hundred times as slow, it still ends soon.
SHORT_SECONDS = 0.05
MOST_GROWTH = 8
# The share of a device's memory that draws take unless told otherwise.
DEVICE_SHARE = 0.25
LAUNCHED = ("gpu",)  # platforms whose host starts each kernel
ROUND = (10, 12, 15, 18, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100)


class Stop:
    """Whether the user has asked the run to stop, or the system has told it to end.

    While it is entered, a first Ctrl-C asks to stop between chunks, a second one raises. SIGTERM tells
    a run with checkpoints (``is_kept``) to end. Processes of one run agree on it between chunks. A
    signal stays with a handler that is not Python's: that of R, Julia or another host of Python.
    """

    def __init__(self, is_multiprocess: bool, *, is_kept: bool):
        self.is_multiprocess = is_multiprocess
        self._wanted = {"stop": False, "end": False}
        self._agreed = dict(self._wanted) if is_multiprocess else self._wanted
        handlers = {signal.SIGINT: self._interrupt} | ({signal.SIGTERM: self._end} if is_kept else {})
        # Python delivers no signals elsewhere, and could not restore a handler that it cannot read.
        is_main = threading.current_thread() is threading.main_thread()
        is_ours = {n: is_main and signal.getsignal(n) is not None for n in handlers}
        self._handlers: dict[int, Any] = {n: x for n, x in handlers.items() if is_ours[n]}

    def __enter__(self) -> "Stop":
        self._previous = {n: signal.signal(n, handler) for n, handler in self._handlers.items()}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._previous.items():
            # A callback may have set another one, which stays.
            if signal.getsignal(number) == self._handlers[number]:
                signal.signal(number, handler)

    @property
    def is_wanted(self) -> bool:
        """Whether this process has asked to stop."""
        return self._wanted["stop"]

    @property
    def is_asked(self) -> bool:
        """Whether to stop before the next chunk."""
        return self._agreed["stop"]

    @property
    def is_preempted(self) -> bool:
        """Whether to save the run before the next chunk, and end."""
        return self._agreed["end"]

    def agreed(self, size: int) -> int:
        """Return the size of the next chunk; processes agree on the least, and on whether to stop."""
        if self.is_multiprocess:
            size, *continues = least(size, *(not wanted for wanted in self._wanted.values()))
            self._agreed = {name: not x for name, x in zip(self._wanted, continues, strict=True)}
        return size

    def ask(self) -> None:
        """Ask to stop, as Ctrl-C does."""
        self._wanted["stop"] = True

    def _interrupt(self, signum, frame) -> None:
        self.ask()
        self._handlers[signal.SIGINT] = signal.default_int_handler
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _end(self, signum, frame) -> None:
        self._wanted["end"] = True


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run is to do, and keep of it; see `sample`."""

    rng_key: jax.Array
    adaptation: Adaptation
    collect: Partial
    device_bytes: int | None
    num_chains: int
    num_warmup: int
    num_samples: int
    thin: int

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of chains, of steps of warm-up and of draws, and steps from draw to draw."""
        names = ("num_chains", "num_warmup", "num_samples", "thin")
        return {name: getattr(self, name) for name in names}


class Run:
    """Warm-up and sampling of all chains: a `RunState`, and the phases that move it."""

    def __init__(
        self,
        plan: Plan,
        kernel: Kernel,
        states: Any,
        layout: Layout,
        earlier: Draws | None,
        sink: Sink | None,
        attributes: dict[str, Any],
    ):
        self.plan, self.layout = plan, layout
        self.sink, self.attributes = sink, attributes  # which the sink records
        self._error: BaseException | None = None  # of the callback, raised when draws are safe
        self.fixed = Fixed(kernel.target, plan.rng_key, layout)
        self.moves: list[Move] = list(earlier.moves) if earlier else []
        warmup = plan.adaptation if plan.num_warmup else Untuned()
        self.stages = warmup.stages(plan.num_warmup)
        self.is_warm = False
        self.draw = DrawSpec.of(kernel, states, plan.collect, layout, plan.thin)
        collected = self.draw.one_draw[0]
        if not jax.tree.leaves(collected):
            raise TypeError(f"collect: expected arrays to keep, got {collected}; does it return them?")
        if sink is not None:
            sink.check(collected)
            sink.groups = self.groups
        self.capacity, self._chunk_size = self._capacity(), 1
        first, first_step = self.stages[0].adaptation, earlier.num_steps if earlier else 0
        size = bucket(plan.num_warmup)
        self.state = set_up(warmup, first, self.fixed, kernel, states, first_step, size=size)
        self.done: Counters = to_host(self.state.counters)  # the state's, on the host

    def go(self, report: Report, stop: Stop, after: Callable[[], None]) -> Draws:
        """Run to the end or a stop, and return the draws made; ``after`` is called after each chunk."""
        self.report, self.stop, self.after = report, stop, after
        self.meanings = meanings((self.fixed.target, self.plan.collect))
        self.state = tree.replace(self.state, draws=empty_buffers(self.draw, self.capacity))
        self.sampling = Sampling(self)
        for phase in (WarmUp(self), self.sampling):
            phase.go()
        draws = self.sampling.draws()
        if self._error is not None:
            self._raise_with(draws)
        return draws

    def chunks(
        self, num_steps: int, done: int, capacity: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Cut steps into chunks of about a second, none of which straddles multiples of a capacity.

        Yields the first step and the number of steps, until all are taken or a stop is asked for.
        """
        # Steps with another metric may take longer.
        size = self._chunk_size = max(1, self._chunk_size // MOST_GROWTH)
        while done < num_steps and not self.stop.is_asked:
            room = num_steps if capacity is None else capacity - done % capacity
            count = min(size, num_steps - done, room)
            began = time.perf_counter()
            yield done, count
            done += count
            seconds = time.perf_counter() - began
            size = self._chunk_size = self.stop.agreed(next_size(count, seconds))
            self.after()
            self._end_if_changed()

    def chunk(self, count: int, *, slot: int = 0, thin: int = 1) -> None:
        """Take ``count`` steps of warm-up, or of ``thin`` steps a draw, and report them."""
        is_warmup, steps = not self.is_warm, count * thin
        self.state, told = self._advance(
            self.state, self.adaptation, self.fixed, self.draw, is_warmup, slot, steps, thin
        )
        self.done, told = to_host((self.state.counters, told))
        numbers = {
            "leapfrogs": int(told["leapfrogs"]),
            "acceptance_rate": float(told["acceptance_rate"].mean()) / (count * thin),
            "num_divergent": int(told["divergent"].sum()),
            "step_size": float(told["step_size"]),
        }
        try:
            self.report.advance(count, **numbers)
        except KeyboardInterrupt:
            if self.stop.is_wanted:  # the second Ctrl-C
                raise
            self.stop.ask()
        except Exception:
            raise
        except BaseException as error:  # such as SystemExit
            self._error = error
        if self.report.is_stopped or self._error is not None:
            self.stop.ask()

    @property
    def _advance(self) -> Any:
        return advance_in_graphs() if self.fixed.target.platform in LAUNCHED else advance

    @property
    def groups(self) -> dict[str, GroupLabels]:
        """What `Draws.groups` holds: of leaves that are kept as they are local to groups."""
        labels = [plate.labels for plate in self.fixed.target.plates]
        by_digest = {x.digest: x for x in labels if x is not None}
        found = {
            n: (by_digest.get(x.rows.order), x) for n, x in _with_rows(self.draw.one_draw[0]).items()
        }
        return {n: replace(groups, axis=x.axis) for n, (groups, x) in found.items() if groups}

    @property
    def kernel(self) -> Kernel:
        """The kernel of the next step."""
        return self.fixed.kernel(self.state)

    @property
    def adaptation(self) -> Adaptation:
        """The adaptation of the stage that the run is in; after warm-up of the last one."""
        return self.stages[self.stage_of(int(self.done.num_windows), self.is_warm)].adaptation

    def stage_of(self, num_windows: int, is_warm: bool) -> int:
        """Return the number of the stage that a run is in, from the windows that have begun."""
        ends = np.cumsum([len(stage.windows) for stage in self.stages])
        number = np.searchsorted(ends, max(num_windows - 1, 0), side="right")
        return len(self.stages) - 1 if is_warm else min(int(number), len(self.stages) - 1)

    def continue_from(self, state: RunState, moves: list[Move], *, is_warm: bool) -> None:
        """Continue from the state of another such run."""
        self.state, self.done = state, to_host(state.counters)
        self.moves, self.is_warm = moves, is_warm

    def flush(self) -> None:
        """Wait until all draws that were made are on disk, where that is where they go."""
        if self.is_warm:
            self.sampling.flush()

    def warmup_summary(self) -> dict[str, Any]:
        """Return what `Draws.warmup` holds."""
        count = int(self.done.num_warmup)
        by_name = self.state.traces["chains"] | self.state.traces["kernel"]
        traces = {name: np.asarray(to_host(x))[..., :count] for name, x in by_name.items()}
        return traces | {
            "num_divergent": np.asarray(self.done.warmup_divergent),
            "leapfrogs": int(np.asarray(self.done.leapfrogs, np.int64).sum()),
            "moves": self.moves,
        }

    def require_room(self) -> None:
        """Raise, on every process, unless the devices hold all draws: no host could take them over."""
        num_samples = self.plan.num_samples
        room, *_ = least(self._capacity(is_limited=True))
        if room < bucket(num_samples):
            raise ValueError(
                f"num_samples={num_samples}: draws of several processes stay on their devices, which "
                f"have room for {room}. Raise thin, collect less, or raise device_bytes"
            )

    def _capacity(self, *, is_limited: bool = False) -> int:
        """Return how many draws the buffers have room for."""
        size, plan, shapes = bucket(self.plan.num_samples), self.plan, self.draw.one_draw
        if self.sink is not None or is_limited or not spans_processes(self.layout.mesh):
            size = capacity(shapes, size, self.layout.num_parts, plan.device_bytes)
        if self.sink is not None:
            # Of two buffers, so that a sink takes no more memory than none would.
            size = min(size // 2, self.sink.buffer_rows(shapes))
        return max(1, size)

    def _raise_with(self, draws: Draws) -> NoReturn:
        """Raise the error of the callback that ended the run, with the draws."""
        assert self._error is not None
        where = "the attribute `draws` of this exception"
        if isinstance(draws, SavedDraws):
            where = f"{draws.path}; gspmd_mcmc.open_draws reads them"
        self._error.draws = draws  # pyright: ignore[reportAttributeAccessIssue]
        self._error.add_note(
            f"callback: it raised {type(self._error).__name__}, which ended the run after "
            f"{draws.num_draws} of {self.plan.num_samples} draws. They are in {where}"
        )
        raise self._error

    def _end_if_changed(self) -> None:
        """End the run where the next chunk would be of another model than those before."""
        what = "" if self.stop.is_asked else changes(self.meanings)
        if what:
            self.stop.ask()
            warnings.warn(
                f"the target changed during the run ({what}), so the run ends here: its draws are of "
                "the target that it began with. A callback may not set what a target reads",
                SamplingWarning,
                stacklevel=2,
            )


class WarmUp:
    """The phase that tunes the kernel: windows of steps, each tuned by the adaptation of its stage."""

    def __init__(self, run: Run):
        self.run = run

    def go(self) -> None:
        """Run all windows, or as many steps as there are before a stop."""
        run, total, number = self.run, self.run.plan.num_warmup, 0
        if total and not run.is_warm:
            run.report.phase("warm-up", total, int(run.done.num_warmup))
            with marked("warm-up"):
                for stage, following in zip(run.stages, [*run.stages[1:], None], strict=True):
                    self._tune(stage, number, following)
                    number += len(stage.windows)
                    if run.stop.is_asked:
                        break
        run.is_warm = True

    def _tune(self, stage: Stage, number: int, following: Stage | None) -> None:
        """Take the steps of a stage, whose first window has this number, and end it."""
        run, adaptation, before = self.run, stage.adaptation, NONE
        if run.done.num_windows > number + len(stage.windows):
            return
        for i, window in enumerate(stage.windows, number):
            if not run.stop.is_asked and run.done.num_windows == i:
                self._move(begin_window, adaptation, run.fixed, before)
            if not run.stop.is_asked and run.done.num_windows == i + 1:
                done = int(run.done.num_warmup) - window.start
                for _, count in run.chunks(window.end - window.start, done):
                    run.chunk(count)
                self._help_stuck_chains(adaptation)
            before = LEARNED if window.learns_metric else HELD
        # A window that a stop cut short has learned nothing.
        is_asked = run.stop.is_asked
        learns = None if is_asked or not stage.windows else stage.windows[-1].learns_metric
        after = None if is_asked or following is None else following.adaptation
        self._move(end_stage, adaptation, run.fixed, following=after, learns_metric=learns)

    def _help_stuck_chains(self, adaptation: Adaptation) -> None:
        """Help stuck chains between windows: never as draws begin, so that R-hat sees who is stuck."""
        run, count = self.run, int(self.run.done.num_warmup)
        if run.state.kernel.is_per_chain or count == run.plan.num_warmup or run.stop.is_asked:
            return
        rates = to_host(run.state.traces["chains"]["acceptance_rate"])[:, :count]
        before = to_host(run.state.states.log_density)
        is_stuck = are_stuck_below(rates, before)
        if is_stuck.any():
            moves = self._move(help_stuck_chains, adaptation, run.fixed, jnp.asarray(is_stuck))
            moves, after = to_host((moves, run.state.states.log_density))
            step = int(run.done.num_steps)
            run.moves += [
                Move(int(c), step, float(before[c]), float(after[c])) for c in np.flatnonzero(moves)
            ]

    def _move(self, program: Callable, *args: Any, **options: Any) -> Any:
        """Move the state by a program, which serves every number of draws: it is given none."""
        run, draws = self.run, self.run.state.draws
        with marked("adaptation"):
            moved, other = program(tree.replace(run.state, draws=()), *args, **options)
        run.state = tree.replace(moved, draws=draws)
        run.done = to_host(run.state.counters)
        return other


class Sampling:
    """The phase that draws; draws leave the buffers for the sink, or the host."""

    def __init__(self, run: Run):
        self.run = run
        self.host: HostDraws | None = None
        self._spare: PyTree = ()
        self._num_written = 0

    def go(self) -> None:
        """Draw until there are enough, or a stop."""
        run, total = self.run, self.run.plan.num_samples
        done = self._num_written = int(run.done.num_draws)
        if run.sink is not None:
            self._spare = empty_buffers(run.draw, run.capacity)
            attributes = run.attributes | {"moves": json.dumps(run.moves)}
            run.sink.begin(run.state.draws, total, attributes, first_draw=done)
        elif run.capacity < total:
            self.host = HostDraws(run.state.draws, total)
        if total:
            run.report.phase("sampling", total, done)
        with marked("sampling"):
            for start, count in run.chunks(total, done, run.capacity):
                run.chunk(count, slot=start % run.capacity, thin=run.plan.thin)
                is_full = (start + count) % run.capacity == 0
                if self.host is not None and is_full:
                    self.host.fill(run.state.draws, start + count - run.capacity, run.capacity)
                if run.sink is not None and (run.sink.is_due() or is_full):
                    self._write()

    def flush(self) -> None:
        """Wait until all draws that were made are on disk."""
        if self.run.sink is not None:
            self._write()
            self.run.sink.flush()

    def draws(self) -> Draws:
        """Return the draws that were made, and what is needed to continue from them."""
        run, padded_rows, kind = self.run, {}, Draws
        if run.sink is not None:
            self.flush()
            collected, stats = run.sink.saved()
            kind = partial(SavedDraws, path=run.sink.path, attributes=run.sink.attributes)
        elif spans_processes(run.layout.mesh):
            # Rows that lie over processes cannot be cut off: the pad copies the last real row.
            collected, stats = self._in_memory()
            padded_rows = _padded_rows(collected)
            collected, stats = fill_pad(collected, axis=2), to_host(stats)
        else:
            collected, stats = self._in_memory()
            collected = unwrap(collected, axis=2)
        return kind(
            position=collected,
            stats=stats,
            warmup=run.warmup_summary(),
            kernel=run.kernel,
            state=run.state.states,
            num_steps=int(run.done.num_steps),
            thin=run.plan.thin,
            padded_rows=padded_rows,
            groups=run.groups,
            meanings=run.meanings,
        )

    def _in_memory(self) -> PyTree:
        """Return what was collected and the stats, from the buffers or the host."""
        run, count = self.run, int(self.run.done.num_draws)
        if self.host is not None:
            rest = count % run.capacity
            self.host.fill(run.state.draws, count - rest, rest)
            return self.host.draws(count)
        return run.state.draws if count == run.capacity else first_draws(run.state.draws, count)

    def _write(self) -> None:
        """Give the sink what it has not had yet, and use the other buffer next, at the same slot."""
        run, num_draws = self.run, int(self.run.done.num_draws)
        count = num_draws - self._num_written
        if count and run.sink is not None:
            run.sink.write(run.state.draws, count, self._num_written % run.capacity)
            self._num_written, full = num_draws, run.state.draws
            run.state, self._spare = tree.replace(run.state, draws=self._spare), full


class HostDraws:
    """Draws on the host, filled from buffers shard by shard."""

    def __init__(self, buffers: PyTree, num_samples: int):
        self._arrays = jax.tree.map(
            lambda b: np.zeros((b.shape[0], num_samples, *b.shape[2:]), b.dtype), buffers
        )

    def fill(self, buffers: PyTree, start: int, count: int) -> None:
        """Copy the first ``count`` draws of the buffers to draws ``start`` and on."""
        draws = slice(start, start + count)
        for host, buffer in zip(*map(jax.tree.leaves, (self._arrays, buffers)), strict=True):
            for shard in buffer.addressable_shards if count else ():
                if shard.replica_id == 0:
                    chains, _, *rest = shard.index
                    host[(chains, draws, *rest)] = np.asarray(shard.data)[:, :count]

    def draws(self, count: int) -> PyTree:
        """Return the first ``count`` draws."""
        return jax.tree.map(lambda a: a[:, :count], self._arrays)


def capacity(shapes: PyTree, num_samples: int, num_parts: int, device_bytes: int | None) -> int:
    """Return how many of ``num_samples`` draws [chains, ...] a buffer on the devices holds.

    Without ``device_bytes`` that is a quarter of a device's memory, with no bound on a CPU.
    """
    if device_bytes is None:
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        device_bytes = int(DEVICE_SHARE * limit) if limit else None
    if device_bytes is None:
        return num_samples
    draw = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes)) / num_parts
    return min(num_samples, max(1, int(device_bytes // max(draw, 1))))


def next_size(count: int, seconds: float) -> int:
    """Size the next chunk by what the last one took; a long one grows by `MOST_GROWTH` at most."""
    in_a_second = count / max(seconds, 1e-9)
    most = max(MOST_GROWTH * count, int(SHORT_SECONDS * in_a_second))
    return max(1, min(int(CHUNK_SECONDS * in_a_second), most))


def bucket(count: int) -> int:
    """Round a count up to a round number, as users ask for: few counts then need their own programs."""
    if count <= ROUND[0]:
        return count
    scale = 10 ** (len(str(count)) - 2)
    return next(number * scale for number in ROUND if number * scale >= count)


@partial(jax.jit, static_argnames="count")
def first_draws(buffers: PyTree, count: int) -> PyTree:
    """Return the first draws; as one program, and by a slice, which is faster than an index."""
    return jax.tree.map(lambda b: jax.lax.slice_in_dim(b, 0, count, axis=1), buffers)


def _padded_rows(collected: PyTree) -> dict[str, tuple[int, int]]:
    """Return the axis of the rows and the number of real ones, of the leaves that have pad, by name."""
    found = _with_rows(collected)
    padded = {name: x for name, x in found.items() if x.rows.num_rows < x.rows.num_padded}
    return {name: (2 + x.axis, x.rows.num_rows) for name, x in padded.items()}


def _with_rows(collected: PyTree) -> dict[str, RowValues]:
    """Return the leaves that have rows, by name."""
    named = named_leaves(collected, is_leaf=is_row_values)
    return {name: x for name, x in named.items() if is_row_values(x)}
