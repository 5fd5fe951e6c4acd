"""The functions that users write, as a target holds and checks them."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.functions.function import Function, function_of
from gspmd_mcmc.functions.modules import call_module, call_of, called_class, is_module, without_arrays
from gspmd_mcmc.placement.numbers import check_leaves
from gspmd_mcmc.tree import PyTree


def as_partial(function: Callable) -> Function:
    """Wrap a function as a pytree, so that a `Partial`'s arrays enter programs as arguments."""
    if not callable(function):
        raise TypeError(f"expected a function, got {type(function).__name__}")
    if is_module(function):
        return function_of(call_of(function), about=without_arrays(function))
    if isinstance(function, Partial):
        check_leaves(f"bound by {name_of_function(function)}: ", function)
    return function_of(function)


def name_of_function(function: Callable) -> str:
    """Return what a function, or the one that a `Partial` binds, is called; of a module its class."""
    inner = getattr(function, "func", function)
    inner = called_class(function) if inner is call_module else inner
    return getattr(inner, "__name__", repr(inner))


def summands(function: Callable, value: PyTree) -> PyTree:
    """Check that a log density's summands are floating arrays."""
    name = name_of_function(function)
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves:
        raise TypeError(f"{name}: expected a scalar or a tree of summands, got {value!r}")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name}: expected floating summands, got dtype {jnp.result_type(leaf)} at "
                f"{tree.path_str(path)}"
            )
    return jax.tree.map(jnp.asarray, value)


@contextlib.contextmanager
def noting_shapes(function: Callable, **given: PyTree) -> Iterator[None]:
    """Add to an error that a user's function raises what it was called with."""
    try:
        yield
    except Exception as error:
        shapes = {name: jax.tree.map(_shape, x) for name, x in given.items()}
        told = ", ".join(f"{name} {x}" for name, x in shapes.items())
        error.add_note(f"{name_of_function(function)} was called with {told}")
        raise


def _shape(leaf: PyTree) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
