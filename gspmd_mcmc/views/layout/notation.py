"""How a layout is written in a line: arrays, specs, mesh axes, and names that are too long."""

import re
from typing import Any

from jax.sharding import PartitionSpec as P

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
