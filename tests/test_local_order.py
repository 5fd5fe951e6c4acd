"""Positions and metrics that `place` has padded are in the user's order.

The truth is a log density in NumPy, of arrays in the user's order.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of
from numpyro.distributions import biject_to, constraints
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc.targets import local

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
def test_the_density_of_a_padded_position_is_that_of_the_user_s_order(name):
    x, expected = unconstrained(params()), log_density(params())
    in_program = jax.jit(gm.HMC.init)
    for position in (x, placed(x, name)):
        for state in (kernel(name).init(position), in_program(kernel(name), position)):
            np.testing.assert_allclose(state.log_density, expected, rtol=1e-5)
            check_seen(state.position, name, x)


@MESHES
def test_a_padded_metric_is_that_of_the_user_s_order(name):
    variances = jax.tree.map(jnp.exp, unconstrained(params(0.5)))
    for given in (variances, placed(variances, name)):
        check_seen(kernel(name, given).inverse_mass_matrix, name, variances)


@MESHES
def test_a_run_starts_where_a_padded_position_says(name):
    x = unconstrained(params())
    draws = gm.sample(
        KEY,
        target(name),
        placed(x, name),
        kernel=kernel(name),
        num_chains=2,
        num_warmup=0,
        num_samples=1,
        progress=False,
    )
    for leaf, start in (("effect", params()["effect"]), ("z", params()["z"])):
        for chain in np.asarray(draws.position[leaf])[:, 0]:
            assert np.abs(chain - start).max() <= 2.001  # the jitter of a start
