"""The table of a summary: its lines, as text, for a terminal by rich, and as HTML.

Small leaves have a line for each number, large ones a line for the worst.
"""

import html as escaping
import math
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Group
from rich.text import Text

from gspmd_mcmc.tree import PyTree, unique_names

WIDTH = 100  # of warnings, in characters
ALL_WELL = "No warnings."
HEADINGS = {
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
    """One line of the table.

    Attributes
    ----------
    name
        Of a number, ``w[3, 1]``.
    size
        How many numbers the line stands for: for a large leaf it names the one with the worst R-hat,
        and shows the least effective sizes of all.
    values
        Statistics by name.
    """

    name: str
    size: int
    values: dict[str, float]

    @property
    def order(self) -> tuple[float, float]:
        """Sort key, the worst first: by R-hat to two digits, then by effective size."""
        rhat = self.values.get("nested_rhat", self.values["rhat"])
        if math.isnan(rhat):
            # Draws that are all equal cannot be judged; any other NaN is the worst.
            rhat = -math.inf if self.values["sd"] == 0 else math.inf
        size = self.values["ess_bulk"]
        size = -math.inf if math.isnan(size) else size
        return (-round(rhat, 2) if math.isfinite(rhat) else -rhat), size


def free_name(name: str, taken: Iterable[str]) -> str:
    """Lengthen a name until no other leaf has it."""
    return free_name(f"{name}_", taken) if name in taken else name


def named_leaves(tree: PyTree, is_leaf: Callable | None = None) -> dict[str, Any]:
    """Return the leaves of a tree by plain names, no two of them alike."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    names = unique_names([path for path, _ in found])
    return dict(zip(names, (leaf for _, leaf in found), strict=True))


def element(name: str, index: tuple[int, ...]) -> str:
    """Name a number of a leaf: ``w[3, 1]``; a scalar has the name of its leaf."""
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def text(summary: Any) -> str:
    """Write header, table, notes and warnings in lines of text."""
    warnings = [
        textwrap.fill(f"! {x}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        for x in summary.warnings
    ]
    notes = [textwrap.fill(x, WIDTH, break_on_hyphens=False) for x in summary.notes]
    return "\n".join([*_table_lines(summary), "", *(warnings or [ALL_WELL]), *notes])


def rich(summary: Any) -> Group:
    """Return what a rich console prints, warnings in red."""
    table = Text("\n".join([*_table_lines(summary), ""]), no_wrap=True, overflow="ignore")
    warnings = [Text(f"! {x}", "red") for x in summary.warnings]
    return Group(table, *(warnings or [Text(ALL_WELL, "green")]), *map(Text, summary.notes))


def _table_lines(summary: Any) -> list[str]:
    table = _table(summary)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *lines = [_line(cells, widths) for cells in table]
    return [_header(summary), "", head, "-" * len(head), *lines, *_notes(summary)]


def html(summary: Any) -> str:
    """Write the same as HTML."""
    headings, *rows = [[escaping.escape(cell) for cell in cells] for cells in _table(summary)]
    head = "".join(f"<th>{cell}</th>" for cell in headings)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>" for cells in rows)
    notes = "".join(f"<p>{escaping.escape(note)}</p>" for note in _notes(summary))
    items = "".join(f"<li>{escaping.escape(x)}</li>" for x in summary.warnings)
    below = f"<ul>{items}</ul>" if items else f"<p>{ALL_WELL}</p>"
    below += "".join(f"<p>{escaping.escape(note)}</p>" for note in summary.notes)
    title = escaping.escape(_header(summary))
    return f"<p>{title}</p><table><tr>{head}</tr>{body}</table>{notes}{below}"


def _header(summary: Any) -> str:
    return f"{summary.num_chains} chains x {summary.num_draws} draws, the worst numbers first"


def _notes(summary: Any) -> list[str]:
    found = []
    if summary.num_left_out:
        found.append(f"... {summary.num_left_out:,} more numbers, none worse")
    if any(row.size > 1 for row in summary.rows):
        found.append(
            '"of N": the number with the worst R-hat of a leaf; its ESS are the least of all N'
        )
    return found


def _table(summary: Any) -> list[list[str]]:
    keys = [key for key in HEADINGS if key in summary.log_density]
    headings = ["", *(HEADINGS[key] for key in keys)]
    return [headings, *([_name(row), *(_cell(row, key) for key in keys)] for row in summary.rows)]


def _line(cells: list[str], widths: list[int]) -> str:
    name, *numbers = cells
    right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join([name.ljust(widths[0]), *right])


def _name(row: Row) -> str:
    return f"{row.name} of {row.size:,}" if row.size > 1 else row.name


def _cell(row: Row, key: str) -> str:
    value = row.values[key]
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
