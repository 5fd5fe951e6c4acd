"""What a compiled program is made of, as far as communication and memory go."""

import math
from dataclasses import dataclass
from pathlib import Path

from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.program.hlo import Loop
from gspmd_mcmc.views.program.stack_frames import Frame
from gspmd_mcmc.views.units import bytes_text

_PACKAGE = f"{Path(__file__).parents[2]}/"


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
                    f"Give it: {_trips_call(loop.name)}, or count within={loop.name!r}"
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


def _trips_call(name: str) -> str:
    """Write the call that gives a loop its trip count; a name like ``while.3`` is no keyword."""
    given = f"{name}=..." if name.isidentifier() else f"**{{{name!r}: ...}}"
    return f"with_trips({given})"


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
        return f"constant {self.shape}, {bytes_text(self.num_bytes)}" + (
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
        held = "" if self.is_whole else f", {bytes_text(self.bytes_per_device)} a device"
        return (
            f"argument {self.path} {self.dtype}{list(self.shape)}, {bytes_text(self.num_bytes)}{held}"
        )
