"""What all demos share: options, devices, and the summary that they write."""

import argparse
import dataclasses
import json
import math
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from gspmd_mcmc.storage.paths import local_path


def parse(description: str, out: str, *flags: tuple[str, str]) -> argparse.Namespace:
    """Read the options that all demos have, and a demo's own ``flags`` (name, help)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--devices", type=int, help="devices to use; 8 virtual ones on a CPU by default"
    )
    parser.add_argument("--data-dir", type=Path, help="folder with the real data (or GSPMD_MCMC_DATA)")
    parser.add_argument(
        "--out", type=_path, default=Path(out), help=f"where results go (default {out})"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    for name, text in flags:
        parser.add_argument(name, action="store_true", help=text)
    # Quick runs, and stand-ins for missing data, are small on purpose.
    warnings.filterwarnings("ignore", "small data on many devices")
    # A notebook passes the options of its own kernel.
    options = parser.parse_args([] if "ipykernel" in sys.modules else None)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def _path(text: str) -> Path:
    try:
        return local_path("--out", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(error) from error


def start_devices(asked: int | None) -> list[Any]:
    """Return the devices to use: those asked for, or all accelerators, or 8 virtual ones on a CPU.

    Call it before JAX is first used: virtual devices are made when the CPU backend starts.
    """
    jax.config.update("jax_num_cpu_devices", asked or 8)
    devices = jax.devices()
    if asked and asked > len(devices):
        raise SystemExit(f"--devices {asked}: there are {len(devices)} {devices[0].platform} devices")
    return list(devices[:asked])


class Stopwatch:
    """Times a run in a ``with`` block: seconds in all, and seconds that JAX traced and compiled.

    It is a callback for `gm.sample`, which tells it the leapfrogs: a run that continues from a
    checkpoint is timed by those of this process.

    Attributes
    ----------
    seconds, compile_seconds
        Wall-clock time of the block, and the part of it in which a program was traced or compiled.
    leapfrogs
        Those that chains took in the block, of all chains.
    """

    def __enter__(self):
        self.leapfrogs, self._intervals = 0, []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object):
        self.seconds = time.perf_counter() - self._began
        jax.monitoring.unregister_event_duration_listener(self._listen)
        self.compile_seconds = self._union()

    def __call__(self, chunk: Any) -> None:
        """Add the leapfrogs of a `ChunkReport`."""
        self.leapfrogs += chunk.leapfrogs

    @property
    def leapfrogs_per_second(self) -> float:
        """Leapfrogs in a second in which nothing was compiled."""
        return self.leapfrogs / max(self.seconds - self.compile_seconds, 1e-9)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            end = time.perf_counter()
            self._intervals.append((end - duration_secs, end))

    def _union(self) -> float:
        """Length of the union of the intervals: tracing a program includes tracing its parts."""
        total, reached = 0.0, self._began
        for start, end in sorted(self._intervals):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


def without_first(draws: Any, count: int) -> Any:
    """Drop the first draws of all chains."""
    position, stats = jax.tree.map(lambda x: x[:, count:], (draws.position, draws.stats))
    return dataclasses.replace(draws, position=position, stats=stats)


def peak_rss_mb() -> float:
    """Return the peak memory of this process, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


def write_summary(console: Console, out: Path, summary: dict[str, Any]) -> None:
    """Print every number of a run and write it to ``summary.json``; null if it is not finite.

    Lists are written, not printed: a demo has shown them in a form of its own.
    """
    summary = {
        n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in summary.items()
    }
    table = Table(title="summary", show_header=False)
    for name, value in summary.items():
        if not isinstance(value, list):
            table.add_row(name, f"{value:.5g}" if isinstance(value, float) else str(value))
    console.print(table)
    (out / "summary.json").write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    console.print(f"wrote {out / 'summary.json'}")
