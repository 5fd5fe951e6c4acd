"""Programs that are wrong on a chip each in one way, which the audit of ours must find."""

import functools

import audit
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

pytestmark = pytest.mark.quick
S = jax.ShapeDtypeStruct
ROWS, COLUMNS, GROUPS = 8000, 500, 8
CHIPS = ("TPU v3", "8 x H100")


def step_of(kernel, position):
    state = jax.eval_shape(gm.HMC.init, kernel, position)
    return gm.HMC.step, kernel, jax.eval_shape(lambda: jax.random.key(0)), state


def prior(params):
    return tuple(-0.5 * params[name] ** 2 for name in sorted(params))


def logistic(params, x, y):
    return jnp.sum(gm.bernoulli_logits(x @ params["w"], y))


def closed_over(mesh):
    """Rows in the function: every device has all of them, and nothing is summed over devices."""
    x = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    y = x[:, 0] > 0.5
    target = gm.LogDensity(functools.partial(density_of, x, y))
    return step_of(gm.HMC(target, 0.1, 10), {"w": S((COLUMNS,), jnp.float32)})


def density_of(x, y, params):
    return logistic(params, x, y)


def looked_up(params, order, y):
    """Latents that lie over the devices, read by an index that may be of any."""
    return prior(params) + (jnp.sum(gm.bernoulli_logits(params["effect"][order], y)),)


def gathered(mesh):
    rows = {"order": S((ROWS,), jnp.int32), "y": S((ROWS,), jnp.bool_)}
    data = gm.place(rows, mesh, P("data"))
    target = gm.LogDensity(looked_up, data["order"], data["y"])
    effect = gm.place(S((80_000,), jnp.float32), mesh, P("data"))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return init_and_step, gm.HMC(target, 0.1, 10), key, {"effect": effect}


def init_and_step(kernel, key, position):
    """The start of a step, at a position that lies where it is given."""
    return kernel.step(key, kernel.init(position))


def logistic_rows(params, block):
    return gm.bernoulli_logits(block["x"] @ params["w"], block["y"])


def logistic_rows_in_double(params, block):
    logits = block["x"].astype(jnp.float64) @ params["w"].astype(jnp.float64)
    return gm.bernoulli_logits(logits.astype(jnp.float32), block["y"])


def plate(rows, mesh):
    data = {"x": S((ROWS, COLUMNS), jnp.float32), "y": S((ROWS,), jnp.bool_)}
    target = gm.Posterior(prior, gm.Plate(rows, gm.place(data, mesh, P("data"))))
    return step_of(gm.HMC(target, 0.1, 10), {"w": S((COLUMNS,), jnp.float32)})


def effects(params, block):
    return gm.bernoulli_logits(params["effect"][block["group"]], block["y"])


def scattered(mesh):
    """The gradient of a lookup: on a GPU a loop of compare-and-swap."""
    data = {"group": S((ROWS,), jnp.int32), "y": S((ROWS,), jnp.bool_)}
    target = gm.Posterior(prior, gm.Plate(effects, gm.place(data, mesh, P("data"))))
    return step_of(gm.HMC(target, 0.1, 10), {"effect": S((GROUPS,), jnp.float32)})


def found(build, on, most_bytes=10**9):
    return "\n".join(audit.violations(build, gm.plan(build, data=8, on=on), most_bytes))


@pytest.mark.parametrize("on", CHIPS)
def test_the_program_that_the_others_are_made_of_is_right(on):
    build = functools.partial(plate, logistic_rows)
    assert found(build, on) == ""
    assert "memory: " in found(build, on, most_bytes=1000)


@pytest.mark.parametrize("on", CHIPS)
def test_data_that_a_function_closes_over_are_found(on):
    text = found(closed_over, on)
    assert "16 MB: args[0], given to a partial of density_of" in text
    assert "0 sums over rows, expected 1" in text


@pytest.mark.parametrize("on", CHIPS)
def test_a_gather_in_the_loop_is_found(on):
    text = found(gathered, on)
    assert "in leapfrog" in text
    assert "not a sum: all-gather" in text or "sums over rows, expected 1" in text


@pytest.mark.parametrize("on", CHIPS)
def test_float64_is_found(on):
    with jax.enable_x64(True):
        assert "float64" in found(functools.partial(plate, logistic_rows_in_double), on)


def test_a_scatter_by_compare_and_swap_is_found_with_its_line():
    text = found(scattered, "8 x H100")
    assert "atomic: tests/chips/test_controls.py" in text
    assert "compare-and-swap loop on f32" in text
    assert found(scattered, "TPU v3") == ""


def test_a_program_that_a_chip_has_no_memory_for_is_refused():
    build = functools.partial(programs.build("mnist", "HMC"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "ROWS", 300_000_000)
        text = found(build, "TPU v5e")
        plan = gm.plan(build, data=8, on="TPU v5e")
    assert "it does not fit: Ran out of memory" in text
    assert "DOES NOT FIT: the TPU v5e's own compiler refuses it" in str(plan)
    assert plan.report.argument_bytes > 16 * 2**30
