"""Run a benchmark by name: ``python -m benchmarks mnist --quick``."""

import importlib
import sys

NAMES = (
    "communication",
    "energy",
    "ess",
    "mnist",
    "movielens",
    "precision",
    "sink",
    "soak",
    "survival",
)
BENCHMARKS = {name: f"benchmarks.{name}" for name in NAMES} | {
    "compile": "benchmarks.first_call",
    "recompile": "benchmarks.compiling",
}


def main(argv: list[str]) -> int:
    """Hand the arguments after the name to the benchmark of that name."""
    if not argv or argv[0] not in BENCHMARKS:
        print(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} [options]", file=sys.stderr)
        return 2
    return importlib.import_module(BENCHMARKS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
