"""Warm-up on the devices: windows of steps, driven as an `Adaptation` says."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import own_step_size, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Adaptation, Transition, Window
from gspmd_mcmc.adaptation.per_chain import is_per_chain
from gspmd_mcmc.adaptation.stuck_chains import Move, are_stuck_below
from gspmd_mcmc.placement.processes import to_host
from gspmd_mcmc.sampling.chunks import (
    MOST_GROWTH,
    advance,
    bucket,
    draw_kernel,
    no_tally,
    run_chunks,
    step_chains,
    tally,
)
from gspmd_mcmc.sampling.layout import Layout, Pins
from gspmd_mcmc.sampling.observing import marked
from gspmd_mcmc.sampling.progress import Report, Stop
from gspmd_mcmc.tree import PyTree

# Folded into a step's key, set what happens at a window's ends apart from the step's own two keys.
BEGIN, HELP = 2, 3


class Warmup:
    """The running warm-up of all chains.

    Between two chunks all there is to keep is data: the kernel and the states, the adaptation's state,
    the traces, and counts. `put_back` goes on from there.

    Parameters
    ----------
    adaptation
        What is adapted, and towards what.
    kernel, states
        The kernel to tune, and the chains' states, whose buffers are taken over.
    rng_key, first_step
        Step i draws from ``fold_in(rng_key, i)``; the first is ``first_step``.
    layout
        The layout of the chains.
    moves
        Of chains in an earlier run that this one goes on from.
    """

    def __init__(
        self,
        adaptation: Adaptation,
        kernel: Any,
        states: Any,
        rng_key: jax.Array,
        first_step: int,
        layout: Layout,
        moves: Sequence[Move] = (),
    ):
        self.adaptation, self.rng_key, self.layout = adaptation, rng_key, layout
        self.kernel, self.states = kernel, states
        self.state: Any = None
        self.traces: dict[str, jax.Array] | None = None
        self.first_step = self.num_steps = first_step
        self.num_begun = 0  # windows
        self._chunk_size = 1
        num_chains = states.log_density.shape[0]
        self.num_divergent = np.zeros(num_chains, int)
        self.leapfrogs = 0
        self.moves = list(moves)

    def run(self, num_warmup: int, report: Report, stop: Stop, after: Callable[[], None]) -> None:
        """Run all windows, or as many steps as there are before a stop; call ``after`` each chunk."""
        if self.traces is None:
            self._set_up(num_warmup)
        if not num_warmup:
            return
        report.phase("warm-up", num_warmup, self.num_done)
        with marked("warm-up"):
            for number, window in enumerate(self.adaptation.windows(num_warmup)):
                if number >= self.num_begun - 1 and not stop.is_asked:
                    self._run_window(number, window, report, stop, after)
                    # Draws never begin as copies of another chain's, and R-hat sees who is stuck.
                    if self.num_done < num_warmup and not stop.is_asked:
                        self._help_stuck_chains()
                    if not stop.is_asked:
                        self._end_window(window)
        self.kernel = self.adaptation.final(self.kernel, self.state)

    @property
    def num_done(self) -> int:
        """Steps of warm-up that were taken."""
        return self.num_steps - self.first_step

    def counts(self) -> dict[str, Any]:
        """Return the numbers that say where warm-up is, for `put_back`."""
        names = ("first_step", "num_steps", "num_begun", "leapfrogs")
        return {name: getattr(self, name) for name in names} | {
            "num_divergent": self.num_divergent.tolist(),
            "moves": [list(move) for move in self.moves],
        }

    def put_back(self, state: Any, traces: dict[str, jax.Array] | None, counts: dict[str, Any]) -> None:
        """Go on from the adaptation's state, the traces and the `counts` of another such run."""
        self.state, self.traces = state, traces
        for name, value in counts.items():
            setattr(self, name, value)
        self.num_divergent = np.asarray(self.num_divergent, int)
        self.moves = [Move(*move) for move in self.moves]

    def summary(self) -> dict[str, Any]:
        """Return what `Draws.warmup` holds."""
        traces = {
            name: np.asarray(to_host(x))[..., : self.num_done]
            for name, x in (self.traces or {}).items()
        }
        counts = {"num_divergent": self.num_divergent, "leapfrogs": self.leapfrogs}
        return traces | counts | {"moves": self.moves}

    def _set_up(self, num_warmup: int) -> None:
        if num_warmup:
            settings = _prepare(self.adaptation, self.kernel, self.states, layout=self.layout)
            self.kernel = tree.replace(self.kernel, **settings)
        traced = {name: getattr(self.kernel, name) for name in self.adaptation.traced}
        self.traces = _no_traces(traced, self.states, bucket(num_warmup), layout=self.layout)
        if num_warmup:
            self.state = _init(self.adaptation, self.kernel, self.states, layout=self.layout)

    def _run_window(
        self, number: int, window: Window, report: Report, stop: Stop, after: Callable[[], None]
    ) -> None:
        if number >= self.num_begun:
            with marked("adaptation"):
                self._begin_window(window)
        self._pins = Pins.of((self.states, self.state, self.traces))
        done, length = self.num_done - window.start, window.end - window.start
        self._chunk_size = run_chunks(
            length,
            lambda _, n: self._run_chunk(n, report),
            stop,
            after=after,
            done=done,
            # Steps with another metric may take longer.
            size=max(1, self._chunk_size // MOST_GROWTH),
        )

    def _begin_window(self, window: Window) -> None:
        is_first = jnp.asarray(window.start == 0)
        self.state = _begin(
            self.adaptation,
            self.kernel,
            self.states,
            self.state,
            is_first,
            self._key(BEGIN),
            layout=self.layout,
        )
        self.num_begun += 1

    def _end_window(self, window: Window) -> None:
        with marked("adaptation"):
            self.state = _end(
                self.adaptation,
                self.kernel,
                self.states,
                self.state,
                learns_metric=window.learns_metric,
                layout=self.layout,
            )

    def _help_stuck_chains(self) -> None:
        if is_per_chain(self.kernel):
            return
        seen = to_host((self.traces or {})["acceptance_rate"])[:, : self.num_done]
        before = to_host(self.states.log_density)
        is_stuck = are_stuck_below(seen, before)
        if not is_stuck.any():
            return
        self.states, moves, leapfrogs = _help(
            self.adaptation,
            self.kernel,
            self.states,
            self.state,
            self._key(HELP),
            is_stuck,
            layout=self.layout,
            pins=Pins.of(self.states),
        )
        moves, after, leapfrogs = to_host((moves, self.states.log_density, leapfrogs))
        self.leapfrogs += int(leapfrogs)
        self.moves += [
            Move(int(c), self.num_steps, float(before[c]), float(after[c]))
            for c in np.flatnonzero(moves)
        ]

    def _key(self, event: int) -> jax.Array:
        return _folded(self.rng_key, self.num_steps, event)

    def _run_chunk(self, count: int, report: Report) -> None:
        (self.states, self.state, self.traces), counts, step_size = _chunk(
            self.adaptation,
            self.kernel,
            (self.states, self.state, self.traces),
            self.rng_key,
            self.num_steps,
            self.num_done,
            count,
            layout=self.layout,
            pins=self._pins,
        )
        counts = to_host(counts)
        self.num_steps += count
        self.num_divergent += counts["num_divergent"]
        self.leapfrogs += int(counts["leapfrogs"])
        report.advance(
            count,
            leapfrogs=int(counts["leapfrogs"]),
            acceptance_rate=float(counts["acceptance_rate"].mean()) / count,
            divergences=int(self.num_divergent.sum()),
            step_size=float(step_size),
        )


@partial(jax.jit, static_argnames=("layout", "pins"), donate_argnames="carry")
def _chunk(adaptation, kernel, carry, rng_key, first_step, slot, count, *, layout, pins):
    def body(i, carry):
        (states, state, traces), counts = carry
        tuned = adaptation.tuned(kernel, state)
        states, state, info = _step(adaptation, tuned, rng_key, first_step + i, states, state, layout)
        seen = {name: getattr(tuned, name) for name in adaptation.traced}
        seen |= {"acceptance_rate": info.acceptance_rate, "log_density": states.log_density}
        traces = {name: _write(traces[name], x, slot + i) for name, x in seen.items()}
        return (states, state, traces), tally(counts, info)

    with jax.named_scope("steps"):
        carry, counts = jax.lax.fori_loop(0, count, body, (carry, no_tally(carry[0])))
    return pins(carry), counts, jnp.mean(adaptation.tuned(kernel, carry[1]).step_size)


def _write(trace: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(trace, value, slot, axis=trace.ndim - 1)


@jax.jit
def _folded(rng_key: jax.Array, step: int, event: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(rng_key, step), event)


def _step(adaptation, tuned, rng_key, step, states, state, layout):
    """Take a step of all chains, and have the adaptation look at it."""
    drawn, chains_key = draw_kernel(tuned, rng_key, step)
    method = "transition" if adaptation.needs_end else "step"
    after, info, *end = step_chains(drawn, chains_key, states, layout, method)
    transition = Transition(states, after, info, end[0] if end else None)
    return after, adaptation.update(state, drawn, transition), info


@partial(jax.jit, static_argnames=("size", "layout"))
def _no_traces(traced, states, size: int, *, layout: Layout) -> dict[str, jax.Array]:
    per_chain = layout.pin_chains(
        jnp.zeros((*states.log_density.shape, size), states.log_density.dtype)
    )
    empty = jax.tree.map(lambda x: jnp.zeros((*x.shape, size), x.dtype), traced)
    return empty | {"acceptance_rate": per_chain, "log_density": per_chain}


@partial(jax.jit, static_argnames="layout")
def _prepare(adaptation, kernel, states, *, layout: Layout) -> dict[str, Any]:
    kernel = adaptation.prepare(kernel, states)
    metric = _pinned(layout, kernel, kernel.inverse_mass_matrix, states)
    return {"step_size": kernel.step_size, "inverse_mass_matrix": metric}


@partial(jax.jit, static_argnames="layout")
def _init(adaptation, kernel, states, *, layout: Layout):
    return _pinned(layout, kernel, adaptation.init(kernel, states), states)


@partial(jax.jit, static_argnames="layout")
def _begin(adaptation, kernel, states, state, is_first, rng_key, *, layout: Layout):
    def acceptance_rates(kernel, key):
        return advance(kernel, key, jnp.zeros((), jnp.int32), states, layout)[1].acceptance_rate

    state = adaptation.begin(state, kernel, states, is_first, rng_key, acceptance_rates)
    return _pinned(layout, kernel, state, states)


@partial(jax.jit, static_argnames=("learns_metric", "layout"), donate_argnames="state")
def _end(adaptation, kernel, states, state, *, learns_metric: bool, layout: Layout):
    state = adaptation.end(state, kernel, states, learns_metric)
    return _pinned(layout, kernel, state, states)


@partial(jax.jit, static_argnames=("layout", "pins"), donate_argnames="states")
def _help(adaptation, kernel, states, state, rng_key, is_stuck, *, layout: Layout, pins):
    def walk(rng_key, states):
        return own_step_size.walk(adaptation.tuned(kernel, state), rng_key, states, layout.vmap)

    states, moves, leapfrogs = stuck_chains.helped(rng_key, states, is_stuck, walk)
    return pins(states), moves, leapfrogs


def _pinned(layout: Layout, kernel: Any, tree: PyTree, states: Any) -> PyTree:
    """Lay out what a kernel is tuned with, or a part of it."""
    return layout.pin_like(tree, states.position, of_each_chain=is_per_chain(kernel))
