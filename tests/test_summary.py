"""The summary of draws: its numbers are arviz-stats', the worst come first, warnings say what to do."""

import dataclasses
import io
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.summary import _extreme, summarize
from gspmd_mcmc.diagnostics.table import Row, _rounded, named_leaves

arviz = pytest.importorskip("arviz_stats.base").array_stats

AXES = {"chain_axis": 0, "draw_axis": 1}
CHAINS, DRAWS = 4, 60


def white(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(CHAINS, DRAWS, *shape)).astype(np.float32)


def shifted(x, by=3.0):
    """The second chain lies apart."""
    return x + by * (np.arange(CHAINS) == 1).reshape(CHAINS, *[1] * (x.ndim - 1)).astype(x.dtype)


def stats_of(**changes):
    shape = (CHAINS, DRAWS)
    found = {
        "log_density": white(seed=1),
        "is_divergent": np.zeros(shape, bool),
        "is_turning": np.ones(shape, bool),
        "acceptance_rate": np.full(shape, 0.8, np.float32),
        "energy": white(seed=2),
    }
    return found | changes


DRAWN = {"mu": white(seed=3), "w": white(2, 3, seed=4)}
# Nothing of this is worse than usual but ``w[1, 2]``. Eight numbers, with the log density, in most
# tests: they share one program.
BAD = {"mu": DRAWN["mu"], "w": DRAWN["w"].copy()}
BAD["w"][..., 1, 2] = shifted(BAD["w"][..., 1, 2])


@pytest.fixture(scope="module")
def good():
    return summarize(DRAWN, stats_of())


@pytest.fixture(scope="module")
def bad():
    return summarize(BAD, stats_of(), max_rows=3)


def reference(x):
    """What arviz-stats and NumPy make of draws [chains, draws, ...]."""
    x = x.astype(float)
    return {
        "mean": x.mean(axis=(0, 1)),
        "sd": x.std(axis=(0, 1), ddof=1),
        "mcse_mean": arviz.mcse(x, method="mean", **AXES),
        "q5": np.quantile(x, 0.05, axis=(0, 1)),
        "q95": np.quantile(x, 0.95, axis=(0, 1)),
        "ess_bulk": arviz.ess(x, method="bulk", **AXES),
        "ess_tail": arviz.ess(x, method="tail", prob=(0.05, 0.95), **AXES),
        "rhat": arviz.rhat(x, **AXES),
    }


def test_trees_are_like_the_draws_and_leaves_go_by_name(bad):
    assert jax.tree.map(np.shape, bad.rhat) == {"mu": (), "w": (2, 3)}
    assert bad.nested_rhat is None
    assert bad["w"]["rhat"][1, 2] == bad.rhat["w"][1, 2] == bad.worst("rhat").value
    assert bad.worst("rhat").name == bad.worst("ess_bulk").name == "w[1, 2]"
    assert set(bad.to_dict()) == {"mu", "w", "log_density"}
    with pytest.raises(KeyError, match="the draws have"):
        bad["v"]
    with pytest.raises(ValueError, match="worst: expected rhat"):
        bad.worst("nested_rhat")


def test_the_worst_numbers_come_first_and_the_rest_is_counted(bad):
    names = [row.name for row in bad.rows]
    assert names[0] == "w[1, 2]"
    assert names[-1] == "log_density"
    assert (len(names), bad.num_left_out) == (4, 4)
    every = np.append(bad.rhat["w"], bad.rhat["mu"])
    assert [row.values["rhat"] for row in bad.rows[:-1]] == sorted(every, reverse=True)[:3]


def test_rows_go_by_the_exact_rhat_and_not_by_its_first_digits():
    """R-hat differs in the third digit, and effective sizes would order them the other way."""
    order = {}
    for rhat, size in ((1.014, 3000.0), (1.008, 900.0), (1.012, 1000.0)):
        row = Row("x", 1, {"rhat": rhat, "ess_bulk": size, "sd": 1.0})
        order[rhat] = row.order
    assert sorted(order, key=lambda rhat: order[rhat]) == [1.014, 1.012, 1.008]


def test_names_choose_the_lines_and_not_what_is_judged(bad):
    found = summarize(BAD, stats_of(), names=["mu", "w[0, 1]"])
    assert {row.name for row in found.rows} == {"mu", "w[0, 1]", "log_density"}
    rows = {row.name: row.values for row in found.rows}
    assert rows["mu"]["mean"] == pytest.approx(DRAWN["mu"].mean(), abs=1e-5)
    assert rows["mu"]["sd"] == pytest.approx(DRAWN["mu"].std(ddof=1), rel=1e-5)
    assert rows["w[0, 1]"]["mean"] == pytest.approx(DRAWN["w"][..., 0, 1].mean(), abs=1e-5)
    assert found.warnings == bad.warnings and found.num_left_out == 0
    one = summarize(BAD, stats_of(), names="w", max_rows=2)
    assert one.rows[0].name == "w[1, 2]" and "... 4 more numbers of w, none worse" in str(one)
    assert [row.name for row in summarize(BAD, stats_of(), names="log_density").rows] == ["log_density"]


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("v", ValueError, r"some of the leaves mu, w, or numbers of them.*got 'v'"),
        (["mu", "w[2, 0]"], ValueError, r"got 'w\[2, 0\]'"),
        ("w[0]", ValueError, r"got 'w\[0\]'"),
        ("w[-1, 0]", ValueError, r"got 'w\[-1, 0\]'"),
        ([], ValueError, "expected some of mu, w, got none"),
        ([3], TypeError, "expected the names of leaves or numbers, got 3"),
    ],
)
def test_a_name_that_the_draws_do_not_have_is_an_error(names, error, message):
    with pytest.raises(error, match=message):
        summarize(BAD, stats_of(), names=names)


def test_names_and_groups_are_two_tables():
    with pytest.raises(ValueError, match="names= or groups=, got both"):
        summarize(BAD, stats_of(), names="mu", groups="station")


def test_a_run_prints_as_a_table_and_warnings(bad, good):
    lines = str(bad).splitlines()
    assert lines[0] == "4 chains x 60 draws, the worst numbers first"
    assert lines[2].split() == [
        *("mean", "sd", "mcse", "5%", "95%", "ESS", "bulk", "ESS", "tail", "R-hat")
    ]
    assert lines[4].startswith("w[1, 2]")
    assert f"{bad.rhat['w'][1, 2]:.3f}" == lines[4].split()[-1]
    assert "... 4 more numbers, none worse" in lines
    (warning,) = [x for x in bad.warnings if x.startswith("R-hat is over 1.01 for ")]
    assert "worst w[1, 2] (" in warning
    assert f"! {warning[:60]}" in str(bad)
    assert lines[4] in bad._repr_mimebundle_([], [])["text/html"]
    out = io.StringIO()
    Console(file=out, width=100).print(bad)
    assert lines[4] in out.getvalue()
    assert max(row.values["rhat"] for row in good.rows) < bad.rhat["w"][1, 2]


@pytest.mark.parametrize(
    ("value", "error", "expected"),
    [
        (1.23456, 0.012, "1.235"),
        (-4e6, 0.5, "-4000000.00"),
        (12345.6, 130.0, "12346"),
        (1.5e-9, 2e-11, "1.5e-09"),
        (0.25, 0.0, "0.25"),
        (0.25, np.nan, "0.25"),
    ],
)
def test_numbers_have_the_digits_that_their_error_leaves(value, error, expected):
    assert _rounded(value, error) == expected


def warnings_of(stats, position=DRAWN, **options):
    return summarize(position, stats, **options).warnings


def test_a_clean_run_is_not_warned_of():
    """In the limit of what 240 draws can do: numbers spread evenly, the same in each chain."""
    even = np.random.default_rng(0).permutation(DRAWS).astype(np.float32)
    x = np.stack([np.roll(even, 13 * c) for c in range(CHAINS)])
    tiled = {"mu": x, "w": np.tile(x[:, :, None, None], (1, 1, 2, 3))}
    found = summarize(tiled, stats_of(log_density=x))
    assert [text for text in found.warnings if "ESS" not in text] == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"is_divergent": np.arange(240).reshape(4, 60) < 70}, "70 of 240 transitions after warm-up"),
        ({"energy": white(seed=2).cumsum(axis=1)}, "E-BFMI is under 0.3 (chain "),
        ({"is_turning": np.arange(240).reshape(4, 60) < 180}, "25% of trajectories reached max_tree"),
        (
            {"acceptance_rate": np.repeat([[0.9], [0.9], [0.05], [0.9]], 60, axis=1)},
            "acceptance rates differ between chains (chain 2: 0.05, ",
        ),
        (
            {"acceptance_rate": np.full((4, 60), 0.004, np.float32)},
            "next to no proposal is accepted: the median acceptance rate of chains is 0.004",
        ),
        ({"is_divergent": np.ones((4, 60), bool)}, "240 of 240 transitions after warm-up diverged"),
        ({"log_density": np.full((4, 60), -3.0, np.float32)}, "log_density is the same in all draws"),
    ],
)
def test_each_defect_has_its_warning(good, changes, expected):
    found = warnings_of(stats_of(**changes), max_tree_depth=10)
    assert [text[: len(expected)] for text in found].count(expected) == 1
    assert not any(text.startswith(expected) for text in good.warnings)


def test_chains_that_diverge_are_named_the_worst_first_and_told_where_to_look():
    is_divergent = np.zeros((4, 60), bool)
    is_divergent[2, :9] = is_divergent[0, :2] = True
    (text,) = [x for x in warnings_of(stats_of(is_divergent=is_divergent)) if "diverged" in x]
    assert "11 of 240 transitions after warm-up diverged (chain 2: 9, chain 0: 2)" in text
    assert "target_acceptance_rate" in text
    never = {"is_divergent": np.ones((4, 60), bool), "acceptance_rate": np.zeros((4, 60), np.float32)}
    (text,) = [x for x in warnings_of(stats_of(**never)) if "diverge" in x or "accepted" in x]
    assert "The log density or its gradient is NaN or infinite around there" in text


def test_kernels_without_a_depth_or_momenta_are_not_judged_by_them():
    stats = stats_of(energy=white(seed=2).cumsum(axis=1), is_turning=np.zeros((4, 60), bool))
    found = warnings_of(stats, judges_energy=False)
    assert [x for x in found if "E-BFMI" in x or "max_tree_depth" in x] == []
    assert len(warnings_of({"log_density": stats["log_density"]})) == len(found)


def test_what_no_statistic_sees_is_noted_whatever_the_draws(good):
    """A kernel without a Metropolis test says so in its summary, and no other does."""
    assert gm.MCLMC.note.startswith("These draws are biased, most of all in the tails")
    found = summarize(DRAWN, stats_of(), note=gm.MCLMC.note)
    assert found.warnings == good.warnings and found.notes == [gm.MCLMC.note] and good.notes == []
    out = io.StringIO()
    Console(file=out, width=300).print(found)
    page = found._repr_mimebundle_([], [])["text/html"]  # pyright: ignore[reportAttributeAccessIssue]
    assert all("These draws are biased" in text for text in (str(found), out.getvalue(), page))
    assert "These draws are biased" not in str(good)
    assert {k.note for k in (gm.HMC, gm.JitteredHMC, gm.NUTS, gm.MAMS)} == {""}


def test_draws_that_are_not_finite_or_all_equal(good):
    w = DRAWN["w"].copy()
    w[0, 3, 0, 1], w[1, 3, 1, 1], w[..., 0, 0] = np.nan, np.inf, 7.0
    found = summarize({"mu": DRAWN["mu"], "w": w}, stats_of())
    assert "draws of 2 numbers are not finite: w[0, 1], w[1, 1]." in found.warnings
    names = [row.name for row in found.rows]
    assert names[0] == "w[0, 1]"
    assert names[-2] == "w[0, 0]"  # what is all equal cannot be bad
    assert not np.isnan(found.worst().value)


def test_too_few_draws_and_a_single_chain():
    few = jax.tree.map(lambda x: x[:1, :3], {"mu": DRAWN["mu"]})
    found = summarize(few, {"log_density": white(seed=1)[:1, :3]})
    assert [text.split(":")[0] for text in found.warnings] == ["3 draws of each chain", "one chain"]
    assert np.isnan(found.rhat["mu"])
    empty = summarize({"mu": white()[:, :0]}, {"log_density": white()[:, :0]})
    assert "0 draws of each chain" in str(empty)


def test_superchains_are_judged_by_nested_rhat():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(32, 6)).astype(np.float32)
    found = summarize({"a": x}, {"log_density": x[::-1]})
    assert any("num_superchains" in text for text in found.warnings if text.startswith("R-hat"))
    nested = summarize({"a": x}, {"log_density": x[::-1]}, num_superchains=4)
    groups = np.repeat(np.arange(4), 8)
    expected = arviz.rhat_nested(x.astype(float), superchain_ids=groups, **AXES)
    np.testing.assert_allclose(nested.nested_rhat["a"], expected, rtol=1e-4)
    assert "nested R-hat" in str(nested)
    assert not any("num_superchains" in text for text in nested.warnings)
    assert (expected > 1.01) == any(text.startswith("nested R-hat") for text in nested.warnings)
    apart = summarize(
        {"a": x + np.float32(2) * groups[:, None].astype(np.float32)},
        {"log_density": x},
        num_superchains=4,
    )
    assert any(
        x.startswith("nested R-hat is over 1.01 for") and "worst a (" in x for x in apart.warnings
    )


# Large leaves.

LARGE = shifted(white(40, 30, seed=5), by=0.0)
LARGE[..., 17, 4] = shifted(LARGE[..., 17, 4])


def test_a_large_leaf_has_one_line_which_names_its_worst_number():
    with jax.enable_x64(True):
        sharding = NamedSharding(gm.make_mesh(data=8), P(None, None, "data"))
        found = summarize({"u": jax.device_put(LARGE.astype(float), sharding)}, stats_of())
    row, last = found.rows
    assert (row.name, row.size, last.name) == ("u[17, 4]", 1200, "log_density")
    values = found["u"]
    for key, value in reference(LARGE.reshape(CHAINS, DRAWS, -1)).items():
        np.testing.assert_allclose(values[key].ravel(), value, rtol=1e-5, err_msg=key)
    assert row.values["rhat"] == values["rhat"].max() == values["rhat"][17, 4]
    assert row.values["ess_tail"] == values["ess_tail"].min()
    assert row.values["mean"] == values["mean"][17, 4]
    assert "u[17, 4] of 1,200" in str(found)
    count = np.sum(values["rhat"] > 1.01) + (last.values["rhat"] > 1.01)
    assert any(x.startswith(f"R-hat is over 1.01 for {count} of 1201 numbers") for x in found.warnings)
    assert found.rhat["u"].sharding.spec == P("data")


def test_a_number_of_a_large_leaf_has_a_line_by_its_name():
    found = summarize({"u": LARGE}, stats_of(), names=["u[3, 2]", "u"])
    rows = {row.name: row for row in found.rows}
    assert set(rows) == {"u[3, 2]", "u[17, 4]", "log_density"}
    assert (rows["u[3, 2]"].size, rows["u[17, 4]"].size) == (1, 1200)
    assert rows["u[3, 2]"].values["mean"] == pytest.approx(LARGE[..., 3, 2].mean(), abs=1e-5)


def test_the_worst_number_of_a_sharded_leaf_is_found_by_scalars():
    """Statistics of 1200 numbers over 8 devices: nothing larger than a scalar of each is sent."""
    sharding = NamedSharding(gm.make_mesh(data=8), P("data"))
    placed = jax.device_put(LARGE[0, 0], sharding)
    found = dict.fromkeys(("mean", "sd", "rhat"), placed)
    report = gm.communication(_extreme.lower(found, "rhat", 1.01).compile())
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    assert sum(c.num_bytes for c in report.collectives) < 64


# Of draws.


def standard_normal(x):
    return jax.tree.map(lambda a: -0.5 * a**2, x)


@pytest.fixture(scope="module")
def draws():
    kernel = gm.NUTS(gm.LogDensity(standard_normal), 0.1, max_tree_depth=7)
    position = {"a": jnp.asarray(white(4)), "b": jnp.asarray(white(3, seed=6))}
    is_turning = np.arange(240).reshape(4, 60) >= 24
    stats = jax.tree.map(jnp.asarray, stats_of(is_turning=is_turning))
    return gm.Draws(position, stats, {}, kernel=kernel, state=None, num_steps=DRAWS)


def test_draws_have_a_summary_without_arviz(draws, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    monkeypatch.setitem(sys.modules, "arviz_stats", None)
    found = draws.summary(max_rows=2)
    assert len(found.rows) == 3
    np.testing.assert_allclose(found.mean["a"], np.mean(draws.position["a"], axis=(0, 1)), atol=1e-6)
    assert any(x.startswith("10% of trajectories reached max_tree_depth=7") for x in found.warnings)


def test_names_that_clash_are_all_there(draws):
    b = np.asarray(draws.position["b"])
    clashing = {"a": {"b": b}, "a_b": b[..., :2] + 1, "log_density": b[..., :2] + 2}
    found = dataclasses.replace(draws, position=clashing).summary().to_dict()
    assert list(found) == ["a.b", "a_b", "log_density", "log_density_"]
    means = [x["mean"].ravel()[0] - b[..., 0].mean() for x in found.values()]
    assert means[:3] == pytest.approx([0, 1, 2], abs=1e-5)


def test_a_name_that_two_leaves_could_have_is_that_of_the_leaf_at_the_top(draws):
    """Else the values of ``a_b`` would be those of the other one, in the table and in the tree."""
    pytest.importorskip("arviz_base")
    b = np.asarray(draws.position["b"])[..., 0]
    position = {"a": {"b": b, "c": b}, "a_b": b + 1, "chain": b + 2, "draw": b + 3, "w_dim_0": b + 4}
    position |= {"w": np.asarray(draws.position["b"]), "W": b}
    clashing = dataclasses.replace(draws, position=position)
    assert {name: round(float(np.mean(x["mean"] - b.mean())), 4) for name, x in read(clashing)} == {
        **{"a.b": 0, "a_c": 0, "a_b": 1, "chain": 2, "draw": 3, "w_dim_0": 4, "W": 0}
    }
    posterior = clashing.to_datatree()["posterior"].dataset
    assert sorted(posterior.data_vars) == ["W", "a.b", "a_b", "a_c", "chain_", "draw_", "w", "w_dim_0_"]
    for name, by in {"a.b": 0, "a_b": 1, "chain_": 2, "draw_": 3, "w_dim_0_": 4}.items():
        np.testing.assert_array_equal(posterior[name], b + by)


def read(draws):
    return [
        (name, x) for name, x in draws.summary().to_dict().items() if name not in ("w", "log_density")
    ]


def test_names_are_unique_however_they_clash():
    """Of a.b, b of a, and a leaf of that name; without such company they stay plain."""
    tree = {"a": {"b": 0, "b_c": 0, "b.c": 0}, "a_b": {"c": 0}, "a_b_c": 0, "a.b": 0, "a.b_c": 0}
    names = list(named_leaves(tree))
    assert names == sorted(set(names), key=names.index) and len(names) == 7
    assert {"a_b_c", "a.b", "a.b_c"} <= set(names)
    assert list(named_leaves([0, {"w": 0}])) == ["0", "1_w"] and list(named_leaves(0)) == ["x"]


def test_half_precision_and_integer_draws_have_a_summary(draws):
    b = draws.position["b"]
    counts, is_positive = jnp.round(b[..., :2]).astype(jnp.int32), b[..., 0] > 0
    mixed = {"b": b.astype(jnp.bfloat16), "n": counts, "is": is_positive, "h": b[..., 0].astype("half")}
    found = dataclasses.replace(draws, position=mixed).summary()
    np.testing.assert_allclose(found.mean["is"], np.mean(is_positive), atol=1e-6)
    np.testing.assert_allclose(found.mean["n"], np.mean(counts, axis=(0, 1)), atol=1e-6)
    np.testing.assert_allclose(found.mean["b"], np.mean(np.asarray(b), axis=(0, 1)), atol=2e-3)


@pytest.mark.parametrize(
    ("offset", "is_told", "size"), [(1e7, True, 3), (1e4, False, 3), (1e7, True, 2000)]
)
def test_draws_as_coarse_as_their_numbers_are_told_of(offset, is_told, size):
    x = (np.random.default_rng(0).normal(size=(4, 100, size)) + offset).astype(np.float32)
    x[..., 0] = 1e7  # all equal, as the diagonal of a correlation matrix: nothing is rounded
    summary = summarize({"x": jnp.asarray(x)}, {"log_density": x[..., 1] + np.float32(1e9)})
    told = [text for text in summary.warnings if "distance of floating-point numbers" in text]
    assert bool(told) == is_told
    assert all(f"of {size - 1} numbers" in text for text in told)
