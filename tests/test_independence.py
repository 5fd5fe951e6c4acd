"""Rows whose terms depend on the rows beside them are refused; rows that stand alone are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import normal

import gspmd_mcmc as gm
from gspmd_mcmc.targets import independence

NUM_ROWS = 4003
MESH = gm.make_mesh(data=8)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(3, 2, size=NUM_ROWS).astype(np.float32)
Y = RANDOM.normal(size=NUM_ROWS).astype(np.float32)
ORIGIN = {"level": jnp.zeros(()), "slope": jnp.zeros(())}  # where the slope hides what x is


def regression(covariate):
    """A regression on a function of a block's rows."""

    def log_likelihood(params, block):
        mean = params["level"] + params["slope"] * covariate(block["x"])
        return -0.5 * (block["y"] - mean) ** 2

    return log_likelihood


def target_of(log_likelihood, num_rows=NUM_ROWS, mesh=None, **data):
    data = {"x": X[:num_rows], "y": Y[:num_rows]} | data
    data = data if mesh is None else gm.place(data, mesh, P("data"))
    return gm.Posterior(normal, gm.Plate(log_likelihood, data))


COUPLED = {
    "mean": lambda x: x - x.mean(),
    "batch norm": lambda x: (x - x.mean()) / x.std(),
    "cumulative sum": jnp.cumsum,
    "sorted": jnp.sort,
    "the first": lambda x: x - x[0],
    "the next": lambda x: jnp.roll(x, -1),
    "the number": lambda x: x / len(x),
    "the place": lambda x: x + jnp.arange(len(x)),
    "some rows alone": lambda x: jnp.where(x > 6, x.mean(), x),
}


@pytest.mark.parametrize("how", COUPLED)
def test_rows_that_read_each_other_are_refused(how):
    kernel = gm.HMC(target_of(regression(COUPLED[how])), step_size=0.1, num_integration_steps=1)
    match = (
        r"Plate\(log_likelihood, 4003 rows\): the term of row \d+ is .* in one block and .* rows beside"
    )
    with pytest.raises(gm.CoupledRows, match=match):
        kernel.init(ORIGIN)


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_few_rows_that_read_each_other_are_refused(num_rows):
    target = target_of(regression(COUPLED["mean"]), num_rows)
    with pytest.raises(gm.CoupledRows):
        gm.HMC(target, step_size=0.1, num_integration_steps=1).init(ORIGIN)


def test_sample_refuses_on_a_mesh_before_warm_up():
    target = target_of(regression(COUPLED["mean"]), mesh=MESH)
    with pytest.raises(gm.CoupledRows, match=r"4003 rows \+ 5 pad over data=8"):
        gm.sample(jax.random.key(0), target, ORIGIN, progress=False)


def test_latents_of_rows_that_read_each_other_are_refused():
    def walk(params, block):
        return -0.5 * (block["y"] - jnp.cumsum(params["step"])) ** 2

    plate = gm.Plate(walk, gm.place({"y": Y}, MESH, P("data")), local="step")
    kernel = gm.HMC(gm.Posterior(None, plate), step_size=0.1, num_integration_steps=1)
    with pytest.raises(gm.CoupledRows):
        kernel.init({"step": jnp.zeros(NUM_ROWS)})


def test_the_right_plate_is_named():
    alone, beside = (gm.Plate(regression(f), {"x": X, "y": Y}) for f in (jnp.sin, jnp.cumsum))
    with pytest.raises(gm.CoupledRows):
        independence.check_rows(gm.Posterior(normal, alone, beside), ORIGIN)
    independence.check_rows(gm.Posterior(normal, alone), ORIGIN)


# What is right.


def _largest_first(x):
    """Scaled by the largest of the block before the exponential: the same but for rounding."""
    return jnp.exp(x - x.max()) * jnp.exp(x.max())


def _counts(params, block):
    """Counts of a million: terms of 1e7, which cancel."""
    rate = 13.8 + 1e-3 * (params["level"] + params["slope"] * block["x"])
    count = jnp.round(1e6 + 1e3 * block["y"])
    return count * rate - jnp.exp(rate) - jax.scipy.special.gammaln(count + 1)


def _seconds(params, block):
    """Seconds since 1970, in float32."""
    since = (block["x"] * 1e5 + 1.7e9) - (1.7e9 + 1e5 * params["level"])
    return -0.5 * (block["y"] - params["slope"] * since) ** 2


def _undefined_elsewhere(params, block):
    """A density that is NaN wherever the position is moved to."""
    inside = jnp.where(jnp.abs(params["slope"]) < 0.1, 1.0, jnp.nan)
    return -0.5 * inside * (block["y"] - params["level"]) ** 2


def _by_index(params, block):
    rows = jnp.arange(len(block["x"]))
    both = jnp.stack([params["level"] + block["x"], params["slope"] * block["x"]], axis=1)
    return jax.nn.log_softmax(both)[rows, (block["y"] > 0).astype(int)]


def _by_a_product(params, block):
    basis = jnp.cos(block["x"][:, None] * jnp.arange(300.0)[None])
    weights = params["level"] + params["slope"] * jnp.arange(300.0)
    return -0.5 * (block["y"] - 100 * basis @ weights) ** 2


def _half(params, block):
    x, y = block["x"].astype(jnp.bfloat16), block["y"].astype(jnp.bfloat16)
    mean = params["level"].astype(jnp.bfloat16) + params["slope"].astype(jnp.bfloat16) * x
    return -0.5 * (y - mean) ** 2


ALONE = {
    "largest first": regression(_largest_first),
    "counts": _counts,
    "seconds": _seconds,
    "undefined elsewhere": _undefined_elsewhere,
    "by index": _by_index,
    "by a product": _by_a_product,
    "bfloat16": _half,
}


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("how", ALONE)
def test_rows_that_stand_alone_are_not_refused(how, num_devices):
    mesh = MESH if num_devices == 8 else None
    position = ORIGIN | {"level": jnp.full((), 0.3)}
    independence.check_rows(target_of(ALONE[how], mesh=mesh), position)


def test_a_row_that_is_not_a_number_is_no_coupling():
    independence.check_rows(target_of(regression(jnp.log), x=-X), ORIGIN)


def test_a_plate_is_tried_once(monkeypatch):
    tried = []
    whole = independence.try_rows
    monkeypatch.setattr(independence, "try_rows", lambda *args: tried.append(args) or whole(*args))
    target = target_of(regression(jnp.sin))
    kernel = gm.HMC(target, step_size=0.1, num_integration_steps=1)
    kernel.init(ORIGIN)
    kernel.init(ORIGIN)
    jax.jit(type(kernel).init)(kernel, ORIGIN)
    states = jax.tree.map(lambda z: jnp.stack([z, z]), ORIGIN)
    independence.check_rows(target, states, chain=0)
    assert len(tried) == 1


def test_a_trial_sends_the_rows_that_it_takes_and_no_more():
    target = target_of(regression(jnp.sin), mesh=MESH)
    takes, zeros = np.zeros((10, 32), int), np.zeros(10, np.float32)

    def trial(*args):
        return independence._terms(*args, which=0, chain=None)

    report = gm.communication(trial, target, ORIGIN, takes, zeros, zeros)
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    assert sum(c.num_bytes for c in report.collectives) == 32 * (4 + 4)  # a run's rows of x and y
