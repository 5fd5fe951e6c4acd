"""The panels of a run's figures: what each shows, the colors of chains, and marks for what is wrong."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.views.figures import chain_comparison
from gspmd_mcmc.views.palette import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION

Traces = dict[str, np.ndarray]
Styles = list[dict[str, Any]]

# A grey takes the place of Okabe and Ito's yellow, which is faint on white.
COLORS = [BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, VERMILION, "#999999", "#000000"]
WARNING, GREY, WARMUP_SHADE, BAND = VERMILION, "0.78", "0.92", "0.9"
NUM_SINGLED_OUT = 3  # of many chains
OUTLINE_PARTS = 1000
LONG_TITLE = 36  # characters; longer titles are smaller
DOTTED = 20  # points at most of a line that is drawn with dots
LOW_BFMI = 0.3
MOST_LEVELS = 10


class Panels:
    """Axes to draw on: those given, or as many as needed on a figure of our own.

    A figure of our own has ``columns`` panels in a row, each (width, height) inches in size.
    """

    def __init__(self, axes: Any, count: int, columns: int, size: tuple[float, float]):
        self.is_own = axes is None
        if axes is None:
            columns = min(columns, count)
            rows = -(-count // columns)
            # A legend and a title need room, and so does a panel on its own.
            figure = new_figure(max(size[0] * columns, 6.0), size[1] * rows + 1.0)
            axes = figure.subplots(rows, columns, squeeze=False)
        given = as_list(axes)
        if len(given) < count:
            raise ValueError(f"axes: expected {count} axes, one a panel, got {len(given)}")
        self.axes = given[:count]
        self.figure = given[0].figure
        for spare in given[count:]:
            spare.remove() if self.is_own else spare.set_axis_off()

    def finish(self, title: str):
        """Give a figure of our own its title and its legend, given axes a legend; return the figure."""
        if self.is_own:
            self.figure.suptitle(title, fontsize=11)
            legend_below(self.figure, self.axes)
        elif (names := _legend(self.axes)) and not self.axes[0].get_legend():
            self.axes[0].legend(names.values(), names, loc="upper right", fontsize=7)
        return self.figure


def as_list(axes: Any) -> list[Any]:
    """Return axes, or an array of axes, as a list."""
    return list(np.asarray(axes, dtype=object).ravel())


def new_figure(width: float, height: float):
    """Return a figure that pyplot knows nothing of: no backend, no state, nothing to close."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def legend_below(figure: Any, axes: list[Any]) -> None:
    """Give a figure one legend of all that its panels name, except in legends of their own."""
    if names := _legend(axes):
        columns = min(len(names), 10)
        figure.legend(names.values(), names, loc="outside lower center", ncols=columns, fontsize=8)


def _legend(axes: list[Any]) -> dict[str, Any]:
    """Return labels with what they stand for, of all axes that have no legend."""
    names: dict[str, Any] = {}
    for axis in axes:
        if axis.get_legend() is None:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                names.setdefault(name, handle)
    return names


# Chains


def chain_styles(num_chains: int, scores: np.ndarray) -> Styles:
    """Return how to draw each chain's line: in color up to 8; of more, those of the largest scores."""
    if num_chains <= len(COLORS):
        return [
            {"color": COLORS[i], "lw": 0.7, "alpha": 0.8, "label": f"chain {i}"}
            for i in range(num_chains)
        ]
    styles: Styles = [{"color": GREY, "lw": 0.5, "alpha": 0.6} for _ in range(num_chains)]
    singled_out = sorted(np.argsort(-scores, kind="stable")[:NUM_SINGLED_OUT])
    for chain, color in zip(singled_out, COLORS, strict=False):
        styles[chain] = {"color": color, "lw": 0.6, "label": f"chain {chain}", "zorder": 3}
    others = next(style for style in reversed(styles) if "label" not in style)
    others["label"] = f"the other {num_chains - NUM_SINGLED_OUT} chains"
    return styles


def distance_of_chains(traces: Iterable[np.ndarray]) -> np.ndarray:
    """Return each chain's largest distance from the median chain mean, over the mean distance.

    Chains that are not finite are the furthest.
    """
    largest = 0.0
    for trace in traces:
        with np.errstate(invalid="ignore", over="ignore"):
            means = trace.mean(axis=1)
            center = np.median(means[np.isfinite(means)]) if np.isfinite(means).any() else 0.0
            distance = np.abs(means - center)
        finite = np.isfinite(distance)
        scale = np.mean(distance[finite]) if finite.any() else 0.0
        largest = np.maximum(largest, np.where(finite, distance / (scale or 1.0), np.inf))
    return np.asarray(largest)


def chain_list(is_in: np.ndarray) -> str:
    """Name the chains of a mask [chains]: ``chain 3``, ``chains 1, 4``, ``12 chains``."""
    (found,) = np.nonzero(is_in)
    if 1 < len(found) == len(is_in):
        return "all chains"
    if len(found) > 4:
        return f"{len(found)} chains"
    return ("chain " if len(found) == 1 else "chains ") + ", ".join(map(str, found))


def draw_lines(axis: Any, x: np.ndarray, y: np.ndarray, styles: Styles) -> None:
    """Draw one line a chain, y [chains, points]; gaps where it is not finite, long ones in outline."""
    marker = {"marker": ".", "ms": 4} if y.shape[1] <= DOTTED else {}
    for values, style in zip(np.where(np.isfinite(y), y, np.nan), styles, strict=True):
        kept = outline(values)
        axis.plot(x[kept], values[kept], **style, **marker)


def outline(values: np.ndarray) -> np.ndarray:
    """Return which points [points] to draw: all, or the lowest and highest of every thousandth part.

    No panel is wide enough to show the difference; 64 long chains are drawn in a fifth of the time.
    """
    width = -(-len(values) // OUTLINE_PARTS)
    if width <= 2:
        return np.arange(len(values))
    parts = np.pad(values, (0, -len(values) % width), mode="edge").reshape(-1, width)
    lowest = np.where(np.isnan(parts), np.inf, parts).argmin(axis=1)
    highest = np.where(np.isnan(parts), -np.inf, parts).argmax(axis=1)
    found = np.stack([lowest, highest]) + width * np.arange(len(parts))[None]
    return np.unique(np.minimum(found, len(values) - 1))


# Text


def label(axis: Any, title: str, x: str, notes: Iterable[str] = ()) -> None:
    """Write a panel's title, notes on a line below it, and what x is."""
    title = "\n".join(filter(None, (title, ", ".join(notes))))
    longest = max(map(len, title.splitlines()))
    axis.set_title(title, fontsize=9 if longest <= LONG_TITLE else 9 * LONG_TITLE / longest)
    axis.set_xlabel(x, fontsize=8)
    axis.tick_params(which="both", labelsize=7)


def say(axis: Any, text: str) -> None:
    """Write in the middle of a panel why it is empty."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=8)


# What panels show


def traces(axes: list[Any], elements: Traces, is_divergent: np.ndarray, styles: Styles) -> None:
    """Draw each element over draws, one a panel; ``is_divergent`` [chains, draws]."""
    rhats = chain_comparison.mixing(list(elements.values()))
    for axis, (name, values), rhat in zip(axes, elements.items(), rhats, strict=True):
        _warn_of_mixing(axis, values, rhat)
        levels = np.unique(values)
        is_whole = np.isfinite(values).all() and (levels == levels.round()).all()
        if is_whole and 2 <= len(levels) <= MOST_LEVELS:
            _draw_levels(axis, values, levels, styles)
        else:
            draw_lines(axis, np.arange(values.shape[1]), values, styles)
        is_bad = ~np.isfinite(values)
        _mark_draws(axis, is_divergent, 0.03, label="divergent", marker="|", color="black")
        _mark_draws(axis, is_bad, 0.95, label="NaN or inf", marker="x", ms=4, color=WARNING)
        notes = [f"{is_bad.sum()} not finite"] if is_bad.any() else []
        notes += ["constant"] if values.size > 1 and (values == values[0, 0]).all() else []
        label(axis, name, "draw", notes)


def _warn_of_mixing(axis: Any, values: np.ndarray, rhat: float) -> None:
    """Write in a corner what the eye cannot know: that chains have not mixed, or still drift."""
    drift = chain_comparison.drift(values)
    is_high = rhat > chain_comparison.most_rhat(values.shape[1])
    notes = [f"not mixed: R-hat {rhat:.2f}"] if is_high else []
    for sign, verb in ((-1, "falling"), (1, "rising")):
        notes += [f"still {verb}: {chain_list(drift == sign)}"] if (drift == sign).any() else []
    if notes:
        box = {"facecolor": "white", "edgecolor": WARNING, "alpha": 0.85, "boxstyle": "round,pad=0.25"}
        where = {"transform": axis.transAxes, "ha": "left", "va": "top", "zorder": 5}
        axis.text(0.015, 0.96, "\n".join(notes), **where, fontsize=7, color=WARNING, bbox=box)


def _draw_levels(axis: Any, y: np.ndarray, levels: np.ndarray, styles: Styles) -> None:
    """Draw numbers [chains, draws] of a few levels, as flags and counts, as dots; chains apart."""
    gap = np.diff(levels).min()
    for values, style, offset in zip(y, styles, np.linspace(0.35, -0.35, len(y)), strict=True):
        dots = {**style, "ls": "", "marker": ".", "ms": 8 / max(len(y), 4)}
        axis.plot(values + gap * offset * (len(y) > 1), **dots)
    axis.set_yticks(levels)


def _mark_draws(axis: Any, is_marked: np.ndarray, height: float, **style) -> None:
    """Mark some draws, [chains, draws], at a height of the panel in [0, 1]."""
    (x,) = np.nonzero(is_marked.any(axis=0))
    if len(x):
        transform = axis.get_xaxis_transform()
        axis.plot(x, np.full(len(x), height), ls="", transform=transform, mew=0.6, **style)


def ranks(axes: list[Any], elements: Traces, styles: Styles | None = None) -> None:
    """Draw each element's rank differences of chains, one a panel; without styles, by the largest."""
    found = {name: _compared(values) for name, values in elements.items()}
    num_chains = len(next(iter(elements.values())))
    if num_chains == 1:
        styles = chain_styles(2, np.zeros(2))
        styles[0]["label"], styles[1]["label"] = "first half", "second half"
    elif styles is None:
        scores = [difference.score for difference in found.values() if difference]
        styles = chain_styles(num_chains, np.max([np.zeros(num_chains), *scores], axis=0))
    for axis, (name, difference) in zip(axes, found.items(), strict=True):
        if difference:
            _rank_panel(axis, name if num_chains > 1 else f"{name}, its halves", difference, styles)
        else:
            label(axis, name, "fractional rank")
            has_nan = np.asarray(np.isnan(elements[name]).any(axis=1))
            is_nan = f"{chain_list(has_nan)}: NaN has no rank"
            say(axis, is_nan if has_nan.any() else "constant: no ranks")


def _compared(values: np.ndarray) -> chain_comparison.RankDifference | None:
    """Compare chains, or the halves of a single one; None if there is nothing to rank."""
    if np.isnan(values).any() or (values == values[0, 0]).all():
        return None
    if len(values) == 1:
        values = values[:, values.shape[1] % 2 :].reshape(2, -1)
    return chain_comparison.rank_difference(values)


def _rank_panel(axis: Any, name: str, found: chain_comparison.RankDifference, styles: Styles) -> None:
    notes = [f"one draw in {found.spacing}"] if found.spacing > 1 else []
    if found.half_width is None:
        notes += ["too correlated for a band"]
    else:
        band = (found.points, -found.half_width, found.half_width)
        axis.fill_between(*band, color=BAND, lw=0, label="99% band")
        notes += [f"outside: {chain_list(found.is_outside)}"] if found.is_outside.any() else []
    axis.axhline(0, color="black", lw=0.5)
    draw_lines(axis, found.points, found.difference, styles)
    label(axis, name, "fractional rank", notes)


def autocorrelations(
    axes: list[Any], elements: Traces, max_lag: int, styles: Styles | None = None
) -> None:
    """Draw each element's autocorrelation of chains, one a panel; without styles, by the largest."""
    num_chains, num_draws = next(iter(elements.values())).shape
    lags = np.arange(min(max_lag, num_draws // 2) + 1)
    found = {name: chain_comparison.autocorrelation(x)[:, lags] for name, x in elements.items()}
    if styles is None:
        scores = np.max([np.abs(np.nan_to_num(x)).sum(axis=1) for x in found.values()], axis=0)
        styles = chain_styles(num_chains, scores)
    limit = 1.96 / np.sqrt(num_draws)
    for axis, (name, values) in zip(axes, found.items(), strict=True):
        has_none = np.isnan(values[:, 0])
        missing = f"{chain_list(has_none)}: constant or not finite"
        if has_none.all():
            label(axis, name, "lag, draws")
            say(axis, missing)
            continue
        label(axis, name, "lag, draws", [missing] if has_none.any() else [])
        axis.axhspan(-limit, limit, color=BAND, lw=0, label="95% band of independent draws")
        axis.axhline(0, color="black", lw=0.5)
        draw_lines(axis, lags, values, styles)


def energies(axes: list[Any], values: np.ndarray, draws: Any) -> None:
    """Draw histograms of energies [chains, draws] and of their changes, and BFMI of each chain."""
    energies, is_thinned = values.astype(np.float64), draws.thin > 1
    _bfmi_panel(axes[1], draws.bfmi if is_thinned else chain_comparison.energy_fractions(energies))
    axis, finite = axes[0], energies[np.isfinite(energies)]
    with np.errstate(invalid="ignore"):
        changes = np.diff(energies, axis=1)
    changes = changes[np.isfinite(changes)]
    if not len(changes) or not np.ptp(finite):
        label(axis, "energy", "nat")
        say(axis, "fewer than two different finite energies")
        return
    centered = finite - finite.mean()
    # The few that are further out than these quantiles would leave no bins for the others.
    low, high = np.quantile(np.concatenate([centered, changes]), [0.001, 0.999])
    bins = np.linspace(low, high, 61)
    of_changes = f"its changes over {draws.thin} steps" if is_thinned else "its changes"
    for x, color, name in ((centered, BLUE, "energy, less its mean"), (changes, ORANGE, of_changes)):
        axis.hist(x, bins, density=True, color=color, alpha=0.35, histtype="stepfilled", label=name)
        axis.hist(x, bins, density=True, color=color, histtype="step", lw=1.2)
    resolution = float(jnp.finfo(values.dtype).eps) * float(np.abs(finite).max())
    is_coarse = resolution > 0.1 * centered.std()
    label(axis, f"energy, rounded to {resolution:.1g}" if is_coarse else "energy", "nat")
    axis.set_yticks([])
    axis.margins(y=0.25)
    axis.legend(fontsize=7, loc="upper right", frameon=False)


def _bfmi_panel(axis: Any, values: np.ndarray) -> None:
    is_low, chains = values < LOW_BFMI, np.arange(len(values))
    axis.plot(values, chains, "o", ms=4, color=BLUE)
    axis.plot(values[is_low], chains[is_low], "D", ms=5, color=WARNING)
    axis.axvline(LOW_BFMI, color="black", ls="--", lw=0.8)
    axis.set_xlim(0, max(1.2, 1.1 * np.max(values, where=np.isfinite(values), initial=0.0)))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_yticks(np.unique(np.linspace(0, chains[-1], 8).round()))
    notes = [f"low: {chain_list(is_low)}"] if is_low.any() else []
    notes += [f"none for {chain_list(np.isnan(values))}"] if np.isnan(values).any() else []
    label(axis, "BFMI of each chain", f"below {LOW_BFMI}: slow in energy", notes)
    axis.set_ylabel("chain", fontsize=8)


def warmup(axes: list[Any], draws: Any, after: np.ndarray, styles: Styles) -> None:
    """Draw log density, with that of the draws ``after`` [chains, draws], step size and acceptance."""
    before = np.asarray(draws.warmup["log_density"], np.float64)
    _log_density_panel(axes[0], before, after, styles)
    if not before.size:
        for axis, what in zip(axes[1:], ("step size", "acceptance rate"), strict=True):
            say(axis, f"no warm-up: no {what} to show")
        return
    sizes, kept = np.asarray(draws.warmup["step_size"], np.float64), float(draws.kernel.step_size)
    axes[1].plot(np.where(sizes > 0, sizes, np.nan), color=BLUE, lw=0.8)
    axes[1].axhline(kept, color="black", ls="--", lw=0.9)
    axes[1].set_yscale("log")
    label(axes[1], f"step size; dashed: kept, {kept:.3g}", "step")
    rates = np.asarray(draws.warmup["acceptance_rate"], np.float64)
    width = max(rates.shape[1] // 20, 1)
    means = np.lib.stride_tricks.sliding_window_view(rates, width, axis=1).mean(axis=2)
    steps = np.arange(width - 1, rates.shape[1])
    draw_lines(axes[2], steps, means, styles)
    axes[2].plot(steps, means.mean(axis=0), color="black", lw=1.4, zorder=4, label="mean of all")
    axes[2].set_ylim(0, 1.02)
    name = f"acceptance rate, mean of {width} steps" if width > 1 else "acceptance rate"
    label(axes[2], name, "step")


def _log_density_panel(axis: Any, before: np.ndarray, after: np.ndarray, styles: Styles) -> None:
    """Draw log densities [chains, steps] of warm-up and then of the draws, warm-up on grey.

    The panel shows the range from the middle of warm-up on; the way from a far start would hide it.
    """
    values = np.concatenate([before, after], axis=1)
    draw_lines(axis, np.arange(values.shape[1]), values, styles)
    settled = values[:, before.shape[1] // 2 :]
    settled = settled[np.isfinite(settled)]
    if len(settled) and np.ptp(settled):
        margin = 0.3 * np.ptp(settled)
        axis.set_ylim(settled.min() - margin, settled.max() + margin)
    if before.size and after.size:
        axis.axvspan(0, before.shape[1], color=WARMUP_SHADE, zorder=0)
        label(axis, "log density, warm-up on grey", "step of warm-up, then draw")
    else:
        label(axis, "log density", "step" if before.size else "draw")
