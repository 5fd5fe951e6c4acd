"""The validation in words: a line a row for the terminal, a table in Markdown for the repository."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape

Row = Mapping[str, Any]
HEAD = (
    *("kernel", "mesh", "chains", "precision", "outcome", "worst abs z", "of", "R-hat", "least ESS"),
    *("divergences", "leapfrogs", "warm-up", "seconds"),
)
OUTCOMES = ("passes", "fails", "not run")
TITLES = {
    "sbc": "Simulation-based calibration",
    "geweke": "Geweke's joint distribution test",
    "shapes": "Hard shapes",
    "adversarial": "Adversarial targets",
}
OF_A_RUN = ("kernel", "mesh", "chains", "dtype")


def outcome(row: Row) -> str:
    """Say "passes", "fails", or "not run" of a row that the time limit left out."""
    if "not_run" in row:
        return "not run"
    return "passes" if row.get("failures") == [] or row.get("passed") else "fails"


def line(row: Row) -> str:
    """Return a line for one row, with rich's markup."""
    colour = {"passes": "green", "fails": "red"}.get(outcome(row), "yellow")
    text = escape(f"{_name(row)}: {_figures(row)}")
    return f"[{colour}]{outcome(row)}[/{colour}] {text}"


def summary(rows: Sequence[Row]) -> str:
    """Count outcomes."""
    found = [outcome(row) for row in rows]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in OUTCOMES)


def markdown(document: Mapping[str, Any]) -> str:
    """Write the whole document: what was held against what, a table a posterior, totals, failures."""
    rows, tests = document["rows"], document["tests"]
    parts = [
        _opening(document),
        *_failures([*tests, *rows]),
        *_by_section(tests),
        _totals(rows),
        *_by_posterior(rows),
        _precisions(rows),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _opening(document: Mapping[str, Any]) -> str:
    where = document["environment"]
    return f"""# Validation

Written by `python -m validation`. Draws of posteriors of posteriordb against its reference,
kernels by simulation-based calibration and by Geweke's test, and shapes of known law.
{_of_posteriors(document)}
{where["cpu"]}, {where["cores"]} cores, Python {where["python"]}, {_commits(document)},
saved {document["saved"]}. Seconds hold compilation, and whatever else the machine did.

{summary([*document["tests"], *document["rows"]])}.{_missing(document)}
"""


def _missing(document: Mapping[str, Any]) -> str:
    """Say how many of posteriors' rows are still to be run, if any are."""
    found, planned = len(document["rows"]), document.get("num_planned", 0)
    if found >= planned:
        return ""
    return (
        f"\n\nNot complete: {found} of {planned} rows of posteriors so far; `--resume` runs the rest."
    )


def commit_of(where: Mapping[str, Any]) -> str:
    """Name the commit in the record of an environment."""
    return f"{where['commit'][:12]}{' (modified)' if where['modified'] else ''}"


def _commits(document: Mapping[str, Any]) -> str:
    """Name the commits of the rows: a table that was continued may have several."""
    of_rows = [row.get("commit") for row in (*document["tests"], *document["rows"])]
    counts = {commit: of_rows.count(commit) for commit in dict.fromkeys(of_rows) if commit}
    if len(counts) < 2:
        return f"commit {commit_of(document['environment'])}"
    return "commits " + ", ".join(f"{commit} ({count} rows)" for commit, count in counts.items())


def _of_posteriors(document: Mapping[str, Any]) -> str:
    if not document["rows"]:
        return ""
    largest, number = f"{document['largest_z']:.2f}", document["num_parameters"]
    return f"""
Of posteriors: means of x and of (x - m)² for every parameter, in Monte Carlo standard errors. The
largest |z| is held to {largest}: Bonferroni at 0.001 for both moments of the {number} parameters of all
posteriors, for each kernel, mesh, number of chains and precision. R-hat <= 1.01 for 4 chains; nested
R-hat <= 1.01 (8 superchains) and bulk ESS >= 400 for 64. MCLMC is unadjusted: its z counts what is
beyond a bias of 0.1 sd of a mean, or of 20 % of a variance. `default` of 4 chains is NUTS.
"""


def _by_section(tests: Sequence[Row]) -> list[str]:
    """Write a table for each section of other tests; "rejected" rows are broken samplers."""
    tables = []
    head = ("kernel", "mesh", "chains", "outcome", "what", "value", "bound")
    for section, title in TITLES.items():
        own = [_cells_of_test(test) for test in tests if test["section"] == section]
        if own:
            tables.append(f"## {title}\n\n{_table(head, own)}\n")
    return tables


def _cells_of_test(test: Row) -> tuple[str, ...]:
    if "what" not in test:
        return (test["kernel"], "", "", outcome(test), _figures(test), "", "")
    what = test["what"].replace("|z|", "abs z")  # a bar ends a cell
    own = (test["kernel"], test["mesh"], str(test["chains"]), outcome(test), what)
    return (*own, f"{test['value']:.3g}", f"{test['bound']:.3g}")


def _by_posterior(rows: Sequence[Row]) -> list[str]:
    names = dict.fromkeys(row["posterior"] for row in rows)
    tables = []
    for name in names:
        own = [row for row in rows if row["posterior"] == name]
        tables.append(f"## {name}\n\n{_table(HEAD, [_cells(row) for row in own])}\n")
    return tables


def _cells(row: Row) -> tuple[str, ...]:
    own = (str(row[name]) for name in OF_A_RUN)
    if "worst_z" not in row:
        return (*own, outcome(row), *[""] * (len(HEAD) - len(OF_A_RUN) - 1))
    return (
        *own,
        outcome(row),
        f"{row['worst_z']:.2f}",
        row["worst"],
        f"{row['rhat']:.4f}",
        f"{row['least_ess']:.0f}",
        str(row["divergences"]),
        f"{row['leapfrogs']:,}",
        f"{row['warmup_leapfrogs']:,}",
        f"{row['seconds']:.1f}",
    )


def _figures(row: Row) -> str:
    if "what" in row:
        return f"{row['what']}: {row['value']:.3g}, bound {row['bound']:.3g}"
    if "worst_z" not in row:
        return next(row[kind] for kind in ("not_run", "error") if kind in row)
    text = ", ".join(
        (
            f"|z| {row['worst_z']:.2f} ({row['worst']})",
            f"R-hat {row['rhat']:.4f}",
            f"ESS {row['least_ess']:.0f}",
            f"{row['divergences']} divergent",
            f"{row['leapfrogs']:,} leapfrogs",
            f"{row['seconds']:.1f} s",
        )
    )
    return "; ".join([text, *row["failures"][:3]])


def _name(row: Row) -> str:
    if "section" not in row:
        return f"{row['posterior']}, {_setting(row)}"
    return f"{row['section']}, {row['kernel']}" + (f", mesh {row['mesh']}" if "mesh" in row else "")


def _setting(row: Row) -> str:
    return f"{row['kernel']}, mesh {row['mesh']}, {row['chains']} chains, {row['dtype']}"


def _failures(rows: Sequence[Row]) -> list[str]:
    failed = [row for row in rows if outcome(row) == "fails"]
    if not failed:
        return []
    lines = [f"- {_name(row)}: {'; '.join(row.get('failures') or [_figures(row)])}" for row in failed]
    return ["## What does not pass\n", *lines, ""]


def _totals(rows: Sequence[Row]) -> str:
    """Write one line a kernel, mesh, number of chains and precision: over all posteriors."""

    def key(row):
        return tuple(str(row[name]) for name in OF_A_RUN)

    if not rows:
        return ""
    cells = []
    for own, group in itertools.groupby(sorted(rows, key=key), key=key):
        group = list(group)
        judged = [row for row in group if "worst_z" in row]
        passed = sum(outcome(row) == "passes" for row in group)
        converged = sum(row["rhat"] <= 1.01 for row in judged)
        worst = max((row["worst_z"] for row in judged), default=math.nan)
        largest = max((row["rhat"] for row in judged), default=math.nan)
        of = f"of {len(group)}"
        cells.append((*own, f"{passed} {of}", f"{converged} {of}", f"{worst:.2f}", f"{largest:.4f}"))
    head = (
        "kernel",
        "mesh",
        "chains",
        "precision",
        "pass",
        "R-hat <= 1.01",
        "worst abs z",
        "largest R-hat",
    )
    return f"## By kernel\n\n{_table(head, cells)}\n"


def _precisions(rows: Sequence[Row]) -> str:
    """Compare float32 with float64 directly, in standard errors of both."""
    cells = []
    for name, kernel, mesh, chains, single, double in _pairs(rows):
        z = [_difference(single[p], double[p]) for p in single]
        worst = np.max(np.abs(z))
        cells.append((name, kernel, mesh, str(chains), f"{worst:.2f}"))
    if not cells:
        return ""
    head = ("posterior", "kernel", "mesh", "chains", "worst abs z")
    return f"## Float32 against float64\n\n{_table(head, cells)}\n"


def _pairs(rows: Sequence[Row]):
    def key(row):
        return tuple(row[name] for name in ("posterior", "kernel", "mesh", "chains"))

    judged = [row for row in rows if "moments" in row]
    doubles = {key(row): row["moments"] for row in judged if row["dtype"] == "float64"}
    for row in judged:
        if row["dtype"] == "float32" and key(row) in doubles:
            yield *key(row), row["moments"], doubles[key(row)]


def _difference(one: list[float], other: list[float]) -> tuple[float, float]:
    """Differences of mean and of variance in standard errors of both."""
    return (
        (one[0] - other[0]) / math.hypot(one[1], other[1]),
        (one[2] - other[2]) / math.hypot(one[3], other[3]),
    )


def _table(head: tuple[str, ...], cells: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *cells]
    return "\n".join(f"| {' | '.join(cell)} |" for cell in lines)
