"""A run is continued with the data and the functions that it began with, to the bit of the data."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from models import mesh_of

import gspmd_mcmc as gm
from gspmd_mcmc.sampling.digests import data_digests

NUM_ROWS, NUM_GROUPS = 17, 5
RNG = np.random.default_rng(0)
Y = RNG.normal(size=(NUM_ROWS, 2)).astype(np.float32)
KEYS = np.arange(NUM_ROWS) % NUM_GROUPS
MESHES = ("1", "3", "8", "2x4")
MEAN = np.zeros(2, np.float32)


def prior(center, x):
    return -0.5 * (x["mean"] - center) ** 2


def likelihood(x, rows):
    return jnp.sum(-0.5 * (rows["y"] - x["mean"][None]) ** 2, axis=1)


def derived_of(factor):
    """Two functions of one name, of which only a value that they close over differs."""

    def derived(params):
        return {"scaled": factor * params["mean"] + 1}

    return derived


def collect_of(index, name):
    def collect(position, info):
        return {"entry": position["mean"][index], "of info": getattr(info, name)}

    return collect


def run(path, num_samples, mesh="1", y=Y, center=MEAN, factor=1.0, **options):
    data = gm.place({"y": y}, mesh_of(mesh), P("data"))
    plate, derived = gm.Plate(likelihood, data), derived_of(factor)
    target = gm.Posterior(Partial(prior, center), plate, derived=derived)
    options = {"num_warmup": 0, "num_chains": 2, "progress": False, "checkpoint": path} | options
    options |= {"kernel": gm.HMC(target, 0.1, 3), "num_samples": num_samples}
    return gm.sample(jax.random.key(0), target, {"mean": jnp.zeros(2)}, **options)


def saved_run(tmp_path_factory, **options):
    path = tmp_path_factory.mktemp("saved") / "run"
    run(path, 6, **options)
    return path


@pytest.fixture(scope="module")
def with_derived(tmp_path_factory):
    return saved_run(tmp_path_factory)


@pytest.fixture(scope="module")
def with_collect(tmp_path_factory):
    return saved_run(tmp_path_factory, collect=collect_of(0, "energy"))


def next_float(array, index):
    array = array.copy()
    array[index] = np.nextafter(array[index], np.float32(9))
    return array


# Functions.


def test_functions_that_compute_the_same_are_continued(with_derived, tmp_path):
    draws = run(shutil.copytree(with_derived, tmp_path / "run"), 12, factor=1.0)
    whole = run(None, 12)
    jax.tree.map(np.testing.assert_array_equal, draws.position, whole.position)
    np.testing.assert_allclose(draws.position["scaled"], 1 + np.asarray(draws.position["mean"]))


@pytest.mark.parametrize("factor", [1000, 1.001, -1])
def test_another_derived_of_the_same_name_is_refused(factor, with_derived, tmp_path):
    path = shutil.copytree(with_derived, tmp_path / "run")
    with pytest.raises(ValueError, match="scaled of its draws is another quantity now.*derived"):
        run(path, 12, factor=factor)
    assert gm.open_draws(path / "draws").num_draws == 6


@pytest.mark.parametrize(
    ("options", "leaf"), [((1, "energy"), "entry"), ((0, "energy_error"), "of info")]
)
def test_another_collect_of_the_same_name_is_refused(options, leaf, with_collect, tmp_path):
    """It reads another latent, or another part of the step's info."""
    path = shutil.copytree(with_collect, tmp_path / "run")
    with pytest.raises(ValueError, match=f"{leaf} of its draws is another quantity now"):
        run(path, 12, collect=collect_of(*options))
    assert run(path, 12, "8", collect=collect_of(0, "energy")).num_draws == 12


# Data.


@pytest.mark.parametrize(
    ("options", "leaf"),
    [
        ({"y": next_float(Y, (16, 1))}, "plates.*data.*'y'"),
        ({"y": next_float(Y, (16, 1)), "mesh": "8"}, "plates.*data.*'y'"),
        ({"center": next_float(MEAN, 0)}, "log_prior"),
    ],
)
def test_data_that_differ_by_a_bit_are_refused(options, leaf, with_derived, tmp_path):
    """The last real row of 17, or a value that a function is bound to."""
    path = shutil.copytree(with_derived, tmp_path / "run")
    with pytest.raises(ValueError, match=f"the target's data .*{leaf}.* are not those"):
        run(path, 12, **options)
    assert run(path, 12, "8").num_draws == 12


def group_target(mesh, rows, keys=KEYS, table=None):
    groups = gm.Groups(keys, mesh, None if mesh is None else P("data"))
    of_rows = gm.Plate(likelihood, groups.place_rows(rows), local="effect")
    of_groups = gm.Plate(likelihood, groups.place(table), local="effect")
    return gm.Posterior(None, of_rows, of_groups)


def row_target(mesh, rows):
    data = rows if mesh is None else gm.place(rows, mesh, P("data"))
    return gm.Posterior(None, gm.Plate(likelihood, data))


ROWS: dict[str, Any] = {
    "float32": Y,
    "uint8": RNG.integers(0, 256, (NUM_ROWS, 3)).astype(np.uint8),
    "bool": RNG.integers(0, 2, NUM_ROWS).astype(bool),
    "int32": RNG.integers(-9, 9, NUM_ROWS).astype(np.int32),
    "float16": RNG.normal(size=(NUM_ROWS, 2, 2)).astype(np.float16),
    "bfloat16": RNG.normal(size=NUM_ROWS).astype(jnp.bfloat16),
    "complex64": (RNG.normal(size=NUM_ROWS) * 1j).astype(np.complex64),
}


@pytest.mark.parametrize("make", [row_target, group_target])
def test_a_digest_does_not_depend_on_the_mesh(make):
    expected = data_digests(make(None, ROWS))
    for name in MESHES:
        assert data_digests(make(mesh_of(name), ROWS)) == expected


@pytest.mark.parametrize("make", [row_target, group_target])
def test_a_digest_changes_with_any_bit(make):
    expected = data_digests(make(None, ROWS))
    for name, array in ROWS.items():
        for place in (0, array.size // 2, array.size - 1):
            bits = array.copy()
            bits.reshape(-1).view(np.uint8)[place * array.itemsize] ^= 1
            found = data_digests(make(None, ROWS | {name: bits}))
            (path,) = (path for path in expected if f"'{name}'" in path)
            assert found[path] != expected[path]


def test_a_digest_changes_with_the_order_of_rows_and_with_their_groups():
    swapped = np.r_[1, 0, 2:NUM_ROWS]
    assert data_digests(row_target(None, {"y": Y})) != data_digests(row_target(None, {"y": Y[swapped]}))
    rows, same = {"x": Y[:, 0], "y": Y}, np.r_[NUM_GROUPS, 1:NUM_GROUPS, 0, NUM_GROUPS + 1 : NUM_ROWS]
    expected = data_digests(group_target(None, rows))
    # Rows of one group may come in another order, but not parts of them.
    assert data_digests(group_target(None, jax.tree.map(lambda x: x[same], rows))) == expected
    assert data_digests(group_target(None, rows | {"y": Y[same]})) != expected
    assert data_digests(group_target(None, rows, keys=KEYS[swapped])) != expected
    table = {"y": RNG.normal(size=(NUM_GROUPS, 1))}
    other = {"y": table["y"][[1, 0, 2, 3, 4]]}
    first, second = (data_digests(group_target(None, rows, table=x)) for x in (table, other))
    assert first != second


def test_collected_complex_numbers_are_saved_and_continued(tmp_path):
    target = gm.LogDensity(lambda x: -0.5 * x**2)

    def sampled(num_samples, **options):
        counts = {"num_chains": 2, "num_warmup": 0, "num_samples": num_samples, "progress": False}
        options |= {"collect": lambda x, info: {"angle": jnp.exp(1j * x)}}
        kernel = gm.HMC(target, 0.5, 2)
        return gm.sample(jax.random.key(0), target, jnp.zeros(3), kernel=kernel, **counts, **options)

    sampled(4, checkpoint=tmp_path / "run")
    both = sampled(8, checkpoint=tmp_path / "run").position["angle"]
    np.testing.assert_array_equal(both, sampled(8).position["angle"])
