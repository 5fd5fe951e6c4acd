"""What all figures of a run share: panels, colours of chains, marks for what is out of order."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from gspmd_mcmc.views.colours import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILION

# A grey takes the place of Okabe and Ito's yellow, which is faint on white.
COLORS = [BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, VERMILION, "#999999", "#000000"]
WARNING, GREY = VERMILION, "0.78"
NUM_SINGLED_OUT = 3
WARMUP_SHADE = "0.92"
OUTLINE_PARTS = 1000
LONG_TITLE = 36  # characters of the size of others; longer ones are smaller
DOTTED = 20  # lines of at most so many points are drawn with dots


class Panels:
    """Axes to draw on: those given, or as many as needed on a figure of our own.

    Parameters
    ----------
    axes
        Axes or an array of them; None makes a figure.
    count
        Panels that are needed.
    columns, size
        Of a figure of our own: panels in a row, and (width, height) of each in inches.

    Raises
    ------
    ValueError
        If there are fewer axes than panels.
    """

    def __init__(self, axes: Any, count: int, columns: int, size: tuple[float, float]):
        self.is_own = axes is None
        given = _own_axes(count, columns, size) if axes is None else as_list(axes)
        if len(given) < count:
            raise ValueError(f"axes: expected {count} axes, one a panel, got {len(given)}")
        self.axes = given[:count]
        self.figure = given[0].figure
        for spare in given[count:]:
            spare.set_axis_off()

    def finish(self, title: str):
        """Give a figure of our own its title and its legend, given axes a legend; return the figure."""
        if self.is_own:
            self.figure.suptitle(title, fontsize=11)
            legend_below(self.figure, self.axes)
        elif (names := _legend(self.axes)) and not self.axes[0].get_legend():
            self.axes[0].legend(names.values(), names, loc="upper right", fontsize=7)
        return self.figure


def legend_below(figure: Any, axes: list[Any]) -> None:
    """Give a figure one legend of all that its panels name, less what their own legends do."""
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


def as_list(axes: Any) -> list[Any]:
    """Return axes, or an array of axes, as a list."""
    return list(np.asarray(axes, dtype=object).ravel())


def new_figure(width: float, height: float):
    """Return a figure that pyplot knows nothing of: no backend, no state, nothing to close."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _own_axes(count: int, columns: int, size: tuple[float, float]) -> list[Any]:
    columns = min(columns, count)
    rows = -(-count // columns)
    # A legend and a title need room, and so does a panel on its own.
    figure = new_figure(max(size[0] * columns, 6.0), size[1] * rows + 1.0)
    made = as_list(figure.subplots(rows, columns, squeeze=False))
    for spare in made[count:]:
        spare.remove()
    return made[:count]


def chain_styles(num_chains: int, scores: np.ndarray) -> list[dict[str, Any]]:
    """Return how to draw the line of each chain.

    Up to 8 chains have a colour each. Of more, those with the largest scores have one, by their
    number in the legend, and the others are grey.
    """
    if num_chains <= len(COLORS):
        return [
            {"color": COLORS[i], "lw": 0.7, "alpha": 0.8, "label": f"chain {i}"}
            for i in range(num_chains)
        ]
    styles: list[dict[str, Any]] = [{"color": GREY, "lw": 0.5, "alpha": 0.6} for _ in range(num_chains)]
    singled_out = sorted(np.argsort(-scores, kind="stable")[:NUM_SINGLED_OUT])
    for chain, color in zip(singled_out, COLORS, strict=False):
        styles[chain] = {"color": color, "lw": 0.6, "label": f"chain {chain}", "zorder": 3}
    others = next(style for style in reversed(styles) if "label" not in style)
    others["label"] = f"the other {num_chains - NUM_SINGLED_OUT} chains"
    return styles


def distance_of_chains(traces: Iterable[np.ndarray]) -> np.ndarray:
    """Return how far the mean of each chain is off, over the mean distance, where it is most.

    Chains that are not finite are the furthest.
    """
    largest = 0.0
    for trace in traces:
        with np.errstate(invalid="ignore", over="ignore"):
            means = trace.mean(axis=1)
            away = np.abs(
                means - np.median(means[np.isfinite(means)] if np.isfinite(means).any() else 0)
            )
        finite = np.isfinite(away)
        scale = np.mean(away[finite]) if finite.any() else 0.0
        largest = np.maximum(largest, np.where(finite, away / (scale or 1.0), np.inf))
    return np.asarray(largest)


def draw_levels(axis: Any, y: np.ndarray, levels: np.ndarray, styles: list[dict[str, Any]]) -> None:
    """Draw numbers [chains, draws] of a few levels as dots, chains a little above each other."""
    gap = np.diff(levels).min()
    for values, style, offset in zip(y, styles, np.linspace(0.35, -0.35, len(y)), strict=True):
        dots = {**style, "ls": "", "marker": ".", "ms": 8 / max(len(y), 4)}
        axis.plot(values + gap * offset * (len(y) > 1), **dots)
    axis.set_yticks(levels)


def draw_lines(axis: Any, x: np.ndarray, y: np.ndarray, styles: list[dict[str, Any]]) -> None:
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


def mark_draws(axis: Any, is_marked: np.ndarray, *, height: float, **style) -> None:
    """Mark some draws, [chains, draws], at a height of the panel in [0, 1]."""
    (x,) = np.nonzero(is_marked.any(axis=0))
    if len(x):
        transform = axis.get_xaxis_transform()
        axis.plot(x, np.full(len(x), height), ls="", transform=transform, mew=0.6, **style)


def label(axis: Any, title: str, x: str) -> None:
    """Write a panel's title, and below it what x is."""
    longest = max(map(len, title.splitlines()))
    axis.set_title(title, fontsize=9 if longest <= LONG_TITLE else 9 * LONG_TITLE / longest)
    axis.set_xlabel(x, fontsize=8)
    axis.tick_params(which="both", labelsize=7)


def remark(axis: Any, text: str) -> None:
    """Write a warning into the upper left corner of a panel."""
    if text:
        box = {"facecolor": "white", "edgecolor": WARNING, "alpha": 0.85, "boxstyle": "round,pad=0.25"}
        where = {"transform": axis.transAxes, "ha": "left", "va": "top", "zorder": 5}
        axis.text(0.015, 0.96, text, **where, fontsize=7, color=WARNING, bbox=box)


def say(axis: Any, text: str) -> None:
    """Write in the middle of a panel why it is empty."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", fontsize=8)


def listed(chains: np.ndarray) -> str:
    """Write which chains, of a mask [chains]: ``chain 3``, ``chains 1, 4``, ``12 chains``."""
    (found,) = np.nonzero(chains)
    if 1 < len(found) == len(chains):
        return "all chains"
    if len(found) > 4:
        return f"{len(found)} chains"
    return ("chain " if len(found) == 1 else "chains ") + ", ".join(map(str, found))
