"""One call from a target to draws."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.functions.function import as_partial, changes, traced_with
from gspmd_mcmc.functions.modules import is_module
from gspmd_mcmc.multihost.processes import spans_processes
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.layout import Layout, read_layout
from gspmd_mcmc.sampling import arguments, defaults, identity, resumption
from gspmd_mcmc.sampling import start as starts
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.flat_latents import warn_of_flat_latents
from gspmd_mcmc.sampling.memory import explained
from gspmd_mcmc.sampling.mode import Mode
from gspmd_mcmc.sampling.reporting import ChunkReport
from gspmd_mcmc.sampling.run import Plan, Run
from gspmd_mcmc.sampling.run_state import keep_position
from gspmd_mcmc.sampling.warnings_of_runs import warn_of, warn_of_small_data
from gspmd_mcmc.storage.attributes import attributes_of
from gspmd_mcmc.storage.zarr_store import ZarrSink
from gspmd_mcmc.targets import checks, independence
from gspmd_mcmc.targets.local import lay_out
from gspmd_mcmc.tree import PyTree

LEAST = {"num_chains": 1, "num_warmup": 0, "num_samples": 0, "thin": 1}


@on_any_mesh
def sample(
    rng_key: jax.Array,
    target: Any,
    initial_position: PyTree = None,
    *,
    mesh: Mesh | None = None,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    thin: int = 1,
    kernel: Any = None,
    warmup: Adaptation | None = None,
    target_acceptance_rate: float | None = None,
    max_tree_depth: int | None = None,
    metric: Any = None,
    collect: Callable = keep_position,
    to: ZarrSink | None = None,
    device_bytes: int | None = None,
    checkpoint: str | Path | None = None,
    every: float = 60.0,
    progress: bool = True,
    callback: Callable[[ChunkReport], Any] | None = None,
) -> Draws:
    """Sample a target: start the chains, tune the kernel, draw.

    Parameters
    ----------
    rng_key
        A typed key, ``jax.random.key(seed)``. Step i draws from ``fold_in(key, i)`` and the chain's
        number, so that neither the mesh nor the size of chunks changes the draws.
    target
        A `Posterior` or `LogDensity`.
    initial_position
        None for a target that tells the shapes of its latents (`from_numpyro`): around its origin. Or
        one of: a position without a chain axis, which is spread by uniform jitter in (-2, 2) per
        chain (`uniform_start` has other radii); one whose leaves have a leading axis of chains, used
        as it is (`per_chain` says so where both could be meant); a function ``rng_key -> position``,
        called per chain (draws from a prior, `Mode.laplace_start`); a `Mode`, at which all chains
        start; `Draws`, from which the run goes on. Drawn starts are retried until the log density is
        finite.
    mesh
        The mesh; chains lie over its axis ``"chains"`` where it has one. None: the mesh that the
        target's data lie on, or one device.
    num_chains, num_warmup, num_samples
        Chains; steps of warm-up; draws to keep of each chain.
    thin
        Steps from one kept draw to the next: after warm-up the run takes ``num_samples * thin``.
    kernel
        A kernel on the same target. By default `NUTS` below 32 chains, and from 32 a `JitteredHMC`,
        whose trajectory length the chains tune together.
    warmup
        How the kernel is tuned. By default `WindowAdaptation` for `HMC` and `NUTS`, `SNAPERAdaptation`
        for `JitteredHMC`, `MAMSAdaptation` and `MCLMCAdaptation` for theirs; where it names no kind of
        metric, dense for a position of at most a hundred numbers that is whole on every device, else
        diagonal.
    target_acceptance_rate, metric
        Settings of that default warm-up: the acceptance rate that the step size aims at, 0.8 for
        `NUTS` (higher: shorter steps, fewer divergences), and the kind of metric (`Diagonal`,
        `Dense`, ...). A warm-up that is given has its own.
    max_tree_depth
        Of the default `NUTS`, 10: at most 2^max_tree_depth - 1 leapfrogs a trajectory. A kernel that
        is given has its own.
    collect
        ``collect(position, info)`` of one chain: what to keep instead of the position. A function at
        module level, or a ``Partial`` of one whose arrays enter the program as arguments.
    to
        Where draws are written as they are made, `ZarrSink`; the result then reads them from there.
        Without one they are kept in memory.
    device_bytes
        Bytes on each device for draws; finished chunks move to the host beyond it. A quarter of the
        device's memory by default, no bound on a CPU.
    checkpoint
        A folder to save the run in, warm-up too. Where it holds this run already, the run continues
        from there: a script that is run again after it was killed makes the draws that it would have
        made, to the bit on a mesh of the same shape, to rounding on another. For more draws call with a
        greater ``num_samples``. Another model, key or settings are refused. Draws go to a `ZarrSink` in
        it, unless ``to`` names another. Checkpoints are written while the run goes on. Needs the extra
        ``checkpoint``.
    every
        Seconds from one checkpoint to the next.
    progress
        Whether to show progress, on standard error: a bar on a terminal and in a notebook, elsewhere a
        line a minute; of several processes, that of process 0.
    callback
        Called with a `ChunkReport` after each chunk, on every process; `JSONLines` writes them to a
        file. One that raises is called no more, with a warning. The logger ``gspmd_mcmc`` tells of
        phases, and at level DEBUG of chunks.

    Returns
    -------
    Draws
        After Ctrl-C, the draws made so far; a second Ctrl-C raises. `SavedDraws` with a sink.

    Raises
    ------
    ValueError, TypeError
        For counts, keys, meshes or positions that do not fit, or a folder of checkpoints that holds
        another run; the message says what was expected, or what differs.
    NonFiniteStart
        If a chain finds no start with a finite log density.
    DrawsNotSaved
        If the sink cannot write: before anything is computed where its folder cannot be used, else
        soon after; draws that are on disk stay.
    CheckpointNotSaved
        If the run cannot be saved at its start, or another process that lives writes to the folder. One
        that cannot be saved later warns, and goes on.
    Preempted
        After SIGTERM, if the run has checkpoints: it is saved first.
    OutOfDeviceMemory
        If the run's arrays do not fit on the devices; the message names the largest.
    ProcessesDisagree
        If the processes of a run on several are given different things; before anything is computed.
    ProcessLost
        If another process of the run has ended.
    """
    checks.check_outside_programs("sample", (rng_key, target, initial_position, kernel))
    counts = {"num_chains": num_chains, "num_warmup": num_warmup, "num_samples": num_samples}
    counts["thin"] = thin
    arguments.check_counts(LEAST, counts)
    counts = {name: int(count) for name, count in counts.items()}
    num_chains, num_warmup, num_samples, thin = counts.values()
    arguments.check_number("every", every, "of seconds")
    if device_bytes is not None:
        arguments.check_number("device_bytes", device_bytes, "of bytes or None")
    if target_acceptance_rate is not None:
        rate = "between 0 and 1, or None"
        arguments.check_number("target_acceptance_rate", target_acceptance_rate, rate)
    if checkpoint is not None:
        arguments.check_path("checkpoint", checkpoint)
    arguments.check_observers(progress, callback)
    if to is not None:
        checks.require_instance("to", to, ("reserve", "check"), 'ZarrSink("draws.zarr")')
    arguments.check_key(rng_key)
    mesh = arguments.common_mesh(mesh, target)
    earlier = initial_position if isinstance(initial_position, Draws) else None
    if earlier is not None:
        _check_goes_on(earlier, target, kernel, num_chains)
        kernel = earlier.kernel
    kernel = defaults.chosen_kernel(kernel, target, num_chains, max_tree_depth)
    arguments.check_precision(kernel)
    tuning = {"target_acceptance_rate": target_acceptance_rate, "metric": metric}
    adaptation = defaults.chosen_warmup(warmup, kernel, num_warmup, tuning)
    initial_position = _origin(target) if initial_position is None else initial_position

    if not callable(collect):
        raise TypeError(f"collect: expected a function, got {type(collect).__name__}")
    collect = as_partial(collect)
    if mesh is not None and spans_processes(mesh):
        given = {"initial_position": initial_position, "kernel": kernel, "warmup": adaptation}
        settings = counts | {"rng_key": rng_key, "device_bytes": device_bytes, "every": every}
        settings |= {"to": repr(to), "checkpoint": str(checkpoint), "metric": repr(metric)}
        # A folder of one machine that the others do not share is no place for a run.
        settings["there is such a folder"] = checkpoint is not None and Path(checkpoint).is_dir()
        given |= {"collect": collect}
        identity.require_same_on_processes("sample", mesh, target, given, settings)
    warn_of_small_data(target)
    start_key, step_key = jax.random.split(rng_key)
    with (
        jax.numpy_dtype_promotion("standard"),  # ours rely on it; a user's may be strict
        traced_with(kernel, adaptation),
        explained(target) as known,
        resumption.opened(checkpoint) as checkpoints,
        resumption.reserved(to, checkpoints) as sink,
    ):
        layout, states = _start(kernel, start_key, initial_position, mesh, num_chains)
        independence.check_rows(target, states.position, chain=0)
        if earlier is None:
            warn_of_flat_latents(target, states, layout)
        if isinstance(initial_position, Mode):
            adaptation = adaptation.from_mode()
        adaptation = defaults.with_metric(adaptation, kernel, layout)
        facts = identity.facts_of_run(rng_key, kernel, adaptation, collect, layout, counts)
        about = counts
        if sink is not None:
            about = attributes_of(rng_key, mesh, kernel, adaptation, collect, **counts)
        plan = Plan(adaptation, collect, num_warmup, num_samples, thin, device_bytes, about)
        first_step, moves = (earlier.num_steps, earlier.moves) if earlier else (0, ())
        run = known.run = Run(plan, kernel, states, step_key, first_step, layout, sink, moves)
        draws = resumption.carry_out(
            run, checkpoints, facts, every, progress=progress, callback=callback
        )
        warn_of(draws, plan)
    return draws


def _start(
    kernel: Any, rng_key: jax.Array, initial: Any, mesh: Mesh | None, num_chains: int
) -> tuple[Layout, Any]:
    """Find what kind of start this is; return the layout, and the states in buffers of our own."""
    if isinstance(initial, Draws):
        states = starts.copied(initial.state)
        layout = read_layout(mesh, kernel.target, states.position, num_chains, has_chains=True)
        anew = resumption.evaluated_anew(kernel, states, layout)
        resumption.require_same_density(
            "initial_position: these draws cannot be gone on from", states, anew
        )
        return layout, states
    if isinstance(initial, Mode):
        initial = starts.uniform_start(initial.position, 0.0)
    if not callable(initial) or is_module(initial):
        return _start_from_position(kernel, rng_key, initial, mesh, num_chains)
    example = starts.example_of(initial, rng_key)
    checks.check_position(kernel.target, example)
    layout = read_layout(mesh, kernel.target, example, num_chains, has_chains=False)
    return layout, starts.start_chains(kernel, rng_key, initial, layout)


def _start_from_position(
    kernel: Any, rng_key: jax.Array, initial: Any, mesh: Mesh | None, num_chains: int
) -> tuple[Layout, Any]:
    is_marked = isinstance(initial, starts.PerChain)
    position = initial.position if is_marked else initial
    checks.check_position(kernel.target, position)
    if is_marked:
        starts.require_chain_axis(position, num_chains)
    elif not starts.has_chain_axis(kernel.target, position, num_chains):
        starts.require_accepted(kernel, position)
        start = starts.uniform_start(lay_out(kernel.target, position))
        return _start(kernel, rng_key, start, mesh, num_chains)
    layout = read_layout(mesh, kernel.target, position, num_chains, has_chains=True)
    states = starts.init_chains(kernel, position, layout=layout)
    starts.require_finite(kernel, states)
    return layout, states


def _origin(target: Any) -> PyTree:
    if not target.latents:
        raise ValueError(
            "initial_position: expected a tree with at least one array, got None; this target's "
            "functions do not tell the shapes of its latents"
        )
    return target.origin()


def _check_goes_on(draws: Draws, target: Any, kernel: Any, num_chains: int) -> None:
    """Raise unless earlier draws can be gone on from as they are."""
    if draws.kernel is None:
        raise ValueError(
            "initial_position: draws that were read from disk hold no kernel and no state; start at a "
            "position, or go on from what `sample` returned"
        )
    if kernel is not None:
        raise ValueError("kernel: draws are gone on from with their own kernel; leave it out")
    if draws.kernel.target is not target:
        raise ValueError(
            "initial_position: these draws are of another target. To start from where they ended, pass "
            "gspmd_mcmc.per_chain(draws.state.position)"
        )
    starts.require_same_precision("initial_position", draws.state.log_density)
    if what := changes(draws.meanings):
        raise ValueError(
            f"initial_position: the target is not what it was when these draws were made ({what}). To "
            "start from where they ended, pass gspmd_mcmc.per_chain(draws.state.position)"
        )
    if draws.num_chains != num_chains:
        raise ValueError(
            f"num_chains: the draws to go on from have {draws.num_chains} chains, got {num_chains}"
        )
