"""What a run reports: progress, its chunks, log records, parts of a profile, and warnings."""

import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from gspmd_mcmc.diagnostics import advice
from gspmd_mcmc.errors import CALLER_OF_SAMPLE, SamplingWarning
from gspmd_mcmc.storage.draws import Draws
from gspmd_mcmc.storage.paths import local_path
from gspmd_mcmc.targets.checks import on_idle_cores, on_small_data
from gspmd_mcmc.targets.resolution import on_coarse_terms, on_rounded_bijections
from gspmd_mcmc.targets.target import Target

LOGGER = logging.getLogger("gspmd_mcmc")
LOGGER.addHandler(logging.NullHandler())


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

    Numbers that are not finite are null. Of several processes the first writes.

    Parameters
    ----------
    path
        The file; lines are added to what it holds.
    """

    def __init__(self, path: str | Path):
        self.path = local_path("path", path)

    def __call__(self, report: ChunkReport) -> None:
        """Add a line."""
        if jax.process_index():
            return
        found = {"time": time.time()} | asdict(report)
        found["leapfrogs_per_second"] = report.leapfrogs_per_second
        is_finite = {n: not isinstance(x, float) or math.isfinite(x) for n, x in found.items()}
        with open(self.path, "a") as file:
            print(json.dumps({n: x if is_finite[n] else None for n, x in found.items()}), file=file)


def marked(part: str) -> jax.profiler.TraceAnnotation:
    """Mark a part of a run in a profile that `jax.profiler` takes, as ``gspmd_mcmc PART``."""
    return jax.profiler.TraceAnnotation(f"gspmd_mcmc {part}")


SECONDS_A_LINE, SECONDS_A_REWRITE = 60.0, 0.5
BAR = 20  # characters


class Lines:
    """Progress where there is no terminal: a line a minute, so that a log file stays short.

    In a notebook (``is_rewritten``) each phase has a line that is rewritten: without ipywidgets rich
    would add a picture at each refresh.
    """

    def __init__(self, stream: TextIO, *, is_rewritten: bool):
        self._stream, self._is_rewritten = stream, is_rewritten
        self._name, self._total, self._width, self._shown_at = "", 0, 0, 0.0

    def start(self) -> None:
        """Begin to count the time."""
        self._shown_at = time.monotonic()

    def stop(self) -> None:
        """End a line that is still open."""
        if self._width:
            self._stream.write("\n")
        self._width = 0

    def phase(self, name: str, total: int, done: int) -> None:
        """Begin another phase."""
        self.stop()
        self._name, self._total = name, total
        if self._is_rewritten:
            self._rewrite(done, "compiling")

    def show(self, done: int, numbers: str) -> None:
        """Show how many steps are done, if it is time."""
        wait = SECONDS_A_REWRITE if self._is_rewritten else SECONDS_A_LINE
        is_last = self._is_rewritten and done == self._total
        if time.monotonic() - self._shown_at < wait and not is_last:
            return
        self._shown_at = time.monotonic()
        if self._is_rewritten:
            self._rewrite(done, numbers)
        else:
            self._stream.write(f"{self._name}: {done}/{self._total} {numbers}\n")
        self._stream.flush()

    def _rewrite(self, done: int, numbers: str) -> None:
        full = "#" * (BAR * done // max(self._total, 1))
        line = f"{self._name:>8} [{full:<{BAR}}] {done}/{self._total} {numbers}"
        self._stream.write(f"\r{line:<{self._width}}")
        self._width = len(line)


class Report:
    """Reports the chunks of a run: on standard error if it ``is_shown``, in the log, to a callback."""

    def __init__(self, *, is_shown: bool, callback: Callable[[ChunkReport], Any] | None = None):
        from rich.console import Console  # Here, since a process may import the package and not sample.

        from gspmd_mcmc.sampling.progress_bar import Bar

        console = Console(stderr=True)
        self._display: Lines | Bar | None
        if is_shown and (console.is_jupyter or not console.is_terminal):
            self._display = Lines(sys.stderr, is_rewritten=console.is_jupyter)
        else:
            self._display = Bar(console, is_shown=is_shown)
        self._callback = callback
        self.is_stopped = False  # by the callback

    def __enter__(self) -> "Report":
        self._show("start")
        return self

    def __exit__(self, *error) -> None:
        self._show("stop")

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Begin a phase of this many steps, of which some may be done."""
        LOGGER.info("%s: %d of %d steps are done", name, done, total)
        self._phase, self._done, self._total = name, done, total
        self._show("phase", name, total, done)
        self._last = time.perf_counter()

    def advance(self, steps: int, **numbers: Any) -> None:
        """Report a chunk of steps; ``numbers`` are the other fields of its `ChunkReport`.

        Exceptions of the callback that are no `Exception`, such as `SystemExit`, are raised.
        """
        seconds, self._last = time.perf_counter() - self._last, time.perf_counter()
        self._done += steps
        report = ChunkReport(
            phase=self._phase, done=self._done, total=self._total, seconds=seconds, **numbers
        )
        text = (
            f"{report.leapfrogs_per_second:.0f} leapfrogs/s acc {report.acceptance_rate:.2f} "
            f"div {report.num_divergent} step {report.step_size:.2g}"
        )
        self._show("show", self._done, text)
        level = logging.INFO if self._done == self._total else logging.DEBUG
        LOGGER.log(level, "%s: %d of %d steps, %s", self._phase, self._done, self._total, text)
        if self._callback is None:
            return
        try:
            found = self._callback(report)
            self.is_stopped |= isinstance(found, bool | np.bool_) and not found
        except StopIteration:
            self.is_stopped = True
        except Exception as error:  # Whatever a user's function raises: draws were made already.
            self._callback = None
            warnings.warn(
                f"callback: it raised {type(error).__name__}: {error}. The run continues without it",
                SamplingWarning,
                stacklevel=2,
            )

    def _show(self, action: str, *args: Any) -> None:
        """Call a method of the display; a terminal that has gone costs the display, and no draws."""
        if self._display is None:
            return
        try:
            getattr(self._display, action)(*args)
        except (OSError, ValueError) as error:  # The latter from a closed file.
            self._display = None
            LOGGER.warning("progress is not shown any more: %s", error)


def warn_of_devices(target: Target) -> None:
    """Warn where fewer devices than the data lie on would be faster, or more."""
    if message := on_small_data(target) or on_idle_cores(target):
        warnings.warn(message, SamplingWarning, stacklevel=CALLER_OF_SAMPLE)


def warn_of_run(
    draws: Draws, num_samples: int, *, keeps_positions: bool, is_stopped: bool = False
) -> None:
    """Warn of a run that looks wrong; fewer draws are no surprise where the callback has stopped it."""
    found = []
    if draws.num_draws < num_samples and not (is_stopped and draws.num_draws):
        found.append(f"stopped after {draws.num_draws} of {num_samples} draws")
    if draws.num_draws:
        names = ("acceptance_rate", "is_divergent", "log_density")
        stats = {name: np.asarray(draws.stats[name]) for name in names}
        found += [
            advice.on_acceptance(stats),
            advice.on_divergences(stats),
            advice.on_arrivals(stats["log_density"]),
            advice.on_moves(draws.moves, draws.num_chains),
            on_coarse_terms(draws.kernel.target, draws.state),
            on_rounded_bijections(draws.kernel.target, draws.position if keeps_positions else None),
        ]
    for warning in filter(None, found):
        warnings.warn(warning, SamplingWarning, stacklevel=CALLER_OF_SAMPLE)
