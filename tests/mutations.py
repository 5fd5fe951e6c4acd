"""Deliberate mutations of the package, each with the tests that are to fail.

``python -m tests.mutations`` breaks one line at a time in a copy of the package, runs the tests that
are named for it, and prints a table: the first test that failed, or SURVIVED. First of all the same
tests run on the package as it is: one that fails there catches nothing. ``--only WORD ...`` takes the
mutations whose name, function or tests hold one of the words.

They stand in mutations.txt. A mutation names a function, not a file, so that a move of a module
changes nothing there; one whose function or text is found in no place, or in several, is NOT FOUND.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """One fault.

    ``function`` is its name in its module, with the class's before it, and ``old`` a part of its text
    that stands there once; ``tests`` are files of this folder without ``test_`` and ``.py``, each
    perhaps with a pytest expression in parentheses.
    """

    name: str
    function: str
    old: str
    new: str
    tests: str


def read(text: str) -> list[Mutation]:
    """Read mutations.txt: ``name | function | tests``, then lines that go and lines that come."""
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


def places(package: Path, mutation: Mutation) -> list[tuple[Path, int, int]]:
    """Find where its text stands in functions of its name: file, first and last character."""
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
                found += [(path, begin + m.start(), begin + m.end()) for m in hits]
    return found


def pytest(folder: Path, tests: str) -> tuple[list[str], str]:
    """Run tests in a copy of the project up to the first that fails; return it, and all output."""
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    failed, output = [], ""
    for file, words in re.findall(r"(\w+)(?:\(([^)]*)\))?", tests):
        path = folder / "tests" / f"test_{file}.py"
        if not path.exists():
            output += f"{path.name} is not there\n"
            continue
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-rfE",
            "--no-header",
            "-p",
            "no:cacheprovider",
        ]
        command += [str(path), *(["-k", words] if words else [])]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        output += done.stdout + done.stderr
        failed += re.findall(r"^(?:FAILED|ERROR) tests/test_(\S+)", done.stdout, re.MULTILINE)
        if done.returncode and not failed:
            failed.append(f"{file}: pytest ended with {done.returncode}")
        if failed:
            break
    return failed, output


def copy_of_project(folder: Path) -> None:
    """Copy what tests import; link what they only read."""
    for name in ("gspmd_mcmc", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if not (folder / path.name).exists() and path.name not in (".git", "out"):
            (folder / path.name).symlink_to(path)


def result(folder: Path, mutation: Mutation) -> str:
    """Apply a mutation to the copy, run its tests, and take it back."""
    found = places(folder / "gspmd_mcmc", mutation)
    if len(found) != 1:
        return f"NOT FOUND: {len(found)} places"
    path, begin, end = found[0]
    text = path.read_text()
    path.write_text(text[:begin] + mutation.new + text[end:])
    try:
        failed, _ = pytest(folder, mutation.tests)
    finally:
        path.write_text(text)
    return failed[0] if failed else "SURVIVED"


def main() -> int:
    """Print the table; return how many mutations were not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="words, of which one is enough")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests unbroken first")
    options = parser.parse_args()
    said = [(m, f"{m.name} {m.function} {m.tests}") for m in MUTATIONS]
    chosen = [m for m, text in said if any(word in text for word in options.only)]
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_of_project(folder)
        if not options.no_control:
            for tests in dict.fromkeys(m.tests for m in chosen):
                failed, output = pytest(folder, tests)
                if failed:
                    print(output)
                    sys.exit(f"{failed[0]} fails without a mutation")
        print(
            "| mutation | function | caught by | seconds |", "|---|---|---|---|", sep="\n", flush=True
        )
        for mutation in chosen:
            began = time.monotonic()
            caught = result(folder, mutation)
            missed += caught.startswith(("SURVIVED", "NOT FOUND"))
            seconds = time.monotonic() - began
            print(f"| {mutation.name} | {mutation.function} | {caught} | {seconds:.0f} |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are caught", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
