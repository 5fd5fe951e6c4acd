"""Every posterior x kernel x mesh x chains x precision, judged, and the other tests of samplers.

``python -m validation``. Each posterior and precision, and each section of other tests, runs
in a process of its own, two at a time. A row that fails, crashes or takes too long says so and ends
nothing; results are saved as they come, and ``--resume`` continues from them.
"""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import environment, posteriordb
from validation import report, sections
from validation.configuration import MESHES, Configuration
from validation.judge import threshold
from validation.kernels import SETTINGS, Setting
from validation.posteriors import MODELS
from validation.process import ROOT, run_group
from validation.sections import Job

SECTIONS = (*sections.SECTIONS, "posteriors")
TABLE = ROOT / "validation" / "RESULTS.md"
STEPS = {4: (1000, 1000), 64: (500, 200)}  # chains -> warm-up, draws
QUICK_POSTERIORS = (
    "eight_schools-eight_schools_noncentered",
    "kidiq_with_mom_work-kidscore_interaction_z",
    "low_dim_gauss_mix-low_dim_gauss_mix",
)
QUICK_STEPS = {4: (400, 500), 64: (300, 100)}
QUICK_KERNELS = ("default", "SNAPER")
# Float64 is for one comparison of both precisions, not for every kernel and mesh.
DOUBLE_KERNELS, DOUBLE_CHAINS, DOUBLE_MESHES = ("default",), (4,), ("1",)
WITHOUT_DENSE_TOO_SLOW = ("diamonds-diamonds",)
SAME_CALL = (("NUTS", 4),)  # as `default` there
# Kernels of their own; the others are these with another metric or warm-up, and run on one device.
ON_EVERY_MESH = ("default", "NUTS", "HMC", "SNAPER", "MAMS", "MCLMC")
KERNELS = tuple(dict.fromkeys((*SETTINGS, *itertools.chain(*sections.KERNELS.values()))))


@dataclass(frozen=True)
class Selection:
    """What of the posteriors' table is run."""

    posteriors: tuple[str, ...]
    kernels: tuple[str, ...]
    steps: Mapping[int, tuple[int, int]]
    meshes: tuple[str, ...] = tuple(MESHES)
    dtypes: tuple[str, ...] = ("float32", "float64")


class Results:
    """What is known so far: the document, saved whenever a row comes."""

    def __init__(self, document: dict[str, Any], out: Path, table: Path, console: Console):
        self.document = document
        self._out, self._table, self._console = out, table, console
        self._lock = threading.Lock()

    def keep(self, row: Configuration | Job, record: Mapping[str, Any]) -> None:
        """Add a row's record; of a section, all of its tests."""
        commit = {"commit": report.commit_of(self.document["environment"])}
        found = [asdict(row) | commit | test for test in record.get("tests", [record])]
        with self._lock:
            self.document["rows" if isinstance(row, Configuration) else "tests"] += found
            self.save()
            for one in found:
                self._console.print(report.line(one), soft_wrap=True)

    def save(self) -> None:
        """Write the document and its tables."""
        self.document["saved"] = time.strftime("%Y-%m-%dT%H:%M:%S")
        texts = json.dumps(self.document, indent=1), report.markdown(self.document)
        for path, text in zip((self._out, self._table), texts, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.part")
            partial.write_text(text)
            partial.replace(path)


def main(argv: list[str]) -> int:
    """Run the validation; the exit status is 1 if a row does not pass."""
    options = _parse(argv)
    console = Console()
    table = options.table or (options.out.with_suffix(".md") if _is_partial(options) else TABLE)
    data_dir = None if options.data_dir is None else str(options.data_dir.expanduser().resolve())
    selection = _selection(options)
    planned = list(configurations(selection))
    document = _opened(selection.posteriors, len(planned), _earlier(options), data_dir)
    results = Results(document, options.out, table, console)
    rows = [row for row in planned if not _is_done(row, document["rows"])]
    jobs = sections.jobs(options.sections, options.kernels, options.quick)
    jobs = [job for job in jobs if not _is_done(job, document["tests"])]
    task = {"largest_z": document["largest_z"], "data_dir": data_dir}
    _run_all(_by_process(jobs, rows), task, results, options)
    found = document["tests"] + document["rows"]
    console.print(report.summary(found), f"Table: {table}", sep="\n")
    return 1 if any(report.outcome(row) == "fails" for row in found) else 0


def _opened(
    posteriors: tuple[str, ...], num_planned: int, earlier: dict[str, Any], data_dir: str | None
) -> dict[str, Any]:
    """Return the document to add to: with what it had, whose posteriors count as this run's do."""
    had = (row["posterior"] for row in earlier["rows"])
    num_parameters = count_parameters(tuple(dict.fromkeys((*posteriors, *had))), data_dir)
    return {
        "environment": environment.record(),
        "num_parameters": num_parameters,
        "largest_z": threshold(num_parameters) if num_parameters else None,
        "num_planned": max(num_planned, earlier["num_planned"]),
        "rows": earlier["rows"],
        "tests": earlier["tests"],
    }


def _run_all(
    groups: list[list[Configuration] | list[Job]],
    task: Mapping[str, Any],
    results: Results,
    options: argparse.Namespace,
) -> None:
    """Run groups, ``options.processes`` at a time; start no row after the time limit."""
    until = None if options.limit_minutes is None else time.monotonic() + 60 * options.limit_minutes

    def may_start() -> bool:
        return until is None or time.monotonic() < until

    def run(group):
        run_group(group, task, results.keep, lambda row: status.update(str(row)), may_start)

    with Console(stderr=True).status("") as status, ThreadPoolExecutor(options.processes) as pool:
        for done in [pool.submit(run, group) for group in groups]:
            done.result()
    results.save()


def configurations(selection: Selection) -> Iterator[Configuration]:
    """List the rows, those of one posterior and precision after one another."""
    of_process = itertools.product(selection.posteriors, selection.dtypes)
    for posterior, dtype in of_process:
        rest = itertools.product(selection.kernels, selection.steps, selection.meshes)
        for kernel, chains, mesh in rest:
            row = Configuration(posterior, kernel, mesh, chains, dtype, *selection.steps[chains])
            if suits(SETTINGS[kernel], row):
                yield row


def suits(setting: Setting, row: Configuration) -> bool:
    """Say whether a row is part of the table."""
    is_double = row.kernel in DOUBLE_KERNELS and row.chains in DOUBLE_CHAINS
    if row.dtype == "float64" and not (is_double and row.mesh in DOUBLE_MESHES):
        return False
    if row.posterior in WITHOUT_DENSE_TOO_SLOW and not setting.is_dense:
        return False
    if row.mesh != "1" and row.kernel not in ON_EVERY_MESH:
        return False
    return row.chains in setting.chains and (row.kernel, row.chains) not in SAME_CALL


def count_parameters(posteriors: tuple[str, ...], data_dir: str | None) -> int:
    """Return how many parameters the references of all posteriors have; a missing file raises here."""
    return sum(len(posteriordb.load(name, data_dir).draws) for name in posteriors)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m validation", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/validation.json"))
    parser.add_argument("--table", type=Path, help="the Markdown table")
    parser.add_argument(
        "--data-dir", type=Path, help=f"folder with the data (or {posteriordb.DATA_ENV})"
    )
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, help="some of all; posteriors where some are chosen"
    )
    parser.add_argument("--posteriors", nargs="+", choices=MODELS, help="some of the nine")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, help="some of the kernels")
    parser.add_argument("--chains", nargs="+", type=int, choices=STEPS, help="some numbers of chains")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, help="some of the meshes")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "float64"))
    parser.add_argument("--limit-minutes", type=float, help="start no row after so many")
    parser.add_argument("--processes", type=int, default=2, help="how many at a time")
    parser.add_argument("--quick", action="store_true", help="few posteriors and steps, one mesh")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has already")
    options = parser.parse_args(argv)
    # Choosing among the posteriors' rows leaves the other sections out.
    options.sections = options.sections or (("posteriors",) if _are_some(options) else SECTIONS)
    return options


def _selection(options: argparse.Namespace) -> Selection:
    steps = QUICK_STEPS if options.quick else STEPS
    chosen = {n: steps[n] for n in options.chains or steps if n in steps}
    usual = QUICK_POSTERIORS if options.quick else tuple(MODELS)
    posteriors = options.posteriors or usual if "posteriors" in options.sections else ()
    kernels = options.kernels or (QUICK_KERNELS if options.quick else SETTINGS)
    return Selection(
        posteriors=tuple(posteriors),
        kernels=tuple(name for name in kernels if name in SETTINGS),
        steps=chosen,
        meshes=tuple(options.meshes or (("2x4",) if options.quick else MESHES)),
        dtypes=tuple(options.dtypes or (("float32",) if options.quick else ("float32", "float64"))),
    )


def _are_some(options: argparse.Namespace) -> bool:
    """Say whether some of the posteriors' rows are chosen, other than by kernel."""
    return any((options.posteriors, options.chains, options.meshes, options.dtypes))


def _is_partial(options: argparse.Namespace) -> bool:
    is_chosen = _are_some(options) or options.kernels or set(options.sections) < set(SECTIONS)
    return bool(options.quick or is_chosen)


def _by_process(jobs: list[Job], rows: list[Configuration]) -> list[list[Configuration] | list[Job]]:
    """Put a section's jobs in one group, and rows of one posterior and precision."""
    of_jobs = [list(group) for _, group in itertools.groupby(jobs, key=lambda job: job.section)]
    of_rows = itertools.groupby(rows, key=lambda row: (row.posterior, row.dtype))
    return [*of_jobs, *(list(group) for _, group in of_rows)]


def _is_done(row: Configuration | Job, results: list[dict[str, Any]]) -> bool:
    return any(asdict(row).items() <= record.items() for record in results)


def _earlier(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a run continues from: the plan's length, the rows and tests with a result."""
    is_there = options.resume and options.out.exists()
    document = json.loads(options.out.read_text()) if is_there else {}
    found: dict[str, Any] = {"num_planned": document.get("num_planned", 0)}
    for kind in ("rows", "tests"):
        rows = document.get(kind, [])
        found[kind] = [row for row in rows if not {"error", "not_run"} & row.keys()]
    return found
