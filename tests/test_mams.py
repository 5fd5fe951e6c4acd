"""MAMS and its integrator: the dynamics are those of the formulas, the draws the target's."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Transition
from gspmd_mcmc.adaptation.approach import ApproachHMC, ApproachState
from gspmd_mcmc.adaptation.mams import MAMSAdaptation, MAMSAdaptationState
from gspmd_mcmc.adaptation.metrics import Diagonal
from gspmd_mcmc.diagnostics.mcse import mcse_mean
from gspmd_mcmc.kernels import isokinetic
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.isokinetic import LEAPFROG, MINIMAL_NORM
from gspmd_mcmc.kernels.mams import MAMS, MAMSInfo
from gspmd_mcmc.sampling.chunks import advance
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.tree import pytree
from gspmd_mcmc.views.communication import communication

init, step = jax.jit(MAMS.init), jax.jit(MAMS.step)

# A density of two leaves with correlations, a quartic and scales that differ

PRECISION = np.array([[1.0, 0.7, 0.0], [0.7, 2.0, -0.5], [0.0, -0.5, 30.0]])
VARIANCES = np.array([1.5, 0.5, 0.1])


def quartic(x, precision):
    x = jnp.append(x["a"], x["b"])
    return -0.5 * x * (precision @ x), -0.02 * x**4


def split_leaves(x):
    return {"a": jnp.asarray(x[..., :2]), "b": jnp.asarray(x[..., 2])}


def joined(x):
    return np.append(x["a"], x["b"])


# The reference: float64 NumPy, in coordinates z, x = S z, in which the metric S Sᵀ is the identity

DIAGONAL = np.diag(np.sqrt(VARIANCES))
DENSE = np.array([[1.2, 0.0, 0.0], [-0.4, 0.7, 0.0], [0.1, 0.05, 0.2]])


def numpy_log_density(z):
    x = DIAGONAL @ z
    return -0.5 * x @ PRECISION @ x - 0.02 * np.sum(x**4)


def numpy_kick(z, u, time, scale):
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
    return isokinetic.integrate(target, metric, splitting, point, step_size, num_steps)


@pytree
@dataclass(frozen=True, eq=False)
class DenseMetric:
    """What a metric object has that trajectories ask of it."""

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
        return abs(gain - numpy_log_density(z) + numpy_log_density(start()[0]))

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


# Chains that start from exact draws stay exact

NUM_CHAINS, NUM_STEPS, FALSE_ALARM = 8192, 3, 1e-4
CHOLESKY = np.linalg.cholesky(np.array([[1.0, 0.8, -0.5], [0.8, 2.0, 0.1], [-0.5, 0.1, 0.7]]))


def gaussian(x, precision):
    x = jnp.append(x["a"], x["b"])
    return -0.5 * x * (precision @ x)


def correlated_gaussian(cls, **settings):
    precision = np.linalg.inv(CHOLESKY @ CHOLESKY.T).astype(np.float32)
    target = gm.LogDensity(gaussian, precision)
    metric = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(0.7)}

    def draw(u):
        return split_leaves((u @ CHOLESKY.T).astype(np.float32))

    def normals(x):
        return np.column_stack([x["a"], x["b"]]) @ np.linalg.inv(CHOLESKY).T

    return cls(target, 0.9, 3.0, metric, **settings), draw, normals


def funnel_density(x):
    return -0.5 * x["v"] ** 2, -0.5 * x["x"] ** 2 * jnp.exp(-x["v"]) - 0.5 * x["v"]


def funnel(cls, **settings):
    """Neal's funnel, v ~ N(0, 1) and x | v ~ N(0, exp v)."""

    def draw(u):
        x = {"v": u[:, 0], "x": np.exp(u[:, :1] / 2) * u[:, 1:]}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), x)

    def normals(x):
        return np.column_stack([x["v"], x["x"] * np.exp(-x["v"] / 2)[:, None]])

    target = gm.LogDensity(funnel_density)
    return cls(target, 1.0, 3.0, **settings), draw, normals


@jax.jit
def few_steps(kernel, positions, rng_key):
    def one(states, i):
        drawn, key = kernel.drawn(jax.random.key(0), i), jax.random.fold_in(rng_key, i)
        keys = jax.random.split(key, NUM_CHAINS)
        states, info = jax.vmap(type(drawn).step, (None, 0, 0))(drawn, keys, states)
        return states, (info.is_accepted, info.num_integration_steps)

    states = jax.vmap(type(kernel).init, (None, 0))(kernel, positions)
    states, seen = jax.lax.scan(one, states, jnp.arange(NUM_STEPS))
    return states.position, seen


def functionals(u):
    """Functions of independent standard normals [n, d], all of mean 0: shape [n, functions]."""
    each = [u, u**2 - 1, np.tanh(u) ** 3, u**4 - 6 * u**2 + 3]
    pairs = list(combinations(range(u.shape[1]), 2))
    products = [u[:, i] * u[:, j] for i, j in pairs]
    products += [(u[:, i] ** 2 - 1) * (u[:, j] ** 2 - 1) for i, j in pairs]
    return np.column_stack([*each, *products])


def check_leaves_invariant(kernel, draw, normals):
    positions = draw(np.random.default_rng(seed(0)).normal(size=(NUM_CHAINS, 3)))
    after = few_steps(kernel, positions, jax.random.key(seed(1)))
    positions, (is_accepted, lengths) = jax.tree.map(np.asarray, after)
    assert 0.5 < np.mean(is_accepted) < 0.99, "too little moves, or too little is refused"
    assert np.ptp(lengths) > 0 and np.all(np.ptp(lengths, axis=1) == 0), "one length for all chains"
    values = functionals(normals(positions).astype(np.float64))
    standard_error = values.std(axis=0, ddof=1) / np.sqrt(NUM_CHAINS)
    worst = np.max(np.abs(values.mean(axis=0) / standard_error))
    threshold = -NormalDist().inv_cdf(FALSE_ALARM / 2 / values.shape[1])
    within(worst, threshold, "standard errors off")


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("problem", "splitting"),
    [(correlated_gaussian, LEAPFROG), (funnel, MINIMAL_NORM)],
)
def test_mams_leaves_it_invariant(problem, splitting):
    check_leaves_invariant(*problem(MAMS, splitting=splitting))


@pytree
class CountsADimensionTooMany(MAMS):
    def _propose(self, state, end, terms, gain):
        return super()._propose(state, end, terms, gain * 3 / 2)


@pytest.mark.statistical
def test_a_broken_kernel_is_rejected():
    with pytest.raises(AssertionError, match="standard errors"):
        check_leaves_invariant(*correlated_gaussian(CountsADimensionTooMany, splitting=LEAPFROG))


# What a step reports


def steep(x):
    return -(x**4)


def test_divergence_is_reported_and_the_draw_stays_finite():
    kernel = MAMS(gm.LogDensity(steep), 30.0, 60.0)
    state, info = step(kernel, jax.random.key(0), init(kernel, jnp.full(3, -2.0)))
    assert info.is_divergent and info.acceptance_rate == 0 and not info.is_accepted
    assert info.num_integration_steps == 4 and np.all(np.asarray(state.position) == -2.0)


def undefined_above_one(x):
    return jnp.where(x > 1, jnp.inf, -0.5 * x**2)


def test_an_infinite_log_density_is_a_divergence_and_is_never_entered():
    kernel = MAMS(gm.LogDensity(undefined_above_one), 0.5, 1.0)
    state, seen = init(kernel, jnp.full(2, 0.5)), []
    for i in range(20):
        state, info = step(kernel, jax.random.key(i), state)
        seen.append(bool(info.is_divergent))
        assert np.all(np.asarray(state.position) <= 1) and np.isfinite(state.log_density)
    assert any(seen) and not all(seen)


def test_energy_is_the_negative_log_density_at_the_start_and_the_error():
    kernel = MAMS(gm.LogDensity(quartic, jnp.asarray(PRECISION, jnp.float32)), 0.1, 0.5)
    state = init(kernel, split_leaves(np.array([1, -1, 0.1], np.float32)))
    new, info = step(kernel, jax.random.key(1), state)
    assert info.is_accepted
    np.testing.assert_allclose(info.energy, info.energy_error - state.log_density, rtol=1e-6)
    np.testing.assert_allclose(
        new.log_density, tree.total(kernel.target.terms(new.position)), rtol=1e-6
    )


def constant_besides(x, precision, constant):
    return quartic(x, precision), constant


def test_a_float32_log_density_of_millions_makes_the_same_energy_errors():
    """A summand of -2.2e7, whose float32 neighbours are 2 nats away, must not show."""
    data = (jnp.asarray(PRECISION, jnp.float32), jnp.float32(-2.2e7))
    plain = MAMS(gm.LogDensity(quartic, data[0]), 0.2, 1.0)
    large = tree.replace(plain, target=gm.LogDensity(constant_besides, *data))
    position = split_leaves(np.array([1, -1, 0.1], np.float32))
    infos = [step(k, jax.random.key(0), init(k, position))[1] for k in (plain, large)]
    np.testing.assert_allclose(infos[1].energy_error, infos[0].energy_error, atol=1e-5)
    assert abs(infos[0].energy_error) > 1e-4


def test_lengths_are_drawn_evenly_and_in_whole_steps():
    kernel = MAMS(gm.LogDensity(steep), 0.01, 0.2)

    def num_steps(i):
        return kernel.drawn(jax.random.key(0), i)._num_steps()

    counts = np.asarray(jax.jit(jax.vmap(num_steps))(jnp.arange(64)))
    assert counts.min() >= 1 and counts.max() <= 40 and abs(counts.mean() - 20) < 0.5
    assert len(set(counts)) > 35
    held = MAMS(gm.LogDensity(steep), 0.01, 0.2, jitter=0.0).drawn(jax.random.key(0), jnp.int32(3))
    assert held._num_steps() == 20 and kernel.one_leapfrog()._num_steps() == 1


def test_the_approach_tries_step_sizes_by_one_leapfrog_and_has_its_gradient_once():
    traced = []

    def log_density(x):
        traced.append(1)
        return steep(x)

    kernel = MAMS(gm.LogDensity(log_density), 0.01, 0.2, jnp.ones(2))
    state, approach = kernel.init(jnp.ones(2)), ApproachHMC.of(kernel)

    def step(hmc, number):
        traced.clear()
        fall = hmc.drawn(jax.random.key(0), jnp.int32(number))
        info = jax.jit(lambda fall: fall.step(jax.random.key(1), state)[1])(fall)
        return int(info.num_integration_steps), len(traced)

    assert step(approach.one_leapfrog(), 0) == (1, 1)
    # The van der Corput sequence begins with a half: 16 of 1 to 32.
    assert step(approach, 0) == (16, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step_size": 0.0}, ValueError, "step_size: expected a positive number, got 0.0"),
        ({"trajectory_length": jnp.inf}, ValueError, "trajectory_length: expected a positive number"),
        ({"jitter": 1.5}, ValueError, "jitter: expected a number between 0 and 1, got 1.5"),
        ({"inverse_mass_matrix": jnp.zeros(3)}, ValueError, "expected positive variances"),
        ({"target": quartic}, TypeError, "wrap a function as gspmd_mcmc.LogDensity"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    given = {"target": gm.LogDensity(steep), "step_size": 0.1, "trajectory_length": 1.0} | arguments
    with pytest.raises(error, match=message):
        MAMS(**given)


def test_one_dimension_is_refused():
    with pytest.raises(ValueError, match="expected two dimensions at least, got 1"):
        MAMS(gm.LogDensity(steep), 0.1, 1.0).init(jnp.zeros(1))


# Warm-up


SCALES = {"a": np.array([1.0, 30.0], np.float32), "b": np.full(8, 0.1, np.float32)}


def scaled_normal(x):
    return jax.tree.map(lambda value, scale: -0.5 * (value / scale) ** 2, x, SCALES)


def in_mcse(values):
    """The largest mean, in Monte Carlo standard errors."""
    ratios = jax.tree.map(lambda x, m: np.abs(x.mean((0, 1))) / m, values, mcse_mean(values))
    return max(np.max(z) for z in jax.tree.leaves(ratios))


@pytest.mark.statistical
def test_sample_tunes_step_size_length_and_metric_from_far_off():
    """Three chains start at a log density of -1e8, one at -2e3: none may set the others back."""
    target = gm.LogDensity(scaled_normal)
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
    position = jax.tree.map(np.asarray, draws.position)
    squares = jax.tree.map(lambda x, s: (x / s) ** 2 - 1, position, SCALES)
    within(in_mcse(position), 4, "standard errors off")
    within(in_mcse(squares), 4, "standard errors off, of squares")


def test_the_kernel_of_another_warm_up_is_refused():
    hmc = gm.HMC(gm.LogDensity(steep), 0.1, 1)
    with pytest.raises(TypeError, match="expected a MAMS kernel, got HMC; use WindowAdaptation"):
        MAMSAdaptation().prepare(hmc, None)
    with pytest.raises(ValueError, match="target_acceptance_rate: expected a number between 0 and 1"):
        MAMSAdaptation(target_acceptance_rate=1.0)


# Local latents whose rows no mesh divides: the same chain on every mesh, one all-reduce a gradient

MESHES = {"1": {"data": 1}, "8": {"data": 8}, "2x4": {"chains": 2, "data": 4}}
NUM_ROWS, CHAINS = 11, 4


def mesh_of(name):
    size = int(np.prod(list(MESHES[name].values())))
    return gm.make_mesh(**MESHES[name], devices=jax.devices()[:size])


def log_prior(x):
    return -0.5 * x["mean"] ** 2, -0.5 * x["log_sd"] ** 2


def log_likelihood(x, rows):
    prior = -0.5 * jnp.sum(x["effect"] ** 2, axis=1)
    centre = x["mean"] + jnp.exp(x["log_sd"]) * x["effect"][:, 0] * x["effect"][:, 1]
    return prior - 0.5 * (rows["y"] - centre) ** 2


def hierarchy(name):
    y = np.random.default_rng(5).normal(1.0, 1.5, NUM_ROWS)
    data = gm.place({"y": y}, mesh_of(name), P("data"))
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, data, local="effect"))


def starts():
    rng = np.random.default_rng(6)
    shapes = {"mean": (CHAINS,), "log_sd": (CHAINS,), "effect": (CHAINS, NUM_ROWS, 2)}
    return {n: jnp.asarray(0.5 * rng.normal(size=shape)) for n, shape in shapes.items()}


def ten_steps(layout, kernel, states):
    def one(states, i):
        states, info = advance(kernel, jax.random.key(0), i, states, layout)
        return states, (info.num_integration_steps, info.is_accepted, states.position)

    return jax.lax.scan(one, states, jnp.arange(10))[1]


@cache
def run_on(name) -> tuple[Any, Any, Any, Any]:
    """Lengths and acceptance [steps, chains], positions [steps, chains, ...], and the program."""
    with jax.enable_x64(True):
        target = hierarchy(name)
        layout = read_layout(mesh_of(name), target, starts(), CHAINS, has_chains=True)
        kernel = MAMS(target, 0.8, 3.0, splitting=LEAPFROG)
        states = init_chains(kernel, starts(), layout=layout)
        program = jax.jit(partial(ten_steps, layout)).lower(kernel, states).compile()
        return *jax.tree.map(np.asarray, program(kernel, states)), program


@pytest.mark.parametrize("name", ["8", "2x4"])
def test_chains_are_the_same_on_every_mesh(name):
    lengths, accepted, expected, _ = run_on("1")
    assert np.ptp(lengths) > 3 and np.mean(accepted) > 0.5
    got_lengths, got_accepted, got, _ = run_on(name)
    np.testing.assert_array_equal(got_lengths, lengths)
    np.testing.assert_array_equal(got_accepted, accepted)
    got = got | {"effect": got["effect"][:, :, :NUM_ROWS]}
    for leaf in expected:
        np.testing.assert_allclose(got[leaf], expected[leaf], rtol=1e-9, atol=1e-9)


def test_the_pad_of_local_latents_does_not_move():
    effect = run_on("8")[2]["effect"]
    pad, real = effect[:, :, NUM_ROWS:], effect[:, :, :NUM_ROWS]
    assert pad.shape[2] == 5 and np.ptp(pad, axis=0).max() == 0 and np.ptp(real, axis=0).min() > 0


OTHER_KINDS = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
GRADIENT, PRODUCTS = 2, 3  # numbers: of shared latents; p·p, p·g and g·g of local ones


@pytest.mark.parametrize("name", ["8", "2x4"])
def test_a_gradient_costs_one_all_reduce_products_included(name):
    found = communication(run_on(name)[3])
    assert [kind for kind in OTHER_KINDS if found.count(kind)] == []
    within = [c for c in found.collectives if c.loops and c.loops[-1].name == "leapfrog"]
    assert found.runs("all-reduce", within="leapfrog") == len(within) == 1
    chains = CHAINS // MESHES[name].get("chains", 1)
    assert within[0].axes == ("data",) and within[0].num_bytes <= 8 * chains * (GRADIENT + PRODUCTS)


def test_tuning_adds_one_all_reduce_of_scalars_to_a_step():
    """In the approach and after it."""
    target = hierarchy("2x4")
    layout = read_layout(mesh_of("2x4"), target, starts(), CHAINS, has_chains=True)
    states = init_chains(kernel := MAMS(target, 0.8, 3.0), starts(), layout=layout)
    adaptation = MAMSAdaptation(metric=Diagonal())

    @jax.jit
    def begun(kernel, states):
        kernel = adaptation.prepare(kernel, states)
        approach = adaptation.init(kernel, states)
        arrived = adaptation.end(approach, kernel, states, True)
        return kernel, *(layout.pin_like(x, states.position) for x in (approach, arrived))

    @jax.jit
    def updated(kernel, state, transition):
        state = adaptation.update(state, kernel, transition)
        return layout.pin_like(state, states.position)

    zeros = jnp.zeros(CHAINS)
    info = layout.pin_chains(MAMSInfo(zeros, zeros > 0, zeros > 0, zeros, zeros, zeros))
    kernel, *each = begun(kernel, states)
    assert [type(state) for state in each] == [ApproachState, MAMSAdaptationState]
    for state in each:
        found = communication(updated, kernel, state, Transition(states, states, info, None))
        assert [(c.kind, c.num_bytes) for c in found.collectives] == [("all-reduce", 12)]
