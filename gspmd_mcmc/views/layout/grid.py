"""How a sharding cuts an array into blocks, and which devices hold each: arithmetic on positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.notation import partitions


@dataclass(frozen=True, eq=False)
class Grid:
    """A grid of equal blocks and their owners.

    Attributes
    ----------
    parts
        In how many blocks each axis of the array is cut.
    owners
        Positions (in `Devices`) of those that hold each block, shape [*parts, copies].
    """

    parts: tuple[int, ...]
    owners: np.ndarray

    @property
    def num_blocks(self) -> int:
        """How many blocks differ."""
        return math.prod(self.parts)

    @property
    def copies(self) -> int:
        """How many devices hold each block."""
        return self.owners.shape[-1]


def spec_entries(spec: P, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that each axis of an array lies over; what is left to the compiler counts as none."""
    entries = [
        () if e is None or e is P.UNCONSTRAINED else e if isinstance(e, tuple) else (e,)
        for e in partitions(spec)
    ]
    return tuple(entries[:ndim]) + ((),) * (ndim - len(entries))


@lru_cache(maxsize=512)
def cut_by_spec(axes: tuple[tuple[str, int], ...], entries: tuple[tuple[str, ...], ...]) -> Grid:
    """Cut an array over named mesh axes, the first of several axes being the slowest."""
    sizes = dict(axes)
    used = [name for entry in entries for name in entry]
    rest = [name for name in sizes if name not in used]
    positions = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    order = [list(sizes).index(name) for name in used + rest]
    parts = tuple(math.prod(sizes[name] for name in entry) for entry in entries)
    return Grid(parts, _frozen(positions.transpose(order).reshape(*parts, -1)))


def cut_by_indices(indices: Sequence[tuple[slice, ...]], shape: tuple[int, ...]) -> Grid | None:
    """Read the grid off each device's slices of an array; None where it is no grid of equal blocks."""
    bounds = [
        [s.indices(n)[:2] for s in axis]
        for n, axis in zip(shape, zip(*indices, strict=True), strict=True)
    ]
    distinct = [sorted(set(axis)) for axis in bounds]
    parts = tuple(map(len, distinct))
    if not all(_is_equal_cut(cut, n) for cut, n in zip(distinct, shape, strict=True)):
        return None
    block = np.zeros(len(indices), int)
    for cut, axis in zip(distinct, bounds, strict=True):
        block = block * len(cut) + [cut.index(b) for b in axis]
    counts = np.bincount(block, minlength=math.prod(parts))
    if len(set(counts)) > 1:
        return None
    return Grid(parts, _frozen(np.argsort(block, kind="stable").reshape(*parts, -1)))


def _is_equal_cut(cut: list[tuple[int, int]], size: int) -> bool:
    step = size // len(cut)
    return cut == [(i * step, (i + 1) * step) for i in range(len(cut))] and step * len(cut) == size


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
