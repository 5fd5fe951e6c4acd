"""The gradient of a factor model's terms as two kernels of a GPU.

One goes over the columns of a few rows, the other over the rows of a few columns. Each makes the logits
anew, which costs less than to write and read them, and no two programs add to the same number: there
are no atomics, and results are the same each time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.targets.fused.tracing import slope_of_cells

# Rows and columns of a tile, of the kernel by rows and of that by columns: a program owns few, so that
# there are enough programs for all cores.
BY_ROWS, BY_COLUMNS = (32, 128), (128, 32)
MULTIPLE = 128  # factors are padded to it, so that only cells need masks


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
    padded_rank = max(16, 1 << (rank - 1).bit_length())
    x, w = (_pad(_pad(a, 1, padded_rank), 0, MULTIPLE) for a in (rows, columns))
    u, c, v = (_pad(a, 0, MULTIPLE) for a in (row_bias, cotangent, column_bias))

    def run(kernel, tile, count, own):
        slope: Any = slope_of_cells(term, rows, cells, tile)
        shapes = ((count, padded_rank), (count,))
        return pl.pallas_call(
            partial(kernel, partial(_residuals, slope, (num, width), tile, len(cells)), tile),
            grid=(count // own,),
            out_shape=[jax.ShapeDtypeStruct(shape, rows.dtype) for shape in shapes],
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
            interpret=interpret,
        )(*cells, x, u, c, w, v)

    by_rows, by_row_bias = run(partial(_by_rows, width), BY_ROWS, len(x), BY_ROWS[0])
    by_columns, by_column_bias = run(partial(_by_columns, num), BY_COLUMNS, len(w), BY_COLUMNS[1])
    return (
        *(by_rows[:num, :rank], by_columns[:width, :rank]),
        *(by_row_bias[:num], by_column_bias[:width]),
    )


def _by_rows(width: int, residuals_at: Callable, tile: tuple, *refs: Any) -> None:
    *inputs, by_rows, by_bias = refs
    start = pl.program_id(0) * tile[0]

    def add(step, sums):
        residuals, _, w = residuals_at(inputs, start, step * tile[1])
        return sums[0] + jnp.dot(residuals, w), sums[1] + jnp.sum(residuals, axis=1)

    zeros = jnp.zeros((tile[0], by_rows.shape[1])), jnp.zeros(tile[0])
    here = pl.ds(start, tile[0])
    by_rows[here, :], by_bias[here] = jax.lax.fori_loop(0, -(-width // tile[1]), add, zeros)


def _by_columns(num: int, residuals_at: Callable, tile: tuple, *refs: Any) -> None:
    *inputs, by_columns, by_bias = refs
    start = pl.program_id(0) * tile[1]

    def add(step, sums):
        residuals, x, _ = residuals_at(inputs, step * tile[0], start)
        return sums[0] + jnp.dot(residuals.T, x), sums[1] + jnp.sum(residuals, axis=0)

    zeros = jnp.zeros((tile[1], by_columns.shape[1])), jnp.zeros(tile[1])
    here = pl.ds(start, tile[1])
    by_columns[here, :], by_bias[here] = jax.lax.fori_loop(0, -(-num // tile[0]), add, zeros)


def _residuals(
    slope: Callable, shape: tuple, tile: tuple, num_cells: int, inputs: list, row: Any, column: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the residuals of the tile that begins at a row and a column, and its factors."""
    cells, (rows, row_bias, cotangent, columns, column_bias) = inputs[:num_cells], inputs[num_cells:]
    at = pl.ds(row, tile[0]), pl.ds(column, tile[1])
    is_row, is_column = (
        start + jnp.arange(size, dtype=jnp.int32) < end
        for start, size, end in zip((row, column), tile, shape, strict=True)
    )
    is_cell = is_row[:, None] & is_column[None, :]
    x, w = rows[at[0], :], columns[at[1], :]
    logits = jnp.dot(x, w.T) + row_bias[at[0]][:, None] + column_bias[at[1]][None, :]
    values = [triton.load(ref.at[at], mask=is_cell, other=0) for ref in cells]
    residuals = slope(logits, *values) * cotangent[at[0]][:, None]
    return jnp.where(is_cell, residuals, 0.0), x, w


def _pad(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)
