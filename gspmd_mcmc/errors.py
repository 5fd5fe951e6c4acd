"""What a run warns of and raises, and how calls answer arguments that other libraries have."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable)
# The stacklevel of a warning in a function that `sample` calls: above it are `sample`, its two
# decorators (`on_any_mesh` and `answers`), and the user's line.
CALLER_OF_SAMPLE = 5
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


class SamplingWarning(UserWarning):
    """Something about a run that its user should look at before trusting it."""


class CheckpointNotSaved(RuntimeError):
    """A run with checkpoints cannot write its first one, so nothing has been computed."""


class Preempted(RuntimeError):
    """The run was told to end (SIGTERM). It is saved; the message says how to continue it."""


def answers(call_as: str, **cures: str) -> Callable[[F], F]:
    """Let a call answer arguments that it does not have with today's spelling.

    Parameters
    ----------
    call_as
        How it is called.
    cures
        Keywords of other libraries, and what to write for each.
    """

    def of(function: F) -> F:
        signature = inspect.signature(function)
        what = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                found = [f"{name}=: {cures[name]}" for name in kwargs if name in cures]
                raise TypeError(f"{what}: {'; '.join(found) or error}. {call_as}") from None
            return function(*args, **kwargs)

        return call  # pyright: ignore[reportReturnType]

    return of


def bytes_text(num_bytes: float) -> str:
    """Write a number of bytes with a decimal unit: ``784 B``, ``31.4 kB``, ``2 GB``."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = f"{value:.1f}".removesuffix(".0") if unit and value < 99.95 else f"{value:.0f}"
    return f"{digits} {_UNITS[unit]}"
