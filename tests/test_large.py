"""More rows than 32-bit integers count: by shapes, as no machine here holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import prior_of_mean, rows_with_effects

import gspmd_mcmc as gm
from gspmd_mcmc.placement import padding

NUM_ROWS = 3_000_000_001
BLOCKS = 8


def plate(num_blocks):
    mesh = gm.make_abstract_mesh(data=num_blocks)
    data = gm.place({"y": jax.ShapeDtypeStruct((NUM_ROWS,), jnp.uint8)}, mesh, P("data"))
    return gm.Plate(rows_with_effects, data, local="effect")


def test_a_step_over_three_thousand_million_rows_lowers():
    kernel = gm.HMC(gm.Posterior(prior_of_mean, plate(BLOCKS)), 0.1, 3)
    position = {
        "mean": jax.ShapeDtypeStruct((), jnp.float32),
        "effect": jax.ShapeDtypeStruct((NUM_ROWS,), jnp.float32),
    }
    state = jax.eval_shape(gm.HMC.init, kernel, position)
    key = jax.eval_shape(jax.random.key, 0)
    traced = jax.jit(gm.HMC.step).trace(kernel, key, state)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    block_rows = padding.padded_rows(NUM_ROWS, BLOCKS) // BLOCKS
    assert f"{BLOCKS}x{block_rows}xf32" in text and f"dense<{NUM_ROWS}>" not in text


@pytest.mark.parametrize("num_pad", [7, 7 + BLOCKS, 2 * 375_000_001 + 7])
def test_real_rows_of_blocks_are_counted_beyond_32_bits(num_pad):
    num_padded = -(-(NUM_ROWS + num_pad) // BLOCKS) * BLOCKS
    block_rows = num_padded // BLOCKS
    exact = np.clip(NUM_ROWS - np.arange(BLOCKS, dtype=np.int64) * block_rows, 0, block_rows)
    got = np.asarray(padding.real_in_blocks(NUM_ROWS, num_padded, BLOCKS))
    np.testing.assert_array_equal(got, exact)
    assert got.sum(dtype=np.int64) == NUM_ROWS


def test_pad_is_told_from_rows():
    np.testing.assert_array_equal(padding.is_real(10, 16, 8), np.arange(16) < 10)


def test_more_rows_on_a_device_than_its_indices_count_are_refused():
    with pytest.raises(ValueError, match="3000000001 rows on one device, and its indices count to"):
        plate(1)
