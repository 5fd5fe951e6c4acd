"""The gradient of a factor model's terms as two kernels of a GPU.

One goes over the columns of a few rows, the other over the rows of a few columns. Each makes the logits
anew, which costs less than to write and read them. Programs that go over parts of the same columns or
rows keep sums of their own, which are added up at the end: there are no atomics, and results are the
same each time.

Biases are factors: a row's are its own, its bias and a one, a column's are its own, a one and its bias.
So their products are the logits, and residuals times them the derivatives of factors and biases.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.targets.bfloat16_terms import bfloat16_terms, num_terms
from gspmd_mcmc.targets.fused.gpu_settings import settings
from gspmd_mcmc.targets.fused.tracing import slope_of_cells

# Rows and columns of a tile, of so few numbers that a program needs few registers and a core runs many.
# Rows and columns are padded to it, so that only cells need masks.
SIDE = 64
# As many programs as the cores of a large GPU take, each for a part of the others; few parts, as each
# has sums of its own.
PROGRAMS, MOST_PARTS = 768, 8
LEAST_FACTORS = 16  # that a product of a tile takes
LOG2_E = 1.4426950408889634


def gradients(
    term: Callable,
    cells: list[jax.Array],
    factors: tuple,
    cotangent: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in rows, columns and their biases."""
    rows, columns, row_bias, column_bias = factors
    (num, rank), width = rows.shape, len(columns)
    by_row = _in_terms(rows, row_bias, jnp.ones_like(row_bias))
    by_column = _in_terms(columns, jnp.ones_like(column_bias), column_bias)
    slope: Any = slope_of_cells(term, rows, cells, (SIDE, SIDE), instead={"logistic": _logistic})
    of_tile = 2 * by_row.shape[0] * SIDE * by_row.shape[2]  # of one side's factors
    step = of_tile + sum(SIDE * SIDE * a.dtype.itemsize for a in cells)

    def run(axis, own, others):
        (_, height, padded), tiles = own.shape, others.shape[1] // SIDE
        parts = min(tiles, MOST_PARTS, -(-PROGRAMS // (height // SIDE)))
        shapes = (parts, height, padded), (parts, height)
        of_factors, of_bias = pl.pallas_call(
            partial(_kernel, slope, (num, width), rank + axis, axis),
            grid=(height // SIDE, parts),
            out_shape=[jax.ShapeDtypeStruct(shape, rows.dtype) for shape in shapes],
            compiler_params=settings(step, kept=of_tile),
            interpret=interpret,
            name=("by_rows", "by_columns")[axis],
        )(*cells, own, others, cotangent)
        return jnp.sum(of_factors, axis=0)[:, :rank], jnp.sum(of_bias, axis=0)

    of_rows, of_row_bias = (a[:num] for a in run(0, by_row, by_column))
    of_columns, of_column_bias = (a[:width] for a in run(1, by_column, by_row))
    return of_rows * cotangent[:, None], of_columns, of_row_bias * cotangent, of_column_bias


def _in_terms(factors: jax.Array, *biases: jax.Array) -> jax.Array:
    """Return the terms of factors and biases, padded to whole tiles."""
    split = (bfloat16_terms(a, num_terms()) for a in (factors, *(a[:, None] for a in biases)))
    whole = jnp.stack([jnp.concatenate(terms, axis=1) for terms in zip(*split, strict=True)])
    _, num, size = whole.shape
    padded = max(LEAST_FACTORS, 1 << (size - 1).bit_length())
    return jnp.pad(whole, ((0, 0), (0, -num % SIDE), (0, padded - size)))


def _logistic(x: jax.Array) -> jax.Array:
    """Return 1 / (1 + exp(-x)) by a power of two and a root, which a GPU has instructions for."""
    root = jax.lax.rsqrt(1 + jnp.exp2(-LOG2_E * x))
    return root * root


def _kernel(slope: Callable, shape: tuple[int, int], one: int, axis: int, *refs: Any) -> None:
    """Add up the residuals of a tile's own rows (axis 0) or columns (1) over a part of the others.

    ``one`` is the place of the ones among the others' factors: what they add up is the bias's.

    The own ones come first in all that is computed, whichever they are. Weights of rows that are a
    tile's own are left to whoever takes the sums.
    """
    *cells, of_own, of_others, weights, of_factors, of_bias = refs
    tile, part, parts = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    (terms, _, padded), tiles = of_own.shape, of_others.shape[1] // SIDE
    here, places = pl.ds(tile * SIDE, SIDE), jnp.arange(SIDE, dtype=jnp.int32)
    own, is_own = [of_own[i, here, :] for i in range(terms)], tile * SIDE + places < shape[axis]

    def add(step, total):
        other = part + step * parts
        there, is_other = pl.ds(other * SIDE, SIDE), other * SIDE + places < shape[1 - axis]
        others = [of_others[i, there, :] for i in range(terms)]
        if axis == 0:
            at, is_cell = (here, there), is_own[:, None] & is_other[None, :]
        else:
            at, is_cell = (there, here), is_other[:, None] & is_own[None, :]
        values = [triton.load(ref.at[at], mask=is_cell, other=0) for ref in cells]
        logits = _add_product(None, own, [a.T for a in others])
        residuals = slope(logits, *(values if axis == 0 else [a.T for a in values]))
        residuals = jnp.where(is_other[None, :], residuals, 0.0)
        if axis == 1:
            residuals *= triton.load(weights.at[there], mask=is_other, other=0.0)[None, :]
        return _add_product(total, bfloat16_terms(residuals, terms, in_kernel=True), others)

    steps = (tiles - part + parts - 1) // parts
    total = jax.lax.fori_loop(0, steps, add, jnp.zeros((SIDE, padded)))
    is_one = jnp.arange(padded, dtype=jnp.int32) == one
    of_factors[part, here, :] = total
    of_bias[part, here] = jnp.sum(jnp.where(is_one[None, :], total, 0.0), axis=1)


def _add_product(total: Any, left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    """Multiply sums of terms, without what is less than the last of them, and add to a total."""
    pairs = [(a, b) for i, a in enumerate(left) for b in right[: len(right) - i]]
    for a, b in reversed(pairs):
        product = jnp.dot(a, b, preferred_element_type=jnp.float32)
        total = product if total is None else total + product
    return total
