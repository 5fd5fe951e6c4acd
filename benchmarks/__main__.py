"""Run a benchmark by name: ``python -m benchmarks mnist --quick``."""

import importlib
import sys

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
    return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
