"""The gradient of a factor model's terms as one kernel of a TPU.

A core goes over the cells in tiles. Derivatives by row stay in its memory while a row's tiles follow
each other; those by column stay there all the while.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gspmd_mcmc.targets.fused import tpu_cost
from gspmd_mcmc.targets.fused.tracing import slope_of_cells

MOST = (256, 512)  # rows and columns of a tile: float32 products fit the 16 MB of a TPU v2's core
SUBLANES, LANES = 8, 128
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # which axes a product sums over
# Precisions of products that are made of three, by our own hand, and of six.
BY_THREE, BY_SIX = ("high", "bfloat16_3x", "tensorfloat32"), ("highest", "float32")


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
    padded = -(-rank // SUBLANES) * SUBLANES
    tile = (_tile_size(num, MOST[0]), _tile_size(width, MOST[1]))
    grid = -(-num // tile[0]), -(-width // tile[1])
    tall, whole = grid[0] * tile[0], grid[1] * tile[1]
    slope: Any = slope_of_cells(term, rows, cells, tile)

    def by_row(size):
        return pl.BlockSpec((size, tile[0]), lambda i, j: (0, i))

    def by_column(size):
        return pl.BlockSpec((size, tile[1]), lambda i, j: (0, j))

    def all_columns(size):
        return pl.BlockSpec((size, whole), lambda i, j: (0, 0))

    of_row = pl.BlockSpec((tile[0], 1), lambda i, j: (i, 0))
    shapes = ((padded, num), (num, 1), (padded, whole), (1, whole))
    by_rows, by_row_bias, by_columns, by_column_bias = pl.pallas_call(
        partial(_kernel, slope, (num, width), tile, len(cells)),
        grid=grid,
        in_specs=[
            *(pl.BlockSpec(tile, lambda i, j: (i, j)) for _ in cells),
            *(by_row(padded), of_row, of_row, by_column(padded), by_column(1)),
        ],
        out_specs=[by_row(padded), of_row, all_columns(padded), all_columns(1)],
        out_shape=[jax.ShapeDtypeStruct(shape, rows.dtype) for shape in shapes],
        cost_estimate=tpu_cost.stated(_products(padded, tall, whole), tall * whole, cells),
        interpret=interpret,
    )(
        *cells,
        *(_by_dimension(rows, padded), row_bias[:, None], cotangent[:, None]),
        *(_by_dimension(columns, padded), column_bias[None]),
    )
    return (
        *(by_rows[:rank].T, by_columns[:rank, :width].T),
        *(by_row_bias[:, 0], by_column_bias[0, :width]),
    )


def _tile_size(size: int, most: int) -> int:
    """Return the multiple of lanes, from half of the most up to it, whose tiles pad least."""
    sizes = range(min(most, -(-size // LANES) * LANES), max(LANES, most // 2) - 1, -LANES)
    return min(sizes, key=lambda tile: -(-size // tile) * tile, default=LANES)


def _by_dimension(factors: jax.Array, padded: int) -> jax.Array:
    """Return factors with their dimensions first, so that terms of them lie below each other."""
    return jnp.pad(factors.T, ((0, padded - factors.shape[1]), (0, 0)))


def _kernel(slope: Callable, shape: tuple, tile: tuple, num_cells: int, *refs: Any) -> None:
    cells, refs = refs[:num_cells], refs[num_cells:]
    rows, row_bias, cotangent, columns, column_bias, *outs = refs
    by_rows, by_row_bias, by_columns, by_column_bias = outs
    i, j = pl.program_id(0), pl.program_id(1)
    here = pl.ds(pl.multiple_of(j * tile[1], LANES), tile[1])

    @pl.when((i == 0) & (j == 0))
    def _():
        by_columns[...] = jnp.zeros_like(by_columns)
        by_column_bias[...] = jnp.zeros_like(by_column_bias)

    @pl.when(j == 0)
    def _():
        by_rows[...] = jnp.zeros_like(by_rows)
        by_row_bias[...] = jnp.zeros_like(by_row_bias)

    # The last tiles reach beyond the arrays, where anything may stand.
    is_row = _is_within(shape[0], tile[0], i, axis=0)
    is_column = _is_within(shape[1], tile[1], j, axis=1)
    x = _terms(jnp.where(_is_within(shape[0], tile[0], i, axis=1), rows[...], 0))
    w = _terms(jnp.where(is_column, columns[...], 0))
    logits = _dot(_with(x, (0, 1, 0)), _with(w, (0, 0, 1)), TN) + row_bias[...] + column_bias[...]
    residuals = slope(logits, *(ref[...] for ref in cells)) * cotangent[...]
    residuals = jnp.where(is_row & is_column, residuals, 0)
    by_rows[...] += _times(w, residuals, NT)
    by_row_bias[...] += jnp.sum(residuals, axis=1, keepdims=True)
    by_columns[:, here] += _times(x, residuals, NN)
    by_column_bias[:, here] += jnp.sum(residuals, axis=0, keepdims=True)


def _is_within(size: int, tile: int, step: Any, axis: int) -> jax.Array:
    """Tell which places of a tile are of the array, along an axis."""
    shape = (1, tile) if axis else (tile, 1)
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) + step * tile < size


# Two bfloat16 terms of a factor lie below each other, or side by side, and one pass through the matrix
# unit takes both: dimensions are few. Residuals would take a pass for each term, and one is enough: their
# rounding differs from cell to cell, and averages out (`benchmarks precision`).


def _terms(x: jax.Array) -> list[jax.Array]:
    """Split into what bfloat16 holds and the rest, as float32: older chips multiply no other."""
    if _precision() not in BY_THREE:
        return [x]
    high = _rounded(x)
    return [high, x - high]


def _rounded(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _with(terms: list[jax.Array], order: tuple[int, ...]) -> jax.Array:
    return terms[0] if len(terms) == 1 else jnp.concatenate([terms[i] for i in order])


def _times(terms: list[jax.Array], residuals: jax.Array, axes: tuple) -> jax.Array:
    """Multiply factors by residuals."""
    if len(terms) == 1:
        return _dot(terms[0], residuals, axes)
    both, size = _dot(jnp.concatenate(terms), _rounded(residuals), axes), len(terms[0])
    return both[:size] + both[size:]


def _dot(x: jax.Array, y: jax.Array, axes: tuple) -> jax.Array:
    """Multiply in the precision that is asked for: the compiler of kernels knows two of the three."""
    precision = jax.lax.Precision.DEFAULT if _precision() in BY_THREE else None
    return jax.lax.dot_general(x, y, (axes, ((), ())), precision, preferred_element_type=jnp.float32)


def _precision() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore


def _products(rank: int, rows: int, columns: int) -> list[tuple[int, int, int]]:
    """Return rows, terms and columns of the products of bfloat16 numbers that all tiles make."""
    if _precision() in BY_THREE:
        return [(rows, 3 * rank, columns), (2 * rank, columns, rows), (2 * rank, rows, columns)]
    each = [(rows, rank, columns), (rank, columns, rows), (rank, rows, columns)]
    return each * (6 if _precision() in BY_SIX else 1)
