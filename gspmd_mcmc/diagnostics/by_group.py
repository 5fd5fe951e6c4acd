"""Lines of a summary for groups: each has its label, its rows, and the worst of all of its numbers."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gspmd_mcmc.diagnostics.table import Row
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.multihost.processes import to_host


def rows_of_groups(
    name: str,
    labels: Mapping[str, GroupLabels],
    found: Mapping[str, Mapping[str, Any]],
    max_rows: int,
) -> tuple[list[Row], int]:
    """Return lines of the worst groups of a name, the worst first, and how many are left out.

    Parameters
    ----------
    name
        What the groups are called.
    labels
        By name of a leaf, the groups that its rows are of.
    found
        By name of a leaf and of a statistic, arrays that have groups (and pad) on the axis of `labels`.
    max_rows
        How many lines there are.

    Raises
    ------
    ValueError
        If no leaf has groups of that name.
    """
    leaves = [leaf for leaf, groups in labels.items() if groups.name == name]
    if not leaves:
        raise ValueError(
            f"groups: expected one of {sorted({x.name for x in labels.values() if x.name})}, the names "
            f"of groups whose latents are among these draws, got {name!r}; Groups(..., name=...) names "
            "them"
        )
    groups = labels[leaves[0]]
    axes = [labels[leaf].axis for leaf in leaves]
    numbers = [
        x for leaf, axis in zip(leaves, axes, strict=True) for x in _numbers_of(leaf, axis, found[leaf])
    ]
    by_key = {
        key: _beside([found[leaf][key] for leaf in leaves], axes, len(groups.labels))
        for key in found[leaves[0]]
    }
    badness = _badness(by_key)
    worst = np.argmax(badness, axis=1)
    of_worst = {key: np.take_along_axis(x, worst[:, None], 1)[:, 0] for key, x in by_key.items()}
    least = {key: np.min(by_key[key], axis=1) for key in ("ess_bulk", "ess_tail")}
    largest = np.max(badness, axis=1)
    size = np.where(np.isnan(least["ess_bulk"]), -np.inf, least["ess_bulk"])
    order = np.lexsort((size, -largest))[:max_rows]
    values = of_worst | least | {"rows": groups.sizes}
    rows = []
    for i in order:
        number = f": {numbers[worst[i]]}" if len(numbers) > 1 else ""
        of_group = {key: float(x[i]) for key, x in values.items()}
        rows.append(Row(f"{groups.labels[i]}{number}", len(numbers), of_group))
    return rows, len(groups.labels) - len(rows)


def _numbers_of(leaf: str, axis: int, found: Mapping[str, Any]) -> Iterator[str]:
    """Name the numbers that each group has of a leaf: ``effect[:, 1]``; ``effect`` if it is one."""
    shape = list(np.shape(found["rhat"]))
    del shape[axis]
    for index in np.ndindex(*shape):
        numbers = list(map(str, index))
        numbers.insert(axis, ":")
        yield f"{leaf}[{', '.join(numbers)}]" if index else leaf


def _beside(arrays: list[Any], axes: list[int], num_groups: int) -> np.ndarray:
    """Put arrays that have groups (and pad) on an axis side by side: [groups, numbers]."""
    pairs = zip(arrays, axes, strict=True)
    on_host = [np.moveaxis(np.asarray(to_host(x)), axis, 0)[:num_groups] for x, axis in pairs]
    return np.concatenate([x.reshape(num_groups, math.prod(x.shape[1:])) for x in on_host], axis=1)


def _badness(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return R-hat, nested if it is there; NaN is the worst, unless all draws are equal."""
    rhat = found.get("nested_rhat", found["rhat"])
    return np.where(np.isnan(rhat), np.where(found["sd"] == 0, -np.inf, np.inf), rhat)
