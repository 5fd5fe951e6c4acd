"""The gradient of a factor model's terms as one kernel of a TPU.

A core goes over the cells in tiles. What it multiplies lies ready in lines, made once for all tiles:
factors as terms that bfloat16 holds, biases beside ones, and ones alone, whose products with residuals
are the derivatives of biases. So a tile is three products and the likelihood's derivative, no sum
besides. Derivatives by row stay in the core's memory while a row's tiles follow each other; those by
column stay there all the while.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL, bfloat16_terms
from gspmd_mcmc.targets.fused import tpu_numbers, tpu_cost
from gspmd_mcmc.targets.fused.tracing import slope_of_cells

MOST = (256, 512)  # rows and columns of a tile: float32 products fit the 16 MB of a TPU v2's core
SUBLANES, LANES = 8, 128
NN, NT = ((1,), (0,)), ((1,), (1,))  # which axes a product sums over
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
    tile = (_tile_size(num, MOST[0]), _tile_size(width, MOST[1]))
    grid = -(-num // tile[0]), -(-width // tile[1])
    tall, whole = grid[0] * tile[0], grid[1] * tile[1]
    slope, unpacks = _slope(term, rows, cells, tile)

    def of_rows(x):
        x = _with_zeros(x, tall)
        return tpu_numbers.by_quarters(x, tile[0]) if unpacks else x

    x, u, c, is_row = map(of_rows, (rows.T, row_bias[None], cotangent[None], jnp.ones((1, num))))
    w, v, is_column = (
        _with_zeros(a, whole) for a in (columns.T, column_bias[None], jnp.ones((1, width)))
    )
    lines = (
        _lines(_taken(_terms(x), (0, 1, 0)), [*_bias_terms(u), *[is_row] * len(_bias_terms(v))]).T,
        _lines(_taken(_terms(w), (0, 0, 1)), [*[is_column] * len(_bias_terms(u)), *_bias_terms(v)]),
        _lines(_terms(w), [is_column]),
        _lines(_terms(c * x), _bias_terms(c)),
    )
    size = _up(rank, SUBLANES)

    def by_row(height):
        return pl.BlockSpec((height, tile[0]), lambda i, j: (0, i))

    def by_column(height):
        return pl.BlockSpec((height, tile[1]), lambda i, j: (0, j))

    outs = [jax.ShapeDtypeStruct((size + SUBLANES, n), rows.dtype) for n in (tall, whole)]
    by_rows, by_columns = pl.pallas_call(
        partial(_kernel, slope, (num, width), tile, unpacks),
        grid=grid,
        in_specs=[
            *(
                pl.BlockSpec((tile[0], lines[0].shape[1]), lambda i, j: (i, 0)),
                by_column(len(lines[1])),
            ),
            *(by_column(len(lines[2])), by_row(len(lines[3]))),
            *(pl.BlockSpec(tile, lambda i, j: (i, j)) for _ in cells),
        ],
        out_specs=[by_row(size + SUBLANES), pl.BlockSpec(outs[1].shape, lambda i, j: (0, 0))],
        out_shape=outs,
        cost_estimate=tpu_cost.stated(_products(lines, tall, whole), tall * whole, cells),
        interpret=interpret,
    )(*lines, *cells)
    by_rows = (tpu_numbers.in_order(by_rows, tile[0]) if unpacks else by_rows)[:, :num] * cotangent[
        None
    ]
    by_columns = by_columns[:, :width]
    return (
        *(by_rows[:rank].T, by_columns[:rank].T),
        *(jnp.sum(sums[size:], axis=0) for sums in (by_rows, by_columns)),
    )


def _slope(term: Callable, rows: jax.Array, cells: list[jax.Array], tile: tuple) -> tuple[Any, bool]:
    """Return the derivative of a tile's terms, and whether it takes bytes that are unpacked."""
    if all(map(tpu_numbers.are_bytes, cells)):
        slope = slope_of_cells(term, rows, cells, tile, of_int32=True)
        if slope is not None:
            return slope, True
    return slope_of_cells(term, rows, cells, tile), False


def _tile_size(size: int, most: int) -> int:
    """Return the multiple of lanes, from half of the most up to it, whose tiles pad least."""
    sizes = range(min(most, _up(size, LANES)), max(LANES, most // 2) - 1, -LANES)
    return min(sizes, key=lambda tile: _up(size, tile), default=LANES)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# Lines. Two terms of a factor and their products lie below each other: dimensions are few, and one pass
# through the matrix unit takes them all. Residuals would take a pass for each term, and have one: rounding
# differs from cell to cell, and averages out (`benchmarks precision`).


def _with_zeros(lines: jax.Array, size: int) -> jax.Array:
    return jnp.pad(lines, ((0, 0), (0, size - lines.shape[1])))


def _lines(factors: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    """Put lines below each other; each term of factors, and all others together, by whole sublanes."""
    parts = [*factors, jnp.concatenate(others)]
    return jnp.concatenate([jnp.pad(a, ((0, -len(a) % SUBLANES), (0, 0))) for a in parts])


def _terms(x: jax.Array) -> list[jax.Array]:
    """Split into what bfloat16 holds and the rest, as float32: older chips multiply no other."""
    return _split(x, 2)


def _bias_terms(x: jax.Array) -> list[jax.Array]:
    """Split a line into all bits of it."""
    return _split(x, NUM_FULL)


def _split(x: jax.Array, num: int) -> list[jax.Array]:
    if _precision() not in BY_THREE:
        return [x]
    return [term.astype(jnp.float32) for term in bfloat16_terms(x, num)]


def _taken(terms: list[jax.Array], order: tuple[int, ...]) -> list[jax.Array]:
    return terms if len(terms) == 1 else [terms[i] for i in order]


# The kernel


def _kernel(slope: Callable, shape: tuple, tile: tuple, unpacks: bool, *refs: Any) -> None:
    of_logits, by_logits, of_row_sums, of_column_sums, *cells, by_rows, by_columns = refs
    i, j = pl.program_id(0), pl.program_id(1)
    here = pl.ds(pl.multiple_of(j * tile[1], LANES), tile[1])

    @pl.when((i == 0) & (j == 0))
    def _():
        by_columns[...] = jnp.zeros_like(by_columns)

    @pl.when(j == 0)
    def _():
        by_rows[...] = jnp.zeros_like(by_rows)

    logits = _dot(of_logits[...], by_logits[...], NN)
    values = [tpu_numbers.unpacked(ref[...]) if unpacks else ref[...] for ref in cells]
    # The last tiles reach beyond the cells, where anything may stand.
    row = jax.lax.broadcasted_iota(jnp.int32, tile, 0)
    row = tpu_numbers.rows_by_quarters(tile) if unpacks else row
    column = jax.lax.broadcasted_iota(jnp.int32, tile, 1)
    is_cell = (row < shape[0] - i * tile[0]) & (column < shape[1] - j * tile[1])
    residuals = jnp.where(is_cell, slope(logits, *values), 0)
    if _precision() in BY_THREE:
        (residuals,) = tpu_numbers.bfloat16_terms(residuals, 1)
    by_rows[...] += _sum_of_terms(_dot(of_row_sums[...], residuals, NT), len(by_rows))
    by_columns[:, here] += _sum_of_terms(_dot(of_column_sums[...], residuals, NN), len(by_columns))


def _sum_of_terms(products: jax.Array, size: int) -> jax.Array:
    """Add the products of a factor's second term to those of its first."""
    if len(products) == size:
        return products
    size -= SUBLANES
    both = products[:size] + products[size : 2 * size]
    return jnp.concatenate([both, products[2 * size :]])


def _dot(x: jax.Array, y: jax.Array, axes: tuple) -> jax.Array:
    """Multiply in the precision that is asked for: the compiler of kernels knows two of the three."""
    precision = jax.lax.Precision.DEFAULT if _precision() in BY_THREE else None
    return jax.lax.dot_general(x, y, (axes, ((), ())), precision, preferred_element_type=jnp.float32)


def _precision() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore


def _products(lines: tuple, tall: int, whole: int) -> list[tuple[int, int, int]]:
    """Return rows, terms and columns of the products of bfloat16 numbers that all tiles make."""
    of_logits, _, of_row_sums, of_column_sums = lines
    each = [
        (tall, of_logits.shape[1], whole),
        (len(of_row_sums), whole, tall),
        (len(of_column_sums), tall, whole),
    ]
    return each * (6 if _precision() in BY_SIX else 1)
