"""A view as HTML for notebooks: styles inline, colors inherited so that dark themes read well too."""

from collections.abc import Sequence
from html import escape

from gspmd_mcmc.views.layouts.layout_text import NUM_RIGHT, header, headings, notes, rows, totals_lines
from gspmd_mcmc.views.layouts.leaf_layout import LeafLayout, Totals
from gspmd_mcmc.views.layouts.pictures import Cell, Drawing, Limits, Panel, drawings_of, picture_of
from gspmd_mcmc.views.palette import ink

LIMITS = Limits(rows=16, columns=16, panels=6)
MAX_LEAVES, MAX_DRAWINGS = 200, 12
LINE = "1px solid rgba(128,128,128,.45)"
FAINT = "opacity:.65"
ROW_TICK = "text-align:right;padding-right:5px;margin-top:-.7em;"
HATCH = "repeating-linear-gradient(45deg,rgba(128,128,128,.45) 0 2px,transparent 2px 6px)"


def html_view(leaves: Sequence[LeafLayout], totals: Totals) -> str:
    """Write a whole view as one self-contained element."""
    drawings = drawings_of(leaves)
    parts = [_texts(header(leaves), "font-weight:600")]
    if leaves:
        parts += [_table(leaves), _texts(totals_lines(totals))]
    parts.append(_texts([f"note: {note}" for note in notes(leaves)], FAINT))
    parts.append(_div("".join(map(_drawing, drawings[:MAX_DRAWINGS])), "margin-top:10px"))
    if len(drawings) > MAX_DRAWINGS:
        parts.append(_texts([f"… {len(drawings) - MAX_DRAWINGS} more layouts: view[path] draws one"]))
    style = "font:13px/1.5 ui-monospace,Menlo,Consolas,monospace;color:inherit;text-align:left"
    return _div("".join(parts), style)


def _div(content: str, style: str = "") -> str:
    return f'<div style="{style}">{content}</div>' if style else f"<div>{content}</div>"


def _texts(texts: Sequence[str], style: str = "") -> str:
    return "".join(_div(escape(text), style) for text in texts)


def _table(leaves: Sequence[LeafLayout]) -> str:
    heading = _row(headings(leaves), "th", "font-weight:600;")
    lines = [_row(cells, "td", "") for cells in rows(leaves[:MAX_LEAVES])]
    hidden = len(leaves) - len(lines)
    more = _texts([f"… {hidden} more leaves: view.leaves, view[path]"]) if hidden else ""
    style = "border-collapse:collapse;margin:6px 0;color:inherit;background:transparent"
    return f'<table style="{style}">{heading}{"".join(lines)}</table>{more}'


def _row(cells: tuple[str, ...], tag: str, style: str) -> str:
    first_right = len(cells) - NUM_RIGHT
    style += f"padding:2px 12px 2px 0;border-bottom:{LINE};white-space:nowrap;background:transparent;"
    sides = ["right" if i >= first_right else "left" for i in range(len(cells))]
    tds = [
        f'<{tag} style="{style}text-align:{side}">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    ]
    return f'<tr style="background:transparent">{"".join(tds)}</tr>'


def _drawing(drawing: Drawing) -> str:
    picture = picture_of(drawing.leaf, LIMITS)
    hidden = f"and {picture.num_hidden} more panels" if picture.num_hidden else ""
    faint = [drawing.others(60), picture.caption]
    content = [
        _texts([drawing.headline], "font-weight:600"),
        _texts([drawing.names]),
        _texts(list(filter(None, faint)), FAINT),
        *(_panel(panel) for panel in picture.panels),
        _texts([hidden] if hidden else []),
    ]
    return _div("".join(content), "display:inline-block;vertical-align:top;margin:0 32px 18px 0")


def _panel(panel: Panel) -> str:
    """Lay out a panel as a CSS grid: ticks at the left and on top of the cells."""
    columns = f"auto repeat({len(panel.columns)},minmax(3em,auto)) auto"
    items = ["<div></div>", *(_tick(edge.start) for edge in panel.columns), _tick(panel.ends[1])]
    for row, cells in zip(panel.rows, panel.cells, strict=True):
        items += [_tick(row.start, ROW_TICK), *map(_cell, cells), "<div></div>"]
    items.append(_tick(panel.ends[0], ROW_TICK))
    grid = _div("".join(items), f"display:grid;grid-template-columns:{columns};width:max-content")
    return _div(
        _texts([panel.title] if panel.title else []) + grid,
        "display:inline-block;margin:2px 14px 6px 0",
    )


def _tick(text: str, style: str = "") -> str:
    return _div(escape(text), f"{style}font-size:11px;{FAINT}")


def _cell(cell: Cell) -> str:
    text = escape(cell.line)
    style = "text-align:center;padding:3px 8px;"
    if cell.color is None:
        return _div(text, style)
    down, across = (100 * part for part in cell.real)
    fill = f"linear-gradient({cell.color},{cell.color}) 0 0/{across:.4g}% {down:.4g}% no-repeat"
    # The text stands in the middle: black or white on the color, as the page has it on the hatching.
    color = f"color:{ink(cell.color)};" if min(cell.real) > 0.5 else ""
    return _div(text, f"{style}{color}background:{fill},{HATCH};border:{LINE}")
