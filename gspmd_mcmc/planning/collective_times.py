r"""Seconds that a collective takes, from latency and bandwidth.

A message of :math:`m` bytes takes :math:`\alpha + m/B`; devices send and receive at once; reducing
costs nothing. For :math:`n` devices and :math:`V` bytes, on a switched network:

================  =====================================================================
reduce-scatter    :math:`(n-1)\alpha + \frac{n-1}{n} V/B`, a ring; all-gather the same
all-reduce        ring: twice that; tree: :math:`2\lceil\log_2 n\rceil\alpha + 2V/B`
all-to-all        :math:`(n-1)\alpha + \frac{n-1}{n} V/B`, pairwise exchange
permute           :math:`\alpha + V/B`
================  =====================================================================

On a torus with sides :math:`s_i` each axis is a ring, :math:`\sum (s_i - 1)` steps in all, and the
buffer is cut into a part for each axis, so that all links work at once; sides of 1 have none.

References
----------
R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in MPICH*,
Int. J. High Performance Computing Applications 19 (2005): ring, pairwise, halving and doubling.
E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn, *Collective communication: theory, practice, and
experience*, Concurrency and Computation 19 (2007): the lower bounds and the composition by axes.
P. Sanders, J. Speck, J. Larsson Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and
scan*, Parallel Computing 35 (2009): the double binary tree.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

from gspmd_mcmc.planning.chips import Interconnect

Levels = list[tuple[Interconnect, int]]


def ring_reduce_scatter(num_bytes: float, n: int, link: Interconnect) -> float:
    """Seconds to reduce a buffer over n devices and leave a part of it on each; an all-gather's too.

    ``num_bytes`` are those of the whole buffer. The overhead of the link is not counted here.
    """
    sides, bandwidth = (n,), link.bandwidth
    if link.torus_axes:
        sides = torus_sides(n, link.torus_axes)
        bandwidth *= max(len(sides), 1) / link.torus_axes
    return sum(side - 1 for side in sides) * link.latency + (n - 1) / n * num_bytes / bandwidth


def ring_all_reduce(num_bytes: float, n: int, link: Interconnect) -> float:
    """Seconds of a ring reduce-scatter and a ring all-gather; on a torus, by axes."""
    return 2 * ring_reduce_scatter(num_bytes, n, link)


def tree_all_reduce(num_bytes: float, n: int, link: Interconnect) -> float:
    """Seconds of an all-reduce by a double binary tree, up and down, its chunks ideally pipelined.

    NCCL's own model has the same form. A torus has no such tree.
    """
    steps = 2 * math.ceil(math.log2(n))
    return steps * link.latency + 2 * (n > 1) * num_bytes / link.bandwidth


def fastest_all_reduce(num_bytes: float, n: int, link: Interconnect) -> float:
    """Seconds of the better of ring and tree; on a torus, of the ring."""
    ring = ring_all_reduce(num_bytes, n, link)
    return ring if link.torus_axes else min(ring, tree_all_reduce(num_bytes, n, link))


def pairwise_all_to_all(num_bytes: float, n: int, link: Interconnect) -> float:
    """Seconds for each device to send an equal share of its buffer to every other.

    On a torus shares travel the shorter way round: with s devices on an axis, at most s/2 hops, and
    about s/4 times the bytes through each device; the longest side takes longest.
    """
    if not link.torus_axes:
        return (n - 1) * link.latency + (n - 1) / n * num_bytes / link.bandwidth
    sides = torus_sides(n, link.torus_axes)
    travelled = max((side**2 // 4 / side for side in sides), default=0.0) * num_bytes
    hops = sum(side // 2 for side in sides)
    return hops * link.latency + travelled / (link.bandwidth / link.torus_axes)


def permute(num_bytes: float, n: int, link: Interconnect) -> float:
    """Seconds for each device to send its buffer to one other; on a torus, to a neighbor."""
    links = 2 * link.torus_axes or 1
    return (n > 1) * (link.latency + num_bytes * links / link.bandwidth)


def levels_of(n: int, interconnects: Sequence[Interconnect]) -> Levels:
    """Return interconnects with how many each joins: devices, then groups of the level inside.

    The innermost is filled first. The last group may be part empty; it counts as full.
    """
    levels, joined = [], 1
    for link in interconnects:
        reach = n if link.max_devices is None else min(n, link.max_devices)
        if reach > joined:
            levels.append((link, math.ceil(reach / joined)))
            joined = reach
    if joined < n:
        raise ValueError(
            f"{n:,} devices are more than {interconnects[-1].name} joins ({joined:,}): give what joins "
            f"such groups as the next interconnect, [..., {interconnects[-1].name}, outer], "
            "or predict for fewer devices"
        )
    return levels


def _over_levels_all_reduce(num_bytes: float, levels: Levels) -> float:
    """Reduce-scatter inside, all-reduce across, all-gather inside."""
    (link, n), *outer = levels
    if not outer:
        return fastest_all_reduce(num_bytes, n, link)
    across = _over_levels_all_reduce(num_bytes / n, outer)
    return 2 * ring_reduce_scatter(num_bytes, n, link) + across


def _over_levels_reduce_scatter(num_bytes: float, levels: Levels) -> float:
    """Reduce-scatter inside, then what is left of the buffer across; an all-gather is its mirror."""
    seconds = 0.0
    for link, n in levels:
        seconds += ring_reduce_scatter(num_bytes, n, link)
        num_bytes /= n
    return seconds


_SECONDS: dict[str, Callable[[float, Levels], float]] = {
    "all-reduce": _over_levels_all_reduce,
    "reduce-scatter": _over_levels_reduce_scatter,
    "all-gather": _over_levels_reduce_scatter,
    # The whole buffer is exchanged inside, sorted by the group it goes to, and again across.
    "all-to-all": lambda size, levels: sum(pairwise_all_to_all(size, n, link) for link, n in levels),
    # All send at once, and wait for the slowest link that is in use.
    "collective-permute": lambda size, levels: max(permute(size, n, link) for link, n in levels),
}
MODELED_KINDS = tuple(_SECONDS)


def collective_seconds(
    kind: str, num_bytes: float, n: int, interconnects: Sequence[Interconnect]
) -> float:
    """Seconds of one collective among n devices, its launch included; 0 for one device.

    ``num_bytes`` are those of the operand on one device; of the result, for an all-gather.
    """
    seconds, levels = _SECONDS[kind], levels_of(n, interconnects)
    if not levels:
        return 0.0
    return max(link.overhead for link, _ in levels) + seconds(num_bytes, levels)


@cache
def torus_sides(n: int, axes: int) -> tuple[int, ...]:
    """Sides of the most cubic torus of n devices, without sides of 1: 32 on 3 axes is (2, 4, 4).

    These are the shapes in which TPU slices are offered. A number without factors is one long ring.
    """
    if n == 1 or axes == 1:
        return (n,) * (n > 1)
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    shapes = [((d,) if d > 1 else ()) + torus_sides(n // d, axes - 1) for d in divisors]
    return tuple(sorted(min(shapes, key=lambda shape: (sum(shape), -len(shape)))))
