"""What draws recommend: local to a user's device, its entropy, and hit rates that tell calibration."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats
from seeds import seed, within

import gspmd_mcmc as gm

# The demos import each other as scripts of one folder do.
sys.path.append(str(Path(__file__).resolve().parent.parent / "demos"))

from demos.movielens_choices import deciles, entropies, hit_rates, predict

DRAWS, USERS, MOVIES, DIMENSIONS = 5, 16, 24, 3
SHAPES = {"U": (USERS, DIMENSIONS), "V": (MOVIES, DIMENSIONS), "u": (USERS,), "v": (MOVIES,)}


@pytest.fixture
def mesh():
    return gm.make_mesh(data=8)


def drawn(mesh, specs):
    """Random positions [draws, ...] and cells, laid out; the same on the host."""
    rng = np.random.default_rng(0)
    host = {n: rng.normal(size=(DRAWS, *s)).astype(np.float32) for n, s in SHAPES.items()}
    cells = rng.integers(0, 4, size=(USERS, MOVIES)).astype(np.uint8)
    cells[3] = 1  # a user who has watched all
    laid_out = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in host.items()}
    return laid_out, gm.place(cells, mesh, P("data")), host, cells


BY_USERS = {"U": P(None, "data"), "V": P(), "u": P(None, "data"), "v": P()}


def test_choices_of_all_draws_are_numpys_and_nothing_is_sent(mesh):
    positions, placed, host, cells = drawn(mesh, BY_USERS)
    assert not gm.communication(predict, positions, placed).collectives
    probabilities, choices = predict(positions, placed)
    assert probabilities.sharding.spec[0] == "data" and choices.sharding.spec[:2] == (None, "data")
    log_odds = np.einsum("tik,tjk->tij", host["U"], host["V"])
    log_odds += host["u"][:, :, None] + host["v"][:, None]
    np.testing.assert_allclose(probabilities, (1 / (1 + np.exp(-log_odds))).mean(axis=0), atol=1e-5)
    unseen = np.where(cells == 1, -np.inf, log_odds)
    expected = np.where(np.arange(USERS) == 3, -1, unseen.argmax(axis=2))
    np.testing.assert_array_equal(choices, expected)


def test_movies_over_devices_would_be_sent(mesh):
    positions, placed, *_ = drawn(mesh, BY_USERS | {"V": P(None, "data")})
    assert gm.communication(predict, positions, placed).collectives


def test_entropies_are_scipys():
    rng = np.random.default_rng(seed(0))
    choices = rng.integers(0, 6, size=(200, 30))
    choices[:, 0] = 3
    expected = [stats.entropy(np.bincount(x)) for x in choices.T]
    np.testing.assert_allclose(entropies(choices), expected, rtol=1e-12)
    assert entropies(choices)[0] == 0


def test_deciles_are_groups_of_one_size_in_order():
    values = np.array([5, 1, 1, 9, 0, 2, 2, 2, 7, 3] * 3)
    groups = deciles(values)
    assert [len(group) for group in groups] == [3] * 10
    assert sorted(np.concatenate(groups)) == list(range(30))
    means = [values[group].mean() for group in groups]
    assert means == sorted(means)


def test_only_choices_of_hidden_cells_count():
    cells = np.array([[3, 2, 0, 1], [0, 2, 0, 0], [0, 0, 0, 0]], np.uint8)
    probabilities = np.array([[0.5, 0.25, 0.9, 0.9], [0.9, 0.125, 0.9, 0.9], [0.9] * 4])
    choices = np.array([[0, 1, 0], [1, 2, 1], [0, 0, 2]])  # [draws, users]
    all_users, none = hit_rates(choices, cells, probabilities, [np.arange(3), np.array([2])])
    assert (all_users["observed"], all_users["count"]) == (
        0.5,
        2,
    )  # of user 0 two of three, of user 1 none of one
    assert all_users["expected"] == pytest.approx((0.5 + 0.25 + 0.5 + 0.125) / 4)
    assert none == {"observed": None, "expected": None, "error": None, "count": 0}


def rates_of(probabilities, believed):
    """Hit rates where cells are watched with the probabilities, and the model believes others."""
    rng = np.random.default_rng(seed(1))
    shape = probabilities.shape
    cells = (rng.random(shape) < probabilities) + 2 * (rng.random(shape) < 0.2)
    log_odds = np.log(believed / (1 - believed))
    choices = np.stack([np.argmax(log_odds + rng.normal(size=shape), axis=1) for _ in range(20)])
    return hit_rates(choices, cells.astype(np.uint8), believed, [np.arange(len(cells))])[0]


@pytest.mark.statistical
def test_a_calibrated_model_hits_as_often_as_it_expects():
    probabilities = np.random.default_rng(seed(2)).beta(1, 4, size=(3000, 40))
    rate = rates_of(probabilities, probabilities)
    within(abs(rate["observed"] - rate["expected"]) / rate["error"], 4, "standard errors")


@pytest.mark.statistical
def test_an_overconfident_model_is_seen():
    probabilities = np.random.default_rng(seed(2)).beta(1, 4, size=(3000, 40))
    rate = rates_of(probabilities, np.sqrt(probabilities))
    assert (rate["expected"] - rate["observed"]) / rate["error"] > 10
