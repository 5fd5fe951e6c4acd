"""Bytes and bfloat16 numbers in a TPU's kernel.

Older chips convert both through memory, which takes as long as a product of them. So bytes are shifted
out of the words that hold four of them, of four rows, and written to every fourth row. Numbers are
rounded as integers, and stay float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gspmd_mcmc.targets.bfloat16_terms import rounded_as_integers

LANES = 128
MULTIPLE = 32  # of a tile's rows: words fill whole registers
IN_A_WORD = 4


def are_bytes(x: Any) -> bool:
    """Tell whether an array holds integers of one byte."""
    return jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 1


def memory_to_unpack(rows: int, columns: int, dtype: Any) -> Any:
    """Return the memory that `unpacked` needs: every fourth row is written, 128 lanes wide."""
    return pltpu.VMEM((columns // LANES, rows, LANES), dtype)


def unpacked(x: jax.Array, memory: Any) -> jax.Array:
    """Return the bytes of a tile as numbers of 32 bits, of the memory's dtype."""
    words = pltpu.bitcast(x, jnp.int32)
    for i in range(IN_A_WORD):
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            numbers = words << (24 - 8 * i) >> 24
        else:
            numbers = words >> 8 * i & 255
        rows = pl.ds(i, len(words), stride=IN_A_WORD)
        for k in range(len(memory)):
            columns = numbers[None, :, k * LANES : (k + 1) * LANES].astype(memory.dtype)
            memory[pl.ds(k, 1), rows, :] = columns
    return jnp.concatenate([memory[k] for k in range(len(memory))], axis=1)


def split(x: jax.Array, num: int) -> list[jax.Array]:
    """Split float32 numbers into ``num`` terms that bfloat16 holds; a tie rounds away from zero."""
    terms = []
    for _ in range(num):
        terms.append(rounded_as_integers(x))
        x = x - terms[-1]
    return terms
