"""The adversarial targets' own samplers are exact, and their judge finds lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from validation.sections import adversarial
from validation.sections.adversarial_targets import ADVERSARIES

NUM = 20_000


@pytest.fixture(scope="module")
def exact():
    return {name: make().exact(np.random.default_rng(0), NUM) for name, make in ADVERSARIES.items()}


def as_chains(values):
    """Independent draws as those of four chains."""
    return {name: x.reshape(4, -1) for name, x in values.items()}


def judged(name, values, exact, warned=()):
    return adversarial.judge(as_chains(values), exact[name], warned)


def test_there_are_at_least_26_adversaries():
    assert len(ADVERSARIES) >= 26


@pytest.mark.parametrize("name", ADVERSARIES)
def test_exact_draws_are_right_and_those_of_a_wrong_law_are_not(name, exact):
    own = ADVERSARIES[name]().exact(np.random.default_rng(1), NUM)
    assert judged(name, own, exact).is_right
    of_one = next(iter(own))
    # One coordinate's lowest tenth is never visited.
    lost = own | {of_one: np.maximum(own[of_one], np.quantile(own[of_one], 0.1))}
    verdict = judged(name, lost, exact)
    assert not verdict.is_right and verdict.is_silent_lie
    assert not judged(name, lost, exact, ["R-hat"]).is_silent_lie


def test_what_never_moves_is_wrong(exact):
    name = "two modes that mix"
    still = {key: np.full(NUM, np.median(x)) for key, x in exact[name].items()}
    assert judged(name, still, exact).is_silent_lie


def test_draws_that_are_not_finite_are_wrong(exact):
    name = "two modes that mix"
    bad = {key: np.where(np.arange(NUM) == 7, np.nan, x) for key, x in exact[name].items()}
    assert not judged(name, bad, exact).is_right


# A density and its sampler agree where a random walk that starts with exact draws stays among them.
WALKED = ("two modes that mix", "banana", "ring", "torus", "plateau", "horseshoe", "hard edges")


@pytest.mark.parametrize("name", WALKED)
def test_the_density_is_that_of_the_exact_draws(name, exact):
    """Walk from the target's default start: the law that is reached is that of the exact sampler."""
    adversary = ADVERSARIES[name]()
    density = adversary.density
    assert density is not None

    def log_density(position):
        return sum(jnp.sum(term) for term in jax.tree.leaves(density(position)))

    def step(carry, key):
        position, value = carry
        leaves, treedef = jax.tree.flatten(position)
        *keys, accept, scale = jax.random.split(key, len(leaves) + 2)
        # Steps of many sizes, so that one walk suits all these targets.
        size = 3 * 10 ** -jax.random.uniform(scale, (), maxval=3)
        moved = treedef.unflatten(
            [x + size * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        )
        there = log_density(moved)
        takes = jnp.log(jax.random.uniform(accept)) < there - value
        return jax.tree.map(lambda a, b: jnp.where(takes, a, b), (moved, there), carry), None

    @jax.jit
    def walk(key):
        start = (adversary.origin, log_density(adversary.origin))

        def thinned(carry, key):
            carry, _ = jax.lax.scan(step, carry, jax.random.split(key, 60))
            return carry, carry[0]

        return jax.lax.scan(thinned, start, jax.random.split(key, 200))[1]

    draws = jax.vmap(walk)(jax.random.split(jax.random.key(0), 64))
    found = adversary.read(jax.tree.map(lambda x: x[:, 50:], draws))
    assert adversarial.judge(found, exact[name], ()).is_right
    shifted = {key: x + 0.3 * np.std(x) for key, x in found.items()}
    assert not adversarial.judge(shifted, exact[name], ()).is_right
