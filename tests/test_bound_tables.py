"""Tables that a likelihood binds: read inside a plate as anywhere else, however they are placed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gspmd_mcmc as gm

NUM_ROWS, NUM_ENTRIES = 41, 8
rng = np.random.default_rng(0)
TABLE = np.sort(rng.normal(size=NUM_ENTRIES)).astype(np.float32)
INDEX = rng.integers(0, NUM_ENTRIES, NUM_ROWS).astype(np.int32)
X = rng.normal(size=NUM_ROWS).astype(np.float32)
READS = {
    "gather": (lambda table, i, x: table[i], lambda table: table[INDEX]),
    "entry": (lambda table, i, x: table[3] + 0 * x, lambda table: np.full(NUM_ROWS, table[3])),
    "slice": (lambda table, i, x: jnp.sum(table[2:5]) + 0 * x, lambda table: np.sum(table[2:5])),
    "lookup": (lambda table, i, x: gm.lookup(table, i), lambda table: table[INDEX]),
    "interp": (
        lambda table, i, x: jnp.interp(x, table, table**2),
        lambda table: np.interp(X, table, table**2),
    ),
    "searchsorted": (
        lambda table, i, x: jnp.searchsorted(table, x) * 1.0,
        lambda table: np.searchsorted(table, X) * 1.0,
    ),
    "loop": (
        lambda table, i, x: jax.lax.fori_loop(
            0, NUM_ENTRIES, lambda k, sums: sums + table[k] * x, jnp.zeros_like(x)
        ),
        lambda table: np.sum(table) * X,
    ),
    "jit": (
        lambda table, i, x: jax.jit(lambda table, i: table.at[2].add(1.0)[i])(table, i),
        lambda table: (table + np.eye(NUM_ENTRIES, dtype=np.float32)[2])[INDEX],
    ),
}
MESHES = {
    "data": lambda: gm.make_mesh(data=8),
    "chains and data": lambda: gm.make_mesh(chains=4, data=2),
    "Explicit": lambda: jax.make_mesh((8,), ("data",)),
}


def scaled_terms(read, table, params, row):
    """Terms whose derivative in the scale is what is read."""
    return params["scale"] * read(table, row["i"], row["x"])


def log_prior(params):
    return -0.5 * params["scale"] ** 2


def scale_target(read, table, mesh):
    data = gm.place({"i": INDEX, "x": X}, mesh, P("data"))
    return gm.Posterior(log_prior, gm.Plate(Partial(Partial(scaled_terms, read), table), data))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("how", READS)
def test_a_bound_table_that_lies_on_the_mesh_is_read(how, mesh):
    read, expected = READS[how]
    mesh = MESHES[mesh]()
    target = scale_target(read, gm.place(TABLE, mesh, P()), mesh)
    found = target.grad({"scale": jnp.zeros(())})["scale"]
    right = np.sum(np.broadcast_to(expected(TABLE), NUM_ROWS), dtype=np.float64)
    assert found == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("laid", ["cut over the rows' axis", "NumPy"])
def test_a_bound_table_may_be_cut_or_on_the_host(laid):
    mesh = gm.make_mesh(data=8)
    table = TABLE if laid == "NumPy" else gm.place(TABLE, mesh, P("data"))
    target = scale_target(READS["gather"][0], table, mesh)
    found = target.grad({"scale": jnp.zeros(())})["scale"]
    assert found == pytest.approx(np.sum(TABLE[INDEX], dtype=np.float64), rel=1e-5)


def test_what_a_bijection_holds_may_lie_on_the_mesh():
    transforms = pytest.importorskip("numpyro.distributions.transforms")
    mesh = gm.make_mesh(data=8)
    loc, scale = (gm.place(np.float32(x), mesh, P()) for x in (2.0, 3.0))
    data = gm.place(X[:40], mesh, P("data"))
    target = gm.Posterior(
        None,
        gm.Plate(lambda params, x: -0.5 * (params["z"] - x) ** 2, data, local="z"),
        bijections={"z": transforms.AffineTransform(loc, scale)},
    )
    z = np.linspace(-1, 1, 40, dtype=np.float32)
    found = target.grad({"z": z})["z"]
    np.testing.assert_allclose(found, -3 * (2 + 3 * z - X[:40]), rtol=1e-5, atol=1e-5)


def test_chains_with_a_bound_table_are_those_of_one_device():
    def sampled(mesh):
        kernel = gm.HMC(scale_target(READS["interp"][0], gm.place(TABLE, mesh, P()), mesh), 0.1, 3)
        state = kernel.init({"scale": jnp.float32(0.1)})
        return jax.jit(gm.HMC.step)(kernel, jax.random.key(0), state)[0].position["scale"]

    one = sampled(gm.make_mesh(data=1, devices=jax.devices()[:1]))
    np.testing.assert_allclose(sampled(gm.make_mesh(data=8)), one, rtol=1e-5)


def test_an_array_that_a_plate_was_made_of_may_be_written_to():
    for _ in range(20):  # JAX shares the memory of some arrays, by where they happen to be
        x = np.zeros(4_096, np.float32)
        plate = gm.Plate(lambda params, x: params * x, x)
        bound = gm.LogDensity(lambda params, x: params * jnp.sum(x), x)
        x[:] = 1.0
        assert not np.any(plate.data) and not np.any(bound.data[0])


def test_a_placed_table_that_a_likelihood_closes_over_is_to_be_bound():
    """Or is read rightly: JAX 0.9 takes it."""
    mesh = gm.make_mesh(data=8)
    table = gm.place(TABLE, mesh, P())

    def terms(params, row):
        return params["scale"] * table[row["i"]]

    target = gm.Posterior(log_prior, gm.Plate(terms, gm.place({"i": INDEX}, mesh, P("data"))))
    try:
        found = target.grad({"scale": jnp.zeros(())})["scale"]
    except ValueError as error:
        assert "mesh" in str(error)
        assert any("Bind it, jax.tree_util.Partial" in note for note in error.__notes__)
    else:
        assert jax.__version_info__ < (0, 10)
        np.testing.assert_allclose(found, TABLE[INDEX].sum(), rtol=1e-5)
