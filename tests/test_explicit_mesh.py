"""Meshes as `jax.make_mesh` makes them, and a mesh in context: same draws, results on the user's mesh.

The model has a latent for each row, and rows that the mesh does not divide.
"""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import prior_of_mean, rows_with_effects

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics import energy
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.sampling.reporting import warn_of_devices

AUTO = gm.make_mesh(chains=2, data=4)
EXPLICIT = jax.make_mesh((2, 4), ("chains", "data"))
MIXED = AUTO.update(axis_types=(AxisType.Explicit, AxisType.Auto))
MESHES = {"explicit": EXPLICIT, "mixed": MIXED}
KEY = jax.random.key(0)
NUM_ROWS = 41
Y = np.random.default_rng(0).normal(size=NUM_ROWS).astype(np.float32)
POSITION = {"mean": np.float32(0.3), "effect": np.zeros(NUM_ROWS, np.float32)}
RUN: dict[str, Any] = {"num_chains": 2, "num_warmup": 8, "num_samples": 10, "progress": False}

pytestmark = pytest.mark.filterwarnings("ignore::gspmd_mcmc.SamplingWarning")


def make_target(mesh):
    data = gm.place({"y": Y}, mesh, P("data"))
    return gm.Posterior(prior_of_mean, gm.Plate(rows_with_effects, data, local="effect"))


def make_position(mesh):
    return gm.place(POSITION, mesh, {"mean": P(), "effect": P("data")})


def hmc(target):
    return gm.HMC(target, 0.2, 3)


def types_of(tree):
    """Axis types of the meshes that arrays lie on."""
    return {x.sharding.mesh.axis_types for x in jax.tree.leaves(tree)}


def specs_of(tree):
    """Specs without the None at their ends, which mean nothing."""
    specs = [list(x.sharding.spec) for x in jax.tree.leaves(tree)]
    for spec in specs:
        while spec and spec[-1] is None:
            spec.pop()
    return [tuple(spec) for spec in specs]


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


def stepped(kernel, position, count=3):
    """Take steps from a position; return the program, the state and the info."""
    step = jax.jit(lambda kernel, rng_key, state: kernel.step(rng_key, state))
    state, info = kernel.init(position), None
    for i in range(count):
        state, info = step(kernel, jax.random.fold_in(KEY, i), state)
    return step, state, info


def traces_of(step):
    return step._cache_size()


def collectives(step, *args):
    return sorted(c.kind for c in gm.communication(step, *args).collectives)


@pytest.fixture(scope="module")
def auto():
    """A target on Auto axes, three steps of HMC, their collectives, and a run."""
    target = make_target(AUTO)
    kernel = hmc(target)
    step, state, _ = stepped(kernel, make_position(AUTO))
    draws = gm.sample(KEY, target, POSITION, kernel=kernel, **RUN)
    sent = collectives(step, kernel, KEY, state)
    return {"target": target, "state": state, "sent": sent, "draws": draws}


# Placement.


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_arrays_are_placed_where_the_user_says(mesh):
    for context in (AUTO, mesh):
        with jax.set_mesh(context):
            placed = gm.place({"y": Y, "x": jnp.asarray(Y)}, mesh, P("data"))
            local = gm.place_local(Y, mesh, P("data"))
            read = gm.place_from_reader(lambda a, b: Y[a:b], Y.shape, Y.dtype, mesh, P("data"))
            by_sharding = gm.place(Y, NamedSharding(mesh, P("data")))
        for one in (placed["y"], placed["x"], local, read, by_sharding):
            assert one.values.sharding.mesh == mesh
            assert specs_of(one) == [("data",)]
            np.testing.assert_array_equal(one.unpad(), Y)
        assert gm.local_rows(NUM_ROWS, mesh, P("data")) == slice(0, NUM_ROWS)


def test_arrays_are_relabelled_and_not_copied():
    seen = []
    given = gm.place(np.ones((8, 3), np.float32), EXPLICIT, P("data"))
    back = on_any_mesh(lambda x: seen.append(x) or x)(given)
    for one in (seen[0], back):
        pairs = zip(one.addressable_shards, given.addressable_shards, strict=True)
        assert all(a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer() for a, b in pairs)
    assert types_of(seen) == {AUTO.axis_types}
    assert back.sharding == NamedSharding(EXPLICIT, P("data", None))


def test_the_context_is_as_it_was_also_after_an_error():
    with jax.set_mesh(EXPLICIT):
        with pytest.raises(ValueError, match="leading axis of rows"):
            gm.Plate(rows_with_effects, {"y": 1.0})
        with pytest.raises(TypeError, match="floating"):
            hmc(make_target(EXPLICIT)).init({"mean": jnp.zeros((), int), "effect": POSITION["effect"]})
        assert jax.sharding.get_mesh() == EXPLICIT


# Kernels.


@pytest.mark.parametrize(
    ("mesh", "context"),
    [(AUTO, EXPLICIT), (EXPLICIT, None), (EXPLICIT, EXPLICIT), (MIXED, AUTO)],
)
def test_steps_are_those_of_an_auto_mesh(auto, mesh, context):
    key = KEY  # made without a context, as the module's are

    def run():
        kernel = hmc(make_target(mesh))
        step, state, info = stepped(kernel, make_position(mesh))
        return step, state, info, collectives(step, kernel, key, state)

    with nullcontext() if context is None else jax.set_mesh(context):
        step, state, info, sent = run()
    assert_same(state, auto["state"])
    assert sent == auto["sent"]
    if mesh != AUTO:
        assert types_of((state, info)) == {mesh.axis_types}
    if mesh != MIXED:
        assert traces_of(step) == 1
        assert specs_of(state) == specs_of(auto["state"])


@pytest.mark.parametrize(
    "make",
    [lambda t: gm.NUTS(t, 0.2, max_tree_depth=2), lambda t: gm.MCLMC(t, 0.2, 1.0)],
    ids=["NUTS", "MCLMC"],
)
def test_other_kernels_too(make):
    _, expected, _ = stepped(make(make_target(AUTO)), make_position(AUTO), 2)
    with jax.set_mesh(EXPLICIT):
        step, state, info = stepped(make(make_target(EXPLICIT)), make_position(EXPLICIT), 2)
        assert types_of((state, info)) == {EXPLICIT.axis_types}
    assert_same(state, expected)
    assert traces_of(step) == 1


def test_a_training_step_of_the_users_own(auto):
    def train(kernel, rng_key, state, weights):
        state, info = kernel.step(rng_key, state)
        return state, weights + state.position["effect"].values[:8] * info.acceptance_rate

    with jax.set_mesh(EXPLICIT):
        kernel, step = hmc(make_target(EXPLICIT)), jax.jit(train)
        state, weights = kernel.init(make_position(EXPLICIT)), jnp.zeros(8)
        effect = state.position["effect"].values
        assert jax.typeof(effect).sharding.spec == P("data")
        for i in range(3):
            state, weights = step(kernel, jax.random.fold_in(KEY, i), state, weights)
        assert jax.typeof(state.position["effect"].values).sharding.spec == P("data")
    assert_same(state, auto["state"])
    assert types_of((state, weights)) == {EXPLICIT.axis_types}


def test_chains_lie_over_an_explicit_axis():
    def init(kernel, positions):
        return jax.vmap(kernel.init)(positions)

    def step(kernel, keys, states):
        return jax.vmap(kernel.step, spmd_axis_name="chains")(keys, states)[0]

    def run(mesh):
        kernel, specs = hmc(make_target(mesh)), {"mean": P("chains"), "effect": P("chains", "data")}
        one = {"mean": np.zeros(2, np.float32), "effect": np.zeros((2, 44), np.float32)}
        positions = gm.place(one, mesh, specs)
        padded = gm.Padded(one["effect"][0], 41)  # one chain's
        positions["effect"] = jax.tree.map(lambda _: positions["effect"], padded)
        keys = jax.device_put(jax.random.split(KEY, 2), NamedSharding(mesh, P("chains")))
        states = jax.jit(init)(kernel, positions)
        program = jax.jit(step)
        sent = collectives(program, kernel, keys, states)
        return program(kernel, keys, states), sent, specs_of(states)

    (expected, *laid_out), (states, *also_laid_out) = run(AUTO), run(EXPLICIT)
    assert_same(states, expected)
    assert also_laid_out == laid_out and ("chains", "data") in laid_out[1]
    assert types_of(states) == {EXPLICIT.axis_types}


def test_data_in_a_program_are_still_seen():
    data = gm.place(np.zeros(300_000, np.float32), EXPLICIT, P("data"))
    target = gm.Posterior(
        prior_of_mean, gm.Plate(lambda params, y: -0.5 * (y - params["mean"]) ** 2, data)
    )
    kernel = hmc(target)
    with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match="would become constants"):
        jax.jit(kernel.init)({"mean": jnp.zeros(())})


# Runs.


def test_a_run_is_that_of_an_auto_mesh(auto, compiled):
    key, more = KEY, jax.random.key(1)
    with jax.set_mesh(EXPLICIT):
        target = make_target(EXPLICIT)
        draws = gm.sample(key, target, POSITION, kernel=hmc(target), **RUN)
        assert draws.kernel.target is target
        longer = gm.sample(more, target, draws, **dict(RUN, num_warmup=0))
    assert not {"_chunk", "init_chains"} & {name.removeprefix("jit_") for name in compiled}
    assert_same(draws.position, auto["draws"].position)
    means = (draws.position["mean"], longer.position["mean"])  # effects are cut to the real rows
    results = (means, draws.state, draws.kernel.inverse_mass_matrix)
    assert types_of(results) == {EXPLICIT.axis_types}
    assert str(draws.summary()) == str(auto["draws"].summary())


def test_a_run_in_the_context_of_another_kind_of_mesh(auto):
    key = KEY
    with jax.set_mesh(EXPLICIT):
        kernel = hmc(auto["target"])
        draws = gm.sample(key, auto["target"], POSITION, mesh=EXPLICIT, kernel=kernel, **RUN)
        assert draws.kernel is not None
        total = jnp.sum(draws.position["mean"] * 2)
    assert_same(draws.position, auto["draws"].position)
    assert np.isfinite(total)


def test_a_run_is_continued_from_its_checkpoint(auto, tmp_path):
    key = KEY
    with jax.set_mesh(EXPLICIT):
        target = make_target(EXPLICIT)
        run = {**RUN, "kernel": hmc(target), "checkpoint": tmp_path / "run"}
        for _ in range(2):
            draws = gm.sample(key, target, POSITION, mesh=EXPLICIT, **run)
            assert_same(jax.tree.map(np.asarray, draws.position), auto["draws"].position)
            assert types_of(draws.state) == {EXPLICIT.axis_types}


def test_a_mode(auto):
    expected = gm.find_mode(KEY, auto["target"], POSITION, num_probes=2)
    key = KEY
    with jax.set_mesh(EXPLICIT):
        target = make_target(EXPLICIT)
        mode = gm.find_mode(key, target, make_position(EXPLICIT), num_probes=2)
        start = mode.laplace_start()
        assert np.isfinite(start(key)["mean"])
        draws = gm.sample(key, target, start, kernel=hmc(target), **RUN)
    assert_same(mode.position, expected.position)
    assert types_of(draws.state) == {EXPLICIT.axis_types}


def test_what_a_target_answers():
    with jax.set_mesh(EXPLICIT):
        target = make_target(EXPLICIT)
        position = hmc(target).init(make_position(EXPLICIT)).position
        terms, grad = target.terms_and_grad(position)
        inside = jax.jit(type(target).grad)(target, position)
        rows = target.plates[0].log_likelihood_rows(position)
    assert types_of((grad, inside)) == {EXPLICIT.axis_types}
    assert_same(grad, inside)
    assert specs_of(inside["effect"]) == [("data",)]
    found = sum(np.sum(x) for x in jax.tree.leaves(terms))
    np.testing.assert_allclose(found, np.sum(rows) - 0.5 * 0.3**2, rtol=1e-6)


# Distributions and models.


def test_joint_distributions():
    dist = pytest.importorskip("numpyro.distributions")

    def parts(mesh):
        rows = gm.Sharded(dist.Normal(0.0, 1.0), num_rows=16)
        return gm.JointDistributionNamed({"mean": dist.Normal(0.0, 1.0), "y": rows}, mesh=mesh)

    expected = parts(AUTO).sample(KEY)
    key = KEY
    with jax.set_mesh(EXPLICIT):
        joint = parts(EXPLICIT)
        value = joint.sample(key)
        log_prob = joint.log_prob(value)
        target = joint.condition(y=value["y"])
        start = gm.prior_start(target)
        state = hmc(target).init(start(key))
    assert_same(value, expected)
    assert value["y"].sharding.mesh == EXPLICIT
    np.testing.assert_allclose(log_prob, parts(AUTO).log_prob(expected), rtol=1e-6)
    assert np.isfinite(state.log_density)


def test_a_numpyro_model():
    numpyro = pytest.importorskip("numpyro")
    dist = numpyro.distributions

    def model(y):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    def make(mesh):
        data = gm.place(Y[:40], mesh, P("data"))
        return gm.from_numpyro(model, data, plates={"rows": "data"}, check=False)

    expected = hmc(make(AUTO)).init({"mean": 0.1})
    with jax.set_mesh(EXPLICIT):
        target = make(EXPLICIT)
        state = hmc(target).init({"mean": 0.1})
    assert target.plates[0].rows.num_blocks == 4
    assert_same(state.log_density, expected.log_density)


# Small data, and large.


def test_small_data_on_many_devices_are_warned_of_once_a_run(auto):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm.sample(KEY, auto["target"], POSITION, kernel=hmc(auto["target"]), **RUN)
    (warned,) = [w for w in caught if str(w.message).startswith("small data on many devices")]
    assert issubclass(warned.category, gm.SamplingWarning) and warned.filename == __file__
    assert "0.00 MB of rows on 4 devices" in str(warned.message)


def test_enough_data_or_one_device_are_not_warned_of():
    def plates(*data):
        return gm.Posterior(prior_of_mean, *(gm.Plate(rows_with_effects, of) for of in data))

    small, large = gm.place(Y, AUTO, P("data")), jax.ShapeDtypeStruct((1 << 19,), np.float32)
    large = gm.place(large, AUTO, P("data"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in (plates(large), plates(large, small), plates(Y), plates(gm.place(Y, AUTO, P()))):
            warn_of_devices(target)
        with pytest.raises(gm.SamplingWarning, match=r"LogDensity\(.*0.00 MB of rows on 4 devices"):
            warn_of_devices(gm.LogDensity(rows_with_effects, gm.place(Y[:40], AUTO, P("data"))))
        with pytest.raises(gm.SamplingWarning, match="small data on many devices"):
            warn_of_devices(plates(small))


def test_large_data_on_the_only_device_of_a_cpu_of_many_cores_are_warned_of(monkeypatch):
    def target(num_rows):
        rows = gm.Plate(rows_with_effects, np.zeros(num_rows, np.float32))
        return gm.Posterior(prior_of_mean, rows)

    large, small = target(1 << 21), target((1 << 21) - 1)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    said = r"large data on one CPU device: Plate\(.*, 8 MB of rows, on a machine of 4 cores"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr("os.cpu_count", lambda: 4)
        with pytest.raises(gm.SamplingWarning, match=said + r".*num_cpu_devices\", 4\)"):
            warn_of_devices(large)
        warn_of_devices(small)
        monkeypatch.setattr("os.cpu_count", lambda: 2)  # both of which one device uses
        warn_of_devices(large)
        monkeypatch.setattr("os.cpu_count", lambda: 4)
        monkeypatch.setattr(jax, "device_count", lambda: 2)  # the user's choice
        warn_of_devices(large)


# Views and diagnostics.


def test_diagnostics_of_arrays_on_an_explicit_mesh():
    x = np.random.default_rng(1).normal(size=(2, 20, 8)).astype(np.float32)
    draws = {"x": x, "energy": x[:, :, 0]}
    specs = {"x": P("chains", None, "data"), "energy": P("chains")}
    there, here = gm.place(draws, EXPLICIT, specs), gm.place(draws, AUTO, specs)

    @jax.jit
    def judge(x):
        return energy.bfmi(x["energy"]), rhat(x)

    expected, expected_outside = judge(here), energy.bfmi(here["energy"])
    with jax.set_mesh(EXPLICIT):
        found, outside = judge(there), energy.bfmi(there["energy"])
    close = partial(np.testing.assert_allclose, rtol=1e-6)  # another program, so another rounding
    jax.tree.map(close, found, expected)
    assert_same(outside, expected_outside)
    assert types_of((found, outside)) == {EXPLICIT.axis_types}


# What is refused.


def test_the_devices_of_a_shard_map_are_refused():
    kernel = hmc(make_target(EXPLICIT))
    state = kernel.init(make_position(EXPLICIT))

    def step(state):
        return kernel.step(KEY, state)[0].position["mean"]

    with pytest.raises(ValueError, match=r"axes of .* are Manual, as inside jax\.shard_map"):
        jax.shard_map(step, mesh=EXPLICIT, out_specs=P(), check_vma=False)(state)


def test_arrays_that_a_function_reads_by_itself_are_told_of():
    with jax.set_mesh(EXPLICIT):
        scale = jnp.asarray(2.0)

        def scaled(params, scale=scale):
            return -0.5 * (scale * params["mean"]) ** 2

        plate = make_target(EXPLICIT).plates[0]
        position = make_position(EXPLICIT)
        for program in (gm.HMC.init, jax.jit(gm.HMC.init)):
            with pytest.raises(ValueError, match="A function reads an array .*Partial"):
                program(hmc(gm.Posterior(scaled, plate)), position)
        bound = jax.tree_util.Partial(lambda scale, params: scaled(params, scale), scale)
        assert np.isfinite(hmc(gm.Posterior(bound, plate)).init(position).log_density)


def test_meshes_of_other_devices_are_refused():
    pair = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    target = make_target(EXPLICIT)
    with pytest.raises(ValueError, match="the target's data .* lie on .* place the data"):
        gm.sample(KEY, target, POSITION, mesh=pair, kernel=hmc(target), **RUN)


@pytest.mark.parametrize("mesh", ["x", 8, jax.devices()])
def test_what_is_no_mesh_is_refused(mesh):
    target = make_target(AUTO)
    calls = [
        lambda: gm.sample(KEY, target, POSITION, mesh=mesh, **RUN),
        lambda: gm.place(Y, mesh, P("data")),
        lambda: gm.place_local(Y, mesh, P("data")),
        lambda: gm.local_rows(8, mesh, P("data")),
        lambda: gm.place_from_reader(lambda a, b: Y[a:b], Y.shape, Y.dtype, mesh, P("data")),
        lambda: gm.JointDistributionSequential([], mesh=mesh),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="expected a mesh"):
            call()


@pytest.mark.parametrize("devices", [[], "cpu", 4, [0, 1], AUTO])
def test_what_is_no_device_is_refused(devices):
    with pytest.raises(ValueError, match="make_mesh: expected devices, at least one"):
        gm.make_mesh(devices=devices)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_runs_are_not_traced(auto, transform):
    def run(key):
        return gm.sample(key, auto["target"], POSITION, **RUN).position

    def climb(key):
        return gm.find_mode(key, auto["target"], POSITION).position

    keys = jax.random.split(KEY, 2) if transform is jax.vmap else KEY
    for call in (run, climb):
        with pytest.raises(TypeError, match=r"call it outside"):
            transform(call)(keys)
