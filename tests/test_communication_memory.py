"""What `communication` says that a program holds: arguments, constants, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import communication

MESH = gm.make_mesh(chains=2, data=4)
BIG = np.random.default_rng(0).normal(size=(500, 500)).astype(np.float32)
ROW = jnp.ones((3, 500))


def laid(*shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))


def found(report):
    return [
        (a.path, a.shape, a.dtype, a.spec, a.num_bytes, a.bytes_per_device) for a in report.arguments
    ]


# Arguments.


def test_arguments_have_paths_specs_and_bytes_on_a_device():
    def function(params, batch):
        return params["w"].sum() + batch[0].sum() + batch[1].sum()

    params = {"w": laid(8, 100, spec=P("chains"))}
    batch = (laid(80, 10, spec=P(("chains", "data"))), laid(5, spec=P(), dtype=jnp.int8))
    report = communication(function, params, batch)
    assert found(report) == [
        ("[0]['w']", (8, 100), "float32", P("chains"), 3200, 1600),
        ("[1][0]", (80, 10), "float32", P(("chains", "data")), 3200, 400),
        ("[1][1]", (5,), "int8", P(), 5, 5),
    ]
    assert [a.is_whole for a in report.arguments] == [False, False, True]
    assert report.argument_bytes == 1600 + 400 + 5
    assert (report.mesh, report.num_devices) == ({"chains": 2, "data": 4}, 8)


def test_arguments_that_the_function_does_not_use_are_not_there():
    """jit drops them, and None is no leaf; those after them keep their own shardings."""

    def function(a, unused, b):
        return a["x"].sum() + b.sum()

    a = {"none": None, "x": laid(8, 10, spec=P("data")), "unused": laid(1000, 1000, spec=P())}
    report = communication(function, a, laid(1000, 1000, spec=P()), laid(16, spec=P("chains")))
    assert found(report) == [
        ("[0]['x']", (8, 10), "float32", P("data"), 320, 80),
        ("[2]", (16,), "float32", P("chains"), 64, 32),
    ]
    assert report.argument_bytes == 80 + 32
    assert report.whole == ()


def test_static_arguments_are_none():
    def power(x, n, name):
        return x**n if name == "power" else x

    x = laid(8, spec=P("data"))
    bound = communication(functools.partial(power, n=3, name="power"), x)
    static = communication(jax.jit(power, static_argnums=(1, 2)), x, 3, "power")
    assert found(bound) == found(static) == [("[0]", (8,), "float32", P("data"), 32, 8)]


def test_numbers_keys_and_plain_arrays_are_arguments_as_the_program_takes_them():
    def function(key, scale, x):
        return jax.random.normal(key, (3,)) * scale + x

    report = communication(function, jax.random.key(0), 2.0, np.ones(3))
    assert [(a.path, a.shape, a.num_bytes) for a in report.arguments] == [
        ("[0]", (), 8),
        ("[1]", (), 4),
        ("[2]", (3,), 12),  # a double, which JAX makes single
    ]
    assert report.arguments[0].dtype.startswith("key")
    assert {a.spec for a in report.arguments} == {None}


def test_what_the_compiler_lays_out_is_told_as_it_does():
    """A plain array in a program over a mesh has no sharding before."""
    program = jax.shard_map(lambda x: jnp.sin(x), mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    (only,) = communication(program, np.ones((8, 4), np.float32)).arguments
    assert (only.num_bytes, only.bytes_per_device) == (128, 32)


def test_donated_arguments_share_their_memory_with_results():
    def step(x, y):
        return x + y.sum()

    x, y = laid(8, 100, spec=P("data")), laid(7, spec=P())
    report = communication(jax.jit(step, donate_argnums=0), x, y)
    assert (report.alias_bytes, report.output_bytes) == (800, 800)
    assert found(report)[0] == ("[0]", (8, 100), "float32", P("data"), 3200, 800)
    kept = communication(step, x, y)
    assert kept.alias_bytes == 0
    assert kept.peak_bytes - report.peak_bytes == 800


# What is whole on every device.


def test_a_data_set_that_was_placed_whole_by_mistake_is_pointed_out():
    def log_density(w, data):
        return jnp.sum((data["x"] @ w) ** 2) + jnp.sum(data["y"])

    w, x = laid(250, spec=P()), laid(1000, 250, spec=P())
    report = communication(log_density, w, {"x": x, "y": laid(1000, spec=P("data"))})
    assert report.whole == ("argument [1]['x'] float32[1000, 250], 1 MB",)
    assert "whole on each of 8 devices:\n  argument [1]['x']" in str(report)
    with pytest.raises(
        gm.BudgetExceeded, match=r"whole_bytes: .*found 1 MB\n    argument \[1\]\['x'\]"
    ):
        report.check(whole_bytes=999_999)
    placed = communication(
        log_density, w, {"x": laid(1000, 250, spec=P("data")), "y": laid(4, spec=P())}
    )
    assert placed.whole == ()
    placed.check(whole_bytes=1000)


# Constants.


def closing_over(array):
    return lambda x: jnp.sin(x @ array)


@pytest.mark.parametrize("array", [BIG, jnp.asarray(BIG)])
def test_a_closed_over_array_is_a_constant(array):
    report = communication(closing_over(array), ROW)
    assert report.largest_constant_bytes == BIG.nbytes <= report.constant_bytes < BIG.nbytes + 100
    assert report.constants[0].shape == "f32[500,500]"
    assert report.whole == ()  # on one device nothing is pointed out


def test_a_closed_over_sharded_array_is_a_constant_of_full_size_and_pointed_out():
    array = np.random.default_rng(0).normal(size=(800, 500)).astype(np.float32)
    placed = gm.place(array, gm.make_mesh(), P("data"))
    w = jax.ShapeDtypeStruct((500,), jnp.float32, sharding=NamedSharding(gm.make_mesh(), P()))
    report = communication(lambda w: jnp.sin(placed @ w), w)
    assert report.largest_constant_bytes == placed.nbytes == 1_600_000
    (line,) = report.whole
    assert line.startswith("constant f32[800,500], 1.6 MB: placed, closed over by ")


def test_a_constant_inside_an_inner_program_and_a_loop_is_seen():
    def loop(x):
        return jax.lax.fori_loop(0, 4, lambda i, a: jax.jit(closing_over(BIG))(a), x)

    assert communication(loop, ROW).largest_constant_bytes == BIG.nbytes


def test_a_small_dtype_counts_its_own_bytes():
    small = np.random.default_rng(1).integers(0, 255, (500, 500), dtype=np.uint8)
    report = communication(lambda x: x + small, jnp.zeros((500, 500), jnp.uint8))
    assert (report.constants[0].shape, report.largest_constant_bytes) == ("u8[500,500]", 250_000)


# Memory.


def test_memory_of_known_programs():
    plain = communication(lambda x: x + 1.5, laid(8, 1000, spec=P("data")))
    assert (plain.argument_bytes, plain.output_bytes, plain.temporary_bytes) == (8000, 8000, 0)
    assert plain.peak_bytes == 16_000 + plain.constant_bytes
    assert plain.constant_bytes <= 8
    closed = communication(lambda x: x + BIG, jnp.ones((500, 500)))
    assert (closed.argument_bytes, closed.output_bytes, closed.temporary_bytes) == (10**6, 10**6, 0)
    assert closed.peak_bytes == 3 * 10**6


def test_temporaries_are_counted():
    report = communication(lambda x: jnp.sin(x.T @ x) @ x.T, ROW)
    assert 500 * 500 * 4 <= report.temporary_bytes < 4 * 500 * 500 * 4
