"""The lines of a summary: numbers one by one of small leaves, the worst number of large ones."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.diagnostics.extremes import Extreme
from gspmd_mcmc.tree import PyTree, unique_names

SMALL_LEAF = 1000  # numbers


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes
    ----------
    name
        Of a number, ``w[3, 1]``.
    size
        How many numbers the line stands for: of a large leaf it names the one with the worst R-hat,
        and shows the least effective sizes of all.
    values
        Statistics by name.
    """

    name: str
    size: int
    values: dict[str, float]

    @property
    def order(self) -> tuple[float, float]:
        """Sorts rows, the worst first: by R-hat to two digits, then by effective size."""
        rhat = self.values.get("nested_rhat", self.values["rhat"])
        if math.isnan(rhat):
            # Draws that are all equal cannot be judged; others that cannot be are the worst.
            rhat = -math.inf if self.values["sd"] == 0 else math.inf
        size = self.values["ess_bulk"]
        return -round(rhat, 2) if math.isfinite(rhat) else -rhat, -math.inf if math.isnan(
            size
        ) else size


def free_name(name: str, taken: Iterable[str]) -> str:
    """Lengthen a name that another leaf has already."""
    return free_name(f"{name}_", taken) if name in taken else name


def named_leaves(tree: PyTree, is_leaf: Callable | None = None) -> dict[str, Any]:
    """Return the leaves of a tree by plain names, each of its own."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    names = unique_names([path for path, _ in found])
    return dict(zip(names, (leaf for _, leaf in found), strict=True))


def element(name: str, index: tuple[int, ...]) -> str:
    """Name a number of a leaf: ``w[3, 1]``, and a scalar as its leaf."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def rows_of_small(name: str, found: dict[str, np.ndarray]) -> list[Row]:
    """Return a row for each number of a leaf, from arrays [...] on the host."""
    return [
        Row(element(name, index), 1, {key: float(x[index]) for key, x in found.items()})
        for index in np.ndindex(np.shape(found["rhat"]))
    ]


def row_of_large(name: str, size: int, worst: dict[str, Extreme]) -> Row:
    """Return the one row of a large leaf, from its extremes by statistic."""
    judged = worst.get("nested_rhat", worst["rhat"])
    least = {key: worst[key].value for key in ("ess_bulk", "ess_tail")}
    return Row(element(name, judged.index), size, judged.found | least)
