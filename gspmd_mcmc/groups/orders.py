"""What is known of groups that have been laid: their labels and order, and data that lies with them."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.groups.lookup_index import IN_BOUNDS, RowsByEntry
from gspmd_mcmc.groups.tiles import Chunks, Tiles
from gspmd_mcmc.placement.padding import LaidByGroups
from gspmd_mcmc.tree import PyTree, pytree, static


@dataclass(frozen=True, eq=False)
class GroupLabels:
    """What groups are called, on the host; metadata of their `Order`, equal by name and digest.

    Attributes
    ----------
    name
        Such as "station"; "" if they have none.
    labels
        Integers or strings in the user's order, shape [groups].
    sizes
        Rows of each group, shape [groups].
    digest
        Equal for equal groups in equal order.
    axis
        Of a leaf of draws: the axis that groups are on, counted after chains and draws.
    """

    name: str
    labels: np.ndarray
    sizes: np.ndarray
    digest: str
    axis: int = 0

    def __eq__(self, other: object) -> bool:
        is_labels = isinstance(other, GroupLabels)
        return is_labels and (self.name, self.digest) == (other.name, other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"GroupLabels({self.name!r}, {len(self.labels)} groups)"


@pytree
@dataclass(frozen=True, eq=False)
class Order:
    """The order in which groups lie, which the user does not see.

    Attributes
    ----------
    to_laid
        For each place, the group there; places of the pad have the last one. Shape [padded groups].
    to_seen
        For each group, its place; shape [padded groups], the last group's repeated.
    groups
        What the groups are called, and which they are.
    """

    to_laid: jax.Array
    to_seen: jax.Array
    groups: GroupLabels = static()

    @property
    def digest(self) -> str:
        """Equal for equal groups in equal order."""
        return self.groups.digest

    def lay(self, array: jax.Array) -> jax.Array:
        """Bring an array [groups, ...] from the user's order into the places; [padded groups, ...]."""
        return array.at[self.to_laid].get(**IN_BOUNDS)

    def see(self, array: jax.Array) -> jax.Array:
        """Undo `lay`; the pad, [padded groups, ...], comes last and copies the last group."""
        return array.at[self.to_seen].get(**IN_BOUNDS)


@pytree
@dataclass(frozen=True, eq=False)
class GroupTable(LaidByGroups):
    """One row for each group, where the group lies: data of a `Plate` of groups; see `Groups.place`."""

    table: PyTree
    order: Order
    num_groups: int = static()

    def __repr__(self) -> str:
        return f"GroupTable({self.num_groups} groups)"


@pytree
@dataclass(frozen=True, eq=False)
class GroupedRows(LaidByGroups):
    """Rows that lie with their groups: data of a `Plate` of rows; see `Groups.place_rows`.

    Attributes
    ----------
    rows
        The tree of arrays [laid rows, ...]: blocks, of tiles or chunks, of groups.
    is_real
        False for copies that fill a group up to its width; shape [laid rows].
    slot_group
        Which of its block's groups each slot of a tile holds, shape [blocks, tiles x slots]; or each
        chunk, [blocks, chunks].
    group_slot
        Where a block's groups are among the slots, -1 without rows; shape [blocks, groups of a block].
        None of chunks, which are scattered.
    place_of_row
        Where each row of the user is among the laid rows.
    order
        How the groups lie.
    by_entry
        For each `LookupIndex` among the rows, the rows of a tile by entry, or None; () if none is
        known.
    tiles, num_rows, num_groups
        The shape of the tiles or chunks; how many rows and groups there are.
    tile_rows
        About how many rows a tile of chunks is to have, or None.
    """

    rows: PyTree
    is_real: jax.Array
    slot_group: jax.Array
    group_slot: Any
    place_of_row: Any
    order: Order
    by_entry: tuple[RowsByEntry | None, ...]
    tiles: Tiles | Chunks = static()
    num_rows: int = static()
    num_groups: int = static()
    tile_rows: int | None = static()

    def __repr__(self) -> str:
        return f"GroupedRows({self.num_rows} rows of {self.num_groups} groups)"
