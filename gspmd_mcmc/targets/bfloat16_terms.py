"""float32 numbers as sums of bfloat16 numbers, for products with what bfloat16 holds exactly.

A matrix unit multiplies bfloat16 numbers exactly and adds in float32. Bytes are bfloat16 numbers, and a
float32 number is the sum of three, its 24 bits 8 by 8: a product of bytes and float32 as three products
of bfloat16 numbers is right to float32's last bits. Two terms leave 16 bits, one leaves 8.

References
----------
Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations", IEEE 26th Symposium on Computer Arithmetic (2019).
"""

import jax
import jax.numpy as jnp

NUM_FULL = 3  # of terms that are float32's 24 bits
# Terms by the precision of products that is asked for: float32 unless it is less.
NUM_TERMS = {"high": 2, "tensorfloat32": 2, "bfloat16_3x": 2, "default": 1, "bfloat16": 1, "fastest": 1}


def num_terms() -> int:
    """Return how many terms the precision of matrix products in this context takes."""
    asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return NUM_TERMS.get(asked or "", NUM_FULL)


def bfloat16_terms(x: jax.Array, num: int, in_kernel: bool = False) -> list[jax.Array]:
    """Split float32 numbers into ``num`` terms, each what bfloat16 holds of the rest."""
    rounded, terms = rounded_as_integers if in_kernel else _rounded, []
    for _ in range(num - 1):
        terms.append(rounded(x))
        x = x - terms[-1]
    rest = x if in_kernel else _rounded(x)
    return [term.astype(jnp.bfloat16) for term in (*terms, rest)]


def _rounded(x: jax.Array) -> jax.Array:
    """Round: XLA may take a conversion there and back for nothing, and compilers of kernels do not."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def rounded_as_integers(x: jax.Array) -> jax.Array:
    """Round, a tie away from zero: chips convert single numbers slowly."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(bits + 0x8000 & -0x10000, x.dtype)


def sum_of_terms(products: jax.Array, num: int, axis: int) -> jax.Array:
    """Add up the products with ``num`` terms that stand side by side along an axis."""
    size = products.shape[axis] // num
    parts = [jax.lax.slice_in_dim(products, i * size, (i + 1) * size, axis=axis) for i in range(num)]
    return sum(parts[1:], start=parts[0])
