"""A view as lines of text: header, table, totals, notes and drawings."""

import textwrap
from collections.abc import Sequence

from rich.text import Text

from gspmd_mcmc.views.layout import wording
from gspmd_mcmc.views.layout.drawings import Drawing, drawings_of
from gspmd_mcmc.views.layout.layouts import LeafLayout, Totals
from gspmd_mcmc.views.layout.text_drawing import Lines, beside, draw_text, width_of
from gspmd_mcmc.views.notation import shorten

MAX_LEAVES, MAX_DRAWINGS = 60, 8
GAP = "  "
TITLE_WIDTH, MAX_TITLE_WIDTH = 38, 50
_TO_ASCII = str.maketrans("┌┬┐├┼┤└┴┘─│⋮⋯⋱…×→↓", "+++++++++-|:.\\.x>v")


def text_view(leaves: Sequence[LeafLayout], totals: Totals, width: int) -> Lines:
    """Write a whole view in lines no wider than ``width``."""
    sections = [_wrapped(wording.header(leaves), width, "")]
    if leaves:
        sections.append(table_lines(leaves, width) + _wrapped(wording.totals_lines(totals), width))
    sections.append(_wrapped([f"note  {note}" for note in wording.notes(leaves)], width, " " * 6))
    sections.append(_drawings(leaves, width))
    lines: Lines = []
    for section in filter(None, sections):
        lines += ([Text()] if lines else []) + section
    return lines


def to_ascii(text: str) -> str:
    """Replace box characters and other signs, for terminals that know ASCII only."""
    return text.translate(_TO_ASCII).encode("ascii", "replace").decode()


def _wrapped(texts: list[str], width: int, indent: str = "  ") -> Lines:
    return [
        Text(line)
        for text in texts
        for line in textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    ]


def table_lines(leaves: Sequence[LeafLayout], width: int) -> Lines:
    """Write a row for each leaf, its path and spec shortened in the middle where room is short."""
    shown = leaves[:MAX_LEAVES]
    table = [wording.headings(leaves), *wording.rows(leaves)[: len(shown)]]
    widths = _fitted([max(map(len, column)) for column in zip(*table, strict=True)], width)
    num_right = 3  # blocks, copies and bytes
    lines = [Text(_line(cells, widths, num_right)) for cells in table]
    lines[0].stylize("bold")
    rule = Text("─" * width_of(lines), "dim")
    lines = [lines[0], rule, *lines[1:]]
    if len(leaves) > len(shown):
        lines.append(Text(f"… {len(leaves) - len(shown)} more leaves: view.leaves, view[path]", "dim"))
    return [*lines, rule]


def _fitted(widths: list[int], width: int) -> list[int]:
    """Take what is too much from the path first, then from the spec, then from the array."""
    spec = len(widths) - 4
    for column, least in ((0, 18), (spec, 20), (1, 14), (0, 12), (spec, 12), (1, 8), (0, 8)):
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - width
        widths[column] -= max(0, min(excess, widths[column] - least))
    return widths


def _line(cells: tuple[str, ...], widths: list[int], num_right: int) -> str:
    fitted = [shorten(cell, w) for cell, w in zip(cells, widths, strict=True)]
    left = [cell.ljust(w) for cell, w in zip(fitted, widths, strict=True)][:-num_right]
    right = [cell.rjust(w) for cell, w in zip(fitted, widths, strict=True)][-num_right:]
    return GAP.join(left + right).rstrip()


def _drawings(leaves: Sequence[LeafLayout], width: int) -> Lines:
    drawings = drawings_of(leaves)
    shown = [_titled(drawing, width) for drawing in drawings[:MAX_DRAWINGS]]
    hidden = len(drawings) - len(shown)
    more = [Text(), Text(f"… {hidden} more layouts: view[path] draws one", "dim")] if hidden else []
    return beside(shown, width) + more


def _titled(drawing: Drawing, width: int) -> Lines:
    body = draw_text(drawing.leaf, width)
    wanted = max(TITLE_WIDTH, width_of(body), min(len(drawing.headline), MAX_TITLE_WIDTH))
    room = min(width, wanted)
    title = [Text(shorten(drawing.headline, room), "bold"), Text(shorten(drawing.names, room))]
    others = [Text(drawing.others(room), "dim")] if drawing.alike else []
    return title + others + body
