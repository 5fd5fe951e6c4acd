"""ChEES and SNAPER: criteria as their papers say, lengths near the best, stuck chains left out."""

from fractions import Fraction
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import CHAINS, OTHER_KINDS, gaussian, hierarchy, hierarchy_starts, mesh_of, normal
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import HMC, ChEESAdaptation, JitteredHMC, SNAPERAdaptation, communication, tree
from gspmd_mcmc.adaptation import adam, chees, dual_averaging, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Transition
from gspmd_mcmc.adaptation.chees import ChangeOfSquares, Trajectories
from gspmd_mcmc.adaptation.snaper import ChangeAlongPrincipal
from gspmd_mcmc.kernels.jittered_hmc import JITTER, van_der_corput
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.run_state import draw_kernel, step_chains
from gspmd_mcmc.sampling.start import init_chains

BOTH = [ChEESAdaptation, SNAPERAdaptation]
CRITERIA = [ChangeOfSquares(), ChangeAlongPrincipal()]


# The jitter


def halton(index, base=2):
    """The radical inverse, digit by digit, exactly."""
    value, scale = Fraction(0), Fraction(1, base)
    while index:
        index, digit = divmod(index, base)
        value, scale = value + digit * scale, scale / base
    return value


def test_the_sequence_is_haltons_in_base_2():
    index = np.array([*range(200), 2**16 + 1, 2**23 - 1, 2**31 - 2**9])
    got = np.asarray(van_der_corput(jnp.asarray(index)))
    assert [Fraction(float(x)) for x in got] == [halton(int(i)) for i in index]


@pytest.mark.parametrize(("jitter", "least"), [(1.0, 1), (0.75, 3), (0.0, 11)])
def test_a_step_has_as_many_leapfrogs_as_its_number_says(jitter, least):
    kernel = JitteredHMC(gm.LogDensity(normal), 0.1, 1.03, max_leapfrogs=18, jitter=jitter)
    draw: Any = jax.jit(JitteredHMC.with_jitter)
    key, other = jax.random.split(jax.random.key(0))
    drawn = [draw(kernel, key, i) for i in range(64)]
    counts = [int(k.num_integration_steps) for k in drawn]
    shares = [1 + jitter * (2 * float(halton(i + 1)) - 1) for i in range(64)]
    assert counts == [min(np.ceil(share * 1.03 / 0.1), 18) for share in shares]
    assert (min(counts), max(counts)) == (least, 18 if jitter else 11)
    assert type(drawn[0]) is HMC and drawn[5].jitter == 0
    # The number of the step alone matters, and other numbers are the same program.
    assert [int(draw(kernel, other, i).num_integration_steps) for i in range(64)] == counts
    longer = kernel.with_trajectory_length(0.32).with_step_size(0.2)
    assert int(draw(longer, key, 2).num_integration_steps) == np.ceil(1.6 * (1 + jitter / 2))
    assert draw._cache_size() == 1
    assert int(kernel.one_leapfrog().with_jitter(key, jnp.int32(2)).num_integration_steps) == 1


def test_bad_settings_are_refused():
    target = gm.LogDensity(normal)
    with pytest.raises(ValueError, match="JitteredHMC: trajectory_length: expected a positive"):
        JitteredHMC(target, 0.1, 0.0)
    with pytest.raises(ValueError, match="JitteredHMC: max_leapfrogs: expected at least 1 and whole"):
        JitteredHMC(target, 0.1, 1.0, max_leapfrogs=0)
    with pytest.raises(ValueError, match="JitteredHMC: jitter: expected a number between 0 and 1"):
        JitteredHMC(target, 0.1, 1.0, jitter=1.5)
    with pytest.raises(ValueError, match="SNAPERAdaptation: target_acceptance_rate"):
        SNAPERAdaptation(target_acceptance_rate=1.0)
    kernel = JitteredHMC(target, 0.1, 1.0)
    one = jax.vmap(kernel.init)(jnp.ones((1, 2)))
    with pytest.raises(ValueError, match="ChEESAdaptation: expected at least 2 chains"):
        ChEESAdaptation().prepare(kernel, one)
    with pytest.raises(TypeError, match="SNAPERAdaptation tunes JitteredHMC, got HMC"):
        SNAPERAdaptation().prepare(HMC(target, 0.1, 3), one)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("num_warmup", [0, 7, 20, 33, 1000])
def test_windows_follow_each_other(num_warmup):
    windows = ChEESAdaptation().windows(num_warmup)
    ends = [w.end for w in windows]
    assert [w.start for w in windows] == [0, *ends][:-1] and all(w.start < w.end for w in windows)
    assert ends[-1:] == [num_warmup][: len(ends)]
    assert [w.learns_metric for w in windows] == [False, *[True] * 5, False][: len(ends)]


# The criteria, on the exact flow of a Gaussian, against finite differences and NumPy

SCALES, VARIANCES, CENTRE = np.array([1.0, 3.0, 0.2]), np.array([1.5, 4.0, 0.1]), np.array([0.5, 2, -1])
LEAPFROGS, STEP_SIZE = 7, 0.13
TIME = (LEAPFROGS - 0.5) * STEP_SIZE


def flow(x, p, time):
    """Positions and velocities of N(0, SCALES²) with the metric VARIANCES after a time."""
    omega = np.sqrt(VARIANCES) / SCALES
    cos, sin = np.cos(omega * time), np.sin(omega * time)
    v = VARIANCES * p
    return x * cos + v / omega * sin, v * cos - x * omega * sin


def leaves_of(x):
    return {"a": jnp.asarray(x[..., :2]), "b": jnp.asarray(x[..., 2])}


def functions(criterion, x, direction):
    """The functions whose changes the criterion is about, in NumPy: [..., functions]."""
    z = (x - CENTRE) / np.sqrt(VARIANCES)
    if isinstance(criterion, ChangeOfSquares):
        return np.sum(z**2, axis=-1)[..., None]
    variance = np.linalg.norm(direction)  # of where the chains are, along the direction
    along = z @ (direction / variance)
    return np.stack([along**2, np.sqrt(variance) * along], axis=-1)


def state_of(criterion, direction):
    state = criterion.init(gm.LogDensity(normal), leaves_of(CENTRE[None]))
    if isinstance(criterion, ChangeOfSquares):
        return state
    return tree.replace(state, direction=tree.replace(state.direction, mean=leaves_of(direction)))


def gains(criterion, cost, start, end, velocity, direction):
    trajectories = Trajectories(*map(leaves_of, (start, end, velocity, VARIANCES)))
    adaptation = ChEESAdaptation(length_cost=cost, criterion=criterion)
    _, square, rate = criterion.measure(state_of(criterion, direction), trajectories)
    kernel = HMC(gm.LogDensity(normal), STEP_SIZE, LEAPFROGS)
    return square, rate, adaptation.gains(kernel, square, rate)


@pytest.mark.parametrize("cost", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("criterion", CRITERIA, ids=["chees", "snaper"])
def test_gains_are_the_derivative_of_the_criterion(criterion, cost):
    rng = np.random.default_rng(0)
    start, direction = SCALES * rng.normal(size=(50, 3)), rng.normal(size=3)
    momentum = rng.normal(size=(50, 3)) / np.sqrt(VARIANCES)

    def square_at(log_time):
        end = flow(start, momentum, np.exp(log_time))[0]
        changes = functions(criterion, end, direction) - functions(criterion, start, direction)
        return np.sum(changes**2, axis=-1)

    def value(log_time):
        work = np.exp(log_time) + STEP_SIZE / 2  # leapfrogs are rounded up
        return square_at(log_time) / work**cost

    with jax.enable_x64(True):
        found = gains(criterion, cost, start, *flow(start, momentum, TIME), direction)
        square, rate, got = map(np.asarray, found)
    at, h = np.log(TIME), 1e-5
    np.testing.assert_allclose(square, square_at(at), rtol=1e-9, atol=1e-9)
    slope = (square_at(at + h) - square_at(at - h)) / (2 * h)
    np.testing.assert_allclose(rate * TIME, slope, rtol=1e-6, atol=1e-6)
    expected = (value(at + h) - value(at - h)) / (2 * h)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-5 * np.abs(expected).max())


def test_chains_are_weighed_by_acceptance_and_bad_proposals_are_left_out():
    rates, recent = np.array([0.5, 1.0, 0.0, 0.25, 0.0]), np.array([0.6, 0.9, 0.7, 0.8, 0.01])
    gains = jnp.asarray([2.0, -4.0, jnp.nan, jnp.inf, 1e30])
    gain, harmonic = chees._over_chains(jnp.asarray(rates), gains, jnp.asarray(recent))
    np.testing.assert_allclose(gain, (0.5 * 2 - 4) / 1.5, rtol=1e-6)
    floored = np.maximum(rates[:4], chees.LEAST_RATE)
    np.testing.assert_allclose(harmonic, 1 / np.mean(1 / floored), rtol=1e-6)
    # When most are stuck it is the step size that is wrong, and all count.
    _, harmonic = chees._over_chains(jnp.zeros(5), gains, jnp.asarray([0.9, 0.9, 0, 0, 0]))
    np.testing.assert_allclose(harmonic, chees.LEAST_RATE, rtol=1e-6)
    gain, _ = chees._over_chains(jnp.zeros(5), gains, jnp.ones(5))
    assert gain == 0


@pytest.mark.parametrize("criterion", CRITERIA, ids=["chees", "snaper"])
def test_ends_that_are_not_finite_teach_a_criterion_nothing(criterion):
    rng = np.random.default_rng(7)
    before, velocity = leaves_of(rng.normal(size=(5, 3))), leaves_of(rng.normal(size=(5, 3)))
    target, direction = gm.LogDensity(normal), rng.normal(size=3)
    states, good = [], leaves_of(rng.normal(size=(5, 3)))
    bad = good | {"a": good["a"].at[1, 0].set(jnp.nan).at[2, 1].set(jnp.inf)}
    for end in (good, bad):
        trajectories = Trajectories(before, end, velocity, leaves_of(VARIANCES))
        state = state_of(criterion, direction)
        measured, square, _ = criterion.measure(state, trajectories)
        states.append(criterion.update(state, measured, trajectories, target))
    assert not np.any(np.isfinite(square[1:3])) and np.all(np.isfinite(square[3:]))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_adam_steps_are_gradients_in_units_of_their_recent_size():
    gradients = np.random.default_rng(1).normal(2.0, 1.0, 60)
    gradients[40] = 1e12  # counts as ten times the recent size, and is soon forgotten
    state, steps, square = adam.init(jnp.zeros(())), [], 0.0
    for i, g in enumerate(gradients):
        state, step = adam.update(state, jnp.asarray(g, jnp.float32))
        most = 10 * np.sqrt(square / (1 - 0.95**i)) if i else np.inf
        g = min(g, most)
        square = 0.95 * square + 0.05 * g**2
        steps.append(g / np.sqrt(square / (1 - 0.95 ** (i + 1))))
        assert abs(float(step) - steps[-1]) < 0.5 / adam.RESOLUTION + 1e-4
    assert min(np.abs(steps[-10:])) > 0.05
    wild, step = adam.update(adam.init(jnp.zeros(())), jnp.float32(1e38))
    assert step == 1 and np.isfinite(wild.square_average)
    still, step = adam.update(adam.init(jnp.zeros(())), jnp.zeros(()))
    assert step == 0 and adam.update(still, jnp.ones(()))[1] > 0


# Stuck chains; where they go is in test_stuck_chains.py


def test_windows_after_the_first_metrics_begin_at_one_length():
    """As long as chains come together; the first begins at a few leapfrogs, later ones where it was."""
    kernel, states = gaussian_chains(1.0)
    adaptation, own = ChEESAdaptation(metric=gm.Diagonal()), ChEESAdaptation()
    state = tree.replace(adaptation.init(kernel, states), log_trajectory_length=jnp.log(3.0))

    def rates(kernel, key):
        return jnp.full(NUM_CHAINS, jnp.exp(-kernel.step_size))

    def begun(num_metrics, is_first, adaptation=adaptation):
        seen = tree.replace(state, num_metrics=jnp.int32(num_metrics))
        start = gm.WindowStart(jnp.asarray(is_first), jax.random.key(0), rates)
        seen = adaptation.begin(seen, kernel, states, start)
        return [float(jnp.exp(x)) for x in (seen.log_trajectory_length, seen.step_size.log_step_size)]

    lengths = [begun(num_metrics, False)[0] for num_metrics in range(6)]
    early = chees.FIRST_LENGTH
    np.testing.assert_allclose(lengths, [3, early, early, early, 3, 3], rtol=1e-5)
    # The kernel's own metric, where none is learned, may have any units.
    np.testing.assert_allclose([begun(n, False, own)[0] for n in range(6)], 3, rtol=1e-5)
    length, step_size = begun(0, True)
    np.testing.assert_allclose(length, chees.FIRST_LEAPFROGS * step_size, rtol=1e-5)


@pytest.mark.parametrize("adapts", [True, False])
def test_units_of_the_criterion_are_variances_also_where_no_metric_is_learned(adapts):
    kernel, states = gaussian_chains(1.0)
    adaptation = ChEESAdaptation(metric=gm.Diagonal(), adapt_mass_matrix=adapts)
    kernel = adaptation.prepare(kernel, states)
    state, seen = adaptation.init(kernel, states), {}
    for name in ("moments", "spread"):
        if getattr(state, name) != ():
            once = gm.Diagonal().update(getattr(state, name), states.position)
            seen[name] = gm.Diagonal().update(once, 2 * states.position)
    ended = adaptation.end(tree.replace(state, **seen), kernel, states, True)
    learned = gm.Diagonal().final(next(iter(seen.values())), states.position)
    assert list(seen) == ["moments" if adapts else "spread"]
    jax.tree.map(np.testing.assert_array_equal, ended.variances, learned)
    metric = learned if adapts else kernel.inverse_mass_matrix
    jax.tree.map(np.testing.assert_array_equal, ended.inverse_mass_matrix, metric)


@jax.jit
def step_size_with_a_stuck_chain():
    """Tune the step size of four chains: three accept exp(-step size), one needs a tiny step size."""

    def step(_, carry):
        state, recent = carry
        rate = jnp.exp(-jnp.exp(state.log_step_size))
        rates = jnp.append(jnp.full(3, rate), rate**1e4)
        recent = stuck_chains.recent_rates(recent, rates)
        harmonic = chees._over_chains(rates, jnp.zeros(4), recent)[1]
        return dual_averaging.update(state, harmonic, 0.65), recent

    start = (dual_averaging.init(jnp.asarray(1.0)), stuck_chains.no_rates(jnp.zeros(4)))
    return dual_averaging.final_step_size(jax.lax.fori_loop(0, 400, step, start)[0])


def check_step_size_of_the_others():
    jax.clear_caches()
    found = step_size_with_a_stuck_chain()
    assert abs(found / -np.log(0.65) - 1) < 0.2, f"step size {found}"


def test_a_stuck_chain_does_not_drive_the_step_size_down():
    check_step_size_of_the_others()


def test_without_leaving_it_out_the_stuck_chain_would(monkeypatch):
    monkeypatch.setattr(stuck_chains, "STUCK_RATE", -1.0)
    with pytest.raises(AssertionError, match="step size"):
        check_step_size_of_the_others()


# Gaussians: the length that is tuned is the best, and what is drawn is right

NUM_CHAINS, SIZE = 64, 4
CONDITIONS = {"isotropic": 1.0, "ill-conditioned": 100.0}


def covariance(condition):
    rotation = np.linalg.qr(np.random.default_rng(3).normal(size=(SIZE, SIZE)))[0]
    return (rotation * np.geomspace(1, condition, SIZE)) @ rotation.T


NO_MESH = read_layout(
    None, gm.LogDensity(normal), jnp.zeros((NUM_CHAINS, SIZE)), NUM_CHAINS, has_chains=True
)


def gaussian_chains(condition):
    """Chains that start from exact draws, and a kernel that knows the variances."""
    cov = covariance(condition)
    target = gm.LogDensity(gaussian, jnp.asarray(np.linalg.inv(cov), jnp.float32))
    draws = np.random.default_rng(seed(4)).multivariate_normal(np.zeros(SIZE), cov, NUM_CHAINS)
    kernel = JitteredHMC(target, 0.2, 1.0, jnp.asarray(np.diag(cov), jnp.float32))
    return kernel, jax.vmap(kernel.init)(jnp.asarray(draws, jnp.float32))


@jax.jit
def tune(adaptation, kernel, states, key):
    """Eight hundred steps of one window, the metric known."""
    state = adaptation.init(kernel, states)
    known = tree.replace(state, variances=kernel.inverse_mass_matrix, num_metrics=jnp.int32(1))
    one = partial(tuning_step, NO_MESH, adaptation, kernel, key=key)
    (_, state), _ = jax.lax.scan(one, (states, known), jnp.arange(800))
    return adaptation.final(kernel, state)


def best_length(condition, cls, of_means=True):
    """Maximise what the exact flow gains by whitened eigenvectors, over its time^cost.

    Along each 4 λ² sin²(t / √λ) for the squares, and with SNAPER 2 λ² (1 - cos(t / √λ)) for λ^½ q·z.
    """
    cov = covariance(condition)
    sd = np.sqrt(np.diag(cov))
    eigenvalues = np.linalg.eigvalsh(cov / np.outer(sd, sd))
    eigenvalues = eigenvalues[-1:] if cls is SNAPERAdaptation else eigenvalues
    lengths, h = np.linspace(0.2, 6, 1000), (np.arange(1000) + 0.5) / 1000
    time = (1 + JITTER * (2 * h[:, None, None] - 1)) * lengths[:, None]
    squares = 4 * np.sin(time / np.sqrt(eigenvalues)) ** 2
    of_means = of_means and cls is SNAPERAdaptation
    means = of_means * 2 * (1 - np.cos(time / np.sqrt(eigenvalues)))
    change = np.sum(eigenvalues**2 * (squares + means), axis=2)
    return lengths[np.argmax(np.mean(change / time[:, :, 0] ** cls().length_cost, axis=0))]


@cache
def tuned_kernel(name, cls, cost=1.0):
    """The kernel whose leapfrogs are short of its length, so that rounding them up matters little."""
    adaptation = cls(target_acceptance_rate=0.9, length_cost=cost * cls().length_cost)
    return tune(adaptation, *gaussian_chains(CONDITIONS[name]), jax.random.key(seed(0)))


@pytest.mark.parametrize("jitter", [1.0, 0.5, 0.0])
def test_the_longest_trajectory_is_one_leapfrog_to_the_most(jitter):
    kernel, states = gaussian_chains(1.0)
    kernel = JitteredHMC(kernel.target, 0.25, 1.0, max_leapfrogs=40, jitter=jitter)
    adaptation = ChEESAdaptation()
    state = tree.replace(adaptation.init(kernel, states), num_metrics=jnp.int32(1))
    for length, most in ((1e-9, 1), (1e9, 40)):
        at = tree.replace(state, log_trajectory_length=jnp.log(length))
        longest = (1 + jitter) * float(adaptation.tuned(kernel, at).trajectory_length)
        np.testing.assert_allclose(longest, most * 0.25, rtol=1e-5)


def check_length(name, cls, cost=1.0):
    """With 30 seeds: within 0.066, and with another cost off by 0.14 or more."""
    kernel, best = tuned_kernel(name, cls, cost), best_length(CONDITIONS[name], cls)
    length = kernel.trajectory_length + kernel.step_size / 2  # leapfrogs are rounded up
    within(abs(length / best - 1), 0.1, f"is how far it is from the best length, {best:.4g}")
    assert 0.2 < kernel.step_size < 1


@pytest.mark.statistical
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_tuned_length_is_near_the_best(name, cls):
    check_length(name, cls)


@pytest.mark.statistical
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("name", CONDITIONS)
def test_a_length_that_is_tuned_for_another_cost_is_rejected(name, cls):
    with pytest.raises(AssertionError, match="from the best length"):
        check_length(name, cls, cost=2.5)


@pytest.mark.statistical
def test_snapers_length_is_beyond_the_best_of_squares_alone():
    kernel = tuned_kernel("ill-conditioned", SNAPERAdaptation)
    alone = best_length(CONDITIONS["ill-conditioned"], SNAPERAdaptation, of_means=False)
    length = kernel.trajectory_length + kernel.step_size / 2
    within(1.1 * alone / length, 1, "of the best length of squares alone")


def test_best_lengths_are_told_apart():
    lengths = {best_length(c, cls) for c in CONDITIONS.values() for cls in BOTH}
    assert max(lengths) > 1.5 * min(lengths)


# The same lengths on every mesh, and one all-reduce for all of the adaptation


def chains_on(name):
    target, start = hierarchy(name), hierarchy_starts()
    layout = read_layout(mesh_of(name), target, start, CHAINS, has_chains=True)
    kernel = JitteredHMC(target, 0.2, 0.8)
    return layout, kernel, init_chains(kernel, start, layout=layout)


def tuning_step(layout, adaptation, kernel, carry, i, key=None):
    states, state = carry
    tuned = adaptation.tuned(kernel, state)
    drawn, chains_key = draw_kernel(tuned, jax.random.key(0) if key is None else key, i)
    after, info, end = step_chains(drawn, chains_key, states, layout, "transition")
    state = adaptation.update(state, drawn, Transition(states, after, info, end))
    seen = (tuned.trajectory_length, tuned.step_size, info.num_integration_steps, info.is_accepted)
    return (after, state), seen


def ten_steps(layout, adaptation, kernel, carry):
    (_, state), seen = jax.lax.scan(
        partial(tuning_step, layout, adaptation, kernel), carry, jnp.arange(10)
    )
    return seen, state.criterion


def prepared_on(name, adaptation):
    layout, kernel, states = chains_on(name)
    kernel = adaptation.prepare(kernel, states)

    @jax.jit
    def begin(adaptation, kernel, states):
        state = adaptation.init(kernel, states)
        return layout.pin(state, tree.roles(state, layout.treedef))

    return layout, kernel, (states, begin(adaptation, kernel, states))


@cache
def tuned_on(name, cls) -> tuple[Any, Any]:
    """What ten steps saw in float64, and the program."""
    with jax.enable_x64(True):
        layout, kernel, carry = prepared_on(name, cls())
        program = jax.jit(partial(ten_steps, layout)).lower(cls(), kernel, carry).compile()
        return jax.tree.map(np.asarray, program(cls(), kernel, carry)), program


@pytest.mark.parametrize(
    ("name", "cls"), [("8", ChEESAdaptation), ("2x4", ChEESAdaptation), ("2x4", SNAPERAdaptation)]
)
def test_lengths_are_the_same_on_every_mesh(name, cls):
    expected, criterion = tuned_on("1", cls)[0]
    lengths, step_sizes, leapfrogs, is_accepted = expected
    assert len(set(lengths)) > 5 and len(set(step_sizes)) > 5 and np.ptp(leapfrogs) > 3
    assert np.mean(is_accepted) > 0.5 and not np.all(is_accepted)
    got, got_criterion = tuned_on(name, cls)[0]
    jax.tree.map(np.testing.assert_array_equal, got[2:], expected[2:])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12), got, expected)
    for a, b in zip(jax.tree.leaves(got_criterion), jax.tree.leaves(criterion), strict=True):
        real = tuple(slice(n) for n in b.shape)  # the pad of local latents is longer on a larger mesh
        np.testing.assert_allclose(a[real], b, rtol=1e-9, atol=1e-9)


ON_A_DEVICE = 2 + 3 * 2  # numbers of a position: two shared ones, and three of twelve rows of effects


def all_reduces_outside_leapfrogs(program):
    """Mesh axes and bytes of each; there are no other collectives."""
    found = communication(program)
    assert [kind for kind in OTHER_KINDS if found.count(kind)] == []
    assert found.runs("all-reduce", within="leapfrog") == 1
    outside = [c for c in found.collectives if c.loops[-1].name != "leapfrog"]
    assert len(outside) == found.count("all-reduce") - 1
    return {c.axes: c.num_bytes for c in outside}, len(outside)


@pytest.mark.parametrize(
    ("cls", "products", "trees"), [(ChEESAdaptation, 2, 1), (SNAPERAdaptation, 4, 2)]
)
def test_adaptation_rides_in_the_energys_all_reduce_and_adds_one_over_chains(cls, products, trees):
    """Products of local latents go with the energies over data; all sums over chains go at once."""
    energies = 4  # numbers of a chain
    found, count = all_reduces_outside_leapfrogs(tuned_on("2x4", cls)[1])
    assert set(found) == {("data",), ("chains",)} and count == 2
    assert found["data",] <= 8 * CHAINS // 2 * (energies + products)
    assert found["chains",] <= 8 * (5 + trees * ON_A_DEVICE)


def test_adaptation_adds_no_all_reduce_on_a_mesh_of_data_alone():
    found, count = all_reduces_outside_leapfrogs(tuned_on("8", ChEESAdaptation)[1])
    assert set(found) == {("data",)} and count == 1
