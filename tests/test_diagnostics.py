"""R-hat, effective sample sizes and Monte Carlo errors against arviz-stats and independent formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import autoregression
from scipy import stats
from seeds import seed, within

from gspmd_mcmc.diagnostics import columns
from gspmd_mcmc.diagnostics.autocovariance import mean_autocovariance
from gspmd_mcmc.diagnostics.columns import per_leaf
from gspmd_mcmc.diagnostics.energy import bfmi
from gspmd_mcmc.diagnostics.ess import ess_bulk, ess_mean, ess_sd, ess_tail
from gspmd_mcmc.diagnostics.mcse import mcse_mean, mcse_sd
from gspmd_mcmc.diagnostics.rhat import column_nested_rhat, nested_rhat, rank_nested_rhat, rhat
from gspmd_mcmc.diagnostics.statistics import Statistics, quantile, statistics

arviz = pytest.importorskip("arviz_stats.base").array_stats

AXES = {"chain_axis": 0, "draw_axis": 1}


@functools.cache
def families(num_chains, num_draws):
    """Chains of many kinds, one in each column."""
    shape = (num_chains, num_draws)
    slow, fast, white = (
        autoregression(phi, shape, seed(number)) for number, phi in enumerate((0.95, -0.9, 0.0))
    )
    chain = np.arange(num_chains)[:, None]
    return {
        "slow": slow,
        "antithetic": fast,
        "white": white,
        "Cauchy": np.tan(np.pi * (stats.norm.cdf(white) - 0.5)),
        "integers": np.round(white),
        "two values": (white > 0.3) * 1.0,
        "shifted": white + 3 * (chain == 0),
        "wider": white * (1 + 5 * (chain == 0)),
        "drift": white + np.linspace(0, 2, num_draws),
        "far off": 1e4 + white,
        "tiny": 1e-9 * slow,
        "alternating": np.broadcast_to((-1.0) ** np.arange(num_draws), shape) + 0.01 * white,
    }


SIMULATED = ("rhat_by_chance", "rhat_p_value")


def reference(x, dtype: type = float):
    """What arviz-stats makes of [chains, draws, columns]; the error of the sd by the formula."""
    centred = x - x.mean(axis=(0, 1))
    with np.errstate(all="ignore"):
        # In units of one: arviz-stats takes squares that are all under 1e-15 for equal.
        size_of_squares = arviz.ess(centred / centred.std(axis=(0, 1)), method="sd", **AXES)
        second, fourth = (centred**2).mean(axis=(0, 1)), (centred**4).mean(axis=(0, 1))
        return Statistics(
            mean=x.mean(axis=(0, 1)),
            sd=x.reshape(-1, x.shape[2]).std(axis=0, ddof=1),
            mcse_mean=arviz.mcse(x, method="mean", **AXES),
            mcse_sd=np.sqrt((fourth - second**2) / size_of_squares / second) / 2,
            q5=np.quantile(x, 0.05, axis=(0, 1)),
            q95=np.quantile(x, 0.95, axis=(0, 1)),
            ess_bulk=arviz.ess(x, method="bulk", **AXES),
            ess_tail=arviz.ess(x, method="tail", prob=(0.05, 0.95), **AXES),
            rhat=arviz.rhat(x, **AXES),
            rhat_beyond_noise=rhat_beyond_noise(x) if len(x) > 4 else arviz.rhat(x, **AXES),
            # Of these test_chance has simulations.
            rhat_by_chance=np.full(x.shape[2], np.nan),
            rhat_p_value=np.full(x.shape[2], np.nan),
            spacings=x.reshape(-1, x.shape[2]).std(axis=0, ddof=1)
            / np.abs(x.mean((0, 1)) * np.finfo(dtype).eps),
        )


def rhat_beyond_noise(x):
    """As its docstring says: an analysis of variance of the halves of chains, by SciPy's ranks."""
    num_draws = x.shape[1]
    half = num_draws // 2
    halves = np.stack([x[:, :half], x[:, -half:]], axis=1)
    distances = np.abs(halves - np.median(halves, axis=(0, 1, 2)))
    return np.fmax(of_scores(halves, num_draws), of_scores(distances, num_draws))


def of_scores(halves, num_draws):
    num_chains, _, half, _ = halves.shape
    rank = stats.rankdata(halves.reshape(-1, halves.shape[-1]), axis=0)
    z = stats.norm.ppf((rank - 3 / 8) / (len(rank) + 1 / 4)).reshape(halves.shape)
    rhat = np.sqrt(
        z.mean(2).reshape(2 * num_chains, -1).var(0, ddof=1) / z.var(2, ddof=1).mean((0, 1))
        + (half - 1) / half
    )
    first, second = z.mean(2)[:, 0], z.mean(2)[:, 1]
    ratio = (first + second).var(0, ddof=1) / (first - second).var(0, ddof=1)
    agrees = np.log(ratio) <= 4 * 2 / np.sqrt(num_chains - 1)
    change = first - second
    is_steady = np.abs(change.mean(0)) <= 4 * change.std(0, ddof=1) / np.sqrt(num_chains)
    return np.where(agrees & is_steady & (rhat <= 1 + 10 / num_draws), 1, rhat)


SHAPES = [(4, 101), (2, 4), (3, 5), (64, 100)]


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_equal_those_of_arviz_in_float64(shape):
    x = np.stack(list(families(*shape).values()), axis=2)
    with jax.enable_x64(True):
        found = statistics(x)
    for name, ours, theirs in zip(found._fields, found, reference(x), strict=True):
        # Near 0 a mean is as exact as its draws are large.
        if name not in SIMULATED:
            np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-13, err_msg=name)


def test_float32_is_near_float64():
    """Where folded draws of float32 tie, rounding may order them otherwise: R-hat moves by 2e-4.

    Effective sizes jump where two autocorrelations cancel to rounding; here none does.
    """
    x = np.stack(list(families(4, 1000).values()), axis=2).astype(np.float32)
    found, expected = statistics(x), reference(x.astype(float), np.float32)
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert ours.dtype == jnp.float32
        if name in SIMULATED:
            continue
        bound = 5e-4 if name.startswith("rhat") else 1e-5
        if name == "spacings":  # of means near 0 rounding is most
            ours, theirs = 1 / ours, 1 / theirs
        np.testing.assert_allclose(ours, theirs, rtol=bound, atol=2e-5 * theirs.std(), err_msg=name)


def test_each_function_alone_gives_its_part_of_the_statistics():
    x = np.stack(list(families(4, 50).values()), axis=2)
    with jax.enable_x64(True):
        together = statistics(x)
        for function in (rhat, ess_bulk):
            np.testing.assert_allclose(function(x), getattr(together, function.__name__), rtol=1e-10)
        in_units = x / x.std(axis=(0, 1))
        np.testing.assert_allclose(ess_sd(x), arviz.ess(in_units, method="sd", **AXES), rtol=1e-7)
        other = arviz.ess(x, method="tail", prob=(0.1, 0.5), **AXES)
        np.testing.assert_allclose(ess_tail(x, (0.1, 0.5)), other, rtol=1e-7)


def test_trees_integers_and_booleans_keep_their_structure_and_shape():
    white = autoregression(0.5, (4, 60, 3, 2))
    draws = {"a": [white, np.round(white).astype(np.int32)], "b": white[..., 0, 0] > 0}
    with jax.enable_x64(True):
        found = ess_mean(draws)
        assert jax.tree.map(jnp.shape, found) == {"a": [(3, 2), (3, 2)], "b": ()}
        np.testing.assert_allclose(
            found["a"][1], arviz.ess(np.round(white), method="mean", **AXES), rtol=1e-7
        )
        np.testing.assert_allclose(
            found["b"], arviz.ess(draws["b"] * 1.0, method="mean", **AXES), rtol=1e-7
        )
    assert jax.tree.map(jnp.shape, statistics({"w": white}).sd) == {"w": (3, 2)}


@pytest.mark.parametrize("num_draws", [1, 2, 7])
def test_quantiles_are_those_of_numpy(num_draws):
    """Where a draw is infinite NumPy gives NaN next to it; the quantiles below are finite still."""
    x = np.random.default_rng(0).normal(size=(3, num_draws, 2))
    with jax.enable_x64(True):
        for p in (0.0, 0.05, 0.5, 1.0):
            np.testing.assert_allclose(quantile(x, p), np.quantile(x, p, axis=(0, 1)), rtol=1e-12)
        x[0, 0] = np.inf, np.nan
        assert np.isnan(quantile(x, 0.0)).tolist() == [False, True]
        assert quantile(x, 0.0)[0] == x[..., 0].min()
        assert quantile(x, 1.0)[0] == np.inf
        below, middle = np.sort(x[..., 0], axis=None)[x[..., 0].size // 2 - 1 :][:2]
        median = middle if num_draws % 2 else (below + middle) / 2
        np.testing.assert_allclose(quantile(x, 0.5)[0], median, rtol=1e-12)


@pytest.mark.parametrize("num_draws", [0, 1, 3])
def test_under_four_draws_there_is_no_diagnosis(num_draws):
    x = np.random.default_rng(0).normal(size=(4, num_draws, 2))
    for function in (rhat, ess_bulk, ess_tail, ess_mean, mcse_mean):
        assert np.isnan(function(x)).all(), function.__name__
        assert function(x).shape == (2,)


def test_nan_infinite_and_equal_draws():
    odd = autoregression(0.0, (4, 41))
    odd[2, 20] = np.nan  # a middle draw, which is left out, still tells
    assert np.isnan(rhat(odd)) and np.isnan(ess_bulk(odd))
    x = np.repeat(autoregression(0.0, (4, 40))[:, :, None], 4, axis=2)
    x[1, 3, 0] = np.nan
    x[1, 3, 1] = np.inf
    x[:, :, 2] = 7.1
    found = statistics(x)
    assert np.isnan(found.rhat).tolist() == [True, False, True, False]
    assert np.isnan(found.ess_bulk).tolist() == [True, False, False, False]
    assert np.isnan(found.ess_tail).tolist() == [True, False, False, False]
    assert np.isnan(found.mcse_mean).tolist() == [True, True, False, False]
    assert (found.ess_bulk[2], found.ess_tail[2]) == (160, 160)  # the number of draws, as arviz-stats
    assert (found.sd[2], found.mcse_mean[2], found.mcse_sd[2]) == (0, 0, 0)
    with jax.enable_x64(True):
        np.testing.assert_allclose(rhat(x)[1], arviz.rhat(x[..., 1], **AXES), rtol=1e-7)
    # Chains that all stand still, each at its own place.
    still = np.broadcast_to(np.array([0.1, 0.2, 0.3])[:, None], (3, 20))
    assert rhat(still) == np.inf


def test_a_single_chain_is_judged_by_its_halves():
    """arviz-stats gives NaN; its plain R-hat of the two halves' normal scores is what is meant."""
    x = autoregression(0.5, (1, 80))
    halves = x.reshape(2, 40)
    scores = stats.norm.ppf((stats.rankdata(halves) - 0.375) / 80.25).reshape(2, 40)
    distances = stats.rankdata(np.abs(halves - np.median(halves)))
    far = stats.norm.ppf((distances - 0.375) / 80.25).reshape(2, 40)
    expected = max(arviz.rhat(s, method="identity", **AXES) for s in (scores, far))
    with jax.enable_x64(True):
        np.testing.assert_allclose(rhat(x), expected, rtol=1e-7)
        np.testing.assert_allclose(ess_bulk(x), arviz.ess(x, method="bulk", **AXES), rtol=1e-7)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("name", "is_bad"),
    [("white", False), ("antithetic", False), ("Cauchy", False), ("integers", False)]
    + [("shifted", True), ("wider", True), ("drift", True), ("stuck", True)],
)
def test_bad_chains_are_flagged_and_good_ones_are_not(name, is_bad):
    white = families(4, 4000)["white"]
    kinds = families(4, 4000) | {"stuck": np.where(np.arange(4)[:, None] == 2, 0.4, white)}
    beyond = float(rhat(kinds[name])) - 1
    within(0.01 / beyond if is_bad else beyond, 1 if is_bad else 0.01, "R-hat beyond 1")


@pytest.mark.statistical
def test_mcse_of_mean_and_sd_are_the_scatter_of_repeated_runs():
    """Antithetic: with the effective size of the draws the sd's error would be 1.8 times less."""
    x = autoregression(-0.4, (2, 500, 1200), seed(0))
    pooled = x.reshape(-1, 1200)
    scatter_of_mean, scatter_of_sd = pooled.mean(axis=0).std(), pooled.std(axis=0).std()
    # The scatter of 1200 runs is itself known to 2 %.
    within(abs(np.mean(mcse_mean(x)) / scatter_of_mean - 1), 0.12, "of the mean's error")
    within(abs(np.mean(mcse_sd(x)) / scatter_of_sd - 1), 0.12, "of the standard deviation's error")


@pytest.mark.parametrize("num_draws", [2, 3, 97])
def test_autocovariance_is_the_sum_of_products(num_draws):
    x = autoregression(0.7, (3, num_draws, 2)) + 5
    centred = x - x.mean(axis=1, keepdims=True)
    expected = np.stack(
        [
            (centred[:, : num_draws - t] * centred[:, t:]).sum(axis=1).mean(axis=0) / num_draws
            for t in range(num_draws)
        ]
    )
    with jax.enable_x64(True):
        np.testing.assert_allclose(jax.jit(mean_autocovariance)(x), expected, atol=1e-12)
    single = jax.jit(mean_autocovariance)(x.astype(np.float32))
    np.testing.assert_allclose(single, expected, atol=3e-6 * expected[0].max())


def margossian(x, num_superchains):
    """Nested R-hat, written from equations 4 to 8 of the paper with loops."""
    chains = np.split(x, num_superchains)
    means = [np.mean([np.mean(c) for c in group]) for group in chains]
    between = sum((m - np.mean(means)) ** 2 for m in means) / (num_superchains - 1)
    within = []
    for group, mean in zip(chains, means, strict=True):
        num = len(group)
        b = sum((np.mean(c) - mean) ** 2 for c in group) / (num - 1) if num > 1 else 0.0
        w = np.mean([np.var(c, ddof=1) for c in group]) if x.shape[1] > 1 else 0.0
        within.append(b + w)
    return np.sqrt(1 + between / np.mean(within))


@pytest.mark.parametrize(("shape", "num"), [((12, 9), 3), ((12, 9), 12), ((12, 1), 4), ((8, 30), 2)])
def test_nested_rhat_is_that_of_the_paper(shape, num):
    x = autoregression(0.6, shape) + np.arange(shape[0])[:, None] // (shape[0] // num)
    with jax.enable_x64(True):
        np.testing.assert_allclose(nested_rhat(x, num), margossian(x, num), rtol=1e-12)


def test_nested_rhat_of_ranks_is_that_of_arviz():
    x = np.stack(list(families(8, 21).values()), axis=2)
    groups = np.repeat([0, 1, 2, 3], 2)
    with jax.enable_x64(True), np.errstate(all="ignore"):
        expected = arviz.rhat_nested(x, superchain_ids=groups, **AXES)
        np.testing.assert_allclose(rank_nested_rhat(x, 4), expected, rtol=1e-7)


@pytest.mark.statistical
def test_nested_rhat_judges_short_chains_where_plain_rhat_cannot():
    """512 chains of 5 slow but stationary draws each, and the same started in 8 groups far apart."""
    x = autoregression(0.9, (512, 100), seed(0))[:, -5:]
    apart = x + 2 * np.repeat(np.arange(8), 64)[:, None]
    assert rhat(x) > 1.2  # each chain's few draws are alike
    within(nested_rhat(x, 8) - 1, 0.02, "nested R-hat beyond 1")
    assert nested_rhat(apart, 8) > 1.5


def test_bfmi_is_that_of_arviz_also_far_from_zero():
    energy = 1e6 + autoregression(0.8, (4, 300))
    with jax.enable_x64(True):
        np.testing.assert_allclose(bfmi(energy), arviz.bfmi(energy, **AXES), rtol=1e-7)
    single = (energy - 1e6).astype(np.float32) + np.float32(100)
    np.testing.assert_allclose(bfmi(single), arviz.bfmi(single.astype(float), **AXES), rtol=1e-3)


def test_bfmi_of_chains_that_cannot_be_judged_is_nan():
    energy = autoregression(0.0, (4, 30))
    energy[0] = 3.3
    energy[1, 5] = np.inf
    energy[2, 5] = np.nan
    assert np.isnan(bfmi(energy)).tolist() == [True, True, True, False]
    assert np.isnan(bfmi(energy[:, :1])).all()


@pytest.mark.parametrize(
    ("shape", "length"), [((4, 20, 7), 7), ((4, 20, 3, 10), 10), ((4, 20, 5, 1), 5)]
)
def test_blocks_of_columns_do_not_change_the_result(shape, length):
    """So many copies that a block is one column, or three, which do not divide the axis."""
    x = autoregression(0.3, shape)
    whole = per_leaf(column_nested_rhat, x, num_superchains=2)
    nbytes = x.size * 4 // length
    for num_columns in (1, 3):
        copies = 256 * 2**20 // (nbytes * num_columns) - 1
        blocks = per_leaf(column_nested_rhat, jnp.asarray(x), copies=copies, num_superchains=2)
        np.testing.assert_array_equal(blocks, whole)
        jitted = jax.jit(
            lambda x, c=copies: per_leaf(column_nested_rhat, x, copies=c, num_superchains=2)
        )
        np.testing.assert_allclose(jitted(x), whole, rtol=1e-6)


def test_draws_on_the_host_go_to_the_devices_by_slices_of_columns(monkeypatch):
    """Two slices of three columns on each of 8 devices, of 43: the last is filled up."""
    x = autoregression(0.3, (4, 20, 43))
    taken = []
    compute = columns._of_devices

    def recorded(leaf, *rest):
        taken.append((leaf.shape, leaf.sharding.shard_shape(leaf.shape)))
        return compute(leaf, *rest)

    whole = np.asarray(per_leaf(column_nested_rhat, x, num_superchains=2))
    monkeypatch.setattr(columns, "_of_devices", recorded)
    monkeypatch.setattr(columns, "TEMPORARY_BYTES", 3 * 4 * 20 * 8 * 10)
    found = per_leaf(column_nested_rhat, x, copies=10, num_superchains=2)
    assert taken == [((4, 20, 24), (4, 20, 3))] * 2
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, whole)


X = np.zeros((2, 10))
LEAF = r"\['w'\]\[1\].*\[chains, draws, \.\.\.\].*got"
REFUSED = [(rhat, ({"w": [X, bad]},), LEAF) for bad in (X[0], X[:0], np.float32(1))] + [
    (rhat, ({"z": X.astype(np.complex64)},), r"\['z'\].*complex"),
    (ess_tail, (X, (0.05, 1.5)), "probabilities"),
    (quantile, (X, 1.5), "probability"),
    (nested_rhat, (X, 1), "divisor of the number of chains"),
    (nested_rhat, (np.zeros((8, 10)), 5), "divisor of the number of chains"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED)
def test_what_cannot_be_judged_is_refused(function, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        function(*arguments)
