"""Lines of a summary for the leaves and the numbers that a user names."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gspmd_mcmc.diagnostics.table import Row, element
from gspmd_mcmc.groups.orders import GroupLabels


def rows_of_names(
    names: str | Iterable[str],
    rows: Mapping[str, list[Row]],
    labels: Mapping[str, GroupLabels],
    found: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    """Return the lines of the leaves and numbers that ``names`` asks for, each once.

    Parameters
    ----------
    names
        Leaves, ``"w"``, and single numbers, ``"w[3, 1]"`` or ``"effect[station=Denver]"``.
    rows
        The lines of each leaf, by its name.
    labels
        By name of a leaf, the groups that its rows are of.
    found
        By name of a leaf and of a statistic, arrays [...].

    Raises
    ------
    TypeError, ValueError
        If a name is not a string, there is none, or the draws have no such leaf or number.
    """
    asked = [names] if isinstance(names, str) else list(names)
    chosen: dict[str, Row] = {}
    for name in asked:
        if not isinstance(name, str):
            raise TypeError(f"names: expected the names of leaves or numbers, got {name!r}")
        lines = rows.get(name) or _number(name, rows, labels, found)
        if not lines:
            raise ValueError(
                f"names: expected some of the leaves {', '.join(rows)}, or numbers of them as the "
                f"table names them, got {name!r}"
            )
        chosen |= {row.name: row for row in lines}
    if not chosen:
        raise ValueError(f"names: expected some of {', '.join(rows)}, got none")
    return list(chosen.values())


def _number(
    name: str,
    rows: Mapping[str, list[Row]],
    labels: Mapping[str, GroupLabels],
    found: Mapping[str, Mapping[str, Any]],
) -> list[Row]:
    """Return the line of a single number, or no line if no leaf has it."""
    for leaf in rows:
        shape, groups = np.shape(found[leaf]["rhat"]), labels.get(leaf)
        if shape and name.startswith(f"{leaf}[") and name.endswith("]"):
            index = _index(name[len(leaf) + 1 : -1], shape, groups)
            if index is not None and element(leaf, index, groups) == name:
                values = {key: float(x[index]) for key, x in found[leaf].items()}
                return [Row(name, 1, values)]
    return []


def _index(text: str, shape: tuple[int, ...], groups: GroupLabels | None) -> tuple[int, ...] | None:
    """Return the index that ``3, 1`` or ``station=Denver, 1`` means; None if it means none."""
    first, *others = text.rsplit(", ", len(shape) - 1)
    if groups is not None and groups.name:
        own = [str(label) for label in groups.labels]
        label = first.removeprefix(f"{groups.name}=")
        first = str(own.index(label)) if label in own else ""
    parts = [first, *others]
    if len(parts) != len(shape) or not all(part.isdecimal() for part in parts):
        return None
    index = tuple(map(int, parts))
    return index if all(i < size for i, size in zip(index, shape, strict=True)) else None
