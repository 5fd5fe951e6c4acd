"""Where the leaves of a tree live: plain facts, to be held, tested and drawn."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.notation import array_text, number_ranges, partitions

DEVICE = "device"
HOST = "host"
DELETED = "deleted"
NOWHERE = "nowhere"
ABSTRACT = "abstract"
MAX_PROCESSES = 3  # that are named one by one


@dataclass(frozen=True)
class Devices:
    """Devices in the order of their mesh; only their names are kept."""

    numbers: tuple[int, ...]  # ids; positions in the mesh where it is abstract
    processes: tuple[int, ...]  # that each belongs to
    is_addressable: tuple[bool, ...]  # whether this process can reach the memory of each
    kind: str  # "cpu", "NVIDIA H200", ...; "abstract" for a mesh without devices
    axes: tuple[tuple[str, int], ...] = ()  # names and sizes of the mesh axes, if there is a mesh
    on_chip: tuple[str, ...] = ()  # of TPUs: "6 at (1, 1, 0)", the coordinates of its chip

    @classmethod
    def of(cls, devices: Iterable, axes: tuple[tuple[str, int], ...] = ()) -> "Devices":
        """Read the names of JAX devices."""
        devices = tuple(devices)
        return cls(
            numbers=tuple(d.id for d in devices),
            processes=tuple(d.process_index for d in devices),
            is_addressable=tuple(d.process_index == d.client.process_index() for d in devices),
            kind=" and ".join(dict.fromkeys(d.device_kind for d in devices)),
            axes=axes,
            on_chip=tuple(f"{d.id} at {tuple(d.coords)}" for d in devices if hasattr(d, "coords")),
        )

    @property
    def spans_processes(self) -> bool:
        """Whether they belong to several processes, or to another one than this."""
        return len(set(self.processes)) > 1 or not all(self.is_addressable)

    def names(self, positions: Sequence[int]) -> str:
        """Name the devices at some positions: ``0,4``, ``0-7``; ``p0:0-3 (p1:4-7)`` over processes.

        Parentheses mark devices that this process does not address. More than three processes are
        written as one, ``p0-7:0-63``, in parentheses if this process addresses none of the devices.
        """
        if not self.spans_processes:
            return number_ranges([self.numbers[i] for i in positions])
        processes = sorted({self.processes[i] for i in positions})
        texts = []
        for group in [[p] for p in processes] if len(processes) <= MAX_PROCESSES else [processes]:
            inside = [i for i in positions if self.processes[i] in group]
            text = f"p{number_ranges(group)}:{number_ranges([self.numbers[i] for i in inside])}"
            texts.append(text if any(self.is_addressable[i] for i in inside) else f"({text})")
        return " ".join(texts)

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        noun = f"{self.kind} device{'s' * (len(self) != 1)}"
        if not self.spans_processes:
            return f"{len(self)} {noun} {number_ranges(self.numbers)}"
        return f"{len(self)} {noun} in {len(set(self.processes))} processes"


@lru_cache(maxsize=64)
def mesh_devices(mesh: Mesh | AbstractMesh) -> Devices:
    """Return the devices of a mesh in its order; those of an abstract mesh are its positions."""
    axes = tuple(mesh.shape.items())
    if isinstance(mesh, Mesh):
        return Devices.of(mesh.devices.flat, axes)
    size = mesh.size
    return Devices(tuple(range(size)), (0,) * size, (True,) * size, ABSTRACT, axes)


@dataclass(frozen=True, eq=False)
class Grid:
    """A grid of equal blocks and their owners."""

    parts: tuple[int, ...]  # in how many blocks each axis of the array is cut
    owners: np.ndarray  # positions (in `Devices`) of those that hold each block, [*parts, copies]

    def __post_init__(self):
        self.owners.flags.writeable = False


def cut_by_spec(axes: tuple[tuple[str, int], ...], spec: P, ndim: int) -> Grid:
    """Cut an array over named mesh axes; axes that are left to the compiler are not cut."""
    entries = [() if e in (None, P.UNCONSTRAINED) else e for e in partitions(spec)[:ndim]]
    named = tuple(entry if isinstance(entry, tuple) else (entry,) for entry in entries)
    return _cut(axes, named + ((),) * (ndim - len(named)))


@lru_cache(maxsize=512)
def _cut(axes: tuple[tuple[str, int], ...], entries: tuple[tuple[str, ...], ...]) -> Grid:
    """Cut each axis over the mesh axes of its entry, the first of several being the slowest."""
    sizes = dict(axes)
    used = [name for entry in entries for name in entry]
    rest = [name for name in sizes if name not in used]
    positions = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    order = [list(sizes).index(name) for name in used + rest]
    parts = tuple(math.prod(sizes[name] for name in entry) for entry in entries)
    return Grid(parts, positions.transpose(order).reshape(*parts, -1))


def cut_by_indices(indices: Sequence[tuple[slice, ...]], shape: tuple[int, ...]) -> Grid | None:
    """Read the grid off each device's slices of an array; None where it is no grid of equal blocks."""
    block, parts = np.zeros(len(indices), int), []
    for size, slices in zip(shape, zip(*indices, strict=True), strict=True):
        bounds = [s.indices(size)[:2] for s in slices]
        cut = sorted(set(bounds))
        step = size // len(cut)
        if step * len(cut) != size or cut != [(i * step, (i + 1) * step) for i in range(len(cut))]:
            return None
        block = block * len(cut) + [cut.index(b) for b in bounds]
        parts.append(len(cut))
    if len(set(np.bincount(block, minlength=math.prod(parts)))) > 1:
        return None
    return Grid(tuple(parts), np.argsort(block, kind="stable").reshape(*parts, -1))


@dataclass(frozen=True)
class Block:
    """A block of an array and the devices (by id) that hold it; ``index`` slices the array."""

    index: tuple[slice, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LeafLayout:
    """Where one leaf lives.

    ``memory`` is "device"; "host" for NumPy arrays and Python numbers; another memory kind of JAX
    ("pinned_host"); "deleted"; "nowhere" for what has no layout (tracers, unplaced shapes).
    """

    path: str  # in the tree; "(the whole)" for a tree that is one leaf
    shape: tuple[int, ...] | None  # None for a bare sharding
    dtype: Any
    memory: str
    label: str  # its layout in a word, for a table
    spec: P | None = None  # None where the layout is not given by one
    devices: Devices | None = None
    grid: Grid | None = None  # which of the devices holds which block
    num_rows: int | None = None  # how many rows are real, where the rest is padding
    notes: tuple[str, ...] = ()  # rows that the mesh does not divide, padding, and so on

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
        """Whether it is an array or a number; of a mesh and a sharding alone ``dtype`` is a name."""
        return not isinstance(self.dtype, str)

    def over(self, axis: int) -> str:
        """Mesh axes that an axis of the leaf lies over: ``data``, ``data, model``, or nothing."""
        entries = () if self.spec is None else partitions(self.spec)
        entry = entries[axis] if axis < len(entries) else None
        return ", ".join(entry) if isinstance(entry, tuple) else entry if isinstance(entry, str) else ""

    @property
    def num_shards(self) -> int:
        """How many different blocks it is cut into; 0 where no device holds it."""
        return math.prod(self.grid.parts) if self.grid else 0

    @property
    def replication(self) -> int:
        """How many devices hold each block; 0 where no device holds it."""
        return self.grid.owners.shape[-1] if self.grid else 0

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
        if self.block_shape is None or self.num_bytes is None:
            return None
        return math.prod(self.block_shape) * self.dtype.itemsize

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
            assert self.shape is not None and self.block_shape is not None
            sizes = [
                np.clip(n - np.arange(p) * step, 0, step)
                for n, p, step in zip(self.shape, self.grid.parts, self.block_shape, strict=True)
            ]
            elements = np.asarray(reduce(np.multiply.outer, sizes, np.int64(1)))
            out[self.grid.owners] = (elements * self.dtype.itemsize)[..., None]
        return out

    def __repr__(self) -> str:
        where = f"{self.num_shards} blocks x {self.replication}" if self.grid else self.memory
        return f"LeafLayout({self.path}: {array_text(self.dtype, self.shape)}, {self.label}, {where})"


@dataclass(frozen=True)
class Totals:
    """Bytes that the leaves of a tree take in total."""

    by_device: dict[tuple[str, int], int] = dataclasses.field(hash=False)  # by (kind, id)
    on_host: int  # of NumPy arrays and Python numbers
    num_unknown: int  # arrays that have no known size, or no known place

    @property
    def per_device(self) -> int:
        """Bytes on the fullest device."""
        return max(self.by_device.values(), default=0)

    @classmethod
    def of(cls, leaves: Sequence[LeafLayout]) -> "Totals":
        """Sum the bytes of leaves on each device and on the host."""
        by_device: Counter[tuple[str, int]] = Counter()
        for leaf in leaves:
            if leaf.memory == DEVICE and leaf.devices and leaf.bytes_per_device is not None:
                counts = leaf.bytes_by_position().tolist()
                keys = [(leaf.devices.kind, number) for number in leaf.devices.numbers]
                by_device.update(dict(zip(keys, counts, strict=True)))
        on_host = sum(leaf.num_bytes or 0 for leaf in leaves if leaf.memory == HOST)
        num_unknown = sum(leaf.is_array and leaf.bytes_per_device is None for leaf in leaves)
        return cls(dict(by_device), on_host, num_unknown)
