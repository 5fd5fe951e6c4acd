"""Draw layouts with box characters; without the colours it is plain text."""

from rich.text import Text

from gspmd_mcmc.views.layout.layouts import LeafLayout
from gspmd_mcmc.views.layout.pictures import Cell, Limits, Panel, Picture, picture_of
from gspmd_mcmc.views.palette import ink

MAX_ROWS, MAX_COLUMNS, MAX_PANELS = 10, 16, 4
GAP = 3

Lines = list[Text]


def draw_text(leaf: LeafLayout, width: int) -> Lines:
    """Draw a leaf that has a grid, in as many columns of blocks as fit the width."""
    for columns in range(MAX_COLUMNS, 2, -1):
        picture = picture_of(leaf, Limits(MAX_ROWS, columns, MAX_PANELS))
        panels = [_panel_lines(panel) for panel in picture.panels]
        if max(map(width_of, panels)) <= width:
            break
    hidden = [Text(f"and {picture.num_hidden} more panels", "dim")] if picture.num_hidden else []
    lines = _caption(picture) + beside(panels, width) + hidden
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def width_of(lines: Lines) -> int:
    """Columns that some lines take."""
    return max((line.cell_len for line in lines), default=0)


def beside(blocks: list[Lines], width: int) -> Lines:
    """Set blocks of lines side by side, as many as fit, in rows."""
    rows: list[list[Lines]] = []
    for block in blocks:
        if rows and sum(width_of(b) + GAP for b in rows[-1]) + width_of(block) <= width:
            rows[-1].append(block)
        else:
            rows.append([block])
    lines: Lines = []
    for row in rows:
        lines += ([Text()] if lines else []) + _joined(row)
    return lines


def _joined(row: list[Lines]) -> Lines:
    lines = []
    for i in range(max(map(len, row))):
        line = Text()
        for block in row:
            piece = block[i].copy() if i < len(block) else Text()
            piece.pad_right(width_of(block) - piece.cell_len + GAP)
            line.append_text(piece)
        line.rstrip()
        lines.append(line)
    return lines


def _caption(picture: Picture) -> Lines:
    down = f"↓ {picture.down}" if picture.down else ""
    across = f"→ {picture.across}" if picture.across else ""
    text = "   ".join(filter(None, (down, across)))
    return [Text(text, "dim")] if text else []


def _panel_lines(panel: Panel) -> Lines:
    widths = [_column_width(panel, c) for c in range(len(panel.columns))]
    starts = [row.start for row in panel.rows]
    gutter = max(map(len, [*starts, panel.ends[0]])) + 1
    gutter = 0 if gutter == 1 else gutter
    lines = [Text(panel.title)] if panel.title else []
    lines += _column_ticks(panel, widths, gutter)
    for i, row in enumerate(panel.rows):
        lines.append(_rule(row.start, gutter, widths, "┌┬┐" if i == 0 else "├┼┤"))
        lines.append(_cells_line(panel.cells[i], gutter, widths))
    return [*lines, _rule(panel.ends[0], gutter, widths, "└┴┘")]


def _column_width(panel: Panel, c: int) -> int:
    """Room for the cells of a column, and for its tick so that it does not touch the next one."""
    cells = max(len(_cell_text(row[c])) + 2 for row in panel.cells)
    return max(cells, len(panel.columns[c].start))


def _cell_text(cell: Cell) -> str:
    return f"{cell.text} {cell.remark}".rstrip()


def _column_ticks(panel: Panel, widths: list[int], gutter: int) -> Lines:
    ticks = [edge.start.ljust(w + 1) for edge, w in zip(panel.columns, widths, strict=True)]
    text = "".join(ticks) + panel.ends[1]
    return [Text(" " * gutter + text.rstrip(), "dim")] if text.strip() else []


def _rule(tick: str, gutter: int, widths: list[int], corners: str) -> Text:
    left, middle, right = corners
    line = Text().append(f"{tick.rjust(gutter - 1)} " if gutter else "", "dim")
    return line.append(left + middle.join("─" * w for w in widths) + right)


def _cells_line(cells: tuple[Cell, ...], gutter: int, widths: list[int]) -> Text:
    line = Text(" " * gutter + "│")
    for cell, width in zip(cells, widths, strict=True):
        line.append(_cell_text(cell).center(width), _style(cell)).append("│")
    return line


def _style(cell: Cell) -> str:
    if cell.color is None:
        return ""
    is_real = min(cell.real) > 0
    return f"{ink(cell.color)} on {cell.color}" if is_real else "dim"
