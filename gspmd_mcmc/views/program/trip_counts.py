"""How often loops run that count by ones between constants.

Most compilers write such counts down. The TPU's does not, so that they are read from the loop itself.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspmd_mcmc.views.program.hlo import Operation

_PARTS = re.compile(r"(condition|body)=%?([\w.\-]+)")
_LITERAL = re.compile(r" constant\((-?\d+)\)")
_INDEX = re.compile(r"index=(\d+)")
_SAME = ("copy", "bitcast")  # operations whose result is their operand

Names = Mapping[str, "Operation"]  # the operations of a computation


def trip_count(computations: Mapping[str, tuple["Operation", ...]], loop: "Operation") -> int | None:
    """Count the rounds of a ``while`` whose counter goes by ones from a constant to below another.

    None of other loops.
    """
    parts = dict(_PARTS.findall(loop.attributes))
    condition, body = (
        _named(computations.get(parts.get(part, ""), ())) for part in ("condition", "body")
    )
    around = (c for c in computations.values() if any(o is loop for o in c))
    before = _named(next(around, ()))
    test = _root(condition)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    index = _index(condition, test.operands[0])
    after, start = _root(body), _at(before, loop.operands[0])
    if index is None or after is None or start is None or {after.opcode, start.opcode} != {"tuple"}:
        return None
    first, end = _integer(before, start.operands[index]), _integer(condition, test.operands[1])
    if first is None or end is None or not _is_next(body, after.operands[index], index):
        return None
    return max(0, end - first)


def _is_next(names: Names, name: str, index: int) -> bool:
    """Tell whether this is one more than an element of what the loop carries."""
    added = _at(names, name)
    if added is None or added.opcode != "add":
        return False
    each = {(_index(names, o) == index, _integer(names, o) == 1) for o in added.operands}
    return each == {(True, False), (False, True)}


def _named(operations: tuple["Operation", ...]) -> Names:
    return {operation.name: operation for operation in operations}


def _root(names: Names) -> "Operation | None":
    return next((o for o in names.values() if o.line.startswith("ROOT ")), None)


def _at(names: Names, name: str) -> "Operation | None":
    """Return the operation of a name, or the one that it copies."""
    operation = names.get(name)
    while operation is not None and operation.opcode in _SAME:
        operation = names.get(operation.operands[0])
    return operation


def _index(names: Names, name: str) -> int | None:
    """Return which element of a tuple this is."""
    operation = _at(names, name)
    is_element = operation is not None and operation.opcode == "get-tuple-element"
    found = _INDEX.search(operation.attributes) if operation is not None and is_element else None
    return int(found.group(1)) if found else None


def _integer(names: Names, name: str) -> int | None:
    """Return the integer that this is, if it is a constant."""
    operation = _at(names, name)
    found = _LITERAL.search(operation.line) if operation is not None else None
    return int(found.group(1)) if found else None
