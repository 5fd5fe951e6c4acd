"""Plates inside maps over chains, by a run or by a user, even or not: one gradient, cut in two ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.placement.mapped_axes import TRACES_ARE_APART, mapped_axes, vmap_over
from gspmd_mcmc.targets.streaming import tiling

are_told = pytest.mark.skipif(not TRACES_ARE_APART, reason="this JAX keeps traces from outside of maps")
ROWS = np.random.default_rng(0).normal(size=(20, 3))
AT = np.random.default_rng(1).normal(size=(4, 3))
GRADS = -AT - (AT @ ROWS.T - 1) @ ROWS


@pytest.fixture(scope="module")
def mesh():
    return gm.make_mesh(chains=2, data=4)


@pytest.fixture(scope="module")
def target(mesh):
    def likelihood(w, row):
        return -0.5 * (jnp.sum(row * w[None], axis=1) - 1) ** 2

    return gm.Posterior(lambda w: -0.5 * w**2, gm.Plate(likelihood, gm.place(ROWS, mesh, P("data"))))


def in_shard_map(function, mesh):
    specs = {"in_specs": P("chains"), "out_specs": P("chains"), "axis_names": {"chains"}}
    return jax.shard_map(jax.vmap(function), mesh=mesh, check_vma=False, **specs)


MAPS = {
    "a run's": lambda f, mesh: vmap_over("chains", f, (0,)),
    "a user's": lambda f, mesh: jax.vmap(f, spmd_axis_name="chains"),
    "nameless": lambda f, mesh: jax.vmap(f),
    "by hand": in_shard_map,
}


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize(
    ("name", "num_chains"), [*((name, 4) for name in MAPS), ("a user's", 3), ("nameless", 3)]
)
def test_a_gradient_is_the_same_in_every_map(monkeypatch, target, mesh, name, num_chains, is_told):
    if not is_told:
        monkeypatch.setattr(tiling, "mapped_axes", lambda: None)
    # Traced once before, outside of any map, as a step of a user's loop may be.
    grad = jax.jit(lambda w: target.grad(w))
    np.testing.assert_allclose(grad(jnp.float32(AT[0])), GRADS[0], rtol=1e-5)
    found = jax.jit(MAPS[name](grad, mesh))(jnp.float32(AT[:num_chains]))
    np.testing.assert_allclose(found, GRADS[:num_chains], rtol=1e-5)


@are_told
@pytest.mark.parametrize(
    ("name", "axes"),
    [("a run's", {"chains"}), ("a user's", None), ("nameless", set()), ("by hand", None)],
)
def test_axes_are_known_where_chains_are_even(mesh, name, axes):
    found = []

    def function(x):
        found.append(mapped_axes())
        return x

    jax.make_jaxpr(MAPS[name](function, mesh))(jnp.float32(AT))
    assert found == [axes]
    assert mapped_axes() == set()


@are_told
def test_maps_lie_within_each_other(mesh):
    found = []

    def function(x):
        found.append(mapped_axes())
        return x

    jax.make_jaxpr(vmap_over("chains", vmap_over("data", function, (0,)), (0,)))(jnp.float32(AT))
    jax.make_jaxpr(vmap_over("chains", jax.vmap(function, spmd_axis_name="data"), (0,)))(AT)
    assert found == [{"chains", "data"}, None]
