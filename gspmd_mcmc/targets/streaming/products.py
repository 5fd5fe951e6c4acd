"""Matrix products that sum over rows, in the form that is fast on a CPU.

The derivative of ``x @ w`` in w is such a product: xᵀy, with a row of cotangents y for each row of x.
The same sum is (yᵀx)ᵀ, and on a CPU the one with the narrow factor first takes about half of the time,
as XLA has a kernel for it alone. JAX writes the derivative that way, but the compiler folds the
transposition behind a product into it, which turns the factors around. A barrier keeps the two apart.
"""

from collections.abc import Callable
from typing import Any

import jax

from gspmd_mcmc import jax_private

SUM_OVER_ROWS = (((0,), (0,)), ((), ()))  # xᵀy, as `jax.lax.dot_general` has it


def with_narrow_factor_first(function: Callable) -> Callable:
    """Return what computes as ``function`` does, but sums over rows with the narrow factor first.

    Those of functions that it jits and of its scans too.
    """
    if not jax_private.can_rewrite():
        return function

    def rearranged(*args):
        closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
        leaves = jax_private.evaluate(_rearranged(closed), *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return rearranged


def _rearranged(program: Any) -> Any:
    eqns = [_with_rearranged_body(eqn) for eqn in jax_private.open_program(program).eqns]
    return jax_private.with_equations(program, eqns)


def _with_rearranged_body(eqn: Any) -> Any:
    if eqn.primitive.name == "dot_general" and _sums_over_rows(eqn):
        return _narrow_first(eqn)
    if eqn.params.get("branches_platforms"):  # forms of a function, one of them for CPUs
        branches = tuple(_rearranged(branch) for branch in eqn.params["branches"])
        return eqn.replace(params=eqn.params | {"branches": branches})
    body = eqn.params.get("jaxpr")
    if not hasattr(body, "consts"):
        return eqn
    return eqn.replace(params=eqn.params | {"jaxpr": _rearranged(body)})


def _sums_over_rows(eqn: Any) -> bool:
    """Tell a product of two matrices over their rows, whose factors can change places."""
    x, y = (v.aval for v in eqn.invars)
    # On a mesh of Explicit axes the product's layout is a part of its type.
    is_symmetric = x.dtype == y.dtype and not any(eqn.outvars[0].aval.sharding.spec)
    is_of_matrices = x.ndim == y.ndim == 2
    return is_of_matrices and is_symmetric and eqn.params["dimension_numbers"] == SUM_OVER_ROWS


def _narrow_first(eqn: Any) -> Any:
    """Make the equation anew, as a call of what stands for the same source line."""
    names = ("precision", "preferred_element_type")
    options = {name: eqn.params[name] for name in names}

    @jax.jit
    def sum_over_rows(x, y):
        if x.shape[1] <= y.shape[1]:
            return _apart(x, y, **options)
        if isinstance(options["precision"], tuple):
            options["precision"] = options["precision"][::-1]
        return _apart(y, x, **options).T

    program = jax.make_jaxpr(sum_over_rows)(*(v.aval for v in eqn.invars))
    (new,) = jax_private.open_program(program).eqns
    return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _apart(x: jax.Array, y: jax.Array, **options: Any) -> jax.Array:
    return jax.lax.optimization_barrier(jax.lax.dot_general(x, y, SUM_OVER_ROWS, **options))
