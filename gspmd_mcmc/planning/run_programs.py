"""The programs of a run, for shapes on a mesh that is not there.

They are those of `sample`, in the order in which it runs them, with the arguments that it gives them:
each result is declared to lie where the program before pins it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation, Stage, Untuned
from gspmd_mcmc.diagnostics.columns import SMALL_LEAF, apply_to_columns, shards_of
from gspmd_mcmc.diagnostics.statistics import COPIES, column_statistics
from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.placement.padding import refuse_padded
from gspmd_mcmc.sampling import defaults
from gspmd_mcmc.sampling import start as starts
from gspmd_mcmc.sampling.run import bucket, capacity, first_draws
from gspmd_mcmc.sampling.run_state import (
    LEARNED,
    DrawSpec,
    Fixed,
    RunState,
    advance,
    begin_window,
    empty_buffers,
    end_stage,
    help_stuck_chains,
    run_roles,
    set_up,
)
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.targets.function import traced_with
from gspmd_mcmc.targets.local import is_row_values
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, roles

START, SET_UP, BUFFERS, STEPS = "start", "set up", "draw buffers", "steps"
DATA = "data"  # what the target holds, no program's result


@dataclass(frozen=True, eq=False)
class RunSettings:
    """What `plan_sample` was given of a run."""

    kernel: Callable[[Target], Kernel] | None
    max_tree_depth: int | None
    warmup: Adaptation | None
    tuning: dict[str, Any]
    collect: Partial
    sink: Sink | None
    device_bytes: int | None
    num_chains: int
    num_warmup: int
    num_samples: int
    thin: int


@dataclass
class RunPrograms:
    """The programs of a run, by name: ``(function, *shapes)``.

    Attributes
    ----------
    calls
        The programs, in the order in which they run.
    beside
        For each, of what its run holds arguments leave out: names of programs whose results they are.
    parts
        Names of programs whose arguments are a part of the draws, which lie beside them whole.
    buffer_draws
        Draws of each chain that a buffer has room for.
    """

    calls: dict[str, tuple] = field(default_factory=dict)
    beside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    buffer_draws: int = 0

    def add(self, name: str, function: Callable, *args: Any, beside: tuple[str, ...] = ()) -> Any:
        """Add a program, and return the shapes of its results."""
        self.calls[name], self.beside[name] = (function, *args), beside
        return jax.eval_shape(function, *args)


def programs_of(build: Callable, settings: RunSettings, mesh: AbstractMesh) -> RunPrograms:
    """Trace a run on a mesh, up to its programs."""
    target, initial = _built(build, mesh)
    depth, num_chains = settings.max_tree_depth, settings.num_chains
    own = None if settings.kernel is None else settings.kernel(target)
    kernel = defaults.chosen_kernel(own, target, num_chains, depth)
    adaptation = defaults.chosen_warmup(settings.warmup, kernel, settings.num_warmup, settings.tuning)
    refuse_padded(settings.collect, "collect", "bind its .values, and leave the last rows out of sums")
    found = RunPrograms()
    with jax.numpy_dtype_promotion("standard"), traced_with(kernel, adaptation):
        layout, states = _start(found, kernel, initial, mesh, num_chains)
        adaptation = defaults.with_metric(adaptation, kernel, layout)
        warmup = adaptation if settings.num_warmup else Untuned()
        stages = warmup.stages(settings.num_warmup)
        fixed = Fixed(target, jax.random.key(0), layout)
        run = _set_up(found, warmup, stages[0].adaptation, fixed, kernel, states, settings)
        draw = DrawSpec.of(kernel, states, settings.collect, layout, settings.thin)
        buffers = _buffers(found, draw, settings, layout)
        for number, stage in enumerate(stages):
            name = f", stage {number + 1}" if len(stages) > 1 else ""
            following = None if stage is stages[-1] else stages[number + 1].adaptation
            _steps(found, name, run, stage.adaptation, fixed, draw, buffers, settings)
            run = _turns(found, name, run, stage, following, fixed)
        _summarize(found, buffers, settings)
    return found


def _built(build: Callable, mesh: AbstractMesh) -> tuple[Target, Any]:
    if not callable(build):
        raise TypeError(f"build: expected a function of a mesh, got {type(build).__name__}")
    built = build(mesh)
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], Target):
        raise TypeError(
            f"build(mesh): expected (target, initial_position), got a {type(built).__name__}"
        )
    target, initial = built
    return target, target.origin() if initial is None else initial


def _start(
    found: RunPrograms, kernel: Kernel, initial: Any, mesh: AbstractMesh, num_chains: int
) -> tuple[Layout, Any]:
    """Add the program that evaluates the chains' starts; return the layout, and their states."""
    key = jax.random.key(0)
    layout, drawn, positions = starts.read_start(kernel.target, key, initial, mesh, num_chains)
    if drawn is None:
        states = found.add(START, partial(starts.init_chains, layout=layout), kernel, positions)
    else:
        draw = partial(starts.draw_start, layout=layout)
        states, _ = found.add(START, draw, kernel, drawn, key, 0)
    return layout, layout.templates(states, roles(states, layout.treedef, of_each_chain=True))


def _set_up(
    found: RunPrograms,
    warmup: Adaptation,
    first: Adaptation,
    fixed: Fixed,
    kernel: Kernel,
    states: Any,
    settings: RunSettings,
) -> RunState:
    make = partial(set_up, size=bucket(settings.num_warmup))
    return _laid(found.add(SET_UP, make, warmup, first, fixed, kernel, states, 0), first, fixed.layout)


def _laid(run: RunState, adaptation: Adaptation, layout: Layout) -> RunState:
    """Return the shapes of a run where programs leave it; see `Fixed.moved`."""
    return layout.templates(run, run_roles(adaptation, run, layout))


def _buffers(found: RunPrograms, draw: DrawSpec, settings: RunSettings, layout: Layout) -> PyTree:
    """Add the program that makes the buffers of draws; return their shapes, where they lie."""
    shapes, mesh = draw.one_draw, layout.mesh
    assert mesh is not None
    size = capacity(shapes, bucket(settings.num_samples), layout.num_parts, settings.device_bytes)
    if settings.sink is not None:
        size = min(size // 2, settings.sink.buffer_rows(shapes))
    found.buffer_draws = max(1, size)
    make = partial(empty_buffers, size=found.buffer_draws)
    leaves = jax.tree.leaves(found.add(BUFFERS, make, draw, beside=(DATA, SET_UP)))
    laid = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(leaves, draw.specs, strict=True)
    ]
    return draw.treedef.unflatten(laid)


def _steps(
    found: RunPrograms,
    name: str,
    run: RunState,
    adaptation: Adaptation,
    fixed: Fixed,
    draw: DrawSpec,
    buffers: PyTree,
    settings: RunSettings,
) -> None:
    """Add the program of a stage's steps; that of the last stage samples too."""
    run = tree.replace(run, draws=buffers)
    # A sink has a second buffer.
    spare = () if settings.sink is None else (BUFFERS,)
    args = (run, adaptation, fixed, draw, True, 0, 1, settings.thin)
    found.add(f"{STEPS}{name}", advance, *args, beside=spare)


def _turns(
    found: RunPrograms,
    name: str,
    run: RunState,
    stage: Stage,
    following: Adaptation | None,
    fixed: Fixed,
) -> RunState:
    """Add what happens between the windows of a stage and at its end; return the run after it."""
    adaptation = stage.adaptation
    add = partial(found.add, beside=(BUFFERS,))
    if stage.windows:
        add(f"begin of a window{name}", begin_window, run, adaptation, fixed, LEARNED)
        is_stuck = jax.ShapeDtypeStruct((fixed.layout.num_chains,), bool)
        if not run.kernel.is_per_chain:
            add(f"stuck chains{name}", help_stuck_chains, run, adaptation, fixed, is_stuck)
    learns = stage.windows[-1].learns_metric if stage.windows else None
    end = jax.jit(partial(_end, learns), donate_argnums=0)
    after, _ = add(f"end of warm-up{name}", end, run, adaptation, fixed, following)
    return _laid(after, adaptation if following is None else following, fixed.layout)


def _end(learns: bool | None, run: RunState, adaptation: Any, fixed: Fixed, following: Any) -> Any:
    return end_stage(run, adaptation, fixed, following=following, learns_metric=learns)


def _summarize(found: RunPrograms, buffers: PyTree, settings: RunSettings) -> None:
    """Add the programs of `Draws.summary` where draws stay on the devices; see `by_name`.

    Draws on the host or on disk go to the devices in slices, which take no more.
    """
    num_draws = settings.num_samples
    if settings.sink is not None or found.buffer_draws < num_draws or not num_draws:
        return
    if found.buffer_draws > num_draws:
        cut = partial(first_draws, count=num_draws)
        found.add("cut of draws", cut, buffers, beside=(DATA, SET_UP))
    num_small = 1  # the log density
    for name, leaf in named_leaves(buffers[0], is_leaf=is_row_values).items():
        if is_row_values(leaf):
            leaf, rows = leaf.values, leaf.rows
            if rows.num_rows < rows.num_padded:
                continue  # Without its pad it is on the host.
        num_columns = math.prod(leaf.shape[2:])
        if num_columns <= SMALL_LEAF:
            num_small += num_columns
            continue
        shape = (leaf.shape[0], num_draws, *leaf.shape[2:])
        _add_statistics(found, name, jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding))
        found.parts.add(f"summary of {name}")
    shape = (settings.num_chains, num_draws, num_small)
    _add_statistics(found, "small leaves", jax.ShapeDtypeStruct(shape, jnp.result_type(float)))


def _add_statistics(found: RunPrograms, name: str, draws: jax.ShapeDtypeStruct) -> None:
    shards = None if draws.sharding is None else shards_of(draws)
    found.add(f"summary of {name}", partial(_statistics, shards), draws, beside=(DATA, SET_UP, BUFFERS))


def _statistics(shards: tuple[int, ...] | None, draws: jax.Array) -> PyTree:
    return apply_to_columns(draws, column_statistics, (), COPIES, shards)
