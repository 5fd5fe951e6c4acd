"""A target of a user's own: `terms` alone is enough, and everything else follows from it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.tree import total

KEY = jax.random.key(0)
CENTER = jnp.asarray([1.0, -2.0, 0.5])
POSITION = {"x": jnp.zeros(3)}


def around(x, center):
    return -0.5 * (x["x"] - center) ** 2


@gm.pytree
@dataclass(frozen=True, eq=False)
class Around(gm.Target):
    """A normal around a center, which is its data."""

    center: jax.Array

    def terms(self, position):
        return around(position, self.center)


@gm.pytree
@dataclass(frozen=True)
class Comparable(Around):
    """One that compares by value, so that it cannot be hashed."""


def test_gradients_come_from_the_terms():
    target = Around(CENTER)
    terms, grad = target.terms_and_grad(POSITION)
    np.testing.assert_allclose(total(terms), -0.5 * np.sum(CENTER**2), rtol=1e-6)
    for found in (grad, target.grad(POSITION)):
        np.testing.assert_allclose(found["x"], CENTER, rtol=1e-6)


@pytest.mark.parametrize("kind", [Around, Comparable])
def test_a_run_is_that_of_a_log_density(kind):
    def draws(target):
        options = {"num_warmup": 0, "num_samples": 10, "progress": False}
        kernel = gm.HMC(target, 0.3, 3)
        return gm.sample(KEY, target, POSITION, kernel=kernel, **options).position["x"]

    expected = draws(gm.LogDensity(around, CENTER))
    np.testing.assert_allclose(draws(kind(CENTER)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Around, Comparable])
def test_a_step_in_the_context_of_an_explicit_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",))
    expected = gm.HMC(kind(CENTER), 0.1, 3).init(POSITION)
    with jax.set_mesh(mesh):
        state = gm.HMC(kind(jnp.asarray(np.asarray(CENTER))), 0.1, 3).init({"x": jnp.zeros(3)})
    np.testing.assert_array_equal(state.log_density_grad["x"], expected.log_density_grad["x"])


def test_what_is_wrong_is_named():
    def init(target, position):
        return gm.HMC(target, 0.1, 1).init(position)

    with pytest.raises(ValueError, match=r"position \['y'\]: nothing reads it"):
        init(Around(CENTER), POSITION | {"y": jnp.zeros(2)})
    message = r"its summand \(the whole\) has 1 values .*; the target's data \.center has 1 values"
    with pytest.raises(gm.NonFiniteStart, match=message):
        init(Around(CENTER.at[1].set(jnp.nan)), POSITION)
    with pytest.raises(ValueError, match="Around: its functions do not tell the shapes"):
        Around(CENTER).origin()
    with pytest.raises(TypeError, match="prior_start: expected a target made by from_numpyro"):
        gm.prior_start(Around(CENTER))
    with pytest.raises(TypeError, match="abstract"):
        gm.Target()  # pyright: ignore[reportAbstractUsage]
