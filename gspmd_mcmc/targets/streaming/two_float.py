"""Sums that keep twice the digits: an unevaluated pair hi + lo of floats.

References
----------
Knuth, The Art of Computer Programming, volume 2, 4.2.2 (TwoSum); Dekker, "A floating-point technique
for extending the available precision", Numerische Mathematik 18 (1971).
"""

import jax
import jax.numpy as jnp


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``s, e`` with ``s = fl(a + b)`` and ``s + e == a + b`` exactly."""
    # Without the barrier XLA reassociates with a constant operand, and (1 + x) - 1 becomes x.
    a, b = jax.lax.optimization_barrier((a, b))
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_float_sum(x: jax.Array) -> jax.Array:
    """Sum the leading axis, shape [n] -> [2]: the rounded sum (hi) and what it lost (lo).

    A pairwise tree of TwoSums: the error is of the order of the square of the rounding unit. The sum
    of a term that is not finite is NaN or infinite in ``hi``.
    """
    hi, lo = x, jnp.zeros_like(x)
    while hi.shape[0] > 1:
        half, odd = divmod(hi.shape[0], 2)
        pairs, errors = two_sum(hi[:half], hi[half : 2 * half])
        lows = lo[:half] + lo[half : 2 * half] + errors
        hi = jnp.concatenate([pairs, hi[2 * half :]]) if odd else pairs
        lo = jnp.concatenate([lows, lo[2 * half :]]) if odd else lows
    return jnp.stack(two_sum(hi[0], lo[0]))
