"""Bytes and bfloat16 numbers in a TPU's kernel.

Older chips convert both through memory, which takes as long as a product of them. So bytes are shifted
out of the words that hold four of them, of four rows, and lie by quarters then: of a tile's rows first
0, 4, 8 and so on, then 1, 5, 9. What else belongs to the rows is brought into that order. Numbers are
rounded as integers, and stay float32.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

MULTIPLE = 32  # of a tile's rows: words fill whole registers
IN_A_WORD = 4


def are_bytes(x: jax.Array) -> bool:
    """Tell whether an array holds integers of one byte."""
    return jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 1


def unpacked(x: jax.Array) -> jax.Array:
    """Return the bytes of a tile as int32, its rows by quarters."""
    words = pltpu.bitcast(x, jnp.int32)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return jnp.concatenate([words << (24 - 8 * i) >> 24 for i in range(IN_A_WORD)])
    return jnp.concatenate([words >> 8 * i & 255 for i in range(IN_A_WORD)])


def by_quarters(x: jax.Array, size: int) -> jax.Array:
    """Bring the columns of tiles of ``size`` into the order that `unpacked` gives rows."""
    return x.reshape(*x.shape[:-1], -1, size // IN_A_WORD, IN_A_WORD).mT.reshape(x.shape)


def in_order(x: jax.Array, size: int) -> jax.Array:
    """Undo `by_quarters`."""
    return x.reshape(*x.shape[:-1], -1, IN_A_WORD, size // IN_A_WORD).mT.reshape(x.shape)


def rows_by_quarters(shape: tuple[int, int]) -> jax.Array:
    """Return the row of each place of a tile that `unpacked` gives."""
    quarter = jax.lax.broadcasted_iota(jnp.int32, (shape[0] // IN_A_WORD, shape[1]), 0) * IN_A_WORD
    return jnp.concatenate([quarter + i for i in range(IN_A_WORD)])


def bfloat16_terms(x: jax.Array, num: int) -> list[jax.Array]:
    """Split float32 numbers into ``num`` terms that bfloat16 holds; a tie rounds away from zero."""
    terms = []
    for _ in range(num):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        terms.append(jax.lax.bitcast_convert_type(bits + 0x8000 & -0x10000, jnp.float32))
        x = x - terms[-1]
    return terms
