"""Arguments of `sample` and `resume` that are of no kind that they could be."""

import os
from numbers import Integral
from typing import Any

import jax.numpy as jnp


def check_counts(least: dict[str, int], given: dict[str, Any]) -> None:
    """Raise unless each argument is an integer that is at least so large."""
    for name, value in given.items():
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_integer or value < least[name]:
            raise ValueError(f"{name}: expected an integer of at least {least[name]}, got {value!r}")


def check_number(name: str, value: Any, what: str) -> None:
    """Raise unless an argument is a number, and not below zero."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name}: expected a number {what}, got {value!r}")


def check_path(name: str, value: Any) -> None:
    """Raise unless an argument is a path."""
    if not isinstance(value, str | os.PathLike):
        kind = type(value).__name__
        raise TypeError(f"{name}: expected the path of a folder, got {value!r}, a {kind}")


def check_observers(progress: Any, callback: Any) -> None:
    """Raise unless these say whether to show progress, and what to call; a text would be true."""
    if not isinstance(progress, bool):
        raise TypeError(f"progress: expected True or False, got {progress!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: expected a function, got {type(callback).__name__}")


def check_precision(kernel: Any) -> None:
    """Raise where a kernel was made in another precision than this program computes in."""
    made = getattr(getattr(kernel, "step_size", None), "dtype", None)
    now = jnp.zeros(()).dtype
    if made is not None and made != now:
        raise ValueError(
            f"kernel: its numbers are {made}, and JAX now computes in {now}: jax_enable_x64 was "
            "switched since it was made. Make kernel and target after that"
        )
