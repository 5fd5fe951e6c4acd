"""The words of a view, whatever shows them: header, table, totals and notes."""

from collections.abc import Sequence

from gspmd_mcmc.views.layout.devices import ABSTRACT, Devices
from gspmd_mcmc.views.layout.drawings import meshes_of
from gspmd_mcmc.views.layout.layouts import DELETED, DEVICE, HOST, LeafLayout, Totals
from gspmd_mcmc.views.notation import array_text, axes_text, bytes_text, number_ranges, several

MAX_LEVELS = 3


def header(leaves: Sequence[LeafLayout]) -> list[str]:
    """Say how many leaves there are, and on which meshes."""
    meshes = meshes_of(leaves)
    count = f"{len(leaves)} lea{'f' if len(leaves) == 1 else 'ves'}"
    if not leaves:
        return ["an empty tree: no leaves"]
    if len(meshes) == 1:
        lines = [f"{count} on mesh {axes_text(meshes[0].axes)} ({meshes[0]})"]
    else:
        lines = [
            count,
            *(f"mesh {_letter(i)}: {axes_text(m.axes)} ({m})" for i, m in enumerate(meshes)),
        ]
    return lines + _process_line(leaves)


def _process_line(leaves: Sequence[LeafLayout]) -> list[str]:
    """Explain the parentheses, where some devices belong to another process."""
    spread = [leaf.devices for leaf in leaves if leaf.devices and leaf.devices.spans_processes]
    if not spread:
        return []
    own = {p for d in spread for p, here in zip(d.processes, d.is_addressable, strict=True) if here}
    here = f" (this one is p{number_ranges(sorted(own))})" if own else ""
    return [f"p0:… names the process of a device{here}; those in parentheses are not addressable here"]


def headings(leaves: Sequence[LeafLayout]) -> tuple[str, ...]:
    """Headings of the table's columns; the mesh is named where there are several."""
    mesh = ("mesh",) if len(meshes_of(leaves)) > 1 else ()
    return ("leaf", "array", *mesh, "spec", "blocks", "copies", "/device")


def rows(leaves: Sequence[LeafLayout]) -> list[tuple[str, ...]]:
    """Words of the table, a row for each leaf."""
    letters: dict[Devices | None, str] = {d: _letter(i) for i, d in enumerate(meshes_of(leaves))}
    return [_row(leaf, letters) for leaf in leaves]


def _row(leaf: LeafLayout, letters: dict[Devices | None, str]) -> tuple[str, ...]:
    letter = (letters.get(leaf.devices, ""),) if len(letters) > 1 else ()
    array = array_text(leaf.dtype, leaf.shape)
    kept = "" if leaf.memory in (DEVICE, DELETED) else f" in {leaf.memory}"
    if leaf.grid is None:
        return leaf.path, array, *letter, _placeless(leaf), "", "", ""
    blocks, copies = str(leaf.num_shards), str(leaf.replication)
    per_device = "?" if leaf.bytes_per_device is None else bytes_text(leaf.bytes_per_device)
    return leaf.path, array, *letter, leaf.label + kept, blocks, copies, per_device


def _placeless(leaf: LeafLayout) -> str:
    """Label what no device holds; on the host, with its size."""
    return f"host, {bytes_text(leaf.num_bytes or 0)}" if leaf.memory == HOST else leaf.label


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def totals_lines(totals: Totals) -> list[str]:
    """Say what all leaves take on a device, and on the host."""
    lines = [f"total on {text}" for text in _by_level(totals)]
    if totals.on_host:
        lines.append(f"total on the host: {bytes_text(totals.on_host)}")
    if totals.num_unknown:
        lines.append(f"not counted: {totals.num_unknown} without a known place or size")
    return lines


def _by_level(totals: Totals) -> list[str]:
    """Gather the devices that hold as much."""
    levels: dict[tuple[str, str], list[int]] = {}
    for (kind, number), count in totals.by_device.items():
        levels.setdefault((kind, bytes_text(count)), []).append(number)
    together = bytes_text(sum(totals.by_device.values()))
    if len(levels) > MAX_LEVELS:
        low, high = min(totals.by_device.values()), totals.per_device
        return [f"a device: {bytes_text(low)} to {bytes_text(high)}, together {together}"]
    lines = [_level(kind, numbers, size) for (kind, size), numbers in levels.items()]
    return [*lines, f"all of them: {together}"] if len(totals.by_device) > 1 else lines


def _level(kind: str, numbers: list[int], size: str) -> str:
    what = f"{kind} device" if kind != ABSTRACT else "device"
    return f"{'each ' if len(numbers) > 1 else ''}{what} {number_ranges(numbers)}: {size}"


def notes(leaves: Sequence[LeafLayout]) -> list[str]:
    """Write the remarks on all leaves, those that share one together."""
    paths: dict[str, list[str]] = {}
    for leaf in leaves:
        for note in leaf.notes:
            paths.setdefault(note, []).append(leaf.path)
    return [f"{several(names, 4)}: {note}" for note, names in paths.items()]
