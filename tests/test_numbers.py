"""Numbers that 32 bits do not hold are refused at every door, and those that they hold are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gspmd_mcmc as gm
from gspmd_mcmc.placement.numbers import check_numbers

MESH = gm.make_mesh(data=8)
RNG = np.random.default_rng(0)
LARGE = np.arange(8) + 2**40 + 5
TIMES = 1.7e9 + RNG.uniform(0, 60, 8)
MASKED = np.ma.masked_array(np.arange(8.0), np.arange(8) == 3)
DATES = np.datetime64("2024-01-01") + np.arange(8)
OBJECTS = np.array([1.0, None] * 4)


def log_likelihood(params, block):
    return -0.5 * (block["x"] - params["mean"]) ** 2


def bound(x, params, block):
    return log_likelihood(params, block) + x[0]


DOORS = {
    "plate": lambda x: gm.Plate(log_likelihood, {"x": x}),
    "place": lambda x: gm.place({"x": x}, MESH, P("data")),
    "whole": lambda x: gm.place({"x": x}, MESH),
    "place_local": lambda x: gm.place_local({"x": x}, MESH, P("data")),
    "log_density": lambda x: gm.LogDensity(log_likelihood, {"x": x}),
    "partial": lambda x: gm.Plate(Partial(bound, x), {"x": np.ones(8, np.float32)}),
}
BAD = {
    "large integers": (LARGE, "holds integers that int32 cannot"),
    "large unsigned": (LARGE.astype(np.uint64), "holds integers that uint32 cannot"),
    "times": (TIMES, "float32 cannot tell its values apart: they lie around 1.7e"),
    "complex": (1j * TIMES, "complex64 cannot tell its values apart"),
    "tiny": (TIMES * 1e-60, "float32 cannot tell its values apart"),
    "masked": (MASKED, "the mask would be lost"),
    "dates": (DATES, r"got datetime64\[D\]. Subtract the first and divide"),
    "objects": (OBJECTS, "expected an array of numbers, got ndarray of "),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", BAD)
def test_numbers_that_would_be_others_are_refused_at_every_door(door, kind):
    array, message = BAD[kind]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        DOORS[door](array)
    assert door == "partial" or "['x']" in str(error.value)


def test_a_reader_and_a_model_are_doors_too():
    two = gm.make_mesh(data=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="leaf \\(read\\): float32 cannot tell"):
        gm.place_from_reader(lambda a, b: TIMES[a:b], (8,), np.float64, two, P("data"))
    numpyro = pytest.importorskip("numpyro")

    def model(t, n):
        numpyro.sample("mean", numpyro.distributions.Normal(t.sum(), n))

    for args, message in (
        ((TIMES, 3), "argument .*'t'.*float32 cannot"),
        ((0 * TIMES, LARGE[0]), "'n'"),
    ):
        with pytest.raises(ValueError, match=message):
            gm.from_numpyro(model, *args)


def test_values_that_collapse_are_told_from_constants_and_offsets_that_do_no_harm():
    """Rounding is under a thousandth of the spread, or all there is, in what nobody would call lost."""
    n = 5000
    fine = {
        "normal": RNG.normal(size=n),
        "scales": RNG.normal(size=(n, 3)) * [1e-6, 1, 1e6],
        "cauchy": RNG.standard_cauchy(n),
        "years": 2000.0 + RNG.integers(0, 20, n),
        "a year of seconds": 1.7e9 + RNG.uniform(0, 3e7, n),
        "sorted": np.linspace(0, 1, n),
        "rare": (RNG.uniform(size=n) < 0.01) * 1.1,
        "constant": np.full(n, 0.1),
        "constant but for float64's rounding": 0.1 + RNG.integers(0, 4, n) * 2.0**-56,
        "one row": np.array([1.7e9 + 1 / 3]),
        "missing": np.where(RNG.uniform(size=n) < 0.1, np.nan, RNG.normal(size=n)),
        "zeros": np.zeros((n, 2)),
        "nothing": np.zeros((0, 2)),
    }
    for name, array in fine.items():
        check_numbers(name, array)
    lost = {
        "one column of three": RNG.normal(size=(n, 3)) + [0, 0, 1e6],
        "times with a mark for missing": np.where(
            RNG.uniform(size=n) < 0.1, 0, 1.7e9 + RNG.normal(size=n)
        ),
        "far off": 1e8 + RNG.normal(size=n),
    }
    for name, array in lost.items():
        with pytest.raises(ValueError, match=f"{name}: float32 cannot tell"):
            check_numbers(name, array)
        with jax.enable_x64(True):
            check_numbers(name, array)


def test_what_is_on_devices_already_or_narrow_is_taken_as_it_is():
    for x in (jnp.asarray(TIMES), np.arange(8, dtype=np.uint32), np.ones(8, bool), np.ones(8, "half")):
        for door in DOORS.values():
            door(x)
