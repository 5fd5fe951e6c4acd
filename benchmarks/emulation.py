"""Matrix products as GPUs and TPUs compute them, on a CPU.

Such devices round the factors of a float32 product, as its precision says, and add up in float32. Here
the factors of each product of a program are rounded so: of forward and backward passes, in loops and in
calls. Products that ask for full precision have it, unless a test wants a device that does not hear.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

import gspmd_mcmc as gm
from gspmd_mcmc.tree import PyTree, static

# Explicit bits of the mantissa of a factor's terms, and their number: two terms make three products.
TERMS = {"tensorfloat32": (10, 1), "bfloat16_3x": (7, 2), "bfloat16": (7, 1), "float32": (23, 1)}
DEFAULT, HIGH, HIGHEST = jax.lax.Precision
OF_PLATFORM = {
    "cpu": {DEFAULT: "float32", HIGH: "float32"},
    "gpu": {DEFAULT: "tensorfloat32", HIGH: "tensorfloat32"},
    "tpu": {DEFAULT: "bfloat16", HIGH: "bfloat16_3x"},
}


@gm.pytree
@dataclass(frozen=True, eq=False)
class Emulated(gm.Target):
    """A target on a device that is not there. All its latents are shared.

    Attributes
    ----------
    target
        What is computed.
    on
        The platform: "gpu" or "tpu".
    full
        The precision of products that ask for full precision: another one is a negative control.
    """

    target: gm.Target
    on: str = static()
    full: str = static(default="float32")

    @property
    def platform(self) -> str:
        """The platform that is emulated: kernels ask for its precisions."""
        return self.on

    def terms(self, position: PyTree) -> PyTree:
        """Return the target's terms."""
        return self._emulated("terms", position)

    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return the target's terms and their gradient."""
        return self._emulated("terms_and_grad", position)

    def grad(self, position: PyTree) -> PyTree:
        """Return the gradient alone."""
        return self._emulated("grad", position)

    def _emulated(self, method: str, position: PyTree) -> Any:
        function = getattr(type(self.target), method)
        return emulated(function, self.on, self.full)(self.target, position)


def emulated(function: Callable, platform: str, full: str = "float32") -> Callable:
    """Return a function whose products are those of a platform; one without products is refused."""
    names = OF_PLATFORM[platform] | {HIGHEST: full}

    def run(*args):
        program, out = jax.make_jaxpr(function, return_shape=True)(*args)
        found: list[str] = []
        rounded = _with_products(program, names, found)
        if not found:
            raise ValueError(f"{platform}: the function has no matrix product, so nothing is emulated")
        leaves = jaxpr_as_fun(rounded)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return run


def _with_products(program: Any, names: dict, found: list[str]) -> Any:
    """Return a program that rounds; add the precision of each product to those that were found."""
    if not isinstance(program, Jaxpr):  # a closed one, which is the same class since JAX 0.12
        return program.replace(jaxpr=_with_products(program.jaxpr, names, found))
    return program.replace(eqns=[_with_product(eqn, names, found) for eqn in program.eqns])


def _with_product(eqn: Any, names: dict, found: list[str]) -> Any:
    if eqn.primitive is jax.lax.dot_general_p:
        precision = eqn.params["precision"]
        name = names[DEFAULT if precision is None else precision[0]]
        found.append(name)
        return _call(partial(_product, name, eqn.params), eqn, eqn.invars)
    params = jax.tree.map(
        lambda x: _with_products(x, names, found) if isinstance(x, ClosedJaxpr | Jaxpr) else x,
        eqn.params,
        is_leaf=lambda x: not isinstance(x, dict | tuple) or x == (),
    )
    if params.get("branches_platforms"):  # a CPU's form of a function, and that of others
        return _call(jaxpr_as_fun(params["branches"][-1]), eqn, eqn.invars[1:])
    return eqn.replace(params=params)


def _call(function: Callable, eqn: Any, invars: list) -> Any:
    """Return a call of a function in an equation's place."""
    (new,) = jax.make_jaxpr(jax.jit(lambda *args: function(*args)))(*(v.aval for v in invars)).eqns
    return new.replace(invars=invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _product(name: str, params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    mantissa, number = TERMS[name]
    x_terms, y_terms = (_terms(factor, mantissa, number) for factor in (x, y))
    product = partial(jax.lax.dot_general_p.bind, **params)
    pairs = [(i, j) for i in range(number) for j in range(number - i)]
    return reduce(jnp.add, (product(x_terms[i], y_terms[j]) for i, j in pairs))


def _terms(x: jax.Array, mantissa: int, number: int) -> list[jax.Array]:
    terms = []
    for _ in range(number):
        terms.append(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa))
        x = x - terms[-1]
    return terms
