"""The report of a program's communication, drawn for a terminal."""

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from gspmd_mcmc.errors import bytes_text

if TYPE_CHECKING:
    from gspmd_mcmc.views.program.hlo import Loop
    from gspmd_mcmc.views.program.report import Collective, Communication

LONG_SHAPE = 60  # characters; longer ones are cut
_MEMORY = (
    ("arguments", "argument_bytes"),
    ("outputs", "output_bytes"),
    ("temporaries", "temporary_bytes"),
    ("constants", "constant_bytes"),
    ("total, at most", "peak_bytes"),
)


def draw_report(report: "Communication") -> Group:
    """Draw the collectives below their loops, their totals, memory, and what is whole on all."""
    memory = Table(title="bytes on a device", title_justify="left", show_header=False, box=None)
    memory.add_column(justify="left")
    memory.add_column(justify="right")
    for name, attribute in _MEMORY:
        memory.add_row(name, bytes_text(getattr(report, attribute)))
    drawn = [_collectives(report), *_totals(report), memory]
    if report.whole:
        drawn.append(Text(f"whole on each of {report.num_devices} devices:", style="bold"))
        drawn += [Text(f"  {text}") for text in report.whole]
    if report.unknown:
        drawn.append(Text("lines of unknown form, which may send something:", style="bold"))
        drawn += [Text(f"  {line[:200]}") for line in report.unknown]
    return Group(*drawn)


def plain(drawing: Any) -> str:
    """Write what rich can draw as plain text of at most 100 columns."""
    console = Console(file=io.StringIO(), width=100, color_system=None, legacy_windows=False)
    console.print(drawing)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def _collectives(report: "Communication") -> Tree:
    over = " x ".join(f"{name}={n}" for name, n in report.mesh.items()) or "no mesh"
    tree = Tree(Text(f"{report.num_devices} devices, {over}", style="bold"))
    branches: dict[tuple[Loop, ...], Tree] = {(): tree}
    for collective in report.collectives:
        _branch(branches, collective.loops).add(_leaf(collective))
    if not report.collectives:
        tree.add("no collective")
    return tree


def _branch(branches: "dict[tuple[Loop, ...], Tree]", loops: "tuple[Loop, ...]") -> Tree:
    """Find or make the branch of nested loops."""
    if loops not in branches:
        loop = loops[-1]
        trips = "? times" if loop.trips is None else f"{loop.trips} times"
        source = (f"\n{loop.source}" if loop.source else "", "dim")
        label = Text.assemble((f"loop {loop.name}", "bold"), f", {trips}", source)
        branches[loops] = _branch(branches, loops[:-1]).add(label)
    return branches[loops]


def _leaf(collective: "Collective") -> Text:
    sources = dict.fromkeys((collective.source, collective.library_source))
    shapes = [
        x if len(x) <= LONG_SHAPE else f"{x[:LONG_SHAPE]}… ({x.count('[')} arrays)"
        for x in dict.fromkeys((collective.operand_shape, collective.shape))  # one where they are equal
        if x
    ]
    return Text.assemble(
        (collective.kind, "bold"),
        f" {' -> '.join(shapes)} {bytes_text(collective.num_bytes)} over {collective.where}",
        *((f"\n{source}", "dim") for source in sources if source),
    )


def _totals(report: "Communication") -> list[Table]:
    """Count the collectives of an iteration of each loop and of the call; nothing without any."""
    if not report.collectives:
        return []
    table = Table(title="collectives in total", title_justify="left", show_header=False, box=None)
    for name in dict.fromkeys(loop.name for loop in report.loops):
        table.add_row(f"one {name}", _total(report, name))
    table.add_row("the whole call", _total(report, None))
    return [table]


def _total(report: "Communication", within: str | None) -> str:
    try:
        traffic = report.traffic(within)
    except ValueError:  # a loop's trip count is not known
        return "unknown: give trip counts by report.with_trips(...)"
    runs: Counter[str] = Counter()
    for sent in traffic:
        runs[sent.kind] += sent.runs
    counted = ", ".join(f"{number:,} {kind}" for kind, number in runs.items())
    return f"{counted}, {bytes_text(report.sent_bytes(within))}"
