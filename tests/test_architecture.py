"""docs/architecture.md is true: runs call what its walks name, and its skeletons sample correctly."""

import ast
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import NUM_ROWS, gaussian, hierarchy, hierarchy_starts, mesh_of, moments_in_mcse
from seeds import seed, within

import gspmd_mcmc as gm

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gspmd_mcmc"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# A decorator that the page names, and that stands before many calls.
LOOKED_THROUGH = "on_any_mesh"


class Call(NamedTuple):
    """A line of a walk: a function, its file in the package, and the line of its caller, if any."""

    name: str
    file: str
    caller: int | None


def read_walk(text: str) -> list[Call]:
    """Read a walk: functions with their files, each indented below its caller."""
    calls, depths = [], []
    for line in text.splitlines():
        name, file = line.split()[:2]
        depth = len(line) - len(line.lstrip())
        above = [i for i, d in enumerate(depths) if d < depth]
        calls.append(Call(name, file, above[-1] if depth else None))
        depths.append(depth)
    return calls


WALKS = [read_walk(text) for text in re.findall(r"^```walk\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
TO_ACCEPT, TO_GRADIENT, TO_STORE, TO_SUMMARY = WALKS
MOST = [(TO_ACCEPT, 8, 5), (TO_STORE, None, 5), (TO_SUMMARY, None, 7)]


# What a run calls


def function_of(code: CodeType, seen: dict[CodeType, tuple[str, str] | None]) -> tuple[str, str] | None:
    """Name the function of ours that code is of, or is nested in, and its file."""
    if code not in seen:
        path = Path(code.co_filename)
        name = code.co_qualname.split(".<locals>")[0]
        is_ours = path.is_relative_to(PACKAGE) and name != LOOKED_THROUGH and name[0] != "<"
        seen[code] = (name, path.relative_to(PACKAGE).as_posix()) if is_ours else None
    return seen[code]


class Recorder:
    """Records which functions of ours are entered, in which order, and from which others.

    Attributes
    ----------
    callers
        Of each function the numbers of its entries, with the function of ours that called it.
    """

    def __init__(self):
        self.callers: dict[tuple[str, str], list[tuple[int, tuple[str, str] | None]]] = {}
        self._seen: dict[CodeType, tuple[str, str] | None] = {}
        self._count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        function = function_of(frame.f_code, self._seen) if event == "call" else None
        if function is None:
            return
        outer = frame.f_back
        while outer is not None and function_of(outer.f_code, self._seen) in (None, function):
            outer = outer.f_back
        caller = None if outer is None else function_of(outer.f_code, self._seen)
        self._count += 1
        self.callers.setdefault(function, []).append((self._count, caller))

    def __enter__(self) -> "Recorder":
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def prior_of_slopes(x):
    return -0.5 * x["slope"] ** 2


def likelihood_of_slopes(x, rows):
    return -0.5 * (rows["y"] - rows["x"] @ x["slope"]) ** 2


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> dict[tuple[str, str], list]:
    """What is called from placing data to a summary, with draws in memory and in a store."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(51, 3)).astype(np.float32), "y": np.ones(51, np.float32)}
    mesh = mesh_of({"data": 2})
    with Recorder() as recorder, pytest.warns(gm.SamplingWarning, match="small data"):
        rows = gm.place(data, mesh, P("data"))
        target = gm.Posterior(prior_of_slopes, gm.Plate(likelihood_of_slopes, rows))
        kernel = gm.HMC(target, step_size=0.1, num_integration_steps=3)
        position = {"slope": jnp.zeros(3)}
        options = {"kernel": kernel, "num_warmup": 10, "num_samples": 4, "progress": False}
        draws = gm.sample(jax.random.key(0), target, position, **options)
        draws.summary()
        sink = gm.ZarrSink(tmp_path_factory.mktemp("store") / "draws")
        gm.sample(jax.random.key(1), target, position, to=sink, **options)
    return recorder.callers


def differences(walk: list[Call], callers: dict[tuple[str, str], list]) -> list[str]:
    """Return where a walk differs from what was called."""
    found, entered = [], []
    for call in walk:
        entries = callers.get((call.name, call.file), [])
        expected = None if call.caller is None else (walk[call.caller].name, walk[call.caller].file)
        numbers = [n for n, caller in entries if expected in (None, caller)]
        # Calls of one function come in the order of the page.
        before = [last for c, last in zip(walk, entered, strict=False) if c.caller == call.caller]
        numbers = [n for n in numbers if n > max(before, default=0)]
        if not numbers:
            others = sorted({str(caller) for _, caller in entries}) or "nothing"
            found.append(f"{call.name} in {call.file}: expected {expected}, called by {others}")
        entered.append(min(numbers, default=0))
    return found


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: f"{walk[0].name} to {walk[-1].name}")
def test_a_run_calls_what_a_walk_names(walk, run):
    assert differences(walk, run) == []


@pytest.mark.parametrize(
    "line",
    [
        "no_such_function sampling/sample.py",
        "sample sampling/run.py",
        "sample sampling/sample.py\n  HMC.transition kernels/hmc.py",
        "HMC.transition kernels/hmc.py\n  HMC.init kernels/hmc.py",
        "Draws.summary storage/draws.py\nplace placement/place.py",
    ],
)
def test_a_walk_that_is_wrong_is_rejected(line, run):
    """A function that is not there, in another file, with a call left out, not called, too early."""
    assert len(differences(read_walk(line), run)) == 1


@pytest.mark.parametrize(("walk", "calls", "files"), MOST)
def test_walks_are_short(walk, calls, files):
    """One call leads from each function to the next."""
    assert calls is None or len(walk) - 1 <= calls
    assert len({call.file for call in walk}) <= files


def test_the_walk_to_the_accept_step_is_one_chain_of_calls():
    assert [call.caller for call in TO_ACCEPT] == [None, *range(len(TO_ACCEPT) - 1)]
    name, file, _ = TO_ACCEPT[-1]
    end = (PACKAGE / file).read_text().split(f"def {name.split('.')[-1]}(")[1].split("\n    def ")[0]
    assert TO_ACCEPT[0].name == "sample" and re.search("is_accepted =|metropolis_test", end)


# The map

ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def rooms_imported(room: str) -> set[str]:
    """Return the other folders of the package that the files of a folder import from."""
    files = [ast.walk(ast.parse(path.read_text())) for path in (PACKAGE / room).rglob("*.py")]
    imports = [node for nodes in files for node in nodes if isinstance(node, ast.ImportFrom)]
    names = [f"{i.module}.{alias.name}.".split(".") for i in imports for alias in i.names]
    return ROOMS & {name[1] for name in names if name[0] == "gspmd_mcmc"} - {room}


def test_the_map_names_all_folders_and_what_they_import():
    rows = re.findall(r"^\| `(\w+)/`(?: \(door\))? \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE)
    shown = {room: set(re.findall(r"`([a-z]+)`", cell)) & ROOMS for room, cell in rows}
    assert shown == {room: rooms_imported(room) for room in ROOMS}


def test_the_page_is_short_and_names_files_that_there_are():
    assert len(PAGE.splitlines()) <= 300 and f"`{LOOKED_THROUGH}`" in PAGE
    quoted = re.findall(r"`((?:\w+/)*\w+(?:\.py|\.txt|/))`", PAGE)
    assert len(quoted) > 20
    assert [x for x in quoted if not ((ROOT / x).exists() or (PACKAGE / x).exists())] == []


# The skeletons

CODE = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


def imported(code: str, folder: Path):
    """Import code as a module, as a contributor's file is."""
    file = folder / "architecture_page.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return imported(CODE, tmp_path_factory.mktemp("page"))


SCALES = np.array([0.5, 1.0, 1.5], np.float32)
TARGET = gm.LogDensity(gaussian, jnp.diag(jnp.asarray(SCALES**-2)))


def worst(page) -> float:
    """Sample a Gaussian by the page's kernel and warm-up; return the largest error of its moments."""
    draws = gm.sample(
        *(jax.random.key(seed(0)), TARGET, jnp.zeros(3)),
        kernel=page.Langevin(TARGET, 0.1),
        warmup=page.RobbinsMonro(),
        num_chains=8,
        num_warmup=200,
        num_samples=2000,
        progress=False,
    )
    assert draws.kernel.step_size > 0.5, "warm-up has not tuned the step size"
    return max(moments_in_mcse(draws.position, SCALES))


def test_the_kernel_and_the_warm_up_sample_a_gaussian(page):
    within(worst(page), 5)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("is_accepted = jnp.log(jax.random.uniform(accept_key, dtype=log_ratio.dtype)) < log_ratio",
         "is_accepted = log_ratio > -jnp.inf"),
        ("log_ratio = gain - tree.dot(tree.sub(back, noise), tree.add(back, noise)) / 2",
         "log_ratio = gain"),
    ],
)  # fmt: skip
def test_a_broken_kernel_is_rejected(line, broken, tmp_path):
    assert CODE.count(line) == 1
    assert worst(imported(CODE.replace(line, broken), tmp_path)) > 10


def test_chains_and_their_padding_are_the_same_on_a_mesh_and_in_the_sink(page, tmp_path):
    """Eleven rows with latents of their own, which eight devices pad to sixteen."""
    found = {}
    for name in ("1", "8"):
        with jax.enable_x64(True):
            target = hierarchy(name)
            sink = page.NpySink(tmp_path / "draws") if name == "8" else None
            draws = gm.sample(
                *(jax.random.key(0), target, gm.per_chain(hierarchy_starts())),
                kernel=page.Langevin(target, 0.05),
                warmup=page.RobbinsMonro(),
                num_warmup=20,
                num_samples=12,
                to=sink,
                progress=False,
            )
            found[name] = draws
            start = np.asarray(hierarchy_starts()["effect"])[:, -1:]
        assert np.mean(draws.acceptance_rate) > 0.3
    for leaf, values in found["1"].position.items():
        assert np.ptp(values, axis=1).min() > 0
        np.testing.assert_allclose(found["8"].position[leaf], values, rtol=1e-9, atol=1e-9)
    pad = np.asarray(found["8"].state.position["effect"].values)[:, NUM_ROWS:]
    assert pad.shape[1] == 5
    np.testing.assert_array_equal(pad, np.broadcast_to(start, pad.shape))


def test_a_continued_run_writes_each_draw_once_into_the_sink(page, tmp_path):
    def sample(num_samples: int) -> gm.Draws:
        return gm.sample(
            *(jax.random.key(0), TARGET, jnp.zeros(3)),
            kernel=page.Langevin(TARGET, 0.1),
            warmup=page.RobbinsMonro(),
            num_warmup=10,
            num_samples=num_samples,
            to=page.NpySink(tmp_path / "draws"),
            checkpoint=tmp_path / "run",
            progress=False,
        )

    first = np.array(sample(5).position)
    longer = sample(9)
    assert longer.num_draws == 9
    np.testing.assert_array_equal(longer.position[:, :5], first)
    assert np.ptp(longer.position, axis=1).min() > 0


def test_the_term_has_its_derivative_and_a_gradient_takes_no_logarithm(page):
    logits = np.array([-100, -5, -0.1, 0, 0.1, 5, 100], np.float32)
    successes, trials = np.arange(7), np.full(7, 7)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    exact = -successes * np.logaddexp(0.0, -logits.astype(np.float64))
    exact -= (trials - successes) * np.logaddexp(0.0, logits.astype(np.float64))
    np.testing.assert_allclose(
        page.binomial_logits(logits, successes, trials), exact, rtol=1e-5, atol=1e-9
    )

    def total(x):
        return page.binomial_logits(x, successes, trials).sum()

    np.testing.assert_allclose(jax.grad(total)(logits), successes - trials * p, rtol=1e-5, atol=1e-5)
    texts = [jax.jit(f).lower(logits).compile().as_text() or "" for f in (jax.grad(total), total)]
    assert ["log-plus-one(" in text or " log(" in text for text in texts] == [False, True]
