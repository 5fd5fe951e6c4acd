"""Arrays that a function closes over, with names that its author knows."""

import functools
import itertools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

MOST_OBJECTS = 20_000  # a search that has seen so many is given up: what it found is returned
_LIBRARIES = ("jax", "jaxlib", "numpy", "scipy")  # their globals are no user's data


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
        if isinstance(node, jax.Array) or _is_numbers(node):
            yield where, node
        else:
            queue.extend(_inside(where, node))


def _is_numbers(node: Any) -> bool:
    return isinstance(node, np.ndarray) and node.dtype.kind in "biufcV" and node.dtype.names is None


def _inside(where: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Give the parts of an object, each with its name."""
    if isinstance(node, types.FunctionType):
        yield from _of_function(node)
    elif isinstance(node, types.MethodType):
        yield from ((where, node.__func__), (where, node.__self__))
    elif isinstance(node, functools.partial):
        yield where, node.func
        name = f"given to a partial of {getattr(node.func, '__qualname__', type(node.func).__name__)}"
        yield from ((f"args[{i}], {name}", x) for i, x in enumerate(node.args))
        yield from ((f"{keyword}, {name}", x) for keyword, x in node.keywords.items())
    elif isinstance(node, dict):
        yield from ((_at(where, f"[{key!r}]"), x) for key, x in node.items())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from ((_at(where, f"[{i}]"), x) for i, x in enumerate(node))
    elif not isinstance(node, type | types.ModuleType | str | bytes | int | float | complex):
        yield from _of_object(where, node)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__qualname__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{variable}, closed over by {name}", cell.cell_contents
        except ValueError:  # a variable that is not bound yet
            continue
    if function.__globals__.get("__name__", "").split(".")[0] not in _LIBRARIES:
        for variable in sorted(_names(function.__code__)):
            if variable in function.__globals__:
                yield f"{variable}, a global that {name} reads", function.__globals__[variable]
    for variable, default in _defaults(function):
        yield f"{variable}, a default of {name}", default
    yield "", vars(function).get("__wrapped__")


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: types.CodeType) -> set[str]:
    """Names that code and the functions defined in it look up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner)) if inner else set(code.co_names)


def _of_object(where: str, node: Any) -> Iterator[tuple[str, Any]]:
    attributes = _attributes(node)
    if "__wrapped__" in attributes:  # a jitted function
        yield where, attributes["__wrapped__"]
    else:
        owner = where or type(node).__name__
        yield from ((_at(owner, f".{name}"), x) for name, x in attributes.items())


def _at(where: str, part: str) -> str:
    """Write a part: of ``data, closed over by f`` it is ``data['x'], closed over by f``."""
    name, comma, how = where.partition(", ")
    return f"{name}{part}{comma}{how}"


def _attributes(node: Any) -> dict[str, Any]:
    """Return what an object keeps, in its dictionary and in its slots."""
    slots = (vars(c).get("__slots__", ()) for c in type(node).__mro__)
    names = itertools.chain.from_iterable((s,) if isinstance(s, str) else s for s in slots)
    kept = {name: getattr(node, name, None) for name in names if not name.startswith("__")}
    return kept | getattr(node, "__dict__", {})
