"""An index into a table that all rows share, whose order is found once, when rows are placed."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.groups.tiles import Tiles, lay_rows
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.tree import PyTree, is_traced, pytree, replace, set_fields, static

# Entries whose rows are summed together have widths within this ratio. That leaves some twenty sums,
# each a kernel; rows of groups, which carry all of the data, are padded less.
STEP = 1.3
# Of indices that were made, or checked, when rows were placed: nothing is computed to bring them into
# bounds.
IN_BOUNDS: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


@pytree
@dataclass(frozen=True, eq=False)
class RowsByEntry:
    """Rows of each tile in the order of the entries that they name, as `lay_rows` lays groups.

    Attributes
    ----------
    row
        Rows of a tile, and as many as it has where there is none; shape [blocks, tiles x laid rows], in
        a tile [laid rows].
    slot
        Where the rows of an entry are, -1 without any; [blocks, tiles x entries], in a tile [entries].
    tiles
        The shape of what is laid, a tile for each tile of rows.
    """

    row: Any
    slot: Any
    tiles: Tiles = static()

    def of_tile(self, index: jax.Array) -> "RowsByEntry":
        """Return what belongs to a tile of all blocks."""

        def cut(array: jax.Array) -> jax.Array:
            num = array.shape[1] // self.tiles.count
            return jax.lax.dynamic_slice_in_dim(array, index * num, num, axis=1)

        return RowsByEntry(cut(self.row), cut(self.slot), self.tiles)


@pytree
@dataclass(frozen=True, eq=False)
class LookupIndex:
    """For each row, the entry of a table that it reads by `lookup`: a column for `Groups.place_rows`.

    Rows are sorted by entry once, when they are placed. A plain index is sorted in each gradient, on
    GPUs and TPUs; on CPUs, where gradients are added up row by row, neither is.

    Parameters
    ----------
    index
        Integers from 0 to entries - 1, shape [rows]; or their shape, for a plan.
    entries
        How many entries the table has.

    Attributes
    ----------
    index, entries
        As given; inside a log likelihood, the index of the block's rows.
    order
        The rows of a tile by entry, inside a log likelihood; None where that is not known, as for rows
        that are read in parts or that `place` has placed.

    Raises
    ------
    TypeError, ValueError
        If the index is not one integer per row, or a row names no entry.

    Examples
    --------
    ::

        rows = users.place_rows({"film": gm.LookupIndex(film, 3_706), "stars": stars})

        def rating(params, row):
            film = gm.lookup(params["film"], row["film"])
    """

    index: Any
    entries: int = static()
    order: RowsByEntry | None = None

    def __init__(self, index: Any, entries: int):
        if is_traced(index):
            raise TypeError(
                "LookupIndex: index: expected data, got a traced value. Make it outside of jit. "
                "Inside, lookup takes a plain index"
            )
        if not isinstance(index, jax.ShapeDtypeStruct | jax.Array | np.ndarray):
            index = np.asarray(index)
        if index.dtype.kind not in "iu" or len(index.shape) != 1:  # NumPy counts times as integers
            raise TypeError(
                "LookupIndex: index: expected one integer per row, shape [rows], got "
                f"{index.dtype}{list(index.shape)}"
            )
        if not isinstance(entries, int | np.integer) or entries < 1:
            raise ValueError(
                f"LookupIndex: entries: expected an integer of at least 1, got {entries!r}"
            )
        if not isinstance(index, jax.ShapeDtypeStruct):
            found = np.asarray(to_host(index) if isinstance(index, jax.Array) else index)
            outside = np.flatnonzero((found < 0) | (found >= entries))
            if outside.size:
                raise ValueError(
                    f"LookupIndex: index: expected integers from 0 to {entries - 1}; {outside.size} "
                    f"rows have others, the first is row {outside[0]} with {found[outside[0]]}"
                )
        set_fields(self, index=index, entries=int(entries), order=None)

    def __repr__(self) -> str:
        shape = getattr(self.index, "shape", None)
        rows = "" if shape is None else f"{shape[0]} rows, "
        return f"LookupIndex({rows}{self.entries} entries)"


def is_lookup_index(node: Any) -> bool:
    """Tell whether a node of a tree is a `LookupIndex` (for ``is_leaf=``)."""
    return isinstance(node, LookupIndex)


def with_orders(data: PyTree, by_entry: tuple[RowsByEntry | None, ...]) -> PyTree:
    """Give each `LookupIndex` of a tile's data its order; none are known of rows without groups."""
    orders = iter(by_entry)

    def give(node: Any) -> Any:
        return replace(node, order=next(orders, None)) if is_lookup_index(node) else node

    return jax.tree.map(give, data, is_leaf=is_lookup_index)


def rows_by_entry(
    index: np.ndarray, is_real: np.ndarray, entries: int, tiles: Tiles, num_blocks: int
) -> RowsByEntry:
    """Find the rows of each entry, tile by tile, of laid rows [blocks x tiles x rows of a tile]."""
    real = np.flatnonzero(is_real)
    place = real // tiles.rows * entries + index[real]
    laid = lay_rows(place, num_blocks * tiles.count, entries, most=len(index), steps=(STEP,))
    row = np.where(laid.is_real, real[laid.row] % tiles.rows, tiles.rows).astype(np.int32)
    shape = Tiles(tiles.count, laid.tiles.chunk, laid.tiles.widths)
    return RowsByEntry(row.reshape(num_blocks, -1), laid.group_slot.reshape(num_blocks, -1), shape)
