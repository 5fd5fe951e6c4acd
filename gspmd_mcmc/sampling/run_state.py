"""A run as one pytree, and the few programs that move it."""

import dataclasses
import inspect
import warnings
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import own_step_size, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Adaptation, Transition, WindowStart
from gspmd_mcmc.diagnostics.energy import OF_STEPS, energies_over_steps
from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets.local import arrays, is_row_values, unwrap
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, pytree, roles

# Folded into a step's key, so that what happens between steps does not share the step's two keys.
BEGIN, HELP = 2, 3
# The window before the one that begins: there was none, its metric was held, or it was learned.
NONE, HELD, LEARNED = range(3)


@pytree
@dataclass(frozen=True, eq=False)
class Counters:
    """Where a run is, and what it has counted."""

    num_steps: jax.Array  # [], earlier runs included: the place in the sequence of random numbers
    num_warmup: jax.Array  # [], steps taken
    num_windows: jax.Array  # [], begun
    num_draws: jax.Array  # []
    warmup_divergent: jax.Array = tree.each_chain()  # [chains]
    divergent: jax.Array = tree.each_chain()  # [chains], after warm-up
    leapfrogs: jax.Array = tree.each_chain()  # [chains], in warm-up


@pytree
@dataclass(frozen=True, eq=False)
class RunState:
    """Everything that the rest of a run depends on, except what is `Fixed`."""

    kernel: Kernel  # of the next step, without its target
    states: Any  # leaves [chains, ...]
    tuning: Any  # the state of the adaptation
    # Of warm-up; the last place takes what later steps write. "chains": by name [chains, steps];
    # "kernel": its numbers by name, [steps] or [chains, steps].
    traces: dict[str, dict[str, jax.Array]]
    counters: Counters
    draws: PyTree  # what was collected, and the stats: leaves [chains, draws of a buffer, ...]


@pytree
@dataclass(frozen=True, eq=False)
class DrawSpec:
    """What is kept of each draw: how it is collected, and the shapes and specs of all chains' draw."""

    collect: Partial  # (position, info) of one chain
    treedef: Any = tree.static()  # of what is collected and the stats
    classes: tuple[type, ...] = tree.static()  # of its nodes
    shapes: tuple[tuple[tuple[int, ...], Any], ...] = tree.static()  # [chains, ...], and the dtypes
    specs: tuple[P, ...] = tree.static()  # of buffers, [chains, draws, ...]
    mesh: Mesh | None = tree.static()
    info: tuple[Any, tuple] = tree.static()  # treedef, and shapes and dtypes [chains, ...], of infos

    @classmethod
    def of(cls, kernel: Kernel, states: Any, collect: Partial, layout: Layout, thin: int) -> "DrawSpec":
        """Read it off a step of the chains, which is traced but not run.

        Leaves of the position that are collected as they are lie as the position's do. Everything else
        is whole but for the chains.
        """
        marked, info, log_density = _one_draw.eval_shape(kernel, states, collect, layout=layout)
        stats = vars(info) | {"log_density": log_density}
        if thin > 1 and "energy" in stats:
            stats |= dict.fromkeys(OF_STEPS, stats["energy"])
        specs = [_spec(x, layout) for x in jax.tree.leaves(marked, is_leaf=_is_as_seen)]
        lead = (layout.chain_axis, None)
        specs = [P(*lead, *spec) for spec in specs] + [P(*lead)] * len(stats)
        leaves, treedef = jax.tree.flatten((_unmarked(marked), stats))
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        infos, of_info = jax.tree.flatten(info)
        infos = of_info, tuple((x.shape, x.dtype) for x in infos)
        classes = tree.classes_of(treedef)
        return cls(collect, treedef, classes, shapes, tuple(specs), layout.mesh, infos)

    @property
    def one_draw(self) -> PyTree:
        """What is collected and the stats, as shapes [chains, ...]."""
        return self.treedef.unflatten([jax.ShapeDtypeStruct(*x) for x in self.shapes])

    def pin(self, buffers: PyTree) -> PyTree:
        """Constrain buffers to where they lie."""
        if self.mesh is None:
            return buffers
        pinned = [
            jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
            for x, spec in zip(jax.tree.leaves(buffers), self.specs, strict=True)
        ]
        return self.treedef.unflatten(pinned)


@pytree
@dataclass(frozen=True, eq=False)
class Fixed:
    """What all programs of a run read, and no step changes."""

    target: Target
    rng_key: jax.Array  # of the whole run; the second of its two halves is that of the steps
    layout: Layout = tree.static()

    @property
    def step_key(self) -> jax.Array:
        """The key that steps fold their numbers into."""
        return jax.random.split(self.rng_key)[1]

    def key(self, run: RunState, event: int) -> jax.Array:
        """Return the key of something that happens before the run's next step."""
        return jax.random.fold_in(jax.random.fold_in(self.step_key, run.counters.num_steps), event)

    def kernel(self, run: RunState) -> Kernel:
        """Return the run's kernel with its target."""
        return tree.replace(run.kernel, target=self.target)

    def moved(self, adaptation: Adaptation, run: RunState, **changes: Any) -> RunState:
        """Return the run with some fields changed, arrays where they lie between programs.

        Draws are left where they are: their buffers have a layout of their own, `DrawSpec.specs`.
        """
        if "kernel" in changes:
            changes["kernel"] = tree.replace(changes["kernel"], target=None)
        run = tree.replace(run, **changes)
        rest = tree.replace(run, draws=())
        rest = self.layout.pin(rest, run_roles(adaptation, rest, self.layout))
        return tree.replace(rest, draws=run.draws)


def run_roles(adaptation: Adaptation, run: RunState, layout: Layout) -> Any:
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
        tuning=found(run.tuning, of_each_chain=adaptation.is_per_chain),
        traces={
            "chains": found(run.traces["chains"], of_each_chain=True),
            "kernel": found(run.traces["kernel"], of_each_chain=is_per_chain),
        },
        counters=found(run.counters),
        draws=found(run.draws, of_each_chain=True),
    )


@partial(jax.jit, static_argnames="layout")
def _one_draw(kernel: Kernel, states: Any, collect: Partial, *, layout: Layout) -> tuple:
    """Return what is collected, marked, and info and log density; `jax.jit` remembers their shapes."""
    after, info = advance_chains(kernel, jax.random.key(0), jnp.zeros((), int), states, layout)
    kept = layout.vmap(_collect, (None, None, 0, 0))(kernel.target, collect, after.position, info)
    return kept, info, after.log_density


@partial(jax.jit, static_argnames="size")
def empty_buffers(draw: DrawSpec, size: int) -> PyTree:
    """Return buffers for ``size`` draws, leaves [chains, size, ...]."""
    zeros = [jnp.zeros((s[0], size, *s[1:]), dtype) for s, dtype in draw.shapes]
    return draw.pin(draw.treedef.unflatten(zeros))


@partial(jax.jit, static_argnames="size")
def set_up(
    adaptation: Adaptation,
    first: Adaptation,
    fixed: Fixed,
    kernel: Kernel,
    states: Any,
    first_step: int,
    *,
    size: int,
) -> RunState:
    """Return a run before its first step, with room for ``size`` traced steps and none for draws.

    Its arrays are its own: later programs take over the buffers of the run that they are given.
    """
    kernel = adaptation.prepare(kernel, states)
    zero, per_chain = jnp.zeros((), jnp.int32), jnp.zeros(fixed.layout.num_chains, jnp.int32)
    num_steps = jnp.asarray(first_step, jnp.int32)
    traced = {
        "chains": dict.fromkeys(("acceptance_rate", "log_density"), states.log_density),
        "kernel": {name: getattr(kernel, name) for name in adaptation.traced},
    }
    run = RunState(
        kernel=tree.replace(kernel, target=None),
        states=states,
        tuning=first.init(kernel, states),
        traces=jax.tree.map(lambda x: jnp.zeros((*x.shape, size + 1), x.dtype), traced),
        counters=Counters(num_steps, zero, zero, zero, per_chain, per_chain, per_chain),
        draws=(),
    )
    return fixed.moved(first, run)


@partial(jax.jit, donate_argnames="run")
def advance(
    run: RunState,
    adaptation: Adaptation,
    fixed: Fixed,
    draw: DrawSpec,
    is_warmup: bool,
    slot: int,
    count: int,
    thin: int,
) -> tuple[RunState, dict[str, jax.Array]]:
    """Take ``count`` steps of all chains; return also the numbers for a report.

    In warm-up the adaptation takes in every step. After warm-up ``thin`` steps make a draw, which goes
    to the buffers from ``slot`` on. One program serves both, so that a step is compiled once.
    """
    layout, step_key = fixed.layout, fixed.step_key
    method = "transition" if adaptation.needs_end else "step"

    def body(i, carry):
        run, so_far, told = carry
        kernel = fixed.kernel(run)
        drawn, key = draw_kernel(adaptation.stepper(kernel), step_key, run.counters.num_steps)
        after, info, *end = step_chains(drawn, key, run.states, layout, method)

        def adapt():
            transition = Transition(run.states, after, info, end[0] if end else None)
            tuning = adaptation.update(run.tuning, drawn, transition)
            return tree.replace(adaptation.tuned(kernel, tuning), target=None), tuning

        tuned, tuning = jax.lax.cond(is_warmup, adapt, lambda: (run.kernel, run.tuning))
        so_far, stats = _over_steps(so_far, info, i % thin, thin)
        is_kept = jnp.logical_not(is_warmup) & ((i + 1) % thin == 0)
        kept = _collected(fixed.target, draw, after, info, is_kept, layout)
        made = kept, stats | {"log_density": after.log_density}
        at = jnp.where(is_warmup, 0, slot + i // thin)
        run = RunState(
            kernel=tuned,
            states=after,
            tuning=tuning,
            traces=_traced(run, after, info, is_warmup),
            counters=_counted(run.counters, info, is_warmup, is_kept),
            draws=jax.tree.map(partial(_write, axis=1, at=at), run.draws, made),
        )
        leapfrogs = jnp.sum(info.num_integration_steps, dtype=jnp.int32)
        return run, so_far, (told[0] + info.acceptance_rate, told[1] + leapfrogs)

    nothing = jax.tree.map(lambda b: jnp.zeros_like(b[:, 0]), run.draws[1])
    told = jnp.zeros_like(run.states.log_density), jnp.zeros((), jnp.int32)
    with jax.named_scope("steps"):
        run, _, (rates, leapfrogs) = jax.lax.fori_loop(0, count, body, (run, nothing, told))
    counters = run.counters
    divergent = jnp.where(is_warmup, counters.warmup_divergent, counters.divergent)
    run = fixed.moved(adaptation, run)
    return tree.replace(run, draws=draw.pin(run.draws)), {
        "acceptance_rate": rates,
        "leapfrogs": leapfrogs,
        "divergent": divergent,
        "step_size": jnp.mean(run.kernel.step_size),
    }


# On a GPU the loops of the steps are CUDA graphs. By default only what is between loops is one: the
# host starts the kernels of each leapfrog, and waits for each loop's condition. Loops with collectives,
# which nobody has tried so, stay as they are. Kernels that do not depend on each other run at the same
# time: the derivatives by row and by column, and the updates of latents.
LOOPS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,"
    "CONDITIONAL,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}


@cache
def advance_in_graphs() -> Any:
    """Return `advance`, compiled with the options of `LOOPS_IN_GRAPHS` that this XLA takes."""
    known = {}
    for name, value in LOOPS_IN_GRAPHS.items():
        try:
            jax.jit(jnp.sin, compiler_options={name: value}).lower(0.0).compile()
            known[name] = value
        except jax.errors.JaxRuntimeError as error:
            warnings.warn(
                f"this jaxlib does not take XLA's option {name}={value!r}, and steps on this GPU take "
                f"longer without it: {str(error).splitlines()[0]}",
                SamplingWarning,
                stacklevel=2,
            )
    return jax.jit(inspect.unwrap(advance), donate_argnames="run", compiler_options=known)


@partial(jax.jit, donate_argnames="run")
def begin_window(
    run: RunState, adaptation: Adaptation, fixed: Fixed, before: int
) -> tuple[RunState, None]:
    """End the window before, if there was one, and begin the next; see `NONE`, `HELD`, `LEARNED`."""
    kernel, states = fixed.kernel(run), run.states
    ends = [
        lambda tuning: tuning,
        lambda tuning: adaptation.end(tuning, kernel, states, False),
        lambda tuning: adaptation.end(tuning, kernel, states, True),
    ]
    tuning = jax.lax.switch(before, ends, run.tuning)

    def acceptance_rates(kernel, key):
        _, info = advance_chains(kernel, key, jnp.zeros((), jnp.int32), states, fixed.layout)
        return info.acceptance_rate

    start = WindowStart(run.counters.num_warmup == 0, fixed.key(run, BEGIN), acceptance_rates)
    tuning = adaptation.begin(tuning, kernel, states, start)
    counters = tree.replace(run.counters, num_windows=run.counters.num_windows + 1)
    kernel = adaptation.tuned(kernel, tuning)
    return fixed.moved(adaptation, run, kernel=kernel, tuning=tuning, counters=counters), None


@partial(jax.jit, static_argnames="learns_metric", donate_argnames="run")
def end_stage(
    run: RunState,
    adaptation: Adaptation,
    fixed: Fixed,
    *,
    following: Adaptation | None,
    learns_metric: bool | None,
) -> tuple[RunState, None]:
    """End a stage of warm-up, whose last window learned its metric or not, and begin the following one.

    ``learns_metric`` is None if that window was cut short.
    """
    kernel, tuning = fixed.kernel(run), run.tuning
    if learns_metric is not None:
        tuning = adaptation.end(tuning, kernel, run.states, learns_metric)
    kernel = adaptation.final(kernel, tuning)
    if following is not None:
        adaptation, tuning = following, following.init(kernel, run.states)
    return fixed.moved(adaptation, run, kernel=kernel, tuning=tuning), None


@partial(jax.jit, donate_argnames="run")
def help_stuck_chains(
    run: RunState, adaptation: Adaptation, fixed: Fixed, is_stuck: jax.Array
) -> tuple[RunState, jax.Array]:
    """Let stuck chains walk with step sizes of their own; return also which were moved, [chains]."""
    walk = partial(own_step_size.walk, adaptation.stepper(fixed.kernel(run)), vmap=fixed.layout.vmap)
    states, moves, leapfrogs = stuck_chains.helped(fixed.key(run, HELP), run.states, is_stuck, walk)
    total = run.counters.leapfrogs + leapfrogs // fixed.layout.num_chains
    counters = tree.replace(run.counters, leapfrogs=total)
    return fixed.moved(adaptation, run, states=states, counters=counters), moves


@partial(jax.jit, static_argnames=("layout", "method"), inline=True)
def step_chains(kernel: Kernel, rng_key: jax.Array, states: Any, layout: Layout, method: str):
    """Step every chain by a method of the kernel, each with the key of its number.

    The programs of a run that step chains share one trace of a step, which `jax.jit` remembers.
    Inlined, it leaves the programs as they would be without.
    """
    keys = jax.vmap(partial(jax.random.fold_in, rng_key))(jnp.arange(layout.num_chains))
    axes = None
    if kernel.is_per_chain:
        axes = jax.tree.map(lambda _: None, kernel)
        axes = tree.replace(axes, step_size=0, inverse_mass_matrix=0)
    return layout.vmap(getattr(type(kernel), method), (axes, 0, 0))(kernel, keys, states)


def draw_kernel(kernel: Kernel, rng_key: jax.Array, step: jax.Array) -> tuple[Kernel, jax.Array]:
    """Return the kernel of step number ``step``, and the key of its chains.

    What is drawn once for all chains (a trajectory's length) is drawn outside the map over chains. If
    it differed between them, every leapfrog would have to ask every chain whether to go on.
    """
    shared_key, chains_key = jax.random.split(jax.random.fold_in(rng_key, step))
    return kernel.with_jitter(shared_key, step), chains_key


def advance_chains(
    kernel: Kernel, rng_key: jax.Array, step: jax.Array, states: Any, layout: Layout
) -> tuple[Any, Info]:
    """Take step number ``step`` of all chains; its randomness depends on the key and numbers alone."""
    return step_chains(*draw_kernel(kernel, rng_key, step), states, layout, "step")


def keep_position(params: PyTree, info: Info) -> PyTree:
    """Collect the parameters of the position."""
    return params


@pytree
@dataclass(frozen=True, eq=False)
class _AsSeen:
    """What a function of `collect=` returned as it was given."""

    kept: Any  # what the target keeps there: an array, or `RowValues`
    path: tuple = tree.static()  # where, in what the target keeps
    axis: int = tree.static()  # of the rows, of a latent that has some


def _is_as_seen(node: Any) -> bool:
    return isinstance(node, _AsSeen)


def _collect(target: Target, collect: Partial, position: PyTree, info: Info) -> PyTree:
    """Collect of one chain: a function sees no pad, and what it returns as it was given is marked."""
    kept = target.kept(position)
    seen = unwrap(kept)
    found = jax.tree_util.tree_leaves_with_path(kept, is_leaf=is_row_values)
    latents = [p for p, _ in jax.tree_util.tree_leaves_with_path(position, is_leaf=is_padded)]
    axes = dict(zip(latents, target.local_axes(position), strict=True))
    marked = {
        id(x): _AsSeen(values, path, axes.get(path, 0))
        for x, (path, values) in zip(jax.tree.leaves(seen), found, strict=True)
    }
    return jax.tree.map(lambda x: marked.get(id(x), x), collect(seen, info))


def collect_all(target: Target, draw: DrawSpec, position: PyTree, info: Info, layout: Layout) -> PyTree:
    """Return what is kept of all chains, leaves [chains, ...]."""
    collect = layout.vmap(_collect, (None, None, 0, 0))
    return _unmarked(collect(target, draw.collect, position, info))


def _unmarked(collected: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.kept if _is_as_seen(x) else x, collected, is_leaf=_is_as_seen)


def _spec(collected: Any, layout: Layout) -> P:
    """Return how a leaf of what is collected, marked and of shape [chains, ...], lies in a chain."""
    if not _is_as_seen(collected):
        return P()
    where = arrays(layout.treedef.unflatten(range(layout.treedef.num_leaves)))
    leaf = dict(jax.tree_util.tree_leaves_with_path(where)).get(collected.path)
    if leaf is None:  # derived
        return P()
    (values,) = jax.tree.leaves(collected)
    # What is derived may have a latent's name, and other axes.
    if values.ndim != 1 + len(layout.shapes[leaf][0]):
        return P()
    if not collected.axis:
        return layout.specs[leaf]
    rows, *others = layout.specs[leaf]
    others += [None] * (collected.axis - len(others))
    return P(*others[: collected.axis], rows, *others[collected.axis :])


def _collected(target, draw: DrawSpec, states, info, is_kept, layout) -> PyTree:
    """Return what is kept of a draw, and zeros after other steps, which cost less."""

    def keep():
        return collect_all(target, draw, states.position, info, layout)

    def nothing():
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(keep))

    return jax.lax.cond(is_kept, keep, nothing)


def _over_steps(so_far, info: Info, number, thin) -> tuple[dict, dict]:
    """Add the info of a draw's step of that number to that of the draw so far.

    Returns both what to carry on and the stats.
    """
    carried, stats, is_first = {}, {}, number == 0
    for field in dataclasses.fields(info):
        # The first stage of a warm-up may step by another kernel, whose numbers have other dtypes.
        value = getattr(info, field.name).astype(so_far[field.name].dtype)
        carried[field.name] = stats[field.name] = value
        if "over_steps" in field.metadata:
            combine, is_mean = field.metadata["over_steps"]
            total = jnp.where(is_first, value, combine(so_far[field.name], value))
            carried[field.name], stats[field.name] = total, total / thin if is_mean else total
    if so_far.keys() >= set(OF_STEPS):
        sums = energies_over_steps(so_far, carried["energy"], number)
        carried, stats = carried | sums, stats | sums
    return carried | {"log_density": so_far["log_density"]}, stats


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


def _write(buffer: jax.Array, value: jax.Array, *, axis: int, at: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, value, at, axis)
