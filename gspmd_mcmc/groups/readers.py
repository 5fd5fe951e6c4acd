"""Rows of groups that no process holds all of: each reads those that its devices hold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd_mcmc.placement.numbers import check_numbers, converted, refuse_sparse
from gspmd_mcmc.tree import PyTree, path_str

RowReader = Callable[[np.ndarray], PyTree]


def rows_here(laid_row: np.ndarray, sharding: NamedSharding | None) -> np.ndarray:
    """Return which rows the devices of this process hold, ascending."""
    if sharding is None:
        return np.unique(laid_row)
    indices = sharding.addressable_devices_indices_map(laid_row.shape).values()
    parts = {_range(index, len(laid_row)) for index in indices}
    return np.unique(np.concatenate([laid_row[a:b] for a, b in parts]))


def check_shapes(shapes: PyTree, num: int, of_what: str) -> None:
    """Check that the shapes of what a reader gives are those of all rows."""
    for path, like in jax.tree_util.tree_leaves_with_path(shapes):
        if like.shape[:1] != (num,):
            raise ValueError(
                f"shapes {path_str(path)}: expected [{num}, ...], as there are {num} {of_what}, got "
                f"{like.shape}"
            )


def own_rows(
    what: str, tree: PyTree, here: np.ndarray, num: int, told_by: str
) -> tuple[PyTree, RowReader]:
    """Return the shapes of all rows, of which this process gives its own, and a reader of these."""
    refuse_sparse(f"{what} ", tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if np.shape(leaf)[:1] != here.shape:
            raise ValueError(
                f"{what} {path_str(path)}: expected shape [{len(here)}, ...], the rows of this "
                f"process, as groups.{told_by}() has them, got {np.shape(leaf)}"
            )

    def reader(wanted: np.ndarray) -> PyTree:
        return jax.tree.map(lambda x: x[np.searchsorted(here, wanted)], tree)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype), tree)
    return shapes, reader


def read_laid(
    reader: RowReader, shapes: PyTree, laid_row: np.ndarray, sharding: NamedSharding | None
) -> PyTree:
    """Lay rows that a reader returns, each device's by one call.

    Parameters
    ----------
    reader
        ``reader(rows)`` returns the rows of those numbers, which ascend.
    shapes
        A tree of `jax.ShapeDtypeStruct` [rows, ...].
    laid_row
        For each place, the number of the row there.
    sharding
        Of the places; None: one device.

    Raises
    ------
    ValueError
        If the reader returns another tree, or other rows, than asked for.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    blocks: dict[tuple[int, int], list[np.ndarray]] = {}

    def block(start: int, stop: int) -> list[np.ndarray]:
        if (start, stop) not in blocks:
            wanted, where = np.unique(laid_row[start:stop], return_inverse=True)
            found, got = jax.tree.flatten(reader(wanted))
            if got != treedef:
                raise ValueError(f"reader: expected a tree like the shapes, {treedef}, got {got}")
            pairs = zip(named, found, strict=True)
            parts = [_checked(path_str(path), like, x, len(wanted)) for (path, like), x in pairs]
            blocks[start, stop] = [part[where] for part in parts]
        return blocks[start, stop]

    num = len(laid_row)
    if sharding is None:
        return treedef.unflatten(map(jnp.asarray, block(0, num)))

    def array(i: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(
            (num, *like.shape[1:]), sharding, lambda index: block(*_range(index, num))[i]
        )

    return treedef.unflatten([array(i, like) for i, (_, like) in enumerate(named)])


def _range(index: Any, num: int) -> tuple[int, int]:
    start, stop, _ = index[0].indices(num)
    return start, stop


def _checked(name: str, like: jax.ShapeDtypeStruct, found: Any, num: int) -> np.ndarray:
    """Return the rows that were read of a leaf, in the dtype that they have on devices."""
    found, expected = np.asanyarray(found), (num, *like.shape[1:])
    if found.shape != expected:
        raise ValueError(
            f"rows {name}: the reader was asked for {num} rows: expected shape {expected}, got "
            f"{found.shape}"
        )
    check_numbers(f"rows {name}", found, share=num / like.shape[0])
    return converted(f"rows {name}", found, jax.dtypes.canonicalize_dtype(like.dtype))
