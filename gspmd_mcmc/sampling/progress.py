"""Progress of long runs, and Ctrl-C between chunks."""

import contextlib
import logging
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gspmd_mcmc.placement.agreement import least
from gspmd_mcmc.sampling.errors import SamplingWarning
from gspmd_mcmc.sampling.observing import LOGGER, ChunkReport

SECONDS_A_LINE, SECONDS_A_REWRITE = 60.0, 0.5
BAR = 20  # characters


class Bar:
    """Progress on a terminal: a bar for each phase."""

    def __init__(self, console: Console):
        columns = (
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=6),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._progress, self._task = Progress(*columns, console=console), None

    def start(self) -> None:
        """Begin to draw."""
        self._progress.start()

    def stop(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()

    def phase(self, name: str, total: int, done: int) -> None:
        """Begin a bar."""
        self._task = self._progress.add_task(name, total=total, completed=done, numbers="compiling")

    def show(self, done: int, numbers: str) -> None:
        """Show how many steps are done."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, numbers=numbers)


class Lines:
    """Progress where there is no terminal: a line a minute, so that a log file stays short.

    In a notebook (``is_rewritten``) each phase has one line, which is rewritten: rich would add a
    picture at each refresh where ipywidgets is missing.
    """

    def __init__(self, stream: TextIO, *, is_rewritten: bool):
        self._stream, self._is_rewritten = stream, is_rewritten
        self._name, self._total, self._width = "", 0, 0
        self._told = time.monotonic()

    def start(self) -> None:
        """Begin to count the time."""
        self._told = time.monotonic()

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
        now, is_last = time.monotonic(), done == self._total
        wait = SECONDS_A_REWRITE if self._is_rewritten else SECONDS_A_LINE
        if now - self._told < wait and not (self._is_rewritten and is_last):
            return
        self._told = now
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


def display() -> Bar | Lines:
    """Return what shows progress on standard error here: a terminal, a notebook, or a log file."""
    console = Console(stderr=True)
    if console.is_terminal and not console.is_jupyter:
        return Bar(console)
    return Lines(sys.stderr, is_rewritten=console.is_jupyter)


class Report:
    """Tells of a run's chunks: to who watches, the log, and a callback.

    Parameters
    ----------
    is_shown
        Whether progress is shown.
    callback
        Called with each `ChunkReport`; if it raises, a warning says so, and it is called no more.
    """

    def __init__(self, *, is_shown: bool, callback: Callable[[ChunkReport], Any] | None = None):
        self._display = display() if is_shown else None
        self._callback = callback
        self._phase, self._done, self._total = "", 0, 0
        self._last = time.perf_counter()

    def __enter__(self) -> "Report":
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(self, *error) -> None:
        if self._display is not None:
            self._display.stop()

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Begin a phase of so many steps, or go on with it where some are done."""
        LOGGER.info("%s: %d of %d steps are done", name, done, total)
        self._phase, self._done, self._total = name, done, total
        if self._display is not None:
            self._display.phase(name, total, done)
        self._last = time.perf_counter()

    def advance(
        self,
        steps: int,
        *,
        leapfrogs: int,
        acceptance_rate: float,
        divergences: int,
        step_size: float,
    ) -> None:
        """Tell the numbers after one chunk: acceptance of the chunk, divergences of the phase."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._done += steps
        report = ChunkReport(
            phase=self._phase,
            done=self._done,
            total=self._total,
            seconds=seconds,
            leapfrogs=leapfrogs,
            acceptance_rate=acceptance_rate,
            num_divergent=divergences,
            step_size=step_size,
        )
        numbers = (
            f"{report.leapfrogs_per_second:.0f} leapfrogs/s acc {acceptance_rate:.2f} "
            f"div {divergences} step {step_size:.2g}"
        )
        if self._display is not None:
            self._display.show(self._done, numbers)
        LOGGER.log(
            logging.INFO if self._done == self._total else logging.DEBUG,
            "%s: %d of %d steps, %s",
            self._phase,
            self._done,
            self._total,
            numbers,
        )
        self._call_back(report)

    def _call_back(self, report: ChunkReport) -> None:
        if self._callback is None:
            return
        try:
            self._callback(report)
        except (
            Exception
        ) as error:  # Whatever a user's function raises; draws were made that it would cost.
            self._callback = None
            warnings.warn(
                f"callback: it raised {type(error).__name__}: {error}. The run goes on without it",
                SamplingWarning,
                stacklevel=2,
            )


class Stop:
    """Whether the user has asked to stop, or the system to end; processes of one run do so together.

    Parameters
    ----------
    in_company
        Whether the run is one of several processes.
    """

    def __init__(self, in_company: bool = False):
        self.in_company = in_company
        self._is_wanted = self._is_end_wanted = False
        self._is_agreed = self._is_end_agreed = False

    @property
    def is_asked(self) -> bool:
        """Whether to stop before the next chunk."""
        return self._is_agreed if self.in_company else self._is_wanted

    @property
    def is_preempted(self) -> bool:
        """Whether to save the run before the next chunk, and end."""
        return self._is_end_agreed if self.in_company else self._is_end_wanted

    def agreed(self, size: int) -> int:
        """Return the size of the next chunk; processes agree on the least, and on whether to stop."""
        if not self.in_company:
            return size
        size, goes_on, lives = least(size, not self._is_wanted, not self._is_end_wanted)
        self._is_agreed, self._is_end_agreed = not goes_on, not lives
        return size

    def ask(self, signum, frame) -> None:
        """Take the first Ctrl-C as a request; let the next one raise."""
        self._is_wanted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(self) -> None:
        """Ask to stop, as a Ctrl-C does."""
        self._is_wanted = True

    def preempt(self, signum, frame) -> None:
        """Take SIGTERM as the order to save the run and end it."""
        self._is_end_wanted = True


@contextlib.contextmanager
def stop_on_interrupt(in_company: bool = False, *, is_kept: bool = False) -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request to stop between chunks; a second one raises.

    SIGTERM is taken the same way where the run has checkpoints (``is_kept``). Outside the main thread,
    where Python delivers no signals, nothing is installed.
    """
    stop = Stop(in_company)
    handlers = {signal.SIGINT: stop.ask} | ({signal.SIGTERM: stop.preempt} if is_kept else {})
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
