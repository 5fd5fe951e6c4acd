"""MAMS and MCLMC: they move as the formulas say, bias is bounded, `sample` tunes them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import (
    PRECISION,
    VARIANCES,
    joined,
    mesh_of,
    moments_in_mcse,
    normal,
    quartic,
    scaled_normal,
    split_leaves,
    steep,
    undefined_above_one,
)
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import MAMS, MCLMC, Diagonal, MAMSAdaptation, MCLMCAdaptation, tree
from gspmd_mcmc.adaptation import batch_means
from gspmd_mcmc.adaptation.hmc_burn_in import BurnInHMC
from gspmd_mcmc.adaptation.mclmc_adaptation import StepSize, _updated
from gspmd_mcmc.kernels import isokinetic
from gspmd_mcmc.kernels.integrators import LEAPFROG, MINIMAL_NORM, PhasePoint
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets import local
from gspmd_mcmc.tree import pytree

# The reference: float64 NumPy, in coordinates z, x = S z, in which the metric S Sᵀ is the identity

DIAGONAL = np.diag(np.sqrt(VARIANCES))
DENSE = np.array([[1.2, 0.0, 0.0], [-0.4, 0.7, 0.0], [0.1, 0.05, 0.2]])
SPLITTINGS = [LEAPFROG, MINIMAL_NORM]


def numpy_log_density(z, scale):
    """The log density of `quartic`."""
    x = scale @ z
    return -0.5 * x @ PRECISION @ x - 0.02 * np.sum(x**4)


def numpy_kick(z, u, time, scale):
    """Turn a direction towards the gradient of `quartic`; return the kinetic energy's change too."""
    x = scale @ z
    grad = scale.T @ (-PRECISION @ x - 0.08 * x**3)
    norm = np.linalg.norm(grad)
    e, delta = grad / norm, time * norm / 2
    stretch = np.cosh(delta) + u @ e * np.sinh(delta)
    return (u + e * (np.sinh(delta) + u @ e * (np.cosh(delta) - 1))) / stretch, 2 * np.log(stretch)


def numpy_trajectory(z, u, splitting, step_size, num_steps, scale):
    gain = 0.0
    for _ in range(num_steps):
        u, more = numpy_kick(z, u, step_size * splitting.kicks[0], scale)
        gain += more
        for drift, kick in zip(splitting.drifts, splitting.kicks[1:], strict=True):
            z = z + step_size * drift * u
            u, more = numpy_kick(z, u, step_size * kick, scale)
            gain += more
    return z, u, gain


@partial(jax.jit, static_argnames="splitting")
def integrate(data, metric, splitting, x, p, step_size, num_steps):
    target = gm.LogDensity(quartic, data)
    point = PhasePoint(x, p, target.grad(x))
    return isokinetic.integrate(
        target, metric, splitting, point, step_size, num_steps, len(jnp.hstack(jax.tree.leaves(x)))
    )


@pytree
@dataclass(frozen=True, eq=False)
class DenseMetric(metrics.Metric):
    """A metric with only the velocity, which is all that trajectories use."""

    covariance: jax.Array

    def velocity(self, momentum):
        return split_leaves(self.covariance @ jnp.append(momentum["a"], momentum["b"]))

    def sample_momentum(self, rng_key, position):
        raise NotImplementedError


def ours(z, u, splitting, step_size, num_steps, scale=DIAGONAL):
    """The same trajectory by the library, in its own coordinates and back."""
    with jax.enable_x64(True):
        is_dense = scale is DENSE
        metric = DenseMetric(jnp.asarray(scale @ scale.T)) if is_dense else split_leaves(VARIANCES)
        x, p = split_leaves(scale @ z), split_leaves(np.linalg.solve(scale.T, u))
        scalars = (jnp.asarray(step_size), jnp.asarray(num_steps))
        end, _, gain = integrate(jnp.asarray(PRECISION), metric, splitting, x, p, *scalars)
    z, u = np.linalg.solve(scale, joined(end.position)), scale.T @ joined(end.momentum)
    return z, u, float(gain)


def start():
    rng = np.random.default_rng(0)
    u = rng.normal(size=3)
    return rng.normal(size=3), u / np.linalg.norm(u)


@pytest.mark.parametrize(
    ("splitting", "scale"), [(LEAPFROG, DIAGONAL), (MINIMAL_NORM, DIAGONAL), (MINIMAL_NORM, DENSE)]
)
def test_trajectories_are_those_of_the_formulas(splitting, scale):
    for step_size, num_steps in ((0.3, 1), (0.3, 7), (2.0, 3)):
        expected = numpy_trajectory(*start(), splitting, step_size, num_steps, scale)
        got = ours(*start(), splitting, step_size, num_steps, scale)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_a_trajectory_run_backwards_ends_where_it_began(splitting):
    z, u, gain = ours(*start(), splitting, 0.4, 9)
    back, turned, loss = ours(z, -u, splitting, 0.4, 9)
    np.testing.assert_allclose(back, start()[0], atol=1e-10)
    np.testing.assert_allclose(-turned, start()[1], atol=1e-10)
    assert abs(gain) > 0.1
    np.testing.assert_allclose(loss, -gain, rtol=1e-9)


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_kinetic_energy_is_the_logarithm_of_the_volume(splitting):
    """By finite differences of positions and directions along an orthonormal basis of the tangents."""

    def tangents(u):
        return np.linalg.svd(u[None])[2][1:]

    def image(shift):
        z, u = start()
        u = u + shift[3:] @ tangents(u)
        return np.concatenate(ours(z + shift[:3], u / np.linalg.norm(u), splitting, 0.5, 4)[:2])

    h, (_, u_end, gain) = 1e-5, ours(*start(), splitting, 0.5, 4)
    columns = [(image(h * e) - image(-h * e)) / (2 * h) for e in np.eye(5)]
    project = np.block([[np.eye(3), np.zeros((3, 3))], [np.zeros((2, 3)), tangents(u_end)]])
    volume = np.linalg.slogdet(project @ np.stack(columns, axis=1))[1]
    assert abs(gain) > 0.1
    np.testing.assert_allclose(volume, -gain, rtol=1e-6)


def test_energy_errors_fall_as_the_square_of_the_step_size_and_two_stages_have_less():
    def error(splitting, num_steps):
        z, u, gain = ours(*start(), splitting, 3.0 / num_steps, num_steps)
        before = numpy_log_density(start()[0], DIAGONAL)
        return abs(gain - numpy_log_density(z, DIAGONAL) + before)

    for splitting in SPLITTINGS:
        slope = np.log2(error(splitting, 200) / error(splitting, 400))
        assert abs(slope - 2) < 0.05
    assert error(MINIMAL_NORM, 200) < error(LEAPFROG, 400) / 2, "at the same number of gradients"


def test_the_stretch_of_a_kick_is_exact_for_small_kicks_and_finite_for_large_ones():
    deltas = np.array([1e-5, 1e-4, 0.3, 0.999, 1.001, 8.0, 60.0, 1e3], np.float32)[:, None]
    cosines = np.array([-1.0, -0.999, -1e-4, 0.0, 0.5, 1.0], np.float32)[None]
    got = isokinetic.log_stretch(*map(jnp.asarray, np.broadcast_arrays(cosines, deltas)))
    delta, w = deltas.astype(np.longdouble), cosines.astype(np.longdouble)
    expected = delta + np.log((1 + w) / 2 + (1 - w) / 2 * np.exp(-2 * delta))
    np.testing.assert_allclose(got, expected.astype(float), rtol=3e-6)


# A step of MCLMC, against the formulas

STEP_SIZE, LENGTH = 0.4, 1.3
mclmc_init, mclmc_step = jax.jit(MCLMC.init), jax.jit(MCLMC.step)


def numpy_step(z, u, splitting, first, second):
    """Noise, kicks and drifts in turn, noise; return what MCLMC.step should."""

    def refresh(u, noise):
        u = u + np.sqrt((np.exp(STEP_SIZE / LENGTH) - 1) / 3) * noise
        return u / np.linalg.norm(u)

    start = z
    u, gain = numpy_kick(z, refresh(u, first), STEP_SIZE * splitting.kicks[0], DIAGONAL)
    for drift, kick in zip(splitting.drifts, splitting.kicks[1:], strict=True):
        z = z + STEP_SIZE * drift * u
        u, more = numpy_kick(z, u, STEP_SIZE * kick, DIAGONAL)
        gain += more
    return (
        z,
        refresh(u, second),
        gain - numpy_log_density(z, DIAGONAL) + numpy_log_density(start, DIAGONAL),
    )


@pytest.mark.parametrize("splitting", [LEAPFROG, MINIMAL_NORM])
def test_steps_are_those_of_the_formulas(splitting):
    scale = np.sqrt(VARIANCES)
    with jax.enable_x64(True):
        metric = split_leaves(VARIANCES)
        target = gm.LogDensity(quartic, jnp.asarray(PRECISION))
        kernel = MCLMC(target, STEP_SIZE, LENGTH, metric, splitting)
        state = mclmc_init(kernel, split_leaves(np.array([1.0, -1.0, 0.1])))
        z, u = joined(state.position) / scale, np.zeros(3)
        for i in range(5):
            keys = jax.random.split(jax.random.key(i))
            noises = [metrics.sample_momentum(key, metric, state.position) for key in keys]
            expected = numpy_step(z, u, splitting, *(joined(n) * scale for n in noises))
            state, info = mclmc_step(kernel, jax.random.key(i), state)
            z, u = joined(state.position) / scale, joined(state.momentum) * scale
            for a, b in zip((z, u, info.energy_error), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
            np.testing.assert_allclose(state.log_density, numpy_log_density(z, DIAGONAL), rtol=1e-12)
            assert info.num_integration_steps == len(splitting.drifts) and info.is_accepted


# Many chains at once


@partial(jax.jit, static_argnames="num_steps")
def run(kernel, positions, rng_key, num_steps):
    """Return the last states, and the steps' energy errors [steps, chains]."""
    num_chains = jax.tree.leaves(positions)[0].shape[0]
    states = jax.vmap(type(kernel).init, (None, 0))(kernel, positions)

    def one(states, i):
        keys = jax.random.split(jax.random.fold_in(rng_key, i), num_chains)
        states, info = jax.vmap(type(kernel).step, (None, 0, 0))(kernel, keys, states)
        return states, info.energy_error

    return jax.lax.scan(one, states, jnp.arange(num_steps))


DIMENSION, NUM_CHAINS, NUM_STEPS = 10, 16384, 60


def errors_of_variance(splitting, step_size):
    """How far chains from exact draws get off, the standard error of that, and what tuning looks at."""
    positions = np.random.default_rng(seed(0)).normal(size=(NUM_CHAINS, DIMENSION)).astype(np.float32)
    kernel = MCLMC(gm.LogDensity(normal), step_size, np.sqrt(DIMENSION), splitting=splitting)
    states, energy_errors = run(kernel, jnp.asarray(positions), jax.random.key(seed(1)), NUM_STEPS)
    squares = np.mean(np.asarray(states.position) ** 2, axis=1)
    bias, error = squares.mean() - 1, squares.std() / np.sqrt(NUM_CHAINS)
    return bias, error, np.var(energy_errors[NUM_STEPS // 2 :]) / DIMENSION


@pytest.mark.statistical
def test_bias_falls_with_the_step_size():
    large, error, _ = errors_of_variance(LEAPFROG, 2.4)
    within(8 * error / large, 1, "of a bias that there is and must be seen")
    small, error, _ = errors_of_variance(LEAPFROG, 0.6)
    within(abs(small), large / 2 - 3 * error, "the bias of small steps")


@pytest.mark.statistical
def test_bias_is_under_five_in_a_hundred_of_the_variance_where_tuning_aims():
    bias, error, energy_variance = errors_of_variance(MINIMAL_NORM, 3.6)
    within(abs(energy_variance - 5.5e-4), 1.5e-4, "from where warm-up aims")
    within(abs(bias) + 3 * error, 0.05, "the bias")


@pytest.mark.statistical
def test_equal_starts_part_in_directions_uniform_over_the_sphere():
    """From a momentum of zero, in a metric that is not the identity."""
    variances = np.array([4.0, 1.0, 0.25], np.float32)
    kernel = MCLMC(gm.LogDensity(normal), 1e-3, 1.0, jnp.asarray(variances), LEAPFROG)
    states, _ = run(kernel, jnp.zeros((NUM_CHAINS, 3)), jax.random.key(seed(0)), 1)
    u = np.asarray(states.momentum) * np.sqrt(variances)
    np.testing.assert_allclose(np.sum(u**2, axis=1), 1, rtol=1e-5)
    # Of a uniform direction in 3 dimensions each coordinate is uniform over (-1, 1).
    for values, mean, sd in ((u, 0, np.sqrt(1 / 3)), (u**2, 1 / 3, np.sqrt(1 / 5 - 1 / 9))):
        worst = np.max(np.abs(values.mean(axis=0) - mean)) / (sd / np.sqrt(NUM_CHAINS))
        within(worst, 4, "standard errors off")
    moved = np.asarray(states.position) / np.sqrt(variances)
    np.testing.assert_allclose(np.linalg.norm(moved, axis=1), 1e-3, rtol=1e-4)


# What a step reports


def test_energy_is_the_negative_log_density_at_the_start_and_the_error():
    kernel = MAMS(gm.LogDensity(quartic, jnp.asarray(PRECISION, jnp.float32)), 0.1, 0.5)
    state = jax.jit(MAMS.init)(kernel, split_leaves(np.array([1, -1, 0.1], np.float32)))
    new, info = jax.jit(MAMS.step)(kernel, jax.random.key(1), state)
    assert info.is_accepted
    np.testing.assert_allclose(info.energy, info.energy_error - state.log_density, rtol=1e-6)
    np.testing.assert_allclose(
        new.log_density, tree.total(kernel.target.terms(new.position)), rtol=1e-6
    )


def test_lengths_are_drawn_evenly_and_in_whole_steps():
    kernel = MAMS(gm.LogDensity(steep), 0.01, 0.2)

    def num_steps(i):
        return kernel.with_jitter(jax.random.key(0), i)._num_steps()

    counts = np.asarray(jax.jit(jax.vmap(num_steps))(jnp.arange(64)))
    assert counts.min() >= 1 and counts.max() <= 40 and abs(counts.mean() - 20) < 0.5
    assert len(set(counts)) > 35
    held = MAMS(gm.LogDensity(steep), 0.01, 0.2, jitter=0.0).with_jitter(
        jax.random.key(0), jnp.int32(3)
    )
    assert held._num_steps() == 20 and kernel.one_leapfrog()._num_steps() == 1


def test_the_burn_in_tries_step_sizes_by_one_leapfrog_and_has_its_gradient_once():
    traced = []

    def log_density(x):
        traced.append(1)
        return steep(x)

    kernel = MAMS(gm.LogDensity(log_density), 0.01, 0.2, jnp.ones(2))
    state, burn_in = kernel.init(jnp.ones(2)), BurnInHMC.of(kernel)

    def step(hmc, number):
        traced.clear()
        hmc = hmc.with_jitter(jax.random.key(0), jnp.int32(number))
        info = jax.jit(lambda hmc: hmc.step(jax.random.key(1), state)[1])(hmc)
        return int(info.num_integration_steps), len(traced)

    assert step(burn_in.one_leapfrog(), 0) == (1, 1)
    # The van der Corput sequence begins with a half: 16 of 1 to 32.
    assert step(burn_in, 0) == (16, 2)


def test_a_step_to_an_infinite_log_density_is_refused_and_turns_the_chain():
    kernel = MCLMC(gm.LogDensity(undefined_above_one), 0.4, 100.0)
    state, seen = mclmc_init(kernel, jnp.full(2, 0.5)), []
    for i in range(40):
        before = state
        state, info = mclmc_step(kernel, jax.random.key(i), state)
        seen.append(bool(info.is_divergent))
        assert np.all(np.asarray(state.position) <= 1) and np.isfinite(state.log_density)
        assert info.acceptance_rate == 1 - info.is_divergent and info.is_accepted != info.is_divergent
        np.testing.assert_allclose(np.sum(np.asarray(state.momentum) ** 2), 1, rtol=1e-5)
        if info.is_divergent:
            assert np.all(np.asarray(state.position) == np.asarray(before.position))
            assert np.isinf(info.energy_error) and info.energy == -state.log_density
            assert np.max(np.abs(np.asarray(state.momentum - before.momentum))) > 1e-3
    assert any(seen) and not all(seen)


# The recursion of the step size, and the time that draws stay correlated


@pytest.mark.statistical
def test_step_sizes_settle_where_the_energy_variance_is_the_desired_one():
    """Of errors of variance c ε⁶ d, normal; one chain in four diverges above ε = 3."""
    rng, num_chains = np.random.default_rng(seed(0)), 4
    update = jax.jit(lambda state, info: _updated(state, info, 5e-4 * 10, jnp.ones(num_chains)))

    def settled(coefficient, start):
        state = StepSize(jnp.float32(start), jnp.float32(0), jnp.float32(jnp.inf))
        for _ in range(400):
            value = float(state.value)
            errors = rng.normal(size=num_chains) * np.sqrt(10 * coefficient * value**6)
            diverges = (np.arange(num_chains) == 0) & (value > 3)
            errors = jnp.asarray(np.where(diverges, np.inf, errors), jnp.float32)
            state = update(state, gm.Info(0, 0, jnp.asarray(diverges), 0, errors, 0))  # pyright: ignore
        return float(state.value)

    for start in (0.01, 1.0, 50.0):
        within(abs(np.log(settled(1e-4, start) / 5 ** (1 / 6))), 0.1, f"log ratio from {start}")
    # What diverges is not tried again and again.
    within(abs(settled(1e-12, 1.0) - 2.75), 0.75, "from the middle of 2 and 3.5")


NO_ROWS = gm.LogDensity(tree.dot)  # a target whose position has no pad


@pytest.mark.statistical
def test_correlation_times_are_those_of_autoregressive_draws():
    """AR(1) of correlation r has (1 + r) / (1 - r) draws to an independent one."""
    rng, num_chains, size = np.random.default_rng(seed(1)), 4, 200
    take = jax.jit(batch_means.update)
    for r, length in ((0.9, 40), (0.97, 40), (0.0, 10)):
        x = rng.normal(size=(num_chains, size))
        batches = batch_means.init(jnp.asarray(x, jnp.float32), jnp.int32(length))
        assert np.isnan(batch_means.correlation_time(batches, NO_ROWS, size))
        for _ in range(400):
            x = r * x + np.sqrt(1 - r**2) * rng.normal(size=x.shape)
            batches = take(batches, jnp.asarray(x, jnp.float32))
        time = batch_means.correlation_time(batches, NO_ROWS, size)
        within(abs(time / ((1 + r) / (1 - r)) - 1), 0.15, f"of the time of correlation {r}")


@pytest.mark.statistical
def test_the_slowest_leaf_tells_its_own_correlation_time():
    """One element of 0.9 among 200 that are independent; an element that never moves is no element."""
    rng, take = np.random.default_rng(seed(2)), jax.jit(batch_means.update)
    slow, fast = np.zeros((64, 1)), np.zeros((64, 200))
    stays = np.zeros((64, 1))
    batches = batch_means.init(_leaves(slow, np.concatenate([fast, stays], axis=1)), jnp.int32(40))
    assert np.isnan(batch_means.slowest_correlation_time(batches, NO_ROWS))
    for _ in range(400):
        slow = 0.9 * slow + np.sqrt(1 - 0.9**2) * rng.normal(size=slow.shape)
        fast = rng.normal(size=fast.shape)
        batches = take(batches, _leaves(slow, np.concatenate([fast, stays], axis=1)))
    within(
        abs(batch_means.slowest_correlation_time(batches, NO_ROWS) / 19 - 1), 0.3, "of the slowest time"
    )
    # The mean over elements does not see it.
    within(batch_means.correlation_time(batches, NO_ROWS, 201), 1.5, "the mean time")


def of_rows(x, row):
    return -0.5 * (x["z"] - row["y"]) ** 2 / row["variance"] - 0.5 * (x["z"] - x["mean"]) ** 2


def rows_on(mesh):
    """17 rows, which 8 devices do not divide, and a mean that they share."""
    rows = {"y": np.linspace(-2.0, 2.0, 17), "variance": np.linspace(0.1, 10.0, 17)}
    plate = gm.Plate(of_rows, gm.place(rows, mesh_of(mesh), P("data")), local="z")
    return gm.Posterior(normal, plate)


def test_correlation_times_do_not_depend_on_pad():
    """Its rows stay where the chains began, each elsewhere."""
    rng, take = np.random.default_rng(seed(3)), jax.jit(batch_means.update)
    lay = jax.jit(jax.vmap(local.lay_out, (None, 0)))
    targets = [rows_on("1"), rows_on("8")]
    x = {"z": rng.normal(size=(4, 17)), "mean": rng.normal(size=(4, 1))}
    laid = [lay(target, x) for target in targets]
    batches = [batch_means.init(one, jnp.int32(5)) for one in laid]
    for _ in range(40):
        x = jax.tree.map(lambda x: 0.8 * x + 0.6 * rng.normal(size=x.shape), x)
        moved = [lay(target, x) for target in targets]
        pad = laid[1]["z"].values[:, 17:]
        values = moved[1]["z"].values.at[:, 17:].set(pad)
        moved[1] = moved[1] | {"z": tree.replace(moved[1]["z"], values=values)}
        batches = [take(*pair) for pair in zip(batches, moved, strict=True)]
    for time in (
        partial(batch_means.correlation_time, dimension=18),
        batch_means.slowest_correlation_time,
    ):
        one, eight = (time(*pair) for pair in zip(batches, targets, strict=True))
        assert one > 2
        np.testing.assert_allclose(eight, one, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:small data")
@pytest.mark.parametrize("kernel", [MAMS, MCLMC])
@pytest.mark.usefixtures("compiled_as_a_users")
def test_warm_up_and_draws_are_the_same_where_rows_are_padded(kernel):
    """The length is what is measured where no metric is learned, longer or not.

    In float64, and by programs that round alike on one and on eight devices: 250 steps amplify the
    rounding of the last digit to the first.
    """
    warmup = {MAMS: MAMSAdaptation, MCLMC: MCLMCAdaptation}[kernel](adapt_mass_matrix=False)
    with jax.enable_x64(True):
        one, eight = (
            gm.sample(
                jax.random.key(0),
                target,
                {"z": jnp.zeros(17), "mean": jnp.zeros(1)},
                kernel=kernel(target, 0.1, 1.0),
                warmup=warmup,
                num_chains=4,
                num_warmup=250,
                num_samples=5,
                progress=False,
            )
            for target in map(rows_on, ("1", "8"))
        )
        kernels: Any = one.kernel, eight.kernel
        length, found = (k.trajectory_length for k in kernels)
        assert abs(length / np.sqrt(18) - (np.pi / 2 if kernel is MAMS else 1)) > 1e-3, "it is measured"
        np.testing.assert_allclose(found, length, rtol=1e-6)
        np.testing.assert_allclose(eight.kernel.step_size, one.kernel.step_size, rtol=1e-6)
        for name, draws in one.position.items():
            np.testing.assert_allclose(eight.position[name], draws, rtol=1e-5, atol=1e-5)


def _leaves(slow, fast):
    return {"slow": jnp.asarray(slow, jnp.float32), "fast": jnp.asarray(fast, jnp.float32)}


# Warm-up, from far off: three chains start at a log density of -1e8, and none may set the others back


def sample_from_far_off(scales, far, kernel, warmup, **options):
    """Check that warm-up arrives, metric and draws; return draws and length."""
    target = gm.LogDensity(scaled_normal, scales)
    start = {"a": jnp.full((4, 2), 3.0), "b": jnp.full((4, 8), far).at[0].set(-2.0)}
    draws = gm.sample(
        jax.random.key(seed(0)),
        target,
        gm.per_chain(start),
        kernel=kernel(target, 0.1, 1.0),
        warmup=warmup,
        progress=False,
        **options,
    )
    log_density = np.asarray(draws.warmup["log_density"])
    assert np.sum(log_density[:, 0] < -1e7) == 3 and log_density[:, -1].min() > -30
    ratios = jax.tree.map(lambda v, s: v / s**2, draws.kernel.inverse_mass_matrix, scales)
    worst = max(np.max(np.abs(np.log(v))) for v in jax.tree.leaves(ratios))
    within(worst, np.log(2.5), "log of a ratio of variances")
    bias = 0.05 if kernel is MCLMC else 0.0
    of_means, of_squares = moments_in_mcse(draws.position, scales, bias_of_squares=bias)
    within(of_means, 4, "standard errors off")
    within(of_squares, 4, "standard errors off, of squares")
    tuned: Any = draws.kernel
    return draws, float(tuned.trajectory_length) / np.sqrt(10)


@pytest.mark.statistical
def test_sample_tunes_mams():
    scales = {"a": np.array([1.0, 30.0], np.float32), "b": np.full(8, 0.1, np.float32)}
    warmup, counts = MAMSAdaptation(metric=Diagonal()), {"num_warmup": 800, "num_samples": 4000}
    draws, length = sample_from_far_off(scales, 500.0, MAMS, warmup, **counts)
    within(abs(np.mean(draws.acceptance_rate) - 0.9), 0.06, "from the acceptance rate asked for")
    assert length > 1.57, "a quarter period at least"
    within(length, 3, "the length")


@pytest.mark.statistical
def test_sample_tunes_mclmc():
    scales = {"a": np.array([1.0, 10.0], np.float32), "b": np.full(8, 0.3, np.float32)}
    warmup, counts = MCLMCAdaptation(metric=Diagonal()), {"num_warmup": 1000, "num_samples": 1000}
    draws, length = sample_from_far_off(scales, 1500.0, MCLMC, warmup, thin=2, **counts)
    assert draws.summary().notes == [MCLMC.note]
    energy_variance = np.var(np.asarray(draws.stats["energy_error"])) / 10
    within(abs(np.log(energy_variance / 4.5e-4)), np.log(4.5), "log of a ratio of energy variances")
    within(abs(np.log2(length) - 0.5), 1.5, "log2 of a ratio of lengths")


def test_the_kernel_of_another_warm_up_is_refused():
    hmc = gm.HMC(gm.LogDensity(steep), 0.1, 1)
    for warmup in (MAMSAdaptation(), MCLMCAdaptation()):
        with pytest.raises(TypeError, match="Adaptation tunes M.*, got HMC"):
            warmup.prepare(hmc, None)
    with pytest.raises(ValueError, match="target_acceptance_rate: expected a number between 0 and 1"):
        MAMSAdaptation(target_acceptance_rate=1.0)
    with pytest.raises(ValueError, match="energy_variance: expected a positive number, got 0"):
        MCLMCAdaptation(energy_variance=0)


@pytest.mark.parametrize("cls", [MAMS, MCLMC])
def test_a_dense_metric_of_the_kernel_is_kept_through_warm_up(cls):
    target = gm.LogDensity(lambda x: -0.5 * x**2)
    covariance = np.array([[1.0, 0.3], [0.3, 1.0]])
    metric = gm.DenseMetric.of_covariances(jnp.zeros(2), covariance)
    kernel = cls(target, 0.3, 1.0, inverse_mass_matrix=metric)
    counts = {"num_chains": 3, "num_warmup": 40, "num_samples": 10, "progress": False}
    draws = gm.sample(jax.random.key(seed(0)), target, jnp.zeros(2), kernel=kernel, **counts)
    kept = draws.kernel.inverse_mass_matrix.velocity(jnp.eye(2)[0])
    np.testing.assert_allclose(kept, covariance[0], rtol=1e-5)
    assert np.isfinite(draws.position).all()
