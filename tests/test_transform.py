"""What users read of a reparameterized target is the parameters, never the position before `transform`.

The position is ``z``, small and rotated; the parameters are ``w``, around 10. No value of one can pass
for the other.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from models import mesh_of
from seeds import seed

import gspmd_mcmc as gm

KEY = jax.random.key(seed(0))
ROTATION = np.array([[0.6, -0.8], [0.8, 0.6]], np.float32)
ROWS, GROUPS = 17, 5
pytestmark = [
    pytest.mark.filterwarnings("ignore:small data"),
    pytest.mark.filterwarnings("ignore:Groups"),
]


def turned(rotation, position):
    """Return other names, other values; and latents of rows doubled and moved."""
    moved = {name: x + 10 for name, x in position.items() if name == "effect"}
    return {"w": rotation @ position["z"] + 10} | moved


def log_prior(params):
    return -0.5 * (params["w"] - 10) ** 2


def of_row(params, row):
    return -0.5 * (params["effect"] - row["y"]) ** 2 - 0.5 * (params["w"][0] - row["y"]) ** 2 / ROWS


def derived(params):
    assert sorted(params) == ["effect", "w"]
    return {"sum": params["w"].sum() + params["effect"].sum()}


def collected(params, info):
    return {"w": params["w"], "first": params["effect"][0], "moved": info.is_accepted}


@cache
def target(of_groups):
    y, mesh = 10 + np.arange(ROWS, dtype=np.float32) / ROWS, mesh_of("8")
    if of_groups:
        groups = gm.Groups(np.arange(ROWS) % GROUPS, mesh, P("data"), name="group")
        height = {"y": 10 + np.arange(GROUPS, dtype=np.float32)}
        plate = gm.Plate(of_row, groups.place(height), local="effect")
    else:
        plate = gm.Plate(of_row, gm.place({"y": y}, mesh, P("data")), local="effect")
    transform = Partial(turned, jnp.asarray(ROTATION))
    return gm.Posterior(log_prior, plate, transform=transform, derived=derived)


def position(of_groups=False):
    rows = GROUPS if of_groups else ROWS
    return {"z": jnp.zeros(2), "effect": jnp.linspace(0, 1, rows, dtype=jnp.float32)}


def sample(start=None, of_groups=False, **options):
    counts = {"num_chains": 2, "num_warmup": 0, "num_samples": 6, "progress": False} | options
    kernel = gm.HMC(target(of_groups), 1e-7 if of_groups else 0.1, 4)
    start = position(of_groups) if start is None else start
    return gm.sample(KEY, target(of_groups), start, kernel=kernel, **counts)


def last_params(draws):
    """Return the parameters of the last state, from its position alone; [chains, ...]."""
    last = draws.state.position
    return {"w": np.asarray(last["z"]) @ ROTATION.T + 10, "effect": last["effect"].unpad() + 10}


def check(draws):
    found: dict[str, Any] = {name: np.asarray(x) for name, x in draws.position.items()}
    assert sorted(found) == ["effect", "sum", "w"]
    for name, x in last_params(draws).items():
        np.testing.assert_allclose(found[name][:, -1], x, rtol=1e-6)
    total = found["w"].sum(axis=2) + found["effect"].sum(axis=2)
    np.testing.assert_allclose(found["sum"], total, rtol=1e-5)


@cache
def draws():
    return sample()


def test_draws_and_what_is_derived_are_parameters():
    check(draws())
    assert sorted(draws().state.position) == ["effect", "z"]
    assert draws().position["effect"].shape == (2, 6, ROWS)


def test_a_summary_and_a_datatree_have_parameters():
    summary = draws().summary()
    np.testing.assert_allclose(summary.mean["w"], draws().position["w"].mean(axis=(0, 1)), rtol=1e-5)
    posterior = draws().to_datatree()["posterior"]
    np.testing.assert_array_equal(posterior["w"].values, draws().position["w"])


def test_a_function_collects_parameters():
    kept, x = sample(collect=collected).position, draws().position
    np.testing.assert_array_equal(kept["w"], x["w"])
    np.testing.assert_array_equal(kept["first"], x["effect"][:, :, 0])


def test_draws_in_memory_of_the_host_are_parameters():
    check(sample(device_bytes=200))


def test_draws_on_disk_are_parameters_and_are_continued(tmp_path):
    options = {"to": gm.ZarrSink(tmp_path / "draws"), "checkpoint": tmp_path / "run"}
    check(sample(**options))
    more = sample(**options, num_samples=9)
    check(more)
    found = gm.open_draws(tmp_path / "draws").position
    np.testing.assert_array_equal(found["w"], more.position["w"])
    np.testing.assert_array_equal(found["effect"][:, :6], draws().position["effect"])


def test_draws_of_groups_are_parameters_in_the_order_of_the_labels():
    """Chains that hardly move: the jitter of their start differs from group to group."""
    start = position(of_groups=True)
    draws = sample(gm.uniform_start(start, 0.01), of_groups=True, num_samples=4)
    effect = np.asarray(draws.position["effect"])
    expected = 10 + np.broadcast_to(start["effect"], effect.shape)
    np.testing.assert_allclose(effect, expected, atol=0.011)
    assert draws.groups["effect"].name == "group"
    by_group = draws.summary(groups="group", max_rows=9)
    assert {row.name for row in by_group.rows} >= {str(label) for label in range(GROUPS)}


def test_a_run_goes_on_from_draws_and_from_their_last_positions():
    more = gm.sample(
        KEY, target(False), draws(), num_chains=2, num_warmup=0, num_samples=3, progress=False
    )
    check(more)
    start = gm.per_chain({"z": draws().state.position["z"], "effect": more.state.position["effect"]})
    check(sample(start))


def test_a_mode_is_a_position_and_draws_from_it_are_parameters():
    mode = gm.find_mode(KEY, target(False), position(), tolerance=1e-6)
    params = target(False).params(mode.position)
    y = 10 + np.arange(ROWS) / ROWS
    # Of w[0] - 10 the prior has precision 1, and the rows together as much.
    np.testing.assert_allclose(params["w"], [10 + (y.mean() - 10) / 2, 10], atol=1e-3)
    np.testing.assert_allclose(params["effect"], y, atol=2e-3)
    np.testing.assert_allclose(mode.position["z"], ROTATION.T @ (params["w"] - 10), atol=1e-5)
    check(sample(mode))
    check(sample(mode.laplace_start()))


def test_parameters_have_no_way_back_through_a_transform():
    with pytest.raises(ValueError, match=r"unconstrain: .*transform.*draws.state.position"):
        target(False).unconstrain({"w": jnp.zeros(2), "effect": jnp.zeros(ROWS)})


@pytest.mark.statistical
def test_the_mean_of_draws_is_that_of_the_parameters():
    prior = gm.Posterior(log_prior, transform=lambda z: {"w": z + 10}, derived=lambda x: {"v": x["w"]})
    draws = gm.sample(KEY, prior, jnp.zeros(3), num_warmup=300, num_samples=500, progress=False)
    for name in ("w", "v"):
        np.testing.assert_allclose(np.mean(draws.position[name], axis=(0, 1)), 10, atol=0.2)


def test_a_transform_that_changes_lengths_keeps_the_layout_of_other_axes():
    mesh = gm.make_mesh(data=4, model=2)
    data = gm.place({"y": np.ones(8, np.float32)}, mesh, P("data"))
    plate = gm.Plate(lambda params, row: -0.5 * (row["y"] - params["z"].sum()) ** 2, data)
    target = gm.Posterior(
        lambda params: -0.5 * params["z"] ** 2,
        plate,
        transform=lambda x: {"z": jnp.concatenate([x["z"], -x["z"][:1]])},
    )
    start = {"z": gm.place(np.zeros((8, 4), np.float32), mesh, P("model"))}
    start["z"] = jax.device_put(start["z"], jax.sharding.NamedSharding(mesh, P(None, "model")))
    options = {"num_chains": 2, "num_warmup": 0, "num_samples": 2, "progress": False}
    draws = gm.sample(KEY, target, start, kernel=gm.HMC(target, 0.1, 2), **options)
    assert draws.position["z"].shape == (2, 2, 9, 4)
    assert draws.position["z"].sharding.spec == P(None, None, None, "model")
