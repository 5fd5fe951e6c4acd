"""Ctrl-C and SIGTERM between the chunks of a run; the processes of one run heed them together."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from gspmd_mcmc.multihost.agreement import least


class Stop:
    """Whether the user has asked to stop, or the system to end; processes of one run do so together.

    Parameters
    ----------
    is_multiprocess
        Whether the run is on several processes.
    """

    def __init__(self, is_multiprocess: bool = False):
        self.is_multiprocess = is_multiprocess
        self._is_wanted = self._is_end_wanted = False
        self._is_agreed = self._is_end_agreed = False

    @property
    def is_asked(self) -> bool:
        """Whether to stop before the next chunk."""
        return self._is_agreed if self.is_multiprocess else self._is_wanted

    @property
    def is_preempted(self) -> bool:
        """Whether to save the run before the next chunk, and end."""
        return self._is_end_agreed if self.is_multiprocess else self._is_end_wanted

    def agreed(self, size: int) -> int:
        """Return the size of the next chunk; processes agree on the least, and on whether to stop."""
        if not self.is_multiprocess:
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
def stop_on_interrupt(is_multiprocess: bool = False, *, is_kept: bool = False) -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request to stop between chunks; a second one raises.

    SIGTERM is taken the same way where the run has checkpoints (``is_kept``). Outside the main thread,
    where Python delivers no signals, nothing is installed.
    """
    stop = Stop(is_multiprocess)
    handlers = {signal.SIGINT: stop.ask} | ({signal.SIGTERM: stop.preempt} if is_kept else {})
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
