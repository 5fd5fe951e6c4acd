"""A JAX that is too old is refused when the package is imported."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from gspmd_mcmc.versions import OLDEST_JAX, require_jax

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("version", ["0.8.3", "0.4.30", "0.8.99.dev20260101"])
def test_an_old_jax_is_refused(version):
    with pytest.raises(ImportError, match=f"jax {version} is too old: gspmd_mcmc needs 0.9.0 or newer"):
        require_jax(version)


@pytest.mark.parametrize("version", [jax.__version__, "0.9.0", "0.10.2", "0.11.0.dev20261120", "1.0.0"])
def test_a_newer_jax_is_let_in(version):
    require_jax(version)


def test_the_package_asks_on_import():
    code = "import jax; jax.__version__ = '0.8.1'; import gspmd_mcmc"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "ImportError: jax 0.8.1 is too old" in done.stderr


def test_the_oldest_jax_is_that_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = ".".join(map(str, OLDEST_JAX))
    assert {f"jax>={oldest}", f"jaxlib>={oldest}"} <= set(project["dependencies"])


def test_what_the_oldest_jax_is_tried_with_exists():
    (quick,) = re.findall(r"^QUICK := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tests = [ROOT / "tests" / f"test_{name}.py" for name in quick.split()]
    assert len(tests) > 5 and [path for path in tests if not path.exists()] == []
