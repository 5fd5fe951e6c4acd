"""Terms of the rows of a factor model, whose gradient is a kernel on chips."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc.fused.tracing import (
    has_triton,
    over_cells,
    platform_of_kernels,
    slope_of_cells,
)
from gspmd_mcmc.targets.bfloat16_terms import num_terms
from gspmd_mcmc.targets.likelihoods import inner_products
from gspmd_mcmc.targets.streaming.kernels_inside import marked
from gspmd_mcmc.tree import PyTree

MOST_RANK = 128
# What a TPU's core keeps: the gradient by column, of factors as the core pads them and a bias. Of the
# 16 MB that older TPUs have, tiles take the rest.
MOST_BYTES_BY_COLUMN = 4 << 20
# What stands for an infinite bias, of which there are no terms: the logits are as good as infinite.
LARGEST_BIAS = 1e38
# Numbers of a row's factors, in all their terms, as a GPU pads them: the shared memory of the smallest
# cards holds two tiles of them.
MOST_OF_A_ROW = 256
MOST_CELLS = 1 << 30  # of a device: a GPU's kernels count their places in int32 numbers


def inner_product_terms(
    term: Callable,
    cells: PyTree,
    rows: jax.Array,
    columns: jax.Array,
    row_bias: jax.Array | None = None,
    column_bias: jax.Array | None = None,
) -> jax.Array:
    """Sum over columns the terms of a factor model, one for each cell.

    The value is that of ``jnp.sum(term(inner_products(rows, columns, ...), cells), axis=1)``. In the
    gradient of a `Plate` on a TPU or an NVIDIA GPU it is one kernel, or two: logits and residuals,
    which are many times the cells in bytes, are never written to memory. Elsewhere, and where ``term``
    does what kernels cannot, it is the expression itself. Where gradients have less than full
    precision, derivatives of terms in their logits are rounded to bfloat16 there, factors to two
    bfloat16 terms.
    Differentiable in reverse, and forward over reverse.

    Parameters
    ----------
    term
        ``term(logit, *leaves of cells) -> term``, of scalars: it is mapped over the cells. For example
        `bernoulli_logits`.
    cells
        An array [rows, columns], or a tree of them.
    rows, columns, row_bias, column_bias
        As `inner_products` takes them.

    Returns
    -------
    jax.Array
        One term a row, shape [rows], in nats.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(cells)]
    factors = (rows, columns, row_bias, column_bias)
    if _fits(leaves, factors) and _is_lowered(term, rows, leaves, platform_of_kernels()):
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
        return marked(_terms(term, precision, leaves, factors))
    return _plain(term, leaves, factors)


def _fits(cells: list[Any], factors: tuple) -> bool:
    """Tell whether kernels serve these shapes: floats of 32 bits, cells that have no derivative."""
    platform = platform_of_kernels()
    (width, rank), are_floats = (
        factors[1].shape,
        all(a is None or a.dtype == jnp.float32 for a in factors),
    )
    are_whole = all(jnp.issubdtype(a.dtype, jnp.integer) for a in cells)
    by_column = 4 * width * (-(-rank // 8) * 8 + 8)
    of_a_row = num_terms() * (1 << (rank + 1).bit_length())  # two for biases
    is_small = {
        "tpu": by_column <= MOST_BYTES_BY_COLUMN,
        "gpu": of_a_row <= MOST_OF_A_ROW and len(factors[0]) * width <= MOST_CELLS,
    }.get(platform or "", False)
    return are_floats and are_whole and rank <= MOST_RANK and is_small


def _is_lowered(term: Callable, rows: jax.Array, cells: list[Any], platform: str) -> bool:
    """Tell whether a platform's kernels can do what a term does.

    A TPU's compute with bytes as int32, so with none that may wrap around.
    """
    of_int32 = platform == "tpu"
    return slope_of_cells(term, rows, cells, (8, 128), of_int32=of_int32) is not None


def _plain(term: Callable, cells: list[jax.Array], factors: tuple) -> jax.Array:
    return jnp.sum(over_cells(term)(inner_products(*factors), *cells), axis=1)


def _forward(term: Callable, cells: list[jax.Array], factors: tuple) -> jax.Array:
    """Compute as `_plain` does on chips, differentiable forward; backward nothing needs it."""
    rows, columns, row_bias, column_bias = factors
    logits = rows @ columns.T
    logits = logits if row_bias is None else logits + row_bias[:, None]
    logits = logits if column_bias is None else logits + column_bias[None]
    return jnp.sum(over_cells(term)(logits, *cells), axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _terms(term: Callable, precision: str | None, cells: list[jax.Array], factors: tuple) -> jax.Array:
    return _forward(term, cells, factors)


def _bwd(term: Callable, precision: str | None, inputs: tuple, cotangent: jax.Array) -> tuple:
    cells, factors = inputs
    with jax.default_matmul_precision(precision):
        return None, _gradients(term, cells, factors, cotangent)


_terms.defvjp(
    lambda term, precision, cells, factors: (_forward(term, cells, factors), (cells, factors)), _bwd
)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(term: Callable, cells: list[jax.Array], factors: tuple, cotangent: jax.Array) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in the factors."""
    # Here, as who samples on a CPU need not wait for the compiler of kernels to be imported.
    from gspmd_mcmc.fused import inner_products_tpu

    kernels = {}
    if _is_lowered(term, factors[0], cells, "tpu"):
        kernels["tpu"] = partial(_with_biases, inner_products_tpu.gradients, term)
    if has_triton():
        from gspmd_mcmc.fused import inner_products_gpu

        kernels["cuda"] = partial(_with_biases, inner_products_gpu.gradients, term)
    plain = partial(_plain_gradients, term)
    return jax.lax.platform_dependent(cells, factors, cotangent, default=plain, **kernels)


def _with_biases(
    gradients: Callable, term: Callable, cells: list[jax.Array], factors: tuple, cotangent: jax.Array
) -> tuple:
    """Call a kernel with finite biases: zeros for one that is not there, which has no derivative."""
    rows, columns, *biases = factors
    zeros = (jnp.zeros(len(a), a.dtype) for a in (rows, columns))
    bounded = (a if a is None else jnp.clip(a, -LARGEST_BIAS, LARGEST_BIAS) for a in biases)
    filled = (z if bias is None else bias for z, bias in zip(zeros, bounded, strict=True))
    found = gradients(term, cells, (rows, columns, *filled), cotangent)
    return tuple(None if a is None else of_a for a, of_a in zip(factors, found, strict=True))


def _plain_gradients(
    term: Callable, cells: list[jax.Array], factors: tuple, cotangent: jax.Array
) -> tuple:
    return jax.vjp(lambda factors: _plain(term, cells, factors), factors)[1](cotangent)[0]


@_gradients.defjvp
def _(term: Callable, primals: tuple, tangents: tuple) -> tuple:
    """Differentiate once more, without a kernel."""
    cells = primals[0]
    of_cells = partial(_plain_gradients, term, cells)
    return jax.jvp(of_cells, primals[1:], tangents[1:])
