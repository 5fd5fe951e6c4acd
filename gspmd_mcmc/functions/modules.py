"""Pytrees that can be called, as the modules of neural network libraries are.

As a position a module is its arrays; as a log density it is a function whose arrays are arguments.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc.tree import PyTree, pytree, static


def is_module(thing: Any) -> bool:
    """Tell a pytree with arrays from a function; a `Partial`, a function by contract, is none."""
    if isinstance(thing, Partial) or jax.tree_util.all_leaves([thing]):
        return False
    return any(_is_array(leaf) for leaf in jax.tree.leaves(thing))


def call_of(module: PyTree) -> Partial:
    """Return a module's call as a function whose arrays enter programs as arguments."""
    leaves, treedef = jax.tree.flatten(module)
    arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
    rest = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
    return Partial(call_module, _Parts(arrays, rest, treedef))


def called_class(call: Any) -> type:
    """Return the class of the module whose call, as `call_of` gives it, this is."""
    return call.args[0].treedef.node_data()[0]


def without_arrays(module: PyTree) -> PyTree:
    """Return a module with None for its arrays: what its call reads besides."""
    return jax.tree.map(lambda leaf: None if _is_array(leaf) else leaf, module)


@pytree
@dataclass(frozen=True, eq=False)
class _Parts:
    """A module's leaves: arrays, and what is no array and is part of the program."""

    arrays: list
    rest: tuple = static()
    treedef: Any = static()

    def joined(self) -> PyTree:
        leaves = [b if a is None else a for a, b in zip(self.arrays, self.rest, strict=True)]
        return self.treedef.unflatten(leaves)


def call_module(parts: _Parts, /, *args: Any, **keywords: Any) -> Any:
    """Put a module together and call it."""
    return parts.joined()(*args, **keywords)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
