"""What is known of a compiled program: its collectives, its memory, and how to count them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gspmd_mcmc.views.program.budgets import require_kind, violation
from gspmd_mcmc.views.program.hlo import Loop
from gspmd_mcmc.views.program.parts import Argument, Collective, Constant, Traffic
from gspmd_mcmc.views.units import LARGE_BYTES


class BudgetExceeded(AssertionError):
    """A program sends or holds more than it was allowed, or less than it must."""


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
        self,
        *,
        within: str | int | None = None,
        unknown: int = 0,
        **budgets: float | tuple[float, float],
    ) -> "Communication":
        """Hold the program to a budget; for tests of one's own.

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
        found = [violation(self, name, budget, within) for name, budget in budgets.items()]
        if len(self.unknown) > unknown:
            lines = "\n".join(f"    {line[:160]}" for line in self.unknown)
            found.append(f"unknown: at most {unknown} lines of unknown form, found:\n{lines}")
        over = [text for text in found if text]
        if over:
            where = "" if within is None else f" (collectives of one iteration of {within!r})"
            raise BudgetExceeded(f"not within budget{where}\n  " + "\n  ".join(over))
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
        from gspmd_mcmc.views.program.report_text import draw_report

        return draw_report(self)

    def __str__(self) -> str:
        from gspmd_mcmc.views.program.report_text import plain

        return plain(self)

    __repr__ = __str__


def _with_trips(loops: tuple[Loop, ...], trips: Mapping[str, int]) -> tuple[Loop, ...]:
    return tuple(
        replace(loop, trips=trips[loop.name]) if loop.trips is None and loop.name in trips else loop
        for loop in loops
    )
