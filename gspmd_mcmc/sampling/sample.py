"""One call from a target to draws."""

import os
import warnings
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.errors import CALLER_OF_SAMPLE, SamplingWarning, answers
from gspmd_mcmc.jax_private import forgetting_donations
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.processes import spans_processes
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.layout import Layout, read_layout
from gspmd_mcmc.placement.mesh import auto_mesh
from gspmd_mcmc.placement.padding import refuse_padded
from gspmd_mcmc.sampling import defaults, identity, resumption
from gspmd_mcmc.sampling import start as starts
from gspmd_mcmc.sampling.memory import explained
from gspmd_mcmc.sampling.mode import Mode
from gspmd_mcmc.sampling.reporting import (
    ChunkReport,
    Report,
    warn_of_devices,
    warn_of_run,
)
from gspmd_mcmc.sampling.run import Plan, Run
from gspmd_mcmc.sampling.run_state import keep_position
from gspmd_mcmc.storage.draws import Draws
from gspmd_mcmc.storage.paths import local_path
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.targets import checks, independence
from gspmd_mcmc.targets.function import as_partial, changes, traced_with
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, path_str


def _is_count(least: int) -> tuple[type[Exception], Callable[[Any], bool], str]:
    def holds(x: Any) -> bool:
        return isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least

    return ValueError, holds, f"an integer of at least {least}"


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and float(x) >= 0


# Of each argument the error to raise, what holds of a good value, and what is expected.
ARGUMENTS: dict[str, tuple[type[Exception], Callable[[Any], bool], str]] = {
    "num_chains": _is_count(1),
    "num_warmup": _is_count(0),
    "num_samples": _is_count(0),
    "thin": _is_count(1),
    "every": (ValueError, _is_number, "a number of seconds"),
    "device_bytes": (ValueError, lambda x: x is None or _is_number(x), "a number of bytes or None"),
    "target_acceptance_rate": (
        *(ValueError, lambda x: x is None or _is_number(x)),
        "a number between 0 and 1, or None",
    ),
    "checkpoint": (
        *(TypeError, lambda x: x is None or isinstance(x, str | os.PathLike)),
        "the path of a folder",
    ),
    # A text would be true.
    "progress": (TypeError, lambda x: isinstance(x, bool), "True or False"),
    "callback": (TypeError, lambda x: x is None or callable(x), "a function"),
    "collect": (TypeError, callable, "a function"),
}


def check_arguments(given: dict[str, Any]) -> None:
    """Raise unless arguments by name are what `ARGUMENTS` says."""
    for name, value in given.items():
        if name in ARGUMENTS and not ARGUMENTS[name][1](value):
            error, _, expected = ARGUMENTS[name]
            raise error(f"{name}: expected {expected}, got {value!r}")


@answers(
    "Call it as sample(rng_key, target, initial_position, num_warmup=500, num_samples=1000)",
    chain_method="chains are laid over the mesh's axis chains, or vmapped; see make_mesh(chains=2)",
    current_state="it is initial_position, the third argument",
    extra_fields="draws.stats has them all",
    init_params="it is initial_position, the third argument",
    num_burnin_steps="it is num_warmup= here, steps that also tune the kernel",
    num_results="it is num_samples= here, draws of each chain",
    num_steps_between_results="it is thin= here, the steps of each draw: one more than TFP's",
    seed="the key comes first here",
    thinning="it is thin= here",
    trace_fn="it is collect= here, a function of params and info",
)
@on_any_mesh
def sample(
    rng_key: jax.Array,
    target: Target,
    initial_position: PyTree = None,
    *,
    mesh: Mesh | None = None,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    thin: int = 1,
    kernel: Kernel | None = None,
    warmup: Adaptation | None = None,
    target_acceptance_rate: float | None = None,
    max_tree_depth: int | None = None,
    metric: Any = None,
    collect: Callable = keep_position,
    to: Sink | None = None,
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
        One of: None, for a target that knows the shapes of its latents (`from_numpyro`), to start
        around its origin; a position without a chain axis, which is spread by uniform jitter in
        (-2, 2) per chain (`uniform_start` has other radii); a position whose leaves have a leading
        axis of chains, used as it is (`per_chain` says so where both could be meant); a function
        ``rng_key -> position``, called per chain (`prior_start`, `Mode.laplace_start`); a `Mode`, where
        all chains start; `Draws`, which the run continues. Drawn starts are retried until the log
        density is finite.
    mesh
        The mesh; chains lie over its axis ``"chains"`` where it has one. None: the mesh that the
        target's data lie on, or one device.
    num_chains, num_warmup, num_samples
        The number of chains, of warm-up steps, and of draws to keep of each chain.
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
        `Dense`, ...). If you pass a warm-up, set them there.
    max_tree_depth
        Setting of the default `NUTS`, 10: a trajectory has at most 2^max_tree_depth - 1 leapfrogs. If
        you pass a kernel, set it there.
    collect
        ``collect(params, info)`` of one chain: what to keep instead of the parameters. A function at
        module level, or a ``Partial`` of one, whose arrays, such as data laid over the mesh, enter the
        program as arguments. Parameters that it returns as they are have the layout of the position
        and the labels of its groups. Values that it computes are whole on each device.
    to
        A `ZarrSink` that draws are written to as they are made; the result reads them from there.
        Without one they are kept in memory.
    device_bytes
        Bytes for draws on each device; beyond it, finished chunks move to the host. A quarter of the
        device's memory by default, no bound on a CPU.
    checkpoint
        A folder to save the run in, warm-up included. If it holds this run already, the run continues
        from there: a script that was killed and is run again makes the draws that it would have made,
        to the bit on a mesh of the same shape, to rounding on another. For more draws, call with a
        greater ``num_samples``. Another model, key or settings are refused. Draws go to a `ZarrSink` in
        it, unless ``to`` names another. Checkpoints are written in the background. Needs the extra
        ``checkpoint``.
    every
        Seconds from one checkpoint to the next.
    progress
        Whether to show progress on standard error: a bar on a terminal and in a notebook, elsewhere a
        line a minute. Of several processes, process 0 shows it.
    callback
        Called with a `ChunkReport` after each chunk, on every process; `JSONLines` writes them to a
        file. If it returns False, or raises `StopIteration` or `KeyboardInterrupt`, the run stops, and
        the draws made so far are returned. After another error a warning has its text, the run goes on,
        and it is not called again. `SystemExit` and its like end the run: the error's note has the
        place of the draws. The logger ``gspmd_mcmc``
        records phases, and at level DEBUG chunks.

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
        If the sink cannot write: before anything is computed if its folder cannot be used, else soon
        after the failure. Draws that are on disk stay.
    CheckpointNotSaved
        If the run cannot be saved at its start, or another live process writes to the folder. A later
        failure to save is a warning, and the run continues.
    Preempted
        After SIGTERM, if the run has checkpoints: it is saved first.
    OutOfDeviceMemory
        If the run's arrays do not fit on the devices; the message names the largest.
    ProcessesDisagree
        If the processes of a run are given different arguments; before anything is computed.
    ProcessLost
        If another process of the run has ended.
    """
    checks.check_outside_programs("sample", (rng_key, target, initial_position, kernel))
    counts = {"num_chains": num_chains, "num_warmup": num_warmup, "num_samples": num_samples}
    counts["thin"] = thin
    observers = {"progress": progress, "callback": callback}
    settings = {"device_bytes": device_bytes, "every": every, "checkpoint": checkpoint}
    tuning = {"target_acceptance_rate": target_acceptance_rate, "metric": metric}
    given = counts | observers | settings | tuning | {"collect": collect}
    check_arguments(given)
    counts = {name: int(count) for name, count in counts.items()}
    num_chains, num_warmup, num_samples, _ = counts.values()
    if to is not None:
        checks.require_kind("to", to, Sink, 'ZarrSink("draws.zarr")')
    _check_key(rng_key)
    mesh = _common_mesh(mesh, target)
    earlier = initial_position if isinstance(initial_position, Draws) else None
    if earlier is not None:
        _check_can_continue(earlier, target, kernel, num_chains)
        kernel = earlier.kernel
    kernel = defaults.chosen_kernel(kernel, target, num_chains, max_tree_depth)
    adaptation = defaults.chosen_warmup(warmup, kernel, num_warmup, tuning)
    initial_position = _origin(target) if initial_position is None else initial_position
    collect = as_partial(collect)
    refuse_padded(collect, "collect", "bind its .values, and leave the last rows out of sums")
    is_multiprocess = spans_processes(mesh)
    if mesh is not None and is_multiprocess:
        given = {"initial_position": initial_position, "kernel": kernel, "warmup": adaptation}
        settings |= counts | {"rng_key": rng_key, "to": repr(to), "metric": repr(metric)}
        settings["checkpoint"] = str(checkpoint)
        # A folder of one machine that the others do not share is no place for a run.
        settings["there is such a folder"] = (
            checkpoint is not None and local_path("checkpoint", checkpoint).is_dir()
        )
        given["collect"] = collect
        identity.require_same_on_processes("sample", mesh, target, given, settings)
    warn_of_devices(target)
    with (
        jax.numpy_dtype_promotion("standard"),  # ours rely on it; a user's may be strict
        forgetting_donations(),
        traced_with(kernel, adaptation),
        explained(target) as known,
        resumption.opened(checkpoint, to) as (checkpoints, sink),
    ):
        layout, states = _start(kernel, rng_key, initial_position, mesh, num_chains)
        independence.check_rows(target, states.position, chain=0)
        if earlier is None:
            starts.warn_of_flat_latents(target, states, layout)
        if isinstance(initial_position, Mode):
            adaptation = adaptation.from_mode()
        adaptation = defaults.with_metric(adaptation, kernel, layout)
        plan = Plan(rng_key, adaptation, collect, device_bytes, **counts)
        facts = {} if checkpoints is None else identity.facts_of_run(plan, kernel, layout)
        about = {} if sink is None else identity.attributes_of(plan, kernel, mesh)
        run = known.run = Run(plan, kernel, states, layout, earlier, sink, about)
        del states  # The run has its own.
        is_shown = progress and not (is_multiprocess and jax.process_index())
        report = Report(is_shown=is_shown, callback=callback)
        with resumption.supervised(run, checkpoints, facts, every, report) as supervision:
            draws = run.go(*supervision)
        keeps_positions = collect.func is keep_position
        warn_of_run(draws, num_samples, keeps_positions=keeps_positions, is_stopped=report.is_stopped)
    return draws


def _check_key(rng_key: jax.Array) -> None:
    """Raise unless this is one typed key; warn of one whose draws depend on the mesh."""
    checks.check_key(rng_key)
    if "fry" not in str(jax.random.key_impl(rng_key)):
        warnings.warn(
            f"rng_key is of kind {jax.random.key_impl(rng_key)}: only threefry keys give the same "
            "chain on every mesh",
            SamplingWarning,
            stacklevel=CALLER_OF_SAMPLE,
        )


def _common_mesh(mesh: Mesh | None, target: Target) -> Mesh | None:
    """Return the mesh given, or the one that the target's data lie on; raise if those differ."""
    mesh = None if mesh is None else auto_mesh("mesh", mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(target):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if mesh is not None and sharding.mesh != mesh:
                raise ValueError(
                    f"mesh: the target's data {path_str(path)} lie on {sharding.mesh}, got {mesh}; "
                    "place the data on the mesh that chains are to be sampled on"
                )
            return sharding.mesh
    return mesh


def _start(
    kernel: Kernel, rng_key: jax.Array, initial: Any, mesh: Mesh | None, num_chains: int
) -> tuple[Layout, Any]:
    """Return the layout, and the states of all chains."""
    if not isinstance(initial, Draws):
        return starts.start(kernel, rng_key, initial, mesh, num_chains)
    states = initial.state
    layout = read_layout(mesh, kernel.target, states.position, num_chains, has_chains=True)
    anew = resumption.recomputed_states(kernel, states, layout)
    what = "initial_position: these draws cannot be continued"
    resumption.require_same_density(what, states, anew)
    return layout, states


def _origin(target: Target) -> PyTree:
    if not target.latents:
        raise ValueError(
            "initial_position: expected a tree with at least one array, got None; this target's "
            "functions do not tell the shapes of its latents"
        )
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in target.latents}


def _check_can_continue(draws: Draws, target: Target, kernel: Kernel | None, num_chains: int) -> None:
    """Raise unless a run can continue earlier draws as they are."""
    if draws.kernel is None:
        raise ValueError(
            "initial_position: draws that were read from disk hold no kernel and no state; start at a "
            "position, or continue what `sample` returned"
        )
    if draws.kernel.target is None:
        raise ValueError(
            "initial_position: these draws were pickled without their target, which has no pickle. To "
            "start where they ended, pass gspmd_mcmc.per_chain(draws.state.position). To continue a "
            "run in another process, give sample a checkpoint="
        )
    if kernel is not None:
        raise ValueError("kernel: draws are continued with their own kernel; leave it out")
    anew = "To start where they ended, pass gspmd_mcmc.per_chain(draws.state.position)"
    if draws.kernel.target is not target:
        raise ValueError(f"initial_position: these draws are of another target. {anew}")
    now = jnp.zeros(()).dtype
    if (computed := draws.state.log_density.dtype) != now:
        raise ValueError(
            f"initial_position: the run was computed in {computed}, and JAX now computes in {now}: "
            "jax_enable_x64 was switched since. Set it as it was; or begin another run where this one "
            "ended, with a target built anew and "
            "gspmd_mcmc.per_chain(jax.tree.map(numpy.asarray, draws.state.position))"
        )
    if what := changes(draws.meanings):
        raise ValueError(
            "initial_position: the target is not what it was when these draws were made "
            f"({what}). {anew}"
        )
    if draws.num_chains != num_chains:
        raise ValueError(
            f"num_chains: the draws to continue have {draws.num_chains} chains, got {num_chains}"
        )
