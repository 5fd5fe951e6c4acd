"""What one leapfrog computes and sends, as seconds on any number of devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gspmd_mcmc.views.scaling.collective_times import (
    MODELLED_KINDS,
    AllReduce,
    collective_seconds,
    levels_of,
)
from gspmd_mcmc.views.scaling.interconnects import Interconnect

_REDUCTIONS = ("all-reduce", "reduce-scatter")


class SentCollective(Protocol):
    """One collective of a leapfrog, as ``communication`` reports it for a compiled program."""

    @property
    def kind(self) -> str:
        """Name of the operation: "all-reduce", "all-gather" and so on."""
        ...

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operand on one device."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the result on one device."""
        ...

    @property
    def runs(self) -> float:
        """How often it runs in one leapfrog."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that it runs over; empty where unknown."""
        ...

    @property
    def group_size(self) -> int:
        """Devices in one group."""
        ...


@dataclass(frozen=True, eq=False)
class CostModel:
    """Seconds of compute and of communication in one leapfrog.

    How bytes follow n, the devices along ``axis``, and the rows:

    - all-reduce, reduce-scatter: the operand stays as compiled (a gradient of shared latents).
    - all-gather, all-to-all, collective-permute: they move an array that has a row for each data row.
      Its whole grows with all rows together; each device holds an equal part of it.
    - Collectives over other axes alone: group and bytes stay as compiled.
    - Collectives over unknown axes are taken to run over ``axis``.

    Attributes
    ----------
    traffic
        What one leapfrog sends, as compiled for ``num_rows`` rows.
    num_rows
        Rows of data, all devices together.
    seconds_per_row, fixed_seconds
        Compute of one device: ``fixed_seconds + seconds_per_row * rows``.
    interconnects
        What joins the devices, the innermost first.
    axis
        The mesh axis that grows, the one that rows lie on.
    axis_size
        Devices along it when the program was compiled; None if no collective needs it.
    all_reduce
        Seconds of an all-reduce over one interconnect.
    """

    traffic: tuple[SentCollective, ...]
    num_rows: int
    seconds_per_row: float
    fixed_seconds: float
    interconnects: tuple[Interconnect, ...]
    axis: str
    axis_size: int | None
    all_reduce: AllReduce

    @property
    def not_modelled(self) -> tuple[SentCollective, ...]:
        """Collectives of a kind that has no formula: they count for nothing in the seconds."""
        return tuple(c for c in self.traffic if c.kind not in MODELLED_KINDS)

    def runs_over_axis(self, collective: SentCollective) -> bool:
        """Tell whether a collective's group grows with the mesh axis."""
        return self.axis in collective.axes or not collective.axes

    def compute_seconds(self, rows: int) -> float:
        """Seconds that a device computes in a leapfrog, with so many rows of its own."""
        return self.fixed_seconds + self.seconds_per_row * rows

    def communication_seconds(self, n: int, total_rows: int) -> float:
        """Seconds that a leapfrog communicates, on n devices with so many rows together."""
        modelled = [c for c in self.traffic if c.kind in MODELLED_KINDS]
        return sum((c.runs * self._one(c, n, total_rows) for c in modelled), 0.0)

    def _one(self, c: SentCollective, n: int, total_rows: int) -> float:
        size = c.group_size
        num_bytes = float(c.num_bytes if c.kind == "all-gather" else c.operand_bytes)
        if self.runs_over_axis(c):
            compiled = self._compiled_size(c)
            size = c.group_size // compiled * n
            if c.kind not in _REDUCTIONS:
                parts = 1 if c.kind == "all-gather" else n / compiled
                num_bytes *= total_rows / self.num_rows / parts
        return collective_seconds(c.kind, num_bytes, size, self.interconnects, self.all_reduce)

    def _compiled_size(self, c: SentCollective) -> int:
        """Devices along the growing axis in a compiled group: all of them, if it runs over it alone."""
        return self.axis_size if len(c.axes) > 1 and self.axis_size else c.group_size


def checked_devices(devices: Sequence[int]) -> np.ndarray:
    """Give numbers of devices as an array: whole, 1 or more, growing; else ValueError."""
    counts = np.asarray(devices)
    if counts.ndim != 1 or counts.size == 0 or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"devices: one whole number or more in a sequence, not {devices!r}")
    if counts[0] < 1 or np.any(np.diff(counts) <= 0):
        raise ValueError(f"devices: growing numbers, 1 or more, not {counts.tolist()}")
    return counts.astype(np.int64)


def check_compute(num_rows: int, seconds_per_row: float, fixed_seconds: float) -> None:
    """Refuse rows or seconds that cannot be: ValueError."""
    if num_rows != int(num_rows) or num_rows < 1:
        raise ValueError(f"num_rows is a whole number, 1 or more, not {num_rows}")
    if not (math.isfinite(seconds_per_row) and seconds_per_row > 0):
        raise ValueError(f"seconds_per_row is measured, above 0, not {seconds_per_row}")
    if not (math.isfinite(fixed_seconds) and fixed_seconds >= 0):
        raise ValueError(f"fixed_seconds is 0 or more, not {fixed_seconds}")


def check_links(links: tuple[Interconnect, ...], devices: np.ndarray) -> None:
    """Refuse interconnects that do not grow outwards or do not join so many devices: ValueError."""
    if not links or not all(isinstance(link, Interconnect) for link in links):
        raise ValueError(
            "interconnect: an Interconnect, or several, the innermost first (such as "
            f"gspmd_mcmc.cost.NVLINK_4), not {links!r}"
        )
    reach = [math.inf if link.max_devices is None else link.max_devices for link in links]
    if any(inner >= outer for inner, outer in zip(reach, reach[1:], strict=False)):
        names = ", ".join(str(link) for link in links)
        raise ValueError(f"interconnect: each joins more devices than the one before it, not {names}")
    levels_of(int(devices[-1]), links)


def check_traffic(traffic: Sequence[SentCollective]) -> None:
    """Refuse a collective whose numbers cannot be: ValueError, with its place and kind."""
    for i, c in enumerate(traffic):
        numbers = {"operand_bytes": c.operand_bytes, "num_bytes": c.num_bytes, "runs": c.runs}
        for name, number in numbers.items():
            if number is None or not math.isfinite(number) or number < 0:
                raise ValueError(
                    f"traffic[{i}] ({c.kind}): {name} is a number, 0 or more, not {number}"
                )
        if c.group_size < 1:
            raise ValueError(f"traffic[{i}] ({c.kind}): group_size is 1 or more, not {c.group_size}")


def compiled_axis_size(traffic: Sequence[SentCollective], axis: str, given: int | None) -> int | None:
    """Find the devices along the axis as compiled; check them against groups that need them."""
    alone = {c.group_size for c in traffic if tuple(c.axes) == (axis,)}
    size = given if given is not None else max(alone, default=None)
    if len(alone | {size} - {None}) > 1:
        raise ValueError(
            f"traffic: groups over {axis!r} alone have {sorted(alone)} devices, not {size}"
        )
    mixed = [c for c in traffic if axis in c.axes and len(c.axes) > 1]
    if mixed and size is None:
        raise ValueError(
            f"traffic: {mixed[0].kind} runs over {mixed[0].axes} at once and nothing over {axis!r} "
            "alone: say axis_size=, the devices along it in the compiled program"
        )
    for c in mixed:
        if c.group_size % (size or 1):
            raise ValueError(
                f"traffic: {c.kind} over {c.axes} has groups of {c.group_size} devices, "
                f"which the {size} along {axis!r} do not divide"
            )
    return size
