"""Atomics on floats in the assembly that the GPU's own compiler writes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs import build

import gspmd_mcmc as gm

S = jax.ShapeDtypeStruct
GROUPS, ROWS = 8, 5000


def gathered(effect, index, y):
    return -0.5 * jnp.sum((y - effect[index]) ** 2)  # the line to be named


def gathered_in_order(effect, index, y):
    rows = effect.at[index].get(indices_are_sorted=True)  # the line to be named
    return -0.5 * jnp.sum((y - rows) ** 2)


def one_hot(effect, index, y):
    return -0.5 * jnp.sum((y - jax.nn.one_hot(index, GROUPS) @ effect) ** 2)


def in_blocks(effect, index, y):
    rows = jnp.broadcast_to(effect[:, None], (GROUPS, ROWS // GROUPS))
    return -0.5 * jnp.sum((y.reshape(rows.shape) - rows) ** 2)


def plan_of(log_density):
    def program(mesh):
        data = gm.place({"index": S((ROWS,), jnp.int32), "y": S((ROWS,), jnp.float32)}, mesh, P())
        target = gm.LogDensity(on_data, data)
        kernel = gm.HMC(target, 0.01, 10)
        position = {"effect": S((GROUPS,), jnp.float32)}
        state = jax.eval_shape(gm.HMC.init, kernel, position)
        return gm.HMC.step, kernel, jax.eval_shape(lambda: jax.random.key(0)), state

    def on_data(position, data):
        return log_density(position["effect"], data["index"], data["y"])

    return gm.plan(program, data=1, on="H100")


@pytest.mark.parametrize("log_density", [gathered, gathered_in_order], ids=lambda f: f.__name__)
def test_the_gradient_of_an_index_is_a_compare_and_swap_loop_and_its_line_is_named(log_density):
    plan = plan_of(log_density)
    inside = [a for a in plan.atomics() if any(loop.name == "leapfrog" for loop in a.loops)]
    assert inside
    for atomic in inside:
        assert (atomic.form, atomic.dtype) == ("compare-and-swap loop", "f32")
        assert "test_atomics.py" in atomic.source and f"({log_density.__name__})" in atomic.source
        line = int(atomic.source.split(":")[1].split()[0])
        assert "the line to be named" in Path(__file__).read_text().splitlines()[line - 1]
    said = " ".join(str(plan).split())
    assert "compare-and-swap loop on f32" in said and "gspmd_mcmc.lookup" in said


@pytest.mark.parametrize("log_density", [one_hot, in_blocks], ids=lambda f: f.__name__)
def test_the_cures_have_none(log_density):
    assert plan_of(log_density).atomics() == ()


@pytest.mark.parametrize("model", ["mnist", "movielens"])
def test_programs_of_the_package_have_none(model):
    assert gm.plan(build(model, "HMC"), data=1, on="H100").atomics() == ()
