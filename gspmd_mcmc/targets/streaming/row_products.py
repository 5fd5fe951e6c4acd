"""Sums over columns of latents of groups times what a row has, in the form that is fast on a CPU.

``jnp.sum(params["user"] * film, axis=1)`` is a sum of products in each row, and rows of a chunk share
the latents: it is a matrix, the chunk's rows, times a vector. So is its derivative in the latents.
Written as such products, latents are not copied for rows, and products of single numbers stay in
registers. XLA knows neither, and sums short rows number by number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import dot_general_p, mul_p, reduce_sum_p

IN_EACH_ROW = (((1,), (1,)), ((0,), (0,)))  # of two matrices, as `jax.lax.dot_general` has it


def with_products_of_chunks(function: Callable, latents: list, spread: Callable) -> jax.Array:
    """Call ``function`` with latents spread over rows; where it sums products, with those of chunks.

    ``spread`` copies latents [chunks, ...] to [rows, ...], as many rows for each.
    """

    def of_rows(latents, rows):
        return function(rows)

    rows = spread(latents)
    closed = jax.make_jaxpr(of_rows)(latents, rows)
    of_chunks, spread_over = (closed.jaxpr.invars[: len(latents)], closed.jaxpr.invars[len(latents) :])
    chunks_of = {id(v): chunk for v, chunk in zip(spread_over, of_chunks, strict=True)}
    eqns = _with_products(closed.jaxpr.eqns, chunks_of)
    (terms,) = jaxpr_as_fun(closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns)))(*latents, *rows)
    return terms


def _with_products(eqns: Sequence[Any], chunks_of: dict[int, Any]) -> list[Any]:
    """Rewrite sums of products of which one factor is spread; ``chunks_of`` says of what."""
    factors, rewritten = {}, []
    for eqn in eqns:
        if eqn.primitive is mul_p and all(v.aval.ndim == 2 for v in eqn.invars):
            factors[id(eqn.outvars[0])] = eqn.invars
        pair = _summed_factors(eqn, factors)
        of_chunks = [i for i, v in enumerate(pair) if id(v) in chunks_of]
        if of_chunks:
            i = of_chunks[0]
            eqn = _product_of_chunks(eqn, chunks_of[id(pair[i])], pair[1 - i])
        rewritten.append(eqn)
    return rewritten


def _summed_factors(eqn: Any, factors: dict[int, Any]) -> Sequence[Any]:
    """Return the two matrices whose products an equation sums in each row, or ()."""
    if eqn.primitive is reduce_sum_p and eqn.params["axes"] == (1,):
        return factors.get(id(eqn.invars[0]), ())
    if eqn.primitive is dot_general_p and eqn.params["dimension_numbers"] == IN_EACH_ROW:
        return eqn.invars
    return ()


def _product_of_chunks(eqn: Any, latents: Any, rows: Any) -> Any:
    """Make the equation anew, as a call of what stands for the same source line."""
    dtype = eqn.outvars[0].aval.dtype

    @jax.jit
    def row_products(latents, rows):
        of_chunks = rows.reshape(len(latents), -1, rows.shape[1])
        products = jnp.einsum(
            "cjk,ck->cj", of_chunks, latents, precision="highest", preferred_element_type=dtype
        )
        return products.reshape(len(rows))

    (new,) = jax.make_jaxpr(row_products)(latents.aval, rows.aval).jaxpr.eqns
    return new.replace(invars=[latents, rows], outvars=eqn.outvars, source_info=eqn.source_info)
