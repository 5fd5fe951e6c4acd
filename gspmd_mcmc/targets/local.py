"""Local latents: leaves of the position that have one row for each row of a plate.

They are stored where the plate's rows are. Where the mesh does not divide the rows they are padded, as
the data are, by copies of the last row; the pad has no density and no momentum, and nobody sees it.

An array that comes from outside has the user's order. Inside, what has pad or the order of groups is
`Padded`, which tells both: in positions, gradients, momenta and metrics. No length tells an order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from gspmd_mcmc.groups.orders import Order
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.padding import (
    Padded,
    is_padded,
    move_rows,
    num_real_rows,
    real_shape,
    values_of,
)
from gspmd_mcmc.targets.streaming.rows import HasLocalRows, Rows
from gspmd_mcmc.tree import PyTree, is_traced, name_of, path_str, pytree, static


@dataclass(frozen=True)
class Local:
    """Which leaves of the parameters are local to a plate; hashable, metadata of the `Plate`.

    Attributes
    ----------
    names
        Names of entries at the top of the parameters: keys of a dict, fields of a tuple or class.
    prefix
        Or a prefix tree of booleans, flattened.
    """

    names: tuple[str, ...] = ()
    prefix: tuple[Any, tuple[bool, ...]] | None = None

    @classmethod
    def read(cls, local: Any) -> "Local":
        """Read what a user wrote: nothing, a name, names, or a prefix tree of booleans."""
        local = (local,) if isinstance(local, str) else local
        local = tuple(sorted(local)) if isinstance(local, set | frozenset) else local
        leaves, treedef = jax.tree.flatten(local)
        if not leaves or (isinstance(local, tuple | list) and all(isinstance(x, str) for x in leaves)):
            return cls(tuple(leaves))
        if not all(isinstance(x, bool | np.bool_) for x in leaves):
            raise TypeError(
                "local: expected names of leaves, or a tree of True and False that is a prefix of the "
                f"parameters, got {local!r}"
            )
        return cls((), (treedef, tuple(bool(x) for x in leaves)))

    def flags(self, params: PyTree) -> list[bool]:
        """Tell for each leaf of the parameters whether it is local."""
        if self.prefix is not None:
            return self._flags_of_prefix(*self.prefix, params)
        paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
        heads = [name_of(path[:1]) if path else "" for path, _ in paths]
        unknown = [name for name in self.names if name not in heads]
        if unknown:
            raise ValueError(
                f"local: the parameters have no leaf {unknown[0]!r}; they have {sorted(set(heads))}"
            )
        return [head in self.names for head in heads]

    def _flags_of_prefix(self, treedef: Any, flags: tuple[bool, ...], params: PyTree) -> list[bool]:
        prefix = jax.tree.unflatten(treedef, flags)
        try:
            full = jax.tree.map(lambda f, sub: jax.tree.map(lambda _: f, sub), prefix, params)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"local: {prefix} is no prefix of the parameters {jax.tree.structure(params)}"
            ) from error
        return jax.tree.leaves(full)

    def __bool__(self) -> bool:
        return bool(self.names) or self.prefix is not None


@pytree
@dataclass(frozen=True, eq=False)
class RowValues:
    """Values that have one row for each padded row of a plate: what a target keeps of local latents."""

    values: jax.Array
    rows: Rows = static()
    axis: int = static(default=0)  # of the values, that the rows are on


def is_row_values(node: Any) -> bool:
    """Tell whether a node of a tree is `RowValues` (for ``is_leaf=``)."""
    return isinstance(node, RowValues)


def wrap(target: HasLocalRows, position: PyTree, values: PyTree) -> PyTree:
    """Mark the values of leaves that have rows as `RowValues`: rows and axes in the user's order."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(values, is_leaf=is_padded)
    axes = target.local_axes(position)

    def wrapped(of: tuple[KeyPath, Any], rows: Rows | None, order: Order | None, axis: int) -> Any:
        if rows is None:
            return of[1]
        return RowValues(jnp.moveaxis(_seen(*of, rows, order), 0, axis), rows, axis)

    found = zip(paths, *_rows_and_orders(target, position), axes, strict=True)
    return jax.tree.unflatten(treedef, [wrapped(*of_leaf) for of_leaf in found])


def rows_first(target: HasLocalRows, params: PyTree) -> PyTree:
    """Move the rows of local leaves from the axis where the model has them to the first."""
    return _moved(target, params, lambda x, axis: move_rows(x, axis, 0))


def rows_in_place(target: HasLocalRows, params: PyTree) -> PyTree:
    """Undo `rows_first`."""
    return _moved(target, params, lambda x, axis: move_rows(x, 0, axis))


def _moved(target: HasLocalRows, params: PyTree, function: Callable) -> PyTree:
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)
    pairs = zip(leaves, target.local_axes(params), strict=True)
    return jax.tree.unflatten(treedef, [function(x, axis) if axis else x for x, axis in pairs])


def _seen(path: KeyPath, leaf: Any, rows: Rows, order: Order | None) -> Any:
    """Return a leaf with rows as an array in the user's order; its pad, if any, comes last."""
    if not is_padded(leaf):
        return leaf
    _check_num_rows(path_str(path), leaf, rows)
    if not leaf.order:
        return leaf.values
    if order is None or leaf.order != order.digest:
        raise _other_order(f"{path_str(path)}: {leaf}", rows)
    return rows.lay(order.see(leaf.values))


def _check_num_rows(name: str, leaf: Any, rows: Rows) -> None:
    if num_real_rows(leaf, name) != rows.num_rows:
        raise ValueError(
            f"{name} is local to a plate of {rows}: expected a leading axis of {rows.num_rows}, got "
            f"{leaf if is_padded(leaf) else f'shape {np.shape(leaf)}'}"
        )


def _other_order(what: str, rows: Rows) -> ValueError:
    return ValueError(
        f"{what} is in the order of other groups than those of the plate of {rows}. Give it in your "
        "own order, which the draws of sample have"
    )


def unwrap(tree: PyTree, axis: int = 0) -> PyTree:
    """Turn `RowValues` into arrays of the real rows; ``axis`` counts the axes before a latent's own."""
    return jax.tree.map(
        lambda x: cut_rows(x.values, x.rows.num_rows, axis + x.axis) if is_row_values(x) else x,
        tree,
        is_leaf=is_row_values,
    )


def fill_pad(tree: PyTree, axis: int) -> PyTree:
    """Turn `RowValues` into arrays whose pad copies the last real row; ``axis`` as in `unwrap`."""

    def filled(x: Any) -> Any:
        if not is_row_values(x):
            return x
        if x.rows.num_rows == x.rows.num_padded:
            return x.values
        return _copy_last(x.values, x.rows.num_rows, axis=axis + x.axis, pins=x.values.sharding)

    return jax.tree.map(filled, tree, is_leaf=is_row_values)


@partial(jax.jit, static_argnames=("axis", "pins"))
def _copy_last(values: jax.Array, num_rows: int, *, axis: int, pins: Any) -> jax.Array:
    last = jax.lax.dynamic_slice_in_dim(values, num_rows - 1, 1, axis)
    row = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis)
    return jax.lax.with_sharding_constraint(jnp.where(row < num_rows, values, last), pins)


def without(tree: PyTree, hidden: Sequence[bool]) -> PyTree:
    """Leave some leaves out: their dict entries go, elsewhere None takes their place."""
    if not any(hidden):
        return tree
    return _strip(tree, jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_padded), hidden))


def _strip(node: PyTree, marks: PyTree) -> PyTree:
    if type(node) is not dict:
        shown = partial(jax.tree.map, lambda x, is_hidden: None if is_hidden else x)
        return shown(node, marks, is_leaf=is_padded)
    flags = {key: jax.tree.leaves(marks[key]) for key in node}
    kept = {key: child for key, child in node.items() if not flags[key] or not all(flags[key])}
    return {key: _strip(child, marks[key]) for key, child in kept.items()}


def arrays(tree: PyTree) -> PyTree:
    """Return a tree with the values of its `Padded` leaves, pad included."""
    return jax.tree.map(values_of, tree, is_leaf=is_padded)


def real_shapes(tree: PyTree, lead: tuple[int, ...] = ()) -> PyTree:
    """Return the shapes of leaves without pad, after the sizes of further axes."""
    return jax.tree.map(lambda x: (*lead, *real_shape(x)), tree, is_leaf=is_padded)


def structure_and_shapes(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the structure of a tree, and the shape of each leaf without pad."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_padded)
    return treedef, list(map(real_shape, leaves))


def positions_last(stacked: PyTree) -> PyTree:
    """Move the first axis of each leaf to the end: of several positions in one."""

    def moved(leaf: Any) -> Any:
        if is_padded(leaf) and leaf.axis != 1:
            raise ValueError(f"expected several positions, with rows on axis 1, got {leaf}")
        values = jnp.moveaxis(values_of(leaf), 0, -1)
        return Padded(values, leaf.num_rows, leaf.order) if is_padded(leaf) else values

    return jax.tree.map(moved, stacked, is_leaf=is_padded)


def held(target: HasLocalRows, tree: PyTree, function: str) -> PyTree:
    """Undo `arrays`, after a function that keeps the rows of local leaves.

    Raises
    ------
    ValueError
        If it has changed the number of rows.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)

    def held_leaf(path: KeyPath, leaf: Any, rows: Rows | None) -> Any:
        if rows is not None and np.shape(leaf)[:1] != (rows.num_padded,):
            raise ValueError(
                f"{function}: {path_str(path)} is local to a plate of {rows}: expected the "
                f"{rows.num_padded} rows that it was given, padding included, got shape "
                f"{np.shape(leaf)}. It must act within each row"
            )
        return leaf if rows is None else rows.hold(leaf)

    pairs = zip(paths, target.local_rows(tree), strict=True)
    return treedef.unflatten([held_leaf(*of_leaf, rows) for of_leaf, rows in pairs])


def rows_of(target: HasLocalRows, position: PyTree) -> list[Rows | None]:
    """Return for each leaf the rows that it is local to, or None."""
    return target.local_rows(position)


def _rows_and_orders(
    target: HasLocalRows, position: PyTree
) -> tuple[list[Rows | None], list[Order | None]]:
    """Return for each leaf the rows that it is local to, or None, and the order in which they lie."""
    return target.local_rows(position), target.local_orders(position)


def is_laid(target: HasLocalRows, tree: PyTree) -> bool:
    """Tell by the types of its local leaves whether a tree is laid out for a target."""
    leaves = jax.tree.leaves(tree, is_leaf=is_padded)
    pairs = zip(leaves, target.local_rows(tree), strict=True)
    return all(rows is None or rows.holds(leaf) for leaf, rows in pairs)


def as_laid(target: HasLocalRows, position: PyTree) -> PyTree:
    """Return a position itself if it is laid out, else laid out."""
    return position if is_laid(target, position) else lay_out(target, position)


def lay_out(target: HasLocalRows, position: PyTree, what: str = "position") -> PyTree:
    """Turn leaves into arrays; pad local ones and lay them over their rows' mesh axes.

    Arrays, and what `place` has padded, are in the user's order. What is laid already stays as it is.

    Raises
    ------
    ValueError
        If a local leaf has another number of rows than its plate, or the order of other groups.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(position, is_leaf=is_padded)
    laid = [
        _lay_out_leaf(f"{what} {path_str(path)}", leaf, rows, order)
        for (path, leaf), rows, order in zip(paths, *_rows_and_orders(target, position), strict=True)
    ]
    return jax.tree.unflatten(treedef, laid)


def _lay_out_leaf(name: str, leaf: Any, rows: Rows | None, order: Order | None) -> Any:
    is_shape = isinstance(values_of(leaf), jax.ShapeDtypeStruct)
    if rows is None and is_padded(leaf):
        raise ValueError(
            f"{name}: got {leaf}, whose pad nothing masks here, as it is not local to a plate; choose "
            "a mesh that divides it, or lay it out whole"
        )
    if rows is None:
        return leaf if is_shape else jnp.asarray(leaf)
    _check_num_rows(name, leaf, rows)
    if is_padded(leaf) and leaf.order not in ("", rows.order):
        raise _other_order(f"{name}: {leaf}", rows)
    if is_shape:
        return rows.hold(rows.lay_shape(values_of(leaf)))
    if rows.holds(leaf):
        array = values_of(leaf)
    elif order is not None and not (is_padded(leaf) and leaf.order):
        array = order.lay(jnp.asarray(values_of(leaf)))
    else:  # on other devices what is laid by groups has another pad
        array = jnp.asarray(values_of(leaf))[: rows.num_rows]
        last = jnp.broadcast_to(array[-1:], (rows.num_padded - rows.num_rows, *array.shape[1:]))
        array = jnp.concatenate([array, last])
    return rows.hold(rows.lay(array))


def zero_pad(target: HasLocalRows, momentum: PyTree) -> PyTree:
    """Set the pad of local leaves to zero: what does not exist does not move."""
    leaves, treedef = jax.tree.flatten(momentum)
    zeroed = [
        x if rows is None or rows.num_rows == rows.num_padded else jnp.where(rows.is_real(x.ndim), x, 0)
        for x, rows in zip(leaves, target.local_rows(momentum), strict=True)
    ]
    return jax.tree.unflatten(treedef, zeroed)


def cut(target: HasLocalRows, position: PyTree) -> PyTree:
    """Return a position in the user's order and without pad, inside a program or outside."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(position, is_leaf=is_padded)

    def seen(of: tuple[KeyPath, Any], rows: Rows | None, order: Order | None) -> Any:
        if rows is None or not is_padded(of[1]):
            return of[1]
        return cut_rows(_seen(*of, rows, order), rows.num_rows, 0)

    found = zip(paths, *_rows_and_orders(target, position), strict=True)
    return jax.tree.unflatten(treedef, [seen(*of_leaf) for of_leaf in found])


def cut_rows(array: jax.Array, num_rows: int, axis: int) -> Any:
    """Cut the pad off an axis; outside jit that leaves an array on the host, as no mesh divides it."""
    if num_rows == array.shape[axis]:
        return array
    real = (*(slice(None),) * axis, slice(num_rows))
    return array[real] if is_traced(array) else np.asarray(to_host(array))[real]
