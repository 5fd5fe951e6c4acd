"""Arrays that a function closes over, with names that its author knows."""

import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.functions.reads import MISSING, attributes_of, part_of, reads_of

MOST_OBJECTS = 20_000  # a search that has seen this many is given up: what it found is returned


def closed_over(function: Any, args: tuple = ()) -> list[tuple[str, Any]]:
    """Find arrays that a function reads from outside: (where, array), each array once.

    Looked through are closures, globals that the code names, bound methods, partials, defaults, and
    the attributes and items of the objects met there; and the same of functions that are in the
    arguments. The arguments' own arrays are not closed over.
    """
    leaves = {id(leaf) for leaf in jax.tree.leaves(args)}
    seen: dict[int, Any] = {}
    return [
        *_arrays("", function, seen),
        *((where, array) for where, array in _arrays("args", args, seen) if id(array) not in leaves),
    ]


def _arrays(where: str, root: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """Give the arrays below an object, the nearest first, and keep what was seen."""
    queue = deque([(where, root)])
    while queue and len(seen) < MOST_OBJECTS:
        where, node = queue.popleft()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        is_numpy = isinstance(node, np.ndarray) and node.dtype.names is None
        if isinstance(node, jax.Array) or (is_numpy and node.dtype.kind in "biufcV"):
            yield where, node
        else:
            queue.extend(_inside(where, node))


def _inside(where: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Give the parts of an object, each with its name."""
    if isinstance(node, types.FunctionType):
        reads = [(read.where, read.value) for read in reads_of(node)]
        yield from ((where, value) for where, value in reads if value is not MISSING)
    elif isinstance(node, types.MethodType):
        yield from ((where, node.__func__), (where, node.__self__))
    elif isinstance(node, functools.partial):
        yield where, node.func
        name = f"given to a partial of {getattr(node.func, '__qualname__', type(node.func).__name__)}"
        yield from ((f"args[{i}], {name}", x) for i, x in enumerate(node.args))
        yield from ((f"{keyword}, {name}", x) for keyword, x in node.keywords.items())
    elif isinstance(node, dict):
        yield from ((part_of(where, f"[{key!r}]"), x) for key, x in node.items())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from ((part_of(where, f"[{i}]"), x) for i, x in enumerate(node))
    elif not isinstance(node, type | types.ModuleType | str | bytes | int | float | complex):
        attributes = {read.key: read.value for read in attributes_of(node)}
        if "__wrapped__" in attributes:  # a jitted function
            yield where, attributes["__wrapped__"]
        else:
            owner = where or type(node).__name__
            yield from ((part_of(owner, f".{name}"), x) for name, x in attributes.items())
