"""Bytes and bfloat16 numbers in a TPU's kernel.

Older chips convert both through memory, which takes as long as a product of them. So bytes are shifted
out of the words that hold four of them, of four rows. Numbers are rounded as integers, and stay
float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc.targets.bfloat16_terms import rounded_as_integers

SUBLANES = 8
IN_A_WORD = 4


def are_bytes(x: Any) -> bool:
    """Tell whether an array holds integers of one byte."""
    return jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 1


def unpacked(x: Any, strip: Any, axis: int) -> jax.Array:
    """Return a strip of the bytes that a reference refers to as int32: some rows (axis 0) or columns.

    A register reads each of its two words as often as it has bytes, and shifts them where they are.
    """
    words = x.bitcast(jnp.int32).reshape(-1, SUBLANES // IN_A_WORD, x.shape[1])
    rows = columns = slice(None)
    if axis == 0:
        rows = slice(strip.start // SUBLANES, strip.stop // SUBLANES)
    else:
        columns = strip
    row = jax.lax.broadcasted_iota(jnp.int32, (1, SUBLANES, 1), 1)
    first, second = (words[rows, i : i + 1, columns] for i in range(2))
    both = jnp.where(row < IN_A_WORD, first, second)
    place = jnp.broadcast_to(8 * (row % IN_A_WORD), both.shape)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        numbers = both << (24 - place) >> 24
    else:
        numbers = both >> place & 255
    return numbers.reshape(-1, numbers.shape[-1])


def split(x: jax.Array, num: int) -> list[jax.Array]:
    """Split float32 numbers into ``num`` terms that bfloat16 holds; a tie rounds away from zero."""
    terms = []
    for _ in range(num):
        terms.append(rounded_as_integers(x))
        x = x - terms[-1]
    return terms


def logistic(x: jax.Array) -> jax.Array:
    """Return the logistic function, by the chip's own tangent: without a division."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)
