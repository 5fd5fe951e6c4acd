"""What is known of a compiled program: its collectives, its memory, and how to count them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.budgets import excess, require_kind
from gspmd_mcmc.views.hlo import Frame, Loop
from gspmd_mcmc.views.units import size

LARGE_BYTES = 1_000_000  # what is whole on every device and larger than this is pointed out
_PACKAGE = __file__.rsplit("/", 2)[0] + "/"


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program; an asynchronous pair and a fused tuple are one.

    Attributes
    ----------
    kind
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", ...
    shape, num_bytes
        Of its result on one device, such as ``f32[8,16]``.
    operand_shape, operand_bytes
        Of what one device puts in.
    axes
        The mesh axes that it runs over; () where its groups of devices are no axes of the mesh.
    group_size
        How many devices take part with each other; 0 where the groups could not be read.
    loops
        The loops it is in, the outermost first.
    op_name
        The name that JAX gave the operation it comes from.
    stack
        The Python lines that led to it, the innermost first.
    """

    kind: str
    shape: str
    num_bytes: int
    operand_shape: str
    operand_bytes: int
    axes: tuple[str, ...]
    group_size: int
    loops: tuple[Loop, ...]
    op_name: str
    stack: tuple[Frame, ...]

    @property
    def source(self) -> str:
        """The line that caused it: the innermost one of the caller's own code, if there is one."""
        own = [frame for frame in self.stack if not frame.file.startswith(_PACKAGE)]
        return str((own or list(self.stack) or [""])[0])

    @property
    def library_source(self) -> str:
        """The line of this package that caused it; empty if none did."""
        ours = [frame for frame in self.stack if frame.file.startswith(_PACKAGE)]
        return str(ours[0]) if ours else ""

    @property
    def trips(self) -> tuple[int | None, ...]:
        """Trip counts of its loops, the outermost first; None where nobody knows."""
        return tuple(loop.trips for loop in self.loops)

    def is_within(self, within: str | int | None) -> bool:
        """Tell whether it stands in a loop: of that name, or at that depth; None is the whole call."""
        return self._inner_loops(within) is not None

    def times(self, within: str | int | None = None) -> int:
        """How often it runs in the whole call, or in one iteration of a loop.

        Raises
        ------
        ValueError
            If it stands in a loop whose trip count nobody knows.
        """
        inner = self._inner_loops(within) or ()
        for loop in inner:
            if loop.trips is None:
                raise ValueError(
                    f"how often {self.kind} runs is not known: loop {loop.name!r} "
                    f"({loop.source or 'no known source'}) has no trip count that the compiler knows. "
                    f"Give it: with_trips(**{{{loop.name!r}: ...}}), or count within={loop.name!r}"
                )
        return math.prod(loop.trips or 0 for loop in inner) if self.is_within(within) else 0

    def _inner_loops(self, within: str | int | None) -> tuple[Loop, ...] | None:
        """Return the loops between it and what it is counted in; None if it is not in there."""
        if within is None:
            return self.loops
        if isinstance(within, int):
            return self.loops[within:] if len(self.loops) >= within else None
        names = [loop.name for loop in self.loops]
        return self.loops[names.index(within) + 1 :] if within in names else None

    @property
    def where(self) -> str:
        """Its mesh axes in words."""
        if self.axes:
            return " x ".join(self.axes)
        return f"groups of {self.group_size}" if self.group_size else "groups not read"

    def __str__(self) -> str:
        loops = f", in {' > '.join(map(str, self.loops))}" if self.loops else ""
        source = f", {self.source}" if self.source else ""
        return f"{self.kind} {self.shape} ({self.num_bytes:,} bytes) over {self.where}{loops}{source}"


@dataclass(frozen=True)
class Traffic:
    """A collective and how often it runs, for a cost model.

    Attributes
    ----------
    kind, axes, group_size, num_bytes, operand_bytes
        As of the `Collective`.
    runs
        How often it runs in what was asked for: the whole call, or one iteration of a loop.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    num_bytes: int
    operand_bytes: int
    runs: int


@dataclass(frozen=True)
class Constant:
    """An array that the program carries whole on every device.

    Attributes
    ----------
    shape, num_bytes
        Such as ``f32[60000,784]``.
    origin
        The closed-over array that it is, if one of the same shape was found; empty otherwise.
    """

    shape: str
    num_bytes: int
    origin: str = ""

    def __str__(self) -> str:
        return f"constant {self.shape}, {size(self.num_bytes)}" + (
            f": {self.origin}" if self.origin else ""
        )


@dataclass(frozen=True)
class Argument:
    """An array that goes into the program.

    Attributes
    ----------
    path
        Its path in the tuple of arguments.
    shape, dtype
        Of the whole array.
    spec
        Its `PartitionSpec`, as the program takes it; None where it lies on no mesh.
    num_bytes, bytes_per_device
        Of the whole array, and of what a device holds of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: P | None
    num_bytes: int
    bytes_per_device: int

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return self.bytes_per_device == self.num_bytes

    def __str__(self) -> str:
        held = "" if self.is_whole else f", {size(self.bytes_per_device)} a device"
        return f"argument {self.path} {self.dtype}{list(self.shape)}, {size(self.num_bytes)}{held}"


class BudgetExceeded(AssertionError):
    """A program sends or holds more than it was allowed."""


@dataclass(frozen=True)
class Communication:
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
        """Bytes that a device needs: arguments, outputs, temporaries and constants together.

        An upper bound: not all of them need be there at the same time.
        """
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temporary_bytes + self.constant_bytes

    @property
    def whole(self) -> tuple[str, ...]:
        """Constants and arguments over 1 MB that are whole on each of several devices, in words.

        A data set among them was replicated, by a spec or by being closed over.
        """
        if self.num_devices == 1:
            return ()
        arguments = [a for a in self.arguments if a.is_whole and a.num_bytes >= LARGE_BYTES]
        constants = [c for c in self.constants if c.num_bytes >= LARGE_BYTES]
        return tuple(str(found) for found in (*constants, *arguments))

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Loops with a collective in them."""
        return tuple(dict.fromkeys(loop for c in self.collectives for loop in c.loops))

    def count(self, kind: str) -> int:
        """How many operations of a kind the program has, however often each runs."""
        require_kind(kind)
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
            If the program has no such loop. If the kind stands in a loop whose trip count nobody
            knows: see `with_trips`.
        """
        require_kind(kind)
        self._require_loop(within)
        return sum(c.times(within) for c in self.collectives if c.kind == kind)

    def traffic(self, within: str | int | None = None) -> tuple[Traffic, ...]:
        """Return each collective that runs in the whole call, or in one iteration of a loop."""
        self._require_loop(within)
        times = [(c, c.times(within)) for c in self.collectives]
        return tuple(
            Traffic(c.kind, c.axes, c.group_size, c.num_bytes, c.operand_bytes, runs)
            for c, runs in times
            if runs
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
        self, *, within: str | int | None = None, unknown: int = 0, **budgets: float
    ) -> "Communication":
        """Hold the program to a budget; for tests of one's own.

        ``report.check(within="leapfrog", all_reduce=1, all_gather=0, constant_bytes=1e6)``.

        Parameters
        ----------
        within
            As of `runs`: where collectives are counted. Without it, those of the whole call.
        unknown
            How many lines of unknown form are allowed.
        budgets
            The most that is allowed: runs of a kind, with underscores (``all_reduce=1``);
            ``collectives``, of all kinds together; ``sent_bytes``; on a device, ``constant_bytes`` (of
            the largest constant), ``argument_bytes``, ``output_bytes``, ``temporary_bytes``,
            ``peak_bytes``; ``whole_bytes``, of the largest argument or constant that is whole on
            several devices.

        Returns
        -------
        Communication
            The report itself.

        Raises
        ------
        BudgetExceeded
            If any is exceeded. The message names every offender and the line that caused it.
        ValueError
            If the program has no loop ``within``.
        TypeError
            If there is no budget of a name.
        """
        self._require_loop(within)
        found = [excess(self, name, most, within) for name, most in budgets.items()]
        if len(self.unknown) > unknown:
            lines = "\n".join(f"    {line[:160]}" for line in self.unknown)
            found.append(f"unknown: at most {unknown} lines of unknown form, found:\n{lines}")
        over = [text for text in found if text]
        if over:
            where = "" if within is None else f" (collectives of one iteration of {within!r})"
            raise BudgetExceeded(f"over budget{where}\n  " + "\n  ".join(over))
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
        from gspmd_mcmc.views.report_text import draw_report

        return draw_report(self)

    def __str__(self) -> str:
        from gspmd_mcmc.views.report_text import plain

        return plain(self)

    __repr__ = __str__


def _with_trips(loops: tuple[Loop, ...], trips: Mapping[str, int]) -> tuple[Loop, ...]:
    return tuple(
        replace(loop, trips=trips[loop.name]) if loop.trips is None and loop.name in trips else loop
        for loop in loops
    )
