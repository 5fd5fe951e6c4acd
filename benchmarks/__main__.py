"""Run a benchmark by name: ``python -m benchmarks mnist --quick``."""

import importlib
import sys

from gspmd_mcmc.storage.paths import local_path

NAMES = (
    "chips",
    "communication",
    "compile",
    "energy",
    "ess",
    "gpu",
    "groups",
    "mnist",
    "movielens",
    "precision",
    "recompile",
    "sink",
    "soak",
    "survival",
)


def main(argv: list[str]) -> int:
    """Hand the arguments after the name to the benchmark of that name."""
    if not argv or argv[0] not in NAMES:
        print(f"usage: python -m benchmarks {{{','.join(NAMES)}}} [options]", file=sys.stderr)
        return 2
    try:
        options = _with_local_paths(argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return importlib.import_module(f"benchmarks.{argv[0]}").main(options)


def _with_local_paths(options: list[str]) -> list[str]:
    """Expand ``~`` in the file of ``--out``, and refuse a URL before anything runs."""
    parts = [part for x in options for part in (x.split("=", 1) if x.startswith("--out=") else [x])]
    pairs = zip(["", *parts], parts, strict=False)
    return [str(local_path("--out", x)) if before == "--out" else x for before, x in pairs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
