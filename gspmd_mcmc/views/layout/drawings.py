"""Which drawings a tree needs: one for each mesh, and one for each layout that leaves share."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.layout.devices import Devices
from gspmd_mcmc.views.layout.grid import cut_by_spec, spec_entries
from gspmd_mcmc.views.layout.layouts import DELETED, DEVICE, LeafLayout
from gspmd_mcmc.views.notation import array_text, axes_text, several, shorten


@dataclass(frozen=True)
class Drawing:
    """A layout to draw.

    Attributes
    ----------
    leaf
        The leaf that is drawn: of those that share the layout, the one with the most bytes.
    alike
        Paths of the others.
    """

    leaf: LeafLayout
    alike: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """Say how the array is cut, in a line."""
        if self.leaf.is_mesh:
            return f"mesh {axes_text(self.leaf.devices.axes)}" if self.leaf.devices else "mesh"
        return f"{self.leaf.label}: {cut_text(self.leaf)}"

    @property
    def names(self) -> str:
        """Name the leaf that is drawn."""
        if self.leaf.is_mesh:
            return str(self.leaf.devices)
        return f"{self.leaf.path}  {array_text(self.leaf.dtype, self.leaf.shape)}"

    def others(self, width: int) -> str:
        """Name the leaves that lie alike, as many as fit the width; nothing if there are none."""
        texts = [f"and alike: {several(list(self.alike), most)}" for most in (3, 2, 1)]
        fitting = [text for text in texts if len(text) <= width]
        return (fitting[0] if fitting else shorten(texts[-1], width)) if self.alike else ""


def cut_text(leaf: LeafLayout) -> str:
    """Say in how many blocks and copies a leaf lies: ``4 blocks × 2 copies``."""
    if leaf.num_shards == 1:
        return f"whole on {leaf.replication} devices" if leaf.replication > 1 else "whole"
    copies = f" × {leaf.replication} copies" if leaf.replication > 1 else ""
    return f"{leaf.num_shards} blocks{copies}"


def drawings_of(leaves: Sequence[LeafLayout]) -> tuple[Drawing, ...]:
    """Gather the leaves that share a layout; meshes of two axes and more come first."""
    groups: dict[Hashable, list[LeafLayout]] = {}
    for leaf in leaves:
        if leaf.grid is not None and leaf.memory != DELETED:
            groups.setdefault(_key(leaf), []).append(leaf)
    drawn = {leaf.devices for leaf in leaves if leaf.is_mesh}
    meshes = [_mesh_drawing(devices) for devices in meshes_of(leaves) if devices not in drawn]
    return (*filter(None, meshes), *map(_drawing, groups.values()))


def meshes_of(leaves: Sequence[LeafLayout]) -> list[Devices]:
    """Return the meshes that leaves lie on, in their order."""
    return list(dict.fromkeys(leaf.devices for leaf in leaves if leaf.devices and leaf.devices.axes))


def _key(leaf: LeafLayout) -> Hashable:
    """Tell layouts apart: by owners, by the axes that are split, and by rows that are not real."""
    assert leaf.grid is not None
    parts = list(leaf.grid.parts)
    while parts and parts[-1] == 1:
        parts.pop()
    sizes = leaf.shape or ()
    uneven = tuple(size for size, n in zip(sizes, parts, strict=False) if size % n or not size)
    padded = None if leaf.num_rows is None else (leaf.num_rows, sizes)
    return (
        leaf.devices,
        leaf.is_mesh,
        tuple(parts),
        leaf.grid.owners.tobytes(),
        uneven,
        padded and padded[0],
    )


def _drawing(leaves: list[LeafLayout]) -> Drawing:
    chosen = max(leaves, key=lambda leaf: (leaf.num_bytes or 0, len(leaf.shape or ())))
    return Drawing(chosen, tuple(leaf.path for leaf in leaves if leaf is not chosen))


def _mesh_drawing(devices: Devices) -> Drawing | None:
    if sum(size > 1 for _, size in devices.axes) < 2:
        return None
    names = [name for name, _ in devices.axes]
    grid = cut_by_spec(devices.axes, spec_entries(P(*names), len(names)))
    return Drawing(LeafLayout("mesh", None, "Mesh", DEVICE, "mesh", P(*names), devices, grid))
