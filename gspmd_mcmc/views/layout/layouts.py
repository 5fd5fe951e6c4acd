"""Where the leaves of a tree live: plain facts, to be held, tested and drawn."""

import dataclasses
import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.layout.devices import Devices
from gspmd_mcmc.views.layout.grid import Grid
from gspmd_mcmc.views.notation import array_text, partitions

DEVICE = "device"
HOST = "host"
DELETED = "deleted"
NOWHERE = "nowhere"
NO_ARRAY = "no array"


@dataclass(frozen=True)
class Block:
    """A block of an array and the devices (by id) that hold it; ``index`` slices the array."""

    index: tuple[slice, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LeafLayout:
    """Where one leaf lives.

    Attributes
    ----------
    path
        Its path in the tree; "(the whole)" for a tree that is one leaf.
    shape, dtype
        As the leaf has them; ``shape`` is None for a bare sharding.
    spec
        The `PartitionSpec`; None where the layout is not given by one.
    memory
        "device"; "host" for NumPy arrays and Python numbers; another memory kind of JAX
        ("pinned_host"); "deleted"; "nowhere" for what has no layout (tracers, unplaced shapes).
    label
        What a table says of its layout.
    devices, grid
        The devices, and which of them holds which block; None where there are none.
    num_rows
        How many rows are real, where the rest is padding; else None.
    notes
        What a reader should know besides: rows that the mesh does not divide, padding, and so on.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: Any
    memory: str
    label: str
    spec: P | None = None
    devices: Devices | None = None
    grid: Grid | None = None
    num_rows: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Names and sizes of the axes of its mesh; empty without a mesh."""
        return dict(self.devices.axes) if self.devices else {}

    @property
    def is_mesh(self) -> bool:
        """Whether it stands for a mesh itself, one device to a block."""
        return self.shape is None and self.dtype in ("Mesh", "AbstractMesh")

    @property
    def is_array(self) -> bool:
        """Whether it is an array or a number; a mesh and a sharding alone have only the name of one."""
        return not isinstance(self.dtype, str)

    def over(self, axis: int) -> str:
        """Mesh axes that an axis of the leaf lies over: ``data``, ``data, model``, or nothing."""
        entries = () if self.spec is None else partitions(self.spec)
        entry = entries[axis] if axis < len(entries) else None
        return ", ".join(entry) if isinstance(entry, tuple) else entry if isinstance(entry, str) else ""

    @property
    def num_shards(self) -> int:
        """How many different blocks it is cut into; 0 where no device holds it."""
        return self.grid.num_blocks if self.grid else 0

    @property
    def replication(self) -> int:
        """How many devices hold each block; 0 where no device holds it."""
        return self.grid.copies if self.grid else 0

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the whole leaf; None where its shape or dtype is unknown."""
        if self.shape is None or not hasattr(self.dtype, "itemsize"):
            return None
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def block_shape(self) -> tuple[int, ...] | None:
        """Shape of its largest block; None where it has none."""
        if self.shape is None or self.grid is None:
            return None
        return tuple(-(-n // p) for n, p in zip(self.shape, self.grid.parts, strict=True))

    @property
    def bytes_per_device(self) -> int | None:
        """Bytes of its largest block; 0 off the devices, None where shape or layout is unknown."""
        if self.memory in (HOST, DELETED):
            return 0
        block = self.block_shape
        return (
            None if block is None or self.num_bytes is None else math.prod(block) * self.dtype.itemsize
        )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Every block with its owners, in the order of the array (computed when asked)."""
        if self.devices is None or self.grid is None or self.shape is None:
            return ()
        numbers, owners = self.devices.numbers, self.grid.owners
        return tuple(
            Block(
                tuple(slice(*self.interval(axis, i)) for axis, i in enumerate(at)),
                tuple(numbers[i] for i in owners[at]),
            )
            for at in np.ndindex(self.grid.parts)
        )

    def interval(self, axis: int, part: int) -> tuple[int, int]:
        """Start and stop of a part of an axis; an uneven axis is cut as XLA does, short at its end."""
        assert self.shape is not None and self.block_shape is not None
        size, step = self.shape[axis], self.block_shape[axis]
        return min(part * step, size), min((part + 1) * step, size)

    def bytes_by_position(self) -> np.ndarray:
        """Bytes on each of `devices`, in their order."""
        assert self.devices is not None and self.grid is not None
        out = np.zeros(len(self.devices), np.int64)
        if self.bytes_per_device:
            out[self.grid.owners] = (self._block_elements() * self.dtype.itemsize)[..., None]
        return out

    def _block_elements(self) -> np.ndarray:
        assert self.shape is not None and self.grid is not None and self.block_shape is not None
        sizes = [
            np.clip(n - np.arange(p) * step, 0, step)
            for n, p, step in zip(self.shape, self.grid.parts, self.block_shape, strict=True)
        ]
        return np.asarray(reduce(np.multiply.outer, sizes, np.int64(1)))

    def __repr__(self) -> str:
        where = f"{self.num_shards} blocks x {self.replication}" if self.grid else self.memory
        return f"LeafLayout({self.path}: {array_text(self.dtype, self.shape)}, {self.label}, {where})"


@dataclass(frozen=True)
class Totals:
    """Bytes that a tree's leaves take together.

    Attributes
    ----------
    by_device
        Bytes on each device, by (kind, id).
    on_host
        Bytes of NumPy arrays and Python numbers.
    num_unknown
        How many arrays have no known size, or no known place.
    """

    by_device: dict[tuple[str, int], int] = dataclasses.field(hash=False)
    on_host: int
    num_unknown: int

    @property
    def per_device(self) -> int:
        """Bytes on the fullest device."""
        return max(self.by_device.values(), default=0)


def add_up(leaves: tuple[LeafLayout, ...]) -> Totals:
    """Sum the bytes of leaves on each device and on the host."""
    sums: dict[Devices, np.ndarray] = {}
    for leaf in leaves:
        if leaf.memory == DEVICE and leaf.devices and leaf.bytes_per_device is not None:
            sums[leaf.devices] = sums.get(leaf.devices, np.int64(0)) + leaf.bytes_by_position()
    by_device: dict[tuple[str, int], int] = {}
    for devices, counts in sums.items():
        for number, count in zip(devices.numbers, counts.tolist(), strict=True):
            key = devices.kind, number
            by_device[key] = by_device.get(key, 0) + count
    on_host = sum(leaf.num_bytes or 0 for leaf in leaves if leaf.memory == HOST)
    arrays = [leaf for leaf in leaves if leaf.is_array]
    num_unknown = sum(leaf.bytes_per_device is None for leaf in arrays)
    return Totals(by_device, on_host, num_unknown)
