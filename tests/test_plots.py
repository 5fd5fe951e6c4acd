"""Figures of a run: the numbers behind them against direct calculations, and what they show."""

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from arviz_stats.summary import summary
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from scipy.stats import hypergeom, rankdata

import gspmd_mcmc as gm
from gspmd_mcmc import plots
from gspmd_mcmc.views.figures import chain_comparison, selection
from gspmd_mcmc.views.figures import panels as plots_panels

ALL = ("trace", "rank", "autocorrelation", "energy", "warmup", "overview")
OF_ELEMENTS = ("trace", "rank", "autocorrelation")


def made(num_chains: int = 3, num_draws: int = 40, num_warmup: int = 30, **position: Any) -> Any:
    """Draws made up of random numbers; of the position, those given or one vector."""
    rng = np.random.default_rng(0)
    sizes = num_chains, num_draws
    stats = {
        "acceptance_rate": rng.random(sizes, np.float32),
        "is_divergent": np.zeros(sizes, bool),
        "energy": rng.normal(50, 3, sizes).astype(np.float32),
        "log_density": rng.normal(-40, 2, sizes).astype(np.float32),
    }
    warmup = {
        "step_size": rng.random(num_warmup) + 0.1,
        "acceptance_rate": rng.random((num_chains, num_warmup)),
        "log_density": rng.normal(size=(num_chains, num_warmup)),
        "num_divergent": np.arange(num_chains),
        "leapfrogs": 90,
    }
    return SimpleNamespace(
        position=position or {"x": rng.normal(size=(*sizes, 5))},
        stats=stats,
        warmup=warmup,
        kernel=SimpleNamespace(step_size=np.float32(0.25)),
        thin=1,
        num_chains=num_chains,
        num_draws=num_draws,
    )


def normal(*shape, seed=1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def correlated(num_chains, num_draws, coefficient=0.9, seed=2) -> np.ndarray:
    """Chains of an autoregression of order one, stationary from the start."""
    noise = normal(num_chains, num_draws, seed=seed)
    noise[:, 0] /= np.sqrt(1 - coefficient**2)
    for i in range(1, num_draws):
        noise[:, i] += coefficient * noise[:, i - 1]
    return noise


def panels(figure) -> dict[str, Any]:
    """Panels by the first line of their title."""
    return {axis.get_title().split("\n")[0]: axis for axis in figure.axes}


def lines(axis) -> dict[str, Any]:
    return {line.get_label(): line for line in axis.get_lines()}


def legend_of(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def draw(figure) -> None:
    """Render, as saving would: layout and text can fail only then."""
    figure.canvas.draw()


@pytest.fixture(scope="module")
def run() -> gm.Draws:
    """A small density, 4 chains over 2 x 4 devices."""
    mesh = gm.make_mesh(chains=2, data=4)
    target = gm.LogDensity(standard_normal)
    origin = {"b": jnp.zeros(()), "w": jnp.zeros((2, 3))}
    options: dict[str, Any] = {"num_chains": 4, "num_warmup": 60, "num_samples": 80, "progress": False}
    options["warmup"] = gm.WindowAdaptation(adapt_mass_matrix=False)
    return gm.sample(
        jax.random.key(0), target, origin, mesh=mesh, kernel=gm.HMC(target, 0.1, 4), **options
    )


def standard_normal(params):
    return jax.tree.map(lambda x: -0.5 * x**2, params)


# The numbers


@pytest.mark.parametrize("unit", [1.0, 1e-200, 1e200])
def test_autocorrelation_is_the_direct_sum_in_any_unit(unit):
    trace = correlated(3, 57)
    centred = trace - trace.mean(axis=1, keepdims=True)
    direct = [[np.sum(c[: 57 - t] * c[t:]) / np.sum(c * c) for t in range(57)] for c in centred]
    np.testing.assert_allclose(chain_comparison.autocorrelation(unit * trace), direct, atol=1e-6)


def test_chains_that_do_not_vary_have_no_autocorrelation_and_no_bfmi():
    trace = normal(4, 20)
    trace[1], trace[2, 5], trace[3, 7] = 3.0, np.nan, np.inf
    has_none = np.isnan(chain_comparison.autocorrelation(trace)[:, 3])
    np.testing.assert_array_equal(has_none, [0, 1, 1, 1])
    np.testing.assert_array_equal(np.isnan(chain_comparison.energy_fractions(trace)), [0, 1, 1, 1])


@pytest.mark.parametrize("unit", [1.0, 1e-200, 1e200])
def test_bfmi_is_its_formula_in_any_unit(unit):
    energy = correlated(3, 200)
    by_hand = (np.diff(energy) ** 2).sum(axis=1) / (energy.var(axis=1) * 200)
    np.testing.assert_allclose(chain_comparison.energy_fractions(unit * energy), by_hand, rtol=1e-6)


def test_ties_are_ranked_at_random_within_what_they_share():
    trace = np.random.default_rng(3).integers(0, 3, (4, 500)).astype(float)
    found = chain_comparison.ranks(trace).ravel()
    assert sorted(found) == list(range(1, 2001))
    assert (rankdata(trace, "min") <= found).all()
    assert (found <= rankdata(trace, "max")).all()
    assert not chain_comparison.rank_difference(trace).is_outside.any()


def test_rank_difference_is_the_share_of_draws_below():
    trace = normal(3, 100)
    found = chain_comparison.rank_difference(trace)
    ranked = trace[:, :: found.spacing]
    fractional = rankdata(ranked).reshape(ranked.shape) / ranked.size
    share = [[np.mean(row <= z + 1e-9) for z in found.points] for row in fractional]
    np.testing.assert_allclose(found.difference, share - found.points)
    np.testing.assert_array_equal(found.points[[0, -1]], [0, 1])


@pytest.mark.parametrize(("num_chains", "num_draws"), [(2, 40), (4, 200), (20, 60)])
def test_chains_of_one_distribution_stay_in_the_band_at_the_rate_that_it_promises(
    num_chains, num_draws
):
    """Against permutations, which the band's own simulation does not use; 4 sd of their count."""
    trials = 600
    outside = sum(
        chain_comparison.rank_difference(
            np.random.default_rng([num_draws, i])
            .permutation(num_chains * num_draws)
            .reshape(num_chains, -1)
        ).is_outside.any()
        for i in range(trials)
    )
    # Of the critical value itself, a quantile of 2000 simulations, the level is known to 0.0022.
    spread = np.sqrt(trials * 0.01 * 0.99 + (trials * 0.0022) ** 2)
    assert abs(outside - 0.01 * trials) < 4 * spread + 1


def test_the_band_is_a_multiple_of_the_hypergeometric_deviation():
    found = chain_comparison.rank_difference(normal(4, 50))
    assert found.half_width is not None
    inner = slice(1, -1)
    drawn = np.round(found.points[inner] * 200)
    ratio = found.half_width[inner] / (hypergeom(200, 50, drawn).std() / 50)
    np.testing.assert_allclose(ratio, ratio[0])
    np.testing.assert_array_equal(found.half_width[[0, -1]], 0)


def test_a_chain_elsewhere_leaves_the_band_also_if_draws_are_correlated():
    trace = correlated(4, 2000)
    trace[2] += 2 * trace.std()
    found = chain_comparison.rank_difference(trace)
    assert found.spacing > 10
    assert found.is_outside[2]
    assert np.argmax(found.score) == 2


def test_correlated_chains_of_one_distribution_are_not_blamed():
    """Without taking draws apart nearly each of these would be."""
    traces = [correlated(4, 2000, seed=i) for i in range(30)]
    assert sum(chain_comparison.rank_difference(x).is_outside.any() for x in traces) <= 3
    spacing = chain_comparison.independent_spacing(traces[0])
    assert 0.9**spacing < 0.1
    assert spacing < 60


def test_chains_that_are_slow_in_their_tails_alone_are_not_blamed():
    """Random signs have no autocorrelation; the slow scale that they multiply is seen in the tails."""
    blamed = 0
    for i in range(20):
        signs = np.random.default_rng(i).choice([-1, 1], (4, 2000))
        trace = signs * np.exp(0.3 * correlated(4, 2000, 0.95, seed=i))
        assert chain_comparison.independent_spacing(trace) > 10
        blamed += chain_comparison.rank_difference(trace).is_outside.any()
    assert blamed <= 2

    # There is no band where no draws are independent.
    found = chain_comparison.rank_difference(normal(4, 100).cumsum(axis=1))
    assert found.half_width is None
    assert not found.is_outside.any()
    assert found.difference.shape == (4, len(found.points))


@pytest.mark.parametrize("num_draws", [999, 2001, 12_345])
def test_the_outline_of_a_long_line_keeps_its_range_everywhere(num_draws):
    values = normal(num_draws)
    values[500:600] = np.nan
    kept = plots_panels.outline(values)
    assert (np.diff(kept) > 0).all()
    assert len(kept) <= max(2000, num_draws)
    if num_draws == 999:
        np.testing.assert_array_equal(kept, np.arange(999))
        return
    assert len(kept) <= 2000
    width = -(-num_draws // 1000)
    for start in range(0, num_draws, width):
        part = values[start : start + width]
        shown = values[kept[(kept >= start) & (kept < start + width)]]
        if not np.isnan(part).all():
            assert (np.nanmin(shown), np.nanmax(shown)) == (np.nanmin(part), np.nanmax(part))


# Which elements


def chosen(draws, names=None, limit=12):
    return selection.choose(draws, names, limit)


def test_by_default_log_density_and_a_spread_of_every_leaf():
    leaves: dict[str, Any] = {
        "a": normal(2, 5),
        "deep": {"w": normal(2, 5, 40, 3)},
        "z": normal(2, 5, 2),
    }
    found = chosen(made(2, 5, **leaves), limit=9)
    names = list(found.traces)
    assert names[:2] == ["log_density", "a"]
    assert names[-2:] == ["z[0]", "z[1]"]
    assert names[2] == "deep_w[0, 0]"
    assert names[-3] == "deep_w[39, 2]"
    assert len(names) == 9
    assert found.note == "8 of 123 elements, spread over the leaves"
    np.testing.assert_array_equal(found.traces["deep_w[39, 2]"], leaves["deep"]["w"][:, :, 39, 2])
    np.testing.assert_array_equal(found.traces["a"], leaves["a"])


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 12, 100])
def test_never_more_than_the_limit_and_no_fewer_than_there_is_room_for(limit):
    leaves: dict[str, Any] = {"a": normal(2, 5), "b": normal(2, 5, 3), "c": normal(2, 5, 10, 2)}
    found = chosen(made(2, 5, **leaves), limit=limit)
    assert limit - 2 <= len(found.traces) <= limit or len(found.traces) == 25
    assert "log_density" in found.traces
    # Leaves for which there is no room are left out evenly; those of no real numbers always.
    leaves = {f"x{i:02d}": normal(2, 5) for i in range(30)}
    leaves |= {"none": normal(2, 5, 0), "phase": np.ones((2, 5), np.complex64)}
    assert list(chosen(made(2, 5, **leaves), limit=4).traces) == ["log_density", "x00", "x14", "x29"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("w[3, 2]", ["w[3, 2]"]),
        ("w[-1,0]", ["w[39, 0]"]),
        (["energy", "a"], ["energy", "a"]),
        ("w[3]", ["w[3, 0]", "w[3, 1]", "w[3, 2]"]),
        (["w[0, 0]", "w[1, 1]", "w[2, 2]", "w[3, 0]"], ["w[0, 0]", "w[1, 1]", "w[2, 2]", "w[3, 0]"]),
        (["a", "w"], ["a", "w[0, 0]", "w[39, 2]"]),
    ],
)
def test_names_say_which(names, expected):
    leaves: dict[str, Any] = {"a": normal(2, 5), "w": normal(2, 5, 40, 3)}
    draws = made(2, 5, **leaves)
    found = chosen(draws, names, limit=3)
    assert list(found.traces) == expected
    for name, values in found.traces.items():
        truth = eval(name.replace("[", "[:, :, "), {}, leaves | draws.stats)
        np.testing.assert_array_equal(values, truth)


def test_leaves_have_names_and_keep_them_where_a_stat_has_the_same():
    leaves: dict[str, Any] = {"log_density": normal(2, 5), "energy": normal(2, 5)}
    draws = made(2, 5, **leaves)
    found = chosen(draws, limit=3).traces
    np.testing.assert_array_equal(found["log_density_"], draws.stats["log_density"])
    np.testing.assert_array_equal(found["log_density"], leaves["log_density"])
    draws.position = normal(2, 5)
    assert list(chosen(draws).traces) == ["log_density", "x"]
    draws.position = (normal(2, 5), {"k": normal(2, 5)})
    assert list(chosen(draws).traces) == ["log_density", "0", "1_k"]


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("v", ValueError, r"got 'v'; there are a, .*w\[40, 3\], .*energy"),
        ("w[40, 0]", ValueError, r"no element 'w\[40, 0\]'; a draw of w has shape \[40, 3\]"),
        ("w[0, 0, 0]", ValueError, "no element"),
        ("a[0]", ValueError, r"has shape \[\]"),
        ("w[x]", ValueError, "got 'w"),
        ([], ValueError, "at least one name"),
        ("none", ValueError, "no element 'none'"),
        ("phase", TypeError, "phase is of complex64, expected real numbers"),
        ("keys", TypeError, "keys is of key"),
    ],
)
def test_names_that_cannot_be_drawn(names, error, message):
    leaves: dict[str, Any] = {"a": normal(2, 5), "w": normal(2, 5, 40, 3), "none": normal(2, 5, 0)}
    leaves |= {
        "phase": jnp.ones((2, 5), jnp.complex64),
        "keys": jax.random.split(jax.random.key(0), (2, 5)),
    }
    with pytest.raises(error, match=message):
        plots.trace(made(2, 5, **leaves), names)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint32, np.float16, jnp.bfloat16, np.float64])
def test_every_real_dtype_is_drawn(dtype):
    values = np.random.default_rng(0).integers(0, 2, (2, 5, 4)).astype(dtype)
    found = chosen(made(2, 5, x=jnp.asarray(values) if dtype == jnp.bfloat16 else values), "x[2]")
    np.testing.assert_array_equal(found.traces["x[2]"], values[:, :, 2].astype(float))


def test_only_what_is_drawn_leaves_the_devices(monkeypatch):
    mesh = gm.make_mesh(chains=2, data=4)
    values = normal(2, 6, 400, 8).astype(np.float32)
    leaf = gm.place(values, mesh, P("chains", None, "data"))
    fetched = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(x.size) or get(x))
    found = chosen(made(2, 6, w=leaf), "w", limit=7)
    assert sum(fetched) == 2 * 6 * 7
    np.testing.assert_array_equal(found.traces["w[399, 7]"], values[:, :, 399, 7])
    # A gather of the leaf to one device would send all of it: 77 KB to each.
    index = selection._spread((), (400, 8), 3)
    text = str(jax.jit(selection._take).lower(leaf, index).compile().as_text())
    assert "all-reduce" in text
    assert "all-gather" not in text


# What the figures show


@pytest.mark.parametrize("name", ALL)
def test_every_figure_of_a_run_on_a_mesh_and_nothing_global(run, name, tmp_path):
    before = dict(matplotlib.rcParams)
    figure = getattr(plots, name)(run)
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "figure.png", dpi=50)
    assert (tmp_path / "figure.png").stat().st_size > 3000
    assert name == "energy" or {f"chain {i}" for i in range(4)} <= set(legend_of(figure))
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


def test_a_trace_shows_the_draws(run):
    figure = plots.trace(run)
    assert set(panels(figure)) == {
        "log_density",
        "b",
        *(f"w[{i}, {j}]" for i in (0, 1) for j in range(3)),
    }
    w = np.asarray(run.position["w"])
    for i, chain in enumerate(lines(panels(figure)["w[1, 2]"]).values()):
        np.testing.assert_array_equal(chain.get_ydata(), w[i, :, 1, 2])
        np.testing.assert_array_equal(chain.get_xdata(), np.arange(80))
    assert figure.get_suptitle() == "traces: 4 chains x 80 draws"


def test_divergences_and_values_that_are_not_finite_are_marked():
    x = normal(3, 40)
    x[1, 5], x[2, 7], x[0, 9] = np.nan, np.inf, -np.inf
    draws = made(x=x)
    draws.stats["is_divergent"][0, [3, 30]] = draws.stats["is_divergent"][2, 30] = True
    figure = plots.trace(draws, ["x", "energy"])
    axis = panels(figure)["x"]
    assert axis.get_title() == "x\n3 not finite"
    np.testing.assert_array_equal(lines(axis)["divergent"].get_xdata(), [3, 30])
    np.testing.assert_array_equal(lines(axis)["NaN or inf"].get_xdata(), [5, 7, 9])
    assert np.isnan(lines(axis)["chain 2"].get_ydata()[7])
    assert "NaN or inf" not in lines(panels(figure)["energy"])
    assert legend_of(figure)[3:] == ["divergent", "NaN or inf"]
    draw(figure)
    # Flags and small counts are dots that do not hide each other.
    flags = np.random.default_rng(0).random((3, 40)) < 0.5
    axis = panels(plots.trace(made(flags=flags), "flags"))["flags"]
    shown = [line.get_ydata() for line in lines(axis).values()]
    np.testing.assert_array_equal(np.round(shown), flags)
    assert len({y for row in shown for y in row}) == 6
    assert all(line.get_linestyle() == "None" for line in axis.get_lines())


def test_of_many_chains_those_furthest_off_have_colours():
    x = normal(64, 50)
    x[[5, 40]] += 3.0
    x[17] -= 9.0
    figure = plots.trace(made(64, 50, x=x), "x")
    assert legend_of(figure) == ["chain 5", "chain 17", "chain 40", "the other 61 chains"]
    drawn = figure.axes[0].get_lines()
    assert len(drawn) == 64
    colors = [drawn[i].get_color() for i in (5, 17, 40)]
    assert colors == plots_panels.COLORS[:3]
    others = {line.get_color() for i, line in enumerate(drawn) if i not in (5, 17, 40)}
    assert others == {plots_panels.GREY}
    # A colour is the same chain all over an overview.
    figure = plots.overview(made(20, 60))
    drawn = [line for axis in figure.axes for line in axis.get_lines()]
    named = {(str(line.get_label()), line.get_color()) for line in drawn}
    named = sorted(pair for pair in named if pair[0].startswith("chain"))
    assert sorted(color for _, color in named) == sorted(plots_panels.COLORS[:3])
    in_legend = [text for text in legend_of(figure) if text.startswith("chain")]
    assert [label for label, _ in named] == sorted(in_legend)


def test_a_rank_panel_names_the_chain_that_is_elsewhere_or_compares_halves_of_one():
    x = normal(4, 200)
    x[3] += 1.0
    figure = plots.rank(made(4, 200, x=x), "x")
    axis = figure.axes[0]
    found = chain_comparison.rank_difference(x)
    assert found.is_outside[3]
    assert "outside: " in axis.get_title()
    for i in range(4):
        np.testing.assert_array_equal(lines(axis)[f"chain {i}"].get_ydata(), found.difference[i])
    assert "99% band" in legend_of(figure)
    x = normal(1, 301)
    x[:, :150] += 2.0
    figure = plots.rank(made(1, 301, x=x), "x")
    assert legend_of(figure) == ["99% band", "first half", "second half"]
    assert figure.axes[0].get_title().startswith("x, its halves\n")
    assert "outside: all chains" in figure.axes[0].get_title()


def test_panels_say_why_they_are_empty():
    x = normal(3, 40)
    x[1, 4] = np.nan
    draws = made(x=x, same=np.ones((3, 40)), nan=np.full((3, 40), np.nan))
    ranks = panels(plots.rank(draws, ["x", "same", "nan"]))
    assert ranks["x"].texts[0].get_text() == "chain 1: NaN has no rank"
    assert ranks["same"].texts[0].get_text() == "constant: no ranks"
    figure = plots.autocorrelation(draws, ["x", "same", "nan"])
    lags = panels(figure)
    assert lags["x"].get_title() == "x\nchain 1: constant or not finite"
    assert lags["nan"].texts[0].get_text() == "all chains: constant or not finite"
    assert panels(plots.trace(draws, "same"))["same"].get_title() == "same\nconstant"
    draw(figure)


def test_autocorrelation_shows_its_band_and_lags():
    draws = made(3, 200, x=correlated(3, 200))
    axis = plots.autocorrelation(draws, "x", max_lag=30).axes[0]
    expected = chain_comparison.autocorrelation(draws.position["x"])[:, :31]
    for i in range(3):
        np.testing.assert_array_equal(lines(axis)[f"chain {i}"].get_ydata(), expected[i])
    (band,) = [p for p in axis.patches if "band" in p.get_label()]
    np.testing.assert_allclose(
        band.get_extents().transformed(axis.transData.inverted()).y1, 1.96 / 200**0.5
    )
    short = plots.autocorrelation(draws, "x").axes[0]
    assert len(lines(short)["chain 0"].get_xdata()) == 101


def test_energy_shows_its_spread_its_changes_and_bfmi():
    draws = made(3, 500)
    draws.stats["energy"][1] = 50 + 0.1 * normal(500).cumsum()
    draws.stats["energy"][2] = np.nan
    figure = plots.energy(draws)
    histogram, ratios = figure.axes
    shown = [t.get_text() for t in histogram.get_legend().get_texts()]
    assert shown == ["energy, less its mean", "its changes"]
    found = chain_comparison.energy_fractions(draws.stats["energy"].astype(float))
    np.testing.assert_array_equal(ratios.get_lines()[0].get_xdata(), found)
    np.testing.assert_array_equal(ratios.get_lines()[1].get_ydata(), [1])
    assert ratios.get_title() == "BFMI of each chain\nlow: chain 1, none for chain 2"
    draw(figure)
    # float32 rounds energies that are large.
    assert histogram.get_title() == "energy"
    draws.stats["energy"] += np.float32(4e7)
    assert plots.energy(draws).axes[0].get_title() == "energy, rounded to 5"


def test_warmup_shows_steps_and_running_means():
    draws = made(num_warmup=60)
    log_density, size, acceptance = plots.warmup(draws).axes
    np.testing.assert_array_equal(size.get_lines()[0].get_ydata(), draws.warmup["step_size"])
    np.testing.assert_array_equal(size.get_lines()[1].get_ydata(), [0.25, 0.25])
    rates = draws.warmup["acceptance_rate"]
    means = np.stack([rates[:, i - 2 : i + 1].mean(axis=1) for i in range(2, 60)], axis=1)
    for i in range(3):
        np.testing.assert_allclose(lines(acceptance)[f"chain {i}"].get_ydata(), means[i])
    np.testing.assert_allclose(lines(acceptance)["mean of all"].get_ydata(), means.mean(axis=0))
    np.testing.assert_array_equal(lines(acceptance)["chain 0"].get_xdata(), np.arange(2, 60))
    assert acceptance.get_title() == "acceptance rate, mean of 3 steps"
    np.testing.assert_array_equal(
        lines(log_density)["chain 1"].get_ydata(), draws.warmup["log_density"][1]
    )
    # A far start does not hide the rest.
    draws.warmup["log_density"][:, 0], draws.warmup["log_density"][0, 1] = -1e6, -np.inf
    figure = plots.warmup(draws)
    assert figure.axes[0].get_ylim()[0] > -20
    draw(figure)


def test_overview_is_of_the_whole_run(run):
    figure = plots.overview(run)
    assert [axis.get_title().split("\n")[0] for axis in figure.axes] == [
        "log density, warm-up on grey",
        f"step size; dashed: kept, {float(run.kernel.step_size):.3g}",
        "acceptance rate, mean of 3 steps",
        "b",
        "w[0, 0]",
        "w[0, 2]",
        "w[1, 2]",
        "energy",
        "BFMI of each chain",
        "ranks of log density",
        "autocorrelation of log density",
    ]
    whole = np.concatenate([run.warmup["log_density"], run.stats["log_density"]], axis=1)
    np.testing.assert_array_equal(lines(figure.axes[0])["chain 2"].get_ydata(), whole[2])
    rates = run.acceptance_rate
    assert figure.get_suptitle() == (
        f"4 chains x 80 draws, 60 steps of warm-up; acceptance {rates.mean():.2f} "
        f"({rates.min():.2f} to {rates.max():.2f}), {run.num_divergent.sum()} divergent; "
        "traces: 4 of 7 elements, spread over the leaves"
    )


def test_overview_of_named_elements_and_of_what_there_is():
    draws = made()
    figure = plots.overview(draws, ["x[1]", "energy"])
    assert {"x[1]", "energy"} <= set(panels(figure))
    with pytest.raises(ValueError, match="room for 4 elements, got 5; use plots.trace"):
        plots.overview(draws, [f"x[{i}]" for i in range(5)])
    del draws.stats["energy"]
    bare = plots.overview(made(num_warmup=0))
    assert [t.get_text() for axis in bare.axes[1:3] for t in axis.texts] == [
        "no warm-up: no step size to show",
        "no warm-up: no acceptance rate to show",
    ]
    assert "this kernel reports no energies" in [
        t.get_text() for axis in plots.overview(draws).axes for t in axis.texts
    ]


# Errors, and what is left alone


@pytest.mark.parametrize("name", [n for n in ALL if n != "warmup"])
def test_no_draws_are_refused_and_one_is_drawn(name):
    with pytest.raises(ValueError, match=r"at least one draw.*plots.warmup shows"):
        getattr(plots, name)(made(num_draws=0))
    for num_chains in (1, 2):
        draw(getattr(plots, name)(made(num_chains, 1)))


def test_other_errors():
    draw(plots.warmup(made(num_draws=0)))  # is none
    with pytest.raises(ValueError, match="num_warmup=0"):
        plots.warmup(made(num_warmup=0))
    draws = made()
    with pytest.raises(ValueError, match="max_lag"):
        plots.autocorrelation(draws, max_lag=0)
    with pytest.raises(ValueError, match="max_panels"):
        plots.trace(draws, max_panels=0)
    del draws.stats["energy"]
    with pytest.raises(ValueError, match="have no energy; there are acceptance_rate"):
        plots.energy(draws)


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_given_axes_are_drawn_on(name):
    """As many elements as there are axes; the figure gets no title and no legend of ours."""
    figure = Figure()
    axes = figure.subplots(2, 2)
    assert getattr(plots, name)(made(), axes=axes) is figure
    assert [axis.get_title().split("\n")[0] for axis in axes.flat] == [
        "log_density",
        "x[0]",
        "x[2]",
        "x[4]",
    ]
    assert figure.get_suptitle() == ""
    assert figure.legends == []
    assert axes[0, 0].get_legend() is not None
    wide = Figure().subplots(1, 7)  # Axes that are left over are blank.
    getattr(plots, name)(made(), axes=wide)
    assert [axis.axison for axis in wide] == [True] * 6 + [False]
    single = Figure().subplots()
    getattr(plots, name)(made(), axes=single)
    assert single.get_title().startswith("log_density")
    with pytest.raises(ValueError, match="axes: expected 2 axes, one a panel, got 1"):
        getattr(plots, name)(made(), ["x[0]", "x[1]"], axes=single)


def test_matplotlib_is_imported_when_something_is_drawn_and_pyplot_never():
    code = (
        "import sys; from gspmd_mcmc.views import plots; print('matplotlib' in sys.modules);"
        "plots.panels.new_figure(2, 2);"
        "print('matplotlib.figure' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True", "False"]


def test_arviz_gets_the_chosen_elements_alone_or_is_asked_for(run, monkeypatch):
    tree = plots.datatree(run, ["w[1, 2]", "b"])
    assert list(tree["posterior"].data_vars) == ["w[1, 2]", "b"]
    np.testing.assert_array_equal(
        tree["posterior"]["w[1, 2]"], np.asarray(run.position["w"])[:, :, 1, 2]
    )
    np.testing.assert_array_equal(tree["sample_stats"]["diverging"], run.stats["is_divergent"])
    assert list(summary(tree).index) == ["w[1, 2]", "b"]
    assert len(plots.datatree(run, max_elements=3)["posterior"].data_vars) == 3
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r"pip install 'gspmd_mcmc\[arviz\]'"):
        plots.datatree(made())


def remarks(**traces):
    """What is written into the panel of each trace."""
    num_chains, num_draws = next(iter(traces.values())).shape
    figure = plots.trace(made(num_chains, num_draws, **traces), list(traces), max_panels=len(traces))
    panels = (axis for axis in figure.axes if axis.get_title())
    return {axis.get_title(): [text.get_text() for text in axis.texts] for axis in panels}


def test_a_panel_says_what_the_eye_cannot_know():
    x, slope = normal(4, 300), np.linspace(0, 8, 300)
    told = remarks(
        fine=x,
        far=1e8 + x,
        apart=x + np.array([0, 0, 0, 3])[:, None],
        falling=x - np.array([1, 0, 1, 0])[:, None] * slope,
        rising=x + slope,
    )
    assert told["fine"] == told["far"] == []
    assert re.fullmatch(r"not mixed: R-hat 1\.\d\d", told["apart"][0])
    assert re.fullmatch(r"not mixed: R-hat \d\.\d\d\nstill falling: chains 0, 2", told["falling"][0])
    assert told["rising"][0].endswith("still rising: all chains")


def test_a_chain_that_turns_back_does_not_drift():
    """Its last third is far from its first, but the second is not between them."""
    x = 0.1 * normal(2, 90)
    x[0] += np.repeat([0, 5, 2], 30)
    x[1] += np.repeat([0, 1, 2], 30)
    assert chain_comparison.drift(x).tolist() == [0, 1]


@pytest.mark.parametrize(("num_chains", "num_draws"), [(4, 30), (2, 100), (64, 100)])
def test_panels_of_independent_draws_say_nothing(num_chains, num_draws):
    """Of 60 panels of each size none does."""
    x = normal(60, num_chains, num_draws)
    assert (chain_comparison.mixing(list(x)) < chain_comparison.most_rhat(num_draws)).all()
    assert not any(chain_comparison.drift(trace).any() for trace in x)
