"""A view of layouts in words and box characters: header, table, totals, notes and drawings."""

import textwrap
from collections.abc import Sequence

from rich.text import Text

from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.views.layouts.leaf_layout import (
    ABSTRACT,
    DELETED,
    DEVICE,
    HOST,
    Devices,
    LeafLayout,
    Totals,
)
from gspmd_mcmc.views.layouts.pictures import (
    Drawing,
    Panel,
    Picture,
    drawings_of,
    meshes_of,
    picture_of,
)
from gspmd_mcmc.views.notation import array_text, axes_text, number_ranges, several, shorten
from gspmd_mcmc.views.palette import ink

MAX_LEAVES, MAX_DRAWINGS, MAX_LEVELS = 60, 8, 3
MAX_ROWS, MAX_COLUMNS = 10, 16
TITLE_WIDTH, MAX_TITLE_WIDTH = 38, 50
NUM_RIGHT = 3  # columns of the table that hold numbers: blocks, copies and bytes
_GAP, _PANEL_GAP = "  ", 3
_TO_ASCII = str.maketrans("┌┬┐├┼┤└┴┘─│⋮⋯⋱…×→↓", "+++++++++-|:.\\.x>v")

Lines = list[Text]


def text_view(leaves: Sequence[LeafLayout], totals: Totals, width: int) -> Lines:
    """Write a whole view in lines no wider than ``width``."""
    table = _table_lines(leaves, width) + _wrapped(totals_lines(totals), width) if leaves else []
    paths: dict[str, list[str]] = {}  # of all leaves that share a remark
    for leaf in leaves:
        for note in leaf.notes:
            paths.setdefault(note, []).append(leaf.path)
    notes = [f"note  {several(names, 4)}: {note}" for note, names in paths.items()]
    drawings = drawings_of(leaves)
    drawn = _side_by_side([_titled(drawing, width) for drawing in drawings[:MAX_DRAWINGS]], width)
    if len(drawings) > MAX_DRAWINGS:
        more = f"… {len(drawings) - MAX_DRAWINGS} more layouts: view[path] draws one"
        drawn += [Text(), Text(more, "dim")]
    lines: Lines = []
    for section in (_wrapped(header(leaves), width, ""), table, _wrapped(notes, width, " " * 6), drawn):
        lines += ([Text()] if lines and section else []) + section
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


# Words, whatever shows them


def header(leaves: Sequence[LeafLayout]) -> list[str]:
    """Say how many leaves there are, and on which meshes."""
    if not leaves:
        return ["an empty tree: no leaves"]
    meshes = meshes_of(leaves)
    lines = [f"{len(leaves)} lea{'f' if len(leaves) == 1 else 'ves'}"]
    if len(meshes) == 1:
        lines = [f"{lines[0]} on mesh {axes_text(meshes[0].axes)} ({meshes[0]})"]
    else:
        lines += [f"mesh {_letter(i)}: {axes_text(m.axes)} ({m})" for i, m in enumerate(meshes)]
    chips = [several(list(mesh.on_chip), 8) for mesh in meshes if mesh.on_chip]
    lines += [f"chips in mesh order: {places}" for places in chips]
    spread = [leaf.devices for leaf in leaves if leaf.devices and leaf.devices.spans_processes]
    if spread:
        pairs = {p for d in spread for p in zip(d.processes, d.is_addressable, strict=True)}
        own = sorted(process for process, is_here in pairs if is_here)
        here = f" (this one is p{number_ranges(own)})" if own else ""
        parentheses = "those in parentheses are not addressable here"
        lines.append(f"p0:… names the process of a device{here}; {parentheses}")
    return lines


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def totals_lines(totals: Totals) -> list[str]:
    """Say what all leaves take on a device, and on the host."""
    levels: dict[tuple[str, str], list[int]] = {}  # devices that hold as much
    for (kind, number), count in totals.by_device.items():
        levels.setdefault((kind, bytes_text(count)), []).append(number)
    whole = bytes_text(sum(totals.by_device.values()))
    lines = []
    if len(levels) > MAX_LEVELS:
        low, high = bytes_text(min(totals.by_device.values())), bytes_text(totals.per_device)
        lines = [f"total on a device: {low} to {high}, {whole} in all"]
    else:
        for (kind, size), numbers in levels.items():
            device = "device" if kind == ABSTRACT else f"{kind} device"
            each = "each " if len(numbers) > 1 else ""
            lines.append(f"total on {each}{device} {number_ranges(numbers)}: {size}")
        lines += [f"total on all devices: {whole}"] if len(totals.by_device) > 1 else []
    if totals.on_host:
        lines.append(f"total on the host: {bytes_text(totals.on_host)}")
    if totals.num_unknown:
        lines.append(f"not counted: {totals.num_unknown} without a known place or size")
    return lines


# The table


def _table_lines(leaves: Sequence[LeafLayout], width: int) -> Lines:
    """Write a row for each leaf, its path and spec shortened in the middle where room is short."""
    letters: dict[Devices | None, str] = {d: _letter(i) for i, d in enumerate(meshes_of(leaves))}
    mesh = ["mesh"] * (len(letters) > 1)  # is named where there are several
    table = [["leaf", "array", *mesh, "spec", "blocks", "copies", "/device"]]
    for leaf in leaves[:MAX_LEAVES]:
        letter = [letters.get(leaf.devices, "")] if mesh else []
        table.append([leaf.path, array_text(leaf.dtype, leaf.shape), *letter, *_layout_cells(leaf)])
    # What is too much is taken from the path first, then from the spec, then from the array.
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    spec = len(widths) - NUM_RIGHT - 1
    for column, least in ((0, 18), (spec, 20), (1, 14), (0, 12), (spec, 12), (1, 8), (0, 8)):
        excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
        widths[column] -= max(0, min(excess, widths[column] - least))
    align = [str.ljust] * (spec + 1) + [str.rjust] * NUM_RIGHT
    lines = []
    for cells in table:
        columns = zip(align, cells, widths, strict=True)
        fitted = [aligned(shorten(cell, room), room) for aligned, cell, room in columns]
        lines.append(Text(_GAP.join(fitted).rstrip()))
    lines[0].stylize("bold")
    rule = Text("─" * width_of(lines), "dim")
    if len(leaves) > MAX_LEAVES:
        hidden = len(leaves) - MAX_LEAVES
        lines.append(Text(f"… {hidden} more leaves: view.leaves, view[path]", "dim"))
    return [lines[0], rule, *lines[1:], rule]


def _layout_cells(leaf: LeafLayout) -> tuple[str, str, str, str]:
    """Write spec, blocks, copies and bytes on a device."""
    if leaf.grid is None:
        is_host = leaf.memory == HOST
        return f"host, {bytes_text(leaf.num_bytes or 0)}" if is_host else leaf.label, "", "", ""
    memory = "" if leaf.memory in (DEVICE, DELETED) else f" in {leaf.memory}"
    per_device = "?" if leaf.bytes_per_device is None else bytes_text(leaf.bytes_per_device)
    return leaf.label + memory, str(leaf.num_shards), str(leaf.replication), per_device


# Drawings


def width_of(lines: Lines) -> int:
    """Return the columns that some lines take."""
    return max((line.cell_len for line in lines), default=0)


def _titled(drawing: Drawing, width: int) -> Lines:
    """Draw a leaf below its title, in as many columns of blocks as fit the width."""
    for columns in range(MAX_COLUMNS, 2, -1):
        picture = picture_of(drawing.leaf, MAX_ROWS, columns)
        panels = [_panel_lines(panel, picture) for panel in picture.panels]
        if max(map(width_of, panels)) <= width:
            break
    axes = [
        f"{arrow} {side.caption}"
        for arrow, side in (("↓", picture.down), ("→", picture.across))
        if side.caption
    ]
    body = [Text("   ".join(axes), "dim")] if axes else []
    body += _side_by_side(panels, width)
    body += [Text(f"and {picture.num_hidden} more panels", "dim")] if picture.num_hidden else []
    for line in body:
        line.truncate(width, overflow="ellipsis")
    wanted = max(TITLE_WIDTH, width_of(body), min(len(drawing.headline), MAX_TITLE_WIDTH))
    room = min(width, wanted)
    title = [Text(shorten(drawing.headline, room), "bold"), Text(shorten(drawing.names, room))]
    return title + ([Text(drawing.others(room), "dim")] if drawing.alike else []) + body


def _side_by_side(blocks: list[Lines], width: int) -> Lines:
    """Set blocks of lines side by side, as many as fit, in rows."""
    rows: list[list[Lines]] = []
    for block in blocks:
        if rows and sum(width_of(b) + _PANEL_GAP for b in rows[-1]) + width_of(block) <= width:
            rows[-1].append(block)
        else:
            rows.append([block])
    lines: Lines = []
    for row in rows:
        lines += [Text()] if lines else []
        for i in range(max(map(len, row))):
            line = Text()
            for block in row:
                piece = block[i].copy() if i < len(block) else Text()
                piece.pad_right(width_of(block) - piece.cell_len + _PANEL_GAP)
                line.append_text(piece)
            line.rstrip()
            lines.append(line)
    return lines


def _panel_lines(panel: Panel, picture: Picture) -> Lines:
    rows, columns = picture.down, picture.across
    # A column has room for its cells, and for its tick so that it does not touch the next one.
    cells = zip(*panel.cells, strict=True)
    widths = [
        max(*(len(cell.line) + 2 for cell in column), len(edge.start))
        for column, edge in zip(cells, columns.edges, strict=True)
    ]
    longest = max(len(tick) for tick in [*(row.start for row in rows.edges), rows.end])
    gutter = longest + 1 if longest else 0
    lines = [Text(panel.title)] if panel.title else []
    ticks = [edge.start.ljust(w + 1) for edge, w in zip(columns.edges, widths, strict=True)]
    across = "".join([*ticks, columns.end]).rstrip()
    lines += [Text(" " * gutter + across, "dim")] if across else []
    for i, row in enumerate(rows.edges):
        lines.append(_rule(row.start, gutter, widths, "├┼┤" if i else "┌┬┐"))
        line = Text(" " * gutter + "│")
        for cell, width in zip(panel.cells[i], widths, strict=True):
            style = "dim" if cell.color else ""
            if cell.color and min(cell.real) > 0:
                style = f"{ink(cell.color)} on {cell.color}"
            line.append(cell.line.center(width), style).append("│")
        lines.append(line)
    return [*lines, _rule(rows.end, gutter, widths, "└┴┘")]


def _rule(tick: str, gutter: int, widths: list[int], corners: str) -> Text:
    left, middle, right = corners
    line = Text().append(f"{tick.rjust(gutter - 1)} " if gutter else "", "dim")
    return line.append(left + middle.join("─" * w for w in widths) + right)
