"""Arrays that a function closes over, with names that its author knows."""

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

MOST_OBJECTS = 20_000  # a search that has seen so many is given up: what it found is returned
_LIBRARIES = (
    "jax",
    "jaxlib",
    "numpy",
    "scipy",
    "builtins",
)  # their functions close over no user's data


def closed_over(function: Any) -> list[tuple[str, Any]]:
    """Find arrays that a function reads from outside: (where, array), each array once.

    Looked through are closures, globals that the code names, bound methods, partials, and the
    attributes and items of the objects met there.
    """
    found: dict[int, tuple[str, Any]] = {}
    seen: dict[int, Any] = {}
    queue: list[tuple[str, Any]] = [("", function)]
    while queue and len(seen) < MOST_OBJECTS:
        where, node = queue.pop(0)
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, jax.Array | np.ndarray):
            found[id(node)] = (where, node)
        else:
            queue += _inside(where, node)
    return list(found.values())


def _inside(where: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Give the parts of an object, each with its name."""
    if isinstance(node, types.FunctionType):
        if (node.__module__ or "").split(".")[0] not in _LIBRARIES:
            yield from _of_function(node)
    elif isinstance(node, types.MethodType):
        yield from ((where, node.__func__), (where, node.__self__))
    elif isinstance(node, functools.partial):
        yield where, node.func
        yield from ((f"{where}.args[{i}]", x) for i, x in enumerate(node.args))
        yield from ((f"{where}.{name}", x) for name, x in node.keywords.items())
    elif isinstance(node, dict):
        yield from ((f"{where}[{key!r}]", x) for key, x in node.items())
    elif isinstance(node, list | tuple | set | frozenset):
        yield from ((f"{where}[{i}]", x) for i, x in enumerate(node))
    elif not isinstance(node, type | types.ModuleType | str | bytes | int | float | complex):
        yield from _of_object(where, node)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = function.__qualname__
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{variable}, closed over by {name}", cell.cell_contents
        except ValueError:  # a variable that is not bound yet
            continue
    for variable in sorted(_names(function.__code__)):
        if variable in function.__globals__:
            yield f"{variable}, a global that {name} reads", function.__globals__[variable]
    defaults = function.__defaults__ or ()
    yield from (
        (f"a default of {name}", x) for x in (*defaults, *(function.__kwdefaults__ or {}).values())
    )
    if wrapped := getattr(function, "__wrapped__", None):
        yield "", wrapped


def _names(code: types.CodeType) -> set[str]:
    """Names that code and the functions defined in it look up."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner)) if inner else set(code.co_names)


def _of_object(where: str, node: Any) -> Iterator[tuple[str, Any]]:
    if wrapped := getattr(node, "__wrapped__", None):  # a jitted function
        yield where, wrapped
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
    else:
        names = list(getattr(node, "__dict__", {}))
    for name in names:
        owner = where or type(node).__name__
        yield f"{owner}.{name}", getattr(node, name, None)
