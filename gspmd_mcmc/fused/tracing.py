"""What a likelihood is traced for: a plate's gradient on a chip may hold kernels, all else may not.

XLA fuses no two matrix products. So between the product that makes the logits and the products of
their residuals a chip writes and reads arrays of the logits' size, many times the data's. A kernel
keeps them on the chip. The compiler cannot cut a kernel over devices, so that only a function that
runs on one device may hold it: `stream` runs those of a plate so.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import jax_private
from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.targets.streaming.kernels_inside import bodies, traced_platform

# What does the same with int32 that have a byte's values, and makes no byte that would wrap around.
SAME_OF_INT32 = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "select_n", "broadcast_in_dim", "copy"]
    + ["convert_element_type", "jit", "pjit"]
)
# What both chips' compilers of kernels lower, of what a term of one cell may be made of.
LOWERED = frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "broadcast_in_dim",
        "clamp",
        "convert_element_type",
        "copy",
        "div",
        "eq",
        "exp",
        "exp2",
        "floor",
        "ge",
        "gt",
        "integer_pow",
        "is_finite",
        "jit",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "one_minus_square",  # in the derivative of tanh since JAX 0.12
        "or",
        "pjit",
        "pow",
        "rsqrt",
        "select_n",
        "sign",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tanh",
        "xor",
    ]
)


def platform_of_kernels() -> str:
    """Return "gpu" or "tpu" if the function that is being traced may hold kernels of one, else ""."""
    platform = traced_platform()
    if platform != "gpu" or has_triton():
        return platform
    warnings.warn(
        f"kernels for GPUs: JAX {jax.__version__} has no Triton backend of Pallas, so gradients of "
        "categorical_linear and inner_product_terms are plain expressions there, which are slower. "
        "Install an earlier JAX",
        SamplingWarning,
        stacklevel=3,
    )
    return ""


@cache
def has_triton() -> bool:
    """Tell whether Pallas has its backend of Triton: JAX 0.12 says that a later one will not."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return True


def slope_of_cells(
    term: Callable,
    logit: Any,
    cells: list[Any],
    shape: tuple[int, int],
    of_int32: bool = False,
    instead: Mapping[str, Callable] = MappingProxyType({}),
) -> Callable | None:
    """Return ``slope(logits, *cells)``, the derivative of each cell's term in its logit, for a tile.

    Only what the derivative needs is left in it, not the term. ``instead`` holds functions for some
    operations by their names. None if a chip's compiler of kernels may not know an operation of it, or
    the term holds arrays; with ``of_int32``, where bytes come as int32, also if it computes with bytes
    what may wrap around.
    """

    def slope(logits, *cells):
        def terms(logits):
            return over_cells(term)(logits, *cells)

        return jax.jvp(terms, (logits,), (jnp.ones_like(logits),))[1]

    tiles = [jax.ShapeDtypeStruct(shape, a.dtype) for a in (logit, *cells)]
    closed = jax.make_jaxpr(slope)(*tiles)
    inner = jax_private.open_program(closed)
    jaxpr, _ = jax_private.without_unused(inner, [True], keep_inputs=True)
    if closed.consts or not _is_lowered(jaxpr) or (of_int32 and not _is_same_of_int32(jaxpr)):
        return None
    return lambda *args: _run(jaxpr, args, of_int32, instead)[0]


def over_cells(term: Callable) -> Callable:
    """Map a term of one logit and its cells over a matrix of them: so it can read no other cell."""
    return jax.vmap(jax.vmap(term))


def _is_lowered(jaxpr: Any) -> bool:
    return not jaxpr.constvars and all(
        eqn.primitive.name in LOWERED and all(map(_is_lowered, bodies(eqn))) for eqn in jaxpr.eqns
    )


def _is_same_of_int32(jaxpr: Any) -> bool:
    """Tell whether bytes are only compared, selected and converted, as int32 would be too."""

    def is_same(eqn):
        makes_bytes = any(map(_is_byte, eqn.outvars))
        if not makes_bytes and not any(map(_is_byte, eqn.invars)):
            return True
        is_conversion = eqn.primitive.name == "convert_element_type"
        return eqn.primitive.name in SAME_OF_INT32 and not (is_conversion and makes_bytes)

    return all(is_same(eqn) and all(map(_is_same_of_int32, bodies(eqn))) for eqn in jaxpr.eqns)


def _is_byte(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.integer) and atom.aval.dtype.itemsize == 1


def _run(jaxpr: Any, args: Sequence[Any], of_int32: bool, instead: Mapping[str, Callable]) -> list[Any]:
    """Run a program, perhaps with int32 for bytes, with functions in place of some operations."""
    values = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        if not jax_private.is_literal(atom):
            return values[atom]
        return jnp.int32(atom.val) if of_int32 and _is_byte(atom) else atom.val

    for eqn in jaxpr.eqns:
        (*inner,), operands = bodies(eqn), [read(atom) for atom in eqn.invars]
        if inner:
            outs = _run(*inner, operands, of_int32, instead)
        elif eqn.primitive.name in instead:
            outs = [instead[eqn.primitive.name](*operands)]
        else:
            outs = eqn.primitive.bind(*operands, **eqn.params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        values |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
