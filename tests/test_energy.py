"""Energy differences in float32 where the log density is -4e6, against NumPy's float64.

There a float32 total resolves a quarter of a nat: the naive difference of totals is put to every
check as well, and fails it. What the precision rests on, `two_float_sum`, is checked at the end.
"""

import math
from fractions import Fraction
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import normal

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets.streaming import two_float
from gspmd_mcmc.targets.streaming.two_float import two_float_sum, two_sum

NUM_ROWS = 2_900_001
TOLERANCE = 0.02  # nat
CENTRE = {"mean": 0.3, "slope": -0.5}
POSTERIOR_SD = {"mean": NUM_ROWS**-0.5, "slope": (NUM_ROWS / 3) ** -0.5}

terms = jax.jit(lambda target, x: target.terms(x))
step = jax.jit(gm.HMC.step)
init = jax.jit(gm.HMC.init)
trajectory = jax.jit(gm.HMC.trajectory)


def log_likelihood(x, rows):
    """Gaussian regression on one feature; arithmetic alone, so that NumPy can do it as well.

    The prediction comes first: ``y - mean`` would round the same way in all rows of one binade, and
    so be wrong by 0.02 nat before anything is summed.
    """
    return -((rows["y"] - (x["mean"] + x["slope"] * rows["x"])) ** 2) / 2 - 0.9189385


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
    return gm.Posterior(normal, gm.Plate(log_likelihood, data, tile_rows=tile_rows))


def sum_of_differences(new, old):
    return tree.total(tree.sub(new, old))


def difference_of_sums(new, old):
    return tree.total(new) - tree.total(old)


def difference_of_tile_sums(new, old):
    """Keep a plain float for each tile: the pairs without their lows."""
    highs = [t | {"plates": tuple(p[..., :1] for p in t["plates"])} for t in (new, old)]
    return sum_of_differences(*highs)


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


@pytest.mark.parametrize("layout", [(1, 4096), (8, None)])
def test_sum_of_differences_is_precise(layout):
    check_differences(make_target(*layout), sum_of_differences)


@pytest.mark.parametrize("layout", [(1, 4096), (8, None)])
def test_difference_of_sums_is_not(layout):
    with pytest.raises(AssertionError, match="wrong by"):
        check_differences(make_target(*layout), difference_of_sums)


def test_difference_of_plain_sums_of_large_tiles_is_not():
    with pytest.raises(AssertionError, match="wrong by"):
        check_differences(make_target(1), difference_of_tile_sums)


def test_terms_keep_one_pair_for_each_tile():
    plate_terms = terms(make_target(8, 4096), positions_nearby(1)[0])["plates"][0]
    block_rows = -(-NUM_ROWS // 8)
    assert plate_terms.shape == (8, -(-block_rows // 4096), 2)
    assert plate_terms.dtype == jnp.float32


# Whole trajectories


def make_kernel():
    inverse_mass_matrix = jax.tree.map(lambda sd: jnp.float32(sd**2), POSTERIOR_SD)
    return gm.HMC(make_target(8), 1.0, 4, inverse_mass_matrix)


def start_of_step(kernel, rng_key, state):
    """Return the point of phase space that `step` starts from with this key."""
    momentum = metrics.sample_momentum(
        jax.random.split(rng_key)[0], kernel.inverse_mass_matrix, state.position
    )
    return PhasePoint(state.position, momentum, state.log_density_grad)


def exact_energy(kernel, point):
    momentum, variances = jax.tree.map(np.float64, (point.momentum, kernel.inverse_mass_matrix))
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
        end, _ = trajectory(kernel, start)
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
    return (rng.normal(size=(2, 1000)) * 10.0 ** rng.uniform(-12, 12, size=(2, 1000))).astype(
        np.float32
    )


def adversarial_pairs():
    """Halfway cases, a bit lost at either end, zeros, cancellation, and the larger one second."""
    ulp = 2.0**-23
    pairs = [
        (1, ulp / 2), (ulp / 2, 1), (1, -ulp / 2), (1, 0.75 * ulp), (1 + ulp, ulp / 2), (1, 3e-30),
        (1e8, 1), (1, 1e8), (2**24, 1), (-(2**24), -1), (2**24 + 2, 3), (-4e6, 0.1), (0.1, -4e6),
        (1e30, 1e-6), (3, -3), (1e30, -1e30), (0, 5.5), (5.5, -0.0), (0.1, 0.2), (0.1, -0.1 - ulp),
        (2.0**100, -(2.0**76)), (1 - ulp / 2, 1 - ulp / 2), (1 + ulp, -1), (4e6 + 0.5, -4e6),
    ]  # fmt: skip
    return np.array(pairs, np.float32).T


PAIRS = [random_pairs, adversarial_pairs]


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


def check_error_is_kept(programs):
    for two_sum_of in programs:
        s, e = two_sum_of(jnp.full(3, 2e-8, jnp.float32))
        np.testing.assert_array_equal(s, np.ones(3, np.float32))
        np.testing.assert_array_equal(e, np.full(3, 2e-8, np.float32), err_msg="e was lost")


def programs_of(two_sum):
    """Put the addition of 1 and a small x into programs of several kinds; no operand is constant."""
    one = jnp.ones(3, jnp.float32)
    return [
        lambda x: two_sum(one, x),
        lambda x: jax.jit(two_sum)(one, x),
        lambda x: jax.jit(two_sum)(x, one),
        lambda x: jax.jit(jax.vmap(two_sum))(one, x),
        lambda x: jax.lax.map(lambda pair: two_sum(*pair), (one, x)),
        lambda x: jax.lax.scan(lambda carry, xi: (carry, two_sum(carry, xi)), one[0], x)[1],
    ]


def programs_with_a_constant_of(two_sum):
    """The same with a constant operand, or both constant: the compiler then knows more."""
    one = np.ones(3, np.float32)
    return [
        jax.jit(lambda x: two_sum(x, one)),
        jax.jit(lambda x: two_sum(one, x)),
        jax.jit(lambda x: two_sum(jnp.float32(1), x)),
        jax.jit(lambda _: two_sum(one, np.full(3, 2e-8, np.float32))),
    ]


@pytest.mark.parametrize("programs", [programs_of, programs_with_a_constant_of])
def test_two_sum_keeps_its_error_in_every_kind_of_program(programs):
    check_error_is_kept(programs(two_sum))


def simplified(a, b):
    """Return what algebra that is not floating-point arithmetic makes of TwoSum: e = 0."""
    return a + b, jnp.zeros_like(a + b)


def fast_two_sum(a, b):
    """Leave out a branch, as if the larger one always came first."""
    s = a + b
    return s, b - (s - a)


@pytest.mark.parametrize("broken", [simplified, fast_two_sum])
@pytest.mark.parametrize("pairs", PAIRS)
def test_a_broken_two_sum_is_rejected(broken, pairs):
    with pytest.raises(AssertionError, match="not exact"):
        check_is_exact(broken, pairs())


@pytest.mark.parametrize("programs", [programs_of, programs_with_a_constant_of])
def test_a_simplified_two_sum_is_seen_to_lose_its_error(programs):
    with pytest.raises(AssertionError, match="e was lost"):
        check_error_is_kept(programs(simplified))


# Sums of many


def plain_sum(x):
    return jnp.stack([jnp.sum(x), jnp.zeros((), x.dtype)])


def pair_sum_without_lows(x):
    """Keep what the last addition lost, and nothing of the others."""
    half = x.shape[0] // 2
    return jnp.stack(two_sum(jnp.sum(x[:half]), jnp.sum(x[half:])))


def log_likelihood_terms():
    return (-1.5 * np.random.default_rng(4).gamma(2.0, size=100_000)).astype(np.float32)


def terms_of_many_sizes():
    rng = np.random.default_rng(5)
    return (rng.normal(size=100_000) * 10.0 ** rng.uniform(-6, 6, size=100_000)).astype(np.float32)


def check_sum(two_float_sum, x):
    check_is_sum(jax.jit(two_float_sum)(x), x)


def check_is_sum(found, x):
    """Relative to the sum of magnitudes, as cancellation is no fault of the sum."""
    hi, lo = np.asarray(found, np.float64)
    wrong = abs(math.fsum([hi, lo, *np.negative(x)])) / math.fsum(np.abs(x))
    assert wrong < 1e-10, f"wrong by {wrong}"


# On a CPU it is made of parts, on chips one reduction.
FORMS = [two_float_sum, two_float._by_reduction]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", [log_likelihood_terms, terms_of_many_sizes])
def test_two_float_sum_of_many_terms(values, form):
    check_sum(form, values())


@pytest.mark.parametrize("broken", [plain_sum, pair_sum_without_lows])
@pytest.mark.parametrize("values", [log_likelihood_terms, terms_of_many_sizes])
def test_a_plain_sum_is_rejected(values, broken):
    with pytest.raises(AssertionError, match="wrong by"):
        check_sum(broken, values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 31, 33, 256, 257, 1001])
def test_two_float_sum_of_any_length(length, form):
    x = (1e4 * np.random.default_rng(length).normal(size=length)).astype(np.float32)
    check_sum(form, x)
    hi, lo = form(jnp.asarray(x))
    assert hi == hi + lo


def check_sum_of_products(two_float_sum, product):
    """Where one program makes the terms and adds them: LLVM may leave some of their uses unrounded."""
    pair = log_likelihood_terms(), log_likelihood_terms()[::-1]
    found = jax.jit(lambda x, y: two_float_sum(product(x, y)))(*pair)
    check_is_sum(found, np.asarray(jax.jit(product)(*pair)))


PRODUCTS = {"of both": lambda x, y: x * y, "a square": lambda x, y: -0.5 * y * y}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_two_float_sum_of_products(product, form):
    check_sum_of_products(form, product)


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_a_plain_sum_of_products_is_rejected(product):
    with pytest.raises(AssertionError, match="wrong by"):
        check_sum_of_products(plain_sum, product)


def test_two_float_sums_of_chains_are_those_of_each():
    """As chips make them, by a map over a reduction."""
    x = np.stack([log_likelihood_terms(), terms_of_many_sizes()])
    for each, total in zip(x, jax.jit(jax.vmap(two_float._by_reduction))(x), strict=True):
        check_is_sum(total, each)


def test_the_derivative_of_a_two_float_sum_is_that_of_the_sum():
    x, tangent = jnp.arange(5.0), jnp.arange(5.0) - 1
    np.testing.assert_array_equal(jax.jvp(two_float_sum, (x,), (tangent,))[1], [5.0, 0.0])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(two_float_sum(x)))(x), jnp.ones(5))


# Terms that are not finite


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_a_term_that_is_not_finite_shows_in_the_sum(bad, length, form):
    for at in (0, length - 1):
        x = np.ones(length, np.float32)
        x[at] = bad
        hi, _ = form(jnp.asarray(x))
        assert not np.isfinite(hi)
