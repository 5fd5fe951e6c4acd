"""How bytes, arrays, specs, mesh axes and device numbers are written in a line."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jax.sharding import PartitionSpec as P

LARGE_BYTES = 1_000_000  # arrays of this size that are whole on every device are pointed out
MAX_LISTED = 4  # numbers that are written one by one
_SHORT = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}


def array_text(dtype: Any, shape: tuple[int, ...] | None) -> str:
    """Write dtype and shape as jaxprs do: ``f32[60000,784]``; the dtype alone without a shape."""
    name = re.sub(r"^(bfloat|float|uint|int|complex)(?=\d)", lambda m: _SHORT[m[1]], str(dtype))
    return name if shape is None else f"{name}[{','.join(map(str, shape))}]"


def partitions(spec: P) -> tuple:
    """Return the entries of a spec. From JAX 0.10 one with unreduced axes refuses to be iterated."""
    entries = getattr(spec, "partitions", None)
    return tuple(spec) if entries is None else tuple(entries)


def spec_text(spec: P, sizes: dict[str, int]) -> str:
    """Write a spec with the sizes of its mesh axes: ``P(chains=2, None)``, ``P((a=2, b=4))``."""

    def entry_text(entry) -> str:
        if isinstance(entry, tuple):
            return f"({', '.join(map(entry_text, entry))})"
        if entry is P.UNCONSTRAINED:
            return "any"
        return "None" if entry is None else f"{entry}={sizes[entry]}"

    return f"P({', '.join(map(entry_text, partitions(spec)))})"


def axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    """Write mesh axes with their sizes: ``chains=2, data=4``."""
    return ", ".join(f"{name}={size}" for name, size in axes)


def number_ranges(numbers: Sequence[int]) -> str:
    """Write whole numbers briefly: ``0-7``, ``0,4``, ``0-14:2`` (by twos), ``0-3,8-11``.

    More than three runs are cut short, and counted: ``0-3,8-11,… (64)``.
    """
    ordered = sorted(numbers)
    steps = {b - a for a, b in zip(ordered, ordered[1:], strict=False)}
    if len(ordered) > 2 and steps == {1}:
        return f"{ordered[0]}-{ordered[-1]}"
    if len(ordered) <= MAX_LISTED:
        return ",".join(map(str, ordered))
    if len(steps) == 1:
        return f"{ordered[0]}-{ordered[-1]}:{steps.pop()}"
    runs = []
    for _, group in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(runs) if len(runs) <= 3 else f"{runs[0]},{runs[1]},… ({len(ordered)})"


def shorten(text: str, width: int) -> str:
    """Cut the middle out of a text that is wider than ``width``: both ends of a path tell most."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def several(names: list[str], most: int) -> str:
    """List some names, and count those that are left out."""
    hidden = len(names) - most
    return ", ".join(names[:most]) + (f" and {hidden} more" if hidden > 0 else "")
