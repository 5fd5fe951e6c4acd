"""Likelihoods of rows in chunks of a group: by chunks where that is the same, which it is to be."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import check_close, mesh_of

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.streaming.chunkwise import chunkwise
from gspmd_mcmc.targets.streaming.slots import ChunkSlots

pytestmark = [
    pytest.mark.filterwarnings("ignore:Groups"),
    pytest.mark.filterwarnings("ignore:small data"),
]
WIDTH = 3
SHIFT = np.linspace(-1.0, 1.0, WIDTH)[None]
# Rows of each group, and of a chunk; of chunks of one row nothing is copied.
SIZES = {64: [128, 64, 192, 256], 16: [48, 47, 16, 112, 79], 1: [3, 1, 4, 2]}


@jax.custom_jvp
def with_own_derivative(x):
    """Twice the number, with a derivative that only its own rule gives."""
    return 2 * x


with_own_derivative.defjvp(lambda x, tangent: (with_own_derivative(*x), 7 * tangent[0]))

ON_CHUNKS = {
    "a sum": lambda w, x: jnp.sum(w * x, axis=1),
    "rows first": lambda w, x: (x * w).sum(-1),
    "einsum": lambda w, x: jnp.einsum("rk,rk->r", w, x),
    "a map of dot": jax.vmap(jnp.dot),
    "a product with ones": lambda w, x: (w * x) @ np.arange(1.0, 1.0 + WIDTH),
    "two sums": lambda w, x: jnp.sum(w * x, axis=1) * jnp.sum(w * x**2, axis=1),
    "not centred": lambda w, x: jnp.sum((SHIFT + jnp.exp(0.1) * jnp.tanh(w)) * x, axis=1),
    "logarithms to the base 2": lambda w, x: jnp.sum(jnp.log2(1 + w**2) * x, axis=1),
    "columns": lambda w, x: w[:, 0] + w[:, 1:2].squeeze(1) * x[:, 0],
    "latents alone": lambda w, x: jnp.sum(w * w, axis=1) + x[:, 0],
    "a column of columns": lambda w, x: jnp.sum(w[:, :1] * w * x, axis=1),
    # A column has copies that XLA makes by a broadcast.
    "a column by columns": lambda w, x: jnp.sum(w[:, :1] * x, axis=1),
    "broadcasts": lambda w, x: jnp.sum(
        (w + jnp.broadcast_to(jnp.arange(3.0), x.shape)) * jnp.broadcast_to(x[:, :1], x.shape), axis=1
    ),
}
ON_ROWS = {
    "the products too": lambda w, x: (jnp.sum(w * x, axis=1, keepdims=True) - w * x)[:, 0],
    "no function of each number": lambda w, x: jnp.sum(jnp.cumsum(w, axis=1) * x, axis=1),
    "columns in another order": lambda w, x: jnp.sum(w[:, ::-1] * x, axis=1),
    "columns of rows": lambda w, x: jnp.sum((w.T * x.T).T, axis=1),
    "columns by a column": lambda w, x: jnp.sum(w * x[:, :1], axis=1),
    "matrices of rows": lambda w, x: jnp.einsum("rkm,rk->rm", jnp.tile(x[:, :, None], (1, 1, 2)), w)[
        :, 1
    ],
    "matrices of products": lambda w, x: (jnp.tile((w * x)[:, :, None], (1, 1, 2)).mT @ SHIFT[0])[:, 1],
    "a matrix of products": lambda w, x: ((w * x) @ np.ones((WIDTH, 2)))[:, 1],
    "a stopped gradient": lambda w, x: jnp.sum(jax.lax.stop_gradient(jnp.tanh(w)) * w * x, axis=1),
    "a derivative of its own": lambda w, x: jnp.sum(with_own_derivative(w) * x, axis=1),
    "a program of its own": jax.jit(lambda w, x: jnp.sum(w * x, axis=1)),
}


def of_group(params, row):
    return -0.5 * jnp.sum(params["w"] ** 2, axis=1)


def target_of(function, sizes, name="none"):
    """Return a target, its density by an index, and a position."""
    rng = np.random.default_rng(0)
    key = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = {"x": rng.normal(size=(len(key), WIDTH)), "y": rng.normal(size=len(key))}

    def of_row(params, row):
        return -0.5 * (row["y"] - function(params["w"], row["x"])) ** 2

    def by_index(params):
        every = of_row({"w": params["w"][key]}, jax.tree.map(jnp.asarray, rows))
        return jnp.sum(every) + jnp.sum(of_group(params, None))

    mesh = None if name == "none" else mesh_of(name)
    groups = gm.Groups(key, mesh, None if mesh is None else P("data"))
    plates = (
        gm.Plate(of_group, groups.place(), local="w"),
        gm.Plate(of_row, groups.place_rows(rows), local="w"),
    )
    position = {"w": jnp.asarray(0.3 * rng.normal(size=(len(sizes), WIDTH)))}
    return gm.Posterior(None, *plates), by_index, position


def grad_of(target, params):
    """Gradient as a user sees it."""
    return local.cut(target, target.grad(local.lay_out(target, params)))


@pytest.mark.parametrize(
    ("function", "chunk"), [*((name, 16) for name in ON_CHUNKS | ON_ROWS), ("a sum", 64), ("a sum", 1)]
)
def test_values_and_gradients_are_those_of_an_index(function, chunk):
    with jax.enable_x64(True):
        target, by_index, position = target_of((ON_CHUNKS | ON_ROWS)[function], SIZES[chunk])
        slots = target.plates[1].slots
        assert isinstance(slots, ChunkSlots) and slots.chunks.rows == chunk
        value, grad = jax.value_and_grad(by_index)(position)
        terms, by_one_pass = target.terms_and_grad(local.lay_out(target, position))
        check_close({"log density": tree.total(terms)}, {"log density": value}, 1e-12)
        check_close(local.cut(target, by_one_pass), grad, 1e-12)
        check_close(grad_of(target, position), grad, 1e-12)


def test_on_devices_of_several_chains_and_differentiated_again():
    """Chains share the rows; second derivatives are those of the density by an index."""
    with jax.enable_x64(True):
        target, by_index, position = target_of(ON_CHUNKS["a sum"], SIZES[16] + [50], "2")
        chains = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), position)
        got = jax.jit(jax.vmap(partial(grad_of, target)))(chains)
        check_close(got, jax.vmap(jax.grad(by_index))(chains), 1e-12)
        _, curved = jax.jvp(partial(grad_of, target), (position,), (position,))
        _, expected = jax.jvp(jax.grad(by_index), (position,), (position,))
        check_close(curved, expected, 1e-12)


@pytest.mark.usefixtures("compiled_as_a_users")
@pytest.mark.parametrize("function", [*ON_CHUNKS, *ON_ROWS])
def test_latents_are_copied_for_rows_where_chunks_do_not_do(function):
    target, _, position = target_of((ON_CHUNKS | ON_ROWS)[function], SIZES[16])
    lowered = jax.jit(target.grad).lower(local.lay_out(target, position))
    assert ("concatenate(" in str(lowered.compile().as_text())) == (function in ON_ROWS)


def test_the_type_is_that_which_the_sum_asks_for():
    """Of float32 into float32, or float64 where that is asked."""
    with jax.enable_x64(True):
        latents, x = jnp.full((2, 3), 1 + 2**-20, jnp.float32), jnp.full((4, 3), 1 / 3, jnp.float32)
        wide = partial(jnp.einsum, "rk,rk->r", preferred_element_type=jnp.float64)
        for sums in (ON_CHUNKS["a sum"], wide):
            got = chunkwise(
                lambda rows, sums=sums: sums(rows[0], x), [latents], lambda y: [y[0].repeat(2, axis=0)]
            )
            expected = sums(latents.repeat(2, axis=0), x)
            assert got.dtype == expected.dtype
            np.testing.assert_allclose(got, expected, rtol=2e-7)
