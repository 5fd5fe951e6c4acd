"""Positions of a user's own classes, which a notebook defines again each time its cell is run."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm

SHORT: dict[str, Any] = {"num_chains": 2, "num_warmup": 20, "num_samples": 20, "progress": False}


def defined():
    """Define the class that a cell defines, each time anew."""

    @jax.tree_util.register_dataclass
    @dataclass
    class Params:
        loc: jax.Array
        scale: jax.Array

    return Params


def defined_with_other_names():
    @jax.tree_util.register_dataclass
    @dataclass
    class Other:
        low: jax.Array
        high: jax.Array

    return Other


def density(params):
    return [-0.5 * (x - 1.0) ** 2 for x in vars(params).values()]


def terms(params, x):
    first, second = vars(params).values()
    return -0.5 * (x - first) ** 2 - 0.5 * (x - second) ** 2


def with_rows():
    return gm.Posterior(density, gm.Plate(terms, np.linspace(0, 1, 20, dtype=np.float32)))


@pytest.mark.parametrize("again", [defined, defined_with_other_names])
@pytest.mark.parametrize("make", [lambda: gm.LogDensity(density), with_rows])
def test_a_class_that_is_defined_again_is_sampled_as_the_first_was(make, again):
    first, second = (cls(jnp.zeros(()), jnp.ones(())) for cls in (defined(), again()))
    target = make()
    kernel = gm.HMC(target, 0.5, 2)
    draws = [
        gm.sample(jax.random.key(0), target, position, kernel=kernel, **SHORT)
        for position in (first, second)
    ]
    assert [type(d.position) for d in draws] == [type(first), type(second)]
    for one, other in zip(*(jax.tree.leaves(d.position) for d in draws), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_is_continued_by_a_class_that_is_defined_again(tmp_path):
    target = gm.LogDensity(density)
    kernel, folder = gm.HMC(target, 0.5, 2), tmp_path / "run"
    first, second = (cls(jnp.zeros(()), jnp.ones(())) for cls in (defined(), defined()))

    def sampled(position, num_samples):
        settings = SHORT | {"num_samples": num_samples}
        return gm.sample(
            jax.random.key(0), target, position, kernel=kernel, checkpoint=folder, **settings
        )

    begun, both = sampled(first, 20), sampled(second, 40)
    assert type(both.position) is type(second)
    np.testing.assert_array_equal(both.position.loc[:, :20], begun.position.loc)


@pytest.mark.parametrize("again", [defined, defined_with_other_names])
def test_a_metric_of_another_class_than_the_position_is_refused(again):
    first, second = (cls(jnp.ones(()), jnp.ones(())) for cls in (defined(), again()))
    kernel = gm.HMC(gm.LogDensity(density), 0.5, 2, inverse_mass_matrix=first)
    assert np.isfinite(kernel.init(first).log_density)
    with pytest.raises(
        ValueError, match=f"Params, the position's in another class {type(second).__qualname__}"
    ):
        kernel.init(second)


def test_a_metric_of_a_class_that_compares_by_identity_is_taken():
    @jax.tree_util.register_dataclass
    @dataclass(eq=False)
    class Params:
        loc: jax.Array
        scale: jax.Array

    kernel = gm.HMC(
        gm.LogDensity(density), 0.5, 2, inverse_mass_matrix=Params(jnp.ones(()), jnp.ones(()))
    )
    assert np.isfinite(kernel.init(Params(jnp.ones(()), jnp.ones(()))).log_density)
