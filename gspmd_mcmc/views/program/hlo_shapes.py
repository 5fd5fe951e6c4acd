"""Shapes as the text of a compiled program has them."""

import itertools
import math
import re
from typing import Any

_DTYPES = (
    ("bfloat", "bf"),
    ("float", "f"),
    ("uint", "u"),
    ("int", "s"),
    ("complex", "c"),
    ("bool", "pred"),
)
_SHAPE = re.compile(r"\b(pred|bf16|f8\w+|f4\w+|[fsuc]\d+)\[([\d,<=]*)\]")


def shapes_of(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return dtype and dimensions of each array in the text of a shape."""
    found = _SHAPE.findall(text)
    return tuple(
        (dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)) for dtype, dims in found
    )


def hlo_dtype(dtype: Any) -> str:
    """Write a dtype as XLA does: float32 is f32, float8_e4m3fn is f8e4m3fn, bool is pred."""
    for ours, theirs in _DTYPES:
        if str(dtype).startswith(ours):
            return theirs + str(dtype).removeprefix(ours).replace("_", "")
    return str(dtype)


def num_bytes_of(text: str) -> int:
    """Bytes of all arrays in the text of a shape."""
    return sum(math.ceil(math.prod(dims) * _num_bits(dtype) / 8) for dtype, dims in shapes_of(text))


def _num_bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])


def parts_of(shape: str) -> list[str]:
    """Return the shapes that a tuple is made of, or the shape alone if it is none."""
    if not shape.startswith("("):
        return [shape]
    cuts, depth = [0], 0
    for i, char in enumerate(shape):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 1:
            cuts.append(i)
    return [shape[a + 1 : b].strip() for a, b in itertools.pairwise([*cuts, len(shape) - 1])]
