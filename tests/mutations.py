"""Deliberate faults of the package, each with the tests that must fail.

``python -m tests.mutations`` applies the mutations of mutations.txt one at a time to a copy of the
project, runs the tests named for each up to the first failure, and prints a table: the first test that
failed, or SURVIVED. The same tests run first on the unchanged package: a test that fails there is left
out, and a file that cannot be imported there tests nothing.

- ``--check`` only looks mutations up, which takes a second: NOT FOUND is one whose function or text is
  in no place, or in several, and one whose test file does not exist.
- ``--only WORD ...`` takes the mutations whose name, function or tests contain one of the words.
- ``--jobs 2`` runs two at a time, each in a copy of its own.
- ``--out FILE`` keeps each result as a line of JSON. A later run with the same file skips a mutation
  whose entry, module and test files are as they were when it was caught, and prints the whole table.

A mutation names a function, not a file, so that moving a module changes nothing in mutations.txt.
"""

import argparse
import ast
import hashlib
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = re.compile(r"(\w+)(?:\(([^)]*)\))?")
COPIED = ("gspmd_mcmc", "tests", "benchmarks", "validation", "demos")  # the rest is linked
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/test_.*?)(?: - .*)?$", re.MULTILINE)
NO_TESTS = 5  # pytest's exit status
TIMEOUT_S = 900.0
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider")
NOT_CAUGHT = ("SURVIVED", "NOT FOUND", "NOT TESTED", "TIMED OUT")


class Mutation(NamedTuple):
    """One fault.

    ``function`` is its name in its module, after the class's for a method. ``old`` occurs once in its
    text. ``tests`` are files of this folder without ``test_`` and ``.py``, each perhaps followed by an
    expression for ``pytest -k`` in parentheses.
    """

    name: str
    function: str
    old: str
    new: str
    tests: str


class Place(NamedTuple):
    """Where the text of a mutation stands: a file, its first and last character."""

    path: Path
    begin: int
    end: int


def read(text: str) -> list[Mutation]:
    """Read mutations.txt: ``name | function | tests``, then lines removed and lines added."""
    found = []
    for block in text.split("\n\n"):
        head, *lines = block.strip().splitlines()
        if head.startswith("#"):
            continue
        old, new = ("\n".join(x[2:] for x in lines if x.startswith(sign)) for sign in "-+")
        name, function, tests = head.split(" | ")
        found.append(Mutation(name, function, old, new, tests))
    return found


MUTATIONS = read(Path(__file__).with_suffix(".txt").read_text())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Give the name and the node of every function of a module, methods after their class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def places(package: Path, mutation: Mutation) -> list[Place]:
    """Find every place where the text stands in a function of that name."""
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        if mutation.old not in text:
            continue
        starts = [0, *(m.end() for m in re.finditer("\n", text))]
        for name, node in functions(ast.parse(text)):
            if name == mutation.function:
                body = ast.get_source_segment(text, node) or ""
                begin = text.index(body, starts[node.lineno - 1])
                hits = re.finditer(re.escape(mutation.old), body)
                found += [Place(path, begin + m.start(), begin + m.end()) for m in hits]
    return found


def test_files(mutation: Mutation) -> list[Path]:
    """Return the files of its tests."""
    return [ROOT / "tests" / f"test_{file}.py" for file, _ in TESTS.findall(mutation.tests)]


def defect(mutation: Mutation) -> str | None:
    """Say why a mutation cannot be applied or tested; None if it can be."""
    found = places(ROOT / "gspmd_mcmc", mutation)
    if len(found) != 1:
        return f"NOT FOUND: its text is in {len(found)} places"
    missing = [path.name for path in test_files(mutation) if not path.exists()]
    return f"NOT FOUND: {', '.join(missing)}" if missing else None


def fingerprint(mutation: Mutation) -> str:
    """Return a digest of the entry, of the module that it changes and of its test files."""
    texts = [*mutation, *(place.path.read_text() for place in places(ROOT / "gspmd_mcmc", mutation))]
    texts += [path.read_text() for path in test_files(mutation) if path.exists()]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def copy_of_project(folder: Path) -> Path:
    """Copy what tests import, link what they only read, and return the folder."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if not (folder / path.name).exists() and path.name not in (".git", "out"):
            (folder / path.name).symlink_to(path)
    return folder


def pytest(folder: Path, programs: Path, file: str, words: str, *options: str) -> tuple[list[str], str]:
    """Run one test file in a copy of the project; return the tests that failed, and all output.

    Compiled programs are kept in ``programs``: most are the same in the next run.
    """
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",  # a module that changes twice a second needs no stale bytecode
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [*PYTEST, *options, f"tests/test_{file}.py", *(["-k", words] if words else [])]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    failed = FAILED.findall(done.stdout)
    # Where no test is selected, nothing is caught; else pytest itself has failed.
    if done.returncode not in (0, NO_TESTS) and not failed:
        failed = [f"tests/test_{file}.py"]
    return failed, done.stdout + done.stderr


def words_by_file(mutations: Sequence[Mutation]) -> dict[str, str]:
    """Return the files that the mutations name, each with one expression for all tests named."""
    found: dict[str, list[str]] = {}
    for file, words in (pair for mutation in mutations for pair in TESTS.findall(mutation.tests)):
        found.setdefault(file, []).append(words)
    return {
        file: "" if "" in words else " or ".join(f"({each})" for each in dict.fromkeys(words))
        for file, words in found.items()
    }


def control(folder: Path, programs: Path, file: str, words: str) -> list[str]:
    """Run tests on the unchanged package; print and return those that fail."""
    failed, output = pytest(folder, programs, file, words)
    if failed:
        print(output, *(f"{test} fails without a mutation" for test in failed), sep="\n")
    return failed


def caught_by(folder: Path, programs: Path, mutation: Mutation, left_out: Sequence[str]) -> str:
    """Apply a mutation to the copy, run its tests until one fails, and restore the copy.

    Tests ``left_out`` fail without it.
    """
    path, begin, end = places(folder / "gspmd_mcmc", mutation)[0]
    text, caught = path.read_text(), "SURVIVED"
    path.write_text(text[:begin] + mutation.new + text[end:])
    try:
        for file, words in TESTS.findall(mutation.tests):
            if f"tests/test_{file}.py" in left_out:
                caught = f"NOT TESTED: test_{file}.py fails as a whole"
                continue
            options = [f"--deselect={test}" for test in left_out]
            failed, _ = pytest(folder, programs, file, words, "-x", *options)
            if failed:
                return failed[0].removeprefix("tests/test_")
    except subprocess.TimeoutExpired:
        return f"TIMED OUT after {TIMEOUT_S:.0f} s"
    finally:
        path.write_text(text)
    return caught


def known(path: Path | None) -> dict[str, dict]:
    """Return the results that a file holds of mutations that were caught, by fingerprint."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    found = {record["fingerprint"]: record for record in map(json.loads, lines)}
    return {key: one for key, one in found.items() if not one["caught_by"].startswith(NOT_CAUGHT)}


def row(record: dict) -> str:
    """Return the row of a Markdown table."""
    cells = (record[key] for key in ("mutation", "function", "caught_by"))
    return f"| {' | '.join(cells)} | {record['seconds']:.0f} |"


def run(
    mutations: Sequence[Mutation], before: dict[str, dict], jobs: int, no_control: bool
) -> Iterator[dict]:
    """Give a record for each mutation as it comes, first those that need no run; see `known`."""
    left = []
    for mutation in mutations:
        one = {"mutation": mutation.name, "function": mutation.function, "seconds": 0.0}
        one["fingerprint"] = fingerprint(mutation)
        if reason := defect(mutation):
            yield one | {"caught_by": reason}
        elif one["fingerprint"] in before:
            yield before[one["fingerprint"]]
        else:
            left.append((mutation, one))
    if not left:
        return
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        top = Path(name).resolve()
        programs = top / "programs"
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            folders.put(copy_of_project(top / f"copy_{number}"))

        def in_a_copy(function: Callable, *arguments: Any) -> Any:
            folder = folders.get()
            try:
                return function(folder, programs, *arguments)
            finally:
                folders.put(folder)

        def record(mutation: Mutation, one: dict) -> dict:
            began = time.monotonic()
            found = in_a_copy(caught_by, mutation, left_out)
            return one | {"caught_by": found, "seconds": time.monotonic() - began}

        files = {} if no_control else words_by_file([mutation for mutation, _ in left])
        failed = pool.map(lambda pair: in_a_copy(control, *pair), files.items())
        left_out = list(itertools.chain(*failed))
        yield from pool.map(record, *zip(*left, strict=True))


def main() -> int:
    """Print the table; return how many mutations are not caught."""
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="take some of them")
    parser.add_argument("--check", action="store_true", help="look them up; run nothing")
    parser.add_argument("--no-control", action="store_true", help="do not run the unchanged package")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--out", type=Path, help="results, a line of JSON each")
    options = parser.parse_args()
    texts = [(m, f"{m.name} {m.function} {m.tests}") for m in MUTATIONS]
    chosen = [m for m, text in texts if any(word in text for word in options.only)]
    if options.check:
        found = [(m.name, reason) for m in chosen if (reason := defect(m))]
        print(*(f"{name}: {reason}" for name, reason in found), sep="\n", end="\n" if found else "")
        print(f"{len(chosen) - len(found)} of {len(chosen)} mutations can be applied")
        return len(found)
    before, missed = known(options.out), 0
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    print("| mutation | function | caught by | seconds |", "|---|---|---|---|", sep="\n", flush=True)
    for record in run(chosen, before, options.jobs, options.no_control):
        missed += record["caught_by"].startswith(NOT_CAUGHT)
        print(row(record), flush=True)
        if options.out and record["fingerprint"] not in before:
            with options.out.open("a") as lines:
                print(json.dumps(record), file=lines)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are caught", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
