"""Rows that a mesh axis does not divide: padded with copies of a real row, and marked as such."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_pytree_with_keys

from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.tree import PyTree, Within, fill, path_str, replace, set_fields


@dataclass(frozen=True, eq=False, init=False)
class Padded:
    """An array whose last rows are copies of a real row, which fill the mesh. A pytree.

    `Plate` masks the copies, so they carry no density. A copy of a real row, unlike zeros, gives no
    NaN in the gradient of a likelihood that is undefined at zero.

    `jax.vmap` with ``out_axes=0``, `jax.lax.scan` and stacking put axes in front of the rows. The axes
    after the rows stay, and their number tells which axis the rows are. `jax.tree.map` reaches the
    whole array: a sum or a mean of it includes the copies.

    Parameters
    ----------
    values
        The padded array, shape [padded rows, ...].
    num_rows
        How many of its rows are real; they come first.
    order
        The order of the real rows: "" for the user's, else the digest of an `Order` of groups.

    Raises
    ------
    ValueError
        If the values are a scalar, or have fewer than ``num_rows`` rows.
    """

    values: jax.Array
    num_rows: int
    order: str = ""
    num_padded: int = field(init=False)
    num_axes_after: int = field(init=False)  # axes of the values after the rows

    def __init__(self, values: Any, num_rows: int, order: str = ""):
        num_padded, *after = np.shape(values) or (-1,)
        if not 0 <= num_rows <= num_padded:
            raise ValueError(
                f"Padded: expected values with at least num_rows={num_rows} rows on the first axis, "
                f"got shape {np.shape(values)}. num_rows counts the real rows, which come first"
            )
        set_fields(
            self,
            values=values,
            num_rows=num_rows,
            order=order,
            num_padded=num_padded,
            num_axes_after=len(after),
        )

    @property
    def num_pad(self) -> int:
        """How many rows are copies."""
        return self.num_padded - self.num_rows

    @property
    def axis(self) -> int:
        """Which axis of the values has the rows.

        Raises
        ------
        ValueError
            If a function has changed the number of rows, or of axes after them.
        """
        shape = np.shape(self.values)
        axis = len(shape) - 1 - self.num_axes_after
        if axis < 0 or shape[axis] != self.num_padded:
            raise ValueError(
                f"Padded: expected values of {self.num_padded} rows and {self.num_axes_after} axes "
                f"after them, got shape {shape}: a function has changed rows or axes. Make it anew, "
                f"rows first: gspmd_mcmc.Padded(values, {self.num_rows})"
            )
        return axis

    def unpad(self) -> np.ndarray:
        """Return the real rows, on the host; rows of several processes are gathered (`to_host`).

        Raises
        ------
        ValueError
            If the rows are not in the user's order, or a function has changed their number.
        """
        return np.asarray(to_host(self.values))[_real(self)]

    def __repr__(self) -> str:
        v = self.values
        if not hasattr(v, "shape"):  # JAX puts anything in the leaves of a pytree
            return f"Padded({v!r})"
        order = ", in the order of groups" if self.order else ""
        return f"Padded({v.dtype}{list(v.shape)}: {self.num_rows} rows + {self.num_pad} pad{order})"

    def __getitem__(self, index: Any) -> Any:
        """Raise: the values have pad, which nothing would mask."""
        raise TypeError(self._no_array())

    def __array__(self, *args: Any, **options: Any) -> Any:
        """Raise: the values have pad, which nothing would mask."""
        raise TypeError(self._no_array())

    def _no_array(self) -> str:
        return (
            f"got {self} where an array was expected. Its array is .values, pad included; its real "
            "rows are .unpad()"
        )


_METADATA = ("num_rows", "order", "num_padded", "num_axes_after")


def _flatten(padded: Padded) -> tuple[tuple, tuple]:
    return (padded.values,), tuple(getattr(padded, name) for name in _METADATA)


def _flatten_with_keys(padded: Padded) -> tuple[tuple, tuple]:
    # A path names the array alone: `z` is `z` on a mesh that divides its rows too.
    return ((Within(), padded.values),), _flatten(padded)[1]


def _unflatten(metadata: tuple, children: Any) -> Padded:
    (values,) = children
    return fill(Padded, dict(zip(_METADATA, metadata, strict=True)) | {"values": values})


register_pytree_with_keys(Padded, _flatten_with_keys, _unflatten, _flatten)


class LaidByGroups:
    """What `Groups` has laid: its copies and its order are known to a `Plate` alone."""


def refuse_laid_by_groups(tree: PyTree, what: str, advice: str) -> None:
    """Raise if a tree holds what `Groups` has laid, where nothing would know its order."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, LaidByGroups))
    for path, node in nodes:
        if isinstance(node, LaidByGroups):
            raise ValueError(
                f"{what} {path_str(path)}: got {node}, whose copies and whose order only a Plate "
                f"knows; {advice}"
            )


def is_padded(node: Any) -> bool:
    """Tell whether a node of a tree is `Padded` (for ``is_leaf=``)."""
    return isinstance(node, Padded)


def values_of(leaf: Any) -> Any:
    """Return the array that a leaf is, or that a `Padded` holds, its pad included."""
    return leaf.values if isinstance(leaf, Padded) else leaf


def with_values(leaf: Any, values: Any) -> Any:
    """Give a leaf other values of the same rows, whose axes after the rows may differ."""
    if not isinstance(leaf, Padded):
        return values
    return replace(leaf, values=values, num_axes_after=np.ndim(values) - 1 - leaf.axis)


def move_rows(leaf: Any, source: int, destination: int) -> Any:
    """Move the rows of an array from one axis to another; those of a `Padded` must be there.

    Raises
    ------
    ValueError
        If the array is `Padded`, and its rows are another axis.
    """
    if isinstance(leaf, Padded) and leaf.axis != source:
        raise ValueError(f"expected rows on axis {source}, got {leaf}, whose rows are axis {leaf.axis}")
    values = jnp.moveaxis(values_of(leaf), source, destination)
    if not isinstance(leaf, Padded):
        return values
    return replace(leaf, values=values, num_axes_after=np.ndim(values) - 1 - destination)


def num_real_rows(leaf: Any, name: str) -> int | None:
    """Return how many rows of an array, its first axis, are real; None for a scalar.

    Raises
    ------
    ValueError
        If the array is `Padded`, and its rows are not its first axis.
    """
    if isinstance(leaf, Padded) and leaf.axis:
        raise ValueError(
            f"{name}: expected rows first, got {leaf}, whose rows are axis {leaf.axis}. It holds "
            "several arrays: take one of them, or map over them with jax.vmap"
        )
    return leaf.num_rows if isinstance(leaf, Padded) else (*np.shape(leaf), None)[0]


def real_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array without its pad."""
    shape = list(np.shape(values_of(leaf)))
    if isinstance(leaf, Padded):
        shape[leaf.axis] = leaf.num_rows
    return tuple(shape)


def real_rows(leaf: Any) -> Any:
    """Return the real rows as an array, still on the devices; as a shape if the values are one.

    Raises
    ------
    ValueError
        If the rows are not in the user's order.
    """
    if not isinstance(leaf, Padded):
        return leaf
    real = _real(leaf)
    if isinstance(leaf.values, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(real_shape(leaf), leaf.values.dtype)
    return leaf.values[real]


def require_order(leaf: Any, order: str) -> None:
    """Raise if an array is `Padded` in another order: "" is the user's."""
    if isinstance(leaf, Padded) and leaf.order != order:
        raise ValueError(
            f"{leaf} has the rows in the order in which groups are stored, where yours is expected. "
            "The draws of sample, and the position that collect= is given, are in your order"
        )


def _real(padded: Padded) -> tuple[slice, ...]:
    require_order(padded, "")
    return (*(slice(None),) * padded.axis, slice(padded.num_rows))


def unpadded(tree: PyTree) -> PyTree:
    """Return a tree with the real rows of its `Padded` leaves."""
    return jax.tree.map(real_rows, tree, is_leaf=is_padded)


def padded_rows(num_rows: int, num_blocks: int) -> int:
    """Return the least multiple of the number of blocks that holds all rows."""
    return -(-num_rows // num_blocks) * num_blocks


def refuse_padded(tree: PyTree, what: str, advice: str) -> None:
    """Raise if a tree holds `Padded` leaves where nothing would mask their copies."""
    refuse_laid_by_groups(tree, what, advice)
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_padded):
        if isinstance(node, Padded):
            raise ValueError(
                f"{what} {path_str(path)}: got {node}, whose pad nothing masks here; {advice}"
            )


def real_in_blocks(num_rows: int, num_padded: int, num_blocks: int) -> jax.Array:
    """Count the real rows of each block, shape [blocks].

    Blocks are counted one by one, as 32-bit integers may not count all rows together.
    """
    block_rows = num_padded // num_blocks
    num_full, rest = divmod(num_rows, block_rows)
    block = jnp.arange(num_blocks)
    return jnp.where(block < num_full, block_rows, jnp.where(block == num_full, rest, 0))


def is_real(num_rows: int, num_padded: int, num_blocks: int) -> jax.Array:
    """Tell real rows from pad, shape [padded rows]."""
    num_real = real_in_blocks(num_rows, num_padded, num_blocks)
    return (jnp.arange(num_padded // num_blocks)[None] < num_real[:, None]).reshape(-1)
