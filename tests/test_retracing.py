"""A run is of what its target means now, and what means the same is compiled once."""

import gc
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import nbclient
import nbformat
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets import independence

SHORT = {"num_warmup": 100, "num_samples": 100, "progress": False}
mu = 0.0


def density(x):
    return -0.5 * (x["x"] - mu) ** 2


def mean_of(target, key=0):
    """Sample by HMC, which compiles sooner than trees."""
    kernel = gm.HMC(target, 0.5, 4, jitter=0.5)
    draws = gm.sample(jax.random.key(key), target, {"x": jnp.zeros(())}, kernel=kernel, **SHORT)
    return float(np.mean(np.asarray(draws.position["x"])))


def model(x, y=None):
    w = numpyro.sample("w", dist.Normal(mu, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x * w, 10.0), obs=y)


def test_a_run_is_of_what_globals_are_now_and_equal_targets_compile_nothing(compiled, monkeypatch):
    """400 draws of a unit normal: the mean is known to 0.1 or so, and the other one is 10 away."""
    target = gm.LogDensity(density)
    assert abs(mean_of(target)) < 1
    monkeypatch.setitem(globals(), "mu", 10.0)
    assert abs(mean_of(target) - 10) < 1
    compiled.clear()
    before = _resident_bytes()
    for key in range(4):
        assert abs(mean_of(gm.LogDensity(density), key) - 10) < 1
    assert compiled == []
    assert _resident_bytes() < 1.05 * before


def _resident_bytes():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_numpyro_model_made_again_compiles_nothing_and_one_that_changed_is_refused(
    compiled, monkeypatch
):
    def made(seed):
        x = np.random.default_rng(seed).normal(size=16).astype(np.float32)
        data = gm.place({"x": x, "y": 2 * x}, gm.make_mesh(), P("data"))
        return gm.from_numpyro(model, data["x"], data["y"], plates={"rows": "data"})

    grad = jax.jit(gm.Posterior.grad)
    first = made(0)
    grad(first, first.origin())
    compiled.clear()
    grad(made(1), first.origin())
    assert compiled == []
    monkeypatch.setitem(globals(), "mu", 5.0)
    with pytest.raises(ValueError, match="mu, a global that model reads.*call from_numpyro again"):
        grad(first, first.origin())
    assert float(grad(made(0), first.origin())["w"]) > 4


def test_a_change_in_a_callback_ends_the_run_and_draws_are_not_gone_on_from(monkeypatch):
    target = gm.LogDensity(density)

    def change(report):
        if report.phase == "sampling":
            monkeypatch.setitem(globals(), "mu", 10.0)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        draws = gm.sample(jax.random.key(0), target, {"x": jnp.zeros(())}, callback=change, **SHORT)
    assert any("mu, a global that density reads" in str(w.message) for w in told)
    assert 0 < draws.num_draws < 100
    assert float(np.abs(np.asarray(draws.position["x"])).max()) < 6
    with pytest.raises(ValueError, match="is not what it was .*mu, a global that density reads"):
        gm.sample(jax.random.key(1), target, draws, **SHORT)


SET = "mu = {}"
CELLS = (
    SET.format(0.0),
    "import jax, jax.numpy as jnp, gspmd_mcmc as gm\n"
    "def log_density(x):\n    return -0.5 * (x['x'] - mu) ** 2\n"
    "target = gm.LogDensity(log_density)",
    "draws = gm.sample(jax.random.key(0), target, {'x': jnp.zeros(())}, num_warmup=100,\n"
    "                  num_samples=100, progress=False, kernel=gm.HMC(target, 0.5, 4))\n"
    "print(float(draws.position['x'].mean()))",
)


def test_a_cell_of_a_notebook_changed_and_run_again_is_sampled():
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    client = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120)

    def run(*numbers):
        for number in numbers:
            client.execute_cell(cells[number], number)
        printed = [o.text for o in cells[2].outputs if o.get("name") == "stdout"]
        return float(printed[0])

    with client.setup_kernel():
        assert abs(run(0, 1, 2)) < 1
        cells[0].source = SET.format(10.0)
        assert abs(run(0, 2) - 10) < 1
        assert abs(run(0, 1, 2) - 10) < 1


@tree.pytree
@dataclass(frozen=True, eq=False)
class Module:
    """As libraries of neural networks have them: its arrays are leaves, its call reads a global."""

    w: jax.Array

    def __call__(self, x):
        return -0.5 * jnp.sum(self.w * (x - mu) ** 2)


def test_what_a_modules_call_reads_counts(monkeypatch):
    target = gm.LogDensity(Module(jnp.ones(1)))
    grad = jax.jit(gm.LogDensity.grad)
    assert float(grad(target, jnp.float32(0.0))) == 0.0
    monkeypatch.setitem(globals(), "mu", 10.0)
    assert float(grad(target, jnp.float32(0.0))) == 10.0


shift = 0.0


def shifted(kernel, step):
    state, info = step
    moved = jax.tree.map(lambda x: x + shift, state.position)
    return kernel.init(moved), info


@tree.pytree
@dataclass(frozen=True, eq=False, init=False)
class OwnJittedStep(gm.HMC):
    """A kernel whose step, a program of its own, reads a global, and so is no sampler."""

    @jax.jit
    def step(self, rng_key, state):
        return shifted(self, gm.HMC.step(self, rng_key, state))


@tree.pytree
@dataclass(frozen=True, eq=False, init=False)
class OwnInit(gm.HMC):
    """One that begins elsewhere, and stays there."""

    def init(self, position):
        return super().init(jax.tree.map(lambda x: x + shift, position))

    def step(self, rng_key, state):
        return state, super().step(rng_key, state)[1]


@tree.pytree
@dataclass(frozen=True, eq=False)
class OwnWarmup(gm.WindowAdaptation):
    """A warm-up that tunes nothing."""

    def tuned(self, kernel, state):
        return super().tuned(kernel, state).with_step_size(1.0 + shift)

    def final(self, kernel, state):
        return self.tuned(kernel, state)


@pytest.mark.parametrize("kernel", (OwnJittedStep, OwnInit))
def test_a_users_kernel_is_what_its_methods_read_now(kernel, compiled, monkeypatch):
    """A shift of 100 a step, or of the start, is not to be overlooked."""
    target = gm.LogDensity(density)
    options = {"kernel": kernel(target, 1e-3, 1), "warmup": gm.WindowAdaptation()}
    options |= {"num_warmup": 0, "num_samples": 5, "progress": False}

    def last():
        draws = gm.sample(jax.random.key(0), target, {"x": jnp.zeros(())}, **options)
        return float(np.asarray(draws.position["x"])[0, -1])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.SamplingWarning)
        assert abs(last()) < 3
        compiled.clear()
        assert abs(last()) < 3 and compiled == []
        monkeypatch.setitem(globals(), "shift", 100.0)
        assert last() > 97
        compiled.clear()
        assert last() > 97 and compiled == []


def test_a_users_warmup_is_what_its_methods_read_now(monkeypatch):
    target = gm.LogDensity(density)
    warmup = OwnWarmup(adapt_mass_matrix=False)
    options = {"kernel": gm.HMC(target, 1.0, 2), "warmup": warmup, "num_warmup": 8}

    def size():
        start = {"x": jnp.zeros(())}
        draws = gm.sample(jax.random.key(0), target, start, **SHORT | options)
        return float(np.asarray(draws.warmup["step_size"])[..., -1].max())

    assert size() == 1.0
    monkeypatch.setitem(globals(), "shift", -0.5)
    assert size() == 0.5


def row_term(x):
    return x


def test_rows_are_tried_again_once_a_function_has_changed(monkeypatch):
    plate = gm.Plate(lambda p, rows: -0.5 * (row_term(rows) - p) ** 2, jnp.arange(16.0))
    target = gm.Posterior(lambda p: -0.5 * p**2, plate)
    independence.check_rows(target, jnp.float32(1.0))
    monkeypatch.setitem(globals(), "row_term", lambda x: x - x.mean())
    with pytest.raises(independence.CoupledRows, match="depends on the rows beside it"):
        independence.check_rows(target, jnp.float32(1.0))


def test_arrays_of_a_target_are_let_go():
    """Data with the target, and closed-over arrays with the programs that hold them."""

    def run(number, closes_over):
        x = jnp.arange(400_000.0) + number
        if closes_over:
            target = gm.LogDensity(lambda w: -0.5 * (w - x[1] / 400_000) ** 2)
        else:
            target = gm.LogDensity(lambda w, x: -0.5 * (w - x[1] / 400_000) ** 2, x)
        kernel = gm.HMC(target, 0.5, 2)
        gm.sample(
            jax.random.key(0),
            target,
            jnp.float32(0.0),
            kernel=kernel,
            num_chains=2,
            num_warmup=0,
            num_samples=5,
            progress=False,
        )

    def num_large():
        gc.collect()
        return sum(x.nbytes > 1e6 for x in jax.live_arrays())

    before = num_large()
    for number in range(3):
        run(number, closes_over=False)
        assert num_large() == before
    run(0, closes_over=True)
    assert num_large() > before  # the program holds it
    jax.clear_caches()
    assert num_large() == before


@gm.pytree
@dataclass(frozen=True, eq=False)
class AroundGlobal(gm.Target):
    """A user's own target, whose code reads a global."""

    scale: jax.Array

    def terms(self, position):
        return -0.5 * ((position - mu) / self.scale) ** 2


def test_a_target_of_a_users_own_class_is_of_what_its_code_reads_now(monkeypatch):
    target = AroundGlobal(jnp.float32(0.1))

    def mean():
        draws = gm.sample(jax.random.key(0), target, jnp.float32(0.0), **SHORT)
        return float(draws.position.mean()), draws

    first, draws = mean()
    monkeypatch.setitem(globals(), "mu", 30.0)
    second, _ = mean()
    np.testing.assert_allclose([first, second], [0.0, 30.0], atol=0.1)
    with pytest.raises(ValueError, match="mu, a global that .*terms reads"):
        gm.sample(jax.random.key(1), target, draws, num_warmup=0, num_samples=5)


def test_a_dict_may_be_changed_between_runs_whatever_stands_in_it():
    """Values that have died are no values: their numbers may be those of others."""
    settings: dict = {"mean": 1000.5}
    target = gm.LogDensity(lambda w: -0.5 * (w - settings["mean"]) ** 2)
    for mean in (1000.5, 2000.5, 10.5, 30.5):
        settings["mean"] = float(str(mean))
        draws = gm.sample(jax.random.key(0), target, jnp.float32(mean), num_chains=2, **SHORT)
        np.testing.assert_allclose(draws.position.mean(), mean, atol=1.0)
