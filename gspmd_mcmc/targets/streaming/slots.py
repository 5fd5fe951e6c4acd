"""Latents that belong to rows, as the rows of a tile see them: each row has its own, or its group's.

Those of groups are repeated, and their gradients summed. On a chip nothing is scattered: the transpose
of a repetition is a sum, and of the gathers, which are of groups and within a device, the inverse is
known. A CPU scatters without atomic operations and in order: see `ChunkSlots`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.groups.lookup_index import IN_BOUNDS, RowsByEntry
from gspmd_mcmc.groups.orders import GroupedRows, Order
from gspmd_mcmc.groups.tiles import Chunks, Tiles
from gspmd_mcmc.placement.padding import real_in_blocks, real_rows
from gspmd_mcmc.targets.streaming.chunkwise import chunkwise
from gspmd_mcmc.targets.streaming.rows import Rows
from gspmd_mcmc.tree import pytree, static


@dataclass(frozen=True)
class Tile:
    """Where a tile lies in each block.

    Attributes
    ----------
    row, num_rows
        The first row of the tile, and how many it has.
    latent, num_latents
        The first of the latents that it is given, and how many they are.
    is_counted
        False on rows of the pad, and on those that an earlier tile has counted; broadcasts to
        [blocks, rows].
    known
        What else is known of its rows; leaves [blocks, ...].
    """

    row: jax.Array
    num_rows: int
    latent: jax.Array | int
    num_latents: int
    is_counted: jax.Array
    known: Any = ()


@pytree
@dataclass(frozen=True, eq=False)
class RowSlots:
    """Each row has latents of its own.

    Attributes
    ----------
    latents
        How latents lie: as the rows do.
    order
        In which order rows lie that are groups.
    """

    latents: Rows = static()
    order: Order | None
    # Of rows of the pad, latents may have values for which the likelihood is undefined.
    has_stale_pad = has_tiles_of_pad = True

    def tile_rows(self, choose: Callable[[], int]) -> int:
        """Return how many rows a tile has; ``choose`` takes as many as memory allows."""
        return choose()

    def tile(self, index: jax.Array, num: int, rows: Rows) -> Tile:
        """Say where a tile of ``num`` rows lies; the last one may overlap the one before."""
        first = jnp.minimum(index * num, rows.block_rows - num)
        position = (first + jnp.arange(num))[None]
        num_real = real_in_blocks(rows.num_rows, rows.num_padded, rows.num_blocks)[:, None]
        is_counted = (position >= index * num) & (position < num_real)
        return Tile(first, num, first, num, is_counted)

    def fill(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Cut latents into the blocks of their rows: [rows, ...] to [blocks, rows, ...]."""
        return self.latents.local_blocks(latents)

    def gather_grads(self, by_row: list[jax.Array]) -> list[jax.Array]:
        """Undo `fill`."""
        return [self.latents.join(x) for x in by_row]

    def take(self, latents: list[jax.Array], known: Any) -> list[jax.Array]:
        """Take from the latents that a tile is given those that its rows are to share."""
        return latents

    def add(self, sums: list[jax.Array], grads: list[jax.Array], known: Any) -> list[jax.Array]:
        """Add gradients of what `take` took."""
        return tree.add(sums, grads)

    def apply(self, function: Callable, taken: list[jax.Array]) -> jax.Array:
        """Return ``function(latents)`` of a tile's rows."""
        return function(taken)

    def spread_all(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Give all laid rows their latents."""
        return latents

    def see(self, of_rows: jax.Array) -> jax.Array:
        """Bring what laid rows have into the user's order, without pad: [rows, ...]."""
        seen = of_rows if self.order is None else self.order.see(of_rows)
        return seen[: self.latents.num_rows]

    def laid_row(self, row: Any) -> Any:
        """Return where rows of the user's are among the laid ones."""
        return row if self.order is None else self.order.to_seen[row]

    def latent_of(self, row: jax.Array) -> jax.Array:
        """Return the place of the latent of laid rows."""
        return row

    def orders(self, known: Any) -> tuple:
        """Return the rows of a tile by the entries of a table that they read: not known."""
        return ()


class _OfGroups:
    """What slots of groups have in common."""

    place_of_row: Any
    # Pad copies a row of the group, whose likelihood is defined.
    has_stale_pad = False
    has_tiles_of_pad = True  # a block without groups has rows of another's

    def see(self, of_rows: jax.Array) -> jax.Array:
        """Bring what laid rows have into the user's order, without pad: [rows, ...]."""
        return of_rows[self.place_of_row]

    def laid_row(self, row: Any) -> Any:
        """Return where rows of the user's are among the laid ones."""
        return self.place_of_row[row]


def group_slots(data: GroupedRows, rows: Rows) -> "Slots":
    """Read how rows lie with their groups; ``rows`` are the laid ones."""
    groups = Rows(
        num_rows=data.num_groups,
        num_padded=len(data.order.to_laid),
        mesh=rows.mesh,
        axes=rows.axes,
        specs=(),
        platform=rows.platform,
        order=data.order.digest,
    )
    known = {"place_of_row": real_rows(data.place_of_row), "order": data.order, "latents": groups}
    if isinstance(data.tiles, Chunks):
        of_chunks = {"chunks": data.tiles, "asked": data.tile_rows}
        return ChunkSlots(data.is_real, data.slot_group, **known, **of_chunks)
    arrays = data.is_real, data.slot_group, data.group_slot
    return GroupSlots(*arrays, **known, by_entry=data.by_entry, tiles=data.tiles)


@pytree
@dataclass(frozen=True, eq=False)
class GroupSlots(_OfGroups):
    """Each row has the latents of its group, which are slices; the arrays are those of `GroupedRows`.

    Attributes
    ----------
    latents
        How the groups lie, and with them their latents.
    tiles
        What all tiles have in common.
    """

    is_real: jax.Array
    slot_group: jax.Array
    group_slot: jax.Array
    place_of_row: Any
    order: Order
    by_entry: tuple[RowsByEntry | None, ...]
    latents: Rows = static()
    tiles: Tiles = static()

    def tile_rows(self, choose: Callable[[], int]) -> int:
        """Return how many rows a tile has: they were cut when they were placed."""
        return self.tiles.rows

    def tile(self, index: jax.Array, num: int, rows: Rows) -> Tile:
        """Say where a tile of ``num`` rows lies."""
        first = index * num
        is_real = rows.per_block(self.is_real.reshape(rows.num_blocks, -1))
        is_counted = jax.lax.dynamic_slice_in_dim(is_real, first, num, axis=1)
        known = tuple(None if x is None else x.of_tile(index) for x in self.by_entry)
        return Tile(first, num, index * self.tiles.slots, self.tiles.slots, is_counted, known)

    def fill(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Give each slot its group's latents: [groups, ...] to [blocks, tiles x slots, ...]."""
        taken = [_take(x, self.slot_group) for x in self.latents.local_blocks(latents)]
        return self.latents.per_block(taken)

    def gather_grads(self, by_slot: list[jax.Array]) -> list[jax.Array]:
        """Give each group its slot's gradient, zero without rows: undo `fill`."""
        grads = []
        for x in by_slot:
            has_slot = self.group_slot.reshape(*self.group_slot.shape, *(1,) * (x.ndim - 2)) >= 0
            found = _take(x, jnp.maximum(self.group_slot, 0))
            grads.append(self.latents.join(jnp.where(has_slot, found, jnp.zeros((), x.dtype))))
        return grads

    def take(self, latents: list[jax.Array], known: Any) -> list[jax.Array]:
        """Take from the latents that a tile is given those that its rows are to share."""
        return latents

    def add(self, sums: list[jax.Array], grads: list[jax.Array], known: Any) -> list[jax.Array]:
        """Add gradients of what `take` took."""
        return tree.add(sums, grads)

    def apply(self, function: Callable, taken: list[jax.Array]) -> jax.Array:
        """Return ``function(latents)`` of a tile's rows, each with those of its group."""
        return function([self._spread(x) for x in taken])

    def _spread(self, x: jax.Array) -> jax.Array:
        parts, first = [], 0
        for n, width in self.tiles.widths:
            parts.append(_repeated(x[first : first + n], width))
            first += n
        return _repeated(jnp.concatenate(parts), self.tiles.chunk)

    def spread_all(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Give all laid rows the latents of their groups: [groups, ...] to [laid rows, ...]."""
        spread = []
        for x in self.fill(latents):
            of_tiles = x.reshape(-1, self.tiles.slots, *x.shape[2:])
            rows = jax.vmap(self._spread)(of_tiles)
            spread.append(rows.reshape(-1, *x.shape[2:]))
        return spread

    def latent_of(self, row: jax.Array) -> jax.Array:
        """Return the place of the group of laid rows."""
        tile, within = jnp.divmod(row, self.tiles.rows)
        block, tile = jnp.divmod(tile, self.tiles.count)
        slot_of_row = jnp.asarray(self.tiles.slot_of_row())
        slot = tile * self.tiles.slots + slot_of_row[within]
        return block * self.latents.block_rows + self.slot_group[block, slot]

    def orders(self, known: Any) -> tuple:
        """Return the rows of a tile by the entries of a table that they read, as far as known."""
        return known


@pytree
@dataclass(frozen=True, eq=False)
class ChunkSlots(_OfGroups):
    """Each row has the latents of its group, by the index of its chunk: for CPUs.

    A tile is given the latents of its block, gathers those of its chunks, and copies them for the rows
    of each. Their gradients are sums of slices, scattered in order.

    Attributes
    ----------
    is_real
        As of `GroupedRows`.
    group
        The group of each chunk, shape [blocks, chunks].
    latents
        How the groups lie, and with them their latents.
    chunks
        What all chunks have in common.
    asked
        About how many rows a tile is to have; None: as many as its memory allows.
    """

    is_real: jax.Array
    group: jax.Array
    place_of_row: Any
    order: Order
    latents: Rows = static()
    chunks: Chunks = static()
    asked: int | None = static()

    @property
    def has_tiles_of_pad(self) -> bool:
        """Whether a tile may have rows of pad alone, for whose latents no row may be defined."""
        return self.chunks.has_bare_block

    def tile_rows(self, choose: Callable[[], int]) -> int:
        """Return how many rows a tile has: of about as many chunks as are asked for.

        So many that few or none are left over, and that tiles come in pairs.
        """
        count = self.chunks.count
        about = max(1, (self.asked or choose()) // self.chunks.rows)
        if about >= count:
            return self.chunks.rows * count
        fits = range(5 * about // 4, 2 * about // 3, -1)
        return self.chunks.rows * min(fits, key=lambda chunks: -count % (2 * chunks))

    def tile(self, index: jax.Array, num: int, rows: Rows) -> Tile:
        """Say where a tile of ``num`` rows lies; the last one may overlap the one before."""
        first, chunk = jnp.minimum(index * num, rows.block_rows - num), self.chunks.rows

        def cut(array: jax.Array, first: jax.Array, num: int) -> jax.Array:
            array = rows.per_block(array.reshape(rows.num_blocks, -1))
            return jax.lax.dynamic_slice_in_dim(array, first, num, axis=1)

        is_counted = cut(self.is_real, first, num)
        if rows.block_rows % num:
            is_counted &= (jnp.arange(num) >= index * num - first)[None]
        group = cut(self.group, first // chunk, num // chunk)
        return Tile(first, num, 0, self.latents.block_rows, is_counted, group)

    def fill(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Cut latents into the blocks of their groups: [groups, ...] to [blocks, groups, ...]."""
        return self.latents.local_blocks(latents)

    def gather_grads(self, by_group: list[jax.Array]) -> list[jax.Array]:
        """Undo `fill`."""
        return [self.latents.join(x) for x in by_group]

    def take(self, latents: list[jax.Array], known: jax.Array) -> list[jax.Array]:
        """Take those of each chunk: [groups, ...] to [chunks, ...]."""
        return [x.at[known].get(**IN_BOUNDS) for x in latents]

    def add(self, sums: list[jax.Array], grads: list[jax.Array], known: Any) -> list[jax.Array]:
        """Add gradients of each chunk to those of its group."""
        return [x.at[known].add(grad, **IN_BOUNDS) for x, grad in zip(sums, grads, strict=True)]

    def apply(self, function: Callable, taken: list[jax.Array]) -> jax.Array:
        """Return ``function(latents)`` of a tile's rows, each with those of its group."""
        if self.chunks.rows == 1:
            return function(taken)
        return chunkwise(function, taken, self._spread)

    def _spread(self, taken: list[jax.Array]) -> list[jax.Array]:
        """Copy the latents of chunks for their rows: [chunks, ...] to [rows, ...].

        XLA 0.10 leaves the sum that is the transpose of a broadcast to a library (YNNPACK), in which it
        takes several times as long. Here it is a product with ones, or a sum of slices.
        """

        def copied(x: jax.Array) -> jax.Array:
            if x.ndim == 1:
                ones = jnp.ones((1, self.chunks.rows), x.dtype)
                return jnp.matmul(x[:, None], ones, precision="highest").reshape(-1)
            of_chunks = x.reshape(len(x), -1)
            copies = jnp.concatenate([of_chunks] * self.chunks.rows, axis=1)
            return copies.reshape(-1, *x.shape[1:])

        return [copied(x) for x in taken]

    def spread_all(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Give all laid rows the latents of their groups: [groups, ...] to [laid rows, ...]."""
        of_chunks = [_take(x, self.group) for x in self.fill(latents)]
        return self._spread([x.reshape(-1, *x.shape[2:]) for x in of_chunks])

    def latent_of(self, row: jax.Array) -> jax.Array:
        """Return the place of the group of laid rows."""
        block, chunk = jnp.divmod(row // self.chunks.rows, self.chunks.count)
        return block * self.latents.block_rows + self.group[block, chunk]

    def orders(self, known: Any) -> tuple:
        """Return the rows of a tile by the entries of a table that they read: not known."""
        return ()


Slots = RowSlots | GroupSlots | ChunkSlots


def _repeated(x: jax.Array, num: int) -> jax.Array:
    """Repeat an array [n, ...] as a whole: [num x n, ...]."""
    return jnp.broadcast_to(x[None], (num, *x.shape)).reshape(num * len(x), *x.shape[1:])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Take from each block: [blocks, m, ...] by indices [blocks, n] to [blocks, n, ...]."""
    if len(index) == 1:
        return x[0].at[index[0]].get(**IN_BOUNDS)[None]
    return jax.vmap(lambda a, i: a.at[i].get(**IN_BOUNDS))(x, index)
