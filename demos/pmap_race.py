"""Compare the values and times of two programs, for `pmap_to_jit` and `array_shardings`."""

import ast
import inspect
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.markup import escape
from rich.table import Table

import gspmd_mcmc as gm


def pmap(function, **how):
    """`jax.pmap` as JAX ships it today, without its deprecation warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pmap.*", DeprecationWarning)
        return jax.pmap(function, **how)


@dataclass(frozen=True)
class Pair:
    """Two programs for the same numbers, their arguments, and the numbers by NumPy or one device.

    The new program also runs on one device, unless it names a mesh (``names_mesh``).
    """

    old: Callable
    old_args: tuple
    new: Callable
    new_args: tuple
    truth: Any
    names_mesh: bool = False


def lines(case: Callable) -> dict[str, str]:
    """Read what a case assigns to ``old`` and ``new``, as source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(case)))
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    found = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assigned}
    return {name: found[name] for name in ("old", "new")}


def specs(args: tuple) -> str:
    """Name where each array of a new program lies."""
    found = [repr(tuple(leaf.sharding.spec)).replace(",)", ")") for leaf in jax.tree.leaves(args)]
    return ", ".join(f"P{spec}" for spec in found)


def seconds(function: Callable, args: tuple, calls: int) -> float:
    """Time a call, as the mean of several in a row."""
    began = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(function(*args))
    return (time.perf_counter() - began) / calls


def race(pair: Pair, num_rounds: int) -> dict[str, Any]:
    """Time the programs of a pair in alternating rounds, after a round of warming up."""
    programs = {"old": (pair.old, pair.old_args), "new": (pair.new, pair.new_args)}
    if not pair.names_mesh:
        programs["one"] = (pair.new, jax.device_put(pair.new_args, jax.devices()[0]))
    calls = max(1, round(0.005 / seconds(*programs["new"], calls=3)))
    rounds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(num_rounds + 1):
        for name in sorted(programs, reverse=bool(number % 2)):
            rounds[name].append(seconds(*programs[name], calls=calls))
    old, new = np.array(rounds["old"][1:]), np.array(rounds["new"][1:])
    low, middle, high = np.quantile(new / old, [0.25, 0.5, 0.75]).tolist()
    medians = {f"{name}_ms": 1e3 * float(np.median(times[1:])) for name, times in rounds.items()}
    return medians | {"ratio": middle, "ratio_low": low, "ratio_high": high, "calls": calls}


def largest_difference(values: Any, others: Any) -> float:
    """Compare leaf by leaf, in units of a leaf's largest value; one side may be reshaped."""
    worst = 0.0
    for one, other in zip(jax.tree.leaves(values), jax.tree.leaves(others), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        away = np.max(np.abs(one - other.reshape(one.shape))) / max(np.max(np.abs(other)), 1e-30)
        worst = float(np.maximum(worst, away))  # NaN stays NaN, and passes no test
    return worst


def sent(pair: Pair) -> dict[str, Any]:
    """Count what the new program sends in one call, by kind and mesh axes, and bytes on a device."""
    report = gm.communication(pair.new, *pair.new_args)
    runs: dict[str, int] = {}
    for one in report.collectives:
        name = f"{one.kind} over {one.where}"
        runs[name] = runs.get(name, 0) + one.times()
    return {"collectives": runs, "bytes_sent": report.sent_bytes()}


def compare(case: Callable, num_rounds: int) -> dict[str, Any]:
    """Run a case: values of both programs and the truth, time of both, and what the new one sends."""
    pair = case()
    values = pair.new(*pair.new_args)
    found = {
        "case": case.__name__,
        "what": (case.__doc__ or "").rstrip("."),
        **lines(case),
        "placed": specs(pair.new_args),
        "error": largest_difference(values, pair.truth),
        **sent(pair),
    }
    assert found["error"] < 1e-5, f"{case.__name__}: {found['error']:.2g} from the truth"
    try:
        old_values = pair.old(*pair.old_args)
    except ValueError as refusal:
        return found | {"refused": str(refusal).splitlines()[0]}
    found["difference"] = largest_difference(values, old_values)
    assert found["difference"] < 1e-6, f"{case.__name__}: {found['difference']:.2g} from pmap"
    return found | race(pair, num_rounds)


def draw_table(found: list[dict[str, Any]], num_devices: int) -> Table:
    """Draw what `compare` found, a row for each case."""
    title = f"pmap of JAX {jax.__version__} and placement, {num_devices} devices"
    table = Table(title=title, show_lines=True, expand=True)
    table.add_column("old line, new line", ratio=1, overflow="fold")
    table.add_column("same values", width=6)
    table.add_column("new ÷ pmap", width=6)
    table.add_column("one device vmap", width=8)
    table.add_column("new sends", width=11)
    for row in found:
        lines_of = f"[dim]old[/dim] {escape(row['old'])}\n[dim]new[/dim] {escape(row['new'])}"
        sends = [f"{runs} {name}" for name, runs in row["collectives"].items()]
        table.add_row(
            f"[bold]{row['what']}[/bold]\n{lines_of}\n[dim]on[/dim]  {escape(row['placed'])}",
            *(_outcome(row) if "ratio" in row else ("as NumPy", "pmap\nrefuses")),
            _on_one(row),
            "\n".join(sends) or "nothing",
        )
    return table


def _outcome(row: dict[str, Any]) -> tuple[str, str]:
    """Say how far values are from pmap's, and the ratio of times with its quartiles."""
    same = f"to {row['difference']:.0e}" if row["difference"] else "identical"
    return same, f"{row['ratio']:.2f}\n{row['ratio_low']:.2f}–\n{row['ratio_high']:.2f}"


def _on_one(row: dict[str, Any]) -> str:
    """Say how long the new program takes on one device, and how many times as long on all."""
    if "one_ms" not in row:
        return "fixed\nmesh" if "ratio" in row else ""
    return f"{row['one_ms']:.3g} ms\n× {row['new_ms'] / row['one_ms']:.2g}"


def plot_ratios(axis: Any, raced: list[dict[str, Any]]) -> None:
    """Draw the ratio of each case, with its quartiles."""
    low, middle, high = (
        np.array([row[name] for row in raced]) for name in ("ratio_low", "ratio", "ratio_high")
    )
    places = np.arange(len(raced))
    silent = np.array([not row["collectives"] for row in raced])
    for chosen, color, label in (
        (silent, "#0072b2", "sends nothing"),
        (~silent, "#d55e00", "sends"),
    ):
        axis.barh(places[chosen], middle[chosen], color=color, alpha=0.85, label=label)
    spread = np.stack([middle - low, high - middle])
    axis.errorbar(middle, places, xerr=spread, fmt="none", ecolor="black", capsize=2, lw=1)
    axis.axvline(1, color="black", lw=1, ls="--")
    for place, row in zip(places, raced, strict=True):
        label = f"{row['what']}, {row['new_ms']:.3g} ms"
        axis.text(0.02, place, label, color="white", va="center", fontsize=9)
    axis.set_yticks([])
    axis.set_ylim(len(raced) - 0.4, -0.6)
    axis.legend(loc="upper right", fontsize=9)
    axis.set(
        title=f"time of the new program ÷ time of pmap's (JAX {jax.__version__})",
        xlabel="left of 1 placement is faster; whiskers: quartiles of the rounds",
        xlim=(0, max(1.5, 1.1 * float(middle.max()))),
    )
