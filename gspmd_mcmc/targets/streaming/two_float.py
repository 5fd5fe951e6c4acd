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
    return _two_sum(*jax.lax.optimization_barrier((a, b)))


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@jax.custom_jvp
def two_float_sum(x: jax.Array) -> jax.Array:
    """Sum the leading axis, shape [n] -> [2]: the rounded sum (hi) and what it lost (lo).

    The error is of the order of the square of the rounding unit. The sum of a term that is not finite
    is NaN or infinite in ``hi``.
    """
    # Each level of a tree is a kernel of a GPU, and a whole reduction one or two; on a CPU a reduction
    # is a loop over single numbers.
    return jax.lax.platform_dependent(x, cpu=_by_tree, default=_by_reduction)


@two_float_sum.defjvp
def _(primals, tangents):
    total = jnp.sum(tangents[0], axis=0)
    return two_float_sum(*primals), jnp.stack([total, jnp.zeros_like(total)])


def _by_tree(x: jax.Array) -> jax.Array:
    """Sum pairs, and pairs of these."""
    hi, lo = x, jnp.zeros_like(x)
    while hi.shape[0] > 1:
        half, odd = divmod(hi.shape[0], 2)
        pairs, errors = two_sum(hi[:half], hi[half : 2 * half])
        lows = lo[:half] + lo[half : 2 * half] + errors
        hi = jnp.concatenate([pairs, hi[2 * half :]]) if odd else pairs
        lo = jnp.concatenate([lows, lo[2 * half :]]) if odd else lows
    return jnp.stack(two_sum(hi[0], lo[0]))


def _by_reduction(x: jax.Array) -> jax.Array:
    """Sum in the order that the compiler chooses."""

    def add(one, other):
        hi, error = _two_sum(one[0], other[0])
        return hi, one[1] + other[1] + error

    zero = jnp.zeros((), x.dtype)
    return jnp.stack(two_sum(*jax.lax.reduce((x, jnp.zeros_like(x)), (zero, zero), add, (0,))))
