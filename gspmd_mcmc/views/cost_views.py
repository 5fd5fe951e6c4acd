"""A prediction of `cost`, as text and as a figure. Both say that it is a prediction."""

import itertools
import textwrap
from typing import TYPE_CHECKING

import numpy as np

from gspmd_mcmc.views.collective_times import fastest_all_reduce
from gspmd_mcmc.views.palette import BLUE, GREEN, PURPLE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gspmd_mcmc.views.cost import CostModel, Prediction, Scaling
    from gspmd_mcmc.views.program.report import Traffic

_WIDTH = 96
_IDEAL, _FAINT = "#999999", "#555555"
_PAPER = {"fc": "white", "ec": "none", "pad": 2}


def text(prediction: "Prediction") -> str:
    """Write a table of both scalings, where communication overtakes compute, and the assumptions."""
    model, strong, weak = prediction.model, prediction.strong, prediction.weak
    fixed, per_row = seconds(model.fixed_seconds), seconds(model.seconds_per_row)
    total = f"strong scaling: {model.num_rows:,} rows in all"
    columns = f"{'compute':>8} {'communic.':>9} {'efficiency':>10}"
    lines = [
        f"PREDICTION, nothing was measured but compute: one leapfrog, n devices along {model.axis!r}",
        f"compute of one device: {per_row} a row + {fixed}",
        *(f"sent: {_sent(c)}" for c in model.traffic),
        *([] if model.traffic else ["sent: nothing (was the program compiled for one device?)"]),
        "",
        f"{'':>7} | {total:<39} | weak scaling: as many on each",
        f"{'devices':>7} | {'rows each':>9} {columns} | {columns}",
    ]
    for i, n in enumerate(strong.devices):
        lines.append(f"{n:>7,} | {strong.rows[i]:>9,} {_columns(strong, i)} | {_columns(weak, i)}")
    lines += ["", f"strong scaling: {crossing(strong)}", f"weak scaling:   {crossing(weak)}"]
    half_lost = strong.devices[strong.efficiency < 0.5]
    if half_lost.size:
        lines.append(f"efficiency of strong scaling is below one half from {half_lost[0]:,} devices")
    lines.append("")
    if model.not_modeled:
        kinds = ", ".join(_sent(c) for c in model.not_modeled)
        lines += [*_wrapped(f"NOT MODELED, so communication takes longer than shown: {kinds}"), ""]
    lines.append("Assumed:")
    return "\n".join(lines + [line for a in assumptions(model) for line in _wrapped(f"- {a}")])


def _columns(scaling: "Scaling", i: int) -> str:
    compute, communication = scaling.compute_seconds[i], scaling.communication_seconds[i]
    return f"{seconds(compute):>8} {seconds(communication):>9} {scaling.efficiency[i]:>10.1%}"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def assumptions(model: "CostModel") -> list[str]:
    """List everything that a prediction rests on."""
    links = model.interconnects
    moving = {"all-gather", "all-to-all", "collective-permute"} & {c.kind for c in model.traffic}
    always = [
        "Compute is a straight line in a device's rows, the same on every device; the fullest device "
        "has ceil(rows / n). The seconds a row are those that the caller gave.",
        "Compute and communication do not overlap. Reducing, contention between messages, waiting for "
        "slow devices, packing and unpacking cost nothing.",
        f"All-reduce takes {_algorithm(model)}; all-gather and reduce-scatter take a ring, all-to-all "
        "pairwise exchange (formulas: gspmd_mcmc.views.collective_times).",
        *(f"{link}: {link.source or 'no source given'}." for link in links),
        "The operand of an all-reduce or reduce-scatter is the same on any number of devices.",
    ]
    sometimes = {
        "A torus is the most cubic of its size, each side closed to a ring, all links busy. Small "
        "slices are open (TPU v5e: sides under 16; v4, v5p: sides not a multiple of 4): bytes take "
        "up to twice as long there.": any(link.torus_axes for link in links),
        "A group fills the innermost interconnect first: reduce-scatter inside, all-reduce across, "
        "all-gather inside. A node that is part empty counts as full; other mesh axes take no "
        "room.": len(links) > 1,
        f"The arrays of {' and '.join(sorted(moving))} have a row for each data row, and grow with "
        "them.": moving,
        f"Over axes other than {model.axis!r} groups and bytes stay as compiled.": not all(
            model.runs_over_axis(c) for c in model.traffic
        ),
        f"Collectives over unknown axes run over {model.axis!r}.": not all(
            c.axes for c in model.traffic
        ),
    }
    return always + [sentence for sentence, applies in sometimes.items() if applies]


def _algorithm(model: "CostModel") -> str:
    if model.all_reduce is fastest_all_reduce:
        return "the better of ring and tree, on a torus a ring for each axis"
    return getattr(model.all_reduce, "__name__", repr(model.all_reduce))


def crossing(scaling: "Scaling") -> str:
    """Say where communication overtakes compute."""
    first, about = scaling.crossover, scaling.crossover_between
    if first is None:
        return f"compute takes longer than communication, up to {scaling.devices[-1]:,} devices"
    if about is None:
        return f"communication takes longer than compute on {first:,} devices and after"
    before = scaling.devices[np.searchsorted(scaling.devices, first) - 1]
    between = f"between {before:,} and {first:,} devices (about {about:,.0f})"
    return f"communication overtakes compute {between}"


def _sent(c: "Traffic") -> str:
    over = " and ".join(c.axes) or "unknown axes"
    number = c.num_bytes if c.kind == "all-gather" else c.operand_bytes
    return f"{c.runs:g} x {c.kind} of {number:,} bytes over {over} (compiled for {c.group_size})"


def seconds(value: float) -> str:
    """Write seconds in three digits with a unit: 12.3 us."""
    if value == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= 0.9995 * size:
            number = value / size
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def figure(prediction: "Prediction") -> "Figure":
    """Draw seconds against devices for strong scaling, and the efficiency of both scalings."""
    from matplotlib.figure import Figure  # Here, since the package is imported where nothing is drawn.

    model = prediction.model
    drawing = Figure(figsize=(12, 5.8), layout="constrained")
    left, right = drawing.subplots(1, 2)
    names = ", then ".join(link.name for link in model.interconnects)
    title = f"PREDICTION, not a measurement: one leapfrog along {model.axis!r} over {names}"
    drawing.suptitle(title, fontweight="bold")
    _draw_seconds(left, prediction.strong)
    _draw_efficiency(right, prediction)
    first, last = prediction.strong.devices[[0, -1]]
    full = [link for link in model.interconnects[:-1] if first < (link.max_devices or 0) < last]
    for axes, link in itertools.product((left, right), full):
        axes.axvline(link.max_devices, color=_IDEAL, lw=1, ls=(0, (1, 3)))
        name, across = f" {link.name} is full", axes.get_xaxis_transform()
        axes.text(link.max_devices, 0.01, name, transform=across, fontsize=8, color=_FAINT)
    missing = ", ".join(c.kind for c in model.not_modeled)
    footnote = (
        (f"NOT MODELED, not in these times: {missing}. " if missing else "")
        + f"Compute: {seconds(model.seconds_per_row)} a row + {seconds(model.fixed_seconds)}. "
        + f"No overlap, no contention. All-reduce: {_algorithm(model)}. "
        + "print(prediction) lists all that is assumed."
    )
    drawing.supxlabel(textwrap.fill(footnote, 160), fontsize=8, color=_FAINT)
    return drawing


def _draw_seconds(axes: "Axes", scaling: "Scaling") -> None:
    n, sends = scaling.devices, scaling.communication_seconds > 0
    alone = scaling.efficiency[0] * scaling.total_seconds[0] * n[0]
    shown = scaling.communication_seconds[sends]
    # Lines differ in style, too.
    axes.plot(n, alone / n, ":", color=_IDEAL, lw=2.5, label="ideal")
    axes.plot(n, scaling.compute_seconds, "s--", color=BLUE, ms=4, label="compute")
    axes.plot(n[sends], shown, "^-.", color=VERMILION, ms=5, label="communication")
    axes.plot(n, scaling.total_seconds, "o-", color="black", ms=4, lw=2, label="total")
    axes.set(yscale="log", ylabel="seconds a leapfrog")
    _device_axis(axes, n, "Strong scaling: seconds")
    _draw_crossing(axes, scaling)


def _draw_efficiency(axes: "Axes", prediction: "Prediction") -> None:
    strong, weak, rows = prediction.strong, prediction.weak, f"{prediction.model.num_rows:,} rows"
    n, in_all = strong.devices, f"strong: {rows} in all"
    axes.axhline(1, color=_IDEAL, ls=":", lw=2.5)
    axes.plot(n, weak.efficiency, "o-", color=GREEN, ms=4, lw=2, label=f"weak: {rows} each")
    axes.plot(n, strong.efficiency, "s--", color=PURPLE, ms=4, label=in_all)
    axes.set(ylim=(0, 1.08), ylabel="efficiency")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _device_axis(axes, n, "Efficiency of weak and strong scaling")
    sentence = textwrap.fill(f"weak scaling: {crossing(weak)}", 60)
    axes.set_xlabel(f"devices\n{sentence}")


def _device_axis(axes: "Axes", n: np.ndarray, title: str) -> None:
    axes.set_title(title, pad=26)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, fontsize=9, frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(n[:: 1 + len(n) // 14])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="x", rotation=45, labelsize=8)
    axes.set_xlabel("devices")
    axes.grid(alpha=0.25)


def _draw_crossing(axes: "Axes", scaling: "Scaling") -> None:
    """Say where communication overtakes, with an arrow to the place."""
    place, _, about = crossing(scaling).partition(" (")
    sentence = textwrap.fill(place, 32) + (f"\n({about}" if about else "")
    style = {"ha": "right", "va": "top", "fontsize": 9, "color": VERMILION, "bbox": _PAPER}
    corner = {"xytext": (0.98, 0.97), "textcoords": axes.transAxes}
    low, high = np.log(axes.get_ylim())
    axes.set_ylim(top=np.exp(high + 0.25 * (high - low)))  # the sentence hides no line
    if scaling.crossover is None:
        axes.text(0.98, 0.97, sentence, transform=axes.transAxes, **style)
        return
    n = scaling.crossover_between or scaling.crossover
    height = np.exp(np.interp(np.log(n), np.log(scaling.devices), np.log(scaling.compute_seconds)))
    arrow = {"arrowstyle": "->", "color": VERMILION, "shrinkB": 6}
    axes.annotate(sentence, (n, height), arrowprops=arrow, **corner, **style)
    axes.plot(n, height, "o", ms=11, mfc="none", mec=VERMILION, mew=1.5)
