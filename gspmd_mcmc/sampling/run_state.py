"""A run as one pytree, and the few programs that move it."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import own_step_size, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Adaptation, Transition
from gspmd_mcmc.adaptation.per_chain import map_chains
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.targets.local import is_row_values, unwrap
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, pytree, roles

# Folded into a step's key: sets apart what happens between windows from the step's own two keys.
BEGIN, HELP = 2, 3
# What the window before was when another begins: there was none, its metric was held, or learned.
NONE, HELD, LEARNED = range(3)


@pytree
@dataclass(frozen=True, eq=False)
class Counters:
    """Where a run is, and what it has counted.

    Attributes
    ----------
    num_steps
        Steps in all, those of earlier runs too: where the sequence of random numbers goes on, [].
    num_warmup, num_windows, num_draws
        Steps of warm-up taken, windows begun, draws made, [].
    warmup_divergent, divergent
        Divergent transitions of each chain in warm-up and after it, [chains].
    leapfrogs
        Those of each chain in warm-up, [chains].
    """

    num_steps: jax.Array
    num_warmup: jax.Array
    num_windows: jax.Array
    num_draws: jax.Array
    warmup_divergent: jax.Array = tree.each_chain()
    divergent: jax.Array = tree.each_chain()
    leapfrogs: jax.Array = tree.each_chain()


@pytree
@dataclass(frozen=True, eq=False)
class RunState:
    """All that the rest of a run depends on, but for the target.

    Attributes
    ----------
    kernel
        That of the next step, without its target.
    states
        Of all chains, leaves [chains, ...].
    tuning
        The state of the adaptation.
    traces
        Of warm-up, with a place at the end for steps after it: ``"chains"``, by name [chains, steps],
        and ``"kernel"``, its numbers by name, [steps] or, of a kernel per chain, [chains, steps].
    counters
        Where the run is.
    draws
        What was collected and the stats, leaves [chains, draws of a buffer, ...].
    """

    kernel: Any
    states: Any
    tuning: Any
    traces: dict[str, dict[str, jax.Array]]
    counters: Counters
    draws: PyTree


def run_roles(adaptation: Adaptation | None, run: RunState, layout: Layout) -> Any:
    """Return what each array of a run is, as its parts declare it: a tree of roles like the run."""
    found = partial(roles, position=layout.treedef)
    kernel, is_per_chain = found(run.kernel), run.kernel.is_per_chain
    if is_per_chain:
        own = found(run.kernel, of_each_chain=True)
        tuned = {"step_size": own.step_size, "inverse_mass_matrix": own.inverse_mass_matrix}
        kernel = tree.replace(kernel, **tuned)
    return tree.replace(
        run,
        kernel=kernel,
        states=found(run.states, of_each_chain=True),
        tuning=found(run.tuning, of_each_chain=adaptation is not None and adaptation.is_per_chain),
        traces={
            "chains": found(run.traces["chains"], of_each_chain=True),
            "kernel": found(run.traces["kernel"], of_each_chain=is_per_chain),
        },
        counters=found(run.counters),
        draws=found(run.draws, of_each_chain=True),
    )


def _pinned(adaptation: Adaptation | None, run: RunState, layout: Layout) -> RunState:
    """Lay out all but the draws, whose buffers have a layout of their own."""
    rest = tree.replace(run, draws=())
    return tree.replace(layout.pin(rest, run_roles(adaptation, rest, layout)), draws=run.draws)


@dataclass(frozen=True)
class DrawShapes:
    """What is kept of a draw of all chains, and its stats: shapes and specs; hashable.

    Attributes
    ----------
    treedef, shapes
        The structure; shape [chains, ...] and dtype of each leaf.
    specs
        Where leaves of a buffer of draws lie, [chains, draws, ...].
    mesh
        The mesh, or None for one device.
    """

    treedef: Any
    shapes: tuple[tuple[tuple[int, ...], Any], ...]
    specs: tuple[P, ...]
    mesh: Mesh | None

    @classmethod
    def of(cls, kernel: Kernel, states: Any, collect: Partial, layout: Layout) -> "DrawShapes":
        """Read them off a step of the chains, which is traced, not taken.

        What is collected lies as the positions do where it is positions, rows with their plates, and
        else whole but for the chains.
        """

        def draw():
            after, info = advance_chains(kernel, jax.random.key(0), jnp.zeros((), int), states, layout)
            kept = layout.vmap(_collect, (None, None, 0, 0))(
                kernel.target, collect, after.position, info
            )
            return kept, vars(info) | {"log_density": after.log_density}

        kept, stats = jax.eval_shape(draw)
        collected = jax.tree.leaves(kept, is_leaf=is_row_values)
        if jax.tree.structure(kept) == layout.treedef and collect.func is keep_position:
            specs = list(layout.specs)
        else:
            specs = [P(x.rows.axes) if is_row_values(x) else P() for x in collected]
        lead = (layout.chain_axis, None)
        specs = [P(*lead, *spec) for spec in specs] + [P(*lead)] * len(stats)
        leaves, treedef = jax.tree.flatten((kept, stats))
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        return cls(treedef, shapes, tuple(specs), layout.mesh)

    @property
    def tree(self) -> PyTree:
        """What was collected and the stats, as shapes [chains, ...]."""
        shapes = [jax.ShapeDtypeStruct(*x) for x in self.shapes]
        return jax.tree.unflatten(self.treedef, shapes)

    def buffers(self, size: int) -> PyTree:
        """Return buffers for ``size`` draws, leaves [chains, size, ...]."""
        zeros = [jnp.zeros((s[0], size, *s[1:]), dtype) for s, dtype in self.shapes]
        return self.pin(jax.tree.unflatten(self.treedef, zeros))

    def pin(self, buffers: PyTree) -> PyTree:
        """Constrain buffers to where they lie."""
        if self.mesh is None:
            return buffers
        pinned = [
            jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
            for x, spec in zip(jax.tree.leaves(buffers), self.specs, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, pinned)


@partial(jax.jit, static_argnums=(0, 1))
def empty_buffers(draw: DrawShapes, size: int) -> PyTree:
    """Return `DrawShapes.buffers`, from a program."""
    return draw.buffers(size)


@partial(jax.jit, static_argnames=("size", "layout"))
def set_up(
    adaptation: Adaptation,
    first: Adaptation | None,
    kernel: Kernel,
    states: Any,
    first_step: int,
    *,
    size: int,
    layout: Layout,
) -> RunState:
    """Return a run before its first step, with no draws yet.

    Parameters
    ----------
    adaptation, first
        The whole warm-up, and the adaptation of its first stage; None where nothing is tuned.
    kernel, states
        The kernel to tune, and the chains' states.
    first_step
        Steps of an earlier run that this one goes on from.
    size
        Steps of warm-up that the traces have room for.
    layout
        The layout of the chains.
    """
    kernel = kernel if first is None else adaptation.prepare(kernel, states)
    zero, per_chain = jnp.zeros((), jnp.int32), jnp.zeros(layout.num_chains, jnp.int32)
    counters = Counters(
        jnp.asarray(first_step, jnp.int32), zero, zero, zero, per_chain, per_chain, per_chain
    )
    traced = {
        "chains": dict.fromkeys(("acceptance_rate", "log_density"), states.log_density),
        "kernel": {name: getattr(kernel, name) for name in adaptation.traced},
    }
    run = RunState(
        # Copies: a program that is given the run takes its buffers over, and these may be a user's.
        kernel=jax.tree.map(jnp.copy, tree.replace(kernel, target=None)),
        states=states,
        tuning=() if first is None else first.init(kernel, states),
        traces=jax.tree.map(lambda x: jnp.zeros((*x.shape, size + 1), x.dtype), traced),
        counters=counters,
        draws=(),
    )
    return _pinned(first, run, layout)


@partial(jax.jit, static_argnames=("draw", "layout"), donate_argnames="run")
def advance(
    adaptation: Adaptation | None,
    target: Target,
    collect: Partial,
    run: RunState,
    rng_key: jax.Array,
    is_warmup: bool,
    slot: int,
    count: int,
    thin: int,
    *,
    draw: DrawShapes,
    layout: Layout,
) -> tuple[RunState, dict[str, jax.Array]]:
    """Take ``count`` steps of all chains; return besides what a report tells of them.

    In warm-up each step is handed to the adaptation. After it ``thin`` steps make a draw, which goes to
    the buffers from ``slot`` on. One program serves both, so that a step is compiled once.
    """

    def body(i, carry):
        run, so_far, counts = carry
        kernel, states = tree.replace(run.kernel, target=target), run.states
        stepper = kernel if adaptation is None else adaptation.stepper(kernel)
        drawn, chains_key = draw_kernel(stepper, rng_key, run.counters.num_steps)
        needs_end = adaptation is not None and adaptation.needs_end
        after, info, *end = step_chains(
            drawn, chains_key, states, layout, "transition" if needs_end else "step"
        )

        def adapt():
            assert adaptation is not None
            transition = Transition(states, after, info, end[0] if end else None)
            tuning = adaptation.update(run.tuning, drawn, transition)
            return tree.replace(adaptation.tuned(kernel, tuning), target=None), tuning

        kernel_after, tuning = run.kernel, run.tuning
        if adaptation is not None:
            kernel_after, tuning = jax.lax.cond(is_warmup, adapt, lambda: (run.kernel, run.tuning))
        so_far, stats = _over_steps(so_far, info, i % thin == 0, thin)
        is_kept = jnp.logical_not(is_warmup) & ((i + 1) % thin == 0)
        kept = _collected(target, collect, after, info, is_kept, layout)
        made = kept, stats | {"log_density": after.log_density}
        at = jnp.where(is_warmup, 0, slot + i // thin)
        moved = RunState(
            kernel=kernel_after,
            states=after,
            tuning=tuning,
            traces=_traced(run, after, info, is_warmup),
            counters=_counted(run.counters, info, is_warmup, is_kept),
            draws=jax.tree.map(partial(_write, axis=1, at=at), run.draws, made),
        )
        return moved, so_far, jax.tree.map(jnp.add, counts, _told(info))

    none = jax.tree.map(lambda b: jnp.zeros_like(b[:, 0]), run.draws[1])
    counts = {
        "acceptance_rate": jnp.zeros_like(run.states.log_density),
        "leapfrogs": jnp.zeros((), jnp.int32),
    }
    with jax.named_scope("steps"):
        run, _, counts = jax.lax.fori_loop(0, count, body, (run, none, counts))
    counts |= {
        "divergent": jnp.where(is_warmup, run.counters.warmup_divergent, run.counters.divergent),
        "step_size": jnp.mean(run.kernel.step_size),
    }
    run = _pinned(adaptation, run, layout)
    return tree.replace(run, draws=draw.pin(run.draws)), counts


@partial(jax.jit, static_argnames="layout", donate_argnames="run")
def turn(
    adaptation: Adaptation,
    target: Target,
    run: RunState,
    rng_key: jax.Array,
    before: int,
    *,
    layout: Layout,
) -> RunState:
    """End the window before, of which ``before`` tells what it was, and begin another."""
    kernel, states = tree.replace(run.kernel, target=target), run.states
    ends = [
        lambda tuning: tuning,
        lambda tuning: adaptation.end(tuning, kernel, states, False),
        lambda tuning: adaptation.end(tuning, kernel, states, True),
    ]
    tuning = jax.lax.switch(before, ends, run.tuning)

    def acceptance_rates(kernel, key):
        return advance_chains(kernel, key, jnp.zeros((), jnp.int32), states, layout)[1].acceptance_rate

    is_first = run.counters.num_warmup == 0
    key = _key(rng_key, run.counters.num_steps, BEGIN)
    tuning = adaptation.begin(tuning, kernel, states, is_first, key, acceptance_rates)
    counters = tree.replace(run.counters, num_windows=run.counters.num_windows + 1)
    kernel = tree.replace(adaptation.tuned(kernel, tuning), target=None)
    return _pinned(
        adaptation, tree.replace(run, kernel=kernel, tuning=tuning, counters=counters), layout
    )


@partial(jax.jit, static_argnames=("learns_metric", "layout"), donate_argnames="run")
def finish(
    adaptation: Adaptation,
    following: Adaptation | None,
    target: Target,
    run: RunState,
    *,
    learns_metric: bool | None,
    layout: Layout,
) -> RunState:
    """End a stage of warm-up, with its last window if that is whole; begin the one that follows."""
    kernel, tuning = tree.replace(run.kernel, target=target), run.tuning
    if learns_metric is not None:
        tuning = adaptation.end(tuning, kernel, run.states, learns_metric)
    kernel = adaptation.final(kernel, tuning)
    if following is not None:
        adaptation, tuning = following, following.init(kernel, run.states)
    run = tree.replace(run, kernel=tree.replace(kernel, target=None), tuning=tuning)
    return _pinned(adaptation, run, layout)


@partial(jax.jit, static_argnames="layout", donate_argnames="run")
def help_stuck_chains(
    adaptation: Adaptation,
    target: Target,
    run: RunState,
    rng_key: jax.Array,
    is_stuck: jax.Array,
    *,
    layout: Layout,
) -> tuple[RunState, jax.Array]:
    """Let stuck chains walk with step sizes of their own; return besides which were moved, [chains]."""
    kernel = adaptation.stepper(tree.replace(run.kernel, target=target))

    def walk(rng_key, states):
        return own_step_size.walk(kernel, rng_key, states, layout.vmap)

    key = _key(rng_key, run.counters.num_steps, HELP)
    states, moves, leapfrogs = stuck_chains.helped(key, run.states, is_stuck, walk)
    total = run.counters.leapfrogs + leapfrogs // layout.num_chains
    counters = tree.replace(run.counters, leapfrogs=total)
    return _pinned(adaptation, tree.replace(run, states=states, counters=counters), layout), moves


@partial(jax.jit, static_argnames=("layout", "method"), inline=True)
def step_chains(kernel: Kernel, rng_key: jax.Array, states: Any, layout: Layout, method: str):
    """Step every chain, each with the key of its number, by that method of the kernel.

    A run's programs that step chains share one trace of a step, which `jax.jit` remembers; inlined, it
    leaves the programs as they would be without.
    """
    keys = jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(jnp.arange(layout.num_chains))
    return map_chains(getattr(type(kernel), method), kernel, keys, states, vmap=layout.vmap)


def draw_kernel(kernel: Kernel, rng_key: jax.Array, step: jax.Array) -> tuple[Kernel, jax.Array]:
    """Return the kernel of step number ``step``, and the key of its chains.

    What is drawn once for all chains (the trajectory's length) is drawn outside the map over chains:
    were it to differ between them, every leapfrog would have to ask every chain whether to go on.
    """
    shared_key, chains_key = jax.random.split(jax.random.fold_in(rng_key, step))
    return kernel.with_jitter(shared_key, step), chains_key


def advance_chains(
    kernel: Kernel, rng_key: jax.Array, step: jax.Array, states: Any, layout: Layout
) -> tuple[Any, Info]:
    """Take step number ``step`` of all chains; randomness depends on the key and numbers alone."""
    return step_chains(*draw_kernel(kernel, rng_key, step), states, layout, "step")


def _key(rng_key: jax.Array, step: jax.Array, event: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(rng_key, step), event)


def _over_steps(so_far, info: Info, is_first, thin) -> tuple[dict, dict]:
    """Take a step's info into that of a draw; return that so far, and as it would be now."""
    totals, stats = {}, {}
    for field in dataclasses.fields(info):
        value = totals[field.name] = stats[field.name] = getattr(info, field.name)
        if "over_steps" in field.metadata:
            combine, is_mean = field.metadata["over_steps"]
            total = jnp.where(is_first, value, combine(so_far[field.name], value))
            totals[field.name] = total
            stats[field.name] = total / thin if is_mean else total
    return totals | {"log_density": so_far["log_density"]}, stats


def _collected(target, collect: Partial, states, info, is_kept, layout) -> PyTree:
    """Return what is kept of a draw; zeros of other steps, which may cost less."""

    def keep():
        vmapped = layout.vmap(_collect, (None, None, 0, 0))
        return vmapped(target, collect, states.position, info)

    def nothing():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(keep))

    return jax.lax.cond(is_kept, keep, nothing)


def keep_position(position: PyTree, info: Info) -> PyTree:
    """Collect the position itself."""
    return position


def _collect(target: Target, collect: Partial, position: PyTree, info: Info) -> PyTree:
    """Collect of one chain; a user's function sees no pad."""
    values = target.kept(position)
    return values if collect.func is keep_position else collect(unwrap(values), info)


def _traced(run: RunState, states, info: Info, is_warmup) -> dict[str, dict[str, jax.Array]]:
    values = {
        "chains": {"acceptance_rate": info.acceptance_rate, "log_density": states.log_density},
        "kernel": {name: getattr(run.kernel, name) for name in run.traces["kernel"]},
    }

    def write(trace, value):
        at = jnp.where(is_warmup, run.counters.num_warmup, trace.shape[-1] - 1)
        return _write(trace, value, axis=trace.ndim - 1, at=at)

    return jax.tree.map(write, run.traces, values)


def _counted(counters: Counters, info: Info, is_warmup, is_kept) -> Counters:
    in_warmup = jnp.asarray(is_warmup).astype(jnp.int32)
    divergent = info.is_divergent.astype(jnp.int32)
    return tree.replace(
        counters,
        num_steps=counters.num_steps + 1,
        num_warmup=counters.num_warmup + in_warmup,
        num_draws=counters.num_draws + is_kept,
        warmup_divergent=counters.warmup_divergent + in_warmup * divergent,
        divergent=counters.divergent + (1 - in_warmup) * divergent,
        leapfrogs=counters.leapfrogs + in_warmup * info.num_integration_steps.astype(jnp.int32),
    )


def _told(info: Info) -> dict[str, jax.Array]:
    leapfrogs = jnp.sum(info.num_integration_steps, dtype=jnp.int32)
    return {"acceptance_rate": info.acceptance_rate, "leapfrogs": leapfrogs}


def _write(buffer: jax.Array, value: jax.Array, *, axis: int, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, value, at, axis)
