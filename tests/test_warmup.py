"""Warm-up as data: what `sample` chooses by itself, per-chain settings, stuck chains, programs."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc.placement.layout import Layout, read_layout
from gspmd_mcmc.sampling import defaults

KEY = jax.random.key(seed(0))
MESH = gm.make_mesh(chains=2, data=4)
PAIR = gm.make_mesh(chains=2, devices=jax.devices()[:2])
SCALE = np.array([0.1, 1.0, 10.0], np.float32)


def gaussian(x, scale):
    return jax.tree.map(lambda x, s: -0.5 * (x / s) ** 2, x, scale)


TARGET = gm.LogDensity(gaussian, {"x": jnp.asarray(SCALE)})
ORIGIN = {"x": jnp.zeros(3)}


def sample(target: Any = TARGET, position: Any = ORIGIN, **options):
    options = {"num_warmup": 200, "num_samples": 100, "progress": False} | options
    return gm.sample(KEY, target, position, **options)


# What is chosen where nothing is said.


def metric_of(size, spec=None, **options):
    position = {"x": gm.place(np.zeros(size, np.float32), MESH, spec or P())}
    layout = read_layout(MESH, TARGET, position, 4, has_chains=False)
    kernel = gm.NUTS(TARGET, 0.1, **options)
    return type(defaults.with_metric(gm.WindowAdaptation(), kernel, layout).metric)


def test_a_small_position_that_is_whole_has_a_dense_metric():
    assert metric_of(100) is gm.Dense
    assert metric_of(101) is gm.Diagonal
    assert metric_of(100, P("data")) is gm.Diagonal


def squares(params, batch):
    return -0.5 * (batch["y"] - params["x"]) ** 2


def test_latents_of_rows_have_a_diagonal_metric_with_no_mesh_too():
    target = gm.Posterior(None, gm.Plate(squares, {"y": jnp.zeros(3)}, local="x"))
    draws = sample(target, num_warmup=20, num_samples=3, kernel=gm.HMC(target, 0.1, 2))
    assert draws.kernel.inverse_mass_matrix["x"].shape == (3,)


def test_a_metric_of_ones_own_is_learned_on():
    assert metric_of(3, inverse_mass_matrix={"x": jnp.ones(3)}) is gm.Diagonal


def test_a_dense_metric_of_ones_own_is_kept_while_many_chains_tune_the_length():
    own = gm.Dense().identity({"x": jnp.zeros((32, 3))})
    kernel = gm.JitteredHMC(TARGET, 0.1, 1.0, inverse_mass_matrix=own)
    kept: Any = sample(kernel=kernel, num_chains=32, num_warmup=40, num_samples=3).kernel
    assert tree_equal(kept.inverse_mass_matrix, own)
    assert kept.step_size != kernel.step_size and kept.trajectory_length != kernel.trajectory_length


def test_a_dense_metric_of_ones_own_is_the_first_where_one_is_learned():
    own = gm.DenseMetric.of_covariances(ORIGIN, np.diag(SCALE**2))
    kernel, warmup = gm.HMC(TARGET, 0.5, 3, own), gm.WindowAdaptation(metric=gm.Dense())
    options = {"kernel": kernel, "warmup": warmup, "num_samples": 0}
    held = sample(num_warmup=10, **options).kernel  # too few steps to learn a metric
    assert tree_equal(held.inverse_mass_matrix, own) and held.step_size > 0.5
    with pytest.raises(ValueError, match="the kernel has one of another kind than DenseBlock"):
        sample(**options | {"warmup": gm.WindowAdaptation(metric=gm.DenseBlock())})


def test_a_warm_up_is_no_function_of_a_kernel():
    with pytest.raises(TypeError, match=r"WindowAdaptation: it takes settings.*sample\(rng_key"):
        gm.WindowAdaptation(gm.NUTS, TARGET)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("own", [None, {"x": jnp.array([1.0, 4.0, 0.25])}])
def test_a_metric_is_left_alone_while_many_chains_tune_the_length(own):
    kernel = gm.JitteredHMC(TARGET, 0.1, 1.0, inverse_mass_matrix=own)
    warmup = gm.ChEESAdaptation(adapt_mass_matrix=False)
    options = {"num_chains": 32, "num_warmup": 40, "num_samples": 0}
    kept: Any = sample(kernel=kernel, warmup=warmup, **options).kernel
    assert tree_equal(kept.inverse_mass_matrix, own)
    assert kept.step_size != kernel.step_size and kept.trajectory_length != kernel.trajectory_length


def tree_equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(
        jax.tree.map(np.array_equal, a, b)
    )


def correlated(x, precision):
    return -0.5 * x @ precision @ x


COVARIANCE = np.array([[10.0, 0.8], [0.8, 0.1]])  # of NumPyro's own test of a dense metric
PAIRED = gm.LogDensity(correlated, jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32))


@pytest.mark.statistical
def test_a_dense_metric_becomes_the_covariance():
    """Within a tenth, as NumPyro asks of its own after as many steps of one chain."""
    options = {"num_chains": 1, "num_warmup": 20_000, "num_samples": 0}
    warmup = gm.WindowAdaptation(metric=gm.Dense())
    kernel = gm.JitteredHMC(PAIRED, 0.1, 2.0)
    tuned: Any = sample(PAIRED, jnp.zeros(2), kernel=kernel, warmup=warmup, **options).kernel
    assert tuned.trajectory_length == 2
    learned = jax.vmap(tuned.velocity)(jnp.eye(2))
    within(np.abs(learned / COVARIANCE - 1).max(), 0.1, "error of the metric")


@pytest.mark.statistical
def test_lengths_that_are_all_half_a_period_teach_no_variances():
    """Three leapfrogs of step 1 bring a Gaussian to minus its start; so lengths have jitter."""
    normals = np.random.default_rng(0).normal(size=(4, 2))
    start = gm.per_chain(jnp.asarray(normals @ np.linalg.cholesky(COVARIANCE).T, jnp.float32))
    own = gm.DenseMetric.of_covariances(jnp.zeros(2), COVARIANCE)
    squares = []
    for jitter in (0.0, 0.75):
        kernel = gm.JitteredHMC(PAIRED, 1.0, 3.0, own, jitter=jitter)
        draws = sample(PAIRED, start, kernel=kernel, num_warmup=0, num_samples=2000)
        squares.append(np.asarray(draws.position[..., 0]) ** 2)
    np.testing.assert_allclose(squares[0], np.tile(squares[0][:, :1], 2000), rtol=0.02)
    assert gm.ess_bulk(squares[1]) > 2000


def test_few_chains_take_nuts_with_a_dense_metric():
    draws = sample(num_warmup=50, num_samples=3)
    assert isinstance(draws.kernel, gm.NUTS)
    assert "tree_depth" in draws.stats
    assert type(draws.kernel.inverse_mass_matrix) is type(gm.Dense().identity({"x": jnp.zeros((4, 3))}))


def test_many_chains_tune_a_length_together():
    assert isinstance(defaults.kernel_for(TARGET, 31), gm.NUTS)
    kernel = defaults.kernel_for(TARGET, 32)
    assert isinstance(kernel, gm.JitteredHMC)
    assert isinstance(defaults.warmup_for(kernel), gm.SNAPERAdaptation)


@pytest.mark.parametrize(
    ("kernel", "warmup", "message"),
    [
        (gm.MCLMC(TARGET, 0.1, 1.0), gm.WindowAdaptation(), "no acceptance rate .* MCLMCAdaptation"),
        (gm.NUTS(TARGET, 0.1), gm.SNAPERAdaptation(), "SNAPERAdaptation tunes JitteredHMC, got NUTS"),
        (gm.NUTS(TARGET, 0.1), gm.MCLMCAdaptation(), "MCLMCAdaptation tunes MCLMC, got NUTS"),
    ],
)
def test_a_warm_up_that_does_not_suit_the_kernel_is_refused(kernel, warmup, message):
    with pytest.raises(TypeError, match=message):
        sample(kernel=kernel, warmup=warmup)


# Each chain by itself.

SCALES = np.array([[0.01], [1.0], [100.0], [1.0]], np.float32)


def of_its_chain(x):
    """A density whose modes lie far apart, each with its own width."""
    modes = jnp.array([-3e4, -1e4, 1e4, 3e4])
    mode = jnp.argmin(jnp.abs(x["x"] - modes))
    return -0.5 * ((x["x"] - modes[mode]) / jnp.asarray(SCALES)[mode]) ** 2


@pytest.fixture(scope="module")
def chains_apart():
    target = gm.LogDensity(of_its_chain)
    starts = gm.per_chain({"x": jnp.array([[-3e4], [-1e4], [1e4], [3e4]])})
    inner = gm.WindowAdaptation(metric=gm.Diagonal())
    kernel = gm.HMC(target, 0.01, 4, jitter=0.5)
    options = {"kernel": kernel, "mesh": PAIR, "num_warmup": 400}
    return sample(target, starts, warmup=gm.PerChainAdaptation(inner), **options)


@pytest.mark.statistical
def test_chains_learn_scales_of_their_own(chains_apart):
    sd = np.sqrt(np.asarray(chains_apart.kernel.inverse_mass_matrix["x"]))
    assert sd.shape == (4, 1)
    # The prior of the metric, 1e-3, is far over the variance of the narrowest mode.
    within(np.max(np.abs(sd[1:] / SCALES[1:] - 1)), 0.5, "of a scale")
    assert sd[0, 0] < 0.1


@pytest.mark.statistical
def test_chains_have_step_sizes_of_their_own(chains_apart):
    assert chains_apart.kernel.step_size.shape == (4,)
    assert chains_apart.warmup["step_size"].shape == (4, 400)
    within(np.abs(chains_apart.acceptance_rate - 0.8).max(), 0.2, "from the rate asked for")


def test_the_metrics_of_chains_lie_where_the_chains_do():
    """Of every kind, the parts that are not like the position too."""
    for metric in (gm.Dense(), gm.LowRank(2)):
        warmup = gm.PerChainAdaptation(gm.WindowAdaptation(metric=metric))
        draws = sample(kernel=gm.HMC(TARGET, 0.1, 4), warmup=warmup, mesh=MESH, num_samples=0)
        leaves = jax.tree.leaves(draws.kernel.inverse_mass_matrix)
        assert len(leaves) > 2
        assert {x.sharding.spec[0] for x in leaves} == {"chains"}


def test_draws_of_chains_with_own_settings_go_on(chains_apart):
    more = gm.sample(
        KEY, chains_apart.kernel.target, chains_apart, num_warmup=0, num_samples=5, progress=False
    )
    np.testing.assert_array_equal(more.kernel.step_size, chains_apart.kernel.step_size)
    assert (more.acceptance_rate > 0.3).all()


# Programs.


def test_other_numbers_compile_nothing_anew(compiled):
    """Another key, other data, other counts, another target rate and first step size."""

    def run(seed, scale, rate, num_warmup, num_samples):
        target = gm.LogDensity(gaussian, {"x": jnp.asarray(scale)})
        warmup = gm.WindowAdaptation(target_acceptance_rate=rate)
        kernel = gm.NUTS(target, 0.1 * rate, max_tree_depth=4)
        options = {"num_warmup": num_warmup, "num_samples": num_samples}
        return gm.sample(
            jax.random.key(seed),
            target,
            ORIGIN,
            kernel=kernel,
            warmup=warmup,
            progress=False,
            **options,
        )

    run(0, SCALE, 0.8, 192, 96)
    assert len(compiled) > 0
    compiled.clear()
    run(1, 2 * SCALE, 0.9, 187, 96)
    assert compiled == []


WARM_UPS = {
    "NUTS": lambda target: {},
    "JitteredHMC": lambda target: {"kernel": gm.JitteredHMC(target, 0.1, 1.0)},
    "each chain by itself": lambda target: {
        "kernel": gm.HMC(target, 0.1, 4),
        "warmup": gm.PerChainAdaptation(gm.WindowAdaptation(metric=gm.Dense())),
    },
}


NUMBERS = itertools.count()


def new_target(before=lambda: None):
    """A target whose programs nobody has compiled yet; ``before`` is called when it is traced.

    Functions that mean the same share programs, so each has a number of its own.
    """
    number = next(NUMBERS)

    def log_density(x, scale):
        before()
        return gaussian(x, scale), jnp.asarray(0.0 * number)

    return gm.LogDensity(log_density, {"x": jnp.asarray(SCALE)})


def programs_of(name, compiled):
    """How many programs begin a window, take steps and end a window, in a run on a mesh."""
    target = new_target()
    compiled.clear()
    sample(target, mesh=MESH, num_warmup=60, num_samples=20, **WARM_UPS[name](target))
    return [sum(program in n for n in compiled) for program in PROGRAMS]


PROGRAMS = ("begin_window", "advance", "end_stage")
ONCE = [1, 1, 1]


@pytest.mark.parametrize("name", WARM_UPS)
def test_later_windows_run_the_programs_of_the_first(name, compiled):
    assert programs_of(name, compiled) == ONCE


def test_windows_whose_carry_the_compiler_lays_out_compile_twice(compiled, monkeypatch):
    monkeypatch.setattr(Layout, "pin", lambda self, tree, roles: tree)
    found = programs_of("each chain by itself", compiled)
    assert found[:2] > ONCE[:2] and min(found) >= 1, found


def test_drawing_traces_no_step_again():
    """The steps of warm-up are those of sampling, but for what is done with them."""
    seen, traced = [], []
    sample(
        new_target(lambda: traced.append(1)),
        num_warmup=40,
        callback=lambda report: seen.append((report.phase, len(traced))),
    )
    assert seen[0][1] > 0 and {phase for phase, _ in seen} == {"warm-up", "sampling"}
    assert {count for _, count in seen} == {seen[0][1]}


@pytest.mark.parametrize("cls", [gm.HMC, gm.NUTS, gm.MAMS])
def test_an_untuned_warm_up_moves_chains_and_tunes_nothing(cls):
    target = gm.LogDensity(lambda x: -0.5 * x**2)
    kernel = cls(target, 0.5) if cls is gm.NUTS else cls(target, 0.5, 3)
    options = {"kernel": kernel, "num_chains": 2, "num_samples": 1, "progress": False}
    after, before = (
        gm.sample(jax.random.key(0), target, jnp.ones(3), warmup=gm.Untuned(), num_warmup=n, **options)
        for n in (50, 0)
    )
    assert float(after.kernel.step_size) == 0.5 and after.kernel.inverse_mass_matrix is None
    np.testing.assert_array_equal(after.warmup["step_size"], 0.5)
    assert after.warmup["step_size"].shape[-1] == 50
    assert not np.array_equal(after.position, before.position)
