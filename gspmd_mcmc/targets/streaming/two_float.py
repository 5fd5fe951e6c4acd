"""Sums that keep twice the digits: an unevaluated pair hi + lo of floats.

References
----------
Knuth, The Art of Computer Programming, volume 2, 4.2.2 (TwoSum); Dekker, "A floating-point technique
for extending the available precision", Numerische Mathematik 18 (1971).
"""

import jax
import jax.numpy as jnp

# Parts that a CPU adds at once: LLVM unrolls a loop over so many, and adds several numbers of each part
# by one instruction.
PARTS = 8


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
    return jax.lax.platform_dependent(x, cpu=_by_parts, default=_by_reduction)


@two_float_sum.defjvp
def _(primals, tangents):
    total = jnp.sum(tangents[0], axis=0)
    return two_float_sum(*primals), jnp.stack([total, jnp.zeros_like(total)])


def _by_parts(x: jax.Array) -> jax.Array:
    """Sum parts of equal length, and parts of what comes of them, until few numbers are left.

    On a CPU one reduction of all is a loop over single numbers. Where sums of pairs are written out,
    XLA may compute them several times over, and LLVM may fuse the products that make the terms into
    some of the additions and not into others, which loses digits.
    """
    hi, lo = x, jnp.zeros_like(x)
    while len(hi) > PARTS**2:
        pad = (0, -len(hi) % PARTS)
        hi, lo = _reduced(*(jnp.pad(part, pad).reshape(PARTS, -1) for part in (hi, lo)))
    return jnp.stack(two_sum(*_reduced(hi, lo)))


def _by_reduction(x: jax.Array) -> jax.Array:
    """Sum in the order that the compiler chooses: one kernel of a GPU, or two."""
    return jnp.stack(two_sum(*_reduced(x, jnp.zeros_like(x))))


def _reduced(hi: jax.Array, lo: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum pairs along the first axis."""

    def add(one, other):
        total, error = _two_sum(one[0], other[0])
        return total, one[1] + other[1] + error

    zero = jnp.zeros((), hi.dtype)
    return jax.lax.reduce((hi, lo), (zero, zero), add, (0,))
