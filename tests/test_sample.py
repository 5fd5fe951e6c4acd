"""`sample` from end to end: draws against truths computed apart, warm-up, layouts, interruptions."""

import dataclasses
import functools
import itertools
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from numpyro.distributions.transforms import StickBreakingTransform
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import moments
from gspmd_mcmc.adaptation import dual_averaging
from gspmd_mcmc.adaptation.estimators.estimator import pooled_variance
from gspmd_mcmc.sampling import run, run_state
from gspmd_mcmc.sampling.reporting import Report
from gspmd_mcmc.sampling.run import capacity
from gspmd_mcmc.sampling.run_state import LOOPS_IN_GRAPHS, advance_in_graphs

KEY = jax.random.key(seed(0))
MEAN = {"a": np.linspace(-2, 2, 50, dtype=np.float32), "b": np.float32(3)}
SCALE = {"a": np.logspace(-2, 0, 50, dtype=np.float32), "b": np.float32(30)}
VARIANCE = jax.tree.map(np.square, SCALE)
ORIGIN = jax.tree.map(np.zeros_like, MEAN)
STARTS = {"a": np.tile(MEAN["a"], (4, 1)), "b": np.arange(4, dtype=np.float32)}
STATS = {
    "acceptance_rate": jnp.float32,
    "is_accepted": jnp.bool_,
    "is_divergent": jnp.bool_,
    "energy": jnp.float32,
    "energy_error": jnp.float32,
    "num_integration_steps": jnp.int32,
    "log_density": jnp.float32,
}


def gaussian(x, mean, scale):
    return jax.tree.map(lambda x, m, s: -0.5 * ((x - m) / s) ** 2, x, mean, scale)


TARGET = gm.LogDensity(gaussian, jax.tree.map(jnp.asarray, MEAN), jax.tree.map(jnp.asarray, SCALE))
KERNEL = gm.HMC(TARGET, 0.3, 6, inverse_mass_matrix=jax.tree.map(jnp.asarray, VARIANCE), jitter=0.5)


def sample(target: Any = TARGET, initial: Any = ORIGIN, rng_key=KEY, **options) -> gm.Draws:
    """Sample by HMC with a diagonal metric, which compile sooner than the defaults."""
    if "kernel" not in options and not isinstance(initial, gm.Draws):
        options["kernel"] = gm.HMC(target, 0.1, 32, jitter=0.5)
    options.setdefault("warmup", gm.WindowAdaptation(metric=gm.Diagonal()))
    return gm.sample(rng_key, target, initial, progress=False, **options)


def fixed(initial: Any = STARTS, num_samples=37, **options) -> gm.Draws:
    """A run without warm-up, from given starts."""
    options = {"kernel": KERNEL, "num_warmup": 0} | options
    return sample(initial=initial, num_samples=num_samples, **options)


def go_on(draws, num_samples):
    return fixed(draws, num_samples, kernel=None)


def starts_of(initial: Any, target: Any = TARGET, **options):
    """Where the chains start: the state after no step."""
    return sample(target, initial, num_warmup=0, num_samples=0, **options).state.position


def assert_equal(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def largest_z(x, mean, variance, num_batches=20):
    """Largest error of mean and variance in Monte Carlo standard errors, by means of batches."""
    scores = []
    for moment, truth in ((x, mean), ((x - mean) ** 2, variance)):
        batches = np.stack(np.split(moment, num_batches, axis=1), axis=1).mean(axis=2)
        batches = batches.reshape(-1, *x.shape[2:])
        error = batches.std(axis=0, ddof=1) / np.sqrt(len(batches))
        scores.append(np.abs((batches.mean(axis=0) - truth) / error).max())
    return max(scores)


def lies(array, mesh, spec):
    return array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


@pytest.fixture(scope="module")
def warm():
    return sample(num_warmup=500, num_samples=1000)


@pytest.fixture(scope="module")
def long_run():
    return fixed()


# The posterior.


@pytest.mark.statistical
def test_draws_have_mean_and_variance_of_a_gaussian(warm):
    """Over 102 scores a bound of 5 is crossed by chance in under one run of ten thousand."""
    for name in MEAN:
        x = np.asarray(warm.position[name], np.float64)
        within(largest_z(x, MEAN[name], VARIANCE[name]), 5, f"standard errors off in {name}")


@pytest.mark.statistical
@pytest.mark.parametrize(("stretch", "shift"), [(1.2, 0.0), (1.0, 0.2)])
def test_draws_that_are_stretched_or_shifted_fail_that_test(warm, stretch, shift):
    x = np.asarray(warm.position["a"], np.float64)
    x = MEAN["a"] + stretch * (x - MEAN["a"]) + shift * SCALE["a"]
    with pytest.raises(AssertionError, match="standard errors"):
        within(largest_z(x, MEAN["a"], VARIANCE["a"]), 5, "standard errors off")


MESH = gm.make_mesh(chains=2, data=2, model=2)
ROWS = np.random.default_rng(5).normal(size=(51, 4))
NOISE = 0.5
RESPONSE = ROWS @ np.array([1.0, -2.0, 0.5, 0.0]) + NOISE * np.random.default_rng(6).normal(size=51)
SHIFT = np.arange(8.0)


def shifted_prior(shift, params):
    return {"w": -0.5 * params["w"] ** 2, "z": -0.5 * (params["z"] - shift) ** 2}


def regression(params, block):
    return -0.5 * ((block["y"] - block["x"] @ params["w"]) / NOISE) ** 2


REGRESSION = gm.Posterior(
    Partial(shifted_prior, gm.place(SHIFT, MESH, P("model"))),
    gm.Plate(regression, gm.place({"x": ROWS, "y": RESPONSE}, MESH, P("data"))),
)
SHARDED_POSITION = gm.place({"w": np.zeros(4), "z": np.zeros(8)}, MESH, {"w": P(), "z": P("model")})


@pytest.fixture(scope="module")
def mesh_draws():
    """Rows over "data", a latent over "model"; fewer draws than their buffer holds, so they are cut."""
    kernel = gm.HMC(REGRESSION, 0.1, 6, jitter=0.5)
    return sample(REGRESSION, SHARDED_POSITION, kernel=kernel, num_warmup=200, num_samples=380)


@pytest.mark.statistical
def test_draws_agree_with_a_conjugate_regression_on_uneven_rows(mesh_draws):
    covariance = np.linalg.inv(ROWS.T @ ROWS / NOISE**2 + np.eye(4))
    mean = covariance @ ROWS.T @ RESPONSE / NOISE**2
    w, z = (np.asarray(mesh_draws.position[name], np.float64) for name in ("w", "z"))
    within(largest_z(w, mean, np.diag(covariance)), 5, "standard errors off in w")
    within(largest_z(z, SHIFT, np.ones(8)), 5, "standard errors off in z")


# What comes back.


def test_draws_and_traces_are_of_what_was_asked(warm):
    assert jax.tree.map(lambda x: (x.shape, x.dtype), warm.position) == {
        "a": ((4, 1000, 50), jnp.float32),
        "b": ((4, 1000), jnp.float32),
    }
    assert {n: (x.shape, x.dtype) for n, x in warm.stats.items()} == {
        name: ((4, 1000), dtype) for name, dtype in STATS.items()
    }
    assert (warm.num_chains, warm.num_draws, warm.num_steps) == (4, 1000, 1500)
    assert warm.acceptance_rate.shape == warm.num_divergent.shape == (4,)
    assert "4 chains x 1000 draws" in repr(warm)
    traces = warm.warmup
    assert traces["step_size"].shape == (500,) and (traces["step_size"] > 0).all()
    assert traces["acceptance_rate"].shape == traces["log_density"].shape == (4, 500)
    assert np.isfinite(traces["log_density"]).all()
    assert traces["num_divergent"].shape == (4,) and traces["leapfrogs"] > 4 * 500
    assert_equal(warm.state.position, jax.tree.map(lambda x: x[:, -1], warm.position))
    np.testing.assert_array_equal(warm.state.log_density, warm.stats["log_density"][:, -1])


def test_stats_tell_what_happened_to_the_draws(long_run):
    previous = np.concatenate([STARTS["b"][:, None], np.asarray(long_run.position["b"])[:, :-1]], 1)
    moved = np.asarray(long_run.position["b"]) != previous
    np.testing.assert_array_equal(moved, long_run.stats["is_accepted"])
    assert 0 < moved.mean() <= 1
    log_density = -0.5 * sum(
        (((np.asarray(long_run.position[n], np.float64) - MEAN[n]) / SCALE[n]) ** 2)
        .reshape(4, 37, -1)
        .sum(-1)
        for n in MEAN
    )
    np.testing.assert_allclose(long_run.stats["log_density"], log_density, rtol=1e-3)


def test_no_draws_are_no_draws():
    draws = fixed(num_samples=0)
    assert draws.position["a"].shape == (4, 0, 50)
    assert draws.stats["log_density"].shape == (4, 0)
    assert_equal(draws.state.position, STARTS)


# Warm-up.


def test_warm_up_learns_metric_and_step_size(warm):
    for name in MEAN:
        ratio = np.asarray(warm.kernel.inverse_mass_matrix[name]) / VARIANCE[name]
        assert 0.5 < ratio.min() <= ratio.max() < 2
    assert np.abs(warm.acceptance_rate - 0.8).max() < 0.12
    assert warm.stats["is_divergent"].sum() == 0


def test_warm_up_aims_at_the_acceptance_rate_asked_for(warm):
    adaptation = gm.WindowAdaptation(target_acceptance_rate=0.95, adapt_mass_matrix=False)
    draws = sample(initial=STARTS, num_warmup=400, num_samples=1000, kernel=KERNEL, warmup=adaptation)
    assert np.abs(draws.acceptance_rate - 0.95).max() < 0.04
    assert draws.kernel.step_size < warm.kernel.step_size
    assert_equal(draws.kernel.inverse_mass_matrix, VARIANCE)


def test_warm_up_may_keep_the_step_size():
    adaptation = gm.WindowAdaptation(metric=gm.Diagonal(), adapt_step_size=False)
    draws = fixed(num_warmup=40, warmup=adaptation)
    assert draws.kernel.step_size == KERNEL.step_size
    assert not np.allclose(draws.kernel.inverse_mass_matrix["a"], VARIANCE["a"], rtol=1e-3)


def test_no_warm_up_keeps_the_kernel(long_run):
    assert long_run.kernel.step_size == KERNEL.step_size
    assert_equal(long_run.kernel.inverse_mass_matrix, VARIANCE)


def moments_of(draws):
    """Moments of draws [draws, chains, ...]."""
    update = jax.jit(
        lambda xs: jax.lax.scan(lambda m, x: (moments.update(m, x), None), moments.init(xs[0]), xs)
    )
    return update(draws)[0]


@pytest.mark.parametrize("chains_in_play", [4, 1])
def test_pooled_variance_agrees_with_numpy(chains_in_play):
    x = np.random.default_rng(1).normal(3, 2, size=(30, chains_in_play, 5)).astype(np.float32)
    within = x.var(axis=0, ddof=1).mean(axis=0)
    between = x.mean(axis=0).var(axis=0, ddof=1) if chains_in_play > 1 else 0
    expected = np.where(within + between < 1.44 * within, within + between, within)
    np.testing.assert_allclose(pooled_variance(moments_of(x)), expected, rtol=1e-5)


def test_a_stuck_chain_does_not_stretch_the_metric():
    stuck = np.random.default_rng(2).normal(size=(100, 4, 5)).astype(np.float32)
    stuck[:, 3] = 1000
    expected = stuck.var(axis=0, ddof=1).mean(axis=0)
    np.testing.assert_allclose(pooled_variance(moments_of(stuck)), expected, rtol=1e-4)
    assert expected.max() < 1.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_variances_of_many_draws_are_right_in_any_dtype(dtype):
    """In bfloat16 a sum stops to grow at 256 times its terms."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(4000, 4, 5)), dtype)
    variance = np.asarray(pooled_variance(moments_of(x)), np.float32)
    np.testing.assert_allclose(variance, np.ones(5), rtol=0.1)


@pytest.mark.statistical
@pytest.mark.parametrize("target_rate", [0.6, 0.9])
def test_dual_averaging_converges_where_acceptance_falls_with_the_step(target_rate):
    """The acceptance rate exp(-step) is at the target where step = -log(target)."""

    def update(state, noise):
        rate = jnp.clip(jnp.exp(-jnp.exp(state.log_step_size)) + noise, 0, 1)
        return dual_averaging.update(state, rate, target_rate), None

    # Narrow enough that no rate near the target is cut, which would move the step size aimed at.
    noise = jax.random.uniform(jax.random.key(seed(4)), (2000,), minval=-0.1, maxval=0.1)
    state, _ = jax.jit(lambda s: jax.lax.scan(update, s, noise))(dual_averaging.init(jnp.float32(5)))
    step_size = float(dual_averaging.final_step_size(state))
    within(abs(step_size / -np.log(target_rate) - 1), 0.1, "of the step size")


@pytest.mark.parametrize("target_rate", [0.98, 0.995, 0.999])
def test_dual_averaging_reaches_targets_near_one(target_rate):
    """Rates in 64ths, all of them 1 above 0.992, would leave targets beyond that out of reach."""

    def update(i, state):
        rate = jnp.exp(-jnp.exp(state.log_step_size))
        return dual_averaging.update(state, rate, target_rate)

    state = jax.lax.fori_loop(0, 500, update, dual_averaging.init(jnp.float32(0.3)))
    assert float(dual_averaging.final_step_size(state)) == pytest.approx(-np.log(target_rate), rel=0.1)


def test_dual_averaging_takes_the_steps_of_the_paper():
    """Hoffman and Gelman (2014), algorithm 6, written out: gamma 0.05, t0 10, kappa 0.75.

    Ours shrinks towards the first step size itself, and takes acceptance rates in 64ths.
    """
    rates, mu, target_rate = [57 / 64, 13 / 64, 0.5, 1.0, 0.0], np.log(0.3), 0.8
    h = log_average = log_step = 0.0
    state = dual_averaging.init(jnp.float32(0.3))
    for m, rate in enumerate(rates, start=1):
        h = (1 - 1 / (m + 10)) * h + (target_rate - rate) / (m + 10)
        log_step = mu - np.sqrt(m) / 0.05 * h
        log_average = m**-0.75 * log_step + (1 - m**-0.75) * log_average
        state = dual_averaging.update(state, jnp.float32(rate), target_rate)
        assert float(state.log_step_size) == pytest.approx(log_step, rel=1e-4)
    assert float(dual_averaging.final_step_size(state)) == pytest.approx(np.exp(log_average), rel=1e-4)


def test_dual_averaging_keeps_a_step_size_without_updates_and_does_not_see_rounding():
    """Meshes sum in different orders; what that changes must not grow in the recursion."""
    state = dual_averaging.init(jnp.float32(0.25))
    assert float(dual_averaging.final_step_size(state)) == pytest.approx(0.25)
    one, other = (dual_averaging.update(state, jnp.float32(r), 0.8) for r in (0.7, 0.7 + 1e-6))
    assert float(one.log_step_size) == float(other.log_step_size)


@pytest.mark.parametrize("adapt_mass_matrix", [True, False])
def test_windows_cover_each_step_once(adapt_mass_matrix):
    for num_warmup in [*range(1, 320), 500, 1000, 1234, 5000]:
        windows = gm.WindowAdaptation(adapt_mass_matrix=adapt_mass_matrix).windows(num_warmup)
        assert [step for w in windows for step in range(w.start, w.end)] == list(range(num_warmup))
        assert all(w.start < w.end for w in windows)
        assert not windows[-1].learns_metric
        assert any(w.learns_metric for w in windows) == (adapt_mass_matrix and num_warmup >= 20)


def test_windows_of_a_long_warm_up_are_those_of_stan_and_none_of_no_warm_up():
    windows = gm.WindowAdaptation().windows(1000)
    assert [w.end for w in windows] == [75, 100, 150, 250, 450, 950, 1000]
    assert [w.learns_metric for w in windows] == [False, *[True] * 5, False]
    assert gm.WindowAdaptation().windows(0) == []


@pytest.mark.parametrize("num_warmup", [20, 21, 99, 100, 149, 150, 151, 200, 1000, 1050, 20_000])
def test_windows_are_those_of_numpyro(num_warmup):
    build_adaptation_schedule = pytest.importorskip("numpyro.infer.hmc_util").build_adaptation_schedule
    windows = gm.WindowAdaptation().windows(num_warmup)
    theirs = [(w.start, w.end + 1) for w in build_adaptation_schedule(num_warmup)]
    assert [(w.start, w.end) for w in windows] == theirs


# What is kept.


def test_thinning_keeps_every_third_step():
    """To the bit: buffers of the same size have the same program."""
    small = {"device_bytes": 8000}
    every, thinned = fixed(num_samples=36, **small), fixed(num_samples=12, thin=3, **small)
    assert_equal(thinned.position, jax.tree.map(lambda x: x[:, 2::3], every.position))
    stats = {n: np.asarray(x).reshape(4, 12, 3) for n, x in every.stats.items()}
    np.testing.assert_allclose(
        thinned.stats["acceptance_rate"], stats["acceptance_rate"].mean(axis=2), rtol=1e-6
    )
    np.testing.assert_array_equal(
        thinned.stats["num_integration_steps"], stats["num_integration_steps"].sum(axis=2)
    )
    np.testing.assert_array_equal(thinned.stats["energy_error"], stats["energy_error"][..., 2])
    assert thinned.num_steps == 36


def weighted(weights, position, info):
    return {"score": weights @ position["a"], "steps": info.num_integration_steps}


def test_collect_keeps_what_a_partial_returns(long_run):
    weights = jnp.arange(150.0).reshape(3, 50)
    draws = fixed(collect=Partial(weighted, weights))
    assert_equal(draws.state.position, long_run.state.position)
    kept = draws.position
    assert jax.tree.map(lambda x: (x.shape, x.dtype), kept) == {
        "score": ((4, 37, 3), jnp.float32),
        "steps": ((4, 37), jnp.int32),
    }
    expected = np.asarray(long_run.position["a"]) @ np.asarray(weights).T
    np.testing.assert_allclose(kept["score"], expected, rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(kept["steps"], long_run.stats["num_integration_steps"])


def mean_square(rows, position, info):
    return jnp.mean((rows["x"] @ position["a"] - rows["y"]) ** 2)


def test_collect_reads_data_that_lie_over_the_mesh(long_run, compiled):
    """They are arguments of the program: for other data of these shapes there is no other one."""
    mesh, rng = gm.make_mesh(chains=2, data=4), np.random.default_rng(0)
    x, y = rng.normal(size=(400, 50)).astype(np.float32), rng.normal(size=400).astype(np.float32)
    for sign in (1, -1):
        rows = gm.place({"x": x, "y": sign * y}, mesh, P("data"))
        kept = fixed(collect=Partial(mean_square, rows), mesh=mesh, num_samples=5).position
        errors = np.asarray(long_run.position["a"])[:, :5] @ x.T - sign * y
        np.testing.assert_allclose(kept, np.mean(errors**2, axis=-1), rtol=1e-3)
        assert ("jit(advance)" in compiled) == (sign == 1)
        compiled.clear()
    uneven = gm.place({"x": x[:399], "y": y[:399]}, mesh, P("data"))
    with pytest.raises(ValueError, match=r"collect .*\['x'\]: got Padded.*399 rows \+ 1 pad.*\.values"):
        fixed(collect=Partial(mean_square, uneven), mesh=mesh)


def z_and_more(position, info):
    return {"again": position["z"], "sum": position["z"] + 1.0}


def test_draws_lie_as_the_position_beside_what_is_derived_and_where_a_function_returns_it():
    target = gm.Posterior(
        REGRESSION.log_prior, *REGRESSION.plates, derived=lambda params: {"sum": params["z"] + 1.0}
    )
    options = {"kernel": gm.HMC(target, 0.1, 6), "num_warmup": 0, "num_samples": 3}
    draws = sample(target, SHARDED_POSITION, **options)
    kept = sample(target, SHARDED_POSITION, collect=z_and_more, **options).position
    for z, total in ((draws.position["z"], draws.position["sum"]), (kept["again"], kept["sum"])):
        assert lies(z, MESH, P("chains", None, "model"))
        assert lies(total, MESH, P("chains"))
        np.testing.assert_array_equal(np.asarray(z) + 1, total)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"bijections": {"w": None, "z": StickBreakingTransform()}}, (9,)),
        ({"derived": lambda params: {"z": jnp.sum(params["z"])}}, ()),
    ],
    ids=["a simplex", "of its name"],
)
def test_draws_that_the_mesh_does_not_divide_are_whole(options, shape):
    """The latent lies over the mesh; a simplex of it has a number more, and its sum has its name."""
    prior = Partial(shifted_prior, 0.0)
    target = gm.Posterior(prior, *REGRESSION.plates, **options)
    kernel = gm.HMC(target, 0.01, 2)
    draws = sample(target, SHARDED_POSITION, kernel=kernel, num_warmup=0, num_samples=3)
    assert draws.position["z"].shape == (4, 3, *shape)
    assert lies(draws.position["z"], MESH, P("chains"))
    assert lies(draws.state.position["z"], MESH, P("chains", "model"))


def test_draws_on_the_host_are_those_on_the_devices(long_run):
    """A draw is 904 bytes: the buffer holds 8 draws of 37, and is not full at the end."""
    host = fixed(device_bytes=8000)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves((host.position, host.stats)))
    assert_equal((host.position, host.stats), (long_run.position, long_run.stats))
    assert_equal(host.state.position, long_run.state.position)


@pytest.mark.parametrize(
    ("device_bytes", "num_shards", "num_draws"),
    [(0, 1, 1), (399, 1, 1), (800, 1, 2), (1200, 4, 12), (10**6, 1, 50), (None, 1, 50)],
)
def test_a_buffer_holds_what_fits_on_a_device_and_one_draw_at_least(
    device_bytes, num_shards, num_draws
):
    draw = [jax.ShapeDtypeStruct((4, 24), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)]
    assert capacity(draw, 50, num_shards, device_bytes) == num_draws


# Going on, and what belongs to the caller.


@pytest.fixture(scope="module")
def longer_run():
    return fixed(num_samples=74)


def test_going_on_equals_one_long_run(long_run, longer_run):
    rest = go_on(long_run, 37)
    joined = jax.tree.map(lambda a, b: np.concatenate([a, b], 1), long_run.position, rest.position)
    assert_equal(joined, longer_run.position)
    stats = jax.tree.map(lambda a, b: np.concatenate([a, b], 1), long_run.stats, rest.stats)
    assert_equal(stats, longer_run.stats)
    assert rest.num_steps == longer_run.num_steps == 74
    assert_equal(rest.state.position, longer_run.state.position)
    # The state can be used twice, and stays what it was.
    assert_equal(go_on(long_run, 37).position, rest.position)
    assert_equal(long_run.state.position, jax.tree.map(lambda x: x[:, -1], long_run.position))


def test_going_on_after_warm_up_equals_one_long_run(compiled_as_a_users):
    """To the bit; a quick compilation rounds otherwise in the program that has no warm-up."""
    whole = sample(num_warmup=100, num_samples=100)
    first = sample(num_warmup=100, num_samples=63)
    second = sample(initial=first, num_warmup=0, num_samples=37)
    assert_equal(second.position, jax.tree.map(lambda x: x[:, 63:], whole.position))


def test_going_on_on_a_mesh_runs_the_chunk_that_is_there(compiled):
    counts: dict[str, Any] = {"num_warmup": 0, "num_samples": 20}
    first = sample(REGRESSION, SHARDED_POSITION, **counts)
    assert "jit(advance)" in compiled
    compiled.clear()
    second = sample(REGRESSION, first, **counts)
    assert "jit(advance)" not in compiled
    compiled.clear()
    sample(REGRESSION, second, **counts)
    assert compiled == []


@pytest.mark.parametrize("options", [{}, {"num_warmup": 40}])
def test_the_callers_arrays_survive(warm, options):
    position = jax.tree.map(jnp.asarray, STARTS)
    fixed(position, **options)
    assert_equal(position, STARTS)
    assert_equal(KERNEL.inverse_mass_matrix, VARIANCE)
    assert_equal(TARGET.data, (MEAN, SCALE))


def test_a_placed_position_of_the_caller_survives(mesh_draws):
    zeros, specs = (
        {"w": np.zeros((4, 4)), "z": np.zeros((4, 8))},
        {"w": P("chains"), "z": P("chains", "model")},
    )
    position = gm.place(zeros, MESH, specs)
    options = {"kernel": mesh_draws.kernel, "num_warmup": 0, "num_samples": 380}
    with pytest.warns(gm.SamplingWarning, match="4 of 4 chains had not arrived"):
        draws = sample(REGRESSION, gm.per_chain(position), **options)
    assert_laid_out(draws)
    assert_equal(position, zeros)
    assert lies(position["z"], MESH, P("chains", "model"))


# Ctrl-C.


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(run, "next_size", lambda count, seconds: 5)


@pytest.mark.parametrize(
    ("count", "seconds", "size"),
    [
        (1, 1e-4, 500),  # of 50 ms
        (10, 1e-2, 80),  # eight times as many, as those of 50 ms are fewer
        (500, 0.05, 4000),
        (4000, 0.8, 5000),  # of a second
        (5000, 50.0, 100),
        (1, 30.0, 1),
    ],
)
def test_a_chunk_is_of_a_second_but_grows_eightfold_at_most_unless_it_is_short(count, seconds, size):
    assert run.next_size(count, seconds) == size


def test_a_window_of_warm_up_begins_with_an_eighth_of_the_chunk_before(monkeypatch):
    """Windows end at 75, 100, 150 and 200."""
    monkeypatch.setattr(run, "next_size", lambda count, seconds: 40)
    done = []
    sample(num_warmup=200, num_samples=0, callback=lambda report: done.append(report.done))
    assert done == [1, 41, 75, 80, 100, 105, 145, 150, 155, 195, 200]


@pytest.fixture
def handler():
    """A handler of Ctrl-C of the caller's own, which is to be in place again afterwards."""

    def own(signum, frame):
        raise AssertionError("the caller's handler was called during the run")

    previous = signal.signal(signal.SIGINT, own)
    yield own
    signal.signal(signal.SIGINT, previous)


def after_chunk(monkeypatch, act):
    """Call ``act(number)`` after each chunk, as it is reported."""
    numbers, advance = itertools.count(1), Report.advance

    def advance_and_act(self, *args, **numbers_shown):
        advance(self, *args, **numbers_shown)
        act(next(numbers))

    monkeypatch.setattr(Report, "advance", advance_and_act)


def interrupt_after_chunk(monkeypatch, *wanted):
    after_chunk(monkeypatch, lambda n: n in wanted and signal.raise_signal(signal.SIGINT))


@pytest.mark.parametrize(("device_bytes", "chunk", "count"), [(None, 3, 11), (8000, 4, 13)])
def test_ctrl_c_returns_the_draws_made_so_far(
    long_run, monkeypatch, small_chunks, handler, device_bytes, chunk, count
):
    """Chunks are of 1, 5, 5, ... draws; those of 1, 5, 2, 5, 3, ... draws fill buffers of 8."""
    interrupt_after_chunk(monkeypatch, chunk)
    with pytest.warns(gm.SamplingWarning, match=f"stopped after {count} of 37 draws"):
        draws = fixed(device_bytes=device_bytes)
    assert draws.num_draws == count
    assert_equal(draws.position, jax.tree.map(lambda x: x[:, :count], long_run.position))
    assert signal.getsignal(signal.SIGINT) is handler


def test_draws_that_ctrl_c_cut_short_can_be_gone_on_from(longer_run, monkeypatch, small_chunks):
    with monkeypatch.context() as patched, pytest.warns(gm.SamplingWarning, match="stopped after 16"):
        interrupt_after_chunk(patched, 4)
        first = fixed()
    second = go_on(first, 37)
    assert_equal(second.position, jax.tree.map(lambda x: x[:, 16 : 16 + 37], longer_run.position))


def test_ctrl_c_during_warm_up_returns_no_draws(monkeypatch, small_chunks, handler):
    interrupt_after_chunk(monkeypatch, 4)
    with pytest.warns(gm.SamplingWarning, match="stopped after 0 of 1000 draws"):
        draws = sample(num_warmup=500, num_samples=1000)
    assert draws.num_draws == 0
    assert draws.num_steps == draws.warmup["acceptance_rate"].shape[1] == 16
    assert np.isfinite(draws.state.log_density).all()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_raises(monkeypatch, small_chunks, handler):
    def twice(number):
        if number == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    after_chunk(monkeypatch, twice)
    with pytest.raises(KeyboardInterrupt):
        fixed()
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_handler_is_restored_after_a_run_and_after_an_error(monkeypatch, handler):
    fixed()
    assert signal.getsignal(signal.SIGINT) is handler

    def fail(number):
        raise RuntimeError("in the middle")

    after_chunk(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        fixed()
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_from_outside_stops_a_long_run(long_run, monkeypatch):
    """One step a chunk would take minutes for all; the signal comes as one from a terminal does."""
    monkeypatch.setattr(run, "next_size", lambda count, seconds: 1)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    after_chunk(monkeypatch, lambda n: n == 1 and timer.start())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = fixed(num_samples=100_000, device_bytes=8000)
    # Chains without warm-up may also have arrived late, which a hundred draws tell.
    said = [str(w.message) for w in caught]
    assert said[0].startswith("stopped after")
    assert all("had not arrived" in text for text in said[1:])
    assert 1 <= draws.num_draws < 100_000
    assert_equal(draws.position["b"][:, :1], np.asarray(long_run.position["b"])[:, :1])


def test_sampling_works_outside_the_main_thread(long_run):
    results = []
    thread = threading.Thread(target=lambda: results.append(fixed()))
    thread.start()
    thread.join()
    assert_equal(results[0].position, long_run.position)


# Compilation.


def beyond_one_operation(names):
    """Leave out comparisons, to check numbers and metrics, and the cut of a buffer to its draws."""
    single = ("greater", "less", "equal", "reduce_all", "convert_element_type", "first_draws")
    return [n for n in names if not any(op in n for op in single)]


def test_the_count_of_compilations_sees_a_new_program(compiled):
    jax.jit(lambda x: x * 3 + 1)(jnp.float32(2))
    assert len(beyond_one_operation(compiled)) > 0


def test_another_kernel_of_the_same_form_compiles_nothing(long_run, compiled):
    kernel = gm.HMC(
        TARGET, np.float64(0.2), 5, jitter=0, inverse_mass_matrix=KERNEL.inverse_mass_matrix
    )
    fixed(kernel=kernel)
    fixed(kernel=kernel.with_step_size(jnp.float32(0.1)).with_num_integration_steps(jnp.int32(3)))
    assert beyond_one_operation(compiled) == []


def test_another_count_of_draws_compiles_no_step(long_run, compiled):
    fixed(num_samples=39)
    assert beyond_one_operation(compiled) == []


def test_chunks_compile_nothing_after_the_first(long_run, monkeypatch, small_chunks, compiled):
    seen = []
    after_chunk(monkeypatch, lambda n: seen.append(len(compiled)))
    fixed()
    assert len(seen) == 9
    assert seen[-1] == seen[0]


# Starts.


@pytest.mark.parametrize("radius", [None, 0.5])
def test_chains_start_spread_around_a_position(radius):
    initial = MEAN if radius is None else gm.uniform_start(MEAN, radius)
    starts = starts_of(initial, num_chains=40)
    moved = np.abs(np.asarray(starts["a"]) - MEAN["a"]) / (radius or 2.0)
    assert moved.shape == (40, 50)
    assert moved.max() <= 1 + 1e-6
    assert moved.mean() == pytest.approx(0.5, abs=5 / np.sqrt(12 * moved.size))
    assert len(np.unique(starts["b"])) == 40


def prior_draw(scale, rng_key):
    return {"a": scale * jax.random.normal(rng_key, (50,)), "b": jnp.zeros(())}


def test_chains_start_at_draws_of_a_function():
    scale = 3.0
    starts = starts_of(Partial(prior_draw, jnp.float32(scale)), num_chains=40)
    assert_equal(starts["b"], np.zeros(40, np.float32))
    std = np.asarray(starts["a"]).std()
    assert std == pytest.approx(scale, abs=5 * scale / np.sqrt(2 * 2000))


def gamma(x):
    return jnp.log(x) - x


def around_zero(rng_key):
    return jax.random.uniform(rng_key, (), minval=-1, maxval=1)


def test_starts_are_drawn_again_where_the_log_density_is_not_finite():
    """That 32 chains all start right at once has probability 2^-32."""
    starts = np.asarray(starts_of(around_zero, gm.LogDensity(gamma), num_chains=32))
    assert ((starts > 0) & (starts < 1)).all()
    assert len(np.unique(starts)) == 32


def repeated(position):
    return jax.tree.map(lambda x: np.stack([x] * 4), position)


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (STARTS, STARTS),
        (gm.per_chain(STARTS), STARTS),
        (gm.uniform_start(MEAN, 0.0), repeated(MEAN)),
        (gm.Mode(MEAN, VARIANCE, jnp.zeros(()), 0, True), repeated(MEAN)),
    ],
)
def test_given_starts_are_used_as_they_are(initial, expected):
    assert_equal(starts_of(initial), expected)


# Modes.


ROUND_SCALE = {"a": np.linspace(0.5, 2, 50, dtype=np.float32), "b": np.float32(3)}
ROUND = gm.LogDensity(gaussian, *jax.tree.map(jnp.asarray, (MEAN, ROUND_SCALE)))


@pytest.fixture(scope="module")
def mode():
    return gm.find_mode(KEY, ROUND, ORIGIN)


def largest_error(mode, scale):
    """Largest error of a mode, in standard deviations of the Gaussian."""
    return max(np.abs((np.asarray(mode.position[n]) - MEAN[n]) / scale[n]).max() for n in MEAN)


def test_the_mode_of_a_gaussian_is_its_mean(mode):
    assert mode.is_converged
    assert 0 < mode.num_steps < 500
    assert largest_error(mode, ROUND_SCALE) < 0.01
    assert float(mode.log_density) == pytest.approx(0, abs=1e-3)


def test_a_mode_of_very_uneven_scales_is_not_called_converged_too_soon():
    """Where scales span 1 to 3000, the gradient along the narrow ones hides that of the wide ones."""
    mode = gm.find_mode(KEY, TARGET, ORIGIN, num_probes=0)
    assert largest_error(mode, SCALE) < 0.5 or not mode.is_converged


def test_the_curvature_at_the_mode_of_a_gaussian_is_its_precision(mode):
    """Random signs give the diagonal of a diagonal Hessian without error."""
    variance = jax.tree.map(np.square, ROUND_SCALE)
    for name in MEAN:
        np.testing.assert_allclose(mode.curvature[name], 1 / variance[name], rtol=1e-4)
        np.testing.assert_allclose(mode.inverse_mass_matrix[name], variance[name], rtol=1e-4)


PRECISION = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, -0.3], [0.0, -0.3, 3.0]], np.float32)


def correlated(x, precision, mean):
    return -0.5 * (x - mean) @ precision @ (x - mean)


@pytest.mark.statistical
def test_the_curvature_of_a_correlated_gaussian_is_estimated():
    """The variance of the estimate is the sum of the squares off the diagonal, by the probes."""
    mean = jnp.array([1.0, -1.0, 2.0])
    target = gm.LogDensity(correlated, jnp.asarray(PRECISION), mean)
    mode = gm.find_mode(KEY, target, jnp.zeros(3), num_probes=400)
    np.testing.assert_allclose(mode.position, mean, atol=1e-2)
    off = PRECISION - np.diag(np.diag(PRECISION))
    error = np.sqrt((off**2).sum(axis=1) / 400)
    off_by = np.abs(mode.curvature - np.diag(PRECISION))
    within(np.max(off_by / (error + 2e-5)), 5, "standard errors off")


def test_a_search_that_is_cut_short_says_so():
    mode = gm.find_mode(KEY, ROUND, ORIGIN, max_steps=1, num_probes=0)
    assert (mode.num_steps, mode.is_converged) == (1, False)
    assert_equal(mode.curvature, jax.tree.map(np.ones_like, ORIGIN))


@pytest.mark.statistical
def test_laplace_starts_have_the_variance_of_the_gaussian(mode):
    starts = starts_of(mode.laplace_start(), ROUND, num_chains=400)
    z = (np.asarray(starts["a"]) - MEAN["a"]) / ROUND_SCALE["a"]
    within(abs(z.var() - 1), 5 * np.sqrt(2 / z.size) + 0.01, "of the variance")
    within(np.max(np.abs(z.var(axis=0) - 1)), 6 * np.sqrt(2 / 400), "of an element's variance")


def test_the_search_for_a_mode_keeps_the_layout():
    mesh = gm.make_mesh(model=4, devices=jax.devices()[:4])
    start = gm.place(np.zeros(8, np.float32), mesh, P("model"))
    target = gm.LogDensity(lambda x, m: -0.5 * (x - m) ** 2, gm.place(np.ones(8), mesh, P("model")))
    mode = gm.find_mode(KEY, target, start, num_probes=2)
    np.testing.assert_allclose(mode.position, np.ones(8), atol=1e-3)
    assert lies(mode.position, mesh, P("model"))
    assert lies(mode.curvature, mesh, P("model"))
    np.testing.assert_array_equal(start, np.zeros(8))


# Warnings.


def wide_and_narrow(x):
    """Two hills, one of them too narrow for the step size."""
    return jnp.where(x < 50, -0.5 * x**2, -0.5e4 * (x - 100) ** 2)


def test_chains_that_accept_differently_and_diverge_are_warned_of():
    target = gm.LogDensity(wide_and_narrow)
    starts = gm.per_chain(jnp.array([0.0, 1.0, -1.0, 100.0]))
    with pytest.warns(gm.SamplingWarning) as warned:
        draws = sample(target, starts, kernel=gm.HMC(target, 0.5, 5), num_warmup=0, num_samples=50)
    messages = [str(w.message) for w in warned]
    assert len(messages) == 2
    assert messages[0].startswith("acceptance rates differ between chains (chain 3: 0.")
    assert f"chain 3: {draws.acceptance_rate[3]:.2f}" in messages[0]
    assert (
        f"{draws.num_divergent[3]} of 200 transitions after warm-up diverged (chain 3:" in messages[1]
    )


# ArviZ.


def test_a_datatree_holds_draws_and_stats(long_run):
    tree = long_run.to_datatree()
    np.testing.assert_array_equal(tree["posterior"]["a"].values, long_run.position["a"])
    assert tree["posterior"]["a"].dims[:2] == ("chain", "draw")
    expected = {*STATS, "lp", "diverging"} - {"log_density", "is_divergent"}
    assert set(tree["sample_stats"].data_vars) == expected
    np.testing.assert_array_equal(tree["sample_stats"]["lp"].values, long_run.stats["log_density"])


def test_leaves_whose_names_clash_are_all_there(long_run):
    b = np.asarray(long_run.position["b"])
    clashing = {"a": {"b": b}, "a_b": b + 1, "log_density": b + 2}
    draws = dataclasses.replace(long_run, position=clashing)
    kept = draws.to_datatree()["posterior"].data_vars.values()
    assert sorted(float(x.mean()) for x in kept) == pytest.approx([b.mean() + i for i in range(3)])


@pytest.mark.parametrize(
    ("module", "extra", "call"),
    [
        ("arviz_base", "arviz", lambda draws: draws.to_datatree()),
        ("optax", "optim", lambda draws: gm.find_mode(KEY, TARGET, ORIGIN)),
    ],
)
def test_a_missing_extra_is_named(long_run, monkeypatch, module, extra, call):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"{module} is missing: pip install 'gspmd_mcmc\[{extra}\]'"
    with pytest.raises(ImportError, match=message):
        call(long_run)


# Dtypes.


def standard_normal(x):
    return jax.tree.map(lambda a: -0.5 * a**2, x)


@pytest.mark.parametrize(
    ("dtypes", "accumulated"),
    [(("float32",), "float32"), (("float64", "float32"), "float64")],
)
def test_positions_keep_their_dtypes(dtypes, accumulated):
    with jax.enable_x64("float64" in dtypes):
        target = gm.LogDensity(standard_normal)
        position = {dtype: jnp.zeros(10, dtype) for dtype in dtypes}
        # The search for the first step size takes longest to compile; once is enough.
        adapts = "float64" in dtypes
        warmup = gm.WindowAdaptation(metric=gm.Diagonal(), adapt_step_size=adapts)
        options = {"kernel": gm.HMC(target, 0.4, 8, jitter=0.5), "warmup": warmup}
        draws = sample(target, position, num_warmup=60, num_samples=400, **options)
    for tree in (draws.position, draws.state.position, draws.kernel.inverse_mass_matrix):
        assert {name: str(leaf.dtype) for name, leaf in tree.items()} == {d: d for d in dtypes}
    assert draws.state.log_density.dtype == draws.stats["energy_error"].dtype == accumulated
    x = np.concatenate([np.asarray(x, np.float64) for x in draws.position.values()], axis=2)
    assert largest_z(x, np.zeros(x.shape[-1]), np.ones(x.shape[-1])) < 5


# Layouts of the position.


def test_a_jitted_step_keeps_the_layout_of_the_position():
    kernel = gm.HMC(REGRESSION, 0.1, 3)
    state = kernel.init(SHARDED_POSITION)
    after, _ = jax.jit(gm.HMC.step)(kernel, KEY, state)
    for tree in (state.position, state.log_density_grad, after.position, after.log_density_grad):
        assert lies(tree["w"], MESH, P())
        assert lies(tree["z"], MESH, P("model"))


def assert_laid_out(draws):
    assert draws.position["w"].shape == (4, 380, 4) and draws.position["z"].shape == (4, 380, 8)
    assert {s.data.shape for s in draws.position["w"].addressable_shards} == {(2, 380, 4)}
    assert lies(draws.position["w"], MESH, P("chains"))
    assert all(lies(x, MESH, P("chains")) for x in draws.stats.values())
    assert lies(draws.position["z"], MESH, P("chains", None, "model"))
    for tree in (draws.state.position, draws.state.log_density_grad):
        assert lies(tree["w"], MESH, P("chains"))
        assert lies(tree["z"], MESH, P("chains", "model"))
    assert lies(draws.kernel.inverse_mass_matrix["w"], MESH, P())
    assert lies(draws.kernel.inverse_mass_matrix["z"], MESH, P("model"))


def test_going_on_keeps_the_layout_and_the_host_has_the_same_draws(mesh_draws):
    """A draw is 140 bytes of its 2 chains: 380 fill four buffers of 89, and a rest."""
    assert_laid_out(mesh_draws)
    device = sample(REGRESSION, mesh_draws, num_warmup=0, num_samples=380)
    assert_laid_out(device)
    host = sample(REGRESSION, mesh_draws, num_warmup=0, num_samples=380, device_bytes=12_500)
    assert isinstance(host.position["z"], np.ndarray)
    assert_equal((host.position, host.stats), (device.position, device.stats))


@pytest.mark.parametrize("num_warmup", [10, 24, 40])
def test_a_short_warmup_ends_on_a_usable_step_size(num_warmup):
    draws = sample(num_warmup=num_warmup, num_samples=50, kernel=gm.HMC(TARGET, 0.1, 8))
    assert draws.acceptance_rate.min() > 0.3


def safe_under_0_3(kernel, rng_key):
    return jnp.full(4, jnp.where(kernel.step_size < 0.3, 1.0, 0.1))


def test_only_the_first_window_after_a_start_at_a_mode_begins_with_a_quarter():
    """Later windows begin where chains are, no longer at the mode."""
    mode = gm.Mode(ORIGIN, VARIANCE, jnp.zeros(()), 0, True)
    kernel = gm.HMC(TARGET, 0.1, 8)
    states = sample(initial=mode, kernel=kernel, num_warmup=0, num_samples=0).state

    def begins_with(adaptation, is_first):
        state = adaptation.init(kernel, states)
        start = gm.WindowStart(jnp.asarray(is_first), KEY, safe_under_0_3)
        state = adaptation.begin(state, kernel, states, start)
        return float(adaptation.tuned(kernel, state).step_size)

    adaptation = gm.WindowAdaptation()
    assert [begins_with(adaptation, first) for first in (True, False)] == pytest.approx([0.2, 0.2])
    adaptation = adaptation.from_mode()
    assert [begins_with(adaptation, first) for first in (True, False)] == pytest.approx([0.05, 0.2])


def test_a_start_at_a_mode_is_told_to_the_warm_up(monkeypatch):
    seen = []
    monkeypatch.setattr(gm.WindowAdaptation, "from_mode", lambda self: seen.append(self) or self)
    sample(initial=gm.Mode(ORIGIN, VARIANCE, jnp.zeros(()), 0, True), num_warmup=0, num_samples=0)
    assert len(seen) == 1


def test_dtypes_may_be_promoted_strictly_around_a_run(long_run):
    with jax.numpy_dtype_promotion("strict"):
        draws = fixed()
        rhat = draws.summary().rhat
    assert_equal(draws.position, long_run.position)
    assert_equal(rhat, long_run.summary().rhat)


def test_an_axis_of_one_device_cuts_nothing():
    """What a program returns on a mesh of one device may name the axis of the rows: it is whole."""
    mesh = gm.make_mesh(data=1, devices=jax.devices()[:1])
    rows = gm.place(np.ones((6, 2), np.float32), mesh, P("data"))
    plate = gm.Plate(lambda params, x: -0.5 * (x @ params["w"]) ** 2, rows)
    target = gm.Posterior(lambda params: -0.5 * params["w"] ** 2, plate)
    w = jax.device_put(jnp.zeros(2), NamedSharding(mesh, P("data")))
    options = {"num_chains": 2, "num_warmup": 0, "num_samples": 3, "progress": False}
    draws = gm.sample(jax.random.key(0), target, {"w": w}, kernel=gm.HMC(target, 0.1, 2), **options)
    assert np.all(np.isfinite(draws.position["w"]))


def test_on_a_gpu_loops_are_graphs_and_draws_are_the_same(monkeypatch):
    """Compiled with the options of a GPU's programs, which a CPU's compiler takes too."""
    target = gm.LogDensity(lambda position: -0.5 * jnp.sum(position["x"] ** 2))

    def draws():
        settings = {"num_warmup": 20, "num_samples": 10, "progress": False}
        return gm.sample(jax.random.key(seed(0)), target, {"x": jnp.zeros(3)}, **settings).position["x"]

    plain, used = draws(), []
    in_graphs = run.advance_in_graphs

    def counted():
        used.append(in_graphs())
        return used[-1]

    monkeypatch.setattr(run, "advance_in_graphs", counted)
    np.testing.assert_array_equal(draws(), plain)
    assert not used  # not on a CPU
    monkeypatch.setattr(run, "LAUNCHED", ("cpu",))
    np.testing.assert_array_equal(draws(), plain)
    assert used


@pytest.mark.parametrize(
    ("name", "value"),
    [("xla_gpu_that_jaxlib_dropped", "1"), ("xla_gpu_enable_command_buffer", "FUSION,DROPPED")],
    ids=["a name", "a value"],
)
def test_an_option_that_xla_has_dropped_costs_itself_alone(monkeypatch, name, value):
    target = gm.LogDensity(lambda position: -0.5 * jnp.sum(position["x"] ** 2))
    settings = {"num_warmup": 20, "num_samples": 10, "progress": False}
    key, start = jax.random.key(seed(0)), {"x": jnp.zeros(3)}
    plain = gm.sample(key, target, start, **settings).position["x"]
    monkeypatch.setattr(run_state, "LOOPS_IN_GRAPHS", LOOPS_IN_GRAPHS | {name: value})
    monkeypatch.setattr(run, "advance_in_graphs", functools.cache(advance_in_graphs.__wrapped__))
    monkeypatch.setattr(run, "LAUNCHED", ("cpu",))
    with pytest.warns(gm.SamplingWarning, match=f"does not take XLA's option {name}='{value}'"):
        draws = gm.sample(key, target, start, **settings)
    np.testing.assert_array_equal(draws.position["x"], plain)
    gm.sample(key, target, start, **settings)  # and says so once


def test_the_guide_has_the_option_that_makes_loops_graphs():
    guide = (Path(__file__).parent.parent / "docs" / "devices.md").read_text()
    for name, value in LOOPS_IN_GRAPHS.items():
        assert f'"{name}": "{value}"' in guide
