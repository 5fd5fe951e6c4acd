"""A log density too large for its floating-point numbers is told of, and one that is not is not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.sampling.errors import SamplingWarning
from gspmd_mcmc.targets.resolution import on_coarse_terms


def added_up(x):
    return jnp.sum(-0.5 * x["x"] ** 2) + 1e8


def apart(x):
    return -0.5 * x["x"] ** 2, jnp.float32(1e8)


def large_sum(x):
    return -4e6 - jnp.sum(-0.5 * x["x"] ** 2)


def per_observation(x):
    return -1e5 - 0.5 * x["x"] ** 2


def small(x):
    return -0.5 * jnp.sum(x["x"] ** 2)


def states_of(target, position):
    """The states of four chains that are spread around a position."""
    spread = jax.tree.map(lambda x: jnp.stack([x + i for i in range(4)]), position)
    return jax.vmap(gm.HMC(target, 0.1, 1).init)(spread)


def said_of(fn):
    target = gm.LogDensity(fn)
    return on_coarse_terms(target, states_of(target, {"x": jnp.zeros(3)}))


@pytest.mark.parametrize("fn", [added_up, large_sum])
def test_a_sum_that_lost_its_digits_is_told_of(fn):
    said = said_of(fn)
    assert "(the whole)" in said and "apart" in said and "float64" in said


@pytest.mark.parametrize("fn", [apart, per_observation, small])
def test_summands_apart_say_nothing(fn):
    assert said_of(fn) == ""


def test_float64_says_nothing():
    with jax.enable_x64(True):
        assert said_of(added_up) == ""


def row(params, block):
    return -0.5 * params["m"] ** 2 - block["x"]


def prior(params):
    return -0.5 * params["m"] ** 2


def large_prior(params):
    return prior(params) - 1e8


@pytest.mark.parametrize(("log_prior", "is_told"), [(prior, False), (large_prior, True)])
def test_a_plates_sums_are_two_floats_and_the_prior_is_not(log_prior, is_told):
    x = np.full(1000, 1e5, np.float32)  # 1e8 in all, and no row near 2^20
    target = gm.Posterior(log_prior, gm.Plate(row, {"x": x}))
    states = states_of(target, {"m": jnp.zeros(())})
    assert float(jnp.max(jnp.abs(states.terms["plates"][0]))) > 2**20
    assert ("['prior']" in on_coarse_terms(target, states)) == is_told


@pytest.mark.parametrize(("fn", "is_told"), [(added_up, True), (apart, False)])
def test_sample_warns(fn, is_told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SamplingWarning)
        gm.sample(
            jax.random.key(0),
            gm.LogDensity(fn),
            {"x": jnp.zeros(3)},
            num_warmup=10,
            num_samples=5,
            progress=False,
        )
    assert any("numbers lie 8 apart" in str(w.message) for w in caught) == is_told
