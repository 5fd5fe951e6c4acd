"""What a run tells while it goes on: reports of its chunks, log records, marks in a profile."""

import json
import logging
import math
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from gspmd_mcmc.sampling.errors import SamplingWarning

LOGGER = logging.getLogger("gspmd_mcmc")
LOGGER.addHandler(logging.NullHandler())
# A logistic regression of 0.8 MB took 2.1 times as long on 2 virtual CPU devices as on one, and 2.5 on
# 8; of 8 MB as long, of 8 kB 3.6 and 14.5 times.
LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class ChunkReport:
    """What `sample` tells its callback after each chunk of steps, of about a second.

    Attributes
    ----------
    phase
        "warm-up" or "sampling".
    done, total
        Steps of warm-up, or draws, of each chain: those made and those asked for.
    seconds
        What the chunk took.
    leapfrogs
        Those of the chunk, of all chains.
    acceptance_rate
        Mean over the chunk's steps and the chains.
    num_divergent
        Divergent transitions of the phase so far, of all chains.
    step_size
        At the chunk's end; the chains' mean where each has its own.
    """

    phase: str
    done: int
    total: int
    seconds: float
    leapfrogs: int
    acceptance_rate: float
    num_divergent: int
    step_size: float

    @property
    def leapfrogs_per_second(self) -> float:
        """Leapfrogs of all chains in a second."""
        return self.leapfrogs / max(self.seconds, 1e-9)


class JSONLines:
    """A callback for `sample` that adds each `ChunkReport` to a file, a line of JSON with the time.

    Numbers that are not finite are null. Of several processes the first one writes.

    Parameters
    ----------
    path
        The file; lines are added to what it holds.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __call__(self, report: ChunkReport) -> None:
        """Add a line."""
        if jax.process_index():
            return
        found = {"time": time.time()} | asdict(report)
        found["leapfrogs_per_second"] = report.leapfrogs_per_second
        with open(self.path, "a") as file:
            file.write(json.dumps({name: _or_null(x) for name, x in found.items()}) + "\n")


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warn_of_small_data(target: Any) -> None:
    """Warn where rows on several devices are so few that one of them would be faster.

    A large plate pays for small ones beside it.
    """
    spread = [plate for plate in getattr(target, "plates", ()) if plate.rows.num_blocks > 1]
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves([p.data for p in spread]))
    if spread and num_bytes < LEAST_BYTES:
        warnings.warn(
            f"small data on many devices: {' and '.join(map(str, spread))}, {num_bytes / 1e6:.2f} MB "
            f"of rows on {spread[0].rows.num_blocks} devices. If their terms are as cheap as a "
            "regression's, each gradient waits for the devices longer than one of them takes for all "
            "rows. Lay chains over the mesh, make_mesh(chains=...), or take one device",
            SamplingWarning,
            stacklevel=4,
        )


def marked(part: str) -> jax.profiler.TraceAnnotation:
    """Mark a part of a run in a profile that `jax.profiler` takes, as ``gspmd_mcmc PART``."""
    return jax.profiler.TraceAnnotation(f"gspmd_mcmc {part}")
