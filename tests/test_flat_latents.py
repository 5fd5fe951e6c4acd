"""Latents that move no log density are told of; walls, dead units and modes are not."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

KEY = jax.random.key(0)
MESH = gm.make_mesh(chains=2, data=4)
Y = np.random.default_rng(0).normal(size=41).astype(np.float32)
THREE = {"a": jnp.zeros(3), "b": jnp.zeros(())}


def sample(target, position, **options):
    counts = {"num_chains": 2, "num_warmup": 0, "num_samples": 2, "progress": False}
    return gm.sample(KEY, target, position, kernel=gm.HMC(target, 1e-3, 1), **counts, **options)


def messages(target, position):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sample(target, position)
    return [str(w.message) for w in caught if "wander off" in str(w.message)]


def read_in_part(x):
    return -0.5 * x["a"][:2] ** 2, -0.5 * x["b"] ** 2


def times_zero(x):
    return -0.5 * x["a"] ** 2, -0.5 * (0 * x["b"] - 1) ** 2


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (read_in_part, r"\['a'\]: the log density is the same whatever 1 of its 3 numbers are"),
        (times_zero, r"\['b'\]: the log density is the same whatever 1 of its 1 numbers are"),
    ],
)
def test_numbers_that_move_nothing_are_told_of(density, message):
    with pytest.warns(gm.SamplingWarning, match=message):
        sample(gm.LogDensity(density), THREE)


def box(x):
    is_in = jnp.all(jnp.abs(x["a"]) < 3) & (jnp.abs(x["b"]) < 100)
    return jnp.where(is_in, 0.0, -jnp.inf)


def dead_unit(x):
    """One that is dead at all starts, and normal beyond."""
    return -0.5 * x["a"] ** 2, -jax.nn.relu(jnp.abs(x["b"]) - 50.0)


def difference(x):
    """Where chains start no number has a slope; moved alike, none would ever have one."""
    return -jax.nn.relu(jnp.abs(x["a"][0] - x["a"][1]) - 50.0), -0.5 * x["a"][1:] ** 2, -(x["b"] ** 2)


@pytest.mark.parametrize("density", [box, dead_unit, difference])
def test_a_slope_that_is_0_where_chains_start_is_not_enough(density):
    assert messages(gm.LogDensity(density), THREE) == []


def test_a_start_at_a_mode_is_not_told_of():
    target = gm.LogDensity(lambda x: (-0.5 * x["a"] ** 2, -0.5 * x["b"] ** 2))
    start = gm.per_chain(jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), THREE))
    assert messages(target, start) == []


def prior(x):
    return -0.5 * x["w"][:1] ** 2


def rows_of_effects(x, rows):
    return -0.5 * (rows["y"] - x["w"][0] - rows["seen"] * x["effect"]) ** 2


def test_effects_of_rows_that_do_not_read_theirs_are_counted_without_pad():
    """41 rows on 4 devices have 3 of pad; of every fourth row the effect has no density."""
    seen = (np.arange(41) % 4 > 0).astype(np.float32)
    data = gm.place({"y": Y, "seen": seen}, MESH, P("data"))
    target = gm.Posterior(prior, gm.Plate(rows_of_effects, data, local="effect"))
    told = messages(target, {"w": jnp.zeros(2), "effect": jnp.zeros(41)})
    assert [message[: message.index(", so")].split("whatever ")[1] for message in told] == [
        "11 of its 41 numbers are",
        "1 of its 2 numbers are",
    ]
