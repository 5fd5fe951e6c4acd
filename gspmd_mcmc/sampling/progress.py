"""A progress bar for long runs, and Ctrl-C between chunks."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Report:
    """What the progress bar shows: phase, steps, leapfrogs per second, acceptance, divergences."""

    def __init__(self, *, is_shown: bool):
        columns = (
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=6),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not is_shown)
        self._task = None
        self._last = time.perf_counter()

    def __enter__(self) -> "Report":
        self._progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._progress.__exit__(*error)

    def phase(self, name: str, total: int, done: int = 0) -> None:
        """Begin a phase of so many steps, or go on with it where some are done."""
        self._task = self._progress.add_task(name, total=total, completed=done, numbers="compiling")
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
        """Show the numbers after one chunk: acceptance of the chunk, divergences of the phase."""
        now = time.perf_counter()
        rate, self._last = leapfrogs / (now - self._last), now
        numbers = (
            f"{rate:.0f} leapfrogs/s acc {acceptance_rate:.2f} div {divergences} step {step_size:.2g}"
        )
        if self._task is not None:
            self._progress.update(self._task, advance=steps, numbers=numbers)


class Stop:
    """Whether the user has asked to stop, or the system to end."""

    def __init__(self):
        self.is_asked = self.is_preempted = False

    def ask(self, signum, frame) -> None:
        """Take the first Ctrl-C as a request; let the next one raise."""
        self.is_asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def preempt(self, signum, frame) -> None:
        """Take SIGTERM as the order to save the run and end it."""
        self.is_preempted = True


@contextlib.contextmanager
def stop_on_interrupt(*, is_kept: bool = False) -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request to stop between chunks; a second one raises.

    SIGTERM is taken the same way where the run has checkpoints (``is_kept``). Outside the main thread,
    where Python delivers no signals, nothing is installed.
    """
    stop = Stop()
    handlers = {signal.SIGINT: stop.ask} | ({signal.SIGTERM: stop.preempt} if is_kept else {})
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
