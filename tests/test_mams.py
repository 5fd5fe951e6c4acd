"""MAMS and its integrator: the dynamics are those of the formulas, and `sample` tunes it."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    PRECISION,
    VARIANCES,
    joined,
    moments_in_mcse,
    numpy_kick,
    numpy_log_density,
    quartic,
    scaled_normal,
    split_leaves,
    steep,
)
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import MAMS, Diagonal, MAMSAdaptation, tree
from gspmd_mcmc.adaptation.hmc_burn_in import BurnInHMC
from gspmd_mcmc.kernels import isokinetic
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.isokinetic import LEAPFROG, MINIMAL_NORM
from gspmd_mcmc.kernels.metrics.metric import Metric
from gspmd_mcmc.tree import pytree

init, step = jax.jit(MAMS.init), jax.jit(MAMS.step)


# The reference: float64 NumPy, in coordinates z, x = S z, in which the metric S Sᵀ is the identity

DIAGONAL = np.diag(np.sqrt(VARIANCES))
DENSE = np.array([[1.2, 0.0, 0.0], [-0.4, 0.7, 0.0], [0.1, 0.05, 0.2]])


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
class DenseMetric(Metric):
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


SPLITTINGS = [LEAPFROG, MINIMAL_NORM]


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


# What a step reports


def test_energy_is_the_negative_log_density_at_the_start_and_the_error():
    kernel = MAMS(gm.LogDensity(quartic, jnp.asarray(PRECISION, jnp.float32)), 0.1, 0.5)
    state = init(kernel, split_leaves(np.array([1, -1, 0.1], np.float32)))
    new, info = step(kernel, jax.random.key(1), state)
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


# Warm-up


SCALES = {"a": np.array([1.0, 30.0], np.float32), "b": np.full(8, 0.1, np.float32)}


@pytest.mark.statistical
def test_sample_tunes_step_size_length_and_metric_from_far_off():
    """Three chains start at a log density of -1e8, one at -2e3: none may set the others back."""
    target = gm.LogDensity(scaled_normal, SCALES)
    start = {"a": jnp.full((4, 2), 3.0), "b": jnp.full((4, 8), 500.0).at[0].set(-2.0)}
    draws = gm.sample(
        jax.random.key(seed(0)),
        target,
        gm.per_chain(start),
        kernel=MAMS(target, 0.1, 1.0),
        warmup=MAMSAdaptation(metric=Diagonal()),
        num_warmup=800,
        num_samples=4000,
        progress=False,
    )
    log_density = np.asarray(draws.warmup["log_density"])
    assert np.sum(log_density[:, 0] < -1e7) == 3 and log_density[:, -1].min() > -30
    ratios = jax.tree.map(lambda v, s: v / s**2, draws.kernel.inverse_mass_matrix, SCALES)
    worst = max(np.max(np.abs(np.log(v))) for v in jax.tree.leaves(ratios))
    within(worst, np.log(2.5), "log of a ratio of variances")
    within(abs(np.mean(draws.acceptance_rate) - 0.9), 0.06, "from the acceptance rate asked for")
    length = float(draws.kernel.trajectory_length) / np.sqrt(10)
    assert length > 1.57, "a quarter period at least"
    within(length, 3, "the length")
    of_means, of_squares = moments_in_mcse(draws.position, SCALES)
    within(of_means, 4, "standard errors off")
    within(of_squares, 4, "standard errors off, of squares")


def test_the_kernel_of_another_warm_up_is_refused():
    hmc = gm.HMC(gm.LogDensity(steep), 0.1, 1)
    with pytest.raises(TypeError, match="MAMSAdaptation tunes MAMS, got HMC"):
        MAMSAdaptation().prepare(hmc, None)
    with pytest.raises(ValueError, match="target_acceptance_rate: expected a number between 0 and 1"):
        MAMSAdaptation(target_acceptance_rate=1.0)
