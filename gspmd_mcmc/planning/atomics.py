"""Atomic operations on floats in a GPU's kernels, and the lines of the model that make them.

The gradient of ``effect[index]`` adds to one latent from many threads at once. jaxlib 0.10.2 makes a
compare-and-swap loop of that in float32: threads that meet at a latent try again until each was alone.
The fewer the latents, the longer it takes, and each run adds in another order. The HLO does not show
it; the assembly (PTX), which ``--xla_dump_to`` keeps, does. Atomics on integers, and the integer
maximum that one of floats is made of, are exact and are no concern here.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gspmd_mcmc.views.program.hlo import Loop, Operation, Program, own_line

LOOP, ADDITION = "compare-and-swap loop", "atomic addition"
CURE = (
    "Write effect[index] without it: gspmd_mcmc.lookup(effect, index), or gspmd_mcmc.Groups for "
    "latents that may lie with their rows"
)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_LABEL = re.compile(r"^\s*\$L\w+:")
_SWAP = re.compile(r"\batom(?:\.\w+)*\.cas\.b(?:16|32|64|128)\b")
_FLOAT = re.compile(r"\b(?:atom|red)\.[\w.:]*\.((?:bf16|f16)(?:x2)?|f32|f64)\b")
_ARITHMETIC = re.compile(
    r"\b(?:add|sub|mul|fma|max|min|div|neg)\.[\w.]*?((?:bf16|f16)(?:x2)?|f32|f64)\b"
)


@dataclass(frozen=True)
class Atomic:
    """The atomic operations on floats of one kernel.

    Attributes
    ----------
    kernel
        Its name in the assembly.
    form
        "compare-and-swap loop" or "atomic addition", which the hardware does itself.
    dtype
        Of what is added, as PTX has it: "f32".
    count
        How many such instructions the kernel has.
    operation
        The operation of the program that it belongs to; of several alike, which share a kernel, one.
        Empty if none was found.
    loops
        The loops that it is in, the outermost first.
    source
        The line of Python that makes it: of the caller's own code, if there is one.
    """

    kernel: str
    form: str
    dtype: str
    count: int
    operation: str = ""
    loops: tuple[Loop, ...] = ()
    source: str = ""

    @property
    def cure(self) -> str:
        """What to write instead."""
        return CURE

    def __str__(self) -> str:
        inside = f", in {' > '.join(map(str, self.loops))}" if self.loops else ""
        source = self.source or "no known source"
        found = f"{self.count} x {self.form} on {self.dtype}, kernel {self.kernel}{inside}"
        return f"{source}: {found}. {self.cure}"


def find_atomics(assembly: Iterable[str], program: Program | None = None) -> tuple[Atomic, ...]:
    """Find the atomic operations on floats in the assembly of a GPU's program.

    Parameters
    ----------
    assembly
        The PTX texts of its kernels.
    program
        The program that they are of: names operations, loops and lines. None: kernels alone.

    Returns
    -------
    tuple of Atomic
        One for each kernel, form and dtype; those of compare-and-swap loops first.
    """
    places = {} if program is None else _places(program)
    found = [
        Atomic(kernel, form, dtype, count, *_described(places.get(kernel), program))
        for text in assembly
        for kernel, body in _kernels(text)
        for (form, dtype), count in _counted(body).items()
    ]
    return tuple(sorted(found, key=lambda atomic: (atomic.form != LOOP, atomic.kernel)))


_Place = tuple[Operation, tuple[Loop, ...]]


def _places(program: Program) -> dict[str, _Place]:
    """Return each operation and its loops by the name that its kernel has: letters, digits and _."""
    return {
        re.sub(r"\W", "_", operation.name): (operation, loops) for operation, _, loops in program.walk()
    }


def _described(place: _Place | None, program: Program | None) -> tuple[str, tuple[Loop, ...], str]:
    if place is None or program is None:
        return "", (), ""
    operation, loops = place
    return operation.name, loops, own_line(program.stack(operation))


def _kernels(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of each kernel."""
    parts = _ENTRY.split(text)[1:]  # name, body, name, body, ...
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        yield name, body.splitlines()


def _counted(lines: list[str]) -> dict[tuple[str, str], int]:
    """Count atomics on floats by form and dtype."""
    counts: dict[tuple[str, str], int] = {}
    for i, line in enumerate(lines):
        if addition := _FLOAT.search(line):
            key = ADDITION, addition.group(1)
        elif _SWAP.search(line) and (dtype := _float_in_loop(lines, i)):
            key = LOOP, dtype
        else:
            continue
        counts[key] = counts.get(key, 0) + 1
    return counts


def _float_in_loop(lines: list[str], swap: int) -> str:
    """Return the dtype of the arithmetic between the loop's label and its swap; empty if integer."""
    for line in reversed(lines[:swap]):
        if found := _ARITHMETIC.search(line):
            return found.group(1)
        if _LABEL.match(line):
            break
    return ""
