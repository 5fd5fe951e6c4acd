"""Rows that a mesh axis does not divide: padded with copies of a real row, and marked as such."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.tree import PyTree, path_str, pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class Padded:
    """An array whose last rows are copies of its last real row, there to fill the mesh.

    `Plate` masks the copies, so they carry no density. A copy of a real row, unlike zeros, gives no
    NaN in the gradient of a likelihood that is undefined at zero.

    Attributes
    ----------
    values
        The padded array, shape [padded rows, ...].
    num_rows
        How many of its rows are real; they come first.
    """

    values: jax.Array
    num_rows: int = static()

    @property
    def num_pad(self) -> int:
        """How many rows are copies."""
        return self.values.shape[0] - self.num_rows

    def unpad(self) -> np.ndarray:
        """Return the real rows, on the host; rows of several processes are gathered (`to_host`)."""
        return np.asarray(to_host(self.values))[: self.num_rows]

    def __repr__(self) -> str:
        v = self.values
        if not hasattr(v, "shape"):  # JAX puts anything in the leaves of a pytree
            return f"Padded({v!r})"
        return f"Padded({v.dtype}{list(v.shape)}: {self.num_rows} rows + {self.num_pad} pad)"


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


def num_real_rows(leaf: Any) -> int | None:
    """Return how many rows of an array are real; None for a scalar."""
    return leaf.num_rows if isinstance(leaf, Padded) else (*np.shape(leaf), None)[0]


def real_rows(leaf: Any) -> Any:
    """Return the real rows as an array, still on the devices; as a shape if the values are one."""
    if not isinstance(leaf, Padded):
        return leaf
    if isinstance(leaf.values, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((leaf.num_rows, *leaf.values.shape[1:]), leaf.values.dtype)
    return leaf.values[: leaf.num_rows]


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
