"""What a user sees of groups has the user's order: draws, files, modes, metrics, rows, errors.

Chains hardly move here, so a draw is recognized by its start, which differs from group to group.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray
from jax.sharding import PartitionSpec as P
from models import mesh_of
from numpyro.distributions import biject_to, constraints
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets import local

KEY = jax.random.key(seed(0))
CHAINS, GROUPS = 2, 41
# That there is little data, and that devices wait for the one with the largest group.
pytestmark = [
    pytest.mark.filterwarnings("ignore:small data"),
    pytest.mark.filterwarnings("ignore:Groups"),
]

RNG = np.random.default_rng(0)
NAMES = np.array([f"station {i}" for i in RNG.permutation(GROUPS)])
STATION = RNG.permutation(np.repeat(RNG.permutation(GROUPS), np.repeat([2, 20], [29, 12])))
Y, HEIGHT = RNG.gamma(2.0, size=len(STATION)), RNG.normal(size=GROUPS)
POSITIVE = biject_to(constraints.positive)


def log_prior(x):
    return -0.5 * x["scale"] ** 2


def of_station(x, row):
    return -x["rate"] - 0.5 * jnp.sum((x["effect"] - row["height"][:, None]) ** 2, axis=1)


def of_row(x, row):
    return jnp.log(x["rate"]) - x["rate"] * row["y"] * 1e-3 - 0.5 * (x["effect"][:, 1] - row["y"]) ** 2


def twice(params):
    return {"twice": 2 * params["rate"]}


@cache
def target(name="8", height=None, y=None):
    groups = gm.Groups(NAMES[STATION], mesh_of(name), P("data"), labels=NAMES)
    height, y = HEIGHT if height is None else np.array(height), Y if y is None else np.array(y)
    both = ("rate", "effect")
    return gm.Posterior(
        log_prior,
        gm.Plate(of_station, groups.place({"height": height}), local=both),
        gm.Plate(of_row, groups.place_rows({"y": y}), local=both),
        bijections={"rate": POSITIVE},
        derived=twice,
    )


def params(chain=0):
    """What groups are told by."""
    number = np.arange(GROUPS) + 1.0 + 100 * chain
    return {"rate": number, "effect": np.stack([-number, number / 7], axis=1), "scale": np.float64(0.5)}


def position(chain=0):
    x = params(chain)
    x["rate"] = np.log(x["rate"])
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), x)


def each_chain():
    return gm.per_chain(jax.tree.map(lambda *x: jnp.stack(x), position(0), position(1)))


def sample(name="8", start=None, num_samples=3, **options):
    kernel = gm.HMC(target(name), 1e-7, 2)
    options = {"kernel": kernel, "num_chains": CHAINS, "num_warmup": 0, "progress": False} | options
    start = each_chain() if start is None else start
    return gm.sample(KEY, target(name), start, num_samples=num_samples, **options)


def check_order(found, names=("rate", "effect")):
    """Of arrays [chains, draws, groups, ...]."""
    for name in names:
        expected = np.stack([params(c)[name] for c in range(CHAINS)])[:, None]
        np.testing.assert_allclose(found[name], np.broadcast_to(expected, found[name].shape), rtol=1e-4)


def collected(x, info):
    return {"effect": x["effect"], "accepted": info.is_accepted}


@cache
def draws():
    return sample()


def test_draws_and_what_is_derived_and_a_datatree_have_the_user_s_order():
    assert draws().position["rate"].shape == (CHAINS, 3, GROUPS)
    check_order(draws().position)
    np.testing.assert_allclose(draws().position["twice"], 2 * np.asarray(draws().position["rate"]))
    posterior = draws().to_datatree()["posterior"]
    check_order({name: posterior[name].values for name in ("rate", "effect")})


def test_a_wrong_order_is_rejected():
    with pytest.raises(AssertionError, match="Not equal"):
        as_they_lie = np.asarray(draws().state.position["effect"].values)[:, None, :GROUPS]
        check_order({"effect": as_they_lie}, ["effect"])


def test_what_is_collected_has_the_user_s_order():
    kept = sample(collect=collected).position
    check_order({"effect": kept["effect"]}, ["effect"])


def test_draws_on_disk_have_the_user_s_order_and_go_on_on_another_mesh(tmp_path):
    sink = gm.ZarrSink(tmp_path / "draws")
    sample("8", to=sink, checkpoint=tmp_path / "run")
    check_order(gm.open_draws(tmp_path / "draws").position)
    more = sample("2x4", to=gm.ZarrSink(tmp_path / "draws"), checkpoint=tmp_path / "run", num_samples=6)
    assert more.position["rate"].shape == (CHAINS, 6, GROUPS)
    check_order(more.position)
    posterior = xarray.open_datatree(tmp_path / "draws", engine="zarr")["posterior"]
    check_order({name: posterior[name].values for name in ("rate", "effect")})


def test_a_run_that_goes_on_on_another_mesh_is_the_run_on_one(tmp_path):
    def run(name, num_samples, **options):
        kernel = gm.HMC(target(name), 0.02, 3)
        return sample(name, num_samples=num_samples, kernel=kernel, **options).position

    run("8", 3, checkpoint=tmp_path)
    resumed, whole = run("7", 6, checkpoint=tmp_path), run("8", 6)
    assert np.ptp(whole["effect"], axis=1).max() > 0.01, "it moves"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), resumed, whole)


def test_a_metric_is_given_in_the_user_s_order():
    variances = jax.tree.map(jnp.abs, position()) | {"rate": jnp.arange(GROUPS) + 1.0}
    kernel = gm.HMC(target(), 1e-7, 2, variances)
    metric: Any = kernel.inverse_mass_matrix
    order = target().plates[0].slots.order
    assert order is not None
    laid = metric["rate"].values
    seen = np.asarray(order.see(laid))[:GROUPS]
    np.testing.assert_array_equal(seen, np.arange(GROUPS) + 1.0)
    assert np.any(np.asarray(laid)[:GROUPS] != seen)


def test_jittered_starts_are_the_same_on_every_mesh():
    starts = [sample(n, gm.uniform_start(position(0), 0.5), num_samples=1) for n in ("1", "8")]
    first, second = (np.asarray(d.position["effect"]) for d in starts)
    np.testing.assert_allclose(first, second, rtol=1e-4)
    apart = first[:, 0] - params(0)["effect"]
    assert 0.4 < np.abs(apart).max() <= 0.51 and np.ptp(first, axis=0).min() > 0
    pad = np.asarray(starts[1].state.position["effect"].values)
    last = np.repeat(pad[:, GROUPS - 1 : GROUPS], 7, axis=1)
    np.testing.assert_allclose(pad[:, GROUPS:], last, rtol=1e-5)


def test_the_mode_has_the_user_s_order():
    mode = gm.find_mode(KEY, target(), position(), tolerance=1e-4)
    rows, total = np.bincount(STATION), np.bincount(STATION, Y)
    expected = (HEIGHT + total) / (1 + rows)  # of the second effect; the first has its prior alone
    assert mode.is_converged
    np.testing.assert_allclose(mode.position["effect"], np.stack([HEIGHT, expected], axis=1), atol=0.02)
    np.testing.assert_allclose(np.asarray(mode.curvature["effect"])[:, 1], 1 + rows, rtol=0.1)


@pytest.mark.parametrize("name", ["1", "7"])
def test_terms_of_rows_and_of_groups_have_the_user_s_order(name):
    x = jax.tree.map(jnp.asarray, params())
    both = {n: x[n] for n in ("rate", "effect", "scale")}
    of_groups, of_rows = (plate.log_likelihood_rows(both) for plate in target(name).plates)
    np.testing.assert_allclose(of_groups, of_station(x, {"height": jnp.asarray(HEIGHT)}), rtol=1e-5)
    looked_up = x | {n: x[n][STATION] for n in ("rate", "effect")}
    np.testing.assert_allclose(of_rows, of_row(looked_up, {"y": jnp.asarray(Y)}), rtol=1e-5)


def test_the_jacobian_of_a_group_s_latent_counts_once():
    x = position()
    laid = local.lay_out(target(), x)
    value = tree.total(jax.jit(lambda target, x: target.terms(x))(target(), laid))
    constrained = jax.tree.map(jnp.asarray, params())
    looked_up = constrained | {n: constrained[n][STATION] for n in ("rate", "effect")}
    terms = [
        of_station(constrained, {"height": jnp.asarray(HEIGHT)}),
        of_row(looked_up, {"y": jnp.asarray(Y)}),
    ]
    expected = sum(float(np.sum(np.asarray(t, np.float64))) for t in terms) - 0.5 * 0.5**2
    jacobian = float(np.sum(np.log(params()["rate"])))
    np.testing.assert_allclose(float(value), expected + jacobian, rtol=1e-5)
    assert abs(jacobian) > 1e-3 * abs(expected), "or this would show nothing"


def test_a_row_that_is_not_finite_is_named_by_its_number():
    y, height = Y.copy(), HEIGHT.copy()
    y[123], height[17] = np.nan, np.inf
    for changed, number in (({"y": tuple(y)}, 123), ({"height": tuple(height)}, 17)):
        bad = target("8", **changed)
        with pytest.raises(gm.NonFiniteStart, match=rf"the first is row {number}; the target's data"):
            gm.sample(KEY, bad, position(), kernel=gm.HMC(bad, 0.1, 2), num_samples=1, progress=False)


def test_plates_of_groups_say_what_they_are():
    groups = gm.Groups(NAMES[STATION], mesh_of("8"), P("data"), labels=NAMES)
    spec = P("data")  # older versions of JAX write it out
    assert repr(groups) == f"Groups(41 groups of 2 to 20 rows over {spec} on {{'data': 8}})"
    assert repr(groups.place()) == "GroupTable(41 groups)"
    assert repr(groups.place_rows({"y": Y})) == f"GroupedRows({len(Y)} rows of 41 groups)"
    of_groups, of_rows = map(repr, target().plates)
    assert of_groups == "Plate(of_station, 41 rows + 7 pad over data=8)"
    assert of_rows.startswith(f"Plate(of_row, {len(Y)} rows + ") and of_rows.endswith(
        "data=8 of 41 groups)"
    )
    shown = str(gm.visualize(target()))
    assert ".plates[1].data['y']" in shown and "P(data=8)" in shown
