"""The suite runs on 8 virtual CPU devices; rank promotion and warnings are errors.

Compiling is most of what tests take, so LLVM optimises nothing (``jax_disable_most_optimizations``).
XLA's own passes run as ever: the HLO that tests read, its collectives and its memory, is what a user
gets. Machine code is not, so tests that ask for equal bits, or for sums that a compiler might rewrite,
are compiled as a user's programs are: whole files by `AS_A_USERS`, single tests by the fixture
``compiled_as_a_users``.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# TwoSum; random bits and samples of other programs.
AS_A_USERS = ("test_energy", "test_positional", "test_sharded")

# Files whose tests run whole demos or many chains: begun first, so that no process ends long after
# the other.
LONG = (
    *("test_readme", "test_demos", "test_from_numpyro", "test_local_latents", "test_plan_a_pod"),
    *("test_neural_network", "test_mesh_equivalence", "test_sharded_distributions", "test_sample"),
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG)


def pytest_collection_finish():
    """Keep what was imported, hundreds of thousands of objects, out of each full garbage collection."""
    gc.collect()
    gc.freeze()


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
    """Give ``run(name, out, *options)``: a demo with --quick in a process of its own, as strict."""

    def run(name: str, out: Path, *options: str) -> subprocess.CompletedProcess:
        demo = Path(__file__).resolve().parent.parent / "demos" / f"{name}.py"
        command = [sys.executable, "-W", "error", str(demo), "--quick", "--out", str(out), *options]
        strict = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise"}
        return subprocess.run(command, capture_output=True, text=True, env=strict, timeout=300)

    return run
