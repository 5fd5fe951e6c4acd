"""The suite runs on 8 virtual CPU devices; rank promotion and warnings are errors.

Compiling is most of what tests take, so LLVM optimises nothing (``jax_disable_most_optimizations``),
fusions become machine code by XLA's older way, which takes half the time, and by one thread; so too in
processes that tests begin, but that LLVM optimises the README's, which run for longer. XLA's passes up
to fusion run as ever: the collectives that tests count are those that a user gets. Machine code is not,
nor is each fusion, so tests that ask for equal bits, for sums that a compiler might rewrite or for the
text of programs are compiled as a user's programs are: whole files by `AS_A_USERS`, single tests by the
fixture ``compiled_as_a_users``.
"""

import functools
import gc
import itertools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

try:
    from jax._src import compiler
except ImportError:  # then programs of tests are compiled as a user's
    compiler: Any = None

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# TwoSum; random bits and samples of other programs; every kind of line that the compiler writes.
AS_A_USERS = ("test_energy", "test_positional", "test_sharded", "test_installed_hlo")

AS_A_USERS_PROCESS = dict(os.environ)  # the variables of one

# The slowest files, the slowest first: begun in this order, so that both processes end together. The
# summary of a run of many files tells how long each took.
LONG = (
    *("test_from_numpyro_groups", "test_from_numpyro", "test_demos", "test_groups"),
    *("test_commands", "test_chance"),
    *("test_processes", "test_readme", "test_resume", "test_checkpoints_everywhere"),
    *("test_local_latents", "test_kernel_contract"),
    *("test_stuck_chains", "test_sample", "test_survival", "test_tfp", "test_explicit_mesh"),
    *("test_warmup", "test_groups_seen", "test_bad_input", "test_linear", "test_plan"),
    *("test_isokinetic", "test_first_hour", "test_sinks", "test_first_call_benchmark"),
    *("test_plan_sample", "test_supports", "test_from_numpyro_users", "test_lookup"),
    *("test_neural_network", "test_invariance", "test_validation", "test_from_numpyro_errors"),
    *("test_integrator", "test_chees", "test_metrics", "test_sharded_distributions", "test_energy"),
    *("test_flat_latents", "test_joint", "test_coming_from", "test_calibration", "test_resolution"),
    *("test_retracing", "test_mesh_equivalence", "test_plan_a_pod", "test_architecture"),
    *("test_outside_kernel", "test_tables", "test_sharded", "test_plots", "test_diagnostics_layout"),
)
LEAST_SECONDS = 10.0


def pytest_collection_modifyitems(items):
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONG)))


def pytest_terminal_summary(terminalreporter):
    """Print the seconds of each slow file, to keep `LONG` right."""
    seconds = defaultdict(float)
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[Path(report.nodeid.split("::")[0]).stem] += report.duration
    if len(seconds) > 1:
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        slow = [f"{name} {s:.0f}" for name, s in ordered if s > LEAST_SECONDS]
        terminalreporter.write_line(f"slow files, seconds: {', '.join(slow) or 'none'}")


QUICKLY = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"}


@functools.cache
def has_options() -> bool:
    """Whether this JAX lets XLA be told `QUICKLY`; XLA may drop an option."""
    try:
        jax.jit(jnp.sin, compiler_options=QUICKLY).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return callable(getattr(compiler, "get_compile_options", None))


def pytest_collection_finish():
    """Set processes up that tests begin; what this one holds is left out of garbage collections."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
    if has_options():  # an unknown flag ends a process; this one has read its own by now
        flags = (f"--{name}={str(value).lower()}" for name, value in QUICKLY.items())
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *flags))
    gc.collect()
    gc.freeze()  # hundreds of thousands of objects that were imported
    gc.set_threshold(100_000, 50, 100)  # JAX makes many objects as it traces, and few are in cycles


@pytest.fixture(autouse=True, scope="session")
def _quick_options():
    """Give XLA its options wherever LLVM optimises nothing."""

    inner: Any = getattr(compiler, "get_compile_options", None)

    def options(*args, env_options_overrides=None, **named):
        chosen = QUICKLY if jax.config.read("jax_disable_most_optimizations") else {}
        return inner(*args, env_options_overrides=chosen | (env_options_overrides or {}), **named)

    with pytest.MonkeyPatch.context() as patch:
        if has_options():
            patch.setattr(compiler, "get_compile_options", options)
        yield


@contextmanager
def compiling(quickly: bool) -> Iterator[None]:
    """Compile so from here on; no program that was compiled before is used, or kept.

    A process that holds thousands of programs runs out of memory maps.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quickly)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _compiled_by_module(request):
    with compiling(quickly=request.path.stem not in AS_A_USERS):
        yield


@pytest.fixture
def compiled_as_a_users():
    with compiling(quickly=False):
        yield


@pytest.fixture(scope="session")
def run_quick_demo():
    """Give ``run(name, out, *options)``: a demo with --quick in a process of its own, offline."""

    def run(
        name: str, out: Path, *options: str, as_a_users: bool = False, is_strict: bool = True
    ) -> subprocess.CompletedProcess:
        demo = Path(__file__).resolve().parent.parent / "demos" / f"{name}.py"
        command = [sys.executable, str(demo), "--quick", "--out", str(out), *options]
        environment = dict(AS_A_USERS_PROCESS if as_a_users else os.environ)
        environment.pop("GSPMD_MCMC_DATA", None)
        # Nothing listens there: the mirrors are out of reach, and the offline default is used.
        environment |= dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
        environment |= {"XDG_CACHE_HOME": str(out / "cache")}
        if is_strict:
            command[1:1] = ["-W", "error"]
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    return run


@pytest.fixture
def compiled():
    """Names of the programs compiled since."""
    names = []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)
