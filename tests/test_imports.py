"""Imports run one way: tree <- placement <- targets <- kernels <- adaptation <- sampling."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gspmd_mcmc

PACKAGE = "gspmd_mcmc"
ROOT = Path(gspmd_mcmc.__file__).parent
MAY_IMPORT = {
    "versions": set(),
    "tree": set(),
    "moments": {"tree"},
    "multihost": {"tree"},
    "placement": {"tree", "multihost"},
    "functions": {"tree", "placement"},
    "targets": {"tree", "multihost", "placement", "functions"},
    "models": {"tree", "multihost", "placement", "functions", "targets"},
    "kernels": {"tree", "targets"},
    "adaptation": {"tree", "moments", "targets", "kernels"},
    "diagnostics": {"tree", "moments", "multihost", "placement", "targets"},
    "views": {"tree", "multihost", "placement", "functions", "targets", "diagnostics"},
    "extras": set(),
    "storage": {
        "tree",
        "extras",
        "multihost",
        "placement",
        "targets",
        "adaptation",
        "diagnostics",
        "sampling.draws",
    },
    "sampling": {
        "tree",
        "extras",
        "multihost",
        "placement",
        "functions",
        "targets",
        "kernels",
        "adaptation",
        "diagnostics",
    }
    | {"storage", "views"},
}
MAY_IMPORT["__init__"] = set(MAY_IMPORT)
DEPENDENCIES = {"jax", "jaxlib", "numpy", "matplotlib", "rich"}
OPTIONAL = {"optax", "orbax", "arviz_base", "arviz_stats", "xarray", "sklearn", "tensorstore", "zarr"}


def modules_named(node, module):
    """Full names of what an import statement of a module may bind, relative ones resolved."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = module.split(".")[: -node.level] if node.level else []
    base = ".".join([*package, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports_of(source, module):
    return [name for node in ast.walk(ast.parse(source)) for name in modules_named(node, module)]


def layer_of(name):
    """Layer of a full name of ours: the part after the package; a name of its own if there is none."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def bad_imports(source, module):
    ours = [n for n in imports_of(source, module) if n.split(".")[0] == PACKAGE]
    layer = layer_of(module)
    may = {layer, *MAY_IMPORT[layer]}
    return [n for n in ours if layer_of(n) not in may and ".".join(n.split(".")[1:3]) not in may]


def sources():
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]), path


SOURCES = dict(sources())


def third_party(source, module):
    roots = {name.split(".")[0] for name in imports_of(source, module)}
    return roots - set(sys.stdlib_module_names) - {PACKAGE}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_run_one_way(module):
    assert bad_imports(SOURCES[module].read_text(), module) == []


def test_every_layer_of_the_graph_but_those_to_come_has_modules():
    found = {layer_of(module) for module in SOURCES}
    assert found <= set(MAY_IMPORT)
    assert found >= {"tree", "placement", "targets", "kernels", "adaptation", "sampling", "views"}


def test_each_layer_really_imports_the_one_below():
    """A resolver that saw no import at all would pass the test above."""
    seen = {
        (layer_of(module), layer_of(name))
        for module, path in SOURCES.items()
        for name in imports_of(path.read_text(), module)
        if name.startswith(f"{PACKAGE}.")
    }
    chain = ["tree", "placement", "targets", "kernels", "adaptation", "sampling", "__init__"]
    skips = {("kernels", "placement")}
    below = {(high, low) for low, high in zip(chain, chain[1:], strict=False)} - skips
    below -= {("adaptation", "kernels")}  # It is handed the kernel, and need not import one.
    assert below <= seen


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
        ("views.communication", "from gspmd_mcmc.kernels.hmc import HMC"),
        ("diagnostics.ess", "from gspmd_mcmc.kernels.hmc import HMC"),
        ("adaptation.window", "from gspmd_mcmc.sampling.chunks import advance"),
        ("storage.zarr_store", "from gspmd_mcmc.sampling.run import Run"),
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
        ("storage.saved_draws", "from gspmd_mcmc.sampling.draws import Draws"),
        ("__init__", "from gspmd_mcmc.sampling.sample import sample"),
    ],
)
def test_the_checker_accepts(module, line):
    assert bad_imports(line, f"{PACKAGE}.{module}") == []


@pytest.mark.parametrize("init", [m for m in SOURCES if m.endswith(".__init__") and m.count(".") > 1])
def test_init_files_of_subpackages_import_nothing(init):
    assert imports_of(SOURCES[init].read_text(), init) == []


@pytest.mark.parametrize("module", SOURCES)
def test_import_statements_name_declared_dependencies_only(module):
    assert third_party(SOURCES[module].read_text(), module) <= DEPENDENCIES


def test_the_third_party_checker_sees_a_nested_import():
    assert third_party("def f():\n    import optax.tree_utils\n", "made.up") == {"optax"}


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_no_optional_dependency():
    loaded = run_python("import sys, gspmd_mcmc; print(*{m.split('.')[0] for m in sys.modules})")
    assert "gspmd_mcmc" in loaded.split()
    assert OPTIONAL & set(loaded.split()) == set()


def test_importing_the_package_starts_no_backend():
    """A user sets the number of CPU devices, or joins processes, after the import."""
    count = run_python(
        "import gspmd_mcmc, jax; jax.config.update('jax_platforms', 'cpu');"
        "jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count())"
    )
    assert count.strip() == "3"


def test_all_public_names_resolve_once():
    assert len(set(gspmd_mcmc.__all__)) == len(gspmd_mcmc.__all__)
    assert [name for name in gspmd_mcmc.__all__ if not hasattr(gspmd_mcmc, name)] == []


def test_what_the_package_imports_by_name_is_public():
    tree = ast.parse(Path(gspmd_mcmc.__file__).read_text())
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert imported == set(gspmd_mcmc.__all__)
