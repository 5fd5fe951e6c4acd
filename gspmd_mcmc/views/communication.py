"""What a compiled program sends between devices, and what it carries inside.

The optimised program is read as text: its computations, which of them are bodies of loops, and in
each the collective operations and the constants.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(")
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|[fsuc]\d+)\[([\d,]*)\]")
_CALLS = re.compile(
    r"(?:to_apply|calls|called_computations|branch_computations|true_computation|false_computation)"
    r"=(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_LOOP = re.compile(r"(?:condition|body)=%?([\w.\-]+)")
_TRIPS = re.compile(r"known_trip_count[^\d]+(\d+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes
    ----------
    kind
        "all-reduce", "all-gather", ...
    num_bytes
        Bytes of its result on one device.
    loops
        Trip counts of the loops it is in, the outermost first; None where the compiler knows none.
    op_name
        The name that JAX gave the operation it comes from.
    """

    kind: str
    num_bytes: int
    loops: tuple[int | None, ...]
    op_name: str


@dataclass(frozen=True)
class Communication:
    """Collectives and memory of a compiled program.

    Attributes
    ----------
    collectives
        Every collective operation; a fused tuple counts as one.
    largest_constant_bytes
        Bytes of the largest constant that the program carries on every device.
    temporary_bytes
        Bytes of temporaries on one device.
    """

    collectives: tuple[Collective, ...]
    largest_constant_bytes: int
    temporary_bytes: int

    def count(self, kind: str) -> int:
        """How many operations of a kind the program has, wherever they stand."""
        return sum(c.kind == kind for c in self.collectives)

    def per_iteration(self, kind: str, depth: int = 1) -> int:
        """How often a kind runs in one iteration of the loops at a depth (1: the outermost).

        Operations of loops further in count as often as those loops run.

        Raises
        ------
        ValueError
            If the compiler does not know how often an inner loop runs.
        """
        inside = [c for c in self.collectives if c.kind == kind and len(c.loops) >= depth]
        trips = [[t for t in c.loops[depth:] if t is not None] for c in inside]
        if any(len(t) < len(c.loops) - depth for t, c in zip(trips, inside, strict=True)):
            raise ValueError(f"an inner loop with {kind} has no known trip count")
        return sum(math.prod(t) for t in trips)


def communication(function: Callable, *args: Any) -> Communication:
    """Compile a function for its arguments and read its collectives, constants and temporaries.

    Parameters
    ----------
    function
        A jitted function, or one to be jitted.
    args
        Arrays, pytrees of them, or ``ShapeDtypeStruct`` with shardings. Nothing is run.
    """
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    compiled = jitted.lower(*args).compile()  # pyright: ignore[reportFunctionMemberAccess]
    text = compiled.as_text() or ""
    memory = compiled.memory_analysis()
    return Communication(
        collectives=read_collectives(text),
        largest_constant_bytes=largest_constant(text),
        temporary_bytes=int(memory.temp_size_in_bytes) if memory is not None else 0,
    )


def read_collectives(text: str) -> tuple[Collective, ...]:
    """Read the collectives of an optimised program's text, with the loops around them."""
    computations, entry = _computations(text)

    def walk(name: str, loops: tuple[int | None, ...]) -> list[Collective]:
        found = []
        for line in computations.get(name, ()):
            found += _collective(line, loops)
            for called, around in _called(line):
                found += walk(called, loops + around)
        return found

    return tuple(walk(entry, ()))


def largest_constant(text: str) -> int:
    """Bytes of the largest constant in an optimised program's text."""
    sizes = [0]
    for line in text.splitlines():
        operation = _OPERATION.match(line)
        if operation and operation.group(2) == "constant":
            sizes.append(_num_bytes(operation.group(1)))
    return max(sizes)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Split a module's text into the lines of its computations; name the entry."""
    computations, name, entry = {}, "", ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head.group(2)
            computations[name] = []
            entry = name if head.group(1) else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _collective(line: str, loops: tuple[int | None, ...]) -> list[Collective]:
    operation = _OPERATION.match(line)
    # Of an asynchronous pair it is the end that has the shape of the result.
    kind = operation.group(2).removesuffix("-done") if operation else ""
    if kind not in KINDS or operation is None:
        return []
    source = _SOURCE.search(line)
    return [Collective(kind, _num_bytes(operation.group(1)), loops, source.group(1) if source else "")]


def _called(line: str) -> list[tuple[str, tuple[int | None, ...]]]:
    """Name the computations that a line runs, with the loop that it puts around them."""
    operation = _OPERATION.match(line)
    if operation is None or operation.group(2) in (*KINDS, "reduce", "scatter", "sort"):
        return []
    if operation.group(2) == "while":
        trips = _TRIPS.search(line)
        return [(name, (int(trips.group(1)) if trips else None,)) for name in _LOOP.findall(line)]
    names = ",".join(several or one for several, one in _CALLS.findall(line))
    return [(name.strip().lstrip("%"), ()) for name in names.split(",") if name]


def _num_bytes(shapes: str) -> int:
    total = 0
    for dtype, dims in _SHAPE.findall(shapes):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        total += math.prod(int(d) for d in dims.split(",") if d) * bits // 8
    return total
