"""The time of a leapfrog on a chip from what its program does there, and what bounds it.

What a program moves, launches, multiplies and sends are facts of the compiler (`program.work`).
Seconds are arithmetic: those facts over the peak figures of a kind of device. Kernels run one after the
other, each as long as its bytes, its arithmetic or its launch takes, whichever is longest; collectives
add what `collective_times` says of the wire.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.planning.chips import LINKS, Accelerator, Interconnect, accelerator
from gspmd_mcmc.planning.collective_times import MODELED_KINDS, collective_seconds
from gspmd_mcmc.planning.throughput import Throughput
from gspmd_mcmc.planning.work import Kernel, Work

# Chips whose compilers are asked, by their names there, are devices of these kinds.
OF_CHIP = {"TPU v2": "TPU v2 core", "TPU v3": "TPU v3 core", "H100": "H100 80GB"}
MOST_KERNELS = 3  # that are named


@dataclass(frozen=True)
class Roofline:
    """Seconds of some work on one kind of device, at best. ``print`` says what is fact and what is not.

    Attributes
    ----------
    work
        What the compiler's program does.
    device
        The kind of device.
    throughput
        What it does in a second at best.
    wire_seconds
        Seconds of the collectives.
    data_bytes
        Bytes of data that a device must read once; 0: not given.
    unit
        What the work is, one of them: "leapfrog".
    """

    work: Work
    device: str
    throughput: Throughput
    wire_seconds: float
    data_bytes: int = 0
    unit: str = "leapfrog"

    @cached_property
    def memory_seconds(self) -> float:
        """Seconds that memory takes for the bytes that pass through it."""
        return self.work.memory_bytes / self.throughput.memory_bandwidth

    @cached_property
    def arithmetic_seconds(self) -> float:
        """Seconds of products, padded to what a matrix unit takes, and of everything else.

        Of a kernel that is no XLA program, of the schedule that a TPU's compiler made of it.
        """
        return sum(kernel.runs * self._arithmetic(kernel) for kernel in self.work.each)

    @cached_property
    def launch_seconds(self) -> float:
        """Seconds of launching every kernel, and of reading back whether loops go on."""
        waits = self.work.readbacks * self.throughput.readback_seconds
        return self.work.kernels * self.throughput.launch_seconds + waits

    @cached_property
    def seconds(self) -> float:
        """Seconds at best, kernel after kernel."""
        return self.seconds_of(1)

    def seconds_of(self, factor: float) -> float:
        """Seconds where each kernel has ``factor`` times its bytes and its arithmetic."""
        kernels = sum(kernel.runs * self._longest(kernel, factor) for kernel in self.work.each)
        return kernels + self.work.readbacks * self.throughput.readback_seconds + self.wire_seconds

    @property
    def predicted_seconds(self) -> float:
        """Seconds at best, or what the compiler itself estimates of its kernels, if that is more."""
        return max(self.seconds, (self.estimated_seconds or 0.0) + self.wire_seconds)

    @property
    def rate_is(self) -> str:
        """What to write before the rate, which is too high if a kernel's arithmetic is not known."""
        return "" if self.work.is_counted else "fewer than "

    @property
    def per_second(self) -> float:
        """How many fit into a second, as predicted."""
        return 1 / self.predicted_seconds if self.predicted_seconds else math.inf

    @property
    def bound(self) -> str:
        """What takes longest: "memory", "arithmetic", "launches" or "the wire"."""
        return max(self.parts, key=lambda name: self.parts[name])

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of each of the four, as if there were nothing else."""
        return {
            "memory": self.memory_seconds,
            "arithmetic": self.arithmetic_seconds,
            "launches": self.launch_seconds,
            "the wire": self.wire_seconds,
        }

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes moved over the bytes of data that must be read once; None if those were not given."""
        return self.work.bytes_moved / self.data_bytes if self.data_bytes else None

    @property
    def estimated_seconds(self) -> float | None:
        """The compiler's own estimate of its kernels, where it has one and the clock is known (TPU)."""
        cycles, clock = self.work.estimated_cycles, self.throughput.clock_hz
        return None if cycles is None or clock is None else cycles / clock

    def _arithmetic(self, kernel: Kernel) -> float:
        if kernel.stated_flops and kernel.estimated_cycles and self.throughput.clock_hz:
            return kernel.estimated_cycles / self.throughput.clock_hz  # as it was scheduled
        products = sum(self.throughput.product_seconds(product) for product in kernel.products)
        stated = kernel.stated_flops / self.throughput.stated_flops
        return products + stated + kernel.other_flops / self.throughput.vector_flops

    def _longest(self, kernel: Kernel, factor: float) -> float:
        memory = kernel.memory_bytes / self.throughput.memory_bandwidth
        return max(factor * memory, factor * self._arithmetic(kernel), self.throughput.launch_seconds)

    def __str__(self) -> str:
        """Write the compiler's facts, then the arithmetic on them."""
        return "\n".join([*_facts(self), *_arithmetic_lines(self)])


def roofline(
    work: Work,
    device: str | Accelerator,
    *,
    data_bytes: int = 0,
    interconnect: Interconnect | Sequence[Interconnect] | None = None,
    throughput: Throughput | None = None,
    unit: str = "leapfrog",
) -> Roofline:
    """Return the seconds that some work takes on a kind of device at best, and what bounds it.

    Parameters
    ----------
    work
        What `work_of` counted, for one device.
    device
        Such as "H100 80GB" or "TPU v3 core", a chip of `plan`, "H100", or an `Accelerator`.
    data_bytes
        Bytes of data that a device holds and must read once: bytes moved stand against them.
    interconnect
        What joins the devices, or several, the innermost first; None: the usual ones of this device.
    throughput
        What the device does in a second, where it is not in the table: ``measure_throughput()``.
    unit
        What the work is, for the text.

    Raises
    ------
    ValueError
        If nothing is known of the device's throughput or of what joins it, or if the devices of a
        collective are not known, or it is of a kind that has no formula.
    """
    device = OF_CHIP.get(device, device) if isinstance(device, str) else device
    name = device if isinstance(device, str) else device.name
    if throughput is None:
        throughput = accelerator(device).throughput
    if throughput is None:
        raise ValueError(
            f"{name}: what it does in a second is not known. Give it: "
            "roofline(..., throughput=Throughput(memory_bandwidth=..., product_flops=..., ...))"
        )
    is_one = isinstance(interconnect, Interconnect)
    links = (interconnect,) if is_one else tuple(interconnect or LINKS.get(name, ()))
    return Roofline(work, name, throughput, _wire_seconds(work, links, name), data_bytes, unit)


def _wire_seconds(work: Work, links: tuple[Interconnect, ...], name: str) -> float:
    seconds = 0.0
    for sent in work.collectives:
        if sent.group_size == 1:
            continue
        if not links:
            raise ValueError(f"{name}: what joins its devices is not known: give interconnect=...")
        if sent.group_size == 0 or sent.kind not in MODELED_KINDS:
            raise ValueError(
                f"{sent.kind} of {sent.num_bytes:,} bytes among groups of {sent.group_size} devices: "
                f"its time is not known. Known: {', '.join(MODELED_KINDS)}, in groups that can be read"
            )
        num_bytes = sent.num_bytes if sent.kind == "all-gather" else sent.operand_bytes
        seconds += sent.runs * collective_seconds(sent.kind, num_bytes, sent.group_size, links)
    return seconds


def _facts(found: Roofline) -> list[str]:
    work, unit = found.work, found.unit
    moved = f"{bytes_text(work.bytes_read)} read, {bytes_text(work.bytes_written)} written"
    tiles = f", {bytes_text(work.tile_bytes)} more by whole tiles" if work.tile_bytes else ""
    lines = [
        f"One {unit} on one {found.device}, as its compiler has it (facts):",
        f"  memory: {bytes_text(work.bytes_moved)} moved ({moved}){tiles}",
    ]
    if found.bytes_ratio is not None:
        data = bytes_text(found.data_bytes)
        lines.append(f"  the data are {data}: {found.bytes_ratio:.1f} times that is moved")
    largest = sorted(work.each, key=lambda k: k.memory_bytes * k.runs, reverse=True)[:MOST_KERNELS]
    for kernel in largest:
        source = f", {kernel.source}" if kernel.source else ""
        runs = f" x {kernel.runs}" if kernel.runs > 1 else ""
        lines.append(f"    {kernel.name}{runs}: {bytes_text(kernel.bytes_moved)}{source}")
    waits = f", {work.readbacks} reads of a loop's condition" if work.readbacks else ""
    lines.append(f"  kernels: {work.kernels}{waits}")
    products = ", ".join(f"{n / 1e9:.3g} GFLOP of {kind}" for kind, n in work.product_flops.items())
    stated = f", {work.stated_flops / 1e9:.3g} GFLOP as kernels state" if work.stated_flops else ""
    rest = f"{work.other_flops / 1e9:.3g} GFLOP else"
    lines.append(f"  arithmetic: {products or 'no products'}{stated}; {rest}")
    for sent in work.collectives:
        runs = f"{sent.runs} x " if sent.runs > 1 else ""
        among = f"among {sent.group_size} devices"
        lines.append(f"  sent: {runs}{sent.kind}, {bytes_text(sent.num_bytes)} {among}")
    if found.estimated_seconds is not None:
        cycles = f"{work.estimated_cycles:,} cycles"
        lines.append(
            f"  its own estimate of these kernels: {cycles}, {time_text(found.estimated_seconds)}"
        )
    return lines + [f"  {note}" for note in work.notes]


def _arithmetic_lines(found: Roofline) -> list[str]:
    parts = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in found.parts.items())
    is_slower = found.predicted_seconds > found.seconds
    own = ", by the compiler's own estimate, which is slower" if is_slower else ""
    return [
        "From these, over the device's peak figures (arithmetic, at best):",
        f"  {parts}",
        f"  kernel after kernel {time_text(found.seconds)}, bound by {found.bound}; predicted: "
        f"{found.rate_is}{found.per_second:,.0f} {found.unit}s a second{own}",
    ]


def time_text(seconds: float) -> str:
    """Write seconds with a unit that suits them: ``2.5 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"
