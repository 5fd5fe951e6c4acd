"""The gradient of a factor model's terms as one kernel of a TPU.

A core goes over the cells in tiles, and over a tile in strips of 128 columns. What it multiplies it
puts into lines: factors as terms that bfloat16 holds, biases beside ones, and ones, whose products with
residuals are the derivatives of biases. So a strip is three products and the likelihood's derivative,
no sum besides, and the matrix units multiply one strip's residuals while the next one's are computed.
Derivatives by row, and lines of rows, stay in the core's memory while a row's tiles follow each other;
derivatives by column stay there all the while. Two chains share a strip.
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

from gspmd_mcmc.fused import tpu_cost, tpu_numbers
from gspmd_mcmc.fused.chains import of_chains_together
from gspmd_mcmc.fused.tracing import slope_of_cells
from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL

SUBLANES, LANES = 8, 128
BLOCKS = 2  # strips of residuals in a round: of one chain, or one of each of two
MEMORY = 15 << 20  # of the 16 MB of older chips' cores
NN, NT = ((1,), (0,)), ((1,), (1,))  # which axes a product sums over
# Precisions of products that are made of three, by our own hand, and of six.
BY_THREE, BY_SIX = ("high", "bfloat16_3x", "tensorfloat32"), ("highest", "float32")
# Bytes to allow for a cell of a strip besides its data, where products are made of three and of six.
# For logistic terms the TPU v3's compiler uses 26 and 88; other terms may need more.
OF_A_CELL, OF_A_CELL_BY_SIX = 32, 96


def gradients(
    term: Callable,
    cells: list[jax.Array],
    factors: tuple,
    cotangent: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in rows, columns and their biases.

    Under ``vmap`` over chains a tile of the cells is read once for two of them.
    """
    of_chains = of_chains_together(partial(_gradients, term, interpret), BLOCKS)
    return of_chains(cells, (), factors, cotangent)


def _gradients(
    term: Callable, interpret: bool, cells: list[jax.Array], _: tuple, factors: tuple, cotangent: Any
) -> tuple:
    """Return the derivatives of one or two chains, which factors and cotangents begin with."""
    rows, columns, row_bias, column_bias = factors
    (chains, num, rank), width = rows.shape, columns.shape[1]
    size, terms = _up(rank, SUBLANES), 2 if _precision() in BY_THREE else 1
    height = terms * size + SUBLANES  # of lines: those of factors, and all others
    lines = height + (terms - 1) * size  # of logits
    tile = _tile((num, width), (size, lines, height), [a.dtype.itemsize for a in cells], chains)
    grid = -(-num // tile[0]), -(-width // tile[1])
    tall, whole = grid[0] * tile[0], grid[1] * tile[1]
    instead = {} if _precision() in BY_SIX else {"logistic": tpu_numbers.logistic}
    strip = tile[0], LANES
    slope: Any = slope_of_cells(term, rows, cells, strip, of_int32=True, instead=instead)

    def by_row(height):
        return pl.BlockSpec((chains, height, tile[0]), lambda i, j: (0, 0, i))

    def by_column(height):
        return pl.BlockSpec((chains, height, tile[1]), lambda i, j: (0, 0, j))

    def all_columns(height):
        return pl.BlockSpec((chains, height, whole), lambda i, j: (0, 0, 0))

    products = [(tall, lines, whole)] * chains
    for num_summed in [whole] * chains + [LANES] * grid[1]:  # a tile's first sums are of zeros
        products += [(height, num_summed, tall), (height, tall, num_summed)]
    passes = 6 if _precision() in BY_SIX else 1
    of_rows, of_row_bias, of_columns, of_column_bias = pl.pallas_call(
        partial(_kernel, slope, (num, width, rank)),
        grid=grid,
        in_specs=[
            *(by_row(size), by_row(1), by_row(1), by_column(size), by_column(1)),
            *(pl.BlockSpec(tile, lambda i, j: (i, j)) for _ in cells),
        ],
        out_specs=[by_row(size), by_row(1), all_columns(size), all_columns(1)],
        out_shape=[
            jax.ShapeDtypeStruct((chains, h, n), rows.dtype) for n in (num, width) for h in (rank, 1)
        ],
        scratch_shapes=[
            pltpu.VMEM((chains, tile[0], lines), jnp.float32),
            pltpu.VMEM((chains, height, tile[0]), jnp.float32),
            pltpu.VMEM((chains, height, tile[1]), jnp.float32),
            pltpu.VMEM((1, tile[1]), jnp.int32),
            pltpu.VMEM((tile[0], LANES), jnp.float32),
        ],
        cost_estimate=tpu_cost.stated(products * passes, chains * tall * whole, cells),
        interpret=interpret,
    )(
        *(rows.mT, row_bias[:, None], cotangent[:, None]),
        *(columns.mT, column_bias[:, None], *cells),
    )
    of_rows, of_row_bias = (a * cotangent[:, None] for a in (of_rows, of_row_bias))
    return of_rows.mT, of_columns.mT, of_row_bias[:, 0], of_column_bias[:, 0]


def _tile(
    shape: tuple[int, int], heights: tuple[int, int, int], bytes_of_cells: list[int], chains: int
) -> tuple[int, int]:
    """Return the rows and columns of a tile: of those that a core can hold, what takes the least time.

    The work for each row, each column and each step counts as much as `LANES` more rows and `LANES`
    more columns would: for each row it takes about as long, for each column less.

    Parameters
    ----------
    shape
        Rows and columns of all cells.
    heights
        Of factors, and of the lines of logits and of sums.
    """
    of_a_strip = OF_A_CELL_BY_SIX if _precision() in BY_SIX else OF_A_CELL
    of_a_strip = LANES * (of_a_strip + 8 * len(bytes_of_cells))  # also as numbers, of two strips
    size, lines, height = heights
    # Lines, of logits transposed, and what they are made of, in two tiles.
    of_a_row = 4 * chains * (_up(lines, LANES) + height + 2 * (size + SUBLANES))
    of_a_column = 4 * chains * (height + 2 * (size + SUBLANES))
    of_a_derivative = 4 * chains * (size + SUBLANES)  # by column: it stays
    steps = LANES, LANES * BLOCKS // chains

    def sizes(axis):
        most = MEMORY // (of_a_strip, of_a_column)[axis]
        return range(steps[axis], min(_up(shape[axis], steps[axis]), most) + 1, steps[axis])

    def needed(tile):
        of_cells = math.prod(tile) * 2 * sum(bytes_of_cells)
        of_lines = tile[0] * (of_a_strip + of_a_row) + tile[1] * of_a_column
        return of_cells + of_lines + _up(shape[1], tile[1]) * of_a_derivative

    def time(tile):
        num_tiles = (-(-size // side) for size, side in zip(shape, tile, strict=True))
        return math.prod(num_tiles) * math.prod(side + LANES for side in tile)

    fitting = (tile for tile in itertools.product(sizes(0), sizes(1)) if needed(tile) <= MEMORY)
    return min(fitting, key=time, default=steps)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _kernel(slope: Callable, shape: tuple[int, int, int], *refs: Any) -> None:
    rows, row_bias, cotangent, columns, column_bias, *cells = refs[:-9]
    of_rows, of_row_bias, of_columns, of_column_bias = refs[-9:-5]
    logits_by_row, sums_by_row, sums_by_column, most, waiting = refs[-5:]
    i, j, (num, width, rank) = pl.program_id(0), pl.program_id(1), shape
    (chains, size, *tile), num_strips = (*rows.shape, columns.shape[2]), columns.shape[2] // LANES

    @pl.when(j == 0)
    def _():
        is_row = _is_within(num - i * tile[0], (1, tile[0]), 1)
        one = is_row.astype(jnp.float32)
        for c in range(chains):
            x, u, weight = (_kept(ref, c, rank, is_row) for ref in (rows, row_bias, cotangent))
            lines = [
                *_taken(_terms(x), (0, 1, 0)),
                _others(*_bias_terms(u), *(one for _ in _bias_terms(u))),
            ]
            logits_by_row[c] = jnp.concatenate(lines).T
            sums_by_row[c] = jnp.concatenate([*_terms(weight * x), _others(*_bias_terms(weight))])
        of_rows[...] = jnp.zeros_like(of_rows)
        of_row_bias[...] = jnp.zeros_like(of_row_bias)

    is_column = _is_within(width - j * tile[1], (1, tile[1]), 1)
    one = is_column.astype(jnp.float32)
    for c in range(chains):
        w, v = (_kept(ref, c, rank, is_column) for ref in (columns, column_bias))
        rest = _others(*(one for _ in _bias_terms(v)), *_bias_terms(v))
        sums_by_column[c] = jnp.concatenate([*_terms(w), rest])
    # The last tiles reach beyond the arrays, where anything may stand.
    most[...] = jnp.where(is_column, num - i * tile[0], 0)

    def cells_of(k):
        def of_array(x):
            is_packed = tpu_numbers.are_bytes(x)
            return tpu_numbers.unpacked(x, _strip(k), 1) if is_packed else x[:, _strip(k)]

        return list(map(of_array, cells))

    def residuals_of(k, c, values):
        strip = _strip(k)
        *factors, rest = _parts(sums_by_column[c, :, strip], size)
        logits_by_column = jnp.concatenate([*_taken(factors, (0, 0, 1)), rest])
        logits = _dot(logits_by_row[c], logits_by_column, NN)
        is_cell = _is_within(most[:, strip], logits.shape, 0)
        residuals = jnp.where(is_cell, slope(logits, *values), 0)
        return tpu_numbers.split(residuals, 1)[0] if _precision() in BY_THREE else residuals

    def add_products(k, c, residuals):
        by_row = _dot(sums_by_column[c, :, _strip(k)], residuals, NT)
        by_row, by_row_bias = _sum_of_terms(by_row, size)
        of_rows[c] += by_row
        of_row_bias[c] += by_row_bias[:1]
        by_column, by_column_bias = _sum_of_terms(_dot(sums_by_row[c], residuals, NN), size)
        here = _strip(j * num_strips + k)
        of_columns[c, :, here] = jnp.where(i == 0, 0, of_columns[c, :, here]) + by_column
        before = jnp.where(i == 0, 0, of_column_bias[c, :, here])
        of_column_bias[c, :, here] = before + jnp.sum(by_column_bias, axis=0, keepdims=True)

    def of_round(n, _):
        """Compute two blocks of residuals, and multiply the one before them and the first of them."""
        strips = [n * (BLOCKS // chains) + k for k in range(BLOCKS // chains)]
        first, second = (
            (k, chain, values)
            for k, values in zip(strips, map(cells_of, strips), strict=True)
            for chain in range(chains)
        )
        residuals = residuals_of(*first)
        add_products(jnp.maximum(strips[0] - 1, 0), chains - 1, waiting[...])
        following = residuals_of(*second)
        add_products(*first[:2], residuals)
        waiting[...] = following

    waiting[...] = jnp.zeros_like(waiting)
    jax.lax.fori_loop(0, num_strips * chains // BLOCKS, of_round, None)
    add_products(num_strips - 1, chains - 1, waiting[...])


def _strip(k: Any) -> Any:
    return pl.ds(pl.multiple_of(k * LANES, LANES), LANES)


def _is_within(size: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Tell what is among the first of an axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < size


def _kept(ref: Any, chain: int, rank: int, is_kept: jax.Array) -> jax.Array:
    """Return what a chain has, and zeros beyond the last of it and of its dimensions."""
    x = ref[chain]
    is_kept = is_kept & _is_within(rank, x.shape, 0) if len(x) > 1 else is_kept
    return jnp.where(is_kept, x, 0)


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


def _parts(lines: jax.Array, size: int) -> list[jax.Array]:
    """Cut lines, or their products, into those of each term of factors, and all others."""
    return [lines[k : k + size] for k in range(0, len(lines), size)]


def _sum_of_terms(products: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Add the products of a factor's second term to those of its first; return the others beside."""
    *terms, rest = _parts(products, size)
    return sum(terms[1:], start=terms[0]), rest


def _dot(x: jax.Array, y: jax.Array, axes: tuple) -> jax.Array:
    """Multiply in the precision that is asked for: the compiler of kernels knows two of the three."""
    precision = jax.lax.Precision.DEFAULT if _precision() in BY_THREE else None
    return jax.lax.dot_general(x, y, (axes, ((), ())), precision, preferred_element_type=jnp.float32)


def _precision() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore
