"""The benchmark `ess` in tables: for the terminal, and in Markdown."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.ess_models.model import Model

Record = Mapping[str, Any]
MOST_REASON = 120  # characters
HEAD = (
    *("contender", "chains × (warm-up + draws)", "R-hat", "min ESS/s", "median ESS/s"),
    *("min ESS/1000 grad", "median ESS/1000 grad", "lock-step", "ms/leapfrog", "warm-up s", "draws s"),
    *("compile s", "largest z", "ours/this"),
)
LEGEND = (
    "ESS: bulk, min and median over latents, after warm-up (with warm-up). No ESS for an R-hat above "
    "1.05; * for one above 1.01. grad: gradients that chains took; lock-step: those that were "
    "evaluated, as multiples. ms/leapfrog: of all chains at once. compile: tracing and XLA, in no "
    "other figure. largest z: of means, to the first contender's. ours/this: min ESS/s after warm-up "
    "(with warm-up), of the best of ours that converged."
)


def show(console: Console, model: Model, records: Sequence[Record]) -> None:
    """Print what there is of one model."""
    table = Table(*HEAD, title=model.about, box=box.SIMPLE, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for cells in rows(records):
        table.add_row(*cells)
    console.print(table)
    for record in records:
        if "error" in record:
            console.print(f"[red]{record['contender']} failed:[/red] {escape(record['error'])}")


def markdown(records: Sequence[Record], models: Mapping[str, Model]) -> str:
    """Return a table for each model."""
    parts = []
    for name in dict.fromkeys(record["model"] for record in records):
        parts += [
            f"{models[name].about}:",
            "",
            f"| {' | '.join(HEAD)} |",
            f"|{'---|' * len(HEAD)}",
            *(f"| {' | '.join(cells)} |" for cells in rows([r for r in records if r["model"] == name])),
            "",
        ]
    return "\n".join(parts)


def rows(records: Sequence[Record]) -> list[list[str]]:
    """Return a row of cells for each contender: medians over rounds; of R-hat and z the worst."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record["contender"], []).append(record)
    return [_cells(own, _best_of_ours(records)) for own in by_name.values()]


def _best_of_ours(records: Sequence[Record]) -> dict[tuple[int, str], float]:
    """Return, for each round, the best min ESS/s of ours without and with warm-up."""
    best: dict[tuple[int, str], float] = {}
    for record in records:
        if record["contender"].startswith("ours") and "ess" in record:
            for key in ("per_s", "per_s_all"):
                place = record["round"], key
                best[place] = max(best.get(place, 0.0), record["ess"]["least"][key])
    return best


def _cells(own: Sequence[Record], best: Mapping[tuple[int, str], float]) -> list[str]:
    first = own[0]
    name = first["contender"]
    budget = f"{first['chains']} × ({first['num_warmup']} + {first['num_samples']})"
    done = [record for record in own if "error" not in record]
    if not done:
        return [name, budget, f"failed: {_reason(own)}", *[""] * (len(HEAD) - 3)]
    ratio = max(record["rhat"] for record in done)
    mark = "*" if any(record["verdict"] == "doubtful" for record in done) else ""
    has_ess = all("ess" in record for record in done)
    return [
        name,
        budget,
        f"{ratio:.3f}{mark}",
        *(_rate(done, has_ess, which, "per_s") for which in ("least", "median")),
        *(_rate(done, has_ess, which, "per_1000") for which in ("least", "median")),
        f"{_median(done, lambda r: r['sampling']['evaluated'] / r['sampling']['leapfrogs']):.2f}",
        f"{_median(done, _milliseconds):.3g}",
        f"{_median(done, lambda r: r['warmup']['seconds']):.3g}",
        f"{_median(done, lambda r: r['sampling']['seconds']):.3g}",
        f"{done[0]['warmup']['compile_s'] + done[0]['sampling']['compile_s']:.1f}",
        f"{max(r['largest_z'] for r in done):.1f}" if all("largest_z" in r for r in done) else "",
        _ratio(done, has_ess, best),
    ]


def _reason(records: Sequence[Record]) -> str:
    """Return the last line of the first error: what was raised, or how a process ended."""
    lines = str(next(r["error"] for r in records if "error" in r)).strip().splitlines() or ["no words"]
    last = lines[-1].strip().replace("|", "/")
    return last if len(last) <= MOST_REASON else f"{last[: MOST_REASON - 1]}…"


def _median(records: Sequence[Record], of: Callable[[Record], float]) -> float:
    return median(of(record) for record in records)


def _milliseconds(record: Record) -> float:
    """Time of a leapfrog of all chains at once; where none waits for another, of the mean chain's."""
    sampling = record["sampling"]
    return 1000 * sampling["seconds"] / (sampling["evaluated"] / record["chains"])


def _rate(records: Sequence[Record], has_ess: bool, which: str, key: str) -> str:
    if not has_ess:
        return "–"
    alone, together = (_median(records, lambda r, k=k: r["ess"][which][k]) for k in (key, f"{key}_all"))
    return f"{alone:.3g} ({together:.3g})"


def _ratio(records: Sequence[Record], has_ess: bool, best: Mapping) -> str:
    """Ratios are taken within a round."""
    if not has_ess or records[0]["contender"].startswith("ours") or not best:
        return ""
    alone, together = (
        _median(
            [r for r in records if (r["round"], key) in best],
            lambda r, key=key: best[r["round"], key] / r["ess"]["least"][key],
        )
        for key in ("per_s", "per_s_all")
    )
    return f"{alone:.2f} ({together:.2f})"
