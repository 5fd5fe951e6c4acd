"""The gradient of a factor model's terms as one kernel of a TPU.

A core goes over the cells in tiles, and over a tile in strips of 128 columns. What it multiplies it
puts into lines: factors as terms that bfloat16 holds, biases beside ones, and ones, whose products with
residuals are the derivatives of biases. So a strip is three products and the likelihood's derivative,
no sum besides: while the matrix units multiply the residuals of one, those of the next are computed.
Derivatives by row, and lines of rows, stay in the core's memory while a row's tiles follow each other;
derivatives by column stay there all the while.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL
from gspmd_mcmc.targets.fused import tpu_cost, tpu_numbers
from gspmd_mcmc.targets.fused.tracing import slope_of_cells

SUBLANES, LANES = 8, 128
MEMORY = 15 << 20  # of the 16 MB of older chips' cores
NN, NT = ((1,), (0,)), ((1,), (1,))  # which axes a product sums over
# Precisions of products that are made of three, by our own hand, and of six.
BY_THREE, BY_SIX = ("high", "bfloat16_3x", "tensorfloat32"), ("highest", "float32")
# Bytes to allow for a cell besides its data, where products are made of three and of six. For logistic
# terms the TPU v3's compiler uses 10 and 52; other terms may need more.
OF_A_CELL, OF_A_CELL_BY_SIX = 20, 64


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
    size, terms = _up(rank, SUBLANES), 2 if _precision() in BY_THREE else 1
    height = terms * size + SUBLANES  # of lines: those of factors, and all others
    tile = _tile(num, width, size, [a.dtype.itemsize for a in cells])
    grid = -(-num // tile[0]), -(-width // tile[1])
    tall, whole = grid[0] * tile[0], grid[1] * tile[1]
    slope, unpacks = _slope(term, rows, cells, (tile[0], LANES))

    def by_row(height):
        return pl.BlockSpec((height, tile[0]), lambda i, j: (0, i))

    def by_column(height):
        return pl.BlockSpec((height, tile[1]), lambda i, j: (0, j))

    outs = [jax.ShapeDtypeStruct((size + SUBLANES, n), rows.dtype) for n in (num, whole)]
    products = [
        (tall, height + (terms - 1) * size, whole),
        (height, whole, tall),
        (height, tall, whole),
    ]
    by_rows, by_columns = pl.pallas_call(
        partial(_kernel, slope, unpacks, (num, width, rank)),
        grid=grid,
        in_specs=[
            *(by_row(size), by_row(1), by_row(1), by_column(size), by_column(1)),
            *(pl.BlockSpec(tile, lambda i, j: (i, j)) for _ in cells),
        ],
        out_specs=[by_row(size + SUBLANES), pl.BlockSpec(outs[1].shape, lambda i, j: (0, 0))],
        out_shape=outs,
        scratch_shapes=[
            pltpu.VMEM((tile[0], products[0][1]), jnp.float32),
            pltpu.VMEM((height, tile[0]), jnp.float32),
        ],
        cost_estimate=tpu_cost.stated(
            products * (6 if _precision() in BY_SIX else 1), tall * whole, cells
        ),
        interpret=interpret,
    )(
        *(rows.T, row_bias[None], cotangent[None], columns.T, column_bias[None], *cells),
    )
    by_rows = by_rows * cotangent[None]
    return (
        *(by_rows[:rank].T, by_columns[:rank, :width].T),
        *(by_rows[size], jnp.sum(by_columns[size:, :width], axis=0)),
    )


def _slope(term: Callable, rows: jax.Array, cells: list[jax.Array], strip: tuple) -> tuple[Any, bool]:
    """Return the derivative of a strip's terms, and whether it takes bytes that are unpacked."""
    instead = {} if _precision() in BY_SIX else {"logistic": tpu_numbers.logistic}
    if all(map(tpu_numbers.are_bytes, cells)):
        slope = slope_of_cells(term, rows, cells, strip, of_int32=True, instead=instead)
        if slope is not None:
            return slope, True
    return slope_of_cells(term, rows, cells, strip, instead=instead), False


def _tile(num: int, width: int, size: int, bytes_of_cells: list[int]) -> tuple[int, int]:
    """Return the rows and columns of a tile: of those that a core can hold, what takes the least time.

    The work for each row, each column and each step takes as long as `LANES` more rows and `LANES` more
    columns would. That is a fit to the schedules that the TPU v3's compiler made for eleven tile sizes.
    """
    of_a_cell = OF_A_CELL_BY_SIX if _precision() in BY_SIX else OF_A_CELL
    of_a_cell += sum(4 + 2 * num_bytes for num_bytes in bytes_of_cells)  # as a number, and in two tiles
    # The transposed lines of logits, and all others: factors as they come, their terms, derivatives.
    of_a_line = 4 * (_up(3 * size + SUBLANES, LANES) + 6 * (size + SUBLANES))
    of_a_column = 4 * (size + SUBLANES)  # its derivatives stay

    def sizes(length):
        most = MEMORY // of_a_cell // LANES  # where the other side has the least
        return range(LANES, min(_up(length, LANES), most) + 1, LANES)

    def needed(tile):
        of_columns = _up(width, tile[1]) * of_a_column
        return math.prod(tile) * of_a_cell + sum(tile) * of_a_line + of_columns

    def time(tile):
        return -(-num // tile[0]) * -(-width // tile[1]) * math.prod(side + LANES for side in tile)

    tiles = itertools.product(sizes(num), sizes(width))
    fitting = (tile for tile in tiles if needed(tile) <= MEMORY)
    return min(fitting, key=time, default=(LANES, LANES))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _kernel(slope: Callable, unpacks: bool, shape: tuple[int, int, int], *refs: Any) -> None:
    rows, row_bias, cotangent, columns, column_bias, *cells = refs[:-4]
    by_rows, by_columns, of_logits, of_columns = refs[-4:]
    i, j, (num, width, rank) = pl.program_id(0), pl.program_id(1), shape
    tile = rows.shape[1], columns.shape[1]

    @pl.when(j == 0)
    def _():
        is_row = _is_within(num - i * tile[0], row_bias.shape, 1)
        x, u, c = _kept(rows, rank, is_row), *(jnp.where(is_row, ref[...], 0) for ref in (row_bias, cotangent))
        one = is_row.astype(jnp.float32)
        lines = [
            *_taken(_terms(x), (0, 1, 0)),
            _others(*_bias_terms(u), *(one for _ in _bias_terms(u))),
        ]
        of_logits[...] = jnp.concatenate(lines).T
        of_columns[...] = jnp.concatenate([*_terms(c * x), _others(*_bias_terms(c))])

    is_column = _is_within(width - j * tile[1], column_bias.shape, 1)
    w, v = _kept(columns, rank, is_column), jnp.where(is_column, column_bias[...], 0)
    one = is_column.astype(jnp.float32)
    factors, rest = _terms(w), _others(*(one for _ in _bias_terms(v)), *_bias_terms(v))
    lines = jnp.concatenate([*factors, rest])
    to_logits = jnp.concatenate([*_taken(factors, (0, 0, 1)), rest])

    def residuals_of(strip):
        logits = _dot(of_logits[...], to_logits[:, strip], NN)
        values = (tpu_numbers.unpacked(ref, strip) if unpacks else ref[:, strip] for ref in cells)
        # The last tiles reach beyond the arrays, where anything may stand.
        most = jnp.where(is_column[:, strip], num - i * tile[0], 0)
        residuals = jnp.where(_is_within(most, logits.shape, 0), slope(logits, *values), 0)
        return residuals if len(factors) == 1 else tpu_numbers.split(residuals, 1)[0]

    strips = [slice(k, k + LANES) for k in range(0, tile[1], LANES)]
    of_row, following = jnp.where(j == 0, 0, by_rows[...]), residuals_of(strips[0])
    for strip, after in zip(strips, [*strips[1:], None], strict=True):
        residuals, following = following, None if after is None else residuals_of(after)
        here = pl.ds(pl.multiple_of(j * tile[1] + strip.start, LANES), LANES)
        of_column = _sum_of_terms(_dot(of_columns[...], residuals, NN), len(by_columns))
        by_columns[:, here] = jnp.where(i == 0, 0, by_columns[:, here]) + of_column
        of_row += _sum_of_terms(_dot(lines[:, strip], residuals, NT), len(by_rows))
    by_rows[...] = of_row


def _is_within(size: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Tell what is among the first of an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < size


def _kept(factors: Any, rank: int, is_kept: jax.Array) -> jax.Array:
    """Return factors, and zeros beyond the last of them and of their dimensions."""
    return jnp.where(_is_within(rank, factors.shape, 0) & is_kept, factors[...], 0)


# Lines. Two terms of a factor and their products lie below each other: dimensions are few, and one pass
# through the matrix unit takes them all. Residuals would take a pass for each term, and have one:
# rounding differs from cell to cell, and averages out (`benchmarks precision`).


def _terms(x: jax.Array) -> list[jax.Array]:
    """Split into what bfloat16 holds and the rest, as float32: older chips multiply no other."""
    return tpu_numbers.split(x, 2) if _precision() in BY_THREE else [x]


def _bias_terms(x: jax.Array) -> list[jax.Array]:
    """Split a line into all bits of it."""
    return tpu_numbers.split(x, NUM_FULL) if _precision() in BY_THREE else [x]


def _taken(terms: list[jax.Array], order: tuple[int, ...]) -> list[jax.Array]:
    return terms if len(terms) == 1 else [terms[i] for i in order]


def _others(*lines: jax.Array) -> jax.Array:
    """Put lines below each other, with zeros up to what a register holds."""
    zeros = jnp.zeros((SUBLANES - len(lines), lines[0].shape[1]), jnp.float32)
    return jnp.concatenate([*lines, zeros])


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
