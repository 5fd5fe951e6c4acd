"""One posterior in a process of its own: a line of JSON for each configuration.

``python -m benchmarks.validation.worker '{"configurations": [...], "largest_z": 4.6, ...}'``. A process
for each posterior and precision, so that compiled programs do not pile up and a crash costs one row.
"""

import json
import os
import sys
import traceback
from typing import Any, TextIO

import jax

from benchmarks.validation import configuration, posteriordb
from benchmarks.validation.configuration import Configuration
from benchmarks.validation.judge import Reference
from benchmarks.validation.kernels import NotThere
from benchmarks.validation.posteriors import MODELS

NUM_DEVICES = 8


def main() -> None:
    """Run the configurations that the first argument lists, all of one posterior and precision."""
    records = _private_stdout()
    task = json.loads(sys.argv[1])
    todo = [Configuration(**row) for row in task["configurations"]]
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    jax.config.update("jax_enable_x64", todo[0].dtype == "float64")
    recorded = posteriordb.load(todo[0].posterior, task["data_dir"])
    reference = Reference.from_draws(recorded.draws)
    for row in todo:
        print(
            json.dumps(_attempt(row, recorded, reference, task["largest_z"])), file=records, flush=True
        )
        jax.clear_caches()


def _attempt(
    row: Configuration, recorded: posteriordb.Recorded, reference: Reference, largest_z: float
) -> dict[str, Any]:
    try:
        model = MODELS[row.posterior]
        return configuration.run(row, model, recorded.data, reference, largest_z)
    except NotThere as error:
        return {"missing": str(error)}
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
