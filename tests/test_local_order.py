"""The order and the pad of local latents are known by type: arrays from outside have the user's order.

The truth is a log density in NumPy, of arrays in the user's order.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of
from numpyro.distributions import biject_to, constraints
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc.kernels.metrics.low_rank_metric import LowRankMetric
from gspmd_mcmc.kernels.metrics.rotated_metric import RotatedMetric
from gspmd_mcmc.targets import local
from gspmd_mcmc.tree import total

KEY, GROUPS, ROWS = jax.random.key(seed(0)), 11, 17
RNG = np.random.default_rng(0)
KEYS = RNG.permutation(np.repeat(np.arange(GROUPS), RNG.permutation(GROUPS) + 1))
HEIGHT, Y, Z = RNG.normal(size=GROUPS), RNG.normal(size=len(KEYS)), RNG.normal(size=ROWS)
NAMES = ("rate", "effect", "z")
MESHES = pytest.mark.parametrize("name", ["1", "8", "2x4"])
# That there is little data, and that devices wait for the one with the largest group.
pytestmark = [
    pytest.mark.filterwarnings("ignore:small data"),
    pytest.mark.filterwarnings("ignore:Groups"),
]


def log_prior(x):
    return -0.5 * x["mean"] ** 2


def of_group(x, group):
    return -x["rate"] - 0.5 * jnp.sum((x["effect"] - group["height"][:, None]) ** 2, axis=1)


def of_row(x, row):
    return -0.5 * (x["effect"][:, 1] - row["y"]) ** 2 - x["rate"] * row["y"] ** 2


def of_z(x, row):
    return -0.5 * (x["z"] - row["z"]) ** 2 - 0.5 * (x["z"] - x["mean"][None]) ** 2


@cache
def target(name, keys=tuple(KEYS)):
    mesh = mesh_of(name)
    groups, both = gm.Groups(np.array(keys), mesh, P("data")), ("rate", "effect")
    return gm.Posterior(
        log_prior,
        gm.Plate(of_group, groups.place({"height": HEIGHT}), local=both),
        gm.Plate(of_row, groups.place_rows({"y": Y}), local=both),
        gm.Plate(of_z, gm.place({"z": Z}, mesh, P("data")), local="z"),
        bijections={"rate": biject_to(constraints.positive)},
    )


def params(shift=0.0):
    number = np.arange(GROUPS) + 1.0 + shift
    effect = np.stack([-number, number / 7], axis=1)
    return {"rate": number / 3, "effect": effect, "z": np.cos(np.arange(ROWS)), "mean": np.float64(0.5)}


def log_density(x):
    """Of parameters in the user's order, with the Jacobian of the rate."""
    of_groups = -x["rate"] - 0.5 * ((x["effect"] - HEIGHT[:, None]) ** 2).sum(1) + np.log(x["rate"])
    of_rows = -0.5 * (x["effect"][KEYS, 1] - Y) ** 2 - x["rate"][KEYS] * Y**2
    of_z = -0.5 * (x["z"] - Z) ** 2 - 0.5 * (x["z"] - x["mean"]) ** 2
    return of_groups.sum() + of_rows.sum() + of_z.sum() - 0.5 * x["mean"] ** 2


def unconstrained(x):
    return jax.tree.map(jnp.asarray, x | {"rate": np.log(x["rate"])})


def placed(x, name):
    """The same position, padded by `place`."""
    on_mesh = {n: x[n] for n in NAMES}
    return gm.place(on_mesh, mesh_of(name), P("data")) | {"mean": x["mean"]}


def kernel(name, metric=None):
    return gm.HMC(target(name), 1e-7, 2, metric)


def check_seen(position, name, expected):
    """Compare a position as a kernel has it."""
    seen = local.cut(target(name), position)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), seen, expected)


@MESHES
def test_the_density_is_that_of_the_user_s_order(name):
    x, expected = unconstrained(params()), log_density(params())
    of_params = gm.place({n: params()[n] for n in NAMES}, mesh_of(name), P("data"))
    back = target(name).unconstrain(of_params | {"mean": x["mean"]})
    in_program = jax.jit(gm.HMC.init)
    for position in (x, placed(x, name), back):
        for state in (kernel(name).init(position), in_program(kernel(name), position)):
            np.testing.assert_allclose(state.log_density, expected, rtol=1e-5)
            check_seen(state.position, name, x)
        np.testing.assert_allclose(total(target(name).terms(position)), expected, rtol=1e-5)
        gradient = target(name).grad(position)
        assert jax.tree.structure(gradient) == jax.tree.structure(position), "it is shaped like it"
        check_seen(gradient, name, local.cut(target(name), state.log_density_grad))


def sheared(x):
    return x | {"effect": x["effect"] + x["rate"][:, None], "z": 2.0 - x["z"]}


@MESHES
def test_a_transform_is_given_arrays_and_keeps_their_order(name):
    moved = gm.Posterior(log_prior, *target(name).plates, transform=sheared)
    x, after = jax.tree.map(jnp.asarray, params()), sheared(params())
    expected = log_density(after) - np.log(after["rate"]).sum()
    for position in (x, placed(x, name)):
        state = gm.HMC(moved, 0.1, 1).init(position)
        np.testing.assert_allclose(state.log_density, expected, rtol=1e-5)
        np.testing.assert_allclose(total(moved.terms(position)), expected, rtol=1e-5)
        for given in (position, state.position):
            check_seen(moved.params(given), name, after)


TRANSFORMS = {
    "a sum over rows": lambda x: x | {"mean": x["mean"] + x["z"].sum()},
    "a group's number": lambda x: x | {"mean": x["mean"] + x["effect"][0, 0]},
    "places": lambda x: x | {"effect": x["effect"] + 0.1 * jnp.arange(len(x["effect"]))[:, None]},
}


@pytest.mark.parametrize("name", ["1", "8"])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_transform_that_couples_rows_is_refused_where_it_would_be_wrong(name, kind):
    x, function = unconstrained(params()), TRANSFORMS[kind]
    moved = gm.Posterior(log_prior, *target(name).plates, transform=function)
    if (name, kind) == ("1", "a sum over rows"):  # they are stored as they are
        x, after = jax.tree.map(jnp.asarray, params()), function(params())
        expected = log_density(after) - np.log(after["rate"]).sum()
        np.testing.assert_allclose(gm.HMC(moved, 0.1, 1).init(x).log_density, expected, rtol=1e-5)
        return
    with pytest.raises(gm.CoupledRows, match=r"^transform: \['\w+'\].*acts? within each row"):
        gm.HMC(moved, 0.1, 1).init(x)
    with pytest.raises(gm.CoupledRows, match=r"^transform: "):
        gm.sample(KEY, moved, x, num_chains=2, num_warmup=0, num_samples=1, progress=False)


def test_a_transform_keeps_the_number_of_rows():
    shorter = gm.Posterior(log_prior, *target("8").plates, transform=lambda x: x | {"z": x["z"][:16]})
    state = kernel("8").init(unconstrained(params()))
    for call in (shorter.params, shorter.terms, gm.HMC(shorter, 0.1, 1).init):
        with pytest.raises(ValueError, match=r"transform: \['z'\] is local .*expected the 24 rows"):
            call(state.position)


def test_states_of_several_chains_are_no_position():
    states = jax.vmap(kernel("8").init)(
        jax.tree.map(lambda x: jnp.stack([x, x]), unconstrained(params()))
    )
    moved = gm.Posterior(log_prior, *target("8").plates, transform=sheared)
    for call in (moved.params, target("8").terms):
        with pytest.raises(ValueError, match=r"expected rows first, got Padded.*jax.vmap"):
            call(states.position)
    found = jax.vmap(target("8").params)(states.position)["z"].unpad()
    np.testing.assert_allclose(found, [params()["z"]] * 2, rtol=1e-6)


def test_a_start_with_other_rows_is_refused():
    """The pad of what a start function returns is cut, but no real row."""
    more = unconstrained(params()) | {"z": gm.place(np.arange(20.0), mesh_of("8"), P("data"))}
    for start in (gm.uniform_start(more, 0.0), lambda rng_key: more):
        with pytest.raises(ValueError, match=r"\['z'\] is local .*leading axis of 17, got Padded.*20"):
            started_at(start)


@MESHES
def test_a_state_s_position_and_a_kernel_s_metric_may_come_back(name):
    """From the same mesh or another one, whose pad differs."""
    x, variances = unconstrained(params()), jax.tree.map(jnp.exp, unconstrained(params(0.5)))
    before = kernel("8", variances)
    state = before.init(x)
    np.testing.assert_allclose(kernel("8").init(state.position).log_density, state.log_density)
    moved = jax.tree.map(np.asarray, (state.position, before.inverse_mass_matrix))
    after = kernel(name, moved[1])
    np.testing.assert_allclose(after.init(moved[0]).log_density, state.log_density, rtol=1e-5)
    check_seen(after.inverse_mass_matrix, name, variances)


@MESHES
@pytest.mark.parametrize("kind", ["diagonal", "low rank", "dense", "rotated"])
def test_metrics_have_the_user_s_order(name, kind):
    variances = jax.tree.map(jnp.exp, unconstrained(params()))
    padded = placed(variances, name)
    vectors = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), variances)
    of_places = jax.tree.map(lambda v: jnp.stack([v, 2 * v]), padded)  # rows are the second axis
    turn = np.array([[0.6, -0.8], [0.8, 0.6]])
    pair: dict[str, Any] = {
        "diagonal": (variances, padded),
        "low rank": (
            LowRankMetric(variances, vectors, jnp.array([2.0, 3.0])),
            LowRankMetric(padded, of_places, jnp.array([2.0, 3.0])),
        ),
        "dense": tuple(gm.DenseMetric(v, [np.eye(1)], [("mean",)]) for v in (variances, padded)),
        "rotated": tuple(RotatedMetric(v, {"effect": (None, turn)}) for v in (variances, padded)),
    }[kind]
    plain, of_padded = (kernel(name, metric).inverse_mass_matrix for metric in pair)
    assert plain is not None
    jax.tree.map(np.testing.assert_array_equal, plain, of_padded)
    check_seen(plain if kind == "diagonal" else plain.variances, name, variances)
    again = kernel(name, of_padded).inverse_mass_matrix
    jax.tree.map(np.testing.assert_array_equal, again, plain)


def started_at(initial, name="8"):
    """The first draw of a chain that hardly moves."""
    options = {"num_chains": 2, "num_warmup": 0, "num_samples": 1, "progress": False}
    draws = gm.sample(KEY, target(name), initial, kernel=kernel(name), **options)
    return jax.tree.map(lambda a: np.asarray(a)[:, 0], draws.position)


STARTS = {
    "uniform": lambda x: gm.uniform_start(placed(x, "8"), 0.0),
    "function": lambda x: lambda rng_key: placed(x, "8"),
    "chains": lambda x: gm.per_chain(jax.tree.map(lambda a: jnp.stack([a, a]), placed(x, "8"))),
    "laid": lambda x: gm.uniform_start(kernel("8").init(x).position, 0.0),
    "mode": lambda x: gm.find_mode(KEY, target("8"), placed(x, "8"), max_steps=0, num_probes=0),
}


@pytest.mark.parametrize("kind", STARTS)
def test_chains_start_where_the_user_says(kind):
    found = started_at(STARTS[kind](unconstrained(params())))
    for name, expected in params().items():
        both = np.broadcast_to(expected, found[name].shape)
        np.testing.assert_allclose(found[name], both, rtol=1e-4, atol=1e-5)


def coupled(x, row):
    return -5e-5 * (x["z"] - row["y"]) ** 2 - 5.0 * (x["z"] - x["mean"]) ** 2


@pytest.mark.parametrize("name", ["1", "8"])
def test_curvatures_that_are_raised_do_not_depend_on_pad(name):
    """One probe estimates the curvature of each row, 10.0001, as 0.0001 or 20.0001."""
    data = gm.place({"y": np.zeros(ROWS)}, mesh_of(name), P("data"))
    model = gm.Posterior(log_prior, gm.Plate(coupled, data, local="z"))
    start = {"mean": jnp.zeros(1), "z": jnp.zeros(ROWS)}
    mode = gm.find_mode(jax.random.key(1), model, start, max_steps=0, num_probes=1)
    found = np.asarray(mode.curvature["z"])
    is_low = found < 1
    assert 3 < is_low.sum() < 14
    np.testing.assert_allclose(found[~is_low], 20.0001, rtol=1e-4)
    np.testing.assert_allclose(found[is_low], 0.02 * np.mean(~is_low), rtol=1e-3)


def test_a_run_goes_on_from_the_positions_of_states_on_another_mesh():
    options = {"num_warmup": 0, "num_samples": 1, "num_chains": 2, "progress": False}
    x = gm.uniform_start(unconstrained(params()), 0.5)
    first = gm.sample(KEY, target("8"), x, kernel=kernel("8"), **options)
    positions = jax.tree.map(np.asarray, first.state.position)
    second = gm.sample(KEY, target("1"), gm.per_chain(positions), kernel=kernel("1"), **options)
    for name, draw in first.position.items():
        np.testing.assert_allclose(second.position[name], draw, rtol=1e-4, atol=1e-5)


@MESHES
def test_as_many_rows_as_with_pad_are_no_position(name):
    """A length does not tell that an array is in the order of the devices."""
    rows = local.lay_out(target(name), unconstrained(params()))["rate"].values
    wrong = unconstrained(params()) | {"rate": jnp.asarray(np.asarray(rows))}
    for call in (kernel(name).init, lambda x: kernel(name, x), target(name).terms):
        with pytest.raises(ValueError, match=rf"'rate'\].*expected a leading axis of {GROUPS}, got"):
            call(wrong)
    with pytest.raises(ValueError, match=rf"expected a leading axis of {GROUPS}, got"):
        started_at(gm.uniform_start(wrong), name)


def test_pad_that_no_plate_masks_is_refused():
    variances = {"x": gm.place(np.ones(ROWS), mesh_of("8"), P("data"))}
    of_all = gm.LogDensity(lambda x: -0.5 * x["x"] ** 2)
    for call in (lambda x: gm.HMC(of_all, 0.1, 1, x), gm.HMC(of_all, 0.1, 1).init):
        with pytest.raises(ValueError, match=r"\['x'\]: got Padded.*, whose pad nothing masks here"):
            call(variances)


def test_the_order_of_other_groups_is_refused():
    x = kernel("8").init(unconstrained(params())).position
    other = target("8", tuple((KEYS + 1) % GROUPS))
    for call in (gm.HMC(other, 0.1, 1).init, lambda metric: gm.HMC(other, 0.1, 1, metric)):
        with pytest.raises(ValueError, match=r"'effect'\].*in the order of other groups"):
            call(jax.tree.map(jnp.abs, x))


def test_a_plate_evaluates_latents_that_are_laid_out():
    x = local.arrays(placed(unconstrained(params()), "8"))
    plate = target("8").plates[2]
    for call in (plate.terms, plate.grad, plate.terms_and_grad):
        with pytest.raises(ValueError, match="expected its local latents laid out with its rows"):
            call(x)


def test_an_array_with_pad_is_not_taken_for_one_without():
    state = kernel("8").init(unconstrained(params()))
    assert repr(state.position["z"]) == "Padded(float32[24]: 17 rows + 7 pad)"
    assert repr(state.position["rate"]).endswith("[16]: 11 rows + 5 pad, in the order of groups)")
    np.testing.assert_allclose(state.position["z"].unpad(), params()["z"], rtol=1e-6)
    rate, mesh = state.position["rate"], mesh_of("8")
    for call in (
        rate.unpad,
        lambda: gm.place(rate, mesh, P("data")),
        lambda: gm.Plate(of_z, {"z": rate}),
        lambda: gm.Groups(KEYS, mesh, P("data")).place({"rate": rate}),
    ):
        with pytest.raises(ValueError, match="the order in which groups are stored, where yours"):
            call()
    for read in (np.asarray, lambda x: x[:3]):
        with pytest.raises(TypeError, match=r"where an array was expected\. Its array is \.values"):
            read(state.position["z"])
