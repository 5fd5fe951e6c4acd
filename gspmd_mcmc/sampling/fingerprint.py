"""What a target is, by shapes and names: whether a checkpoint is of this model."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.tree_util import Partial, tree_leaves_with_path

from gspmd_mcmc.targets.local import rows_of
from gspmd_mcmc.targets.rows import Rows
from gspmd_mcmc.tree import PyTree, path_str

MOST_LINES = 20


def fingerprint(target: Any, positions: PyTree) -> dict[str, str]:
    """Return what a run is about: name of a part to its shape and dtype, or to its function or class.

    Shapes are those of real rows, as pads depend on the mesh. Values are not looked at.

    Parameters
    ----------
    target
        The target.
    positions
        Leaves [chains, ...], arrays or shapes.
    """
    found = {f"target{path}": what for path, what in _parts(target, "", None)}
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
    leaves = tree_leaves_with_path(one)
    for (path, leaf), rows in zip(leaves, rows_of(target, one), strict=True):
        shape = list(leaf.shape) if rows is None else [rows.num_rows, *leaf.shape[1:]]
        found[f"position{path_str(path)}"] = f"{leaf.dtype}{shape}{'' if rows is None else ' local'}"
    return found


def require_same(saved: dict[str, str], given: dict[str, str], path: Any) -> None:
    """Raise, part by part, where a checkpoint is of another model.

    Raises
    ------
    ValueError
        If any part differs, is missing, or is new.
    """
    names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
    if not names:
        return
    lines = [f"  {n}: saved {saved.get(n, 'nothing')}, given {given.get(n, 'nothing')}" for n in names]
    more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    raise ValueError(
        f"target: the run in {path} is of another model. What differs:\n"
        + "\n".join(lines[:MOST_LINES] + more)
        + "\nGive the target that the run was begun with, or begin another run in another folder"
    )


def plates(target: Any) -> dict[str, list]:
    """Return how the rows of each plate are cut: [rows, padded rows, mesh axes, rows of a tile]."""
    return {
        path: [node.rows.num_rows, node.rows.num_padded, list(node.rows.axes), node.tile_rows]
        for path, node in _nodes(target, "")
        if _rows(node) is not None and hasattr(node, "tile_rows")
    }


def _parts(node: Any, path: str, rows: Rows | None) -> Iterator[tuple[str, str]]:
    if isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        yield path, _shape(node, rows)
    elif isinstance(node, Partial):
        yield path, _name(node.func)
        yield from _parts(node.args, path, rows)
        yield from _parts(node.keywords, path, rows)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type | Rows):
        yield path, _name(type(node))
        for name, child in _children(node):
            yield from _parts(child, f"{path}{name}", _rows(node) or rows)
    elif isinstance(node, dict | list | tuple):
        for name, child in _children(node):
            yield from _parts(child, f"{path}{name}", rows)


def _nodes(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, node
    for name, child in _children(node):
        yield from _nodes(child, f"{path}{name}")


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, dict):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if isinstance(node, list | tuple):
        return [(f"[{i}]", child) for i, child in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type | Rows):
        return [(f".{f.name}", getattr(node, f.name)) for f in dataclasses.fields(node)]
    return []


def _rows(node: Any) -> Rows | None:
    rows = getattr(node, "rows", None)
    return rows if isinstance(rows, Rows) else None


def _shape(leaf: Any, rows: Rows | None) -> str:
    shape = list(leaf.shape)
    if rows is not None and shape and shape[0] == rows.num_padded:
        shape[0] = rows.num_rows
    return f"{leaf.dtype}{shape}"


def _name(thing: Any) -> str:
    """Name a function or class; without its module, as a notebook's code may move to a file."""
    inner = getattr(thing, "func", thing)
    return getattr(inner, "__qualname__", type(inner).__qualname__)
