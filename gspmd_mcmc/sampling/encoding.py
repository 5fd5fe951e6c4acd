"""Trees as a JSON document and a list of arrays, and back: what a checkpoint is made of.

Settings and states are frozen dataclasses, tuples, dicts and numbers; the document names their classes
and their functions, which are imported again, so nothing is pickled. An array is its place in the list.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial

from gspmd_mcmc.targets.retracing import Function
from gspmd_mcmc.tree import PyTree, fill

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def encode(tree: PyTree) -> tuple[Any, list[Any]]:
    """Return a JSON document of a tree, and its arrays in the order in which the document has them.

    Raises
    ------
    TypeError
        If there is something that can be written neither as a number nor by name: a function that is
        not at module level, or an object of a class that is no dataclass.
    """
    arrays: list[Any] = []
    return _encode(tree, arrays), arrays


def decode(document: Any, arrays: Sequence[Any]) -> PyTree:
    """Return the tree of a document, with these arrays in it."""
    if not isinstance(document, dict):
        return document
    kind, content = next(iter(document.items()))
    return _DECODERS[kind](content, document, arrays)


def _encode(node: Any, arrays: list[Any]) -> Any:
    if node is None or type(node) in (bool, int, float, str):
        return node
    if isinstance(node, ARRAYS):
        arrays.append(node)
        return {"array": len(arrays) - 1}
    if isinstance(node, Partial):
        args, keywords = (_encode(part, arrays) for part in (node.args, node.keywords))
        kind = "function" if isinstance(node, Function) else "partial"
        return {kind: name_of(node.func), "args": args, "keywords": keywords}
    if isinstance(node, dict) and type(node) is dict:
        return {"dict": [[_encode(k, arrays), _encode(v, arrays)] for k, v in node.items()]}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return {"namedtuple": name_of(type(node)), "items": [_encode(x, arrays) for x in node]}
    if type(node) in (tuple, list):
        return {type(node).__name__: [_encode(x, arrays) for x in node]}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [f.name for f in dataclasses.fields(node)]
        fields = {name: _encode(getattr(node, name), arrays) for name in names}
        return {"class": name_of(type(node)), "fields": fields}
    if callable(node):
        return {"name": name_of(node)}
    raise TypeError(
        f"a checkpoint cannot hold a {type(node).__name__}; it holds numbers, arrays, dicts, lists, "
        "tuples and dataclasses of those"
    )


_DECODERS: dict[str, Callable[[Any, Any, Sequence[Any]], Any]] = {
    "array": lambda i, _, arrays: arrays[i],
    "name": lambda name, _, arrays: named(name),
    "dict": lambda items, _, arrays: {decode(k, arrays): decode(v, arrays) for k, v in items},
    "list": lambda items, _, arrays: [decode(x, arrays) for x in items],
    "tuple": lambda items, _, arrays: tuple(decode(x, arrays) for x in items),
    "namedtuple": lambda name, more, arrays: named(name)(*(decode(x, arrays) for x in more["items"])),
    "class": lambda name, more, arrays: fill(
        named(name), {k: decode(v, arrays) for k, v in more["fields"].items()}
    ),
    "function": lambda name, more, arrays: _bound(Function, name, more, arrays),
    "partial": lambda name, more, arrays: _bound(Partial, name, more, arrays),
}


def _bound(kind: type[Partial], name: str, more: Any, arrays: Sequence[Any]) -> Partial:
    return kind(named(name), *decode(more["args"], arrays), **decode(more["keywords"], arrays))


def name_of(thing: Any) -> str:
    """Return ``module:name`` of a function or class that can be imported again.

    Raises
    ------
    TypeError
        If it cannot: it was made inside a function.
    """
    name = f"{getattr(thing, '__module__', None)}:{getattr(thing, '__qualname__', None)}"
    try:
        found = named(name)
    except (ImportError, AttributeError):
        found = None
    if found is not thing:
        raise TypeError(
            f"a checkpoint cannot hold {thing!r}: expected a function or class at module level, which "
            "a resumed run can import; bind arrays to one by jax.tree_util.Partial"
        )
    return name


def named(name: str) -> Any:
    """Import what ``module:name`` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
