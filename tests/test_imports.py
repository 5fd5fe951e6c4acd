"""Imports run one way, from room to room and from module to module, and name what is declared."""

import ast
import graphlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gspmd_mcmc

PACKAGE = "gspmd_mcmc"
ROOT = Path(gspmd_mcmc.__file__).parent
BASE = {"versions", "errors", "extras", "tree", "jax_private"}
UP_TO_TARGETS = BASE | {"multihost", "placement", "groups", "functions", "targets"}
DOORS = {"models", "fused", "compat", "views", "planning"}
MAY_IMPORT = {
    **{"versions": set(), "errors": set(), "extras": set(), "tree": {"errors"}},
    "jax_private": {"errors"},
    "moments": {"tree"},
    "multihost": BASE,
    "placement": BASE | {"multihost"},
    "groups": BASE | {"multihost", "placement"},
    "values": {"tree"},
    "functions": {"tree", "values"},
    "targets": UP_TO_TARGETS,
    "kernels": {"tree", "errors", "targets"},
    "adaptation": {"tree", "errors", "moments", "targets", "kernels"},
    "diagnostics": UP_TO_TARGETS | {"moments"},
    "storage": UP_TO_TARGETS | {"kernels", "adaptation", "diagnostics"},
    "sampling": UP_TO_TARGETS | {"kernels", "adaptation", "diagnostics", "storage"},
}
CORE = set(MAY_IMPORT)
MAY_IMPORT |= {
    "models": UP_TO_TARGETS,
    "fused": UP_TO_TARGETS,
    "compat": BASE | {"placement", "groups"},
    "views": UP_TO_TARGETS | {"diagnostics", "compat"},
    "planning": CORE | {"views"},
}
# The doors' names load on first use.
MAY_IMPORT["__init__"] = CORE
DEPENDENCIES = {"jax", "jaxlib", "numpy", "matplotlib", "rich"}
OPTIONAL = {"optax", "orbax", "arviz_base", "arviz_stats", "xarray", "sklearn", "tensorstore", "zarr"}
OPTIONAL |= {"pyarrow", "pandas", "polars", "numpyro"}
# What takes long to import, with what it is for.
HEAVY = OPTIONAL | {"matplotlib", "rich", "jax.experimental.pallas", "jax._src.pallas"}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, but for what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from statements(child)


def imports_of(source, module):
    """Full names that a module may bind by imports at any depth, relative ones resolved."""
    found = []
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def layer_of(name):
    """Layer of a full name of ours: the part after the package; a name of its own if there is none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def bad_imports(source, module):
    ours = [n for n in imports_of(source, module) if n.split(".")[0] == PACKAGE]
    layer = layer_of(module)
    may = {layer, *MAY_IMPORT[layer]}
    return [n for n in ours if layer_of(n) not in may]


SOURCES = {
    ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]): path.read_text()
    for path in sorted(ROOT.rglob("*.py"))
}


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, or nothing."""
    named = {module.removesuffix(".__init__"): module for module in sources}
    graph = {}
    for module, source in sources.items():
        names = [n for n in imports_of(source, module) if n.split(".")[0] == PACKAGE]
        owners = (n if n in named else n.rpartition(".")[0] for n in names)
        graph[module] = {named[owner] for owner in owners if owner in named}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def third_party(source, module):
    roots = {name.split(".")[0] for name in imports_of(source, module)}
    return roots - set(sys.stdlib_module_names) - {PACKAGE}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_run_one_way_and_name_declared_dependencies(module):
    assert bad_imports(SOURCES[module], module) == []
    assert third_party(SOURCES[module], module) <= DEPENDENCIES


def test_no_modules_import_each_other_in_a_circle():
    assert circle(SOURCES) == []


@pytest.mark.parametrize("line", ["from gspmd_mcmc.b import g", "from gspmd_mcmc import b"])
def test_a_circle_is_found_also_below_functions_and_not_where_types_are_checked(line):
    ring = {
        f"{PACKAGE}.a": f"def f():\n    {line}",
        f"{PACKAGE}.b": "from gspmd_mcmc import c",
        f"{PACKAGE}.c": "from .a import f",
    }
    assert set(circle(ring)) == set(ring)
    ring[f"{PACKAGE}.a"] = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}"
    assert circle(ring) == []


def test_every_layer_has_modules_and_imports_the_one_below():
    """A resolver that saw no import at all would pass the tests above."""
    assert {layer_of(module) for module in SOURCES} == set(MAY_IMPORT)
    seen = {
        (layer_of(module), layer_of(name))
        for module, source in SOURCES.items()
        for name in imports_of(source, module)
        if name.startswith(f"{PACKAGE}.")
    }
    chain = ["tree", "multihost", "placement", "groups", "targets", "kernels", "adaptation"]
    chain += ["sampling"]
    assert {(high, low) for low, high in zip(chain, [*chain[1:], "__init__"], strict=True)} <= seen
    assert {("models", "targets"), ("sampling", "storage"), ("views", "diagnostics")} <= seen
    assert {("planning", "views"), ("fused", "targets"), ("compat", "groups")} <= seen


def test_the_core_imports_no_door():
    assert not any(DOORS & MAY_IMPORT[layer] for layer in (*CORE, "__init__"))
    assert set(MAY_IMPORT) == CORE | DOORS | {"__init__"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels.hmc", "from gspmd_mcmc.placement.mesh import make_mesh"),
        ("kernels.hmc", "import gspmd_mcmc.placement.place as p"),
        ("kernels.hmc", "from gspmd_mcmc import placement"),
        ("kernels.hmc", "from ..placement import place"),
        ("kernels.hmc", "from .. import placement"),
        ("kernels.hmc", "from gspmd_mcmc import sample"),
        ("kernels.hmc", "import gspmd_mcmc"),
        ("kernels.hmc", "def f():\n    from gspmd_mcmc.sampling.sample import sample"),
        ("adaptation.window", "from gspmd_mcmc.placement.padding import Padded"),
        ("targets.posterior", "from gspmd_mcmc.kernels import hmc"),
        ("placement.place", "from gspmd_mcmc.targets.streaming.rows import Rows"),
        ("tree", "from gspmd_mcmc.placement.padding import Padded"),
        ("errors", "from gspmd_mcmc import tree"),
        ("multihost.processes", "from gspmd_mcmc.placement.mesh import make_mesh"),
        ("targets.plate", "from gspmd_mcmc.models.sharded import Sharded"),
        ("views.communication", "from gspmd_mcmc.kernels.hmc import HMC"),
        ("diagnostics.ess", "from gspmd_mcmc.kernels.hmc import HMC"),
        ("adaptation.window", "from gspmd_mcmc.sampling.chunks import advance"),
        ("storage.zarr_store", "from gspmd_mcmc.sampling.run import Run"),
        ("targets.streaming.plate", "def f():\n    from gspmd_mcmc.fused.tracing import bodies"),
        ("sampling.reporting", "def f():\n    from gspmd_mcmc.planning.roofline import roofline"),
        ("sampling.sample", "from gspmd_mcmc.views.visualize import visualize"),
        ("placement.place", "from gspmd_mcmc.compat.positional import PositionalSharding"),
        ("placement.place", "from gspmd_mcmc.groups.groups import Groups"),
        ("__init__", "from gspmd_mcmc.models.numpyro import from_numpyro"),
    ],
)
def test_the_checker_rejects(module, line):
    assert bad_imports(f"import jax\n{line}\n", f"{PACKAGE}.{module}") != []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels.hmc", "from gspmd_mcmc import tree"),
        ("kernels.hmc", "from .. import tree"),
        ("kernels.hmc", "from .integrators import integrate"),
        ("sampling.sample", "from gspmd_mcmc.kernels.hmc import HMC"),
        ("multihost.processes", "from gspmd_mcmc.errors import Preempted"),
        ("sampling.run", "from gspmd_mcmc.storage.draws import Draws"),
        ("__init__", "from gspmd_mcmc.sampling.sample import sample"),
    ],
)
def test_the_checker_accepts(module, line):
    assert bad_imports(line, f"{PACKAGE}.{module}") == []


@pytest.mark.parametrize("init", [m for m in SOURCES if m.endswith(".__init__") and m.count(".") > 1])
def test_init_files_of_subpackages_import_nothing(init):
    assert imports_of(SOURCES[init], init) == []


def test_the_third_party_checker_sees_a_nested_import():
    assert third_party("def f():\n    import optax.tree_utils\n", "made.up") == {"optax"}


# Names of the package that a process reads, and what it may not load for them.
READ = {"none": ("", HEAVY), "all": ("[getattr(gspmd_mcmc, n) for n in gspmd_mcmc.__all__];", OPTIONAL)}


@pytest.mark.parametrize("names", READ)
def test_importing_the_package_starts_no_backend_and_loads_nothing_heavy(names):
    """A user sets the number of CPU devices, or joins processes, after the import."""
    reads, forbidden = READ[names]
    code = (
        f"import sys, gspmd_mcmc, jax; {reads} loaded = list(sys.modules);"
        "jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 3);"
        "print(jax.device_count(), *loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, *loaded = done.stdout.split()
    assert count == "3"
    assert "gspmd_mcmc.sampling.sample" in loaded
    assert ("gspmd_mcmc.planning.plan" in loaded) == (names == "all")
    assert forbidden & set(loaded) == set()


def test_all_public_names_resolve_once():
    assert len(set(gspmd_mcmc.__all__)) == len(gspmd_mcmc.__all__)
    assert [name for name in gspmd_mcmc.__all__ if not hasattr(gspmd_mcmc, name)] == []


def names_imported(body: list[ast.stmt]) -> dict[str, str]:
    """Names that statements import from the package, and where each is."""
    ours = [n for n in body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith(PACKAGE)]
    return {alias.name: f"{node.module}.{alias.name}" for node in ours for alias in node.names}


def test_what_the_package_imports_by_name_is_public():
    """At once, or on first use: then type checkers are told the same."""
    body = ast.parse(Path(gspmd_mcmc.__file__).read_text()).body
    (checked,) = (node for node in body if isinstance(node, ast.If))
    at_once, later = names_imported(body), names_imported(checked.body)
    assert ast.unparse(checked.test) == "TYPE_CHECKING" and not at_once.keys() & later.keys()
    assert at_once.keys() | later.keys() == set(gspmd_mcmc.__all__)
    on_first_use = gspmd_mcmc._ON_FIRST_USE.items()
    assert later == {name: f"{PACKAGE}.{where.replace(':', '.')}" for name, where in on_first_use}


@pytest.mark.parametrize("name", gspmd_mcmc._ON_FIRST_USE)
def test_a_name_loads_on_first_use(name, monkeypatch):
    monkeypatch.delattr(gspmd_mcmc, name, raising=False)
    assert name in dir(gspmd_mcmc)
    exec(f"from {PACKAGE} import {name}", given := {})
    found = getattr(gspmd_mcmc, name)
    assert given[name] is found and vars(gspmd_mcmc)[name] is found
    assert inspect.ismodule(found) or pickle.loads(pickle.dumps(found)) is found


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'gspmd_mcmc' has no attribute 'smaple'"):
        gspmd_mcmc.smaple  # noqa: B018
