"""What is known of a compiled program: its collectives, its memory, how to count them, and budgets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import PartitionSpec as P
from rich.jupyter import JupyterMixin

from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.views.notation import LARGE_BYTES
from gspmd_mcmc.views.program import report_views
from gspmd_mcmc.views.program.hlo import KINDS, Frame, Loop

MOST_NAMED = 5  # of the arrays that a device holds, where a budget of memory is exceeded
_PACKAGE = f"{Path(__file__).parents[2]}/"
_MEMORY = ("argument_bytes", "output_bytes", "temporary_bytes", "constant_bytes", "peak_bytes")


class BudgetExceeded(AssertionError):
    """A program sends or holds more than it was allowed, or less than it must."""


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program; an asynchronous pair and a fused tuple are one."""

    kind: str  # "all-reduce", "all-gather", "reduce-scatter", "all-to-all", ...
    shape: str  # of its result on one device, such as ``f32[8,16]``
    num_bytes: int
    operand_shape: str  # of what one device puts in
    operand_bytes: int
    axes: tuple[str, ...]  # that it runs over; () where its groups of devices are no axes of the mesh
    group_size: int  # devices that take part with each other; 0 where groups could not be read
    loops: tuple[Loop, ...]  # that it is in, the outermost first
    op_name: str  # the name that JAX gave the operation it comes from
    stack: tuple[Frame, ...]  # the Python lines that led to it, the innermost first

    @property
    def source(self) -> str:
        """The line that caused it: the innermost one of the caller's own code, if there is one."""
        own = [frame for frame in self.stack if not frame.file.startswith(_PACKAGE)]
        return str((own or list(self.stack) or [""])[0])

    @property
    def library_source(self) -> str:
        """The line of this package that caused it; empty if none did."""
        return next((str(frame) for frame in self.stack if frame.file.startswith(_PACKAGE)), "")

    @property
    def trips(self) -> tuple[int | None, ...]:
        """Trip counts of its loops, the outermost first; None where the compiler does not know."""
        return tuple(loop.trips for loop in self.loops)

    @property
    def where(self) -> str:
        """Its mesh axes in words."""
        if self.axes:
            return " x ".join(self.axes)
        return f"groups of {self.group_size}" if self.group_size else "groups not read"

    def times(self, within: str | int | None = None) -> int:
        """Return how often it runs in the whole call, or in one iteration of a loop, if it is known."""
        inner = self.loops_within(within)
        for loop in inner or ():
            if loop.trips is None:
                # A name like while.3 is no keyword.
                given = f"{loop.name}=..." if loop.name.isidentifier() else f"**{{{loop.name!r}: ...}}"
                raise ValueError(
                    f"how often {self.kind} runs is not known: loop {loop.name!r} "
                    f"({loop.source or 'no known source'}) has no trip count that the compiler knows. "
                    f"Give it: with_trips({given}), or count within={loop.name!r}"
                )
        return 0 if inner is None else math.prod(loop.trips or 0 for loop in inner)

    def loops_within(self, within: str | int | None) -> tuple[Loop, ...] | None:
        """Return the loops between it and a loop, or the whole call; None if it is not in that loop.

        ``within`` is the loop's name, or its depth, as in `Communication.runs`.
        """
        if within is None:
            return self.loops
        if isinstance(within, int):
            return self.loops[within:] if len(self.loops) >= within else None
        names = [loop.name for loop in self.loops]
        return self.loops[names.index(within) + 1 :] if within in names else None

    def __str__(self) -> str:
        loops = f", in {' > '.join(map(str, self.loops))}" if self.loops else ""
        source = f", {self.source}" if self.source else ""
        return f"{self.kind} {self.shape} ({self.num_bytes:,} bytes) over {self.where}{loops}{source}"


@dataclass(frozen=True)
class Traffic:
    """A `Collective` and how often it runs in the whole call or an iteration, for a cost model."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    num_bytes: int
    operand_bytes: int
    runs: int


@dataclass(frozen=True)
class Constant:
    """An array that the program carries whole on every device."""

    shape: str  # such as ``f32[60000,784]``
    num_bytes: int
    origin: str = ""  # the closed-over array that it is, if one of the same shape was found

    def __str__(self) -> str:
        origin = f": {self.origin}" if self.origin else ""
        return f"constant {self.shape}, {bytes_text(self.num_bytes)}{origin}"


@dataclass(frozen=True)
class Argument:
    """An array that goes into the program."""

    path: str  # in the tuple of arguments
    shape: tuple[int, ...]
    dtype: str
    spec: P | None  # as the program takes it; None where it lies on no mesh
    num_bytes: int
    bytes_per_device: int

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return self.bytes_per_device == self.num_bytes

    def __str__(self) -> str:
        held = "" if self.is_whole else f", {bytes_text(self.bytes_per_device)} a device"
        size = bytes_text(self.num_bytes)
        return f"argument {self.path} {self.dtype}{list(self.shape)}, {size}{held}"


@dataclass(frozen=True)
class Communication(JupyterMixin):
    """Collectives and memory of a compiled program.

    Attributes
    ----------
    num_devices, mesh
        Devices of the program; sizes of the axes of the mesh that its arrays lie on ({}: no mesh).
    collectives
        Every collective operation. Those of all branches of a conditional are here.
    loops
        Every loop that has a collective.
    unknown
        Lines of the program whose form is not known: they may send something.
    constants
        The largest constants, by size.
    arguments
        The arrays that go in.
    argument_bytes, output_bytes, temporary_bytes, constant_bytes
        On one device, as the compiler plans its memory. ``constant_bytes``: of all constants.
    alias_bytes
        Of outputs that take the place of donated arguments.
    loop_nests
        Every loop of the program after the loops around it, with a collective or without.
    """

    num_devices: int
    mesh: dict[str, int]
    collectives: tuple[Collective, ...]
    unknown: tuple[str, ...]
    constants: tuple[Constant, ...]
    arguments: tuple[Argument, ...]
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    constant_bytes: int
    alias_bytes: int
    loop_nests: tuple[tuple[Loop, ...], ...] = ()

    @property
    def largest_constant_bytes(self) -> int:
        """Bytes of the largest constant that the program carries on every device."""
        return max((c.num_bytes for c in self.constants), default=0)

    @property
    def peak_bytes(self) -> int:
        """Bytes that a device needs for arguments, outputs, temporaries and constants.

        An upper bound: they need not all exist at the same time.
        """
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temporary_bytes + self.constant_bytes

    @property
    def whole(self) -> tuple[str, ...]:
        """Constants and arguments over 1 MB that are whole on each of several devices, in words.

        A data set among them was replicated, by a spec or by being closed over.
        """
        return tuple(str(array) for array in self.whole_arrays() if array.num_bytes >= LARGE_BYTES)

    def whole_arrays(self) -> list[Constant | Argument]:
        """Return constants and arguments that are whole on each of several devices."""
        if self.num_devices == 1:
            return []
        return [*self.constants, *(a for a in self.arguments if a.is_whole)]

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Loops with a collective in them."""
        return tuple(dict.fromkeys(loop for c in self.collectives for loop in c.loops))

    def count(self, kind: str) -> int:
        """How many operations of a kind the program has, however often each runs."""
        _require_kind(kind)
        return sum(c.kind == kind for c in self.collectives)

    def runs(self, kind: str, within: str | int | None = None) -> int:
        """How often a kind runs.

        Parameters
        ----------
        kind
            "all-reduce", ...
        within
            None: in the whole call. A loop's name, such as ``"leapfrog"``: in one iteration of it. A
            number: in one iteration of the loops at that depth, 1 being the outermost. Several loops
            of that name, or at that depth, count together. So do all branches of a conditional.

        Raises
        ------
        ValueError
            If the program has no such loop, or if the kind is in a loop whose trip count the compiler
            does not know: see `with_trips`.
        """
        _require_kind(kind)
        self._require_loop(within)
        return sum(c.times(within) for c in self.collectives if c.kind == kind)

    def traffic(self, within: str | int | None = None) -> tuple[Traffic, ...]:
        """Return each collective that runs in the whole call, or in one iteration of a loop."""
        self._require_loop(within)
        return tuple(
            Traffic(c.kind, c.axes, c.group_size, c.num_bytes, c.operand_bytes, runs)
            for c in self.collectives
            if (runs := c.times(within))
        )

    def sent_bytes(self, within: str | int | None = None) -> int:
        """Bytes of the results of all collectives on one device, each as often as it runs."""
        return sum(t.num_bytes * t.runs for t in self.traffic(within))

    def with_trips(self, **trips: int) -> "Communication":
        """Say how often loops run whose trip count the compiler does not know.

        ``report.with_trips(leapfrog=100)``. A loop whose count is known keeps it.
        """
        for name in trips:
            self._require_loop(name)
        collectives = tuple(replace(c, loops=_with_trips(c.loops, trips)) for c in self.collectives)
        nests = tuple(_with_trips(nest, trips) for nest in self.loop_nests)
        return replace(self, collectives=collectives, loop_nests=nests)

    def check(
        self,
        *,
        within: str | int | None = None,
        unknown: int = 0,
        **budgets: float | tuple[float, float],
    ) -> "Communication":
        """Hold the program to a budget, in your own tests.

        ``report.check(within="leapfrog", all_reduce=(1, 1), all_gather=0, constant_bytes=1e6)``.

        Parameters
        ----------
        within
            As of `runs`: where collectives are counted. Without it, those of the whole call.
        unknown
            How many lines of unknown form are allowed.
        budgets
            The most that is allowed, or a pair, the least and the most: an all-reduce that is missing
            may mean that every device computes everything. Runs of a kind, with underscores
            (``all_reduce=1``); ``collectives``, of all kinds together; ``sent_bytes``; on a device,
            ``argument_bytes``, ``output_bytes``, ``temporary_bytes``, ``constant_bytes``,
            ``peak_bytes``; ``whole_bytes``, of the largest argument or constant that is whole on
            several devices.

        Returns
        -------
        Communication
            The report itself.

        Raises
        ------
        BudgetExceeded
            If one is not held. The message names every offender and the line that caused it.
        ValueError
            If the program has no loop ``within``.
        TypeError
            If there is no budget of a name.
        """
        self._require_loop(within)
        violations = []
        for name, budget in budgets.items():
            least, most = budget if isinstance(budget, tuple) else (0, budget)
            found, offenders = _amount(self, name, most, within)
            text = bytes_text(found) if name.endswith("_bytes") else str(found)
            if found < least:
                violations.append(f"{name}: at least {least:g}, found {text}")
            elif found > most:
                lines = "".join(f"\n    {offender}" for offender in offenders)
                violations.append(f"{name}: at most {most:g}, found {text}{lines}")
        if len(self.unknown) > unknown:
            lines = "\n".join(f"    {line[:160]}" for line in self.unknown)
            violations.append(f"unknown: at most {unknown} lines of unknown form, found:\n{lines}")
        if violations:
            where = "" if within is None else f" (collectives of one iteration of {within!r})"
            raise BudgetExceeded("\n  ".join([f"not within budget{where}", *violations]))
        return self

    def _require_loop(self, within: str | int | None) -> None:
        """Raise on a loop that is not in the program: a budget of it would hold whatever happens."""
        names = sorted({loop.name for nest in self.loop_nests for loop in nest})
        depth = max((len(nest) for nest in self.loop_nests), default=0)
        if isinstance(within, str) and within not in names:
            raise ValueError(
                f"the program has no loop {within!r}; it has {names}. A loop that runs once, or is "
                "unrolled, is none in the compiled program"
            )
        if isinstance(within, int) and not 0 <= within <= depth:
            raise ValueError(f"the program has loops {depth} deep; got within={within}")

    def __rich__(self):
        """Draw the collectives below their loops, and the memory."""
        return report_views.draw_report(self)

    def __str__(self) -> str:
        return report_views.plain(self)

    __repr__ = __str__


def _require_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"expected a kind of collective, one of {', '.join(KINDS)}; got {kind!r}")


def _with_trips(loops: tuple[Loop, ...], trips: Mapping[str, int]) -> tuple[Loop, ...]:
    return tuple(
        replace(loop, trips=trips[loop.name]) if loop.trips is None and loop.name in trips else loop
        for loop in loops
    )


def _amount(
    report: Communication, name: str, most: float, within: str | int | None
) -> tuple[float, Sequence[Collective | Constant | Argument]]:
    """Return the amount that a budget is about, and what to name where it is exceeded."""
    kind = name.replace("_", "-")
    every = name in ("collectives", "sent_bytes")
    if every or kind in KINDS:
        inside = [c for c in report.collectives if every or c.kind == kind]
        inside = [c for c in inside if c.loops_within(within) is not None]
        # Where nothing is allowed, it does not matter how often one runs.
        runs = [c.times(within) if most else 1 for c in inside]
        each = [c.num_bytes if name == "sent_bytes" else 1 for c in inside]
        return sum(n * r for n, r in zip(each, runs, strict=True)), inside
    if name == "whole_bytes":
        whole = report.whole_arrays()
        return max((w.num_bytes for w in whole), default=0), [w for w in whole if w.num_bytes > most]
    if name in _MEMORY:
        arguments = [(a.bytes_per_device, a) for a in report.arguments]
        constants = [(c.num_bytes, c) for c in report.constants]
        held = arguments * (name in ("argument_bytes", "peak_bytes"))
        held += constants * (name in ("constant_bytes", "peak_bytes"))
        held.sort(key=lambda pair: -pair[0])
        return getattr(report, name), [array for _, array in held[:MOST_NAMED]]
    kinds = ", ".join(kind.replace("-", "_") for kind in KINDS)
    raise TypeError(
        f"check: no budget is called {name!r}; there are {kinds}, collectives, sent_bytes, "
        f"whole_bytes, {', '.join(_MEMORY)}"
    )
