"""Meshes of devices that are not there: placing on them gives shapes, of which kernels are built."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import make_abstract_mesh
from gspmd_mcmc.targets import local

S = jax.ShapeDtypeStruct
MESH = make_abstract_mesh(chains=2, data=4)
REAL = gm.make_mesh(chains=2, data=4)
F32 = jnp.float32


def rows(*shape, dtype=F32):
    """An array that is never made."""
    return S(shape, dtype)


def shapes(tree):
    """Paths, shapes and dtypes of the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in leaves}


# The mesh.


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({"data": 4096}, {"data": 4096}),
        ({"model": 2, "data": 4, "chains": 3}, {"chains": 3, "data": 4, "model": 2}),
        ({"chains": np.int64(2), "model": None}, {"chains": 2}),
        ({"data": 1}, {"data": 1}),
    ],
)
def test_sizes_are_kept_in_the_order_of_make_mesh(sizes, shape):
    mesh = make_abstract_mesh(**sizes)
    assert list(mesh.shape.items()) == list(shape.items())
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    "sizes", [{}, {"data": 0}, {"data": -1}, {"data": 8.0}, {"data": "8"}, {"data": None}]
)
def test_sizes_that_are_none_are_refused(sizes):
    asked = ", ".join(f"{k}={v!r}" for k, v in sizes.items() if v is not None)
    with pytest.raises(ValueError, match=re.escape(f"make_abstract_mesh({asked}): expected the size")):
        make_abstract_mesh(**sizes)


# What is placed on it.


def test_placing_gives_shapes_with_shardings():
    tree = {"x": rows(8, 3), "y": np.ones(8, np.int32), "z": jnp.ones((8, 2)), "w": 2.5}
    placed = gm.place(tree, MESH, {"x": P("data"), "y": P(("chains", "data")), "z": P(), "w": P()})
    assert all(type(leaf) is S for leaf in jax.tree.leaves(placed))
    seen = {name: (leaf.shape, leaf.dtype, leaf.sharding.spec) for name, leaf in placed.items()}
    assert seen == {
        "x": ((8, 3), F32, P("data")),
        "y": ((8,), jnp.int32, P(("chains", "data"))),
        "z": ((8, 2), F32, P()),
        "w": ((), F32, P()),
    }
    assert {leaf.sharding.mesh for leaf in placed.values()} == {MESH}


@pytest.mark.parametrize(
    "leaf",
    [
        np.ones((10, 3)),
        np.ones((10, 3), np.int64),
        np.ones((10, 3), bool),
        jnp.ones((10, 3), jnp.bfloat16),
        jnp.ones((8, 3)),
        3,
        True,
        jax.random.split(jax.random.key(0), 8),
        jax.random.key(0, impl="rbg"),
    ],
)
def test_it_gives_what_a_real_mesh_gives_but_for_the_values(leaf):
    spec = P("data") if np.ndim(leaf) else P()
    real, shape = gm.place(leaf, REAL, spec), S(np.shape(leaf), jnp.result_type(leaf))
    for abstract in (gm.place(leaf, MESH, spec), gm.place(shape, MESH, spec)):
        assert jax.tree.structure(abstract) == jax.tree.structure(real)
        for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(real), strict=True):
            found = type(a), a.shape, a.dtype, a.sharding.spec
            assert found == (S, b.shape, b.dtype, b.sharding.spec)
    on_real = gm.place(shape, REAL, spec)  # lies where the array would
    for a, b in zip(jax.tree.leaves(on_real), jax.tree.leaves(real), strict=True):
        assert (type(a), a.shape, a.dtype, a.sharding) == (S, b.shape, b.dtype, b.sharding)


def test_uneven_rows_are_padded():
    real = gm.place(np.ones((9, 3), np.float32), REAL, P("data"))
    planned = gm.place(real, make_abstract_mesh(data=1024), P("data"))
    assert (planned.values.shape, planned.num_rows) == ((1024, 3), 9)
    placed = gm.place({"x": rows(9, 3), "y": np.ones(9, bool)}, MESH, P("data"))
    assert {n: (p.values.shape, p.num_rows, p.num_pad) for n, p in placed.items()} == {
        "x": ((12, 3), 9, 3),
        "y": ((12,), 9, 3),
    }
    assert repr(placed["x"]) == "Padded(float32[12, 3]: 9 rows + 3 pad)"


@pytest.mark.parametrize("first", [MESH, REAL])
@pytest.mark.parametrize("second", [MESH, REAL])
def test_padded_shapes_are_placed_anew_by_their_real_rows(first, second):
    placed = gm.place(gm.place(rows(9, 3), first, P("data")), second, P("chains"))
    assert (placed.values.shape, placed.num_rows) == ((10, 3), 9)
    assert placed.values.sharding == NamedSharding(second, P("chains"))


def test_a_petabyte_is_placed_on_both_meshes():
    tree = {"x": rows(10**9 + 1, 250_000), "view": np.broadcast_to(np.float32(1), (10**9, 250_000))}
    placed = gm.place(tree, make_abstract_mesh(data=4096), P("data"))
    assert placed["x"].values.sharding.shard_shape(placed["x"].values.shape) == (244_141, 250_000)
    assert placed["view"].values.shape == (4096 * 244_141, 250_000)
    assert gm.place(tree["x"], REAL, P("data")).values.sharding.mesh == REAL


@pytest.mark.parametrize(
    ("leaf", "spec", "message"),
    [
        (rows(8), P("data", "chains"), "the spec has 2 entries, the leaf 1 axes"),
        (rows(8), P("rows"), "the mesh has no axis 'rows'"),
        (rows(8, 6), P(None, "data"), "axis 1 has 6 elements, which 4 devices do not divide"),
        (rows(0, 3), P("data"), "there are no rows to lay over 4 devices"),
        (rows(), P("data"), "the spec has 1 entries, the leaf 0 axes"),
        (np.array(["a", "b"]), P(), "expected an array of numbers, got ndarray of <U1"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), P(), "the mask would be lost"),
    ],
)
@pytest.mark.parametrize("mesh", [MESH, REAL])
def test_both_meshes_refuse_the_same_and_name_the_leaf(mesh, leaf, spec, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        gm.place({"a": [leaf]}, mesh, spec)
    assert "leaf ['a'][0]" in str(error.value)


def test_an_explicit_abstract_mesh_is_taken():
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    placed = gm.place(rows(8), mesh, P("data"))
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(placed))


# Targets and kernels that are built on shapes.


def log_prior(params):
    return -0.5 * params["mean"] ** 2, -0.5 * params["log_sd"] ** 2


def log_likelihood(params, block):
    z = (params["effect"] - params["mean"]) * jnp.exp(-params["log_sd"])
    return gm.poisson_log_rate(params["effect"], block["count"]) - 0.5 * z**2 - params["log_sd"]


def hierarchy(mesh):
    """A kernel of 1,001 latents with their rows, and the shapes of a position."""
    data = gm.place({"count": rows(1001, dtype=jnp.int32)}, mesh, P("data"))
    target = gm.Posterior(log_prior, gm.Plate(log_likelihood, data, local="effect"))
    position = {"effect": gm.place(rows(1001), mesh, P("data")), "mean": rows(), "log_sd": rows()}
    return gm.HMC(target, step_size=1e-2, num_integration_steps=3), position


@pytest.mark.parametrize("num", [8, 4096])
def test_the_shape_of_a_state_comes_by_eval_shape(num):
    kernel, position = hierarchy(make_abstract_mesh(data=num))
    state = jax.eval_shape(gm.HMC.init, kernel, position)
    padded = -(-1001 // num) * num
    assert {n: x.shape for n, x in local.arrays(state.position).items()} == {
        "effect": (padded,),
        "mean": (),
        "log_sd": (),
    }
    assert shapes(state.log_density_grad) == shapes(state.position)
    assert state.terms["plates"][0].shape == (num, 1, 2)


def test_a_state_of_shapes_is_like_one_of_arrays():
    kernel, position = hierarchy(MESH)
    planned = jax.eval_shape(gm.HMC.init, kernel, position)
    # A metric of shapes is set by eval_shape.
    tuned = jax.eval_shape(gm.HMC.with_inverse_mass_matrix, kernel, planned.position)
    assert tuned.inverse_mass_matrix["effect"].values.shape == (1004,)
    moved, _ = jax.eval_shape(gm.HMC.step, tuned, jax.random.key(0), planned)
    assert shapes(moved) == shapes(planned)
    kernel, _ = hierarchy(REAL)
    kernel = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), kernel)
    real = kernel.init({"effect": jnp.zeros(1001), "mean": jnp.zeros(()), "log_sd": jnp.zeros(())})
    assert shapes(planned) == shapes(real)


def test_chains_are_mapped_over_their_axis():
    kernel, _ = hierarchy(MESH)
    position = gm.place(
        {"effect": rows(4, 1001), "mean": rows(4), "log_sd": rows(4)}, MESH, P("chains")
    )
    keys = gm.place(jax.random.split(jax.random.key(0), 4), MESH, P("chains"))
    init = jax.vmap(gm.HMC.init, in_axes=(None, 0), spmd_axis_name="chains")
    step = jax.vmap(gm.HMC.step, in_axes=(None, 0, 0), spmd_axis_name="chains")
    state = jax.eval_shape(init, kernel, position)
    assert state.position["effect"].values.shape == (4, 1004)
    moved, info = jax.eval_shape(step, kernel, keys, state)
    assert info.acceptance_rate.shape == (4,)
    # The rows' constraint holds chains and rows, each on its own axis, and on this mesh.
    text = str(jax.make_jaxpr(step)(kernel, keys, state))
    assert "spec=P('chains', 'data'" in text.replace("PartitionSpec", "P").replace('"', "'")


def test_rows_and_shared_latents_on_one_axis_are_refused_as_on_a_real_mesh():
    messages = []
    for mesh in (MESH, REAL):
        kernel, position = hierarchy(mesh)
        shared = gm.place(rows(8), mesh, P("data"))
        with pytest.raises(ValueError, match="lies over mesh axis 'data'") as error:
            kernel.init(position | {"mean": shared})
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def counts_model(count):
    numpyro = pytest.importorskip("numpyro")
    dist = numpyro.distributions
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("patients", len(count)):
        effect = numpyro.sample("effect", dist.Normal(mean, sd))
        numpyro.deterministic("rate", jnp.exp(effect))
        numpyro.sample("count", dist.Poisson(jnp.exp(effect)), obs=count)


def test_a_numpyro_model_is_built_of_shapes_as_of_arrays():
    """1,001 rows on 8 devices: the same shapes of target, state and metric as with real counts."""
    plates = {"patients": "data"}
    real_mesh = gm.make_mesh(data=8)
    counts = gm.place(np.ones(1001, np.int32), real_mesh, P("data"))
    real = gm.from_numpyro(counts_model, counts, plates=plates)
    shapes = gm.place(
        jax.ShapeDtypeStruct((1001,), jnp.int32), gm.make_abstract_mesh(data=8), P("data")
    )
    planned = gm.from_numpyro(counts_model, shapes, plates=plates)
    assert str(planned) == str(real)

    metric = jax.eval_shape(type(planned).origin, planned)
    ones = jax.tree.map(jnp.ones_like, real.origin())
    kernels = [gm.HMC(target, 0.1, 5, m) for target, m in ((planned, metric), (real, ones))]
    states = [jax.eval_shape(gm.HMC.init, kernel, metric) for kernel in kernels]
    for part in ("position", "log_density_grad"):
        parts = (local.arrays(getattr(state, part)) for state in states)
        found, expected = (jax.tree.map(np.shape, part) for part in parts)
        assert found == expected
    laid, real_laid = ((kernel.inverse_mass_matrix or {})["effect"].values for kernel in kernels)
    assert laid.shape == real_laid.shape == (1008,)
    assert laid.sharding.spec == real_laid.sharding.spec


def test_an_eager_start_of_shapes_says_what_to_call():
    mesh = gm.make_abstract_mesh(data=8)
    plate = gm.Plate(
        lambda params, x: x * params,
        gm.place(jax.ShapeDtypeStruct((16,), jnp.float32), mesh, P("data")),
    )
    kernel = gm.HMC(gm.Posterior(lambda params: -(params**2), plate), 0.1, 2)
    with pytest.raises(
        TypeError, match=r"the target's data .*float32\[16\].*jax.eval_shape\(gspmd_mcmc.HMC.init"
    ):
        kernel.init(jnp.zeros(()))
