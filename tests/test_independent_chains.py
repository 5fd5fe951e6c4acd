"""The demo of independent chains, and that a program whose chains talk would not pass for one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.views.communication import communication


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_quick_demo):
    """Give the folder of the demo's results by number of devices."""
    folders = {}
    for num_devices in (8, 1):
        folders[num_devices] = tmp_path_factory.mktemp(f"on{num_devices}")
        done = run_quick_demo("independent_chains", folders[num_devices], "--devices", str(num_devices))
        assert done.returncode == 0, done.stderr[-3000:]
    return folders


@pytest.fixture(scope="module")
def summaries(results):
    return {n: json.loads((folder / "summary.json").read_text()) for n, folder in results.items()}


@pytest.mark.parametrize("num_devices", [8, 1])
def test_chains_send_nothing_and_find_the_truth(results, summaries, num_devices):
    summary = summaries[num_devices]
    assert (summary["devices"], summary["mesh"]) == (num_devices, {"chains": num_devices})
    assert (summary["num_chains"], summary["collectives"]) == (16, 0)
    # Five numbers: 3.9 leaves a false alarm in 1 of 2,000.
    assert len(summary["errors_in_mcse"]) == 5
    assert max(abs(error) for error in summary["errors_in_mcse"].values()) < 3.9
    assert summary["rhat"] < 1.02 and summary["ess"] > 1000
    assert summary["acceptance_rate"] > 0.8 and summary["num_divergent"] == 0
    assert (results[num_devices] / "independent_chains.png").stat().st_size > 50_000


def test_draws_do_not_depend_on_the_mesh(summaries):
    for name in ("mean", "covariance"):
        np.testing.assert_allclose(summaries[1][name], summaries[8][name], rtol=1e-4)


# Negative control


def log_density(position, precision):
    return -0.5 * position @ precision @ position


def independent(kernel, keys, state):
    return jax.vmap(gm.HMC.step, in_axes=(None, 0, 0), spmd_axis_name="chains")(kernel, keys, state)


def averaging(kernel, keys, state):
    """A step size for all chains that depends on where they all are."""
    spread = jnp.mean(state.position**2)
    return independent(kernel.with_step_size(0.3 / (1 + spread)), keys, state)


def collectives_of(step):
    """Kind of each collective of ten steps of 16 chains on 8 devices, and the loops around it."""
    mesh = gm.make_mesh(chains=8)
    kernel = gm.HMC(gm.LogDensity(log_density, gm.place(np.eye(2), mesh, P())), 0.3, 4)
    positions = gm.place(np.ones((16, 2), np.float32), mesh, P("chains"))
    chains = gm.place(np.arange(16), mesh, P("chains"))

    def run(kernel, rng_key, positions, chains):
        def one(state, number):
            step_key = jax.random.fold_in(rng_key, number)
            keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, chains)
            state, info = step(kernel, keys, state)
            return state, info.is_accepted

        state = jax.vmap(gm.HMC.init, in_axes=(None, 0), spmd_axis_name="chains")(kernel, positions)
        return jax.lax.scan(one, state, jnp.arange(10))

    report = communication(run, kernel, jax.random.key(0), positions, chains)
    return [(found.kind, found.trips) for found in report.collectives]


def test_only_chains_that_average_need_a_collective():
    assert collectives_of(independent) == []
    assert collectives_of(averaging) == [("all-reduce", (10,))]
