"""Under ``jax_enable_x64``: every sampler, warm-up, metric and start, for positions of both widths.

Positions of 32 bits meet counters, scalars and log densities of 64. The truth is the posterior of a
regression, which is Gaussian; draws are held to it loosely, as what may fail here is a dtype.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.summary import summarize
from gspmd_mcmc.kernels.metrics.rotated_metric import RotatedMetric

ROWS, SIZE = 30, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, SIZE))
Y = X @ [1.0, -2.0, 0.5] + RNG.normal(size=ROWS)
PRECISION = X.T @ X + np.eye(SIZE)
MEAN, SD = np.linalg.solve(PRECISION, X.T @ Y), np.sqrt(np.diag(np.linalg.inv(PRECISION)))
pytestmark = [pytest.mark.filterwarnings("ignore:small data"), pytest.mark.statistical]


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def log_prior(params):
    return -0.5 * params["w"] ** 2


def log_likelihood(params, row):
    return -0.5 * (row["y"] - row["x"] @ params["w"]) ** 2


@cache
def target(dtype):
    rows = {"x": X.astype(dtype), "y": Y.astype(dtype)}
    data = gm.place(rows, mesh_of("2x4"), P("data"))
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, data))


def sample(dtype, kernel=None, start=None, **options):
    made = None if kernel is None else kernel(target(dtype))
    counts: dict[str, Any] = {"num_chains": 2, "num_warmup": 60, "num_samples": 60, "progress": False}
    start = {"w": jnp.zeros(SIZE, dtype)} if start is None else start
    key = jax.random.key(seed(0))
    draws = gm.sample(key, target(dtype), start, kernel=made, **counts | options)
    assert draws.position["w"].dtype == dtype
    assert draws.state.log_density.dtype == jnp.float64
    assert np.isfinite(draws.summary().mean["w"]).all()
    mean = np.mean(draws.position["w"], axis=(0, 1))
    assert np.abs((mean - MEAN) / SD).max() < 1.5
    return draws


SAMPLERS = {
    "HMC": lambda t: gm.HMC(t, 0.1, 5),
    "JitteredHMC": lambda t: gm.JitteredHMC(t, 0.1, 1.0),
    "NUTS": lambda t: gm.NUTS(t, 0.1),
    "MAMS": lambda t: gm.MAMS(t, 0.1, 1.0),
    "MCLMC": lambda t: gm.MCLMC(t, 0.1, 1.0),
}
both = pytest.mark.parametrize("dtype", [np.float64, np.float32])


@both
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_and_its_warm_up(name, dtype, tmp_path):
    """With thinning, and a checkpoint that is continued."""
    options = {"checkpoint": tmp_path / "run", "thin": 2}
    first = sample(dtype, SAMPLERS[name], **options)
    more = sample(dtype, SAMPLERS[name], num_samples=70, **options)
    np.testing.assert_array_equal(more.position["w"][:, :60], first.position["w"])


@both
@pytest.mark.parametrize(
    "metric",
    [gm.Diagonal, gm.Dense, gm.DenseBlock, gm.LowRank, lambda: gm.Rotated({"w": (np.eye(SIZE),)})],
    ids=["Diagonal", "Dense", "DenseBlock", "LowRank", "Rotated"],
)
def test_a_metric(metric, dtype):
    sample(dtype, SAMPLERS["HMC"], metric=metric())


GIVEN = {
    "a tree": lambda: {"w": SD**2},
    "dense": lambda: gm.DenseMetric.of_covariances({"w": SD}, np.linalg.inv(PRECISION)),
    "rotated": lambda: RotatedMetric({"w": SD**2}, {"w": (np.eye(SIZE),)}),
}


@pytest.mark.parametrize("num_warmup", [0, 60])
@pytest.mark.parametrize("metric", GIVEN)
def test_a_metric_of_64_bits_serves_a_position_of_32(metric, num_warmup):
    def kernel(target):
        return gm.HMC(target, 0.5, 3, inverse_mass_matrix=GIVEN[metric]())

    draws = sample(np.float32, kernel, num_warmup=num_warmup)
    assert draws.state.position["w"].dtype == np.float32


@both
@pytest.mark.parametrize(
    ("warmup", "kernel"),
    [(gm.PerChainAdaptation(), "HMC"), (gm.ChEESAdaptation(), "JitteredHMC")],
    ids=["PerChain", "ChEES"],
)
def test_a_warm_up(warmup, kernel, dtype):
    sample(dtype, SAMPLERS[kernel], warmup=warmup)


@both
def test_the_mode_is_the_mean_and_chains_start_there(dtype):
    start = {"w": jnp.zeros(SIZE, dtype)}
    mode = gm.find_mode(jax.random.key(seed(1)), target(dtype), start, tolerance=1e-6)
    assert mode.position["w"].dtype == mode.curvature["w"].dtype == dtype
    np.testing.assert_allclose(mode.position["w"], MEAN, atol=1e-3)
    np.testing.assert_allclose(mode.log_density, log_density(MEAN), rtol=1e-5)
    sample(dtype, SAMPLERS["HMC"], start=mode)
    sample(dtype, SAMPLERS["HMC"], start=mode.laplace_start())


def test_a_summary_sees_that_32_bits_are_coarse_beside_64():
    """Beside a log density of 64 bits. At 1e7 the numbers of 32 bits are 1 apart."""
    x = RNG.normal(size=(4, 100, 3)) + 1e7
    stats = {"log_density": RNG.normal(size=(4, 100))}
    for dtype, is_told in ((np.float32, True), (np.float64, False)):
        summary = summarize({"x": jnp.asarray(x, dtype)}, stats)
        told = ["distance of floating-point numbers" in text for text in summary.warnings]
        assert any(told) == is_told
        np.testing.assert_allclose(summary.log_density["mean"], stats["log_density"].mean(), rtol=1e-9)


def log_density(w):
    return -0.5 * np.sum((Y - X @ w) ** 2) - 0.5 * np.sum(w**2)
