"""Budgets of what a program may send and hold."""

from typing import Any

from gspmd_mcmc.views.program.hlo import KINDS
from gspmd_mcmc.views.units import bytes_text

_MEMORY = ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")


def require_kind(kind: str) -> None:
    """Raise on what is no kind of collective."""
    if kind not in KINDS:
        raise ValueError(f"expected a kind of collective, one of {', '.join(KINDS)}; got {kind!r}")


def excess(report: Any, name: str, most: float, within: str | int | None) -> str:
    """Say in words by what a report exceeds a budget; empty if it does not."""
    if name == "collectives" or name.replace("_", "-") in KINDS:
        return _of_collectives(report, name, most, within)
    if name == "sent_bytes":
        inside = [c for c in report.collectives if c.is_within(within)]
        # Where nothing is allowed, it does not matter how often it is sent.
        found = report.sent_bytes(within) if most else sum(c.num_bytes for c in inside)
        return _named(name, most, bytes_text(found), inside) if found > most else ""
    if name == "constant_bytes":
        return _of_constants(report, name, most)
    if name == "whole_bytes":
        return _of_whole(report, name, most)
    if name in _MEMORY:
        return _of_memory(report, name, most)
    kinds = ", ".join(kind.replace("-", "_") for kind in KINDS)
    raise TypeError(
        f"check: no budget is called {name!r}; there are {kinds}, collectives, sent_bytes, "
        f"constant_bytes, whole_bytes, {', '.join(_MEMORY)}"
    )


def _of_collectives(report: Any, name: str, most: float, within: str | int | None) -> str:
    kind = name.replace("_", "-")
    offenders = [
        c for c in report.collectives if kind in (c.kind, "collectives") and c.is_within(within)
    ]
    # Where none is allowed, it does not matter how often one runs.
    found = sum(c.times(within) for c in offenders) if most else len(offenders)
    return _named(name, most, str(found), offenders) if found > most else ""


def _of_constants(report: Any, name: str, most: float) -> str:
    over = [c for c in report.constants if c.num_bytes > most]
    return _named(name, most, bytes_text(report.largest_constant_bytes), over) if over else ""


def _of_whole(report: Any, name: str, most: float) -> str:
    if report.num_devices == 1:
        return ""
    over = [a for a in report.arguments if a.is_whole and a.num_bytes > most]
    over += [c for c in report.constants if c.num_bytes > most]
    return _named(name, most, bytes_text(max(o.num_bytes for o in over)), over) if over else ""


def _of_memory(report: Any, name: str, most: float) -> str:
    found = getattr(report, name)
    held = [
        (a.bytes_per_device, a) for a in report.arguments if name in ("argument_bytes", "peak_bytes")
    ]
    held += [(c.num_bytes, c) for c in report.constants if name == "peak_bytes"]
    largest = sorted(held, key=lambda pair: -pair[0])[:5]
    return _named(name, most, bytes_text(found), [held for _, held in largest]) if found > most else ""


def _named(name: str, most: float, found: str, offenders: list) -> str:
    lines = "".join(f"\n    {offender}" for offender in offenders)
    return f"{name}: at most {most:g}, found {found}{lines}"
