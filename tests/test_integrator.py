"""Leapfrog and minimal norm: order two, reversible, energy kept, volume kept, on any tree.

The truth is the isotonic oscillator, H = m p²/2 + q²/2 + g/(2q²): not linear, and solved in closed
form, since s = q² obeys s'' = 4m(H - s). Four wrong integrators are put to the same tests.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import PhasePoint, integrate, velocity_verlet
from gspmd_mcmc.kernels.metrics import metric as metrics

WELL = {"a": np.array([0.7, 1.9]), "b": np.array(1.2)}
INVERSE_MASS = {"a": np.array([1.0, 0.6]), "b": np.array(1.7)}
POSITION = {"a": np.array([1.1, 0.8]), "b": np.array(1.5)}
MOMENTUM = {"a": np.array([0.4, -0.9]), "b": np.array(0.3)}


def log_density(x):
    return tree.total(jax.tree.map(lambda q, g: -(q**2) / 2 - g / (2 * q**2), x, like(x, WELL)))


def coupled_log_density(x):
    """Couple the leaves, so that Jacobians are full."""
    return -jnp.sum(x["a"] ** 4) / 4 - x["b"] ** 2 * (1 + jnp.sum(x["a"] ** 2)) / 2


def like(x, constants):
    """Turn NumPy's float64 into the dtypes of a tree."""
    return jax.tree.map(lambda xi, c: jnp.asarray(c, xi.dtype), x, constants)


def velocity(momentum):
    return metrics.velocity(like(momentum, INVERSE_MASS), momentum)


def start(grad, position=POSITION, momentum=MOMENTUM):
    position, momentum = jax.tree.map(jnp.asarray, (position, momentum))
    return PhasePoint(position, momentum, grad(position))


def energy(log_density, point):
    inverse_mass_matrix = like(point.momentum, INVERSE_MASS)
    return metrics.kinetic_energy(inverse_mass_matrix, point.momentum) - log_density(point.position)


def distance(x, y):
    return max(float(jnp.max(jnp.abs(d))) for d in jax.tree.leaves(tree.sub(x, y)))


def exact_position(time):
    """Return |q| after a time, from s(t) = H + (s₀ - H) cos 2√m t + s₀'/(2√m) sin 2√m t."""

    def one(q, p, g, m):
        angle, h = 2 * np.sqrt(m) * time, m * p**2 / 2 + q**2 / 2 + g / (2 * q**2)
        return np.sqrt(h + (q**2 - h) * np.cos(angle) + q * np.sqrt(m) * p * np.sin(angle))

    return jax.tree.map(one, POSITION, MOMENTUM, WELL, INVERSE_MASS)


class Density:
    """What an integrator asks of a target, from a gradient alone."""

    def __init__(self, grad):
        self.grad = grad

    def terms_and_grad(self, position):
        return (), self.grad(position)


def minimal_norm(point, step_size, grad, velocity):
    """One step of the library's."""
    return integrate(gm.MINIMAL_NORM, point, step_size, jnp.asarray(1), Density(grad), velocity)[0]


def plain_step(splitting, point, step_size, grad, velocity):
    """One step, each kick and each drift by itself."""
    for kick, drift in zip(splitting.kicks, (*splitting.drifts, 0.0), strict=True):
        momentum = tree.axpy(step_size * kick, grad(point.position), point.momentum)
        position = tree.axpy(step_size * drift, velocity(momentum), point.position)
        point = PhasePoint(position, momentum, grad(position))
    return point


# Wrong integrators


def explicit_euler(point, step_size, grad, velocity):
    """Order one; neither reversible nor volume preserving."""
    position = tree.axpy(step_size, velocity(point.momentum), point.position)
    momentum = tree.axpy(step_size, point.log_density_grad, point.momentum)
    return PhasePoint(position, momentum, grad(position))


def symplectic_euler(point, step_size, grad, velocity):
    """Order one; volume preserving, but not reversible."""
    momentum = tree.axpy(step_size, point.log_density_grad, point.momentum)
    position = tree.axpy(step_size, velocity(momentum), point.position)
    return PhasePoint(position, momentum, grad(position))


def without_last_half_kick(point, step_size, grad, velocity):
    """Integrate other dynamics: half the force."""
    momentum = tree.axpy(step_size / 2, point.log_density_grad, point.momentum)
    position = tree.axpy(step_size, velocity(momentum), point.position)
    return PhasePoint(position, momentum, grad(position))


def explicit_midpoint(point, step_size, grad, velocity):
    """Order two; energy drifts, volume grows."""
    half = explicit_euler(point, step_size / 2, grad, velocity)
    position = tree.axpy(step_size, velocity(half.momentum), point.position)
    momentum = tree.axpy(step_size, half.log_density_grad, point.momentum)
    return PhasePoint(position, momentum, grad(position))


@partial(jax.jit, static_argnames=("step", "log_density"))
def trajectory(step, log_density, point, step_size, num_steps):
    """Take steps with any integrator; return the end and the largest change of energy on the way."""
    grad = jax.grad(log_density)
    before = energy(log_density, point)

    def body(_, carry):
        point, worst = carry
        point = step(point, step_size, grad, velocity)
        return point, jnp.maximum(worst, jnp.abs(energy(log_density, point) - before))

    return jax.lax.fori_loop(0, num_steps, body, (point, jnp.zeros_like(before)))


# Order


def position_error(step, num_steps, time=2.0):
    step_size = jnp.asarray(time / num_steps)
    end, _ = trajectory(step, log_density, start(jax.grad(log_density)), step_size, num_steps)
    return distance(end.position, exact_position(time))


def check_order_is_two(step):
    num_steps = np.array([32, 64, 128, 256, 512])
    errors = [position_error(step, n) for n in num_steps]
    slope = np.polyfit(np.log(2.0 / num_steps), np.log(errors), 1)[0]
    assert abs(slope - 2) < 0.05, f"order {slope}"


# Reversibility


def check_runs_back(step, tolerance=1e-11):
    """Run a trajectory, flip the momentum, and run it again: it ends at its start."""
    point, step_size = start(jax.grad(coupled_log_density)), jnp.asarray(0.02)
    end, _ = trajectory(step, coupled_log_density, point, step_size, 200)
    assert distance(end.position, point.position) > 0.5, "it has not moved"
    flipped = tree.replace(end, momentum=jax.tree.map(jnp.negative, end.momentum))
    back, _ = trajectory(step, coupled_log_density, flipped, step_size, 200)
    turned = jax.tree.map(jnp.negative, back.momentum)
    apart = distance(back.position, point.position) + distance(turned, point.momentum)
    assert apart < tolerance, f"it ends {apart} from its start"


# Energy


def worst_energy_error(step, num_steps, step_size):
    point = start(jax.grad(coupled_log_density))
    return float(trajectory(step, coupled_log_density, point, jnp.asarray(step_size), num_steps)[1])


def check_energy_stays_close(step):
    short, long = worst_energy_error(step, 1000, 0.05), worst_energy_error(step, 100_000, 0.05)
    assert long < 2 * short, f"energy drifts: {short} after a time of 50, {long} after 5000"
    halved = worst_energy_error(step, 2000, 0.025)
    assert 3.5 < short / halved < 4.5, f"energy error falls by {short / halved} at half the step"


# Volume


@partial(jax.jit, static_argnames="step")
def jacobian(step, position, momentum):
    """Derivative of (q, p) -> (q', p') over ten large steps, both packed into vectors of six."""

    def flow(phase):
        position, momentum = ({"a": x[:2], "b": x[2]} for x in (phase[:3], phase[3:]))
        point = start(jax.grad(coupled_log_density), position, momentum)
        for _ in range(10):
            point = step(point, jnp.asarray(0.2), jax.grad(coupled_log_density), velocity)
        return pack(point.position, point.momentum)

    return jax.jacfwd(flow)(pack(position, momentum))


def pack(position, momentum):
    return jnp.concatenate([position["a"], position["b"][None], momentum["a"], momentum["b"][None]])


def check_volume_is_kept(step):
    rng = np.random.default_rng(0)
    for _ in range(5):
        position, momentum = ({"a": rng.normal(size=2), "b": rng.normal(size=())} for _ in range(2))
        derivative = jacobian(step, *jax.tree.map(jnp.asarray, (position, momentum)))
        assert np.max(np.abs(derivative - np.eye(6))) > 0.5, "it has not moved"
        volume = np.linalg.det(derivative)
        assert abs(volume - 1) < 1e-10, f"volume becomes {volume}"


# All checks, of the leapfrog and of wrong integrators


@pytest.mark.parametrize(
    ("check", "step"),
    [
        (check_order_is_two, velocity_verlet),
        (check_runs_back, velocity_verlet),
        (check_energy_stays_close, velocity_verlet),
        (check_volume_is_kept, velocity_verlet),
        (check_volume_is_kept, symplectic_euler),
        (check_order_is_two, minimal_norm),
        (check_runs_back, minimal_norm),
        (check_energy_stays_close, minimal_norm),
        (check_volume_is_kept, minimal_norm),
    ],
)
def test_the_integrators_pass(check, step):
    with jax.enable_x64(True):
        check(step)


def test_the_leapfrog_runs_back_in_float32():
    check_runs_back(velocity_verlet, 1e-3)


@pytest.mark.parametrize(
    ("check", "step", "reason"),
    [
        (check_order_is_two, explicit_euler, "order (0|1)"),
        (check_order_is_two, symplectic_euler, "order (0|1)"),
        (check_order_is_two, without_last_half_kick, "order (0|1)"),
        (check_runs_back, explicit_euler, r"it ends \d"),
        (check_runs_back, symplectic_euler, r"it ends \d"),
        (check_runs_back, explicit_midpoint, r"it ends \d"),
        (check_energy_stays_close, explicit_midpoint, "drifts"),
        (check_energy_stays_close, symplectic_euler, "falls by 1.9"),
        (check_energy_stays_close, without_last_half_kick, "falls by 1.0"),
        (check_volume_is_kept, explicit_euler, "volume becomes"),
        (check_volume_is_kept, explicit_midpoint, "volume becomes"),
    ],
)
def test_a_wrong_integrator_is_rejected(check, step, reason):
    with jax.enable_x64(True), pytest.raises(AssertionError, match=reason):
        check(step)


# Trees


def run(log_density, position, momentum, num_steps):
    point = start(jax.grad(log_density), position, momentum)
    target = gm.LogDensity(log_density)
    return integrate(gm.LEAPFROG, point, jnp.asarray(0.1), num_steps, target, lambda p: p)[0]


def test_each_leaf_keeps_its_dtype():
    def log_density(x):
        return -jnp.sum(x["half"] ** 2).astype(jnp.float32) / 2 - jnp.sum(x["single"] ** 2) / 2

    position = {"half": jnp.ones(3, jnp.bfloat16), "single": jnp.ones((2, 2), jnp.float32)}
    end = run(log_density, position, position, 3)
    for field in (end.position, end.momentum, end.log_density_grad):
        assert jax.tree.map(jnp.result_type, field) == jax.tree.map(jnp.result_type, position)


@pytest.mark.parametrize("splitting", [gm.LEAPFROG, gm.MINIMAL_NORM])
def test_integrate_takes_as_many_steps_as_asked_though_their_number_is_traced(splitting):
    grad, step_size = jax.grad(log_density), jnp.asarray(0.1)
    point, target = start(grad), gm.LogDensity(log_density)
    traced = jax.jit(lambda n: integrate(splitting, point, step_size, n, target, velocity))
    for num_steps in (1, 2, 5):
        expected = point
        for _ in range(num_steps):
            expected = plain_step(splitting, expected, step_size, grad, velocity)
        end, terms = traced(num_steps)
        np.testing.assert_allclose(terms, log_density(expected.position), rtol=1e-5)
        for error in jax.tree.leaves(tree.sub(end, expected)):
            assert np.max(np.abs(error)) < 1e-5


def normal_log_density(x):
    return -(x**2) / 2


def test_minimal_norm_accepts_more_of_many_normals_at_the_same_number_of_gradients():
    target = gm.LogDensity(normal_log_density)
    position = jax.random.normal(jax.random.key(0), (10_000,))

    def mean_error(step_size, num_steps, splitting):
        kernel = gm.HMC(target, step_size, num_steps, splitting=splitting)
        step = jax.jit(jax.vmap(gm.HMC.step, (None, 0, None)))
        _, info = step(kernel, jax.random.split(jax.random.key(1), 20), kernel.init(position))
        assert np.all(info.num_integration_steps == 6), "gradients, not steps"
        return float(jnp.mean(jnp.abs(info.energy_error)))

    assert mean_error(0.6, 3, gm.MINIMAL_NORM) < mean_error(0.3, 6, gm.LEAPFROG) / 5
