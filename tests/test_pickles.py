"""Draws go through pickles and copies, whatever their target is made of."""

import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

KEY = jax.random.key(0)
Y = np.arange(17.0, dtype=np.float32)
pytestmark = pytest.mark.filterwarnings("ignore:small data")


def log_density(x):
    return -0.5 * x["mu"] ** 2


def of_row(x, y):
    return -0.5 * (x["effect"] - y) ** 2 - 0.5 * (x["mu"] - y) ** 2


def by_lambda():
    return gm.LogDensity(lambda x: -0.5 * x["mu"] ** 2), {"mu": jnp.zeros(3)}


def by_rows_on_a_mesh():
    data = gm.place(Y, gm.make_mesh(data=8), P("data"))
    target = gm.Posterior(log_density, gm.Plate(of_row, data, local="effect"))
    return target, {"mu": jnp.zeros(()), "effect": jnp.zeros(17)}


TARGETS = [by_lambda, by_rows_on_a_mesh]
COUNTS = {"num_chains": 2, "num_samples": 30, "num_warmup": 20, "progress": False}


def sample(target, start, **options):
    return gm.sample(KEY, target, start, kernel=gm.HMC(target, 0.1, 3), **COUNTS, **options)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one.position, other.position)
    jax.tree.map(np.testing.assert_array_equal, one.stats, other.stats)
    assert str(one.summary()) == str(other.summary())
    assert one.acceptance_rate.tolist() == other.acceptance_rate.tolist()
    assert one.num_steps == other.num_steps and one.groups == other.groups


@pytest.mark.parametrize("make", TARGETS)
def test_draws_whose_target_has_no_pickle_go_through_one(make):
    target, start = make()
    draws = sample(target, start)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(target)
    again = pickle.loads(pickle.dumps(draws))
    same(again, draws)
    jax.tree.map(np.testing.assert_array_equal, again.state, draws.state)
    np.testing.assert_array_equal(again.kernel.step_size, draws.kernel.step_size)
    assert again.kernel.target is None and draws.kernel.target is target
    assert not any(isinstance(x, jax.Array) for x in jax.tree.leaves((again.position, again.state)))
    with pytest.raises(ValueError, match=r"pickled without their target.*per_chain.*checkpoint="):
        gm.sample(KEY, target, again, **COUNTS)


def test_another_run_starts_where_pickled_draws_ended():
    target, start = by_lambda()
    again = pickle.loads(pickle.dumps(sample(target, start)))
    more = sample(target, gm.per_chain(again.state.position))
    assert np.isfinite(more.position["mu"]).all()


@pytest.mark.parametrize("make", TARGETS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_go_on_as_the_draws_do(make, copied):
    draws = sample(*make())
    other = copied(draws)
    same(other, draws)
    assert other.kernel.target is draws.kernel.target and other.position["mu"] is not None
    one, two = (gm.sample(KEY, draws.kernel.target, x, **COUNTS) for x in (draws, other))
    jax.tree.map(np.testing.assert_array_equal, one.position, two.position)


@pytest.mark.parametrize("opened", [False, True], ids=["of a run", "opened"])
def test_draws_on_disk_go_through_a_pickle(tmp_path, opened):
    draws = sample(*by_lambda(), to=gm.ZarrSink(tmp_path / "draws"))
    draws = gm.open_draws(tmp_path / "draws") if opened else draws
    draws.position["mu"][:, -1]  # opens the store
    again = pickle.loads(pickle.dumps(draws))
    same(again, draws)
    assert isinstance(again, gm.SavedDraws) and isinstance(draws, gm.SavedDraws)
    assert again.path == draws.path
    same(copy.deepcopy(draws), draws)


def test_another_process_reads_the_pickle(tmp_path):
    draws = sample(*by_lambda())
    (tmp_path / "draws.pickle").write_bytes(pickle.dumps(draws))
    code = "import pickle, sys; print(float(pickle.load(open(sys.argv[1], 'rb')).position['mu'].sum()))"
    command = [sys.executable, "-c", code, str(tmp_path / "draws.pickle")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(found) == pytest.approx(float(np.asarray(draws.position["mu"]).sum()), rel=1e-6)
