"""A cost model on paper: what a leapfrog would take on a mesh of n devices.

Compute is measured by the caller on devices at hand; communication follows from the bytes that a
leapfrog sends and from latency and bandwidth of an interconnect. What comes out is a prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gspmd_mcmc.views.scaling import drawing
from gspmd_mcmc.views.scaling.collective_times import AllReduce, fastest_all_reduce
from gspmd_mcmc.views.scaling.interconnects import Interconnect
from gspmd_mcmc.views.scaling.model import (
    CostModel,
    SentCollective,
    check_compute,
    check_links,
    check_traffic,
    checked_devices,
    compiled_axis_size,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POWERS_OF_TWO = tuple(2**k for k in range(13))  # 1 to 4,096


@dataclass(frozen=True, eq=False)
class Scaling:
    """Seconds of one leapfrog over numbers of devices. All arrays have one entry for each.

    Attributes
    ----------
    devices
        Devices along the mesh axis.
    rows
        Rows on one device, the fullest.
    compute_seconds, communication_seconds
        Their sum is ``total_seconds``.
    efficiency
        Strong scaling: seconds on one device / (n × seconds on n). Weak: the same without n.
    """

    devices: np.ndarray
    rows: np.ndarray
    compute_seconds: np.ndarray
    communication_seconds: np.ndarray
    efficiency: np.ndarray

    @property
    def total_seconds(self) -> np.ndarray:
        """Compute, then communication: nothing overlaps."""
        return self.compute_seconds + self.communication_seconds

    @property
    def crossover(self) -> int | None:
        """The first number of devices where communication takes longer than compute; None: nowhere."""
        above = np.flatnonzero(self.communication_seconds > self.compute_seconds)
        return int(self.devices[above[0]]) if above.size else None

    @property
    def crossover_between(self) -> float | None:
        """Devices where both take as long, on straight lines of the log-log plot around ``crossover``.

        None if they cross nowhere, or if nothing is communicated before the crossover.
        """
        above = np.flatnonzero(self.communication_seconds > self.compute_seconds)
        if not above.size or above[0] == 0 or self.communication_seconds[above[0] - 1] == 0:
            return None
        two = slice(above[0] - 1, above[0] + 1)
        before, after = np.log(self.communication_seconds[two] / self.compute_seconds[two])
        first, last = np.log(self.devices[two])
        return float(np.exp(first + (last - first) * before / (before - after)))


@dataclass(frozen=True, eq=False)
class Prediction:
    """Seconds of a leapfrog on meshes that were not measured. ``print`` it, or draw its ``figure``.

    Attributes
    ----------
    model
        What it follows from.
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
        """Rows that each of n devices needs for compute to be this share of the leapfrog.

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
        return drawing.figure(self)

    def __str__(self) -> str:
        """Table of both scalings, where communication overtakes, and every assumption."""
        return drawing.text(self)


def predict(
    traffic: Sequence[SentCollective],
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
        was compiled for two devices or more and for ``num_rows`` rows.
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
        If a number is out of range, or the interconnects do not join so many devices.
    """
    is_one = isinstance(interconnect, Interconnect | str)  # a name is refused as a whole
    links = (interconnect,) if is_one else tuple(interconnect)
    counts = checked_devices(devices)
    check_compute(num_rows, seconds_per_row, fixed_seconds)
    check_links(links, counts)
    check_traffic(traffic)
    model = CostModel(
        tuple(traffic),
        num_rows,
        seconds_per_row,
        fixed_seconds,
        links,
        axis,
        compiled_axis_size(traffic, axis, axis_size),
        all_reduce,
    )
    return Prediction(
        model,
        strong=_scaling(model, counts, -(-num_rows // counts), np.full_like(counts, num_rows), counts),
        weak=_scaling(
            model, counts, np.full_like(counts, num_rows), num_rows * counts, np.ones_like(counts)
        ),
    )


def _scaling(
    model: CostModel, devices: np.ndarray, rows: np.ndarray, total_rows: np.ndarray, ideal: np.ndarray
) -> Scaling:
    """Evaluate a model; ``ideal`` is how many times faster than one device each should be."""
    compute = np.array([model.compute_seconds(int(r)) for r in rows])
    pairs = zip(devices.tolist(), total_rows.tolist(), strict=True)
    communication = np.array([model.communication_seconds(n, r) for n, r in pairs])
    alone = model.compute_seconds(model.num_rows) + model.communication_seconds(1, model.num_rows)
    return Scaling(devices, rows, compute, communication, alone / (ideal * (compute + communication)))


@dataclass(frozen=True)
class ComputeFit:
    """A straight line through measured times.

    Attributes
    ----------
    seconds_per_row, fixed_seconds
        ``seconds = fixed_seconds + seconds_per_row * rows``.
    largest_error
        The largest relative error of the line at a measured point: a bent curve shows here.
    """

    seconds_per_row: float
    fixed_seconds: float
    largest_error: float


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
