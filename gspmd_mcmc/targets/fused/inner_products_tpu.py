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

from gspmd_mcmc.targets.fused.tracing import slope_of_cells

TILE = (256, 512)  # rows and columns: with float32 products it fits the 16 MB of a TPU v2's core
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))  # which axes a product sums over


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
    tile = (min(TILE[0], -(-num // 32) * 32), min(TILE[1], -(-width // 128) * 128))
    whole = -(-width // tile[1]) * tile[1]
    slope: Any = slope_of_cells(term, rows, cells, tile)

    def by_row(size):
        return pl.BlockSpec((tile[0], size), lambda i, j: (i, 0))

    def by_column(size):
        return pl.BlockSpec((size, tile[1]), lambda i, j: (0, j))

    def all_columns(size):
        return pl.BlockSpec((size, whole), lambda i, j: (0, 0))

    shapes = ((num, rank), (num, 1), (rank, whole), (1, whole))
    by_rows, by_row_bias, by_columns, by_column_bias = pl.pallas_call(
        partial(_kernel, slope, (num, width), tile, len(cells)),
        grid=(-(-num // tile[0]), whole // tile[1]),
        in_specs=[
            *(pl.BlockSpec(tile, lambda i, j: (i, j)) for _ in cells),
            *(by_row(rank), by_row(1), by_row(1), by_column(rank), by_column(1)),
        ],
        out_specs=[by_row(rank), by_row(1), all_columns(rank), all_columns(1)],
        out_shape=[jax.ShapeDtypeStruct(shape, rows.dtype) for shape in shapes],
        interpret=interpret,
    )(*cells, rows, row_bias[:, None], cotangent[:, None], columns.T, column_bias[None])
    return by_rows, by_columns[:, :width].T, by_row_bias[:, 0], by_column_bias[0, :width]


def _kernel(slope: Callable, shape: tuple, tile: tuple, num_cells: int, *refs: Any) -> None:
    cells, refs = refs[:num_cells], refs[num_cells:]
    rows, row_bias, cotangent, columns, column_bias, *outs = refs
    by_rows, by_row_bias, by_columns, by_column_bias = outs
    i, j = pl.program_id(0), pl.program_id(1)
    here = pl.ds(pl.multiple_of(j * tile[1], 128), tile[1])

    @pl.when((i == 0) & (j == 0))
    def _():
        by_columns[...] = jnp.zeros_like(by_columns)
        by_column_bias[...] = jnp.zeros_like(by_column_bias)

    @pl.when(j == 0)
    def _():
        by_rows[...] = jnp.zeros_like(by_rows)
        by_row_bias[...] = jnp.zeros_like(by_row_bias)

    # The last tiles reach beyond the arrays, where anything may stand.
    is_row = jax.lax.broadcasted_iota(jnp.int32, (tile[0], 1), 0) + i * tile[0] < shape[0]
    is_column = jax.lax.broadcasted_iota(jnp.int32, (1, tile[1]), 1) + j * tile[1] < shape[1]
    x, w = jnp.where(is_row, rows[...], 0), jnp.where(is_column, columns[...], 0)
    logits = _dot(x, w, NN) + row_bias[...] + column_bias[...]
    residuals = slope(logits, *(ref[...] for ref in cells)) * cotangent[...]
    residuals = jnp.where(is_row & is_column, residuals, 0)
    by_rows[...] += _dot(residuals, w, NT)
    by_row_bias[...] += jnp.sum(residuals, axis=1, keepdims=True)
    by_columns[:, here] += _dot(x, residuals, TN)
    by_column_bias[:, here] += jnp.sum(residuals, axis=0, keepdims=True)


def _dot(x: jax.Array, y: jax.Array, axes: tuple) -> jax.Array:
    """Multiply in the precision that is asked for: the compiler of kernels knows two of the three."""
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    product = partial(jax.lax.dot_general, dimension_numbers=(axes, ((), ())))
    if precision not in ("high", "bfloat16_3x", "tensorfloat32"):
        return product(x, y, preferred_element_type=jnp.float32)
    (a, b), (c, d) = _two_terms(x), _two_terms(y)
    default = partial(product, precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32)
    return default(a, c) + (default(a, d) + default(b, c))


def _two_terms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split into what bfloat16 holds and the rest, as float32: older chips multiply no other."""
    high = x.astype(jnp.bfloat16).astype(jnp.float32)
    return high, x - high
