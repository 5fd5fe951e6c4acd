"""How far the suite's statistical tests end from their bounds, over many seeds.

``python -m tests.margins --seeds 30 -- tests/test_chees.py`` runs the tests marked ``statistical`` of
these files once a seed, each time in a process of its own that finds the programs of those before in a
cache, and prints a line for each bound: the worst statistic and its share of the bound; the mean and
standard deviation over seeds, and how many of these the bound is from the mean. A bound that is always
missed is that of a test whose broken twin is to be rejected: there the least statistic counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np


def run_seed(seed: int, arguments: list[str], folder: Path) -> tuple[list[dict], str]:
    """Return what `tests.seeds.within` noted, and what pytest said of tests that failed."""
    notes = folder / f"{seed}.jsonl"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment = os.environ | cache | {"TEST_SEED": str(seed), "TEST_MARGINS": str(notes)}
    command = [sys.executable, "-m", "pytest", "-m", "statistical", "--durations=0", "-rf", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines = notes.read_text().splitlines() if notes.exists() else []
    return [json.loads(line) | {"seed": seed} for line in lines], "\n".join(failures)


def rows(notes: list[dict]) -> list[str]:
    """Return a row of a Markdown table for each bound; those with the least margin first."""
    bounds = defaultdict(list)
    for note in notes:
        bounds[note["test"], note["what"]].append(note)
    table = []
    for (test, what), found in bounds.items():
        # Of a sampler that has run away, NaN: it is rejected.
        statistics = np.nan_to_num([note["statistic"] for note in found], nan=np.inf)
        limits = np.array([note["bound"] for note in found])
        shares = statistics / limits
        is_twin = np.median(shares) >= 1
        share = np.min(shares) if is_twin else np.max(shares)
        with np.errstate(all="ignore"):
            mean, sd, bound = np.mean(statistics), np.std(statistics), np.median(limits)
            sds = abs(bound - mean) / sd
        kind = "rejected" if is_twin else "holds"
        numbers = f"{mean:.3g} | {sd:.2g} | {share:.2f} | {sds:.1f}"
        row = f"| {test} | {what} | {kind} | {bound:.3g} | {len(found)} | {numbers} |"
        table.append((-1 / share if is_twin else -share, row))
    return [row for _, row in sorted(table)]


def main() -> None:
    """Run the seeds, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.margins", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="how many")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("pytest", nargs="*", help="files, tests and options for pytest")
    options = parser.parse_args()
    notes = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.seeds):
            found, failures = run_seed(seed, options.pytest, Path(folder))
            notes += found
            print(f"seed {seed}: {len(found)} bounds\n{failures}".strip(), file=sys.stderr, flush=True)
    print("| test | statistic | kind | bound | seeds | mean | sd | worst/bound | sds to the bound |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(*rows(notes), sep="\n")


if __name__ == "__main__":
    main()
