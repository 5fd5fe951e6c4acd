"""Drawings of layouts with matplotlib; in a panel, coordinates are points from the upper left."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gspmd_mcmc.views.layouts.leaf_layout import LeafLayout
from gspmd_mcmc.views.layouts.pictures import Cell, Drawing, Panel, Picture, Side, picture_of
from gspmd_mcmc.views.notation import shorten
from gspmd_mcmc.views.palette import ink

MAX_COLUMNS, MAX_DRAWINGS = 3, 12
WIDTH, HEIGHT, STRIP_HEIGHT = 4.5, 3.8, 2.0  # inches of a drawing
MARGIN, TITLE_HEIGHT = 0.3, 0.7
TITLE_CHARS = 52
GREY = "#555555"
TICK_SIZE, CAPTION_SIZE, MAX_SIZE, MIN_SIZE = 8.0, 8.5, 12.0, 4.0
CHAR_WIDTH, LINE_HEIGHT = 0.62, 1.25  # of the font's size
GAP = 5.0
STRIP = 48.0
HATCHED = {"facecolor": "white", "edgecolor": "#AAAAAA", "hatch": "////", "linewidth": 0}


def figure_of(drawings: Sequence[Drawing], title: Sequence[str]) -> Any:
    """Return a Figure with a panel for each drawing.

    Raises
    ------
    ValueError
        If there is nothing to draw.
    """
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    if not drawings:
        raise ValueError("figure(): expected a leaf that lies on devices, got none; see view.leaves")
    pairs = [(drawing, picture_of(drawing.leaf)) for drawing in drawings[:MAX_DRAWINGS]]
    pairs.sort(key=lambda pair: not pair[1].down.caption)  # strips after those that need height
    columns = min(MAX_COLUMNS, len(pairs))
    rows = [pairs[i : i + columns] for i in range(0, len(pairs), columns)]
    hidden = len(drawings) - MAX_DRAWINGS
    lines = [*title, f"{hidden} more layouts are not drawn"] if hidden > 0 else title
    is_high = [any(picture.down.caption for _, picture in row) for row in rows]
    heights = [0.4 + 0.19 * len(lines), *(HEIGHT if high else STRIP_HEIGHT for high in is_high)]
    figure = Figure(figsize=(WIDTH * max(2, len(rows[0])), sum(heights)), facecolor="white")
    figure.text(MARGIN / figure.get_figwidth(), 1 - 0.15 / sum(heights), "\n".join(lines), va="top")
    for r, row in enumerate(rows):
        for c, (drawing, picture) in enumerate(row):
            # In inches from the upper left corner, with room for a title above.
            left, top = c * WIDTH + MARGIN, sum(heights[: r + 1]) + TITLE_HEIGHT
            width, height = WIDTH - 1.3 * MARGIN, heights[r + 1] - TITLE_HEIGHT - 0.2
            place = Bbox.from_bounds(left, sum(heights) - top - height, width, height)
            inches = figure.dpi_scale_trans - figure.transFigure
            _titled(figure.add_axes(place.transformed(inches).bounds), drawing, picture)
    return figure


def draw_on(ax: Any, leaf: LeafLayout) -> None:
    """Draw a leaf on a matplotlib Axes, under a title; its panels lie side by side."""
    drawing = Drawing(leaf)
    _draw_picture(ax, picture_of(leaf))
    title = f"{shorten(drawing.names, TITLE_CHARS)}\n{drawing.headline}"
    ax.set_title(title, loc="left", fontsize=10, parse_math=False)


def _titled(ax: Any, drawing: Drawing, picture: Picture) -> None:
    _draw_picture(ax, picture)
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


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        """Its center."""
        return self.x + self.width / 2, self.y + self.height / 2


def _draw_picture(ax: Any, picture: Picture) -> None:
    """Draw panels in a square of panels over the whole Axes."""
    box, (width, height) = ax.get_position(), ax.figure.get_size_inches()
    width, height = 72 * box.width * width, 72 * box.height * height
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    across = math.ceil(math.sqrt(len(picture.panels)))
    down = math.ceil(len(picture.panels) / across)
    for i, panel in enumerate(picture.panels):
        x, y = (i % across) * width / across, (i // across) * height / down
        _panel(ax, panel, picture, Box(x, y, width / across, height / down))
    if picture.num_hidden:
        text = f"and {picture.num_hidden} more panels"
        _text(ax, (width, height), text, ha="right", va="top", fontsize=CAPTION_SIZE)


def _panel(ax: Any, panel: Panel, picture: Picture, room: Box) -> None:
    """Draw a panel with its title, captions and ticks in the room that it has."""
    inner = _inner(panel, picture, room)
    tall, wide = inner.height / len(picture.down.edges), inner.width / len(picture.across.edges)
    for r, cells in enumerate(panel.cells):
        for c, cell in enumerate(cells):
            _cell(ax, cell, Box(inner.x + c * wide, inner.y + r * tall, wide, tall))
    for where, tick in _ticks(picture.across):
        _text(ax, (inner.x + where * wide, inner.y - 3), tick, ha="center", va="bottom")
    for where, tick in _ticks(picture.down):
        _text(ax, (inner.x - 4, inner.y + where * tall), tick, ha="right", va="center")
    style: dict[str, Any] = {"fontsize": CAPTION_SIZE, "color": "black", "ha": "center"}
    across = f"{picture.across.caption} →" if picture.across.caption else ""
    above = "\n".join(filter(None, (panel.title, across)))
    has_ticks = bool(_ticks(picture.across))
    y = inner.y - 3 - has_ticks * LINE_HEIGHT * TICK_SIZE
    _text(ax, (inner.middle[0], y), above, va="bottom", **style)
    if picture.down.caption:
        # Turned by a quarter, this arrow points down.
        where = room.x + CAPTION_SIZE / 2, inner.middle[1]
        _text(ax, where, f"← {picture.down.caption}", rotation=90, va="center", **style)


def _inner(panel: Panel, picture: Picture, room: Box) -> Box:
    """Return the box of the cells: the room less titles, captions and ticks."""
    ticks = max(len(tick) for _, tick in [(0, ""), *_ticks(picture.down)])
    left = TICK_SIZE * CHAR_WIDTH * ticks + GAP + (CAPTION_SIZE + GAP) * bool(picture.down.caption)
    above = bool(panel.title) + bool(picture.across.caption) + bool(_ticks(picture.across))
    top = above * LINE_HEIGHT * CAPTION_SIZE + GAP
    width = room.width - left - 3 * GAP if picture.across.caption else STRIP
    height = room.height - top - 2 * GAP if picture.down.caption else STRIP
    return Box(room.x + left, room.y + top, width, height)


def _ticks(side: Side) -> list[tuple[float, str]]:
    """Return ticks and where they stand, in blocks; where a block is not full, at its filled part."""
    begins = [0.0, *(i + edge.filled for i, edge in enumerate(side.edges))]
    texts = [*(edge.start for edge in side.edges), side.end]
    return [(where, text) for where, text in zip(begins, texts, strict=True) if text]


def _text(ax: Any, where: tuple[float, float], text: str, **style) -> None:
    ax.text(*where, text, **{"fontsize": TICK_SIZE, "color": GREY, "parse_math": False} | style)


def _cell(ax: Any, cell: Cell, box: Box) -> None:
    from matplotlib.patches import Rectangle

    if cell.color is None:
        _text(ax, box.middle, cell.text, ha="center", va="center", fontsize=11)
        return
    down, across = cell.real
    if min(cell.real) < 1:
        ax.add_patch(Rectangle(box[:2], box.width, box.height, **HATCHED))
    filled = box.width * across, box.height * down
    ax.add_patch(Rectangle(box[:2], *filled, facecolor=cell.color, linewidth=0))
    frame = {"fill": False, "edgecolor": "white", "linewidth": 1.5}
    ax.add_patch(Rectangle(box[:2], box.width, box.height, **frame))
    # The devices are written as large as there is room for, in a line or several.
    devices = cell.text.replace(" ", "\n")
    candidates = [f"{devices}\n{cell.remark}".rstrip(), cell.line]
    text = max(candidates, key=lambda text: _fitting_size(text, box))
    if _fitting_size(text, box) < 6 and cell.remark:
        text = devices  # The hatching tells the rest.
    is_filled = min(cell.real) > 0.6
    color = ink(cell.color) if is_filled else "black"
    backing = None if is_filled else {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    size = max(MIN_SIZE, min(MAX_SIZE, _fitting_size(text, box)))
    style = {"ha": "center", "va": "center", "bbox": backing}
    _text(ax, box.middle, text, color=color, fontsize=size, **style)


def _fitting_size(text: str, box: Box) -> float:
    lines = text.split("\n")
    by_width = 0.9 * box.width / (CHAR_WIDTH * max(map(len, lines)))
    return min(by_width, 0.9 * box.height / (LINE_HEIGHT * len(lines)))
