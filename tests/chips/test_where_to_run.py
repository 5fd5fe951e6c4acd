"""Where a model should run: on a card that is not here, or on this CPU."""

import jax
import jax.numpy as jnp
from programs import build

import gspmd_mcmc as gm

S = jax.ShapeDtypeStruct
SCHOOLS = 8


def log_density(position):
    effects = position["mean"] + jnp.exp(position["scale"]) * position["effects"]
    terms = position["effects"] ** 2 + (effects - jnp.arange(8.0)) ** 2
    return -0.5 * (terms.sum() + position["mean"] ** 2 + position["scale"] ** 2)


def schools(chains):
    def program(mesh):
        kernel = gm.HMC(gm.LogDensity(log_density), 0.1, 10)
        shapes = {"mean": (), "scale": (), "effects": (SCHOOLS,)}
        position = {name: S((chains, *shape), jnp.float32) for name, shape in shapes.items()}
        states = jax.eval_shape(jax.vmap(gm.HMC.init, (None, 0)), kernel, position)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), chains))
        return jax.vmap(gm.HMC.step, (None, 0, 0)), kernel, keys, states

    return program


def test_eight_schools_run_on_the_cpu_until_there_are_many_chains():
    place = gm.where_to_run({1: schools(1), 4096: schools(4096)}, on="H100")
    assert place.card[1].bound == "launches"
    assert place.ratio(1) < 1 < place.ratio(4096)
    start = place.card_wins_from
    assert start is not None and 1 < start <= 4096
    said = str(place)
    assert "run it on the CPU" in said and f"From about {start} chains on the card is faster" in said


def test_mnist_runs_on_the_card():
    place = gm.where_to_run(build("mnist", "HMC", num_chains=1), on="H100")
    assert place.ratio(1) > 10 and place.card_wins_from == 1
    assert "run it on the card" in str(place)
