"""Terms of bfloat16 and float16: added up in float32, and a user is told that they are rounded."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets import local

NUM = 1000
TERM = 1.0078125  # a number of bfloat16 and of float16; between two sums of 1,000 there is no other
TOTAL = NUM * TERM
DTYPES = ("bfloat16", "float16")
ROWS = np.full(NUM, TERM, np.float32)
narrow = pytest.mark.filterwarnings("ignore:.*returns terms of:gspmd_mcmc.SamplingWarning")


def terms_of(dtype):
    def terms(x, rows=ROWS):
        return (x * rows).astype(dtype)

    return terms


@gm.pytree
@dataclass(frozen=True, eq=False)
class OwnTarget(gm.Target):
    dtype: str = tree.static()

    def terms(self, position):
        return terms_of(self.dtype)(position)


MADE = {
    "LogDensity": lambda dtype: gm.LogDensity(terms_of(dtype)),
    "own target": OwnTarget,
    "prior": lambda dtype: gm.Posterior(terms_of(dtype)),
    "rows": lambda dtype: gm.Posterior(lambda x: 0 * x, gm.Plate(terms_of(dtype), ROWS)),
}


@narrow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("made", MADE)
def test_narrow_terms_are_added_up_in_float32(made, dtype):
    state = gm.HMC(MADE[made](dtype), 0.1, 1).init(jnp.ones(()))
    assert state.log_density == TOTAL
    assert {x.dtype.name for x in jax.tree.leaves(state.terms)} == {"float32"}


@pytest.mark.parametrize("made", MADE)
def test_a_user_is_told_of_narrow_terms(made):
    with pytest.warns(gm.SamplingWarning, match=r"bfloat16, .* Convert what a term is computed of"):
        gm.HMC(MADE[made]("bfloat16"), 0.1, 1).init(jnp.ones(()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_narrow_parameters_are_added_up_in_float32(dtype):
    def terms(x, rows):
        return x.astype(jnp.float32) * rows

    plate = gm.Plate(terms, ROWS, tile_rows=1)
    found = plate.grad(jnp.ones((), dtype))
    assert found.dtype == dtype and found == jnp.asarray(TOTAL, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_those_of_latents_of_groups_too(dtype):
    groups = gm.Groups(np.repeat([0, 1], NUM // 2), tile_rows=1)

    def terms(params, rows):
        return params["z"].astype(jnp.float32) * rows

    plate = gm.Plate(terms, groups.place_rows(ROWS), local="z")
    gradient = plate.grad(local.lay_out(plate, {"z": jnp.ones(2, dtype)}))
    np.testing.assert_array_equal(local.cut(plate, gradient)["z"], jnp.full(2, TOTAL / 2, dtype))
