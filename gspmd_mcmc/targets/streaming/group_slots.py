"""Latents of groups as the rows of a tile see them: spread by broadcasts, and their gradients summed.

Nothing is scattered: the transpose of a broadcast is a sum, and of the gathers, which are of groups and
within a device, the inverse is known.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.placement.group_tiles import Tiles
from gspmd_mcmc.placement.groups import GroupedRows, Order
from gspmd_mcmc.placement.padding import real_rows
from gspmd_mcmc.targets.streaming.rows import Rows
from gspmd_mcmc.tree import pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class GroupSlots:
    """How rows lie with their groups; the arrays are those of `GroupedRows`.

    Attributes
    ----------
    groups
        How the groups lie, and with them their latents.
    tiles
        What all tiles have in common.
    """

    is_real: jax.Array
    slot_group: jax.Array
    group_slot: jax.Array
    place_of_row: Any
    order: Order
    groups: Rows = static()
    tiles: Tiles = static()

    @classmethod
    def of(cls, data: GroupedRows, rows: Rows) -> "GroupSlots":
        """Read how rows lie with their groups; ``rows`` are the laid ones."""
        groups = Rows(
            num_rows=data.num_groups,
            num_padded=math.prod(data.group_slot.shape),
            mesh=rows.mesh,
            axes=rows.axes,
            specs=(),
            platform=rows.platform,
            order=data.order.digest,
        )
        arrays = data.is_real, data.slot_group, data.group_slot, real_rows(data.place_of_row)
        return cls(*arrays, order=data.order, groups=groups, tiles=data.tiles)

    def fill(self, latents: list[jax.Array]) -> list[jax.Array]:
        """Give each slot its group's latents: [groups, ...] to [blocks, tiles x slots, ...]."""
        taken = [_take(x, self.slot_group) for x in self.groups.local_blocks(latents)]
        return self.groups.per_block(taken)

    def gather_grads(self, by_slot: list[jax.Array]) -> list[jax.Array]:
        """Give each group its slot's gradient, zero without rows: undo `fill`."""
        grads = []
        for x in by_slot:
            has_slot = self.group_slot.reshape(*self.group_slot.shape, *(1,) * (x.ndim - 2)) >= 0
            found = _take(x, jnp.maximum(self.group_slot, 0))
            grads.append(self.groups.join(jnp.where(has_slot, found, jnp.zeros((), x.dtype))))
        return grads

    def spread(self, of_slots: list[jax.Array]) -> list[jax.Array]:
        """Give each row of a tile the latents of its group: [slots, ...] to [rows, ...]."""
        return [self._spread(x) for x in of_slots]

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

    def group_of(self, row: jax.Array) -> jax.Array:
        """Return the place of the group of laid rows."""
        tile, within = jnp.divmod(row, self.tiles.rows)
        block, tile = jnp.divmod(tile, self.tiles.count)
        slot_of_row = jnp.asarray(self.tiles.slot_of_row().astype(np.int32))
        slot = tile * self.tiles.slots + slot_of_row[within]
        return block * self.groups.block_rows + self.slot_group[block, slot]


def _repeated(x: jax.Array, num: int) -> jax.Array:
    """Repeat an array [n, ...] as a whole: [num x n, ...]."""
    return jnp.broadcast_to(x[None], (num, *x.shape)).reshape(num * len(x), *x.shape[1:])


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Take from each block: [blocks, m, ...] by indices [blocks, n] to [blocks, n, ...]."""
    if len(index) == 1:
        return x[0].at[index[0]].get(mode="promise_in_bounds")[None]
    return jax.vmap(lambda a, i: a.at[i].get(mode="promise_in_bounds"))(x, index)
