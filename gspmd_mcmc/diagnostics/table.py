"""The table of a summary: its lines, as text, and for a terminal or a notebook by rich.

Small leaves have a line for each number, large ones a line for the worst.
"""

import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.tree import PyTree, unique_names

if TYPE_CHECKING:
    from rich.console import Group

WIDTH = 100  # of warnings, in characters
ALL_WELL = "No warnings."
HEADINGS = {
    "rows": "rows",
    "mean": "mean",
    "sd": "sd",
    "mcse_mean": "mcse",
    "q5": "5%",
    "q95": "95%",
    "ess_bulk": "ESS bulk",
    "ess_tail": "ESS tail",
    "rhat": "R-hat",
    "nested_rhat": "nested R-hat",
}


@dataclass(frozen=True)
class Row:
    """One line of the table; for a large leaf the number with the worst R-hat, and the least ESS.

    For a group likewise.
    """

    name: str  # of a number, ``w[3, 1]``, or the label of a group
    size: int  # how many numbers the line stands for
    values: dict[str, float]  # statistics by name

    @property
    def order(self) -> tuple[float, float]:
        """Sort key, the worst first: by R-hat, then by effective size."""
        rhat = self.values.get("nested_rhat", self.values["rhat"])
        if math.isnan(rhat):
            # Draws that are all equal cannot be judged; any other NaN is the worst.
            rhat = -math.inf if self.values["sd"] == 0 else math.inf
        size = self.values["ess_bulk"]
        size = -math.inf if math.isnan(size) else size
        return -rhat, size


def free_name(name: str, taken: Iterable[str]) -> str:
    """Lengthen a name until no other leaf has it."""
    return free_name(f"{name}_", taken) if name in taken else name


def named_leaves(tree: PyTree, is_leaf: Callable | None = None) -> dict[str, Any]:
    """Return the leaves of a tree by plain names, no two of them alike."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    names = unique_names([path for path, _ in found])
    return dict(zip(names, (leaf for _, leaf in found), strict=True))


def element(name: str, index: tuple[int, ...], groups: GroupLabels | None = None) -> str:
    """Name a number of a leaf: ``w[3, 1]``, or ``w[station=Denver, 1]``; a scalar as its leaf."""
    if groups is not None and groups.name:
        axis, last = groups.axis, len(groups.labels) - 1
        numbers = list(map(str, index))
        # The pad copies the last one.
        numbers[axis] = f"{groups.name}={groups.labels[min(index[axis], last)]}"
        return f"{name}[{', '.join(numbers)}]"
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def text(summary: Any) -> str:
    """Write header, table, notes and warnings in lines of text."""
    warnings = [
        textwrap.fill(f"! {x}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for x in summary.warnings
    ]
    notes = [textwrap.fill(x, WIDTH, break_on_hyphens=False) for x in summary.notes]
    return "\n".join([*_table_lines(summary), "", *(warnings or [ALL_WELL]), *notes])


def rich(summary: Any) -> "Group":
    """Return what a rich console prints, warnings in red."""
    from rich.console import Group
    from rich.text import Text

    table = Text("\n".join([*_table_lines(summary), ""]), no_wrap=True, overflow="ignore")
    warnings = [Text(f"! {x}", "red") for x in summary.warnings]
    return Group(table, *(warnings or [Text(ALL_WELL, "green")]), *map(Text, summary.notes))


def _table_lines(summary: Any) -> list[str]:
    keys = [key for key in HEADINGS if any(key in row.values for row in summary.rows)]
    table = [[summary.groups or "", *(HEADINGS[key] for key in keys)]]
    for row in summary.rows:
        name = f"{row.name} of {row.size:,}" if row.size > 1 else row.name
        table.append([name, *(_cell(row, key) for key in keys)])
    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *lines = [
        "  ".join([name.ljust(first), *map(str.rjust, numbers, others)]) for name, *numbers in table
    ]
    what = "groups" if summary.groups else "numbers"
    title = f"{summary.num_chains} chains x {summary.num_draws} draws, the worst {what} first"
    found = [title, "", head, "-" * len(head), *lines]
    if summary.num_left_out:
        what = f"groups of {summary.groups}" if summary.groups else "numbers"
        of = f" of {', '.join(summary.names)}" if summary.names else ""
        found.append(f"... {summary.num_left_out:,} more {what}{of}, none worse")
    if any(row.size > 1 for row in summary.rows):
        whole = "group" if summary.groups else "leaf"
        found.append(
            f'"of N": the number with the worst R-hat of a {whole}; its ESS are the least of all N'
        )
    return found


def _cell(row: Row, key: str) -> str:
    if key not in row.values:
        return ""
    value = row.values[key]
    if key == "rows":
        return f"{value:.0f}"
    if not math.isfinite(value):
        return str(value)
    if key.startswith("ess"):
        return f"{value:.0f}"
    if key.endswith("rhat"):
        return f"{value:.3f}" if value < 100 else f"{value:.3g}"
    if key == "mcse_mean":
        return f"{value:#.2g}".rstrip(".") if value < 100 else f"{value:.4g}"
    return _rounded(value, row.values["mcse_mean"])


def _rounded(value: float, error: float) -> str:
    """Write a number with the digits that its Monte Carlo error leaves."""
    is_known = math.isfinite(error) and error > 0
    digits = max(1 - math.floor(math.log10(error)), 0) if is_known else 7
    return f"{value:.{digits}f}" if digits <= 6 and abs(value) < 1e7 else f"{value:.4g}"
