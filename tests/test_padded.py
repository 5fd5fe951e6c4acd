"""`Padded` knows which axis its rows are, whatever puts axes in front of them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of
from numpyro import distributions as dist
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc.placement.padding import real_rows

KEYS = jax.random.split(jax.random.key(seed(0)), 3)
SHAPES = pytest.mark.parametrize("columns", [(), (4,), (24,)])  # 24: as many as rows with pad


def sharded(columns, name="8"):
    return gm.Sharded(dist.Normal(0.0, 1.0).expand(columns), mesh=mesh_of(name), num_rows=17)


def drawn(columns):
    """What each key draws on one device, where nothing is padded."""
    return np.stack([np.asarray(sharded(columns, "1").sample(key)) for key in KEYS])


def of_scan(sample):
    return jax.lax.scan(lambda carry, key: (carry, sample(key)), 0, KEYS)[1]


def stacked(sample):
    return jax.tree.map(lambda *x: jnp.stack(x), *map(sample, KEYS))


WAYS = {
    "vmap": lambda sample: jax.vmap(sample)(KEYS),
    "vmap in jit": lambda sample: jax.jit(jax.vmap(sample))(KEYS),
    "scan": of_scan,
    "map": lambda sample: jax.lax.map(sample, KEYS),
    "stack": stacked,
}


@SHAPES
@pytest.mark.parametrize("way", WAYS)
def test_rows_behind_another_axis_are_cut(way, columns):
    found = WAYS[way](sharded(columns).sample)
    assert found.values.shape == (3, 24, *columns) and found.axis == 1
    np.testing.assert_allclose(found.unpad(), drawn(columns), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(real_rows)(found), drawn(columns), rtol=1e-6)
    one = jax.tree.map(lambda x: x[1], found)
    np.testing.assert_allclose(one.unpad(), drawn(columns)[1], rtol=1e-6)


def test_two_axes_in_front():
    keys = jax.random.split(jax.random.key(seed(1)), (2, 3))
    found = jax.vmap(jax.vmap(sharded((4,)).sample))(keys)
    assert found.unpad().shape == (2, 3, 17, 4)
    mapped = jax.vmap(jax.vmap(sharded((4,)).log_prob))(found)
    expected = dist.Normal(0, 1).log_prob(found.unpad()).sum((2, 3))
    np.testing.assert_allclose(mapped, expected, rtol=1e-5)


@SHAPES
def test_what_no_longer_has_its_rows_raises(columns):
    padded = sharded(columns).sample(KEYS[0])
    changes = [lambda x: x[0], lambda x: x[:17], lambda x: jnp.concatenate([x, x])]
    for change in [*changes, jnp.sum, *([partial(jnp.sum, axis=-1)] if columns else [])]:
        with pytest.raises(ValueError, match="expected values of 24 rows .*, got shape"):
            jax.tree.map(change, padded).unpad()


def test_several_arrays_are_no_data_and_no_position():
    found = jax.vmap(sharded(()).sample)(KEYS)
    with pytest.raises(ValueError, match=r"plate data \['y'\]: expected rows first, .* are axis 1"):
        gm.Plate(lambda x, row: row["y"], {"y": found})
    plate = gm.Plate(of_z, gm.place({"y": np.zeros(17)}, mesh_of("8"), P("data")), local="z")
    target = gm.Posterior(None, plate)
    with pytest.raises(ValueError, match=r"position \['z'\]: expected rows first"):
        gm.HMC(target, 0.1, 1).init({"z": found})
    with pytest.raises(ValueError, match="expected one value of shape"):
        sharded(()).log_prob(found)


def of_z(x, row):
    return -0.5 * (x["z"] - row["y"]) ** 2


@pytest.mark.filterwarnings("ignore:small data")
def test_a_draw_of_each_chain_is_a_start():
    plate = gm.Plate(of_z, gm.place({"y": np.zeros(17)}, mesh_of("8"), P("data")), local="z")
    target, starts = gm.Posterior(None, plate), jax.vmap(sharded(()).sample)(KEYS)
    options = {"num_chains": 3, "num_warmup": 0, "num_samples": 1, "progress": False}
    kernel = gm.HMC(target, 1e-7, 1)
    draws = gm.sample(KEYS[0], target, gm.per_chain({"z": starts}), kernel=kernel, **options)
    np.testing.assert_allclose(np.asarray(draws.position["z"])[:, 0], drawn(()), rtol=1e-4, atol=1e-5)


def test_a_padded_array_has_all_its_real_rows():
    assert gm.Padded(np.ones(5), 5).num_pad == 0
    for values, num_rows in ((np.ones(5), 11), (np.ones(5), -1), (np.float32(3), 1)):
        with pytest.raises(
            ValueError, match=f"Padded: expected values with at least num_rows={num_rows}"
        ):
            gm.Padded(values, num_rows)
    other = replace(gm.Padded(np.ones(5), 3), values=np.zeros((6, 2)))
    assert (other.num_pad, other.unpad().shape) == (3, (3, 2))
