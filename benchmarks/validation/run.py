"""Every posterior x kernel x mesh x chains x precision, judged: ``python -m benchmarks validate``.

Each posterior and precision runs in a process of its own. A row that fails, crashes or takes too long
says so and ends nothing; results are saved as they come, and ``--resume`` goes on from them.
"""

import argparse
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import environment
from benchmarks.validation import posteriordb, report
from benchmarks.validation.configuration import MESHES, Configuration
from benchmarks.validation.judge import threshold
from benchmarks.validation.kernels import SETTINGS, Setting
from benchmarks.validation.posteriors import MODELS

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "VALIDATION.md"
TIMEOUT_S = 900.0
STEPS = {4: (1000, 1000), 64: (500, 200)}  # chains -> warm-up, draws
QUICK_POSTERIORS = (
    "eight_schools-eight_schools_noncentered",
    "kidiq_with_mom_work-kidscore_interaction_z",
    "low_dim_gauss_mix-low_dim_gauss_mix",
)
QUICK_STEPS = {4: (400, 500)}
QUICK_KERNELS = ("default", "NUTS")
# Float64 is for one comparison of both precisions, not for every kernel.
DOUBLE_KERNELS, DOUBLE_CHAINS = ("NUTS",), (4,)
WITHOUT_DENSE_TOO_SLOW = ("diamonds-diamonds",)


@dataclass(frozen=True)
class Selection:
    """What of the whole table is run."""

    posteriors: tuple[str, ...]
    kernels: tuple[str, ...]
    steps: Mapping[int, tuple[int, int]]
    meshes: tuple[str, ...] = tuple(MESHES)
    dtypes: tuple[str, ...] = ("float32", "float64")


def main(argv: list[str]) -> int:
    """Run the validation; the exit status is 1 if a row does not pass."""
    options = _parse(argv)
    console = Console()
    selection = _selection(options)
    results = _earlier(options.out) if options.resume else []
    table = options.table or (options.out.with_suffix(".md") if _is_partial(options) else TABLE)
    data_dir = None if options.data_dir is None else str(options.data_dir.expanduser().resolve())
    num_parameters = count_parameters(selection.posteriors, data_dir)
    document = {
        "environment": environment.record(),
        "num_parameters": num_parameters,
        "largest_z": threshold(num_parameters),
        "rows": results,
    }
    todo = [row for row in configurations(selection) if not _is_done(row, results)]
    _run_all(todo, document, data_dir, lambda: _save(options.out, document, table), console)
    console.print(report.summary(results), f"Table: {table}", sep="\n")
    return 1 if any(report.outcome(row) == "fails" for row in results) else 0


def _run_all(
    todo: list[Configuration],
    document: dict[str, Any],
    data_dir: str | None,
    save: Callable[[], None],
    console: Console,
) -> None:
    """Run rows, add their records to the document and save it after each."""

    def keep(row: Configuration, record: Mapping[str, Any]) -> None:
        document["rows"].append({**asdict(row), **record})
        save()
        console.print(report.line(document["rows"][-1]), soft_wrap=True)

    groups = _by_process(todo)
    task = {"largest_z": document["largest_z"], "data_dir": data_dir}
    with console.status("") as status:
        for number, group in enumerate(groups):
            which = f"posterior and precision {number + 1} of {len(groups)}"
            run_group(group, task, keep, lambda row, which=which: status.update(f"{which}: {row}"))
    save()


def configurations(selection: Selection) -> Iterator[Configuration]:
    """List the rows, those of one posterior and precision after one another."""
    of_process = itertools.product(selection.posteriors, selection.dtypes)
    for posterior, dtype in of_process:
        rest = itertools.product(selection.kernels, selection.steps, selection.meshes)
        for kernel, chains, mesh in rest:
            if suits(SETTINGS[kernel], kernel, posterior, chains, dtype):
                yield Configuration(posterior, kernel, mesh, chains, dtype, *selection.steps[chains])


def suits(setting: Setting, kernel: str, posterior: str, chains: int, dtype: str) -> bool:
    """Tell whether a row is part of the table."""
    if dtype == "float64" and not (kernel in DOUBLE_KERNELS and chains in DOUBLE_CHAINS):
        return False
    if posterior in WITHOUT_DENSE_TOO_SLOW and not setting.is_dense:
        return False
    return chains in setting.chains


def count_parameters(posteriors: tuple[str, ...], data_dir: str | None) -> int:
    """Return how many parameters the references of all posteriors have; a missing file raises here."""
    return sum(len(posteriordb.load(name, data_dir).draws) for name in posteriors)


def run_group(
    rows: list[Configuration],
    task: Mapping[str, Any],
    keep: Callable[[Configuration, Mapping[str, Any]], None],
    say: Callable[[Configuration], None],
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run rows in a process; where it dies or hangs a row is kept as failed, and a new one goes on."""
    while rows:
        process = Process(rows, task)
        try:
            while rows:
                say(rows[0])
                keep(rows[0], process.next_record(timeout_s))
                rows = rows[1:]
        except ProcessEnded as error:
            keep(rows[0], {"error": str(error)})
            rows = rows[1:]
        finally:
            process.close()


class ProcessEnded(RuntimeError):
    """The process died, or did not answer in time."""


class Process:
    """A worker, its records one line of JSON each."""

    def __init__(self, rows: list[Configuration], task: Mapping[str, Any]):
        request = json.dumps({**task, "configurations": [asdict(row) for row in rows]})
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.validation.worker", request],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def next_record(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next record."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ProcessEnded(f"no result in {timeout_s:.0f} s") from None
        if line is None:
            raise ProcessEnded(self._last_words())
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._words.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        code = self._process.wait()
        self._words.seek(0)
        lines = [line.strip() for line in self._words if line.strip()]
        return f"died (exit {code}): {' | '.join(lines[-2:])[:400]}"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks validate", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/validation.json"))
    parser.add_argument("--table", type=Path, help="the Markdown table")
    parser.add_argument(
        "--data-dir", type=Path, help=f"folder with the data (or {posteriordb.DATA_ENV})"
    )
    parser.add_argument("--posteriors", nargs="+", choices=MODELS, help="some of the nine")
    parser.add_argument("--kernels", nargs="+", choices=SETTINGS, help="some of the kernels")
    parser.add_argument("--chains", nargs="+", type=int, choices=STEPS, help="some numbers of chains")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, help="some of the meshes")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "float64"))
    parser.add_argument("--quick", action="store_true", help="few posteriors and steps, one mesh")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has already")
    return parser.parse_args(argv)


def _selection(options: argparse.Namespace) -> Selection:
    steps = QUICK_STEPS if options.quick else STEPS
    chosen = {n: steps[n] for n in options.chains or steps if n in steps}
    return Selection(
        posteriors=tuple(options.posteriors or (QUICK_POSTERIORS if options.quick else MODELS)),
        kernels=tuple(options.kernels or (QUICK_KERNELS if options.quick else SETTINGS)),
        steps=chosen,
        meshes=tuple(options.meshes or (("2x4",) if options.quick else MESHES)),
        dtypes=tuple(options.dtypes or (("float32",) if options.quick else ("float32", "float64"))),
    )


def _is_partial(options: argparse.Namespace) -> bool:
    chosen = (options.posteriors, options.kernels, options.chains, options.meshes, options.dtypes)
    return options.quick or any(chosen)


def _by_process(rows: list[Configuration]) -> list[list[Configuration]]:
    def of(row):
        return row.posterior, row.dtype

    return [list(group) for _, group in itertools.groupby(rows, key=of)]


def _is_done(row: Configuration, results: list[dict[str, Any]]) -> bool:
    return any(asdict(row).items() <= record.items() for record in results)


def _earlier(out: Path) -> list[dict[str, Any]]:
    if not out.exists():
        return []
    rows = json.loads(out.read_text())["rows"]
    return [row for row in rows if "error" not in row and "missing" not in row]


def _save(out: Path, document: dict[str, Any], table: Path) -> None:
    document["saved"] = time.strftime("%Y-%m-%dT%H:%M:%S")
    for path, text in ((out, json.dumps(document, indent=1)), (table, report.markdown(document))):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")
        partial.write_text(text)
        partial.replace(path)
