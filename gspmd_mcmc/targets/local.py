"""Local latents: leaves of the position that have one row for each row of a plate.

They lie where the plate's rows lie. Where the mesh does not divide the rows they are padded, as the
data are, by copies of the last row; the pad has no density and no momentum, and nobody sees it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.laid_groups import Order
from gspmd_mcmc.placement.padding import Padded, is_padded, num_real_rows, values_of
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
    leaves, treedef = jax.tree.flatten(values)
    axes = target.local_axes(position)

    def wrapped(x: jax.Array, rows: Rows | None, order: Order | None, axis: int) -> Any:
        if rows is None:
            return x
        seen = x if order is None else rows.lay(order.see(x))
        return RowValues(jnp.moveaxis(seen, 0, axis), rows, axis)

    found = zip(leaves, *_rows_and_orders(target, position), axes, strict=True)
    return jax.tree.unflatten(treedef, [wrapped(*of_leaf) for of_leaf in found])


def rows_first(target: HasLocalRows, params: PyTree) -> PyTree:
    """Move the rows of local leaves from the axis where the model has them to the first."""
    return _moved(target, params, lambda x, axis: jnp.moveaxis(x, axis, 0))


def rows_in_place(target: HasLocalRows, params: PyTree) -> PyTree:
    """Undo `rows_first`."""
    return _moved(target, params, lambda x, axis: jnp.moveaxis(x, 0, axis))


def _moved(target: HasLocalRows, params: PyTree, function: Callable) -> PyTree:
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)
    pairs = zip(leaves, target.local_axes(params), strict=True)
    return jax.tree.unflatten(treedef, [function(x, axis) if axis else x for x, axis in pairs])


def unwrap(tree: PyTree, axis: int = 0) -> PyTree:
    """Turn `RowValues` into arrays of the real rows; ``axis`` counts the axes before a latent's own."""
    return jax.tree.map(
        lambda x: cut_rows(x.values, x.rows, axis + x.axis) if is_row_values(x) else x,
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
    return _strip(tree, jax.tree.unflatten(jax.tree.structure(tree), hidden))


def _strip(node: PyTree, marks: PyTree) -> PyTree:
    if type(node) is not dict:
        return jax.tree.map(lambda x, is_hidden: None if is_hidden else x, node, marks)
    flags = {key: jax.tree.leaves(marks[key]) for key in node}
    kept = {key: child for key, child in node.items() if not flags[key] or not all(flags[key])}
    return {key: _strip(child, marks[key]) for key, child in kept.items()}


def rows_of(target: HasLocalRows, position: PyTree) -> list[Rows | None]:
    """Return for each leaf the rows that it is local to, or None."""
    return target.local_rows(position)


def _rows_and_orders(
    target: HasLocalRows, position: PyTree
) -> tuple[list[Rows | None], list[Order | None]]:
    """Return for each leaf the rows that it is local to, or None, and the order in which they lie."""
    return target.local_rows(position), target.local_orders(position)


def lay_out(target: HasLocalRows, position: PyTree, what: str = "position") -> PyTree:
    """Turn leaves into arrays; pad local ones and lay them over their rows' mesh axes.

    Raises
    ------
    ValueError
        If a local leaf has another number of rows than its plate.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(position, is_leaf=is_padded)
    laid = [
        _lay_out_leaf(f"{what} {path_str(path)}", leaf, rows, order)
        for (path, leaf), rows, order in zip(paths, *_rows_and_orders(target, position), strict=True)
    ]
    return jax.tree.unflatten(treedef, laid)


def _lay_out_leaf(name: str, leaf: Any, rows: Rows | None, order: Order | None) -> Any:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    if rows is None:
        return leaf if is_shape else jnp.asarray(leaf)
    array, num_real = values_of(leaf), num_real_rows(leaf)
    if num_real not in ((rows.num_rows,) if is_padded(leaf) else (rows.num_rows, rows.num_padded)):
        raise ValueError(
            f"{name} is local to a plate of {rows}: expected a leading axis of {rows.num_rows}, got "
            f"{leaf if isinstance(leaf, Padded) else f'shape {np.shape(array)}'}"
        )
    if isinstance(array, jax.ShapeDtypeStruct):
        return rows.lay_shape(array)
    if is_padded(leaf) and order is not None:  # in the user's order: `place` knows no groups
        return rows.lay(order.lay(jnp.asarray(array)[:num_real]))
    missing = rows.num_padded - np.shape(array)[0]
    if missing and order is not None:
        array = order.lay(jnp.asarray(array))
    elif missing:
        array = jnp.asarray(array)
        last = jnp.broadcast_to(array[-1:], (missing, *array.shape[1:]))
        array = jnp.concatenate([array, last])
    return rows.lay(array)


def zero_pad(target: HasLocalRows, momentum: PyTree) -> PyTree:
    """Set the pad of local leaves to zero: what does not exist does not move."""
    return _map_padded(target, momentum, lambda x, rows, _: jnp.where(rows.is_real(x.ndim), x, 0))


def cut(target: HasLocalRows, position: PyTree) -> PyTree:
    """Cut the pad of local leaves off, inside a program or outside, and undo the order of groups."""

    def seen(x: Any, rows: Rows, order: Order | None) -> Any:
        if np.shape(x)[0] == rows.num_rows:  # a start as the user wrote it, in the user's order
            return x
        return cut_rows(x if order is None else order.see(x), rows, 0)

    return _map_padded(target, position, seen)


def _map_padded(target: HasLocalRows, tree: PyTree, function: Callable) -> PyTree:
    """Apply ``function(leaf, rows, order)`` to the local leaves that have a pad."""
    leaves, treedef = jax.tree.flatten(tree)
    mapped = [
        x if rows is None or rows.num_rows == rows.num_padded else function(x, rows, order)
        for x, rows, order in zip(leaves, *_rows_and_orders(target, tree), strict=True)
    ]
    return jax.tree.unflatten(treedef, mapped)


def cut_rows(array: jax.Array, rows: Rows, axis: int) -> Any:
    """Cut the pad off an axis; outside jit that leaves an array on the host, as no mesh divides it."""
    if rows.num_rows == rows.num_padded:
        return array
    real = (*(slice(None),) * axis, slice(rows.num_rows))
    return array[real] if is_traced(array) else np.asarray(to_host(array))[real]
