"""NUTS: its trees are those of a recursion, its draws the target's, on every mesh the same."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.diagnostics.mcse import mcse_mean
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.kernels import metrics, nuts, u_turns
from gspmd_mcmc.kernels.metrics_dense import DenseMetric
from gspmd_mcmc.kernels.nuts import NUTS
from gspmd_mcmc.sampling.chunks import advance
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.tree import pytree
from gspmd_mcmc.views.communication import communication

init, step = jax.jit(NUTS.init), jax.jit(NUTS.step)

# A density of two leaves with correlations, a quartic and scales that differ

PRECISION = np.array([[1.0, 0.7, 0.0], [0.7, 2.0, -0.5], [0.0, -0.5, 30.0]])
VARIANCES = np.array([1.5, 0.5, 0.1])
DIAGONAL = np.diag(VARIANCES)
DENSE = np.array([[1.5, -0.4, 0.1], [-0.4, 0.5, 0.05], [0.1, 0.05, 0.1]])


def quartic(x, precision):
    x = jnp.append(x["a"], x["b"])
    return -0.5 * x * (precision @ x), -0.02 * x**4


START = np.array([1, -1, 0.1], np.float32)


def quartic_kernel(step_size=0.2, max_tree_depth=7, cls=NUTS):
    target = gm.LogDensity(quartic, jnp.asarray(PRECISION))
    metric = {"a": jnp.asarray(VARIANCES[:2]), "b": jnp.asarray(VARIANCES[2])}
    return cls(target, step_size, metric, max_tree_depth)


# The reference: whole subtrees, in float64 NumPy, and what is wrong with them by recursion


@dataclass(frozen=True)
class Leaf:
    x: np.ndarray
    p: np.ndarray
    v: np.ndarray
    energy: float


def numpy_leaf(x, p, metric):
    log_density = -0.5 * x @ PRECISION @ x - 0.02 * np.sum(x**4)
    return Leaf(x, p, metric @ p, 0.5 * p @ metric @ p - log_density)


def numpy_leapfrog(leaf, step_size, metric):
    def grad(x):
        return -PRECISION @ x - 0.08 * x**3

    p = leaf.p + 0.5 * step_size * grad(leaf.x)
    x = leaf.x + step_size * metric @ p
    return numpy_leaf(x, p + 0.5 * step_size * grad(x), metric)


def turns(leaves):
    rho = sum(leaf.p for leaf in leaves)
    return not all(rho @ leaf.v > 0 for leaf in (leaves[0], leaves[-1]))


def invalid_from(leaves):
    """Return the index of the leaf at which a balanced tree is known to be invalid, or infinity."""
    if len(leaves) == 1:
        return np.inf
    half = len(leaves) // 2
    left, right = leaves[:half], leaves[half:]
    found = [invalid_from(left), half + invalid_from(right)]
    found += [len(leaves) - 1] * (turns(leaves) or turns([left[-1], *right]))
    found += [half] * turns([*left, right[0]])
    return min(found)


def numpy_trajectory(start, step_size, metric, max_tree_depth, is_forward, log_uniform, leaf_uniform):
    """Return what the kernel should: position, leapfrogs, depth, acceptance rate, is divergent."""
    order = [start]  # the end that moved last is the last
    sample, log_weight, rates, count = start, 0.0, [], 0
    for depth in range(max_tree_depth):
        signed = step_size if is_forward[depth] else -step_size
        turns_back = depth > 0 and is_forward[depth] != is_forward[depth - 1]
        order = order[::-1] if turns_back else order
        new = [order[-1]]
        for _ in range(2**depth):
            new.append(numpy_leapfrog(new[-1], signed, metric))
        new = new[1:]
        errors = np.array([leaf.energy - start.energy for leaf in new])
        diverged = np.flatnonzero(~(errors <= 1000))
        stop = min([invalid_from(new), *diverged])
        used = int(min(stop + 1, len(new)))
        rates += list(np.exp(np.minimum(0, -errors[:used])))
        drawn, new_weight = new[0], -np.inf
        for leaf, error in zip(new[:used], errors[:used], strict=True):
            new_weight = np.logaddexp(new_weight, -error)
            if np.log(leaf_uniform[count]) < -error - new_weight:
                drawn = leaf
            count += 1
        if stop < np.inf:
            return sample.x, count, depth, np.mean(rates), stop in diverged
        if log_uniform[depth] < new_weight - log_weight:
            sample = drawn
        log_weight = np.logaddexp(log_weight, new_weight)
        over = turns(order + new) or turns([*order, new[0]]) or turns([order[-1], *new])
        order = order + new
        if over:
            return sample.x, count, depth + 1, np.mean(rates), False
    return sample.x, count, max_tree_depth, np.mean(rates), False


NUM_CASES = 150


@partial(jax.jit, static_argnames="max_tree_depth")
def cases(kernel, keys, x, p, step_sizes, max_tree_depth):
    """Trajectories from given starts, and the random numbers that they use."""

    def one(key, x, p, step_size):
        own = kernel.with_step_size(step_size)
        chance = own.chance(key)
        uniforms = jax.vmap(partial(nuts._uniform, chance.leaf_key))(jnp.arange(2**max_tree_depth))
        return own.trajectory(chance, own.init(x), p), chance, uniforms

    return jax.vmap(one)(keys, x, p, step_sizes)


def split_leaves(x):
    return {"a": jnp.asarray(x[..., :2]), "b": jnp.asarray(x[..., 2])}


def check_trees(kernel_of, metric, max_tree_depth=6):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_CASES, 3)) * [1, 0.8, 0.2]
    x[::10] *= 15  # where the quartic makes steps diverge
    p = rng.normal(size=(NUM_CASES, 3)) / np.sqrt(VARIANCES)
    step_sizes = np.exp(rng.uniform(np.log(0.02), np.log(1.5), NUM_CASES))
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), NUM_CASES)
        kernel = kernel_of(max_tree_depth=max_tree_depth)
        starts, momenta = split_leaves(x), split_leaves(p)
        out = cases(kernel, keys, starts, momenta, jnp.asarray(step_sizes), max_tree_depth)
    end, chance, uniforms = jax.tree.map(np.asarray, (out[0], out[1]._replace(leaf_key=0), out[2]))
    got = np.column_stack([end.sample.position["a"], end.sample.position["b"]])
    lengths = end.progress.num_integration_steps
    for i in range(NUM_CASES):
        expected = numpy_trajectory(
            *(numpy_leaf(x[i], p[i], metric), step_sizes[i], metric, max_tree_depth),
            *(chance.is_forward[i], chance.log_uniform[i], uniforms[i]),
        )
        case = f"case {i}"
        assert (lengths[i], end.depth[i]) == expected[1:3], case
        np.testing.assert_allclose(got[i], expected[0], rtol=1e-8, atol=1e-10, err_msg=case)
        rate = end.progress.sum_acceptance_rate[i] / lengths[i]
        np.testing.assert_allclose(rate, expected[3], rtol=1e-8, err_msg=case)
        assert end.progress.is_divergent[i] == expected[4], case
    return end


def test_trees_are_those_of_the_recursion():
    end = check_trees(quartic_kernel, DIAGONAL)
    lengths, progress = end.progress.num_integration_steps, end.progress
    is_whole = lengths == 2**end.depth - 1
    assert 0.1 < np.mean(is_whole) < 0.9, "both invalid and valid subtrees should be seen"
    assert set(end.depth) >= {1, 2, 3, 4, 5, 6} and np.mean(end.is_accepted) > 0.8
    assert np.any(progress.is_divergent)
    is_saturated = ~progress.is_turning & ~progress.is_divergent
    assert np.any(is_saturated) and set(lengths[is_saturated]) == {63}


def dense_kernel(max_tree_depth):
    kernel = quartic_kernel(max_tree_depth=max_tree_depth)
    metric = DenseMetric.of_covariances(kernel.inverse_mass_matrix, {("a", "b"): DENSE})
    return kernel.with_inverse_mass_matrix(metric)


def test_trees_are_those_of_the_recursion_with_a_dense_metric():
    end = check_trees(dense_kernel, DENSE)
    assert set(end.depth) >= {1, 2, 3, 4, 5, 6} and np.mean(end.is_accepted) > 0.8


def test_trees_of_another_metric_are_rejected():
    with pytest.raises(AssertionError, match="case"):
        check_trees(dense_kernel, DIAGONAL)


# U-turns of balanced subtrees, on momenta of no dynamics, where every check matters

NUM_LEAVES, NUM_PATHS = 16, 400


def turns_of_paths(paths):
    """Take momenta [paths, 1 + leaves, 3] for those of a tree of one leaf and of a subtree."""

    def velocity(p):
        return metrics.velocity(split_leaves(VARIANCES), p)

    def one(momenta):
        first = jax.tree.map(lambda p: p[0], momenta)
        leaves = jax.tree.map(lambda p: p[1:], momenta)

        def add(path, p):
            path = u_turns.add(path, p, velocity(p))
            within = u_turns.turns_at_newest_marks(path, p) | u_turns.turns_at_end_of_block(path, p)
            return path, (within, u_turns.whole_turns(path, first, first, first, velocity))

        return jax.lax.scan(add, u_turns.begin(velocity(first), jnp.zeros(()), 5), leaves)[1]

    return jax.vmap(one)(paths)


def check_turns():
    rng = np.random.default_rng(1)
    paths = (rng.normal(size=(NUM_PATHS, 1 + NUM_LEAVES, 3)) + 0.9) / np.sqrt(VARIANCES)
    with jax.enable_x64(True):
        program = jax.jit(lambda *args: turns_of_paths(*args))  # traced anew: checks may be broken
        turns_found = program(split_leaves(paths))
    within, whole = jax.tree.map(np.asarray, turns_found)
    for i, path in enumerate(paths):
        before, *leaves = [Leaf(p, p, VARIANCES * p, 0.0) for p in path]
        first = np.append(np.flatnonzero(within[i]), np.inf)[0]
        assert first == invalid_from(leaves), f"path {i}"
        turns_first = turns([before, leaves[0]])
        assert whole[i, 0] == turns_first, f"path {i}"
        assert whole[i, -1] == (turns_first or turns([before, *leaves])), f"path {i}"
    return np.mean(np.isinf([np.append(np.flatnonzero(w), np.inf)[0] for w in within]))


def test_u_turns_are_those_of_the_recursion():
    assert 0.1 < check_turns() < 0.9, "both valid and invalid subtrees should be seen"


def marks_to_check(leaf, places, right=u_turns.marks_to_check):
    return right(leaf, places)


def only_whole_subtrees(leaf, places):
    ends, ends_as_half = marks_to_check(leaf, places)
    return ends & (leaf % 2 == 1), ends_as_half


def no_spans_from_before(leaf, places):
    ends, ends_as_half = marks_to_check(leaf, places)
    return ends, jnp.zeros_like(ends_as_half)


@pytest.mark.parametrize("broken", [only_whole_subtrees, no_spans_from_before])
def test_u_turns_that_leave_out_checks_are_rejected(monkeypatch, broken):
    monkeypatch.setattr(u_turns, "marks_to_check", broken)
    with pytest.raises(AssertionError, match="path"):
        check_turns()


# Chains that start from exact draws stay exact

NUM_CHAINS, NUM_STEPS, FALSE_ALARM = 8192, 3, 1e-4
CHOLESKY = np.linalg.cholesky(np.array([[1.0, 0.8, -0.5], [0.8, 2.0, 0.1], [-0.5, 0.1, 0.7]]))


def gaussian(x, precision):
    x = jnp.append(x["a"], x["b"])
    return -0.5 * x * (precision @ x)


def correlated_gaussian():
    precision = np.linalg.inv(CHOLESKY @ CHOLESKY.T).astype(np.float32)
    target = gm.LogDensity(gaussian, precision)
    metric = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(0.7)}

    def draw(u):
        return split_leaves((u @ CHOLESKY.T).astype(np.float32))

    def normals(x):
        return np.column_stack([x["a"], x["b"]]) @ np.linalg.inv(CHOLESKY).T

    return NUTS(target, 0.75, metric, 5), draw, normals


def funnel_density(x):
    return -0.5 * x["v"] ** 2, -0.5 * x["x"] ** 2 * jnp.exp(-x["v"]) - 0.5 * x["v"]


def funnel():
    """Neal's funnel, v ~ N(0, 1) and x | v ~ N(0, exp v)."""

    def draw(u):
        x = {"v": u[:, 0], "x": np.exp(u[:, :1] / 2) * u[:, 1:]}
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), x)

    def normals(x):
        return np.column_stack([x["v"], x["x"] * np.exp(-x["v"] / 2)[:, None]])

    metric = {"v": jnp.asarray(1.0), "x": jnp.ones(2)}
    return NUTS(gm.LogDensity(funnel_density), 0.6, metric, 5), draw, normals


PROBLEMS = [correlated_gaussian, funnel]


@jax.jit
def few_steps(kernel, positions, rng_key):
    def one(states, key):
        keys = jax.random.split(key, NUM_CHAINS)
        states, info = jax.vmap(type(kernel).step, (None, 0, 0))(kernel, keys, states)
        return states, (info.is_accepted, info.num_integration_steps)

    states = jax.vmap(type(kernel).init, (None, 0))(kernel, positions)
    states, seen = jax.lax.scan(one, states, jax.random.split(rng_key, NUM_STEPS))
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
    assert np.mean(is_accepted) > 0.5 and np.ptp(lengths) > 3, "too little moves for anything to show"
    values = functionals(normals(positions).astype(np.float64))
    standard_error = values.std(axis=0, ddof=1) / np.sqrt(NUM_CHAINS)
    worst = np.max(np.abs(values.mean(axis=0) / standard_error))
    threshold = -NormalDist().inv_cdf(FALSE_ALARM / 2 / values.shape[1])
    within(worst, threshold, "standard errors off")


@pytest.mark.statistical
@pytest.mark.parametrize("problem", PROBLEMS)
def test_nuts_leaves_it_invariant(problem):
    check_leaves_invariant(*problem())


@pytree
class WeighsLeavesAlike(NUTS):
    def _leapfrog(self, *args):
        near, velocity, leaf = super()._leapfrog(*args)
        return near, velocity, tree.replace(leaf, log_weight=jnp.zeros_like(leaf.log_weight))


@pytree
class ForgetsTurnsWithin(NUTS):
    def _add_leaf(self, *args):
        return forget_turns(args[-1], super()._add_leaf(*args))

    def _add_block(self, *args):
        return forget_turns(args[-1], super()._add_block(*args))


def forget_turns(before, subtree):
    is_turning = before.progress.is_turning
    return tree.replace(subtree, progress=tree.replace(subtree.progress, is_turning=is_turning))


@pytree
class DrawsMomentaOfAnotherMass(NUTS):
    """Momenta of variance M, kinetic energy and velocity of a mass two thirds more."""

    def trajectory(self, chance, state, momentum):
        heavier = jax.tree.map(lambda m: 0.6 * m, self.inverse_mass_matrix)
        kernel = NUTS(self.target, self.step_size, heavier, self.max_tree_depth)
        return kernel.trajectory(chance, state, momentum)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (WeighsLeavesAlike, funnel),
        (ForgetsTurnsWithin, correlated_gaussian),
        (DrawsMomentaOfAnotherMass, correlated_gaussian),
    ],
)
def test_a_broken_kernel_is_rejected(broken, problem):
    kernel, draw, normals = problem()
    kernel = broken(kernel.target, kernel.step_size, kernel.inverse_mass_matrix, kernel.max_tree_depth)
    with pytest.raises(AssertionError, match="standard errors"):
        check_leaves_invariant(kernel, draw, normals)


# What a step reports


def steep(x):
    return -(x**4)


def test_divergence_is_reported_and_the_draw_stays_finite():
    kernel = NUTS(gm.LogDensity(steep), 10.0)
    state = init(kernel, jnp.full(3, -2.0))
    state, info = step(kernel, jax.random.key(0), state)
    assert info.is_divergent and not info.is_turning and info.num_integration_steps == 1
    assert info.acceptance_rate == 0 and not info.is_accepted and info.energy_error == 0
    assert np.all(np.asarray(state.position) == -2.0)


def undefined_above_one(x):
    return jnp.where(x > 1, jnp.inf, -0.5 * x**2)


def test_an_infinite_log_density_is_a_divergence_and_is_never_entered():
    kernel = NUTS(gm.LogDensity(undefined_above_one), 0.5)
    state, seen = init(kernel, jnp.float32(0.5)), []
    for i in range(30):
        state, info = step(kernel, jax.random.key(i), state)
        seen.append(bool(info.is_divergent))
        assert state.position <= 1 and np.isfinite(state.log_density)
    assert any(seen) and not all(seen)


def test_a_trajectory_that_never_turns_stops_at_the_greatest_depth():
    kernel = quartic_kernel(step_size=1e-4)
    _, info = step(kernel, jax.random.key(0), init(kernel, split_leaves(START)))
    assert info.tree_depth == 7 and info.num_integration_steps == 127
    assert not info.is_turning and not info.is_divergent and info.acceptance_rate > 0.999


def test_energy_is_the_hamiltonian_where_the_step_ends():
    """Less the kinetic energy at the start it is minus the log density there plus the error."""
    kernel = quartic_kernel(step_size=0.3)
    state = init(kernel, split_leaves(START))
    momentum_key, trajectory_key = jax.random.split(jax.random.key(3))
    momentum = metrics.sample_momentum(momentum_key, kernel.inverse_mass_matrix, state.position)
    end = jax.jit(NUTS.trajectory)(kernel, kernel.chance(trajectory_key), state, momentum)
    new, info = step(kernel, jax.random.key(3), state)
    p = np.append(momentum["a"], momentum["b"])
    start_energy = 0.5 * p @ (VARIANCES * p) - float(state.log_density)
    np.testing.assert_allclose(info.energy, start_energy + float(info.energy_error), rtol=1e-5)
    np.testing.assert_allclose(end.sample.energy_error, info.energy_error, atol=1e-6)
    leaf = numpy_leaf(np.append(new.position["a"], new.position["b"]), p, DIAGONAL)
    np.testing.assert_allclose(new.log_density, 0.5 * p @ (VARIANCES * p) - leaf.energy, rtol=1e-5)


def constant_besides(x, precision, constant):
    return quartic(x, precision), constant


def test_a_float32_log_density_of_millions_makes_the_same_tree():
    """A summand of -2.2e7, whose float32 neighbours are 2 nats away, must not show in any weight."""
    plain = quartic_kernel(step_size=0.2)
    data = (jnp.asarray(PRECISION, jnp.float32), jnp.float32(-2.2e7))
    large = tree.replace(plain, target=gm.LogDensity(constant_besides, *data))
    position = split_leaves(START)
    state, other = init(plain, position), init(large, position)
    for i in range(5):
        state, info = step(plain, jax.random.key(i), state)
        other, other_info = step(large, jax.random.key(i), other)
        assert info.num_integration_steps == other_info.num_integration_steps
        np.testing.assert_allclose(other_info.energy_error, info.energy_error, atol=1e-5)
        np.testing.assert_allclose(other.position["a"], state.position["a"], rtol=1e-4, atol=1e-5)
    assert other.log_density < -2e7


# A kernel is an argument


def num_programs() -> int:
    return step._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


def test_another_step_size_or_metric_compiles_nothing_anew():
    kernel = quartic_kernel()
    state = init(kernel, split_leaves(START))
    lengths = {int(step(kernel, jax.random.key(0), state)[1].num_integration_steps)}
    before = num_programs()
    metric = jax.tree.map(lambda m: 2 * m, kernel.inverse_mass_matrix)
    for other in (kernel.with_step_size(0.02), kernel.with_inverse_mass_matrix(metric)):
        lengths.add(int(step(other, jax.random.key(0), state)[1].num_integration_steps))
    assert num_programs() == before and len(lengths) > 1
    _, info = step(tree.replace(kernel, max_tree_depth=1), jax.random.key(0), state)
    assert num_programs() == before + 1, "another depth is another program"
    assert info.num_integration_steps == 1 and 0 < info.acceptance_rate <= 1


def test_a_step_size_is_tried_with_one_leapfrog_of_the_same_metric():
    kernel = quartic_kernel()
    tried = kernel.one_leapfrog()
    _, info = tried.step(jax.random.key(0), init(kernel, split_leaves(START)))
    assert info.num_integration_steps == 1 and 0 < info.acceptance_rate <= 1
    assert tried.step_size is kernel.step_size
    assert tried.inverse_mass_matrix is kernel.inverse_mass_matrix


def test_a_kernel_of_one_leapfrog_has_the_gradient_once():
    traced = []

    def log_density(x):
        traced.append(1)
        return -0.25 * x["x"] ** 4

    kernel = gm.HMC(gm.LogDensity(log_density), 0.3, 1, {"x": jnp.array([1.0, 4.0])})
    state = kernel.init({"x": jnp.array([0.5, -1.0])})

    def stepped(kernel):
        traced.clear()
        found = jax.jit(lambda kernel, *args: kernel.step(*args))(kernel, jax.random.key(0), state)
        return found, len(traced)

    (one, info), num_traced = stepped(kernel.one_leapfrog())
    (same, of_hmc), num_of_hmc = stepped(kernel)
    assert (num_traced, num_of_hmc) == (1, 2)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), vars(one), vars(same))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), vars(info), vars(of_hmc))


def sum_of_rows(x, rows):
    return -0.5 * x**2, -jnp.mean(rows) * x


def test_a_program_that_closes_over_a_kernel_with_much_data_is_refused():
    kernel = NUTS(gm.LogDensity(sum_of_rows, jnp.ones(300_000)), 0.1)
    state = init(kernel, jnp.float32(0))
    with pytest.raises(ValueError, match=r"1\.2 MB .* the kernel an argument"):
        jax.jit(kernel.step)(jax.random.key(0), state)
    with pytest.raises(ValueError, match=r"1\.2 MB .* the kernel an argument"):
        jax.jit(kernel.init)(jnp.float32(0))
    step(kernel, jax.random.key(0), state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step_size": 0.0}, ValueError, "step_size: expected a positive number, got 0.0"),
        ({"max_tree_depth": 0}, ValueError, "max_tree_depth: expected an integer from 1 to 20, got 0"),
        ({"max_tree_depth": 2.5}, ValueError, "max_tree_depth: expected an integer"),
        ({"max_tree_depth": True}, ValueError, "max_tree_depth: expected an integer"),
        ({"inverse_mass_matrix": jnp.zeros(3)}, ValueError, "expected positive variances"),
        ({"target": quartic}, TypeError, "wrap a function as gspmd_mcmc.LogDensity"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    given = {"target": gm.LogDensity(steep), "step_size": 0.1} | arguments
    with pytest.raises(error, match=message):
        NUTS(**given)


def test_a_metric_of_other_shapes_and_a_bad_start_are_refused():
    kernel = NUTS(gm.LogDensity(steep), 0.1, jnp.ones(2))
    with pytest.raises(ValueError, match="inverse_mass_matrix: expected a tree of shapes"):
        kernel.init(jnp.zeros(3))
    with pytest.raises(gm.NonFiniteStart, match="position .the whole. has 1 values"):
        kernel.init(jnp.asarray([jnp.nan, 0]))


# Local latents whose rows no mesh divides: the same trees on every mesh, one all-reduce a leapfrog

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


@cache
def observations():
    return np.random.default_rng(5).normal(1.0, 1.5, NUM_ROWS)


def hierarchy(name):
    data = gm.place({"y": observations()}, mesh_of(name), P("data"))
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, data, local="effect"))


def starts():
    rng = np.random.default_rng(6)
    shapes = {"mean": (CHAINS,), "log_sd": (CHAINS,), "effect": (CHAINS, NUM_ROWS, 2)}
    return {n: jnp.asarray(0.5 * rng.normal(size=shape)) for n, shape in shapes.items()}


def chains_on(name):
    target = hierarchy(name)
    layout = read_layout(mesh_of(name), target, starts(), CHAINS, has_chains=True)
    kernel = NUTS(target, 0.13, max_tree_depth=6)
    return layout, kernel, init_chains(kernel, starts(), layout=layout)


def ten_steps(layout, kernel, states):
    def one(states, i):
        states, info = advance(kernel, jax.random.key(0), i, states, layout)
        trees = (info.num_integration_steps, info.tree_depth, info.is_accepted)
        return states, (trees, states.position)

    return jax.lax.scan(one, states, jnp.arange(10))[1]


@cache
def run_on(name) -> tuple[Any, Any, Any]:
    """Trees [steps, chains] and padded positions [steps, chains, ...] in float64, and the program."""
    with jax.enable_x64(True):
        layout, kernel, states = chains_on(name)
        program = jax.jit(partial(ten_steps, layout)).lower(kernel, states).compile()
        return *jax.tree.map(np.asarray, program(kernel, states)), program


@pytest.mark.parametrize("name", ["8", "2x4"])
def test_trees_and_positions_are_the_same_on_every_mesh(name):
    expected_trees, expected, _ = run_on("1")
    lengths, _, is_accepted = expected_trees
    assert np.ptp(lengths) > 5 and len(set(lengths.ravel())) > 2 and np.mean(is_accepted) > 0.8
    trees, got, _ = run_on(name)
    jax.tree.map(np.testing.assert_array_equal, trees, expected_trees)
    got = got | {"effect": got["effect"][:, :, :NUM_ROWS]}
    for leaf in expected:
        np.testing.assert_allclose(got[leaf], expected[leaf], rtol=1e-9, atol=1e-9)


def test_the_pad_of_local_latents_does_not_move():
    effect = run_on("8")[1]["effect"]
    pad, real = effect[:, :, NUM_ROWS:], effect[:, :, :NUM_ROWS]
    assert pad.shape[2] == 5 and np.ptp(pad, axis=0).max() == 0 and np.ptp(real, axis=0).min() > 0


OTHER_KINDS = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MARKS = 5  # of depth 6
GRADIENT, ENERGY, PRODUCTS = 2, 4, 4 * 2 + 1  # numbers; a leaf's p·v, and products of two marks
PRODUCTS_OF_BLOCK, PRODUCTS_OF_DOUBLING = 4 * MARKS, 8  # once in eight leapfrogs; once a doubling


def all_reduces_by_loop(name):
    """For each loop, the innermost one, mesh axes and bytes; there are no other collectives."""
    found = communication(run_on(name)[2])
    assert [kind for kind in OTHER_KINDS if found.count(kind)] == []
    inside = {}
    for c in found.collectives:
        if len(c.loops) > 1:  # ten steps are a loop too
            inside.setdefault(c.loops[-1].name, []).append((c.axes, c.num_bytes))
    assert len(inside["leapfrog"]) == found.runs("all-reduce", within="leapfrog")
    return inside


def test_a_leapfrog_costs_one_all_reduce_u_turns_included():
    inside = all_reduces_by_loop("8")
    limits = {
        "leapfrog": GRADIENT + ENERGY + PRODUCTS,
        "block": PRODUCTS_OF_BLOCK,
        "doubling": PRODUCTS_OF_DOUBLING,
    }
    assert set(inside) == set(limits)
    for loop, numbers in limits.items():
        ((axes, num_bytes),) = inside[loop]
        assert axes == ("data",) and num_bytes <= 8 * CHAINS * numbers, loop


def test_chains_over_the_mesh_ask_once_a_leapfrog_whether_any_goes_on():
    for loop, found in all_reduces_by_loop("2x4").items():
        assert len(found) == 2 and ("chains",) in dict(found) and ("data",) in dict(found), loop
        assert dict(found)["chains",] == 1, loop


# Vmapped chains


def test_a_chain_does_not_depend_on_the_chains_beside_it():
    kernel = quartic_kernel()
    positions = split_leaves(np.random.default_rng(7).normal(size=(8, 3)).astype(np.float32) * 0.3)
    keys = jax.random.split(jax.random.key(0), 8)
    states = jax.jit(jax.vmap(NUTS.init, (None, 0)))(kernel, positions)
    together, info = jax.jit(jax.vmap(NUTS.step, (None, 0, 0)))(kernel, keys, states)
    assert np.ptp(info.num_integration_steps) > 5
    for i in range(8):
        alone, info_alone = step(kernel, keys[i], jax.tree.map(lambda x, i=i: x[i], states))
        assert info_alone.num_integration_steps == info.num_integration_steps[i]
        np.testing.assert_allclose(alone.position["a"], together.position["a"][i], rtol=1e-4, atol=1e-5)


# The driver takes NUTS as it is


SCALES = {"a": np.array([1.0, 100.0], np.float32), "b": np.float32(0.01)}


def scaled_normal(x):
    return jax.tree.map(lambda value, scale: -0.5 * (value / scale) ** 2, x, SCALES)


def errors_in_mcse(draws):
    """Of the means of x and of x² - σ², whose truth is 0, in their Monte Carlo standard errors."""
    position = jax.tree.map(np.asarray, draws.position)
    squares = jax.tree.map(lambda x, scale: x**2 - scale**2, position, SCALES)
    both = {"x": position, "squares": squares}
    means = jax.tree.map(lambda x: x.mean((0, 1)), both)
    return jax.tree.leaves(jax.tree.map(lambda m, e: m / e, means, mcse_mean(both)))


@pytest.mark.statistical
def test_sample_tunes_step_size_and_metric():
    """Scales four orders of magnitude apart, from a start and a step size that fit none."""
    target = gm.LogDensity(scaled_normal)
    draws = gm.sample(
        jax.random.key(seed(0)),
        target,
        {"a": jnp.ones(2), "b": jnp.zeros(())},
        kernel=gm.NUTS(target, 1.0),
        warmup=gm.WindowAdaptation(metric=gm.Diagonal()),
        num_chains=4,
        num_warmup=500,
        num_samples=500,
        progress=False,
    )
    within(max(np.max(np.abs(z)) for z in errors_in_mcse(draws)), 4, "standard errors off")
    rates = np.asarray(draws.acceptance_rate)
    within(np.max(np.abs(rates - 0.785)), 0.185, "of a rate between 0.6 and 0.97")
    variances = jax.tree.map(lambda v, s: v / s**2, draws.kernel.inverse_mass_matrix, SCALES)
    worst = max(np.max(np.abs(np.log(v))) for v in jax.tree.leaves(variances))
    within(worst, np.log(2.5), "log of a ratio of variances")
    # With a metric that fits few leapfrogs are enough; a metric of ones would take thousands.
    assert np.mean(draws.stats["num_integration_steps"]) < 20
    within(max(np.max(x) for x in jax.tree.leaves(rhat(draws.position))) - 1, 0.02, "R-hat beyond 1")


@pytest.mark.statistical
def test_a_draw_of_another_density_is_rejected_by_the_same_errors():
    rng = np.random.default_rng(seed(1))
    wide = {n: 1.2 * s * rng.normal(size=(4, 500, *np.shape(s))) for n, s in SCALES.items()}
    errors = errors_in_mcse(SimpleNamespace(position=wide))
    with pytest.raises(AssertionError, match="standard errors"):
        within(max(np.max(np.abs(z)) for z in errors), 4, "standard errors off")
