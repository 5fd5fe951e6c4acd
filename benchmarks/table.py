"""The terminal's view of a measurement."""

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = (
    "contender",
    "gradients/s",
    "(min-max)",
    "ours/this",
    "(min-max)",
    "of roofline",
    "accept",
    "trace+compile s",
    "temp MB/dev",
    "args MB/dev",
    "peak RSS MB",
    "all-reduce",
    "all-gather",
)


def show(console: Console, title: str, records: list[dict]) -> None:
    """Print one configuration, best first; failures last, with their errors."""
    table = Table(*COLUMNS, title=title, box=box.SIMPLE, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for record in sorted(records, key=lambda r: -_median(r)):
        table.add_row(*_cells(record))
        for key in ("read_float32_per_s", "read_uint8_per_s"):
            if key in record:
                name = f"  one {key.removesuffix('_per_s').replace('_', ' of ')}"
                table.add_row(name, *_rate(record[key]))
    console.print(table)
    for record in records:
        _show_errors(console, record)


def _median(record: dict) -> float:
    return record["gradients_per_s"]["median"] if "gradients_per_s" in record else -1.0


def _cells(record: dict) -> list[str]:
    name = record["contender"] + (" [red]FAILED[/red]" if record["failed"] else "")
    build = record.get("build", {})
    collectives = build.get("collectives")
    rounds = record["rounds"]
    seconds = build["trace_s"] + build["compile_s"] if "compile_s" in build else None
    return [
        name,
        *_rate(record.get("gradients_per_s")),
        *_ratio(record.get("ours_over_this")),
        _number(record.get("share_of_roofline", {}).get("median"), "{:.0%}"),
        _number(rounds[-1].get("acceptance") if rounds else None, "{:.2f}"),
        _number(seconds, "{:.2f}"),
        _megabytes(build.get("temp_bytes")),
        _megabytes(build.get("argument_bytes")),
        _megabytes(record.get("peak_rss_bytes")),
        *(str(collectives.get(k, 0)) if collectives is not None else "" for k in COLUMNS[-2:]),
    ]


def _show_errors(console: Console, record: dict) -> None:
    for error in record["errors"]:
        fate = "failed" if record["failed"] else "was started anew"
        console.print(f"[red]{record['contender']} {fate}:[/red] {escape(error)}")


def _rate(values: dict | None) -> tuple[str, str]:
    if values is None:
        return "", ""
    return f"{values['median']:.1f}", f"{values['min']:.1f}-{values['max']:.1f}"


def _ratio(values: dict | None) -> tuple[str, str]:
    if values is None:
        return "", ""
    return f"{values['median']:.2f}", f"{values['min']:.2f}-{values['max']:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"
