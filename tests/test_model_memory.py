"""A process that builds, samples and drops models of other data does not keep the data."""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false

import gc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of

import gspmd_mcmc as gm

ROWS = P("data")
NUM_PATIENTS = 50


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(w * x, 1), obs=y)


def visits(patient, y):
    with numpyro.plate("patients", NUM_PATIENTS):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.deterministic("risk", jnp.exp(effect))
    with numpyro.plate("visits", y.shape[0]):
        numpyro.sample("y", dist.Normal(effect[patient], 1), obs=y)


def parts(x):
    w = yield gm.JointDistributionCoroutine.Root(dist.Normal(0, 1), name="w")
    yield gm.Sharded(dist.Normal(x * w, 1), name="y")


def of_numpyro(x, y):
    return gm.from_numpyro(regression, x, y, plates={"rows": "data"})


def of_numpyro_in_groups(x, y):
    patient = gm.place(np.arange(len(y)) % NUM_PATIENTS, mesh_of("8"), ROWS)
    plates = {"patients": "data", "visits": "data"}
    return gm.from_numpyro(visits, patient, y, plates=plates)


def of_a_joint(x, y):
    return gm.JointDistributionCoroutine(parts, x, mesh=mesh_of("8")).condition(y=y)


@pytest.mark.parametrize("build", [of_numpyro, of_numpyro_in_groups, of_a_joint])
def test_models_that_are_dropped_leave_no_data(build):
    def once(i):
        num_rows = 200_000 + 400 * i  # 1.6 MB, of other shapes each time
        rng = np.random.default_rng(i)
        x, y = (rng.normal(size=num_rows).astype(np.float32) for _ in range(2))
        target = build(*gm.place((x, y), mesh_of("8"), ROWS))
        assert np.isfinite(gm.prior_start(target)(jax.random.key(1))[target.latents[0][0]]).all()
        kernel = gm.HMC(target, 1e-4, 1)
        draws = gm.sample(jax.random.key(0), target, kernel=kernel, num_warmup=0, num_samples=2)
        assert draws.num_draws == 2

    def live():
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    before = live()
    for i in range(3):
        once(i)
    assert live() <= before + 100_000
