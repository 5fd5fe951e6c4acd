"""Rows in a process of their own: a line of JSON for each, of one posterior or of a section's kernels.

``python -m validation.worker '{"kind": "Configuration", "rows": [...], ...}'``
"""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TextIO

import jax

from benchmarks import posteriordb
from validation import configuration
from validation.configuration import Configuration
from validation.judge import Reference
from validation.posteriors import MODELS

NUM_DEVICES = 8


def main() -> None:
    """Run the rows that the first argument lists, all of one kind."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    records = _private_stdout()
    task = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    run = {"Configuration": _posterior, "Job": _section}[task["kind"]](task)
    for row in task["rows"]:
        print(json.dumps(_attempt(run, row)), file=records, flush=True)
        jax.clear_caches()


def _end_with_parent() -> None:
    """Wait until nobody holds the other end of standard input, and end at once."""
    sys.stdin.read()
    os._exit(1)


def _posterior(task: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load what all rows, of one posterior and precision, are judged by; return what runs one."""
    first = Configuration(**task["rows"][0])
    jax.config.update("jax_enable_x64", first.dtype == "float64")
    recorded = posteriordb.load(first.posterior, task["data_dir"])
    reference = Reference.from_draws(recorded.draws)
    model, largest_z = MODELS[first.posterior], task["largest_z"]
    return lambda row: configuration.run(
        Configuration(**row), model, recorded.data, reference, largest_z
    )


def _section(task: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    from validation import sections  # imported here: posteriors need none of it

    return lambda row: sections.run(sections.Job(**row))


def _attempt(run: Callable[[dict[str, Any]], dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    try:
        return run(row)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _private_stdout() -> TextIO:
    """Keep the real stdout for records: what libraries print goes to stderr."""
    records = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return records


if __name__ == "__main__":
    main()
