"""The suite runs on 8 virtual CPU devices; rank promotion and warnings are errors."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


# Files whose tests run whole demos or many chains: begun first, so that no process ends long after
# the other.
LONG = (
    *("test_readme", "test_demos", "test_from_numpyro", "test_local_latents", "test_plan_a_pod"),
    *("test_neural_network", "test_mesh_equivalence", "test_sharded_distributions", "test_sample"),
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.fixture(scope="session")
def run_quick_demo():
    """Give ``run(name, out, *options)``: a demo with --quick in a process of its own, as strict."""

    def run(name: str, out: Path, *options: str) -> subprocess.CompletedProcess:
        demo = Path(__file__).resolve().parent.parent / "demos" / f"{name}.py"
        command = [sys.executable, "-W", "error", str(demo), "--quick", "--out", str(out), *options]
        strict = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUMPY_RANK_PROMOTION": "raise"}
        return subprocess.run(command, capture_output=True, text=True, env=strict, timeout=300)

    return run


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs():
    """Forget the programs of a module: a process that holds thousands runs out of memory maps."""
    yield
    jax.clear_caches()
