"""What drawings of layouts show, whatever they are drawn with.

A tree needs a drawing for each mesh, and one for each layout that leaves share. An array of any rank
becomes panels of rows and columns: the axes that are split come first, the last two of them are drawn,
and the others are sliced into panels. Many blocks are cut short by an ellipsis.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.layouts.leaf_layout import DELETED, DEVICE, Devices, LeafLayout, cut_by_spec
from gspmd_mcmc.views.notation import array_text, axes_text, several, shorten
from gspmd_mcmc.views.palette import OKABE_ITO, WHOLE, distinct_colors, gradient

NUM_FIRST = 4  # blocks before an ellipsis


@dataclass(frozen=True)
class Drawing:
    """A layout to draw."""

    leaf: LeafLayout  # of those that share the layout, the one with the most bytes
    alike: tuple[str, ...] = ()  # paths of the others

    @property
    def headline(self) -> str:
        """Say how the array is cut: ``P(data=4): 4 blocks × 2 copies``."""
        leaf = self.leaf
        if leaf.is_mesh:
            return f"mesh {axes_text(leaf.devices.axes)}" if leaf.devices else "mesh"
        if leaf.num_shards == 1:
            where = f" on {leaf.replication} devices" if leaf.replication > 1 else ""
            return f"{leaf.label}: whole{where}"
        copies = f" × {leaf.replication} copies" if leaf.replication > 1 else ""
        return f"{leaf.label}: {leaf.num_shards} blocks{copies}"

    @property
    def names(self) -> str:
        """Name the leaf that is drawn."""
        if self.leaf.is_mesh:
            return str(self.leaf.devices)
        return f"{self.leaf.path}  {array_text(self.leaf.dtype, self.leaf.shape)}"

    def others(self, width: int) -> str:
        """Name the other leaves, as many as fit the width; nothing if there are none."""
        texts = [f"same layout: {several(list(self.alike), most)}" for most in (3, 2, 1)]
        fitting = [text for text in texts if len(text) <= width]
        return (fitting[0] if fitting else shorten(texts[-1], width)) if self.alike else ""


def drawings_of(leaves: Sequence[LeafLayout]) -> tuple[Drawing, ...]:
    """Gather the leaves that share a layout; meshes of two axes and more come first."""
    groups: dict[Hashable, list[LeafLayout]] = {}
    for leaf in leaves:
        if leaf.grid is not None and leaf.memory != DELETED:
            groups.setdefault(_key(leaf), []).append(leaf)
    drawn = {leaf.devices for leaf in leaves if leaf.is_mesh}
    drawings = []
    for devices in meshes_of(leaves):
        if devices not in drawn and sum(size > 1 for _, size in devices.axes) > 1:
            spec = P(*(name for name, _ in devices.axes))
            grid = cut_by_spec(devices.axes, spec, len(devices.axes))
            mesh = LeafLayout("mesh", None, "Mesh", DEVICE, "mesh", spec, devices, grid)
            drawings.append(Drawing(mesh))
    for group in groups.values():
        chosen = max(group, key=lambda leaf: (leaf.num_bytes or 0, len(leaf.shape or ())))
        drawings.append(Drawing(chosen, tuple(leaf.path for leaf in group if leaf is not chosen)))
    return tuple(drawings)


def meshes_of(leaves: Sequence[LeafLayout]) -> list[Devices]:
    """Return the meshes that leaves lie on, in their order."""
    return list(dict.fromkeys(leaf.devices for leaf in leaves if leaf.devices and leaf.devices.axes))


def _key(leaf: LeafLayout) -> Hashable:
    """Tell layouts apart: by owners, by the axes that are split, and by rows that are not real."""
    assert leaf.grid is not None
    parts, sizes = leaf.grid.parts, leaf.shape or ()
    while parts and parts[-1] == 1:
        parts = parts[:-1]
    uneven = tuple(size for size, n in zip(sizes, parts, strict=False) if size % n or not size)
    owners = leaf.grid.owners.tobytes()
    return leaf.devices, leaf.is_mesh, parts, owners, uneven, leaf.num_rows


@dataclass(frozen=True)
class Edge:
    """A row or column of blocks."""

    part: int | None  # which one; None where blocks are left out
    start: str = ""  # the tick at its beginning
    filled: float = 1.0  # part of a full block that the array reaches; below 1 at an uneven end
    real: float = 1.0  # part of a full block that is neither missing nor padding
    remark: str = ""  # "empty", "short" (of a full block), "pad", "+3 pad", or nothing


@dataclass(frozen=True)
class Cell:
    """A block: the devices that hold it, their color, and a remark; or an ellipsis."""

    text: str
    color: str | None = None  # None where blocks are left out
    remark: str = ""
    real: tuple[float, float] = (1.0, 1.0)  # parts of its height and width

    @property
    def line(self) -> str:
        """Its text and remark in one line."""
        return f"{self.text} {self.remark}".rstrip()


@dataclass(frozen=True)
class Side:
    """The rows of blocks of a picture, or its columns."""

    edges: tuple[Edge, ...]
    caption: str = ""  # the axis, and the mesh axes that it lies over: ``axis 0 over data``
    end: str = ""  # the last tick; it stands before the empty blocks where there are any


@dataclass(frozen=True)
class Panel:
    """A slice of an array with two axes at most."""

    title: str
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A layout drawn: its panels, which have the same rows and columns."""

    down: Side
    across: Side
    panels: tuple[Panel, ...]
    num_hidden: int  # panels that are left out


def picture_of(
    leaf: LeafLayout, max_rows: int = 16, max_columns: int = 16, max_panels: int = 4
) -> Picture:
    """Draw a leaf that has a grid, with as many blocks and panels as there is room for."""
    assert leaf.grid is not None and leaf.devices is not None
    parts, grid, devices = leaf.grid.parts, leaf.grid.owners, leaf.devices
    # The last two axes that are split go down and across, those before them into panels.
    split = [axis for axis, n in enumerate(parts) if n > 1]
    whole = [axis for axis, n in enumerate(parts) if n == 1]
    down, across = sorted((split[-2:] + whole)[:2]) if len(parts) > 1 else (None, 0 if parts else None)
    sliced = split[:-2]
    slices = list(product(*(range(parts[axis]) for axis in sliced)))
    shown = [dict(zip(sliced, at, strict=True)) for at in slices[:max_panels]]
    rows, columns = _side(leaf, down, max_rows), _side(leaf, across, max_columns)

    def owners(fixed: dict[int, int], row: Edge, column: Edge) -> list[int]:
        """Return positions of the devices that hold a block; none where blocks are left out."""
        if row.part is None or column.part is None:
            return []
        index = {**fixed, down: row.part, across: column.part}
        return grid[tuple(index.get(axis, 0) for axis in range(len(parts)))].tolist()

    def lowest(positions: list[int]) -> int:
        return min(devices.numbers[i] for i in positions)

    places = product(shown, rows.edges, columns.edges)
    colors = _colors(leaf, {lowest(held) for place in places if (held := owners(*place))})

    def cell(fixed: dict[int, int], row: Edge, column: Edge) -> Cell:
        held = owners(fixed, row, column)
        if not held:
            return Cell("⋱" if row.part is column.part else "⋮" if row.part is None else "⋯")
        remark, real = row.remark or column.remark, (row.real, column.real)
        return Cell(devices.names(held), colors[lowest(held)], remark, real)

    panels = []
    for fixed in shown:
        cells = [tuple(cell(fixed, row, column) for column in columns.edges) for row in rows.edges]
        panels.append(Panel(_title(leaf, fixed), tuple(cells)))
    return Picture(rows, columns, tuple(panels), len(slices) - len(shown))


def _title(leaf: LeafLayout, fixed: dict[int, int]) -> str:
    """Name the slice of a panel, ``[2:4, :, :]``; on a mesh, ``chains=1``."""
    if not fixed:
        return ""
    if leaf.shape is None:
        return ", ".join(f"{leaf.over(axis) or f'axis {axis}'}={part}" for axis, part in fixed.items())
    texts = [":"] * len(leaf.shape)
    for axis, part in fixed.items():
        start, stop = leaf.interval(axis, part)
        texts[axis] = str(start) if stop - start == 1 else f"{start}:{stop}"
    return f"[{', '.join(texts)}]"


def _side(leaf: LeafLayout, axis: int | None, limit: int) -> Side:
    if axis is None or leaf.grid is None:
        return Side((Edge(0),))
    count, over = leaf.grid.parts[axis], leaf.over(axis)
    first = range(count if count <= limit else min(limit - 2, NUM_FIRST))
    edges = [_edge(leaf, axis, part) for part in first]
    if count > limit:
        edges += [Edge(None), _edge(leaf, axis, count - 1)]
    caption = over if leaf.is_mesh else f"axis {axis}" + (f" over {over}" if over else "")
    start, stop = (0, 0) if leaf.shape is None else leaf.interval(axis, count - 1)
    has_end = leaf.shape is not None and (stop > start or not stop)
    return Side(tuple(edges), caption, str(stop) if has_end else "")


def _edge(leaf: LeafLayout, axis: int, part: int) -> Edge:
    step = leaf.block_shape[axis] if leaf.block_shape else 0
    if leaf.shape is None or not step:
        return Edge(part, "" if leaf.shape is None or part else "0")
    start, stop = leaf.interval(axis, part)
    size = stop - start
    num_real = size if leaf.num_rows is None or axis else min(max(leaf.num_rows - start, 0), size)
    remark = "short" if 0 < size < step else "" if size else "empty"
    if num_real < size:
        remark = f"+{size - num_real} pad" if num_real else "pad"
    is_past = (part - 1) * step >= leaf.shape[axis]  # The block before is empty already.
    return Edge(part, "" if is_past else str(start), size / step, num_real / step, remark)


def _colors(leaf: LeafLayout, lowest: set[int]) -> dict[int, str]:
    """Color blocks by the lowest device that holds each; neutral if every device holds the whole."""
    assert leaf.devices is not None
    numbers = leaf.devices.numbers
    if leaf.num_shards == 1 and leaf.replication > 1:
        return dict.fromkeys(lowest, WHOLE)
    return distinct_colors(numbers) if len(numbers) <= len(OKABE_ITO) else gradient(lowest)
