"""Budgets of what a program may send and hold."""

from collections.abc import Sequence
from typing import Any

from gspmd_mcmc.views.program.hlo import KINDS
from gspmd_mcmc.views.units import bytes_text

_MEMORY = ("argument_bytes", "output_bytes", "temporary_bytes", "constant_bytes", "peak_bytes")
MOST_NAMED = 5  # of what a device holds


def require_kind(kind: str) -> None:
    """Raise on what is no kind of collective."""
    if kind not in KINDS:
        raise ValueError(f"expected a kind of collective, one of {', '.join(KINDS)}; got {kind!r}")


def violation(report: Any, name: str, budget: Any, within: str | int | None) -> str:
    """Say in words by what a report is over, or under, a budget; empty if it is not.

    A budget is the most that is allowed, or a pair: the least and the most.
    """
    least, most = budget if isinstance(budget, tuple) else (0, budget)
    found, offenders = _found(report, name, most, within)
    text = bytes_text(found) if name.endswith("_bytes") else str(found)
    if found < least:
        return f"{name}: at least {least:g}, found {text}"
    lines = "".join(f"\n    {offender}" for offender in offenders)
    return f"{name}: at most {most:g}, found {text}{lines}" if found > most else ""


def _found(
    report: Any, name: str, most: float, within: str | int | None
) -> tuple[float, Sequence[Any]]:
    """Return how much of something there is, and what of it to name."""
    kind = name.replace("_", "-")
    if kind in (*KINDS, "collectives", "sent-bytes"):
        every = kind in ("collectives", "sent-bytes")
        inside = [c for c in report.collectives if c.is_within(within) and (every or c.kind == kind)]
        each = [c.num_bytes if kind == "sent-bytes" else 1 for c in inside]
        # Where nothing is allowed, it does not matter how often one runs.
        runs = [c.times(within) if most else 1 for c in inside]
        return sum(n * r for n, r in zip(each, runs, strict=True)), inside
    if name == "whole_bytes":
        return _whole(report, most)
    if name in _MEMORY:
        return getattr(report, name), _largest(report, name)
    kinds = ", ".join(kind.replace("-", "_") for kind in KINDS)
    raise TypeError(
        f"check: no budget is called {name!r}; there are {kinds}, collectives, sent_bytes, "
        f"whole_bytes, {', '.join(_MEMORY)}"
    )


def _whole(report: Any, most: float) -> tuple[float, Sequence[Any]]:
    """Of what is whole on each of several devices, the largest, and all over a budget."""
    if report.num_devices == 1:
        return 0, ()
    whole = [*(a for a in report.arguments if a.is_whole), *report.constants]
    return max((w.num_bytes for w in whole), default=0), [w for w in whole if w.num_bytes > most]


def _largest(report: Any, name: str) -> list[Any]:
    """Return the largest arrays that a device holds, of those that a budget is about."""
    held = []
    if name in ("argument_bytes", "peak_bytes"):
        held += [(a.bytes_per_device, a) for a in report.arguments]
    if name in ("constant_bytes", "peak_bytes"):
        held += [(c.num_bytes, c) for c in report.constants]
    largest = sorted(held, key=lambda pair: -pair[0])
    return [array for _, array in largest[:MOST_NAMED]]
