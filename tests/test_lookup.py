"""Rows of a table by an index that is data: values, gradients, and what the index may not be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of

import gspmd_mcmc as gm
from gspmd_mcmc.targets import lookup


def rows_and_table(entries, rows, shape, seed=0):
    rng = np.random.default_rng(seed)
    index = rng.integers(0, entries, rows).astype(np.int32)
    return index, rng.normal(size=(entries, *shape))


# What other platforms than a CPU do, on a CPU: of a gradient, an index, and the number of entries.
summed_in_order = jax.jit(lookup._summed_by_index, static_argnums=2)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
@pytest.mark.parametrize(("entries", "rows"), [(7, 50), (50, 7), (1, 1), (1, 200), (300, 5000)])
def test_values_and_gradients_are_those_of_an_index(x64, entries, rows, shape):
    index, table = rows_and_table(entries, rows, shape)

    @jax.jit
    def gradients(table, index):
        totals = (lambda t: jnp.sum(jnp.sin(gm.lookup(t, index))), lambda t: jnp.sum(jnp.sin(t[index])))
        return [jax.jvp(jax.grad(total), (table,), (table,)) for total in totals]

    np.testing.assert_array_equal(jax.jit(gm.lookup)(table, index), table[index])
    for ours, plain in zip(*gradients(table, index), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("entries", [1, 3, 40, 500])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 2000])
def test_sums_of_sorted_rows_are_those_of_a_scatter(x64, entries, rows):
    index, _ = rows_and_table(entries, rows, ())
    grad = np.random.default_rng(1).normal(size=(rows, 2))
    expected = np.zeros((entries, 2))
    np.add.at(expected, index, grad)
    np.testing.assert_allclose(summed_in_order(grad, index, entries), expected, rtol=0, atol=1e-12)


def test_one_index_of_many_rows_reaches_over_all_chunks(x64):
    index = np.r_[np.zeros(3), np.full(5000, 1), np.full(2, 3)].astype(np.int32)
    sums = summed_in_order(np.ones((len(index), 1)), index, 4)
    np.testing.assert_array_equal(np.asarray(sums)[:, 0], [3, 5000, 0, 2])


def test_float32_sums_lose_no_more_than_their_rounding():
    """A running total of all rows would cost the small sums after a large one their digits."""
    index = np.repeat(np.arange(100, dtype=np.int32), 1000)
    grad = np.where(index == 0, 1e6, 1e-3).astype(np.float32)[:, None]
    sums = np.asarray(summed_in_order(grad, index, 100), float)[:, 0]
    np.testing.assert_allclose(sums, [1e9, *[1.0] * 99], rtol=1e-5)


def test_an_index_outside_of_the_table_is_not_the_nearest_entry():
    index = jnp.array([0, 3, -1, 2])
    found = gm.lookup(jnp.arange(3.0), index)
    np.testing.assert_array_equal(np.isnan(found), [False, True, True, False])
    grad = jax.jit(jax.grad(lambda t: jnp.sum(gm.lookup(t, index))))(jnp.arange(3.0))
    np.testing.assert_array_equal(grad, [1, 0, 1])
    np.testing.assert_array_equal(summed_in_order(np.ones((4, 1)), index, 3)[:, 0], [1, 0, 1])


def test_what_is_no_index_is_refused():
    table = jnp.zeros((3, 2))
    with pytest.raises(TypeError, match="one integer per row"):
        gm.lookup(table, jnp.zeros(4))
    with pytest.raises(TypeError, match="one integer per row"):
        gm.lookup(table, jnp.zeros((4, 1), jnp.int32))
    with pytest.raises(ValueError, match="floating parameters"):
        gm.lookup(jnp.arange(3), jnp.zeros(4, jnp.int32))


def test_a_gradient_over_devices_is_one_all_reduce():
    mesh = mesh_of({"data": 8})
    index, table = rows_and_table(40, 800, (3,))
    y = np.random.default_rng(2).normal(size=800).astype(np.float32)
    data = gm.place({"item": index, "y": y}, mesh, P("data"))

    def terms(params, row):
        return -0.5 * (row["y"] - jnp.sum(gm.lookup(params["items"], row["item"]), axis=1)) ** 2

    target = gm.Posterior(lambda p: -0.5 * p["items"] ** 2, gm.Plate(terms, data))
    position = {"items": jnp.asarray(table, jnp.float32)}
    report = gm.communication(lambda t, x: t.grad(x), target, position)
    assert [c.kind for c in report.collectives] == ["all-reduce"]

    def log_density(t):
        return -0.5 * jnp.sum(t**2) - 0.5 * jnp.sum((y - jnp.sum(t[index], axis=1)) ** 2)

    expected = jax.jit(jax.grad(log_density))(position["items"])
    np.testing.assert_allclose(target.grad(position)["items"], expected, rtol=1e-4, atol=1e-4)


def test_an_index_of_bytes_reaches_the_last_entry():
    """The number that stands for no entry is beyond what the bytes of an index hold."""
    index = np.r_[np.arange(256), 255].astype(np.uint8)
    sums = summed_in_order(np.ones((len(index), 1)), index, 256)
    np.testing.assert_array_equal(np.asarray(sums)[:, 0], [*[1] * 255, 2])
