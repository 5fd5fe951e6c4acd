"""Pytrees that can be called, as the modules of neural network libraries are.

As a position a module is its arrays; as a log density it is a function whose arrays are arguments.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc.placement.padding import is_padded, real_rows
from gspmd_mcmc.tree import PyTree


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Constant:
    """Something that is no array, such as a number that shapes depend on, kept out of the leaves."""

    value: Any

    def _key(self) -> Any:
        is_plain = isinstance(self.value, bool | int | float | complex | str | np.generic)
        return (type(self.value), self.value) if is_plain else id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def hold(thing: PyTree) -> PyTree:
    """Return a pytree whose leaves are its arrays; all else is metadata."""
    return jax.tree.map(lambda x: x if _is_array(x) else Constant(x), thing, is_leaf=is_padded)


def release(held: PyTree) -> PyTree:
    """Undo `hold`, and cut the pad off `Padded` arrays."""
    return jax.tree.map(
        lambda x: x.value if isinstance(x, Constant) else real_rows(x),
        held,
        is_leaf=lambda x: isinstance(x, Constant) or is_padded(x),
    )


def is_module(thing: Any) -> bool:
    """Tell a pytree with arrays from a function; a `Partial` is a function by contract."""
    if isinstance(thing, Partial) or jax.tree_util.all_leaves([thing]):
        return False
    return any(_is_array(leaf) for leaf in jax.tree.leaves(thing))


def call_of(module: PyTree) -> Partial:
    """Return a module's call as a function whose arrays enter programs as arguments."""
    return Partial(call_module, hold(module))


def call_module(held: PyTree, /, *args: Any, **keywords: Any) -> Any:
    """Call a module; what is held of it is the first argument."""
    return release(held)(*args, **keywords)


def without_arrays(module: PyTree) -> PyTree:
    """Return a module with None for its arrays: what else its call reads."""
    return jax.tree.map(lambda leaf: None if _is_array(leaf) else leaf, module)


def _is_array(leaf: Any) -> bool:
    """Tell arrays, and shapes that stand for them, from numbers, on which shapes may depend."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) or is_padded(leaf)
