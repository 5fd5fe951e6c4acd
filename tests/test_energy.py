"""Energy differences in float32 where the log density is -4e6, against NumPy's float64.

There a float32 total resolves a quarter of a nat: the naive difference of totals is put to every
check as well, and fails it. What the precision rests on, `two_float_sum`, is checked at the end.
"""

import math
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.kernels import metrics
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.targets.two_float import two_float_sum, two_sum

NUM_ROWS = 2_900_001
TOLERANCE = 0.02  # nat
CENTRE = {"mean": 0.3, "slope": -0.5}
POSTERIOR_SD = {"mean": NUM_ROWS**-0.5, "slope": (NUM_ROWS / 3) ** -0.5}

terms = jax.jit(lambda target, x: target.terms(x))
step = jax.jit(gm.HMC.step)
init = jax.jit(gm.HMC.init)
trajectory = jax.jit(gm.HMC.trajectory)


def log_prior(x):
    return jax.tree.map(lambda leaf: -(leaf**2) / 2, x)


def log_likelihood(x, rows):
    """Gaussian regression on one feature; arithmetic alone, so that NumPy can do it as well."""
    return -((rows["y"] - x["mean"] - x["slope"] * rows["x"]) ** 2) / 2 - 0.9189385


@cache
def rows_of_data():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, NUM_ROWS)
    y = CENTRE["mean"] + CENTRE["slope"] * x + rng.normal(size=NUM_ROWS)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def exact_log_density(x):
    """Evaluate in float64, at the values that float32 holds."""
    x, rows = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, rows_of_data()))
    return np.sum(log_likelihood(x, rows)) - sum(leaf**2 for leaf in x.values()) / 2


def positions_nearby(num):
    """Positions about the posterior's width from its centre."""
    rng = np.random.default_rng(1)
    return [
        {n: np.float32(CENTRE[n] + POSTERIOR_SD[n] * rng.normal()) for n in CENTRE} for _ in range(num)
    ]


@cache
def make_target(num_devices, tile_rows=None):
    data = rows_of_data()
    if num_devices > 1:
        mesh = gm.make_mesh(data=num_devices, devices=jax.devices()[:num_devices])
        data = gm.place(data, mesh, P("data"))
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, data, tile_rows=tile_rows))


def sum_of_differences(new, old):
    return tree.total(tree.sub(new, old))


def difference_of_sums(new, old):
    return tree.total(new) - tree.total(old)


def check_agrees(got, exact):
    worst = np.max(np.abs(np.asarray(got, np.float64) - np.asarray(exact)))
    assert worst < TOLERANCE, f"wrong by {worst} nat"


# Two positions nearby


def check_differences(target, difference):
    positions = positions_nearby(6)
    got = [terms(target, x) for x in positions]
    exact = [exact_log_density(x) for x in positions]
    assert all(value < -4e6 for value in exact)
    check_agrees([difference(t, got[0]) for t in got[1:]], np.subtract(exact[1:], exact[0]))


LAYOUTS = [(1, None), (1, 4096), (8, None), (8, 4096)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sum_of_differences_is_precise(layout):
    check_differences(make_target(*layout), sum_of_differences)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_difference_of_sums_is_not(layout):
    with pytest.raises(AssertionError, match="wrong by"):
        check_differences(make_target(*layout), difference_of_sums)


def test_terms_keep_one_pair_for_each_tile():
    plate_terms = terms(make_target(8, 4096), positions_nearby(1)[0])["plates"][0]
    block_rows = -(-NUM_ROWS // 8)
    assert plate_terms.shape == (8, -(-block_rows // 4096), 2)
    assert plate_terms.dtype == jnp.float32


# Whole trajectories


def make_kernel():
    inverse_mass_matrix = jax.tree.map(lambda sd: jnp.float32(sd**2), POSTERIOR_SD)
    return gm.HMC(make_target(8), 1.0, 3, inverse_mass_matrix)


def start_of_step(kernel, rng_key, state):
    """Return the point of phase space that `step` starts from with this key."""
    momentum = metrics.sample_momentum(
        jax.random.split(rng_key)[0], kernel.inverse_mass_matrix, state.position
    )
    return PhasePoint(state.position, momentum, state.log_density_grad)


def exact_energy(kernel, point):
    momentum, variances = jax.tree.map(
        lambda a: np.float64(a), (point.momentum, kernel.inverse_mass_matrix)
    )
    kinetic = sum(variances[n] * momentum[n] ** 2 for n in momentum) / 2
    return kinetic - exact_log_density(point.position)


def energy_error_of_step(kernel, rng_key, state, end):
    return step(kernel, rng_key, state)[1].energy_error


def energy_error_of_totals(kernel, rng_key, state, end):
    start = start_of_step(kernel, rng_key, state)
    metric = kernel.inverse_mass_matrix
    before = metrics.kinetic_energy(metric, start.momentum) - state.log_density
    return (
        metrics.kinetic_energy(metric, end.momentum) - init(kernel, end.position).log_density - before
    )


def check_energy_errors(energy_error):
    kernel, got, exact = make_kernel(), [], []
    for seed, position in enumerate(positions_nearby(6)):
        key, state = jax.random.key(seed), init(kernel, position)
        start = start_of_step(kernel, key, state)
        end = trajectory(kernel, start)
        got.append(energy_error(kernel, key, state, end))
        exact.append(exact_energy(kernel, end) - exact_energy(kernel, start))
    assert np.max(np.abs(exact)) > 0.1, "the energy errors are too small to show anything"
    check_agrees(got, exact)


def test_energy_error_of_a_trajectory_is_precise():
    check_energy_errors(energy_error_of_step)


def test_energy_error_as_a_difference_of_totals_is_not():
    with pytest.raises(AssertionError, match="wrong by"):
        check_energy_errors(energy_error_of_totals)


# TwoSum, as compiled


def random_pairs():
    """Of either sign, magnitudes from 1e-12 to 1e12: few bits in common, or many."""
    rng = np.random.default_rng(2)
    return np.float32(rng.normal(size=(2, 1000)) * 10.0 ** rng.uniform(-12, 12, size=(2, 1000)))


def near_cancelling_pairs():
    rng = np.random.default_rng(3)
    a = np.float32(rng.normal(size=1000))
    return np.stack([a, -a * (1 + np.float32(2.0**-20) * rng.integers(-3, 4, 1000).astype(np.float32))])


def adversarial_pairs():
    """Halfway cases, powers of two, a bit lost at either end, zero, and the larger one second."""
    one, tiny = 1.0, 2.0**-24
    pairs = [
        (one, tiny), (tiny, one), (one, -tiny), (one, tiny * 1.5), (one + 2**-23, tiny),
        (1e8, 1.0), (1.0, 1e8), (16777216.0, 1.0), (-16777216.0, -1.0), (16777217.0, 3.0),
        (-4e6, 0.1), (0.1, -4e6), (1e30, 1e-6), (3.0, -3.0), (0.0, 5.5), (5.5, -0.0), (0.1, 0.2),
        (1e30, -1e30), (2.0**100, -(2.0**76)), (1 - 2.0**-24, 1 - 2.0**-24),
    ]  # fmt: skip
    return np.float32(pairs).T


PAIRS = [random_pairs, near_cancelling_pairs, adversarial_pairs]


def exactly(values):
    return [Fraction(float(v)) for v in np.ravel(values)]


def check_is_exact(two_sum, pairs):
    """Compare s + e with a + b as fractions, and s with the rounded sum."""
    a, b = pairs
    s, e = (np.asarray(x) for x in jax.jit(two_sum)(a, b))
    np.testing.assert_array_equal(s, a + b)
    kept = [x + y for x, y in zip(exactly(s), exactly(e), strict=True)]
    assert kept == [x + y for x, y in zip(exactly(a), exactly(b), strict=True)], "a sum is not exact"


@pytest.mark.parametrize("pairs", PAIRS)
def test_two_sum_is_exact_under_jit(pairs):
    check_is_exact(two_sum, pairs())


def check_error_is_kept(two_sum):
    """Try the same pair as arguments, as one constant and an argument, and as two constants."""
    one, small = jnp.float32(1), jnp.float32(2e-8)
    programs = [
        jax.jit(two_sum)(one, small),
        jax.jit(lambda x: two_sum(np.float32(1), x))(small),
        jax.jit(lambda x: two_sum(x, np.float32(2e-8)))(one),
        jax.jit(lambda: two_sum(jnp.float32(1), jnp.float32(2e-8)))(),
        jax.jit(jax.vmap(two_sum))(one[None], small[None]),
        jax.lax.scan(lambda carry, x: (carry, two_sum(carry, x)), one, small[None])[1],
    ]
    for s, e in programs:
        assert (np.float32(np.squeeze(s)), np.float32(np.squeeze(e))) == (1, small), "e was lost"


def test_two_sum_keeps_its_error_in_every_kind_of_program():
    check_error_is_kept(two_sum)


def simplified(a, b):
    """Return what algebra that is not floating-point arithmetic makes of TwoSum: e = 0."""
    return a + b, jnp.zeros_like(a + b)


def fast_two_sum(a, b):
    """Leave out a branch, as if the larger one always came first."""
    s = a + b
    return s, b - (s - a)


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("broken", [simplified, fast_two_sum])
def test_a_broken_two_sum_is_rejected(broken, pairs):
    with pytest.raises(AssertionError, match="not exact"):
        check_is_exact(broken, pairs())


def test_a_simplified_two_sum_is_seen_to_lose_its_error():
    with pytest.raises(AssertionError, match="e was lost"):
        check_error_is_kept(simplified)


# Sums of many


def plain_sum(x):
    return jnp.stack([jnp.sum(x), jnp.zeros((), x.dtype)])


def pair_sum_without_lows(x):
    """Keep what the last addition lost, and nothing of the others."""
    half = x.shape[0] // 2
    return jnp.stack(two_sum(jnp.sum(x[:half]), jnp.sum(x[half:])))


def log_likelihood_terms():
    return np.float32(-1.5 * np.random.default_rng(4).gamma(2.0, size=100_000))


def terms_of_many_sizes():
    rng = np.random.default_rng(5)
    return np.float32(rng.normal(size=100_000) * 10.0 ** rng.uniform(-6, 6, size=100_000))


def check_sum(two_float_sum, x):
    """Relative to the sum of magnitudes, which no sum in floats can do without."""
    hi, lo = np.asarray(jax.jit(two_float_sum)(x))
    wrong = abs(float(Fraction(float(hi)) + Fraction(float(lo)) - Fraction(math.fsum(x.tolist()))))
    assert wrong < 1e-10 * np.sum(np.abs(x), dtype=np.float64), f"wrong by {wrong}"


@pytest.mark.parametrize("values", [log_likelihood_terms, terms_of_many_sizes])
def test_two_float_sum_of_many_terms(values):
    check_sum(two_float_sum, values())


@pytest.mark.parametrize("broken", [plain_sum, pair_sum_without_lows])
@pytest.mark.parametrize("values", [log_likelihood_terms, terms_of_many_sizes])
def test_a_plain_sum_is_rejected(values, broken):
    with pytest.raises(AssertionError, match="wrong by"):
        check_sum(broken, values())


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 31, 33, 1001])
def test_two_float_sum_of_any_length(length):
    x = np.float32(1e4 * np.random.default_rng(length).normal(size=length))
    hi, lo = two_float_sum(jnp.asarray(x))
    assert abs(float(hi) + float(lo) - math.fsum(x.tolist())) < 1e-11 * np.sum(np.abs(x))
    # The pair is normalised: hi is the rounded sum.
    assert np.float32(float(hi) + float(lo)) == hi


def test_two_float_sum_of_one_is_that_one():
    np.testing.assert_array_equal(two_float_sum(jnp.float32([0.1])), np.float32([0.1, 0]))


# Terms that are not finite


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_a_term_that_is_not_finite_shows_in_the_sum(bad, length):
    for at in (0, length - 1):
        x = np.ones(length, np.float32)
        x[at] = bad
        hi, _ = two_float_sum(jnp.asarray(x))
        assert not np.isfinite(hi)


def walled_likelihood(x, rows):
    """Terms that are infinite or NaN where the position is beyond the wall of the last row."""
    inside = x["mean"][None] < rows["wall"]
    return jnp.where(inside, -((rows["y"] - x["mean"][None]) ** 2) / 2, rows["beyond"])


@partial(jax.jit, static_argnames="num_chains")
def step_from(kernel, position, *, num_chains):
    keys = jax.random.split(jax.random.key(6), num_chains)
    return jax.vmap(type(kernel).step, (None, 0, None))(kernel, keys, kernel.init(position))


@pytest.mark.parametrize("beyond", [np.inf, -np.inf, np.nan])
def test_a_proposal_with_a_term_that_is_not_finite_is_rejected(beyond):
    rows = {"y": np.zeros(19), "wall": np.full(19, np.inf), "beyond": np.full(19, beyond)}
    rows["wall"][17] = 0.1
    rows = jax.tree.map(np.float32, rows)
    data = gm.place(rows, gm.make_mesh(data=8), P("data"))
    target = gm.Posterior(log_prior, gm.Plate(walled_likelihood, data))
    state, info = step_from(gm.HMC(target, 0.2, 3), {"mean": jnp.float32(0.0)}, num_chains=64)
    is_beyond = ~np.isfinite(info.energy_error)
    assert 0 < is_beyond.sum() < 64
    assert not np.any(is_beyond & info.is_accepted)
    np.testing.assert_array_equal(info.is_divergent, is_beyond)
    np.testing.assert_array_equal(np.asarray(info.acceptance_rate)[is_beyond], 0)
    assert np.all(np.isfinite(state.log_density)) and np.all(state.position["mean"] < 0.1)
