"""The gradient of multinomial logistic regression as two kernels of a GPU.

One makes the residuals of a tile of rows from all their features, the other multiplies the residuals of
many rows by a few of their features: each reads the data once, for several chains. One kernel for both
would read them once in all, but what it has to keep at a time is more than the registers hold, and it
takes several times as long. Programs keep sums of their own, which are added up at the end: there are
no atomics, and results are the same each time.

The data are a product's left factor, of which each thread holds a few numbers in registers. Which ones
these are is free, so long as the other factor or the result follows. So rows and features are taken in
an order (`_as_operand`, `_as_turned_operand`) in which a thread's numbers lie side by side: it loads
them at once, where it would load one or two at a time from everywhere.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL, bfloat16_terms, num_terms
from gspmd_mcmc.targets.fused.chains import of_chains_together
from gspmd_mcmc.targets.fused.gpu_settings import settings

# Of a tile: features that residuals take at a time, and those of a program that sums over rows.
ROWS, STEP, FEATURES = 64, 64, 128
MOST_COLUMNS = 128  # of the chains that share a tile: classes, in terms that stand side by side
MOST_SIDE_BY_SIDE = 64  # of a chain; more take too many registers, and terms are products of their own
LEAST_COLUMNS = 16  # that a product of a tile takes
PROGRAMS = 264  # that a large GPU runs at a time; rows are added up in as many blocks as make these
NO_CLASS = -1e30  # the logit of a class that is padding
# A float32 number 1.5 * 2^23 and more counts in ones: its lowest bits are those of an integer added.
COUNTING, COUNTING_BITS = 1.5 * 2.0**23, 0x4B400000


def gradients(
    x: jax.Array, labels: jax.Array, parameters: tuple, cotangent: jax.Array, interpret: bool = False
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in the weights and the bias.

    Under ``vmap`` over chains a tile of the data is read and converted once for several of them.
    """
    classes = parameters[0].shape[-1]
    most = MOST_COLUMNS // _padded(_side_by_side(num_terms(), classes) * classes)
    of_chains = partial(_gradients, num_terms(), interpret)
    return of_chains_together(of_chains, most)(x, labels, parameters, cotangent)


def _side_by_side(terms: int, classes: int) -> int:
    return terms if terms * classes <= MOST_SIDE_BY_SIDE else 1


def _padded(columns: int) -> int:
    return max(LEAST_COLUMNS, 1 << (columns - 1).bit_length())


def _gradients(
    terms: int,
    interpret: bool,
    x: jax.Array,
    labels: jax.Array,
    parameters: tuple,
    cotangent: jax.Array,
) -> tuple:
    """Return the derivatives of some chains, which parameters and cotangents begin with."""
    w, bias = parameters
    (num, features), (chains, _, classes) = x.shape, w.shape
    together, padded = _side_by_side(terms, classes), _padded(classes)
    sets, columns = terms // together, _padded(together * classes)
    height, tiles, parts = -(-features // STEP) * STEP, -(-num // ROWS), -(-features // FEATURES)
    blocks = min(max(PROGRAMS // parts, 1), tiles)
    split = bfloat16_terms(w, terms)
    side_by_side = [jnp.concatenate(split[i : i + together], axis=2) for i in range(0, terms, together)]
    to_pad = (0, 0), (0, 0), (0, height - features), (0, columns - together * classes)
    factors = _as_operand(jnp.pad(jnp.stack(side_by_side, axis=1), to_pad), 2)

    def call(kernel, width, lines, **shapes):
        """Call a kernel that reads so many features of a tile in a step, and lines of other factors."""
        of_step = ROWS * width * x.dtype.itemsize + 2 * chains * sets * columns * lines
        return pl.pallas_call(kernel, compiler_params=settings(of_step), interpret=interpret, **shapes)

    shape = jax.ShapeDtypeStruct
    residuals, of_bias = call(
        partial(_residuals, (num, features), (terms, classes)),
        *(STEP, STEP),
        grid=(tiles,),
        out_shape=[
            shape((chains * terms * classes, tiles * ROWS), jnp.bfloat16),
            shape((chains, tiles, padded), w.dtype),
        ],
    )(x, labels, cotangent, factors, bias)
    of_w = call(
        partial(_products, (num, features), (chains, sets, together, classes)),
        *(FEATURES, ROWS),
        grid=(parts, blocks),
        out_shape=shape((chains * blocks * classes, parts * FEATURES), w.dtype),
    )(x, residuals)
    of_w = jnp.sum(of_w.reshape(chains, blocks, classes, -1), axis=1)
    return of_w.mT[:, :features], jnp.sum(of_bias, axis=1)[:, :classes]


def _residuals(shape: tuple[int, int], sizes: tuple[int, int], *refs: Any) -> None:
    x, labels, cotangent, factors, biases, of_rows, of_bias = refs
    (chains, sets, height, columns), (terms, classes), padded = factors.shape, sizes, of_bias.shape[2]
    tile = pl.program_id(0)
    rows = pl.ds(tile * ROWS, ROWS)
    is_row = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32) < shape[0]
    label = triton.load(labels.at[rows], mask=is_row, other=0)
    number = jnp.arange(padded, dtype=jnp.int32)
    is_label = number[None, :] == label[:, None]

    def add(step, products):
        here = _in_bfloat16(_as_operand(_tile(x, shape, tile, step, STEP), 1))
        features = pl.ds(step * STEP, STEP)
        for chain in range(chains):
            for i in range(sets):
                products[chain] += _dot(here, factors[chain, i, features, :])
        return products

    start = [jnp.zeros((ROWS, columns))] * chains
    for chain, products in enumerate(jax.lax.fori_loop(0, height // STEP, add, start)):
        at = biases.at[chain + 0 * tile, pl.ds(0 * tile, padded)]
        bias = triton.load(at, mask=number < classes, other=NO_CLASS)
        logits = _sum_of_terms(products, terms // sets, classes) + bias[None, :]
        weight = triton.load(cotangent.at[pl.ds(chain, 1), rows], mask=is_row[None, :], other=0.0)[0]
        odds = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
        slope = jnp.where(is_label, 1.0, 0.0) - odds / jnp.sum(odds, axis=1)[:, None]
        residuals = slope * weight[:, None]
        of_bias[chain, tile, :] = jnp.sum(residuals, axis=0)
        for term, residual in enumerate(bfloat16_terms(residuals, terms, in_kernel=True)):
            first = (chain * terms + term) * classes + 0 * tile
            at, mask = _lines(of_rows, first, classes, padded, rows)
            triton.store(at, residual.T, mask=mask)


def _products(
    shape: tuple[int, int], sizes: tuple[int, int, int, int], x: Any, of_rows: Any, of_w: Any
) -> None:
    chains, sets, together, classes = sizes
    lines, columns = together * classes, _padded(together * classes)
    part, block, blocks = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    tiles = of_rows.shape[1] // ROWS

    def add(step, sums):
        tile = block + step * blocks
        here = _in_bfloat16(_as_turned_operand(_tile(x, shape, tile, part, FEATURES)))
        rows = pl.ds(tile * ROWS, ROWS)
        for chain in range(chains):
            for i in range(sets):
                first = (chain * sets + i) * lines + 0 * tile
                at, mask = _lines(of_rows, first, lines, columns, rows)
                sums[chain] += _dot(here, triton.load(at, mask=mask, other=0.0).T)
        return sums

    steps = (tiles - block + blocks - 1) // blocks
    zeros = [jnp.zeros((FEATURES, columns))] * chains
    for chain, products in enumerate(jax.lax.fori_loop(0, steps, add, zeros)):
        total = _turned_back(_sum_of_terms(products, together, classes).T)
        first, features = (chain * blocks + block) * classes, pl.ds(part * FEATURES, FEATURES)
        at, mask = _lines(of_w, first, classes, len(total), features)
        triton.store(at, total, mask=mask)


def _as_operand(array: jax.Array, axis: int) -> jax.Array:
    """Order an axis so that 16 numbers side by side are those that one thread multiplies.

    A product takes 16 numbers of a row at a time. Each of four threads holds two of the first eight and
    two of the others.
    """
    shape = array.shape
    split = array.reshape(*shape[:axis], -1, 4, 4, 2, 2, *shape[axis + 1 :])  # thread, step, half, two
    return jnp.moveaxis(split, axis + 1, axis + 3).reshape(shape)


def _as_turned_operand(tile: jax.Array) -> jax.Array:
    """Turn a tile, its features in an order in which those side by side are one thread's.

    A product takes 64 features at a time, 16 by each of four groups of threads, in which thread i of
    eight holds the i-th of the first eight and of the others.
    """
    rows, features = tile.shape
    split = tile.reshape(rows, 4, 8, -1, 2)  # group, thread, step, half
    return split.transpose(3, 1, 4, 2, 0).reshape(features, rows)


def _turned_back(lines: jax.Array) -> jax.Array:
    """Return lines whose features `_as_turned_operand` ordered in the order of the data."""
    split = lines.reshape(len(lines), -1, 4, 2, 8)
    return split.transpose(0, 2, 4, 1, 3).reshape(lines.shape)


def _sum_of_terms(products: jax.Array, num: int, classes: int) -> jax.Array:
    """Add up the columns of each class: by products with ones, as a tile has no slices."""
    if num == 1:
        return products
    column = jnp.arange(products.shape[1], dtype=jnp.int32)[:, None]
    own = jnp.arange(_padded(classes), dtype=jnp.int32)[None, :]
    is_own = (column % classes == own) & (column < num * classes)
    ones = jnp.where(is_own, 1.0, 0.0).astype(jnp.bfloat16)
    first, *rest = (_dot(a, ones) for a in reversed(bfloat16_terms(products, NUM_FULL, in_kernel=True)))
    return sum(rest, start=first)


def _lines(ref: Any, first: Any, num: int, padded: int, columns: Any) -> tuple[Any, jax.Array]:
    """Return lines as they are stored, and the mask of those that are no padding."""
    is_line = jnp.arange(padded, dtype=jnp.int32) < num
    at = ref.at[pl.ds(first, padded), columns]
    return at, jnp.broadcast_to(is_line[:, None], (padded, columns.size))


def _tile(x: Any, shape: tuple[int, int], row: Any, column: Any, width: int) -> jax.Array:
    """Return a tile; beyond the rows and features it is zero."""
    row, column = row * ROWS, column * width
    is_row = row + jnp.arange(ROWS, dtype=jnp.int32) < shape[0]
    is_feature = column + jnp.arange(width, dtype=jnp.int32) < shape[1]
    at = x.at[pl.ds(row, ROWS), pl.ds(column, width)]
    return triton.load(at, mask=is_row[:, None] & is_feature[None, :], other=0)


def _in_bfloat16(tile: jax.Array) -> jax.Array:
    if not jnp.issubdtype(tile.dtype, jnp.integer):
        return tile.astype(jnp.bfloat16)
    # A GPU converts integers to floating numbers at an eighth of the speed of an addition.
    counted = jax.lax.bitcast_convert_type(tile.astype(jnp.int32) + COUNTING_BITS, jnp.float32)
    return (counted - COUNTING).astype(jnp.bfloat16)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
