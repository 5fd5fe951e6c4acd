"""The product of data and parameters, x @ w, where data are bytes or half as wide as parameters.

GPUs and TPUs would make float32 numbers of bytes in memory, four times the data, before they multiply.
Here bytes are factors as they are, and float32 factors are sums of bfloat16 numbers, so that the
product is right to float32's last bits on every device.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL, bfloat16_terms, num_terms, sum_of_terms

BYTES = ("uint8", "int8")
MOST_BLOCKS = 64  # of rows, of a product that sums over them: enough programs for a GPU's cores


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply rows of data by float32 parameters: ``x.astype(float32) @ w``.

    On a CPU it is that expression. On GPUs and TPUs, bytes and bfloat16 numbers are not made float32
    numbers first. The product is right to float32's last bits where the context asks for no less
    (`jax.default_matmul_precision`; gradients of kernels may have less, see their
    ``gradient_precision``).
    Scale parameters rather than data: ``linear(image, w / 255)``.

    Parameters
    ----------
    x
        Rows of bytes (uint8, int8) or floating numbers, shape [rows, features]; bytes and bfloat16
        profit.
    w
        Parameters, shape [features, columns]; those of float32 profit.

    Returns
    -------
    jax.Array
        Shape [rows, columns], in the dtype of ``w`` if ``x`` are bytes. Differentiable in ``w``, and in
        ``x`` if it is floating; in reverse, and forward over reverse.

    Raises
    ------
    TypeError, ValueError
        If a dtype or a shape is another one.
    """
    _check(x, w)
    if is_exact_in_bfloat16(x) and w.dtype == jnp.float32:
        return _product(x, w, num_terms())
    return x.astype(jnp.promote_types(x.dtype, w.dtype)) @ w


def is_exact_in_bfloat16(x: jax.Array) -> bool:
    """Tell whether every number of this dtype is a bfloat16 number."""
    return x.dtype.name in (*BYTES, "bfloat16")


def _check(x: jax.Array, w: jax.Array) -> None:
    if not (x.dtype.name in BYTES or jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(
            f"linear: expected x of bytes (uint8, int8) or floating numbers, got {x.dtype}. "
            "Convert it: x.astype(numpy.float32)"
        )
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"linear: expected floating parameters w, got {w.dtype}")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"linear: expected shapes [rows, features] and [features, columns], got "
            f"{list(x.shape)} and {list(w.shape)}"
        )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, w: jax.Array, terms: int) -> jax.Array:
    return forward(x, w, terms)


def _bwd(terms: int, inputs: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple:
    x, w = inputs
    of_x = (grad @ w.T).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None
    return of_x, _backward(x, grad, terms)


_product.defvjp(lambda x, w, terms: (forward(x, w, terms), (x, w)), _bwd)


def forward(x: jax.Array, w: jax.Array, terms: int) -> jax.Array:
    """Return x @ w, differentiable forward."""
    return jax.lax.platform_dependent(
        *(x, w),
        cpu=lambda x, w: x.astype(w.dtype) @ w,
        cuda=lambda x, w: _with_signed_bytes(_forward_in_terms, x, w, terms),
        default=lambda x, w: _forward_in_terms(x, w, terms),
    )


def _backward(x: jax.Array, grad: jax.Array, terms: int) -> jax.Array:
    """Return xᵀ grad: the sum over rows."""
    return jax.lax.platform_dependent(
        *(x, grad),
        cpu=lambda x, grad: jnp.tensordot(x.astype(grad.dtype), grad, (0, 0)),
        cuda=lambda x, grad: _with_signed_bytes(_backward_in_blocks, x, grad, terms),
        default=lambda x, grad: _backward_in_terms(x, grad, terms),
    )


def _forward_in_terms(x: jax.Array, w: jax.Array, terms: int) -> jax.Array:
    columns = jnp.concatenate(bfloat16_terms(w, terms), axis=1)  # one product for all terms
    return sum_of_terms(_dot("rk,kc->rc", x, columns), terms, axis=1)


def _backward_in_terms(x: jax.Array, grad: jax.Array, terms: int) -> jax.Array:
    columns = jnp.concatenate(bfloat16_terms(grad, terms), axis=1)
    return sum_of_terms(_dot("rk,rc->kc", x, columns), terms, axis=1)


def _backward_in_blocks(x: jax.Array, grad: jax.Array, terms: int) -> jax.Array:
    """Sum over blocks of rows, then over blocks: XLA pads copies of the rows for blocks of its own."""
    num = next(n for n in range(MOST_BLOCKS, 0, -1) if len(x) % n == 0)
    columns = jnp.concatenate(bfloat16_terms(grad, terms), axis=1)
    # Two products may not share one conversion of the bytes: that would be written to memory.
    blocks, columns = (
        jax.lax.optimization_barrier(a).reshape(num, len(x) // num, -1) for a in (x, columns)
    )
    return sum_of_terms(jnp.sum(_dot("brk,brc->bkc", blocks, columns), axis=0), terms, axis=1)


def _with_signed_bytes(product: Callable, x: jax.Array, y: jax.Array, terms: int) -> jax.Array:
    """Multiply unsigned bytes as signed ones, which a GPU's compiler converts inside a product.

    They are signed bytes plus 128, or, where float32's last bits count, plus 256 where these are
    negative: a sum of all parameters could nearly cancel the rest of the product.
    """
    if x.dtype != jnp.uint8:
        return product(x, y, terms)
    signed = jax.lax.bitcast_convert_type(x, jnp.int8)
    if terms == NUM_FULL:
        # XLA makes one product of two that share a factor, and the other factors in memory for it.
        apart = jax.lax.optimization_barrier(y)
        return product(signed, y, terms) + 256 * product(signed < 0, apart, terms)
    return product(signed + jnp.int8(-128), y, terms) + 128 * jnp.sum(y, axis=0)[None]


def _dot(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x.astype(jnp.bfloat16), y, preferred_element_type=jnp.float32)
