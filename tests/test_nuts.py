"""NUTS: its trees are those of a recursion, and `sample` tunes it."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import PRECISION, VARIANCES, moments_in_mcse, quartic, scaled_normal, split_leaves
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import NUTS
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.kernels import nuts, u_turns
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.metrics.dense_metric import DenseMetric
from gspmd_mcmc.sampling import defaults
from gspmd_mcmc.tree import pytree

init, step = jax.jit(NUTS.init), jax.jit(NUTS.step)


DIAGONAL = np.diag(VARIANCES)
DENSE = np.array([[1.5, -0.4, 0.1], [-0.4, 0.5, 0.05], [0.1, 0.05, 0.1]])


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


# What a step reports


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


# The driver takes NUTS as it is


SCALES = {"a": np.array([1.0, 100.0], np.float32), "b": np.float32(0.01)}


@pytest.mark.statistical
def test_sample_tunes_step_size_and_metric():
    """Scales four orders of magnitude apart, from a start and a step size that fit none."""
    target = gm.LogDensity(scaled_normal, SCALES)
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
    within(max(moments_in_mcse(draws.position, SCALES)), 4, "standard errors off")
    rates = np.asarray(draws.acceptance_rate)
    within(np.max(np.abs(rates - 0.785)), 0.185, "of a rate between 0.6 and 0.97")
    variances = jax.tree.map(lambda v, s: v / s**2, draws.kernel.inverse_mass_matrix, SCALES)
    worst = max(np.max(np.abs(np.log(v))) for v in jax.tree.leaves(variances))
    within(worst, np.log(2.5), "log of a ratio of variances")
    # With a metric that fits few leapfrogs are enough; a metric of ones would take thousands.
    assert np.mean(draws.stats["num_integration_steps"]) < 20
    within(max(np.max(x) for x in jax.tree.leaves(rhat(draws.position))) - 1, 0.02, "R-hat beyond 1")


@pytree
@dataclass(frozen=True, eq=False, init=False)
class WithItsOwnWarmUp(gm.HMC):
    def default_warmup(self):
        return gm.WindowAdaptation(target_acceptance_rate=0.7)


def test_a_kernel_of_ones_own_says_how_it_is_warmed_up():
    target = gm.LogDensity(scaled_normal, SCALES)
    kernel = WithItsOwnWarmUp(target, 0.1, 1)  # pyright: ignore[reportCallIssue]
    warmup = defaults.warmup_for(kernel)
    assert isinstance(warmup, gm.WindowAdaptation) and warmup.target_acceptance_rate == 0.7
    assert gm.NUTS(target, 0.1).default_warmup() is None
