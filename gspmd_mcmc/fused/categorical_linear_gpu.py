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

Where gradients have less than full precision, residuals are rounded to bfloat16.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.fused.chains import of_chains_together
from gspmd_mcmc.fused.gpu_numbers import in_bfloat16
from gspmd_mcmc.fused.gpu_settings import SHARED, settings
from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL, bfloat16_terms, num_terms

# Of a tile of residuals: rows, and features that it takes at a time, fewer if weights are many.
OF_RESIDUALS, MOST_STEP, LEAST_STEP = 128, 128, 64
# Of a tile that is summed over rows.
ROWS, FEATURES = 64, 128
MOST_COLUMNS = 128  # of the chains that share a tile: classes, in terms that stand side by side
MOST_SIDE_BY_SIDE = 64  # of a chain; more take too many registers, and terms are products of their own
LEAST_COLUMNS = 16  # that a product of a tile takes
# Programs that sum over rows, as many as a large GPU runs at a time: so many a core with at most so
# many columns of sums. Rows are added up in as many blocks as make these.
CORES, AT_A_TIME = 132, {32: 4, 64: 3, MOST_COLUMNS: 2}
NO_CLASS = -1e30  # the logit of a class that is padding
LOG2_E = 1.4426950408889634


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


def _block(terms: int, classes: int) -> int:
    """Columns of a term that stands beside others: padded, where all of them take no more so."""
    padded = _padded(classes)
    return padded if terms * padded == _padded(terms * classes) else classes


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
    together, kept = _side_by_side(terms, classes), NUM_FULL if terms == NUM_FULL else 1
    sets, block, columns = terms // together, _block(together, classes), _padded(together * classes)
    beside = _side_by_side(kept, classes)
    of_sums = chains * _padded(beside * classes)
    of_feature = (
        OF_RESIDUALS * x.dtype.itemsize + 2 * chains * sets * columns
    )  # bytes that a step loads
    step = MOST_STEP if of_feature * MOST_STEP <= SHARED // 2 else LEAST_STEP
    tiles, parts = -(-num // OF_RESIDUALS), -(-features // FEATURES)
    programs = CORES * next(num for most, num in AT_A_TIME.items() if of_sums <= most)
    blocks = min(max(programs // parts, 1), tiles * OF_RESIDUALS // ROWS)
    split = jnp.stack(bfloat16_terms(w, terms), axis=2)
    split = jnp.pad(split, ((0, 0), (0, -features % step), (0, 0), (0, block - classes)))
    factors = split.reshape(chains, -1, sets, together * block)
    factors = jnp.pad(factors, ((0, 0), (0, 0), (0, 0), (0, columns - together * block)))
    factors = _as_operand(factors.swapaxes(1, 2), 2)

    shape, num_lines = jax.ShapeDtypeStruct, chains * kept * classes
    residuals, of_bias = pl.pallas_call(
        partial(_residuals, interpret, (num, features), step, (terms, kept, classes, block)),
        grid=(tiles,),
        out_shape=[
            shape((num_lines, tiles * OF_RESIDUALS), jnp.bfloat16),
            shape((chains, tiles, _padded(classes)), w.dtype),
        ],
        compiler_params=settings(of_feature * step),
        interpret=interpret,
    )(x, labels, cotangent, factors, bias)
    of_row = FEATURES * x.dtype.itemsize + 2 * of_sums * (kept // beside)
    of_w = pl.pallas_call(
        partial(_products, interpret, (num, features), (chains, kept // beside, beside, classes)),
        grid=(parts, blocks),
        out_shape=shape((chains, blocks, features * classes), w.dtype),
        compiler_params=settings(of_row * ROWS),
        interpret=interpret,
    )(x, residuals)
    return jnp.sum(of_w, axis=1).reshape(w.shape), jnp.sum(of_bias, axis=1)[:, :classes]


def _residuals(
    interpret: bool,
    shape: tuple[int, int],
    width: int,
    sizes: tuple[int, int, int, int],
    *refs: Any,
) -> None:
    x, labels, cotangent, factors, biases, of_rows, of_bias = refs
    (chains, sets, height, columns), (terms, kept, classes, block) = factors.shape, sizes
    padded, tile = of_bias.shape[2], pl.program_id(0)
    first_row = tile * OF_RESIDUALS
    rows = pl.ds(first_row, OF_RESIDUALS)
    is_row = first_row + jnp.arange(OF_RESIDUALS, dtype=jnp.int32) < shape[0]
    number = jnp.arange(padded, dtype=jnp.int32)

    def add(step, products):
        loaded = _tile(x, shape, (first_row, step * width), (OF_RESIDUALS, width))
        here = in_bfloat16(_as_operand(loaded, 1), interpret)
        features = pl.ds(step * width, width)
        for chain in range(chains):
            for i in range(sets):
                products[chain] += _dot(here, factors[chain, i, features, :])
        return products

    # What a row needs besides is loaded before its products, and is there when they are.
    label = triton.load(labels.at[rows], mask=is_row, other=0)
    weights = [
        triton.load(cotangent.at[pl.ds(chain, 1), rows], mask=is_row[None, :], other=0.0)[0]
        for chain in range(chains)
    ]
    of_classes = (biases.at[chain + 0 * tile, pl.ds(0 * tile, padded)] for chain in range(chains))
    bias = [triton.load(at, mask=number < classes, other=NO_CLASS) for at in of_classes]
    start = [jnp.zeros((OF_RESIDUALS, columns))] * chains
    found = jax.lax.fori_loop(0, height // width, add, start)
    for chain, (products, weight) in enumerate(zip(found, weights, strict=True)):
        sums = _sum_of_terms(products, terms // sets, classes, block)
        logits = LOG2_E * (sums + bias[chain][None, :])
        odds = jnp.exp2(logits - jnp.max(logits, axis=1)[:, None])
        share = weight / jnp.sum(odds, axis=1)
        of_label = jnp.where(number[None, :] == label[:, None], weight[:, None], 0.0)
        residuals = of_label - odds * share[:, None]
        of_bias[chain, tile, :] = jnp.sum(residuals, axis=0)
        for term, residual in enumerate(bfloat16_terms(residuals, kept, in_kernel=True)):
            first = (chain * kept + term) * classes + 0 * tile
            at, mask = _lines(of_rows, first, classes, padded, rows)
            triton.store(at, residual.T, mask=mask)


def _products(
    interpret: bool,
    shape: tuple[int, int],
    sizes: tuple[int, int, int, int],
    x: Any,
    of_rows: Any,
    of_w: Any,
) -> None:
    chains, sets, together, classes = sizes
    lines, columns = together * classes, _padded(together * classes)
    part, block, blocks = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    tiles = of_rows.shape[1] // ROWS
    first_feature = part * FEATURES

    def add(step, sums):
        # The last rows come first: of all that residuals were made of, a cache holds these.
        tile = tiles - 1 - (block + step * blocks)
        loaded = _tile(x, shape, (tile * ROWS, first_feature), (ROWS, FEATURES))
        here = _as_turned_operand(in_bfloat16(loaded, interpret))
        rows = pl.ds(tile * ROWS, ROWS)
        for chain in range(chains):
            for i in range(sets):
                first = (chain * sets + i) * lines + 0 * tile
                at, mask = _lines(of_rows, first, lines, columns, rows)
                sums[chain] += _dot(here, triton.load(at, mask=mask, other=0.0).T)
        return sums

    steps = (tiles - block + blocks - 1) // blocks
    zeros = [jnp.zeros((FEATURES, columns))] * chains
    feature = first_feature + jnp.arange(FEATURES, dtype=jnp.int32)[:, None]
    number = jnp.arange(_padded(classes), dtype=jnp.int32)[None, :]
    mask, at = (feature < shape[1]) & (number < classes), feature * classes + number
    for chain, products in enumerate(jax.lax.fori_loop(0, steps, add, zeros)):
        total = _turned_back(_sum_of_terms(products, together, classes, classes))
        triton.store(of_w.at[chain + 0 * at, block + 0 * at, at], total, mask=mask)


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


def _turned_back(tile: jax.Array) -> jax.Array:
    """Return sums whose features `_as_turned_operand` ordered in the order of the data."""
    split = tile.reshape(-1, 4, 2, 8, tile.shape[1])  # step, group, half, thread
    return split.transpose(1, 3, 0, 2, 4).reshape(tile.shape)


def _sum_of_terms(products: jax.Array, num: int, classes: int, block: int) -> jax.Array:
    """Add up the columns of each class, of terms in blocks of so many columns.

    Whole blocks are added as they are, others by products with ones, as a tile has no slices.
    """
    padded = _padded(classes)
    if num == 1:
        return products
    if block == padded and num * block == products.shape[1]:
        return jnp.sum(products.reshape(len(products), num, block), axis=1)
    column = jnp.arange(products.shape[1], dtype=jnp.int32)[:, None]
    own = jnp.arange(padded, dtype=jnp.int32)[None, :]
    is_own = (column % block == own) & (column < num * block)
    ones = jnp.where(is_own, 1.0, 0.0).astype(jnp.bfloat16)
    first, *rest = (_dot(a, ones) for a in reversed(bfloat16_terms(products, NUM_FULL, in_kernel=True)))
    return sum(rest, start=first)


def _lines(ref: Any, first: Any, num: int, padded: int, columns: Any) -> tuple[Any, jax.Array]:
    """Return lines as they are stored, and the mask of those that are no padding."""
    is_line = jnp.arange(padded, dtype=jnp.int32) < num
    at = ref.at[pl.ds(first, padded), columns]
    return at, jnp.broadcast_to(is_line[:, None], (padded, columns.size))


def _tile(x: Any, end: tuple[Any, Any], first: tuple[Any, Any], sizes: tuple[int, int]) -> jax.Array:
    """Return a tile, zero beyond the last row and feature."""
    is_row, is_feature = (
        i + jnp.arange(size, dtype=jnp.int32) < last
        for i, size, last in zip(first, sizes, end, strict=True)
    )
    at = x.at[tuple(map(pl.ds, first, sizes))]
    return triton.load(at, mask=is_row[:, None] & is_feature[None, :], other=0)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
