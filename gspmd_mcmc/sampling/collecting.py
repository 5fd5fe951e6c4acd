"""The sampling phase on the devices: steps, what is kept of them, and where it gathers."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc.diagnostics.rows import named_leaves
from gspmd_mcmc.placement.agreement import least
from gspmd_mcmc.placement.processes import spans_processes, to_host
from gspmd_mcmc.sampling.buffers import HostDraws, capacity
from gspmd_mcmc.sampling.chunks import advance, bucket, no_tally, run_chunks, tally
from gspmd_mcmc.sampling.layout import CHAINS, Layout, Pins
from gspmd_mcmc.sampling.observing import marked
from gspmd_mcmc.sampling.progress import Report, Stop
from gspmd_mcmc.storage.zarr_store import ZarrSink
from gspmd_mcmc.targets.local import fill_pad, is_row_values, kept, unwrap
from gspmd_mcmc.tree import PyTree

# How a stat of several thinned steps becomes that of one draw; others are the last step's.
COMBINE = {
    "acceptance_rate": lambda x: jnp.mean(x, axis=0),
    "num_integration_steps": lambda x: jnp.sum(x, axis=0),
    "is_divergent": lambda x: jnp.any(x, axis=0),
}


def keep_position(position: PyTree, info: Any) -> PyTree:
    """Collect the position itself."""
    return position


class Collecting:
    """The running sampling phase of all chains.

    Parameters
    ----------
    kernel, states
        The tuned kernel, and the chains' states, whose buffers are taken over.
    rng_key, first_step
        Step i draws from ``fold_in(rng_key, i)``; the first is ``first_step``.
    collect
        ``collect(position, info)`` of one chain.
    thin
        Steps a draw.
    layout
        The layout of the chains.
    sink, is_resumed
        Where draws are written as they are made, if anywhere; whether this run has written there.
    """

    def __init__(
        self,
        kernel: Any,
        states: Any,
        rng_key: jax.Array,
        first_step: int,
        *,
        collect: Partial,
        thin: int,
        layout: Layout,
        sink: ZarrSink | None = None,
        is_resumed: bool = False,
    ):
        self.kernel, self.states, self.rng_key, self.num_steps = kernel, states, rng_key, first_step
        self.collect, self.thin, self.layout = collect, thin, layout
        self.sink, self.is_resumed = sink, is_resumed
        self.num_draws = self.num_divergent = 0
        self.shapes: PyTree = None  # of a draw, once there are to be some

    def run(
        self,
        num_samples: int,
        device_bytes: int | None,
        report: Report,
        stop: Stop,
        after: Callable[[], None],
        attributes: dict[str, Any] | None = None,
    ) -> None:
        """Draw in chunks, and call ``after`` each; draws leave the buffers for the sink, or the host.

        ``attributes`` are what the sink's store says of the run.
        """
        shapes = self.shapes = shapes_of_draw(
            self.kernel, self.states, self.collect, self.rng_key, self.thin, self.layout
        )
        self.capacity = bucket(num_samples)
        if self.sink is not None or not spans_processes(self.layout.mesh):
            self.capacity = capacity(shapes, self.capacity, self.num_shards, device_bytes)
        if self.sink is not None:
            # Of two buffers, so that a sink takes no more memory than none would.
            self.capacity = max(1, min(self.capacity // 2, self.sink.buffer_rows(shapes)))
        self.buffers = self._empty(shapes)
        self.host = self._spare = None
        if self.sink is not None:
            self._spare, self._num_written = self._empty(shapes), self.num_draws
            self.sink.begin(
                self.buffers,
                num_samples,
                attributes or {},
                first_draw=self.num_draws,
                is_resumed=self.is_resumed,
            )
        elif self.capacity < num_samples:
            self.host = HostDraws(self.buffers, num_samples)
        self._pins = Pins.of((self.states, self.buffers))
        self._step_size = float(np.mean(to_host(self.kernel.step_size)))
        if num_samples:
            report.phase("sampling", num_samples, self.num_draws)
        with marked("sampling"):
            run_chunks(
                num_samples,
                lambda done, n: self._run_chunk(done, n, report),
                stop,
                self.capacity,
                after=after,
                done=self.num_draws,
            )

    def counts(self) -> dict[str, int]:
        """Return the numbers that say where sampling is, for `put_back`."""
        return {name: getattr(self, name) for name in ("num_steps", "num_draws", "num_divergent")}

    def put_back(self, counts: dict[str, int]) -> None:
        """Go on from the `counts` of another such run, whose draws are in the sink."""
        for name, value in counts.items():
            setattr(self, name, value)

    def flush(self) -> None:
        """Wait until all draws that were made are on disk."""
        if self.sink is not None:
            self._write()
            self.sink.flush()

    def require_room(self, num_samples: int, device_bytes: int | None) -> None:
        """Raise, on every process, unless the devices hold all draws: no host could take them over."""
        shapes = shapes_of_draw(
            self.kernel, self.states, self.collect, self.rng_key, self.thin, self.layout
        )
        size = bucket(num_samples)
        room, *_ = least(capacity(shapes, size, self.num_shards, device_bytes))
        if room < size:
            raise ValueError(
                f"num_samples={num_samples}: draws of several processes stay on their devices, which "
                f"have room for {room}. Raise thin, collect less, or raise device_bytes"
            )

    def draws(self) -> tuple[PyTree, dict[str, Any], dict[str, int]]:
        """Return what was collected and the stats, leaves [chains, draws, ...].

        And the number of real rows of each leaf, by its name, that has pad: on several processes, where
        rows cannot be cut off, the pad copies the last real row.
        """
        if self.sink is not None:
            self.flush()
            return *self.sink.saved(), {}
        collected, stats = self._filled()
        if not spans_processes(self.layout.mesh):
            return unwrap(collected, axis=2), stats, {}
        return fill_pad(collected, axis=2), to_host(stats), _padded_rows(collected)

    def _filled(self) -> PyTree:
        if self.host is not None:
            self._flush(self.num_draws % self.capacity)
            return self.host.draws(self.num_draws)
        if self.num_draws == self.capacity:
            return self.buffers
        # An index would take three times as long, for each of ten buffers.
        return jax.tree.map(lambda b: jax.lax.slice_in_dim(b, 0, self.num_draws, axis=1), self.buffers)

    def _run_chunk(self, done: int, count: int, report: Report) -> None:
        slot = done % self.capacity
        (self.states, self.buffers), counts = _chunk(
            self.kernel,
            (self.states, self.buffers),
            self.collect,
            self.rng_key,
            self.num_steps,
            slot,
            count,
            thin=self.thin,
            layout=self.layout,
            pins=self._pins,
        )
        counts = to_host(counts)
        self.num_steps += count * self.thin
        self.num_draws += count
        self.num_divergent += int(counts["num_divergent"].sum())
        is_full = slot + count == self.capacity
        if self.host is not None and is_full:
            self._flush(self.capacity)
        if self.sink is not None and (self.sink.is_due() or is_full):
            self._write()
        report.advance(
            count,
            leapfrogs=int(counts["leapfrogs"]),
            acceptance_rate=float(counts["acceptance_rate"].mean()) / (count * self.thin),
            divergences=self.num_divergent,
            step_size=self._step_size,
        )

    def _flush(self, count: int) -> None:
        """Copy the first ``count`` draws of the buffers, the latest there are, to the host."""
        if self.host is not None and count:
            self.host.fill(self.buffers, self.num_draws - count, count)

    def _write(self) -> None:
        """Give the sink what it has not had yet, and go on in the other buffer, at the same slot."""
        assert self.sink is not None
        count = self.num_draws - self._num_written
        if count:
            self.sink.write(self.buffers, count, self._num_written % self.capacity)
            self._num_written = self.num_draws
            self.buffers, self._spare = self._spare, self.buffers

    def _empty(self, shapes: PyTree) -> PyTree:
        keeps_position = self.collect.func is keep_position
        kept_layout = self.layout.of_kept(shapes[0], self.states.position) if keeps_position else None
        return _empty(_Shapes.of(shapes), self.capacity, self.layout, kept_layout)

    @property
    def num_shards(self) -> int:
        """In how many parts the chains lie."""
        return self.layout.mesh.shape.get(CHAINS, 1) if self.layout.mesh else 1


def shapes_of_draw(
    kernel: Any, states: Any, collect: Partial, rng_key: jax.Array, thin: int, layout: Layout
) -> PyTree:
    """Return the shapes of what is kept of one draw of all chains, and of its stats."""
    # Traced once for a kernel of these shapes, as a program would be.
    arguments = (kernel, states, collect, rng_key, 0)
    return _one_draw.eval_shape(*arguments, thin=thin, layout=layout)[1]


def _padded_rows(collected: PyTree) -> dict[str, int]:
    """Return the number of real rows of the leaves that have pad."""
    rows = jax.tree.map(
        lambda x: x.rows if is_row_values(x) else None, collected, is_leaf=is_row_values
    )
    named = named_leaves(rows, is_leaf=lambda x: x is None)
    return {name: r.num_rows for name, r in named.items() if r and r.num_rows < r.num_padded}


def _draw(kernel, states, collect, rng_key, step, *, thin, layout):
    """Take the steps of one draw; return the states, what is kept, and the steps' counts."""

    def one(carry, i):
        states, counts = carry
        states, info = advance(kernel, rng_key, step + i, states, layout)
        return (states, tally(counts, info)), info

    (states, counts), infos = jax.lax.scan(one, (states, no_tally(states)), jnp.arange(thin))
    last = jax.tree.map(lambda x: x[-1], infos)
    collected = layout.vmap(_collect, (None, None, 0, 0))(kernel.target, collect, states.position, last)
    stats = {f.name: getattr(infos, f.name) for f in dataclasses.fields(infos)}
    stats = {name: COMBINE.get(name, lambda x: x[-1])(x) for name, x in stats.items()}
    return states, (collected, stats | {"log_density": states.log_density}), counts


_one_draw = jax.jit(_draw, static_argnames=("thin", "layout"))


def _collect(target: Any, collect: Partial, position: PyTree, info: Any) -> PyTree:
    """Collect of one chain; a user's function sees no pad."""
    values = kept(target, position)
    return values if collect.func is keep_position else collect(unwrap(values), info)


@partial(jax.jit, static_argnames=("thin", "layout", "pins"), donate_argnums=1)
def _chunk(kernel, carry, collect, rng_key, first_step, slot, count, *, thin, layout, pins):
    def body(i, carry):
        (states, buffers), counts = carry
        step = first_step + i * thin
        states, kept, more = _draw(kernel, states, collect, rng_key, step, thin=thin, layout=layout)
        buffers = jax.tree.map(lambda b, x: _write(b, x, slot + i), buffers, kept)
        return (states, buffers), jax.tree.map(jnp.add, counts, more)

    with jax.named_scope("steps"):
        carry, counts = jax.lax.fori_loop(0, count, body, (carry, no_tally(carry[0])))
    return pins(carry), counts


def _write(buffer: jax.Array, draw: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, draw, slot, axis=1)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Shapes of a tree as one hashable argument."""

    treedef: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, tree: PyTree) -> "_Shapes":
        leaves, treedef = jax.tree.flatten(tree)
        return cls(treedef, tuple((x.shape, x.dtype) for x in leaves))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _empty(shapes: _Shapes, size: int, layout: Layout, kept_layout: Layout | None) -> PyTree:
    """Buffers for ``size`` draws, leaves [chains, size, ...], in the layout of what is kept."""
    zeros = [jnp.zeros((s[0], size, *s[1:]), dtype) for s, dtype in shapes.leaves]
    collected, stats = jax.tree.unflatten(shapes.treedef, zeros)
    if kept_layout is not None:
        collected = kept_layout.pin(collected, layout.chain_axis, None)
    else:
        collected = layout.pin_chains(collected)
    return collected, layout.pin_chains(stats)
