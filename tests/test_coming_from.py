"""docs/coming_from.md: lines of other libraries beside ours, in one process, with equal densities."""

import ast
import importlib
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming_from.md").read_text()
BLOCK = re.compile(r"^```python ?(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEAD, *SECTIONS = PAGE.split("\n## ")
PEERS = {section.splitlines()[0]: section for section in SECTIONS}


def module_of(name: str) -> Any:
    """The library, or None where it is not installed; other libraries warn as they are imported."""
    names = {"tfp": "tensorflow_probability.substrates.jax"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(names.get(name, name))
        except ImportError:
            return None


@pytest.mark.parametrize("peer", PEERS)
def test_blocks_run_and_have_equal_log_densities(peer):
    names, compared, others = {}, 0, []
    for library, code in BLOCK.findall(HEAD + PEERS[peer]):
        if library and module_of(library) is None:
            others.append(library)
            continue
        with warnings.catch_warnings(), jax.numpy_rank_promotion("allow" if library else "raise"):
            if library:
                warnings.simplefilter("ignore")
            exec(compile(code, f"coming_from.md, {peer}", "exec"), names)
        if "ours" in names:
            assert np.isfinite(ours := names.pop("ours"))
            if "theirs" in names:
                np.testing.assert_allclose(ours, names["theirs"], rtol=1e-5)
            compared += 1
    assert compared


# The tables: names, and arguments that are taken

ROW = re.compile(r"^\| (.*) \| (.*) \|$", re.MULTILINE)
KEY = jax.random.key(0)
KNOWN: dict[str, Any] = {"gm": gm, "jax": jax, "jnp": jnp, "np": np}
LINES = sorted({line for _, here in ROW.findall(PAGE) for line in re.findall(r"`([^`]+)`", here)})
LINES = [line for line in LINES if "gm." in line]


def calls_of(line: str, known: dict[str, Any]):
    """Functions of libraries that a line calls, with the call; names alone are looked up."""
    try:
        parsed = ast.parse(line)
    except SyntaxError:  # some arguments
        parsed = ast.parse(f"f({line})")
    for node in ast.walk(parsed):
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute) and ast.unparse(function).split(".")[0] in known:
            yield eval(ast.unparse(function), known), node


def check_arguments(function: Any, call: ast.Call) -> None:
    given = [ast.unparse(argument) for argument in call.args if ast.unparse(argument) != "..."]
    signature = inspect.signature(function)
    bind = signature.bind if len(given) == len(call.args) else signature.bind_partial
    bind(*given, **{str(keyword.arg): None for keyword in call.keywords})


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_table_takes_its_arguments(line):
    for function, node in calls_of(line, KNOWN):
        if isinstance(node, ast.Call):
            check_arguments(function, node)


@pytest.mark.parametrize("line", ["gm.NUTS(target, 0.1, max_depth=3)", "gm.sample(key)", "gm.Nuts"])
def test_a_line_that_is_wrong_would_be_seen(line):
    with pytest.raises((TypeError, AttributeError)):
        for function, node in calls_of(line, KNOWN):
            if isinstance(node, ast.Call):
                check_arguments(function, node)


@pytest.mark.parametrize(
    ("function", "given", "cure"),
    [
        (gm.sample, {"num_results": 10, "seed": KEY}, "sample: num_results=: it is num_samples= here"),
        (gm.sample, {"num_burnin_steps": 5}, "num_burnin_steps=: it is num_warmup= here"),
        (gm.sample, {"trace_fn": print}, "it is collect= here"),
        (gm.sample, {"thinning": 2}, "it is thin= here"),
        (gm.sample, {"draws": 5, "target": None, "rng_key": KEY}, "'draws'. Call it as sample"),
        (gm.NUTS, {"max_num_doublings": 5}, "NUTS: max_num_doublings=: it is max_tree_depth= here"),
        (gm.MCLMC, {"L": 1.0, "step_size": 0.1}, "MCLMC: L=: it is trajectory_length= here"),
    ],
)
def test_arguments_of_other_libraries_are_answered(function, given, cure):
    with pytest.raises(TypeError, match=cure):
        function(**given)
