"""The time of a leapfrog on any number of devices, predicted on paper from a report's traffic.

Compute is measured by the caller on the devices at hand; communication follows from the bytes that a
leapfrog sends and from the latency and bandwidth of an interconnect. The result is a prediction.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gspmd_mcmc.views import chips, cost_views
from gspmd_mcmc.views.chips import Interconnect
from gspmd_mcmc.views.collective_times import (
    MODELED_KINDS,
    AllReduce,
    collective_seconds,
    fastest_all_reduce,
    halving_doubling_all_reduce,
    levels_of,
    ring_all_reduce,
    tree_all_reduce,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gspmd_mcmc.views.program.report import Traffic

__all__ = [  # with the interconnects of `chips`, by their names
    "POWERS_OF_TWO",
    "Interconnect",
    "Prediction",
    "fastest_all_reduce",
    "fit_compute",
    "halving_doubling_all_reduce",
    "predict",
    "ring_all_reduce",
    "tree_all_reduce",
]
TPU_V4_ICI, TPU_V5E_ICI, TPU_V5P_ICI = chips.TPU_V4_ICI, chips.TPU_V5E_ICI, chips.TPU_V5P_ICI
NVLINK_3, NVLINK_4, TPU_DCN = chips.NVLINK_3, chips.NVLINK_4, chips.TPU_DCN
INFINIBAND_HDR, INFINIBAND_NDR = chips.INFINIBAND_HDR, chips.INFINIBAND_NDR
ETHERNET_10G, ETHERNET_100G = chips.ETHERNET_10G, chips.ETHERNET_100G

POWERS_OF_TWO = tuple(2**k for k in range(13))  # 1 to 4,096
_REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True, eq=False)
class CostModel:
    """Seconds of compute and of communication in one leapfrog; fields are arguments of `predict`.

    How bytes follow n, the devices along ``axis``, and the rows:

    - all-reduce, reduce-scatter: the operand stays as compiled (a gradient of shared latents).
    - all-gather, all-to-all, collective-permute: they move an array that has a row for each data row.
      Its whole grows with all rows together; each device holds an equal part of it.
    - Collectives over other axes alone: group and bytes stay as compiled.
    - Collectives over unknown axes are taken to run over ``axis``.
    """

    traffic: "tuple[Traffic, ...]"
    num_rows: int
    seconds_per_row: float
    fixed_seconds: float
    interconnects: tuple[Interconnect, ...]
    axis: str
    axis_size: int | None
    all_reduce: AllReduce

    @property
    def not_modeled(self) -> "tuple[Traffic, ...]":
        """Collectives of a kind that has no formula: they count for nothing in the seconds."""
        return tuple(c for c in self.traffic if c.kind not in MODELED_KINDS)

    def runs_over_axis(self, collective: "Traffic") -> bool:
        """Tell whether a collective's group grows with the mesh axis."""
        return self.axis in collective.axes or not collective.axes

    def compute_seconds(self, rows: int) -> float:
        """Seconds that a device computes in a leapfrog, with this many rows of its own."""
        return self.fixed_seconds + self.seconds_per_row * rows

    def communication_seconds(self, n: int, total_rows: int) -> float:
        """Seconds that a leapfrog communicates, on n devices with this many rows together."""
        modeled = [c for c in self.traffic if c.kind in MODELED_KINDS]
        return sum((c.runs * self._one(c, n, total_rows) for c in modeled), 0.0)

    def _one(self, c: "Traffic", n: int, total_rows: int) -> float:
        size = c.group_size
        num_bytes = float(c.num_bytes if c.kind == "all-gather" else c.operand_bytes)
        if self.runs_over_axis(c):
            # Devices along the axis in a compiled group: all of them, if it runs over it alone.
            compiled = self.axis_size if len(c.axes) > 1 and self.axis_size else c.group_size
            size = c.group_size // compiled * n
            if c.kind not in _REDUCTIONS:
                parts = 1 if c.kind == "all-gather" else n / compiled
                num_bytes *= total_rows / self.num_rows / parts
        return collective_seconds(c.kind, num_bytes, size, self.interconnects, self.all_reduce)

    def scaling(self, devices: np.ndarray, is_strong: bool) -> "Scaling":
        """Evaluate the model with its rows shared out (strong), or with as many on each device."""
        rows = -(-self.num_rows // devices) if is_strong else np.full_like(devices, self.num_rows)
        total_rows = np.full_like(devices, self.num_rows) if is_strong else self.num_rows * devices
        compute = np.array([self.compute_seconds(int(r)) for r in rows])
        pairs = zip(devices.tolist(), total_rows.tolist(), strict=True)
        communication = np.array([self.communication_seconds(n, r) for n, r in pairs])
        alone = self.compute_seconds(self.num_rows) + self.communication_seconds(1, self.num_rows)
        ideal = alone / devices if is_strong else alone
        return Scaling(devices, rows, compute, communication, ideal / (compute + communication))


@dataclass(frozen=True, eq=False)
class Scaling:
    """Seconds of one leapfrog over numbers of devices. All arrays have one entry for each."""

    devices: np.ndarray  # along the mesh axis
    rows: np.ndarray  # on the fullest device
    compute_seconds: np.ndarray
    communication_seconds: np.ndarray
    efficiency: np.ndarray  # seconds on one device / (n × seconds on n); without n in weak scaling

    @property
    def total_seconds(self) -> np.ndarray:
        """Compute, then communication: nothing overlaps."""
        return self.compute_seconds + self.communication_seconds

    @property
    def crossover(self) -> int | None:
        """The first number of devices where communication takes longer than compute; None: nowhere."""
        is_above = self.communication_seconds > self.compute_seconds
        return int(self.devices[is_above.argmax()]) if is_above.any() else None

    @property
    def crossover_between(self) -> float | None:
        """Devices where both take as long, on straight lines of the log-log plot around ``crossover``.

        None if they cross nowhere, or if nothing is communicated before the crossover.
        """
        first_above = int(np.argmax(self.communication_seconds > self.compute_seconds))
        if first_above == 0 or self.communication_seconds[first_above - 1] == 0:
            return None
        two = slice(first_above - 1, first_above + 1)
        before, after = np.log(self.communication_seconds[two] / self.compute_seconds[two])
        first, last = np.log(self.devices[two])
        return float(np.exp(first + (last - first) * before / (before - after)))


@dataclass(frozen=True, eq=False)
class Prediction:
    """Seconds of a leapfrog on meshes that were not measured. ``print`` it, or draw its ``figure``.

    Attributes
    ----------
    model
        The model that it follows from.
    strong
        ``num_rows`` rows shared out over n devices, rounded up.
    weak
        ``num_rows`` rows on each of n devices.
    """

    model: CostModel
    strong: Scaling
    weak: Scaling

    @property
    def crossover(self) -> int | None:
        """First number of devices where communication overtakes compute, rows fixed; None: nowhere."""
        return self.strong.crossover

    def rows_for(self, efficiency: float, n: int) -> int:
        """Return the rows that each of n devices needs for compute to be this share of the leapfrog.

        Parameters
        ----------
        efficiency
            Compute / (compute + communication), above 0 and below 1; 10 / 11 makes compute ten
            times communication.
        n
            Devices along the mesh axis.

        Raises
        ------
        ValueError
            If communication grows with rows so fast that no number is enough.
        """
        if not 0 < efficiency < 1:
            raise ValueError(f"efficiency is above 0 and below 1, not {efficiency}")

        def enough(rows: int) -> bool:
            sends = self.model.communication_seconds(n, n * rows)
            return (1 - efficiency) * self.model.compute_seconds(rows) >= efficiency * sends

        high = next((2**k for k in range(60) if enough(2**k)), None)
        if high is None:
            raise ValueError(
                f"no number of rows makes compute {efficiency:.1%} of a leapfrog on {n:,} devices: "
                "what is communicated grows with the rows (all-gather, all-to-all or permute)"
            )
        low = high // 2  # Not enough, or 0.
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def figure(self) -> "Figure":
        """Draw strong and weak scaling side by side; not registered with pyplot."""
        return cost_views.figure(self)

    def __str__(self) -> str:
        """Table of both scalings, where communication overtakes, and every assumption."""
        return cost_views.text(self)


def predict(
    traffic: "Sequence[Traffic]",
    *,
    num_rows: int,
    seconds_per_row: float,
    interconnect: Interconnect | Sequence[Interconnect],
    fixed_seconds: float = 0.0,
    devices: Sequence[int] = POWERS_OF_TWO,
    axis: str = "data",
    axis_size: int | None = None,
    all_reduce: AllReduce = fastest_all_reduce,
) -> Prediction:
    """Predict the seconds of a leapfrog on more devices than are at hand.

    Parameters
    ----------
    traffic
        What one leapfrog sends: ``communication(step, ...).traffic("leapfrog")`` of a program that
        was compiled for two devices or more and for ``num_rows`` rows; or objects with the attributes
        of `Traffic`.
    num_rows
        Rows of data, all together; in weak scaling, rows on each device.
    seconds_per_row, fixed_seconds
        Compute of a leapfrog on one device, measured: see ``fit_compute``.
    interconnect
        What joins the devices, or several, the innermost first: ``[NVLINK_4, INFINIBAND_NDR]``.
    devices
        Devices along the mesh axis, growing.
    axis
        The mesh axis that grows, the one that rows lie on.
    axis_size
        Devices along it in the compiled program. Only needed where a collective runs over it and
        another axis at once, and none over it alone.
    all_reduce
        The algorithm, a function of ``collective_times``: its name is in the printed assumptions.

    Raises
    ------
    ValueError
        If a number is out of range, or the interconnects do not join this many devices.
    """
    is_one = isinstance(interconnect, Interconnect | str)  # a name is refused as a whole
    links = (interconnect,) if is_one else tuple(interconnect)
    counts = np.asarray(devices)
    if counts.ndim != 1 or counts.size == 0 or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"devices: one whole number or more in a sequence, not {devices!r}")
    if counts[0] < 1 or np.any(np.diff(counts) <= 0):
        raise ValueError(f"devices: growing numbers, 1 or more, not {counts.tolist()}")
    counts = counts.astype(np.int64)
    if num_rows != int(num_rows) or num_rows < 1:
        raise ValueError(f"num_rows is a whole number, 1 or more, not {num_rows}")
    if not 0 < seconds_per_row < math.inf:
        raise ValueError(f"seconds_per_row is measured, above 0, not {seconds_per_row}")
    if not 0 <= fixed_seconds < math.inf:
        raise ValueError(f"fixed_seconds is 0 or more, not {fixed_seconds}")
    if not links or not all(isinstance(link, Interconnect) for link in links):
        raise ValueError(
            "interconnect: an Interconnect, or several, the innermost first (such as "
            f"gspmd_mcmc.cost.NVLINK_4), not {links!r}"
        )
    reach = [math.inf if link.max_devices is None else link.max_devices for link in links]
    if any(inner >= outer for inner, outer in itertools.pairwise(reach)):
        names = ", ".join(str(link) for link in links)
        raise ValueError(f"interconnect: each joins more devices than the one before it, not {names}")
    levels_of(int(counts[-1]), links)  # raises if they join fewer
    _check_traffic(traffic)
    size = _compiled_axis_size(traffic, axis, axis_size)
    compute = num_rows, seconds_per_row, fixed_seconds
    model = CostModel(tuple(traffic), *compute, links, axis, size, all_reduce)
    return Prediction(model, model.scaling(counts, True), model.scaling(counts, False))


def _check_traffic(traffic: "Sequence[Traffic]") -> None:
    """Refuse a collective whose numbers cannot be, with its place and kind."""
    for i, c in enumerate(traffic):
        for name in ("operand_bytes", "num_bytes", "runs"):
            number = getattr(c, name)
            if number is None or not 0 <= number < math.inf:
                raise ValueError(
                    f"traffic[{i}] ({c.kind}): {name} is a number, 0 or more, not {number}"
                )
        if c.group_size < 1:
            raise ValueError(f"traffic[{i}] ({c.kind}): group_size is 1 or more, not {c.group_size}")


def _compiled_axis_size(traffic: "Sequence[Traffic]", axis: str, given: int | None) -> int | None:
    """Find the devices along the axis as compiled; check them against groups that need them."""
    alone = {c.group_size for c in traffic if tuple(c.axes) == (axis,)}
    size = given if given is not None else max(alone, default=None)
    if len(alone | {size} - {None}) > 1:
        raise ValueError(
            f"traffic: groups over {axis!r} alone have {sorted(alone)} devices, not {size}"
        )
    for c in traffic:
        if axis not in c.axes or len(c.axes) == 1:
            continue
        if size is None:
            raise ValueError(
                f"traffic: {c.kind} runs over {c.axes} at once and nothing over {axis!r} "
                "alone: say axis_size=, the devices along it in the compiled program"
            )
        if c.group_size % (size or 1):
            raise ValueError(
                f"traffic: {c.kind} over {c.axes} has groups of {c.group_size} devices, "
                f"which the {size} along {axis!r} do not divide"
            )
    return size


@dataclass(frozen=True)
class ComputeFit:
    """A straight line through measured times: ``fixed_seconds + seconds_per_row * rows``."""

    seconds_per_row: float
    fixed_seconds: float
    largest_error: float  # relative, of the line at a measured point: a bent curve shows here


def fit_compute(measured: Sequence[tuple[float, float]]) -> ComputeFit:
    """Fit seconds per row, and fixed seconds, to measured times, by least squares.

    Parameters
    ----------
    measured
        Pairs of rows on one device and the seconds of a leapfrog, communication not included. The
        smaller numbers should be as small as a device's share is to become.

    Raises
    ------
    ValueError
        With fewer than two different numbers of rows, or if more rows are not slower.
    """
    points = np.asarray(measured, dtype=float).reshape(-1, 2)
    rows, seconds = points.T
    if not np.all(np.isfinite(points) & (points > 0)):
        raise ValueError(f"measured: rows and seconds are above 0, not {points.tolist()}")
    if len(set(rows.tolist())) < 2:
        raise ValueError(f"measured: two different numbers of rows at least, not {rows.tolist()}")
    slope, fixed = np.polyfit(rows, seconds, 1)
    if fixed < 0:  # No time is below 0: the best line with none at all.
        slope, fixed = (rows @ seconds) / (rows @ rows), 0.0
    if slope <= 0:
        raise ValueError(
            f"measured: more rows are not slower ({slope:.3g} s a row); measure larger blocks"
        )
    errors = np.abs(fixed + slope * rows - seconds) / seconds
    return ComputeFit(float(slope), float(fixed), float(errors.max()))
