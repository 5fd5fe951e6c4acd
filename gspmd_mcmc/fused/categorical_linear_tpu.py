"""The gradient of multinomial logistic regression as one kernel of a TPU.

A core goes over the rows in tiles, and over a tile in strips of 128 rows. Classes come first, so that
rows fill the vector lanes, and the terms of a factor lie below each other, those of all chains: one
product for all of them. The matrix units multiply one strip's residuals while the next one's are
computed. The derivatives stay in the core's memory. A tile's rows come first or last, as in the chip's
memory.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gspmd_mcmc.fused import tpu_cost, tpu_numbers
from gspmd_mcmc.fused.chains import of_chains_together
from gspmd_mcmc.targets.bfloat16_terms import bfloat16_terms, num_terms, sum_of_terms

# Of a tile's features in float32: with copies it fits the 16 MB of a TPU v2's core.
TILE_BYTES = 2 << 20
SUBLANES, LANES = 8, 128
NO_CLASS = -1e30  # the logit of a class that is padding


def gradients(
    x: jax.Array, labels: jax.Array, parameters: tuple, cotangent: jax.Array, interpret: bool = False
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in the weights and the bias.

    Under ``vmap`` over chains a tile of the data is read once for as many as fill the matrix unit,
    which takes no longer than one of them.
    """
    terms = num_terms()
    most = tpu_cost.SIDE // (terms * _padded(parameters[0].shape[-1]))
    of_chains = partial(_gradients, terms, interpret)
    return of_chains_together(of_chains, most)(x, labels, parameters, cotangent)


def _padded(classes: int) -> int:
    return -(-classes // SUBLANES) * SUBLANES


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
    padded, rows_last = _padded(classes), lies_by_columns(x)
    of_tile = max(1, TILE_BYTES // (4 * features * LANES)) * LANES
    tile = min(of_tile, -(-num // LANES) * LANES)
    tiles = -(-num // tile)
    # Where features are a tile's rows, those beyond the last meet weights of zero.
    height = -(-features // SUBLANES) * SUBLANES if rows_last else features

    def of_rows(a):
        return jnp.pad(a, ((0, 0), (0, tiles * tile - num)))

    by_class = jnp.pad(w.mT, ((0, 0), (0, padded - classes), (0, height - features)))
    factors = jnp.concatenate(bfloat16_terms(by_class.reshape(-1, height), terms)).astype(jnp.float32)
    to_pad = (0, 0), (0, padded - classes)
    biases = jnp.pad(bias, to_pad, constant_values=NO_CLASS).reshape(-1, 1)

    def whole(array):
        return pl.BlockSpec(array.shape, lambda i: (0, 0))

    def by_row(height):
        return pl.BlockSpec((height, tile), lambda i: (0, i))

    lines = len(factors)
    products = [(lines, height, tiles * tile), (lines, tiles * tile, height)]
    of_x = by_row(height) if rows_last else pl.BlockSpec((tile, features), lambda i: (i, 0))
    outs = [jax.ShapeDtypeStruct((len(biases), size), w.dtype) for size in (height, 1)]
    of_w, of_bias = pl.pallas_call(
        partial(_kernel, (num, features), terms, rows_last),
        grid=(tiles,),
        in_specs=[
            *(of_x, by_row(1), pl.BlockSpec((chains, 1, tile), lambda i: (0, 0, i))),
            *(whole(factors), whole(biases)),
        ],
        out_specs=[whole(out) for out in outs],
        out_shape=outs,
        cost_estimate=tpu_cost.stated(products, len(biases) * tiles * tile, (x, labels, cotangent)),
        interpret=interpret,
    )(
        *(
            x.T if rows_last else x,
            of_rows(labels.astype(jnp.int32)[None]),
            of_rows(cotangent)[:, None],
        ),
        *(factors, biases),
    )
    of_w, of_bias = (a.reshape(chains, padded, -1)[:, :classes] for a in (of_w, of_bias))
    return of_w.mT[:, :features], of_bias[..., 0]


def lies_by_columns(x: jax.Array) -> bool:
    """Tell whether a TPU stores a matrix by columns: where they fill its tiles with less padding.

    A kernel takes a matrix by rows, and one that lies otherwise is copied: all of the data a second
    time. The transpose of a matrix that lies by columns lies by rows.
    """
    rows, columns = x.shape

    def padded(size, multiple):
        return -(-size // multiple) * multiple

    by_rows = padded(rows, SUBLANES) * padded(columns, LANES)
    return padded(columns, SUBLANES) * padded(rows, LANES) < by_rows


def _kernel(shape: tuple[int, int], terms: int, rows_last: bool, *refs: Any) -> None:
    features, labels, cotangent, factors, biases, of_w, of_bias = refs
    step, tile, axis = pl.program_id(0), labels.shape[1], int(rows_last)  # the axis of a tile's rows

    @pl.when(step == 0)
    def _():
        of_w[...] = jnp.zeros_like(of_w)
        of_bias[...] = jnp.zeros_like(of_bias)

    def of_strip(first):
        strip = slice(first, first + LANES)
        x = _numbers(features, strip, axis, (shape[0] - step * tile, shape[1]))
        logits = sum_of_terms(_dot(factors[...], x, (1, 1 - axis)), terms, axis=0) + biases[...]
        logits = logits.reshape(len(cotangent), -1, LANES)  # chains, classes, rows
        odds = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
        is_label = jax.lax.broadcasted_iota(jnp.int32, odds.shape, 1) == labels[:, strip][None]
        slope = jnp.where(is_label, 1.0, 0.0) - odds / jnp.sum(odds, axis=1, keepdims=True)
        return x, (slope * cotangent[:, :, strip]).reshape(-1, LANES)

    def add_products(x, residuals):
        stacked = jnp.concatenate(tpu_numbers.split(residuals, terms))
        of_w[...] += sum_of_terms(_dot(stacked, x, (1, axis)), terms, axis=0)
        of_bias[...] += jnp.sum(residuals, axis=1, keepdims=True)

    before = of_strip(0)
    for first in range(LANES, tile, LANES):
        following = of_strip(first)
        add_products(*before)
        before = following
    add_products(*before)


def _numbers(features: Any, strip: slice, axis: int, shape: tuple[Any, int]) -> jax.Array:
    """Return a strip of features in float32, of as many rows and features as there are.

    The last tile reaches beyond the rows, where anything may stand, and the cotangent is zero. Any byte
    is a number, but not all bits of bfloat16 are.
    """
    if tpu_numbers.are_bytes(features) and features.shape[1] % LANES == 0:
        return tpu_numbers.unpacked(features, strip, axis).astype(jnp.float32)
    x = features[:, strip] if axis else features[strip, :]
    if tpu_numbers.are_bytes(x):
        return x.astype(jnp.int32).astype(jnp.float32)
    is_row = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + strip.start < shape[0]
    is_feature = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1 - axis) < shape[1]
    return jnp.where(is_row & is_feature, x.astype(jnp.float32), 0)


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Multiply numbers that bfloat16 holds; as float32, as older chips multiply no other."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    precision = jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(x, y, dimensions, precision, preferred_element_type=jnp.float32)
