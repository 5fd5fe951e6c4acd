"""Draw layouts with matplotlib."""

import math
from collections.abc import Sequence
from typing import Any

from gspmd_mcmc.views.layout.drawings import Drawing
from gspmd_mcmc.views.layout.figure_panel import draw_picture
from gspmd_mcmc.views.layout.layouts import LeafLayout
from gspmd_mcmc.views.layout.pictures import Limits, Picture, picture_of
from gspmd_mcmc.views.notation import shorten

LIMITS = Limits(rows=16, columns=16, panels=4)
MAX_COLUMNS, MAX_DRAWINGS = 3, 12
WIDTH, HEIGHT, STRIP_HEIGHT = 4.5, 3.8, 2.0  # inches of a drawing
MARGIN, TITLE_HEIGHT = 0.3, 0.7
TITLE_CHARS = 52
GREY = "#555555"


def figure_of(drawings: Sequence[Drawing], title: Sequence[str]) -> Any:
    """Return a Figure with a panel for each drawing.

    Raises
    ------
    ValueError
        If there is nothing to draw.
    """
    from matplotlib.figure import Figure

    if not drawings:
        raise ValueError("figure(): expected a leaf that lies on devices, got none; see view.leaves")
    rows = _in_rows(drawings[:MAX_DRAWINGS])
    hidden = len(drawings) - MAX_DRAWINGS
    lines = [*title, f"{hidden} more layouts are not drawn"] if hidden > 0 else title
    heights = [0.4 + 0.19 * len(lines), *map(_row_height, rows)]
    figure = Figure(figsize=(WIDTH * max(2, len(rows[0])), sum(heights)), facecolor="white")
    figure.text(MARGIN / figure.get_figwidth(), 1 - 0.15 / sum(heights), "\n".join(lines), va="top")
    for r, row in enumerate(rows):
        for c, (drawing, picture) in enumerate(row):
            box = c * WIDTH + MARGIN, sum(heights[: r + 1]) + TITLE_HEIGHT, heights[r + 1]
            _titled(_axes(figure, *box), drawing, picture)
    return figure


def draw_on(ax: Any, leaf: LeafLayout) -> None:
    """Draw a leaf on a matplotlib Axes, under a title; its panels lie side by side."""
    drawing = Drawing(leaf)
    draw_picture(ax, picture_of(leaf, LIMITS))
    title = f"{shorten(drawing.names, TITLE_CHARS)}\n{drawing.headline}"
    ax.set_title(title, loc="left", fontsize=10, parse_math=False)


def _in_rows(drawings: Sequence[Drawing]) -> list[list[tuple[Drawing, Picture]]]:
    """Set drawings in rows, strips after those that need height."""
    pairs = [(drawing, picture_of(drawing.leaf, LIMITS)) for drawing in drawings]
    pairs.sort(key=lambda pair: not pair[1].down)
    columns = min(MAX_COLUMNS, len(pairs))
    return [pairs[i : i + columns] for i in range(0, len(pairs), columns)]


def _row_height(row: list[tuple[Drawing, Picture]]) -> float:
    return HEIGHT if any(picture.down for _, picture in row) else STRIP_HEIGHT


def _axes(figure: Any, left: float, top: float, height: float) -> Any:
    """Add Axes, in inches from the upper left corner, with room for a title above them."""
    wide, high = figure.get_size_inches()
    size = WIDTH - 1.3 * MARGIN, height - TITLE_HEIGHT - 0.2
    return figure.add_axes((left / wide, 1 - (top + size[1]) / high, size[0] / wide, size[1] / high))


def _titled(ax: Any, drawing: Drawing, picture: Picture) -> None:
    draw_picture(ax, picture)
    lines = [
        (33, drawing.headline, {"weight": "bold", "fontsize": 10.5}),
        (19, drawing.names, {"fontsize": 9.5}),
        (6, drawing.others(TITLE_CHARS), {"fontsize": 8.5, "color": GREY}),
    ]
    for above, text, style in lines:
        ax.annotate(
            shorten(text, math.floor(TITLE_CHARS * 9.5 / style["fontsize"])), (0, 1), (0, above),
            xycoords="axes fraction", textcoords="offset points", parse_math=False, **style,
        )  # fmt: skip
