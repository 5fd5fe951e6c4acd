"""What several processes have to agree on: who has failed, and what one of them does for all."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def of_all(flag: bool) -> np.ndarray:
    """Return the flag of every process, shape [processes]."""
    if jax.process_count() == 1:
        return np.asarray([flag])
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(flag))).reshape(-1)


def on_first(act: Callable[[], Any], failure: Exception) -> None:
    """Let the first process act, and all wait for it.

    If it raises, so do the others: ``failure``.
    """
    error = None
    if jax.process_index() == 0:
        try:
            act()
        except Exception as raised:
            error = raised
    failed = of_all(error is not None)
    if error is not None:
        raise error
    if failed.any():
        raise failure
