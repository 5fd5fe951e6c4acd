"""Data of every kind that tables hold: each is right, or refused before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

import gspmd_mcmc as gm

NUM = 8
DENSE = np.zeros((NUM, 3), np.float32)
DENSE[[0, 3, 7], [1, 2, 0]] = 1.0, 2.0, 5.0


def no_terms(params, rows):
    return jnp.zeros(len(jax.tree.leaves(rows)[0]))


def placed_by_groups(mesh):
    groups = gm.Groups(np.arange(NUM), mesh, None if mesh is None else P("data"))
    return lambda x: groups.place_rows({"x": x}).rows["x"]


DOORS = {
    "place": lambda x: gm.place({"x": x}, gm.make_mesh(data=8), P("data"))["x"],
    "place_local": lambda x: gm.place_local({"x": x}, gm.make_mesh(data=8), P("data"))["x"],
    "Plate": lambda x: gm.Plate(no_terms, {"x": x}).data["x"],
    "Groups": lambda x: placed_by_groups(gm.make_mesh(data=2, devices=jax.devices()[:2]))(x),
    "Groups without a mesh": lambda x: placed_by_groups(None)(x),
}
every_door = pytest.mark.parametrize("door", DOORS)


def scipy_rows():
    return pytest.importorskip("scipy.sparse").csr_array(DENSE)


SPARSE = {
    "BCOO": lambda: sparse.BCOO.fromdense(jnp.asarray(DENSE)),
    "BCSR": lambda: sparse.BCSR.fromdense(jnp.asarray(DENSE)),
    "SciPy": scipy_rows,
}


@every_door
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_rows_are_refused(door, kind):
    with pytest.raises(TypeError, match=r"\['x'\]: expected an array of rows, got a sparse matrix"):
        DOORS[door](SPARSE[kind]())


def test_a_sparse_matrix_may_be_whole_and_bound():
    mesh = gm.make_mesh(data=8)
    x = gm.place(SPARSE["BCOO"](), mesh, P())
    np.testing.assert_array_equal(x.todense(), DENSE)

    def density(x, w):
        return x @ w

    for bound in (x, SPARSE["BCOO"]()):
        target = gm.LogDensity(Partial(density, bound))
        np.testing.assert_allclose(target.grad(jnp.ones(3)), DENSE.sum(axis=0))


def test_one_of_scipy_is_to_be_converted_before_it_is_bound():
    with pytest.raises(TypeError, match="BCOO.from_scipy_sparse"):
        gm.LogDensity(Partial(lambda x, w: x @ w, scipy_rows()))
    with pytest.raises(TypeError, match="BCOO.from_scipy_sparse"):
        gm.LogDensity(lambda w, x: x @ w, scipy_rows())
    numpyro = pytest.importorskip("numpyro")
    normal = pytest.importorskip("numpyro.distributions").Normal

    def model(x):
        numpyro.factor("terms", jnp.sum(x @ numpyro.sample("w", normal(jnp.zeros(3), 1.0))))

    with pytest.raises(TypeError, match=r"\['x'\]: .*BCOO.from_scipy_sparse"):
        gm.from_numpyro(model, scipy_rows())


@every_door
@pytest.mark.parametrize("number", [1e39, -1e300])
def test_numbers_beyond_float32_are_refused(door, number):
    x = np.arange(NUM) * 1.0
    x[5] = number
    with pytest.raises(ValueError, match="holds numbers beyond 3.4e"):
        DOORS[door](x)


@every_door
def test_a_constant_that_float32_rounds_to_zero_is_refused(door):
    with pytest.raises(ValueError, match="float32 cannot hold 1e-50"):
        DOORS[door](np.full(NUM, 1e-50))


@every_door
def test_infinities_and_nan_stay(door):
    x = np.array([np.inf, -np.inf, np.nan, *range(5)])
    np.testing.assert_array_equal(np.unique(DOORS[door](x)), np.unique(x.astype(np.float32)))


@every_door
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i8", "<f8", "float16"])
def test_every_order_of_bytes_is_read(door, dtype):
    np.testing.assert_array_equal(np.unique(DOORS[door](np.arange(NUM, dtype=dtype))), np.arange(NUM))


@every_door
def test_long_doubles_are_to_be_converted(door):
    with pytest.raises(ValueError, match=r"x.astype\(np.float64\)"):
        DOORS[door](np.arange(NUM, dtype=np.longdouble))


@every_door
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([1.5] * NUM, object), r"convert numbers, x.astype\(float\)"),
        (np.zeros(NUM, [("a", "f4"), ("b", "i4")]), "place each of its fields as a leaf"),
    ],
)
def test_arrays_of_anything_else_say_what_to_do(door, x, message):
    with pytest.raises(ValueError, match=message):
        DOORS[door](x)


@every_door
def test_no_mask_passes_inside_an_index(door):
    masked = np.ma.masked_array(np.arange(NUM), mask=np.arange(NUM) == 2)
    with pytest.raises(ValueError, match="the mask would be lost"):
        DOORS[door](gm.LookupIndex(masked, NUM))


def test_times_are_no_index():
    with pytest.raises(TypeError, match=r"expected one integer per row, .*, got timedelta64\[D\]"):
        gm.LookupIndex(np.arange(NUM).astype("timedelta64[D]"), NUM)
