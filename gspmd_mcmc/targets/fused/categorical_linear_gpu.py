"""The gradient of multinomial logistic regression as one kernel of a GPU.

Each program goes over tiles of rows: a tile's logits, its residuals, and their product with the same
rows, which the cache still has. Programs keep sums of their own, which are added up at the end: there
are no atomics, and results are the same each time.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.targets.bfloat16_terms import bfloat16_terms, num_terms

TILE = 64  # rows
# About as many programs as a large GPU has cores; fewer where each would have less than two tiles, as
# every program writes sums of its own.
PROGRAMS, LEAST_TILES = 128, 2
LEAST = 16  # features and classes that a product of a tile takes
NO_CLASS = -1e30  # the logit of a class that is padding


def gradients(
    x: jax.Array, labels: jax.Array, parameters: tuple, cotangent: jax.Array, interpret: bool = False
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in the weights and the bias."""
    w, bias = parameters
    (num, features), classes = x.shape, w.shape[1]
    padded, terms = max(LEAST, 1 << (classes - 1).bit_length()), num_terms()
    chunks = _chunks(features)
    height = sum(chunks)
    tall = jnp.pad(w, ((0, height - features), (0, padded - classes)))
    factors = jnp.stack(bfloat16_terms(tall, terms))  # [terms, features, classes]
    biases = jnp.pad(bias, (0, padded - classes), constant_values=NO_CLASS)
    programs = min(PROGRAMS, -(-num // (LEAST_TILES * TILE)))
    of_w, of_bias = pl.pallas_call(
        partial(_kernel, num, features, chunks, terms),
        grid=(programs,),
        out_shape=[
            jax.ShapeDtypeStruct((programs, height, padded), w.dtype),
            jax.ShapeDtypeStruct((programs, padded), w.dtype),
        ],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
    )(x, labels, cotangent, factors, biases)
    return jnp.sum(of_w, axis=0)[:features, :classes], jnp.sum(of_bias, axis=0)[:classes]


def _chunks(features: int) -> list[int]:
    """Cut features into powers of two, as a tile's sizes are: 784 = 512 + 256 + 16."""
    rest, chunks = -(-features // LEAST) * LEAST, []
    while rest:
        chunks.append(1 << (rest.bit_length() - 1))
        rest -= chunks[-1]
    return chunks


def _kernel(num: int, features: int, chunks: list[int], terms: int, *refs: Any) -> None:
    x, labels, cotangent, factors, biases, of_w, of_bias = refs
    padded = biases.shape[0]
    program, programs = pl.program_id(0), pl.num_programs(0)
    places = [(sum(chunks[:i]), size) for i, size in enumerate(chunks)]

    def tile_of(start, place):
        """Return a tile of some features; beyond the rows and features it is zero."""
        first, size = place
        is_row = start + jnp.arange(TILE, dtype=jnp.int32) < num
        is_feature = first + jnp.arange(size, dtype=jnp.int32) < features
        # The last features may be fewer than the slice, which masks know: it is no constant, as that
        # would be refused.
        at = pl.ds(start, TILE), pl.ds(first + 0 * start, size)
        mask = is_row[:, None] & is_feature[None, :]
        return triton.load(x.at[at], mask=mask, other=0).astype(jnp.bfloat16)

    def add(step, sums):
        start = (program + step * programs) * TILE
        is_row = start + jnp.arange(TILE, dtype=jnp.int32) < num
        rows = pl.ds(start, TILE)
        label = triton.load(labels.at[rows], mask=is_row, other=0)
        weight = triton.load(cotangent.at[rows], mask=is_row, other=0.0)
        logits = jnp.broadcast_to(biases[...][None, :], (TILE, padded))
        for place in places:
            tile = tile_of(start, place)
            for term in range(terms):
                logits += _dot(tile, factors[term, pl.ds(*place), :])
        odds = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
        is_label = jnp.arange(padded, dtype=jnp.int32)[None, :] == label[:, None]
        slope = jnp.where(is_label, 1.0, 0.0) - odds / jnp.sum(odds, axis=1)[:, None]
        residuals = slope * weight[:, None]
        columns = bfloat16_terms(residuals, terms, in_kernel=True)
        of_chunks = []
        for place, total in zip(places, sums[0], strict=True):
            tile = tile_of(start, place).T
            for column in columns:
                total += _dot(tile, column)
            of_chunks.append(total)
        return of_chunks, sums[1] + jnp.sum(residuals, axis=0)

    zeros = [jnp.zeros((size, padded)) for size in chunks], jnp.zeros(padded)
    tiles = -(-num // TILE)
    steps = (tiles - program + programs - 1) // programs
    of_chunks, of_bias[program, :] = jax.lax.fori_loop(0, steps, add, zeros)
    for place, total in zip(places, of_chunks, strict=True):
        of_w[program, pl.ds(*place), :] = total


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
