"""The gradient of multinomial logistic regression as two kernels of a GPU.

One makes the residuals of a tile of rows from all their features, the other multiplies the residuals of
many rows by a few of their features: each reads the data once, for several chains. One kernel for both
would read them once in all, but what it has to keep at a time is more than the registers hold, and it
takes several times as long. Programs keep sums of their own, which are added up at the end: there are
no atomics, and results are the same each time.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.targets.bfloat16_terms import bfloat16_terms, num_terms
from gspmd_mcmc.targets.fused.chains import of_chains_together
from gspmd_mcmc.targets.fused.gpu_settings import settings

# Of a tile, so that a program's sums and operands are few registers and a core runs many programs.
ROWS, FEATURES = 64, 64
MOST_COLUMNS = 128  # classes, as they are padded, of the chains that share a tile
LEAST_CLASSES = 16  # that a product of a tile takes
PROGRAMS = 528  # that a large GPU runs at a time; rows are added up in as many blocks as make these
NO_CLASS = -1e30  # the logit of a class that is padding
# A float32 number 1.5 * 2^23 and more counts in ones: its lowest bits are those of an integer added.
COUNTING, COUNTING_BITS = 1.5 * 2.0**23, 0x4B400000


def gradients(
    x: jax.Array, labels: jax.Array, parameters: tuple, cotangent: jax.Array, interpret: bool = False
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in the weights and the bias.

    Under ``vmap`` over chains a tile of the data is read and converted once for several of them.
    """
    most = MOST_COLUMNS // _padded(parameters[0].shape[-1])
    of_chains = partial(_gradients, num_terms(), interpret)
    return of_chains_together(of_chains, most)(x, labels, parameters, cotangent)


def _padded(classes: int) -> int:
    return max(LEAST_CLASSES, 1 << (classes - 1).bit_length())


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
    padded, height = _padded(classes), -(-features // FEATURES) * FEATURES
    tiles, parts = -(-num // ROWS), height // FEATURES
    blocks = min(max(PROGRAMS // parts, 1), tiles)
    to_pad = (0, 0), (0, height - features), (0, padded - classes)
    factors = jnp.stack(bfloat16_terms(jnp.pad(w, to_pad), terms), axis=1)
    biases = jnp.pad(bias, (to_pad[0], to_pad[2]), constant_values=NO_CLASS)
    of_step = ROWS * FEATURES * x.dtype.itemsize + 2 * chains * terms * FEATURES * padded
    call = partial(pl.pallas_call, compiler_params=settings(of_step), interpret=interpret)
    shape = jax.ShapeDtypeStruct
    residuals, of_bias = call(
        partial(_residuals, (num, features), classes),
        grid=(tiles,),
        out_shape=[
            shape((chains * terms * classes, tiles * ROWS), jnp.bfloat16),
            shape((chains, tiles, padded), w.dtype),
        ],
    )(x, labels, cotangent, factors, biases)
    of_w = call(
        partial(_products, (num, features), (chains, terms, classes)),
        grid=(parts, blocks),
        out_shape=shape((chains * blocks * classes, height), w.dtype),
    )(x, residuals)
    of_w = jnp.sum(of_w.reshape(chains, blocks, classes, height), axis=1)
    return of_w.mT[:, :features], jnp.sum(of_bias, axis=1)[:, :classes]


def _residuals(shape: tuple[int, int], classes: int, *refs: Any) -> None:
    x, labels, cotangent, factors, biases, of_rows, of_bias = refs
    chains, terms, height, padded = factors.shape
    tile = pl.program_id(0)
    rows = pl.ds(tile * ROWS, ROWS)
    is_row = tile * ROWS + jnp.arange(ROWS, dtype=jnp.int32) < shape[0]
    label = triton.load(labels.at[rows], mask=is_row, other=0)
    is_label = jnp.arange(padded, dtype=jnp.int32)[None, :] == label[:, None]

    def add(step, logits):
        here, columns = _tile(x, shape, tile, step), pl.ds(step * FEATURES, FEATURES)
        for chain in range(chains):
            for term in range(terms):
                logits[chain] += _dot(here, factors[chain, term, columns, :])
        return logits

    start = [jnp.broadcast_to(biases[chain, :][None, :], (ROWS, padded)) for chain in range(chains)]
    for chain, logits in enumerate(jax.lax.fori_loop(0, height // FEATURES, add, start)):
        weight = triton.load(cotangent.at[pl.ds(chain, 1), rows], mask=is_row[None, :], other=0.0)[0]
        odds = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
        slope = jnp.where(is_label, 1.0, 0.0) - odds / jnp.sum(odds, axis=1)[:, None]
        residuals = slope * weight[:, None]
        of_bias[chain, tile, :] = jnp.sum(residuals, axis=0)
        for term, residual in enumerate(bfloat16_terms(residuals, terms, in_kernel=True)):
            at, mask = _lines(of_rows, chain * terms + term + 0 * tile, classes, padded, rows)
            triton.store(at, residual.T, mask=mask)


def _products(
    shape: tuple[int, int], sizes: tuple[int, int, int], x: Any, of_rows: Any, of_w: Any
) -> None:
    (chains, terms, classes), padded = sizes, _padded(sizes[2])
    part, block, blocks = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    tiles = of_rows.shape[1] // ROWS

    def add(step, sums):
        tile = block + step * blocks
        here, rows = _tile(x, shape, tile, part).T, pl.ds(tile * ROWS, ROWS)
        for chain in range(chains):
            for term in range(terms):
                at, mask = _lines(of_rows, chain * terms + term + 0 * tile, classes, padded, rows)
                sums[chain] += _dot(here, triton.load(at, mask=mask, other=0.0).T)
        return sums

    steps = (tiles - block + blocks - 1) // blocks
    zeros = [jnp.zeros((FEATURES, padded))] * chains
    for chain, total in enumerate(jax.lax.fori_loop(0, steps, add, zeros)):
        columns = pl.ds(part * FEATURES, FEATURES)
        at, mask = _lines(of_w, chain * blocks + block, classes, padded, columns)
        triton.store(at, total.T, mask=mask)


def _lines(ref: Any, which: Any, classes: int, padded: int, columns: Any) -> tuple[Any, jax.Array]:
    """Return a line of each class, as they are stored, and the mask of those that are no padding."""
    is_class = jnp.arange(padded, dtype=jnp.int32) < classes
    at = ref.at[pl.ds(which * classes, padded), columns]
    return at, jnp.broadcast_to(is_class[:, None], (padded, columns.size))


def _tile(x: Any, shape: tuple[int, int], row: Any, column: Any) -> jax.Array:
    """Return a tile in bfloat16; beyond the rows and features it is zero."""
    row, column = row * ROWS, column * FEATURES
    is_row = row + jnp.arange(ROWS, dtype=jnp.int32) < shape[0]
    is_feature = column + jnp.arange(FEATURES, dtype=jnp.int32) < shape[1]
    at = x.at[pl.ds(row, ROWS), pl.ds(column, FEATURES)]
    tile = triton.load(at, mask=is_row[:, None] & is_feature[None, :], other=0)
    if not jnp.issubdtype(tile.dtype, jnp.integer):
        return tile.astype(jnp.bfloat16)
    # A GPU converts integers to floating numbers at an eighth of the speed of an addition.
    counted = jax.lax.bitcast_convert_type(tile.astype(jnp.int32) + COUNTING_BITS, jnp.float32)
    return (counted - COUNTING).astype(jnp.bfloat16)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
