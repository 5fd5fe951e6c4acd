"""The records of one configuration: rates with their spread, ratios round by round, a table."""

from statistics import median

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = (
    "ours/this (min-max)",
    "of roofline",
    "accept",
    "compile s",
    "temp MB",
    "args MB",
    "peak MB",
    "collectives",
)
READS = {"read_float32_per_s": "- read as float32", "read_uint8_per_s": "- read as uint8"}


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the least and the greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarize(records: list[dict], ours: str = "ours", floor: str = "roofline") -> None:
    """Add rates, ratios to ours and shares of the floor to the records of one configuration."""
    rates = {record["contender"]: _rates(record) for record in records}
    for record in records:
        own = rates[record["contender"]]
        if not own:
            continue
        record["per_s"] = spread(list(own.values()))
        for key in record["rounds"][0].get("extra", {}):
            record[key] = spread([entry["extra"][key] for entry in record["rounds"]])
        if record["contender"] != ours:
            _add(record, "ours_over_this", _ratios(rates.get(ours, {}), own))
        if record["contender"] != floor:
            _add(record, "share_of_roofline", _ratios(own, rates.get(floor, {})))


def _rates(record: dict) -> dict[int, float]:
    return {entry["round"]: entry["per_s"] for entry in record["rounds"]}


def _ratios(above: dict[int, float], below: dict[int, float]) -> list[float]:
    return [above[number] / below[number] for number in sorted(above.keys() & below.keys())]


def _add(record: dict, name: str, ratios: list[float]) -> None:
    if ratios:
        record[name] = spread(ratios)


def show(console: Console, title: str, unit: str, records: list[dict]) -> None:
    """Print one configuration, best first; failures last, with their errors."""
    columns = ("contender", f"{unit}/s (min-max)", *COLUMNS)
    table = Table(*columns, title=title, box=box.SIMPLE, title_justify="left")
    table.columns[0].min_width = 17
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for record in sorted(records, key=lambda r: -_median(r)):
        table.add_row(*_cells(record))
        for key, label in READS.items():
            if key in record:
                table.add_row(label, _spread_text(record[key], ".1f"))
    console.print(table)
    for record in records:
        _show_errors(console, record)


def legend(console: Console, rates: str) -> None:
    """Say what the columns mean; ``rates`` says it of the rates and of the floor."""
    console.print(
        f"{rates} compile: tracing and XLA. temp, args: the program's bytes on one device. peak: "
        "resident set of the process. collectives: in the program (in its loops)."
    )


def _median(record: dict) -> float:
    return record["per_s"]["median"] if "per_s" in record else -1.0


def _cells(record: dict) -> list[str]:
    build, rounds = record.get("build", {}), record["rounds"]
    seconds = build["trace_s"] + build["compile_s"] if "compile_s" in build else None
    return [
        record["contender"] + (" [red]FAILED[/red]" if record["failed"] else ""),
        _spread_text(record.get("per_s"), ".1f"),
        _spread_text(record.get("ours_over_this"), ".2f"),
        _number(record.get("share_of_roofline", {}).get("median"), ".0%"),
        _number(rounds[-1].get("acceptance") if rounds else None, ".2f"),
        _number(seconds, ".2f"),
        _megabytes(build.get("temp_bytes")),
        _megabytes(build.get("argument_bytes")),
        _megabytes(record.get("peak_rss_bytes")),
        _collectives(build),
    ]


def _collectives(build: dict) -> str:
    in_loops = build.get("collectives_in_loops", {})
    counts = build.get("collectives", {}).items()
    return " ".join(f"{count} ({in_loops.get(kind, 0)}) {kind}" for kind, count in counts)


def _show_errors(console: Console, record: dict) -> None:
    for error in record["errors"]:
        fate = "failed" if record["failed"] else "was started anew"
        console.print(f"[red]{record['contender']} {fate}:[/red] {escape(error)}")


def _spread_text(values: dict | None, form: str) -> str:
    if values is None:
        return ""
    median, least, most = (format(values[key], form) for key in ("median", "min", "max"))
    return f"{median} ({least}-{most})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _megabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e6:.1f}"
