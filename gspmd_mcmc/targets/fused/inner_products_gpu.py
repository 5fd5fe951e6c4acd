"""The gradient of a factor model's terms as two kernels of a GPU.

One goes over the columns of a few rows, the other over the rows of a few columns. Each makes the logits
anew, which costs less than to write and read them. Programs that go over parts of the same columns or
rows keep sums of their own, which are added up at the end: there are no atomics, and results are the
same each time.
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
LEAST_RANK = 16  # that a product of a tile takes


def gradients(
    term: Callable,
    cells: list[jax.Array],
    factors: tuple,
    cotangent: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in rows, columns and their biases."""
    rows, columns, row_bias, column_bias = factors
    num, width, rank = len(rows), len(columns), rows.shape[1]
    padded = max(LEAST_RANK, 1 << (rank - 1).bit_length())
    x, w = (
        jnp.stack(bfloat16_terms(_pad(_pad(a, 1, padded), 0, SIDE), num_terms()))
        for a in (rows, columns)
    )
    u, c, v = (_pad(a, 0, SIDE) for a in (row_bias, cotangent, column_bias))
    slope: Any = slope_of_cells(term, rows, cells, (SIDE, SIDE))
    of_cells = sum(SIDE * SIDE * a.dtype.itemsize for a in cells)
    of_tile = 2 * num_terms() * SIDE * padded  # of one side's factors

    def run(axis, own, along):
        own, along = -(-own // SIDE), -(-along // SIDE)  # in tiles
        parts = min(along, MOST_PARTS, -(-PROGRAMS // own))
        shapes = (parts, own * SIDE, padded), (parts, own * SIDE)
        of_factors, of_bias = pl.pallas_call(
            partial(_kernel, slope, (num, width), len(cells), axis, along),
            grid=(own, parts),
            out_shape=[jax.ShapeDtypeStruct(shape, rows.dtype) for shape in shapes],
            compiler_params=settings(of_cells + of_tile, kept=of_tile),
            interpret=interpret,
            name=("by_rows", "by_columns")[axis],
        )(*cells, x, w, u, v, c)
        return jnp.sum(of_factors, axis=0)[:, :rank], jnp.sum(of_bias, axis=0)

    by_rows, by_row_bias = run(0, num, width)
    by_columns, by_column_bias = run(1, width, num)
    return by_rows[:num], by_columns[:width], by_row_bias[:num], by_column_bias[:width]


def _kernel(
    slope: Callable, shape: tuple[int, int], num_cells: int, axis: int, tiles: int, *refs: Any
) -> None:
    """Add up the residuals of a tile's own rows (axis 0) or columns (1) over a part of the others.

    The own ones come first in all that is computed, whichever they are.
    """
    cells, (x, w, u, v, cotangent, of_factors, of_bias) = refs[:num_cells], refs[num_cells:]
    own, part, parts = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    here, (terms, _, padded) = pl.ds(own * SIDE, SIDE), x.shape
    (of_own, own_biases), (of_others, other_biases) = ((x, u), (w, v))[:: 1 - 2 * axis]
    factors, bias = [of_own[i, here, :] for i in range(terms)], own_biases[here]

    is_own = own * SIDE + jnp.arange(SIDE, dtype=jnp.int32) < shape[axis]

    def add(step, sums):
        other = part + step * parts
        there = pl.ds(other * SIDE, SIDE)
        is_other = other * SIDE + jnp.arange(SIDE, dtype=jnp.int32) < shape[1 - axis]
        others = [of_others[i, there, :] for i in range(terms)]
        logits = _product(factors, [a.T for a in others])
        logits += bias[:, None] + other_biases[there][None, :]
        if axis == 0:
            is_cell, weights = is_own[:, None] & is_other[None, :], cotangent[here][:, None]
            values = [triton.load(ref.at[here, there], mask=is_cell, other=0) for ref in cells]
        else:
            is_cell, weights = is_other[:, None] & is_own[None, :], cotangent[there][None, :]
            values = [triton.load(ref.at[there, here], mask=is_cell, other=0).T for ref in cells]
        is_cell = is_own[:, None] & is_other[None, :]
        residuals = jnp.where(is_cell, slope(logits, *values) * weights, 0.0)
        split = bfloat16_terms(residuals, terms, in_kernel=True)
        return sums[0] + _product(split, others), sums[1] + jnp.sum(residuals, axis=1)

    steps = (tiles - part + parts - 1) // parts
    zeros = jnp.zeros((SIDE, padded)), jnp.zeros(SIDE)
    of_factors[part, here, :], of_bias[part, here] = jax.lax.fori_loop(0, steps, add, zeros)


def _product(left: list[jax.Array], right: list[jax.Array]) -> jax.Array:
    """Multiply sums of terms, without what is less than the last of them."""
    pairs = [(a, b) for i, a in enumerate(left) for b in right[: len(right) - i]]
    return sum(jnp.dot(a, b, preferred_element_type=jnp.float32) for a, b in reversed(pairs))  # pyright: ignore[reportReturnType]


def _pad(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)
