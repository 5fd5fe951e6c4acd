"""What a drawing of a layout shows, whatever it is drawn with: panels of cells, ticks and names.

An array of any rank becomes panels of rows and columns: the axes that are split come first, the last
two of them are drawn, and the others are sliced into panels. Many blocks are cut short by an ellipsis.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from gspmd_mcmc.views.layout.devices import device_names
from gspmd_mcmc.views.layout.layouts import LeafLayout
from gspmd_mcmc.views.palette import OKABE_ITO, WHOLE, distinct_colors, gradient

NUM_FIRST = 4  # Of blocks that are cut short.


@dataclass(frozen=True)
class Limits:
    """How many rows, columns and panels of blocks a medium has room for."""

    rows: int
    columns: int
    panels: int


@dataclass(frozen=True)
class Edge:
    """A row or column of blocks.

    Attributes
    ----------
    part
        Which one; None where blocks are left out.
    start
        The tick at its beginning.
    filled
        The part of a full block that the array reaches; below 1 at the end of an uneven axis.
    real
        The part of a full block that is neither missing nor padding.
    remark
        "empty", "short" (of a full block), "pad", "+3 pad", or nothing.
    """

    part: int | None
    start: str = ""
    filled: float = 1.0
    real: float = 1.0
    remark: str = ""


@dataclass(frozen=True)
class Cell:
    """A block: the devices that hold it, their colour, and what is not real of it.

    ``real`` are the real parts of its height and width; ``text`` is an ellipsis, and ``color`` None,
    where blocks are left out.
    """

    text: str
    color: str | None = None
    remark: str = ""
    real: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Panel:
    """A slice of an array with two axes at most."""

    title: str
    rows: tuple[Edge, ...]
    columns: tuple[Edge, ...]
    ends: tuple[str, str]
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A layout drawn: captions of its axes, panels, and how many panels are left out."""

    down: str
    across: str
    panels: tuple[Panel, ...]
    num_hidden: int


@dataclass(frozen=True)
class Axes:
    """Which axes of an array go down, across, and into panels; None where there is none."""

    down: int | None
    across: int | None
    sliced: tuple[int, ...]

    @classmethod
    def choose(cls, parts: tuple[int, ...]) -> "Axes":
        """Choose the axes to draw by the number of parts of each."""
        if len(parts) < 2:
            return cls(None, 0 if parts else None, ())
        split = [axis for axis, n in enumerate(parts) if n > 1]
        whole = [axis for axis, n in enumerate(parts) if n == 1]
        down, across = sorted((split[-2:] + whole)[:2])
        return cls(down, across, tuple(split[:-2]))


def picture_of(leaf: LeafLayout, limits: Limits) -> Picture:
    """Draw a leaf that has a grid."""
    assert leaf.grid is not None
    axes = Axes.choose(leaf.grid.parts)
    slices = list(product(*(range(leaf.grid.parts[axis]) for axis in axes.sliced)))
    shown = slices[: limits.panels]
    rows, columns = _edges(leaf, axes.down, limits.rows), _edges(leaf, axes.across, limits.columns)
    colors = _colors(leaf, [_index(leaf, axes, s, r, c) for s in shown for r in rows for c in columns])

    def panel(at: tuple[int, ...]) -> Panel:
        cells = [
            [_cell(leaf, colors, _index(leaf, axes, at, r, c), r, c) for c in columns] for r in rows
        ]
        return Panel(_title(leaf, axes, at), rows, columns, ends, tuple(map(tuple, cells)))

    ends = _end(leaf, axes.down), _end(leaf, axes.across)
    captions = _caption(leaf, axes.down), _caption(leaf, axes.across)
    return Picture(*captions, tuple(map(panel, shown)), len(slices) - len(shown))


def _caption(leaf: LeafLayout, axis: int | None) -> str:
    """Name an axis of the array, and the mesh axes that it lies over: ``axis 0 over data``."""
    if axis is None or leaf.is_mesh:
        return "" if axis is None else leaf.over(axis)
    over = leaf.over(axis)
    return f"axis {axis}" + (f" over {over}" if over else "")


def _title(leaf: LeafLayout, axes: Axes, at: tuple[int, ...]) -> str:
    """Name the slice of a panel, ``[2:4, :, :]``; on a mesh, ``chains=1``."""
    if not at or leaf.grid is None:
        return ""
    fixed = dict(zip(axes.sliced, at, strict=True))
    if leaf.shape is None:
        return ", ".join(f"{leaf.over(axis) or f'axis {axis}'}={part}" for axis, part in fixed.items())
    texts = [_slice_text(leaf, axis, fixed.get(axis)) for axis in range(len(leaf.shape))]
    return f"[{', '.join(texts)}]"


def _slice_text(leaf: LeafLayout, axis: int, part: int | None) -> str:
    if part is None:
        return ":"
    start, stop = leaf.interval(axis, part)
    return str(start) if stop - start == 1 else f"{start}:{stop}"


def _edges(leaf: LeafLayout, axis: int | None, limit: int) -> tuple[Edge, ...]:
    if axis is None:
        return (Edge(0),)
    assert leaf.grid is not None
    return tuple(
        Edge(None) if part is None else _edge(leaf, axis, part)
        for part in shown_parts(leaf.grid.parts[axis], limit)
    )


def shown_parts(count: int, limit: int) -> list[int | None]:
    """Choose which parts to show: all, or the first few, None for an ellipsis, and the last one."""
    if count <= limit:
        return list(range(count))
    return [*range(min(limit - 2, NUM_FIRST)), None, count - 1]


def _edge(leaf: LeafLayout, axis: int, part: int) -> Edge:
    step = leaf.block_shape[axis] if leaf.block_shape else 0
    if leaf.shape is None or not step:
        return Edge(part, "" if leaf.shape is None or part else "0")
    start, stop = leaf.interval(axis, part)
    real_stop = stop if leaf.num_rows is None or axis else min(max(leaf.num_rows, start), stop)
    is_past = (part - 1) * step >= leaf.shape[axis]  # The block before is empty already.
    tick, remark = "" if is_past else str(start), _remark(stop - real_stop, stop - start, step)
    return Edge(part, tick, (stop - start) / step, (real_stop - start) / step, remark)


def _remark(num_pad: int, size: int, step: int) -> str:
    if not size:
        return "empty"
    if num_pad:
        return "pad" if num_pad == size else f"+{num_pad} pad"
    return "short" if size < step else ""


def _end(leaf: LeafLayout, axis: int | None) -> str:
    """Write the tick that ends an axis; it stands before the empty blocks where there are any."""
    if axis is None or leaf.shape is None or leaf.grid is None:
        return ""
    start, stop = leaf.interval(axis, leaf.grid.parts[axis] - 1)
    return str(stop) if stop > start or not stop else ""


def _index(
    leaf: LeafLayout, axes: Axes, at: tuple[int, ...], row: Edge, column: Edge
) -> tuple[int, ...] | None:
    """Index of a block in the grid; None where blocks are left out."""
    if row.part is None or column.part is None or leaf.grid is None:
        return None
    parts = dict(zip(axes.sliced, at, strict=True)) | {axes.down: row.part, axes.across: column.part}
    return tuple(parts.get(axis, 0) for axis in range(len(leaf.grid.parts)))


def _cell(
    leaf: LeafLayout, colors: dict[int, str], index: tuple[int, ...] | None, row: Edge, column: Edge
) -> Cell:
    if index is None or leaf.grid is None or leaf.devices is None:
        return Cell("⋱" if row.part is column.part else "⋮" if row.part is None else "⋯")
    return Cell(
        text=device_names(leaf.devices, leaf.grid.owners[index].tolist()),
        color=colors[_lowest(leaf, index)],
        remark=row.remark or column.remark,
        real=(row.real, column.real),
    )


def _colors(leaf: LeafLayout, indices: Iterable[tuple[int, ...] | None]) -> dict[int, str]:
    """Colour blocks by the lowest device that holds each; neutral if every device holds the whole."""
    assert leaf.devices is not None
    lowest = {_lowest(leaf, index) for index in indices if index is not None}
    if leaf.num_shards == 1 and leaf.replication > 1:
        return dict.fromkeys(lowest, WHOLE)
    if len(leaf.devices) <= len(OKABE_ITO):
        return distinct_colors(leaf.devices.numbers)
    return gradient(lowest)


def _lowest(leaf: LeafLayout, index: tuple[int, ...]) -> int:
    assert leaf.grid is not None and leaf.devices is not None
    return min(leaf.devices.numbers[i] for i in leaf.grid.owners[index])
