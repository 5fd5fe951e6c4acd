"""What is drawn into the panels of each figure of a run."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.views.colours import BLUE, ORANGE
from gspmd_mcmc.views.figures import numbers
from gspmd_mcmc.views.figures.panels import (
    WARMUP_SHADE,
    WARNING,
    chain_styles,
    draw_levels,
    draw_lines,
    label,
    listed,
    mark_draws,
    remark,
    say,
)

Traces = dict[str, np.ndarray]
Styles = list[dict[str, Any]]
LOW_BFMI = 0.3
MOST_LEVELS = 10


def traces(axes: list[Any], elements: Traces, is_divergent: np.ndarray, styles: Styles) -> None:
    """Draw each element over draws, one a panel; ``is_divergent`` [chains, draws]."""
    num_draws = next(iter(elements.values())).shape[1]
    found = numbers.mixing(list(elements.values()))
    for axis, (name, values), rhat in zip(axes, elements.items(), found, strict=True):
        remark(axis, _on_mixing(values, rhat))
        levels = _levels(values)
        if levels is None:
            draw_lines(axis, np.arange(num_draws), values, styles)
        else:
            draw_levels(axis, values, levels, styles)
        is_bad = ~np.isfinite(values)
        mark_draws(axis, is_divergent, height=0.03, label="divergent", marker="|", color="black")
        mark_draws(axis, is_bad, height=0.95, label="NaN or inf", marker="x", ms=4, color=WARNING)
        notes = [f"{is_bad.sum()} not finite"] if is_bad.any() else []
        notes += ["constant"] if values.size > 1 and (values == values[0, 0]).all() else []
        label(axis, _titled(name, notes), "draw")


def _on_mixing(values: np.ndarray, rhat: float) -> str:
    """Say of a trace what the eye cannot know: that chains have not mixed, or still go somewhere."""
    drift = numbers.drift(values)
    notes = [f"not mixed: R-hat {rhat:.2f}"] if rhat > numbers.most_rhat(values.shape[1]) else []
    for sign, verb in ((-1, "falling"), (1, "rising")):
        notes += [f"still {verb}: {listed(drift == sign)}"] if (drift == sign).any() else []
    return "\n".join(notes)


def _levels(values: np.ndarray) -> np.ndarray | None:
    """Return the values of a trace if they are 2 to 10 whole numbers, as of flags and counts."""
    if not (np.isfinite(values) & (values == values.round())).all():
        return None
    levels = np.unique(values)
    return levels if 2 <= len(levels) <= MOST_LEVELS else None


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
            say(axis, f"{listed(has_nan)}: NaN has no rank" if has_nan.any() else "constant: no ranks")


def _compared(values: np.ndarray) -> numbers.RankDifference | None:
    """Compare chains, or the halves of a single one; None if there is nothing to rank."""
    if np.isnan(values).any() or (values == values[0, 0]).all():
        return None
    if len(values) == 1:
        values = values[:, values.shape[1] % 2 :].reshape(2, -1)
    return numbers.rank_difference(values)


def _rank_panel(axis: Any, name: str, found: numbers.RankDifference, styles: Styles) -> None:
    notes = [f"one draw in {found.spacing}"] if found.spacing > 1 else []
    if found.half_width is None:
        notes += ["too correlated for a band"]
    else:
        band = (found.points, -found.half_width, found.half_width)
        axis.fill_between(*band, color="0.9", lw=0, label="99% band")
        notes += [f"outside: {listed(found.is_outside)}"] if found.is_outside.any() else []
    axis.axhline(0, color="black", lw=0.5)
    draw_lines(axis, found.points, found.difference, styles)
    label(axis, _titled(name, notes), "fractional rank")


def autocorrelations(
    axes: list[Any], elements: Traces, max_lag: int, styles: Styles | None = None
) -> None:
    """Draw each element's autocorrelation of chains, one a panel; without styles, by the largest."""
    num_chains, num_draws = next(iter(elements.values())).shape
    lags = np.arange(min(max_lag, num_draws // 2) + 1)
    found = {name: numbers.autocorrelation(x)[:, lags] for name, x in elements.items()}
    if styles is None:
        scores = np.max([np.abs(np.nan_to_num(x)).sum(axis=1) for x in found.values()], axis=0)
        styles = chain_styles(num_chains, scores)
    limit = 1.96 / np.sqrt(num_draws)
    for axis, (name, values) in zip(axes, found.items(), strict=True):
        has_none = np.isnan(values[:, 0])
        missing = [f"{listed(has_none)}: constant or not finite"] if has_none.any() else []
        if has_none.all():
            label(axis, name, "lag, draws")
            say(axis, missing[0])
            continue
        label(axis, _titled(name, missing), "lag, draws")
        axis.axhspan(-limit, limit, color="0.9", lw=0, label="95% band of independent draws")
        axis.axhline(0, color="black", lw=0.5)
        draw_lines(axis, lags, values, styles)


def energies(axes: list[Any], values: np.ndarray) -> None:
    """Draw histograms of energies [chains, draws] and of their changes, and BFMI of each chain."""
    _energy_panel(axes[0], values)
    _bfmi_panel(axes[1], numbers.bfmi(values.astype(np.float64)))


def _energy_panel(axis: Any, values: np.ndarray) -> None:
    energies = values.astype(np.float64)
    finite = energies[np.isfinite(energies)]
    with np.errstate(invalid="ignore"):
        changes = np.diff(energies, axis=1)
    changes = changes[np.isfinite(changes)]
    if not len(changes) or not np.ptp(finite):
        label(axis, "energy", "nat")
        return say(axis, "fewer than two different finite energies")
    away = finite - finite.mean()
    # The few that are further out than these quantiles would leave no bins for the others.
    low, high = np.quantile(np.concatenate([away, changes]), [0.001, 0.999])
    bins = np.linspace(low, high, 61)
    for x, color, name in ((away, BLUE, "energy, less its mean"), (changes, ORANGE, "its changes")):
        axis.hist(x, bins, density=True, color=color, alpha=0.35, histtype="stepfilled", label=name)
        axis.hist(x, bins, density=True, color=color, histtype="step", lw=1.2)
    resolution = float(jnp.finfo(values.dtype).eps) * float(np.abs(finite).max())
    is_coarse = resolution > 0.1 * away.std()
    label(axis, f"energy, rounded to {resolution:.1g}" if is_coarse else "energy", "nat")
    axis.set_yticks([])
    axis.margins(y=0.25)
    return axis.legend(fontsize=7, loc="upper right", frameon=False)


def _bfmi_panel(axis: Any, values: np.ndarray) -> None:
    is_low, chains = values < LOW_BFMI, np.arange(len(values))
    axis.plot(values, chains, "o", ms=4, color=BLUE)
    axis.plot(values[is_low], chains[is_low], "D", ms=5, color=WARNING)
    axis.axvline(LOW_BFMI, color="black", ls="--", lw=0.8)
    axis.set_xlim(0, max(1.2, 1.1 * np.max(values, where=np.isfinite(values), initial=0.0)))
    axis.set_ylim(len(values) - 0.5, -0.5)
    axis.set_yticks(np.unique(np.linspace(0, chains[-1], 8).round()))
    notes = [f"low: {listed(is_low)}"] if is_low.any() else []
    notes += [f"none for {listed(np.isnan(values))}"] if np.isnan(values).any() else []
    label(axis, _titled("BFMI of each chain", notes), f"below {LOW_BFMI}: slow in energy")
    axis.set_ylabel("chain", fontsize=8)


def _titled(name: str, notes: list[str]) -> str:
    """Put notes on a line below a name."""
    return "\n".join([name, ", ".join(notes)]) if notes else name


def step_size(axis: Any, sizes: np.ndarray, kept: float) -> None:
    """Draw the step sizes [steps] of warm-up, and the one that was kept."""
    axis.plot(np.where(sizes > 0, sizes, np.nan), color=BLUE, lw=0.8)
    axis.axhline(kept, color="black", ls="--", lw=0.9)
    axis.set_yscale("log")
    label(axis, f"step size; dashed: kept, {kept:.3g}", "step")


def acceptance(axis: Any, rates: np.ndarray, styles: Styles) -> None:
    """Draw running means of acceptance rates [chains, steps]."""
    num_steps = rates.shape[1]
    width = max(num_steps // 20, 1)
    sums = np.cumsum(np.pad(rates, ((0, 0), (1, 0))), axis=1)
    means = (sums[:, width:] - sums[:, :-width]) / width
    steps = np.arange(width - 1, num_steps)
    draw_lines(axis, steps, means, styles)
    axis.plot(steps, means.mean(axis=0), color="black", lw=1.4, zorder=4, label="mean of all")
    axis.set_ylim(0, 1.02)
    label(axis, f"acceptance rate, mean of {width} steps" if width > 1 else "acceptance rate", "step")


def log_density(axis: Any, before: np.ndarray, after: np.ndarray, styles: Styles) -> None:
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
