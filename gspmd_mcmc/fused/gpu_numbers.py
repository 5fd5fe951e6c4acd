"""Bytes as bfloat16 numbers, and the logistic function, in a GPU's kernel.

Both are a few instructions of assembly (PTX) where a compiler makes several times as many: it converts
bytes one by one, and minds numbers too small for a float32's exponent. Assembly cannot be interpreted
on a CPU; there the same is computed in JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

# A float32 number 1.5 * 2^23 and more counts in ones: its lowest bits are those of an integer added.
COUNTING, COUNTING_BITS = 1.5 * 2.0**23, 0x4B400000
# Of four bytes b the bfloat16 numbers f of bits 0x4300 + b: 128 + b below 128, where they count in
# ones, else 2 b, where they count in twos. So b is the smaller of f - 128 and f / 2.
BYTES_IN_BFLOAT16 = """{
.reg .b32 f, g, one, half, less, none;
mov.b32 one, 0x3F803F80;
mov.b32 half, 0x3F003F00;
mov.b32 less, 0xC300C300;
mov.b32 none, 0x80008000;
prmt.b32 f, $2, 0x43434343, 0x4140;
prmt.b32 g, $2, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, f, one, less;
fma.rn.bf16x2 $1, g, one, less;
fma.rn.bf16x2 f, f, half, none;
fma.rn.bf16x2 g, g, half, none;
min.bf16x2 $0, $0, f;
min.bf16x2 $1, $1, g;
}"""  # less is -128, none -0, for each of two
LOGISTIC = """{
.reg .f32 e;
mul.ftz.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
add.ftz.f32 e, e, 0f3F800000;
rcp.approx.ftz.f32 $0, e;
}"""  # 0fBFB8AA3B is -log2(e)


def in_bfloat16(x: jax.Array, interpret: bool) -> jax.Array:
    """Return a tile of bytes or floating numbers as bfloat16, bytes exactly."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.bfloat16)
    if x.dtype == jnp.uint8 and not interpret:
        return _by_assembly(BYTES_IN_BFLOAT16, "=&r,=&r,r", x, jnp.bfloat16, pack=4)
    # A GPU converts integers to floating numbers at an eighth of the speed of an addition.
    counted = jax.lax.bitcast_convert_type(x.astype(jnp.int32) + COUNTING_BITS, jnp.float32)
    return (counted - COUNTING).astype(jnp.bfloat16)


def logistic(x: jax.Array, interpret: bool) -> jax.Array:
    """Return 1 / (1 + exp(-x)), right to a few units of float32's last place; 0 below -87."""
    if interpret:
        return 1 / (1 + jnp.exp(-x))
    return _by_assembly(LOGISTIC, "=f,f", x, jnp.float32, pack=1)


def _by_assembly(assembly: str, registers: str, x: jax.Array, dtype: Any, pack: int) -> jax.Array:
    """Run assembly on ``pack`` numbers at a time, which share registers if they are small."""
    (result,) = triton.elementwise_inline_asm(
        assembly,
        args=[x],
        constraints=registers,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return result
