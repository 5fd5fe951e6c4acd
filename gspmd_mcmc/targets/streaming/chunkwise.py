"""Likelihoods of rows in chunks that share latents, rearranged for a CPU.

What depends on latents alone, such as ``mu + sigma * params["z"]``, is computed once for a chunk, and
what comes of it is copied for the chunk's rows. A sum of products with what rows have, such as
``jnp.sum(params["user"] * film, axis=1)``, is the matrix of a chunk's rows times a vector, and so is
its derivative in the vector: nothing is copied, and products of single numbers stay in registers. XLA
knows neither: it computes for each row, and sums short rows number by number.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import jax_private

# What computes each number from those in its place.
ELEMENTWISE = frozenset(
    ("abs", "add", "clamp", "convert_element_type", "cos", "div", "erf", "exp", "expm1", "integer_pow")
    + ("log", "log1p", "log2", "logistic", "max", "min", "mul", "neg", "one_minus_square", "pow")
    + ("rsqrt", "sign", "sin", "sqrt", "square", "sub", "tanh")
)
# Products of two matrices row by row, and of a matrix and a vector, as `jax.lax.dot_general` has them.
OF_ROWS, WITH_VECTOR = (((1,), (1,)), ((0,), (0,))), (((1,), (0,)), ((), ()))


def chunkwise(function: Callable, latents: list[jax.Array], spread: Callable) -> jax.Array:
    """Return ``function(spread(latents))``, by chunks where that is the same.

    Parameters
    ----------
    function
        Takes latents, leaves [rows, ...], and returns terms [rows].
    latents
        Leaves [chunks, ...].
    spread
        Copies each leaf for rows: [chunks, ...] to [rows, ...], as many for each chunk.
    """

    def of_rows(latents, rows):
        return function(rows)

    rows = spread(latents)
    if not jax_private.can_rewrite():
        return function(rows)
    closed = jax.make_jaxpr(of_rows)(latents, rows)
    inner = jax_private.open_program(closed)
    num, invars = len(latents), inner.invars
    of_chunks = dict(zip(map(id, invars[num:]), invars[:num], strict=True))
    program = _Program(of_chunks, len(latents[0]) if latents else 0, spread)
    for eqn in inner.eqns:
        program.add(eqn)
    rearranged = jax_private.with_equations(closed, program.eqns)
    (terms,) = jax_private.evaluate(rearranged, *latents, *rows)
    return terms


class _Program:
    """Equations, rearranged one by one.

    Attributes
    ----------
    eqns
        What there is so far.
    of_chunks
        For variables of rows that are equal within a chunk, by id, the variable of chunks.
    """

    def __init__(self, of_chunks: dict[int, Any], num_chunks: int, spread: Callable):
        self.eqns: list[Any] = []
        self.of_chunks = of_chunks
        self._num_chunks = num_chunks
        self._spread = spread
        self._factors: dict[int, tuple] = {}  # of products, one of chunks and one of rows
        self._broadcasts: dict[int, Any] = {}  # equations whose results are the same for all rows

    def add(self, eqn: Any) -> None:
        """Add an equation, or what takes its place."""
        name = eqn.primitive.name
        if name == "broadcast_in_dim" and _is_equal_in_rows(eqn):
            self._broadcasts[id(eqn.outvars[0])] = eqn
        params = self._params_of_chunks(eqn)
        if params is not None:
            chunks = self._bind(eqn, params, *map(self._chunk_var, eqn.invars))
            self.of_chunks[id(eqn.outvars[0])] = chunks
            self._call(eqn, self._copied, chunks, out=eqn.outvars)
        elif (factors := self._summed_factors(eqn)) is not None:
            products = partial(_row_products, dtype=eqn.outvars[0].aval.dtype)
            self._call(eqn, products, *factors, out=eqn.outvars)
        else:
            if name == "mul" and eqn.invars[0].aval.shape == eqn.invars[1].aval.shape:
                self._note_factors(eqn.outvars[0], *eqn.invars)
            self.eqns.append(eqn)

    def _params_of_chunks(self, eqn: Any) -> dict | None:
        """Return an equation's parameters for chunks, if latents alone decide what it gives."""
        name, params = eqn.primitive.name, eqn.params
        if not any(id(v) in self.of_chunks for v in eqn.invars):
            return None
        if name in ELEMENTWISE:
            return params if all(map(self._is_known, eqn.invars)) else None
        if len(eqn.invars) > 1 or 0 in params.get("axes", params.get("dimensions", ())):
            return None
        operand, out, num = eqn.invars[0].aval, eqn.outvars[0].aval, self._num_chunks
        if name in ("reduce_sum", "squeeze"):
            return params
        if name == "broadcast_in_dim" and params["broadcast_dimensions"][:1] == (0,):
            return params | {"shape": (num, *out.shape[1:])}
        is_of_all = name == "slice" and out.shape[0] == operand.shape[0]
        return params | {"limit_indices": (num, *params["limit_indices"][1:])} if is_of_all else None

    def _is_known(self, v: Any) -> bool:
        """Whether a chunk knows a variable: its own, or the same in all rows."""
        return _is_for_all(v) or id(v) in self.of_chunks or id(v) in self._broadcasts

    def _chunk_var(self, v: Any) -> Any:
        """Return what an operand is for chunks."""
        if _is_for_all(v) or id(v) in self.of_chunks:
            return self.of_chunks.get(id(v), v)
        eqn = self._broadcasts[id(v)]
        params = eqn.params | {"shape": (self._num_chunks, *v.aval.shape[1:])}
        return self._bind(eqn, params, *eqn.invars)

    def _note_factors(self, product: Any, x: Any, y: Any) -> None:
        """Note which factor of a product is of chunks."""
        chunks = self.of_chunks.get(id(x))
        rows = x if chunks is None else y
        chunks = self.of_chunks.get(id(y)) if chunks is None else chunks
        if chunks is not None:
            self._factors[id(product)] = chunks, rows

    def _summed_factors(self, eqn: Any) -> tuple | None:
        """Return what an equation multiplies and sums in each row: of chunks, of rows, and weights."""
        if eqn.primitive.name not in ("reduce_sum", "dot_general") or eqn.invars[0].aval.ndim != 2:
            return None
        x, y = eqn.invars[0], eqn.invars[-1]
        if eqn.primitive.name == "reduce_sum":
            return self._factors.get(id(x)) if eqn.params["axes"] == (1,) else None
        form = eqn.params["dimension_numbers"]
        if form == OF_ROWS and y.aval.ndim == 2:
            self._note_factors(eqn.outvars[0], x, y)
            return self._factors.pop(id(eqn.outvars[0]), None)
        factors = self._factors.get(id(x)) if form == WITH_VECTOR and y.aval.ndim == 1 else None
        return (*factors, y) if factors else None

    def _copied(self, x: jax.Array) -> jax.Array:
        return self._spread([x])[0]

    def _bind(self, eqn: Any, params: dict, *operands: Any) -> Any:
        """Add an equation with other parameters and operands; return its variable."""

        def of_chunks(*x):
            return eqn.primitive.bind(*x, **params)

        return self._call(eqn, of_chunks, *operands)

    def _call(self, eqn: Any, function: Callable, *operands: Any, out: Any = None) -> Any:
        """Add a call that stands for the same source line as an equation; return its variable."""
        program = jax.make_jaxpr(jax.jit(function))(*(v.aval for v in operands))
        (new,) = jax_private.open_program(program).eqns
        outvars = new.outvars if out is None else out
        self.eqns.append(
            new.replace(invars=list(operands), outvars=outvars, source_info=eqn.source_info)
        )
        return outvars[0]


def _is_for_all(v: Any) -> bool:
    """Tell whether a variable is one number, or one row for all."""
    return v.aval.shape[:1] in ((), (1,))


def _is_equal_in_rows(eqn: Any) -> bool:
    """Tell whether a broadcast repeats its operand along the first axis."""
    dimensions, operand = eqn.params["broadcast_dimensions"], eqn.invars[0].aval
    return len(eqn.invars) == 1 and (dimensions[:1] != (0,) or operand.shape[0] == 1)


def _row_products(latents: jax.Array, rows: jax.Array, *weights: jax.Array, dtype: Any) -> jax.Array:
    """Sum products of latents [chunks, columns] with rows [rows, columns] in each row."""
    for weight in weights:
        latents = latents * weight[None]
    products = jnp.einsum(
        *("cjk,ck->cj", rows.reshape(len(latents), -1, rows.shape[1]), latents),
        precision="highest",
        preferred_element_type=dtype,
    )
    return products.reshape(len(rows))
