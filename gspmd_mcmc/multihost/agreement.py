"""What the processes of a run agree on: facts that must be equal, numbers of which the least counts.

Every process must call these functions in the same order. All messages have one size, so that one
program serves.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

MESSAGE_BYTES = 32
# What errors say when a process is gone while others wait for it.
OF_LOST_PROCESS = ("gloo", "heartbeat", "connection closed", "connection reset", "coordination service")


class ProcessesDisagree(ValueError):
    """Processes of one run were given different things; the message says what each was given."""


class ProcessLost(RuntimeError):
    """Another process of this run has ended, and this one cannot continue without it."""


def require_agreement(call: str, facts: dict[str, str]) -> None:
    """Raise `ProcessesDisagree`, on every process, unless all make this call and state these facts."""
    text = json.dumps({"call": call} | facts, sort_keys=True).encode()
    digests = _exchange(hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    longest = max(counts_of_all(len(text)))
    stated = [json.loads(x) for x in _exchange(text.ljust(longest))]
    raise ProcessesDisagree(disagreement(call, stated))


def least(*numbers: int) -> tuple[int, ...]:
    """Return the least value on any process of each of up to four numbers."""
    return tuple(int(n) for n in _numbers_of_all(*numbers).min(axis=0)[: len(numbers)])


def counts_of_all(number: int) -> list[int]:
    """Return the number that each process has."""
    return [int(n) for n in _numbers_of_all(number)[:, 0]]


def of_all(flag: bool) -> np.ndarray:
    """Return the flag of every process, shape [processes]; a single process asks nobody."""
    flags = [flag] if jax.process_count() == 1 else counts_of_all(int(flag))
    return np.asarray(flags, bool)


def on_first(act: Callable[[], Any], failure: Exception) -> None:
    """Let the first process act while the others wait; if it raises, they raise ``failure``."""
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


@contextmanager
def lost_process_explained() -> Iterator[None]:
    """Turn errors of the transport into a `ProcessLost`, which says that another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if not any(sign in str(error).lower() for sign in OF_LOST_PROCESS):
            raise
        raise ProcessLost(
            f"process {jax.process_index()} of {jax.process_count()}: another process of this run has "
            "ended, or cannot be reached; its own messages say why. Start all of them again, from a "
            f"checkpoint if there is one. ({str(error).splitlines()[0]})"
        ) from error


def _numbers_of_all(*numbers: int) -> np.ndarray:
    """Return up to four numbers of every process, shape [processes, 4]."""
    message = np.zeros(MESSAGE_BYTES // 8, np.int64)
    message[: len(numbers)] = numbers
    return np.stack([np.frombuffer(x, np.int64) for x in _exchange(message.tobytes())])


def _exchange(message: bytes) -> list[bytes]:
    """Give every process the messages of all, by process; they are of one size."""
    found = multihost_utils.process_allgather(np.frombuffer(message, np.uint8))
    return [x.tobytes() for x in np.asarray(found).reshape(-1, len(message))]


def disagreement(call: str, stated: list[dict[str, Any]]) -> str:
    """Say which facts differ, and which processes state each of their values."""
    names = sorted({name for facts in stated for name in facts})
    lines = []
    for name in names:
        values = [facts.get(name, "nothing") for facts in stated]
        if len(set(values)) > 1:
            shown = "; ".join(f"{_of(values, v)} {v}" for v in dict.fromkeys(values))
            lines.append(f"  {name}: {shown}")
    return (
        f"{call}: the {len(stated)} processes of this run must be given the same, but differ in\n"
        + "\n".join(lines)
        + "\nGive all of them the same arguments; for rows of their own there is place_local"
    )


def _of(values: list[str], value: str) -> str:
    """Name the processes that have a value."""
    found = [str(i) for i, v in enumerate(values) if v == value]
    return f"process {found[0]} has" if len(found) == 1 else f"processes {', '.join(found)} have"
