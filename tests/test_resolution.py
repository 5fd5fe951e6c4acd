"""Log densities too large for their numbers, and draws at a support's rounded edge, are told of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import normal
from numpyro.distributions import transforms

import gspmd_mcmc as gm
from gspmd_mcmc import SamplingWarning
from gspmd_mcmc.targets.resolution import on_coarse_terms, on_rounded_bijections


def added_up(x):
    return jnp.sum(-0.5 * x["x"] ** 2) + 1e8


def apart(x):
    return -0.5 * x["x"] ** 2, jnp.float32(1e8)


def large_sum(x):
    return -4e6 - jnp.sum(-0.5 * x["x"] ** 2)


def per_observation(x):
    return -1e5 - 0.5 * x["x"] ** 2


def small(x):
    return -0.5 * jnp.sum(x["x"] ** 2)


def states_of(target, position):
    """The states of four chains that are spread around a position."""
    spread = jax.tree.map(lambda x: jnp.stack([x + i for i in range(4)]), position)
    return jax.vmap(gm.HMC(target, 0.1, 1).init)(spread)


def sample(target, position=None, **options):
    """Draw by HMC with no warm-up, which compiles sooner than trees."""
    kernel = gm.HMC(target, 1.0, 5, jitter=0.5)
    options |= {"kernel": kernel, "num_warmup": 0, "progress": False}
    return gm.sample(jax.random.key(0), target, position, **options)


def said_of(fn):
    target = gm.LogDensity(fn)
    return on_coarse_terms(target, states_of(target, {"x": jnp.zeros(3)}))


@pytest.mark.parametrize("fn", [added_up, large_sum])
def test_a_sum_that_lost_its_digits_is_told_of(fn):
    said = said_of(fn)
    assert "(the whole)" in said and "apart" in said and "float64" in said


@pytest.mark.parametrize("fn", [apart, per_observation, small])
def test_summands_apart_say_nothing(fn):
    assert said_of(fn) == ""


def test_float64_says_nothing():
    with jax.enable_x64(True):
        assert said_of(added_up) == ""


def row(params, block):
    return -0.5 * params["m"] ** 2 - block["x"]


def large_prior(params):
    return -0.5 * params["m"] ** 2 - 1e8


@pytest.mark.parametrize(("log_prior", "is_told"), [(normal, False), (large_prior, True)])
def test_a_plates_sums_are_two_floats_and_the_prior_is_not(log_prior, is_told):
    x = np.full(1000, 1e5, np.float32)  # 1e8 in all, and no row near 2^20
    target = gm.Posterior(log_prior, gm.Plate(row, {"x": x}))
    states = states_of(target, {"m": jnp.zeros(())})
    assert float(jnp.max(jnp.abs(states.terms["plates"][0]))) > 2**20
    assert ("['prior']" in on_coarse_terms(target, states)) == is_told


@pytest.mark.parametrize(("fn", "is_told"), [(added_up, True), (apart, False)])
def test_sample_warns(fn, is_told):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SamplingWarning)
        sample(gm.LogDensity(fn), {"x": jnp.zeros(3)}, num_samples=5)
    assert any("numbers lie 8 apart" in str(w.message) for w in caught) == is_told


# Draws at the edge of a support, of 2,000 exact ones.

SUPPORTS = {
    "Dirichlet(0.1)": (dist.Dirichlet(jnp.full(5, 0.1)), True),
    "Dirichlet(1)": (dist.Dirichlet(jnp.ones(5)), False),
    "Beta(0.1, 0.1)": (dist.Beta(0.1, 0.1), True),
    "Beta(1, 1)": (dist.Beta(1.0, 1.0), False),
    "probability near 1": (dist.Beta(1e6, 1.0), True),
    "half Cauchy": (dist.HalfCauchy(1.0), False),
    "tiny, but not rounded": (dist.LogNormal(-40.0, 1.0), False),
    "correlations": (dist.LKJCholesky(4, 1.0), False),
    "normal": (dist.Normal(0.0, 1.0), False),
}


def latent(d):
    def model():
        numpyro.sample("x", d)

    return gm.from_numpyro(model)


@pytest.mark.parametrize("name", SUPPORTS)
def test_draws_at_a_rounded_edge_are_told_of(name):
    """Of Beta(0.1, 0.1) a tenth is nearer to 1 than float32 can be."""
    d, is_told = SUPPORTS[name]
    draws = d.sample(jax.random.key(0), (4, 500))
    said = on_rounded_bijections(latent(d), {"x": draws})
    assert ("['x']" in said and "float64" in said) == is_told


@pytest.mark.parametrize(("num_at_edge", "is_told"), [(5, False), (6, True)])
def test_a_few_draws_at_the_edge_are_chance(num_at_edge, is_told):
    values = np.linspace(0.2, 0.8, 40, dtype=np.float32)
    values[:num_at_edge] = np.nextafter(np.float32(1), np.float32(0))
    draws = jnp.asarray(values).reshape(4, 10)
    assert bool(on_rounded_bijections(latent(dist.Beta(0.1, 0.1)), {"x": draws})) == is_told


def test_float64_has_room_at_the_edge():
    with jax.enable_x64(True):
        d = dist.Dirichlet(jnp.full(5, 0.3))
        draws = d.sample(jax.random.key(0), (4, 500))
        assert on_rounded_bijections(latent(d), {"x": draws}) == ""


def test_sample_tells_of_draws_at_the_edge_and_leaves_what_a_function_collected_alone():
    def said(**options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SamplingWarning)
            sample(latent(dist.Beta(0.05, 0.05)), num_samples=300, **options)
        return any("at the edge of its support" in str(w.message) for w in caught)

    assert said()
    assert not said(collect=lambda position, info: {"x": position["x"] * 0 + 1.0})


def test_a_distribution_that_remembers_its_inverse_means_the_same():
    """A transform of NumPyro keeps a weak reference to its inverse once it was asked for."""
    base = dist.Normal(0.0, 1.0).expand([4]).to_event(1)
    d = dist.TransformedDistribution(base, transforms.OrderedTransform())
    target = latent(d)
    assert d.transforms[0].inv is not None
    draws = sample(target, num_samples=5)
    assert np.all(np.diff(draws.position["x"]) > 0)
