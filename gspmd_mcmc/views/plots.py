"""Figures of a run: its traces, ranks, energies, autocorrelation and warm-up.

Each function takes `Draws` and returns a matplotlib ``Figure`` (``figure.savefig("run.png")``), or
draws on axes that it is given. Of large leaves a few elements are drawn, ``names`` says which, and they
alone leave the devices. Pyplot is not used: nothing is shown, and no figure needs to be closed.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gspmd_mcmc.views.figures import panels
from gspmd_mcmc.views.figures.panels import Panels, as_list, chain_styles, distance_of_chains
from gspmd_mcmc.views.figures.selection import Elements, choose, require_draws

Names = str | Sequence[str] | None
ROOM = 4  # elements in an overview
MAX_LAG = 100


def trace(draws: Any, names: Names = None, *, max_panels: int = 12, axes: Any = None):
    """Draw values over draws, a line for each chain.

    Divergent transitions are ticks at the bottom, values that are not finite crosses at the top. Of
    more than 8 chains, the 3 whose means are furthest off are colored, the others grey. Of more than
    2000 draws, the lowest and the highest in every thousandth part are drawn. A panel says so where
    chains have not mixed (R-hat above 1.05, or 1 + 5 / draws), and which of them still rise or fall.

    Parameters
    ----------
    draws
        `Draws`, or what has their attributes.
    names
        Leaves (``"w"``), parts of them (``"w[3]"``), elements (``"w[3, 2]"``) or stats (``"energy"``),
        one or several; leaves of a nested tree are named as in ``draws.to_datatree()``. By default
        the log density, and of every leaf as many elements as there is room for, evenly spread.
    max_panels
        Panels at most, unless more elements are named one by one.
    axes
        Axes to draw on; without names, as many elements are chosen as there are axes.

    Returns
    -------
    matplotlib.figure.Figure
        The figure, or that of the axes.

    Raises
    ------
    ValueError, TypeError
        If there are no draws, a name is not there or not of real numbers, or axes are too few.
    """
    elements = _chosen(draws, names, max_panels, axes)
    canvas = Panels(axes, len(elements.traces), 3, (4.4, 1.9))
    styles = chain_styles(draws.num_chains, distance_of_chains(elements.traces.values()))
    panels.traces(canvas.axes, elements.traces, _is_divergent(draws), styles)
    return canvas.finish(_title("traces", draws, elements.note))


def rank(draws: Any, names: Names = None, *, max_panels: int = 12, axes: Any = None):
    """Compare chains by the ranks of their draws among the draws of all (Vehtari et al. 2021).

    For each chain, the ECDF of its fractional ranks less that of the uniform distribution. Chains of
    one distribution stay in the band, at all points at once, with probability 0.99 (Säilynoja et al.
    2022): of 100 panels one shows a chain outside by chance. The band is for independent draws; where
    draws are correlated, one in several is ranked, and the title says so. The halves of a single chain
    are compared with each other. Of more than 8 chains, the 3 with the
    largest differences are colored.

    Parameters and errors are those of `trace`.

    References
    ----------
    Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021), "Rank-normalization, folding, and
    localization", Bayesian Analysis 16(2). Säilynoja, Bürkner and Vehtari (2022), "Graphical test for
    discrete uniformity", Statistics and Computing 32:32.
    """
    elements = _chosen(draws, names, max_panels, axes)
    canvas = Panels(axes, len(elements.traces), 4, (3.3, 2.2))
    panels.ranks(canvas.axes, elements.traces)
    return canvas.finish(_title("ranks, ECDF of each chain less uniform", draws, elements.note))


def autocorrelation(
    draws: Any, names: Names = None, *, max_lag: int = MAX_LAG, max_panels: int = 12, axes: Any = None
):
    """Draw the autocorrelation of each chain up to ``max_lag`` draws, or half of them.

    Of independent draws 95% of the lags lie in the band, ±1.96 over the square root of the number of
    draws (Brockwell and Davis 1991, "Time Series: Theory and Methods", section 7.2). Of more than 8
    chains, the 3 with the largest autocorrelations are colored.

    Other parameters and errors are those of `trace`.
    """
    if max_lag < 1:
        raise ValueError(f"max_lag: expected a number of draws of at least 1, got {max_lag}")
    elements = _chosen(draws, names, max_panels, axes)
    canvas = Panels(axes, len(elements.traces), 4, (3.3, 2.2))
    panels.autocorrelations(canvas.axes, elements.traces, max_lag)
    return canvas.finish(_title("autocorrelation", draws, elements.note))


def energy(draws: Any, *, axes: Any = None):
    """Compare how energies spread with how much they change from draw to draw.

    Two panels: histograms of energies and of their changes, and each chain's BFMI, the ratio of their
    sums of squares (Betancourt 2016, arXiv:1604.00695). Changes much narrower than the spread, and
    BFMI below 0.3, mean that a chain walks slowly through its energies. Of thinned draws the histogram
    has changes over several steps; BFMI is that of every step.

    Parameters
    ----------
    draws
        `Draws` of a kernel whose info has ``energy``.
    axes
        Two axes; None makes a figure.

    Raises
    ------
    ValueError
        If there are no draws, or no energies among the stats.
    """
    canvas = Panels(axes, 2, 2, (4.8, 3.0))
    panels.energies(canvas.axes, _energies(draws), draws)
    return canvas.finish(_title("energy", draws, ""))


def warmup(draws: Any, *, axes: Any = None):
    """Draw log density, step size and acceptance rate over the steps of warm-up.

    The log density is shown in the range that it has in the second half. The dashed line is the step
    size that was kept. Acceptance rates are running means, over as many steps as the title says.

    Parameters
    ----------
    draws
        `Draws`; there may be no draws in them.
    axes
        Three axes; None makes a figure.

    Raises
    ------
    ValueError
        If the run had no warm-up.
    """
    num_steps = _num_warmup(draws)
    if not num_steps:
        raise ValueError(
            "draws: expected a run with steps of warm-up, got none (num_warmup=0, or a run that "
            "continues earlier draws, which hold its warm-up)"
        )
    canvas = Panels(axes, 3, 3, (4.4, 2.4))
    before = np.asarray(draws.warmup["log_density"], np.float64)
    styles = chain_styles(draws.num_chains, distance_of_chains([before]))
    panels.warmup(canvas.axes, draws, np.zeros((draws.num_chains, 0)), styles)
    num_divergent = int(np.sum(draws.warmup["num_divergent"]))
    return canvas.finish(f"warm-up: {_chains(draws)} x {num_steps} steps, {num_divergent} divergent")


def overview(draws: Any, names: Names = None):
    """Draw a run at a glance: one figure of all that there is to look at first.

    Above the log density from the first step on, and step size and acceptance rate over warm-up; then
    traces of four elements; below energies, BFMI, and ranks and autocorrelation of the log density. Of
    more than 8 chains, the 3 whose means are furthest off are colored.

    Parameters and errors are those of `trace`; ``names`` are for the traces in the middle.
    """
    elements = choose(draws, names, ROOM + 1 if names is None else ROOM)
    traces = dict(list(elements.traces.items())[names is None :]) or elements.traces
    if len(traces) > ROOM:
        raise ValueError(
            f"names: overview has room for {ROOM} elements, got {len(traces)}; use plots.trace"
        )
    figure = panels.new_figure(14.0, 8.0)
    cells = figure.add_gridspec(3, 4)
    above = [figure.add_subplot(cells[0, columns]) for columns in (slice(2), 2, 3)]
    middle = [figure.add_subplot(cells[1, column]) for column in range(len(traces))]
    below = [figure.add_subplot(cells[2, column]) for column in range(4)]
    log_density = np.asarray(draws.stats["log_density"], np.float64)
    # Where chains are singled out, a color means the same chain in all panels.
    styles = chain_styles(draws.num_chains, distance_of_chains([log_density, *traces.values()]))
    panels.warmup(above, draws, log_density, styles)
    panels.traces(middle, traces, _is_divergent(draws), styles)
    if "energy" in draws.stats:
        panels.energies(below[:2], _energies(draws), draws)
    else:
        panels.say(below[0], "this kernel reports no energies")
        below[1].set_axis_off()
    panels.ranks(below[2:3], {"ranks of log density": log_density}, styles)
    panels.autocorrelations(below[3:], {"autocorrelation of log density": log_density}, MAX_LAG, styles)
    panels.legend_below(figure, [*middle, *above])
    figure.suptitle(_headline(draws, elements.note), fontsize=11)
    return figure


def datatree(draws: Any, names: Names = None, *, max_elements: int = 100):
    """Return an ArviZ ``DataTree`` of some elements alone, for ArviZ's own statistics and plots.

    ``arviz_stats.summary(plots.datatree(draws))`` and its like take it, also where the whole of
    `Draws.to_datatree` would not fit on the host. A variable is named as its element, ``w[3, 2]``.
    Needs the extra ``arviz``.

    Parameters and errors are those of `trace`; at most ``max_elements`` are chosen.
    """
    try:
        arviz_base = importlib.import_module("arviz_base")
    except ImportError as error:
        raise ImportError("arviz_base is missing: pip install 'gspmd_mcmc[arviz]' brings it") from error
    elements = _chosen(draws, names, max_elements, None)
    renamed = {"is_divergent": "diverging", "log_density": "lp"}
    stats = {renamed.get(name, name): np.asarray(x) for name, x in draws.stats.items()}
    return arviz_base.from_dict({"posterior": elements.traces, "sample_stats": stats})


def _chosen(draws: Any, names: Names, max_panels: int, axes: Any) -> Elements:
    if max_panels < 1:
        raise ValueError(f"max_panels: expected at least 1, got {max_panels}")
    return choose(draws, names, max_panels if axes is None else len(as_list(axes)))


def _is_divergent(draws: Any) -> np.ndarray:
    return np.asarray(draws.stats.get("is_divergent", np.zeros((1, 0))), bool)


def _energies(draws: Any) -> np.ndarray:
    require_draws(draws)
    if "energy" not in draws.stats:
        raise ValueError(f"draws: this run's stats have no energy; there are {', '.join(draws.stats)}")
    return np.asarray(draws.stats["energy"])


def _headline(draws: Any, note: str) -> str:
    rates = np.asarray(draws.stats["acceptance_rate"], np.float64).mean(axis=1)
    spread = f" ({rates.min():.2f} to {rates.max():.2f})" if len(rates) > 1 else ""
    size = f"{_chains(draws)} x {draws.num_draws} draws, {_num_warmup(draws)} steps of warm-up"
    fate = f"acceptance {rates.mean():.2f}{spread}, {int(_is_divergent(draws).sum())} divergent"
    return "; ".join([size, fate, *([f"traces: {note}"] if note else [])])


def _num_warmup(draws: Any) -> int:
    return len(draws.warmup["step_size"])


def _chains(draws: Any) -> str:
    return f"{draws.num_chains} chain{'s' if draws.num_chains > 1 else ''}"


def _title(what: str, draws: Any, note: str) -> str:
    size = f"{_chains(draws)} x {draws.num_draws} draws"
    return f"{what}: {size}" + (f"; {note}" if note else "")
