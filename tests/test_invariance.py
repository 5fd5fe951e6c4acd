"""Kernels leave their target invariant: chains started from exact draws stay exact.

Every problem maps its positions to numbers that are independent standard normals under the exact law.
Their moments and bounded functionals have known expectations; each is compared in units of its Monte
Carlo standard error over independent chains, with a Bonferroni threshold. Broken samplers are put to
the same check, and fail it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import ndtr, ndtri
from jax.sharding import PartitionSpec as P
from models import Exact, correlated_gaussian, counting_rows, funnel
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import LEAPFROG
from gspmd_mcmc.placement.layout import Layout, read_layout
from gspmd_mcmc.sampling.run_state import advance_chains as advance
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.tree import pytree

FALSE_ALARM = 1e-4


class Problem(NamedTuple):
    """A target whose exact law is known.

    ``draw(rng, n)`` makes exact positions of n chains; ``normals(positions)`` maps positions to
    independent standard normals, shape [n, dimensions].
    """

    kernel: Any
    draw: Callable
    normals: Callable
    num_chains: int = 16384
    num_steps: int = 6
    shares: tuple[float, float] = (0.4, 1.0)  # of steps that are accepted
    least_change: int = 0  # of lengths


def with_target(kernel: Any, target: Any) -> Any:
    return tree.replace(kernel, target=target)


# The check


@partial(jax.jit, static_argnames=("layout", "num_steps"))
def run(kernel, rng_key, states, *, layout, num_steps):
    def step(states, i):
        states, info = advance(kernel, rng_key, i, states, layout)
        return states, (info.acceptance_rate, info.is_accepted, info.num_integration_steps)

    states, (rate, is_accepted, lengths) = jax.lax.scan(step, states, jnp.arange(num_steps))
    return states.position, jnp.mean(rate), jnp.mean(is_accepted), jnp.ptp(lengths)


def run_from_exact_draws(problem: Problem, kernel: Any):
    """Return positions after a few steps, the mean rate, the share accepted, how lengths differ."""
    positions = problem.draw(np.random.default_rng(seed(0)), problem.num_chains)
    positions = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), positions)
    mesh = kernel.target.plates[0].rows.mesh if isinstance(kernel.target, gm.Posterior) else None
    layout: Layout = read_layout(mesh, kernel.target, positions, problem.num_chains, has_chains=True)
    states = init_chains(with_target(problem.kernel, kernel.target), positions, layout=layout)
    return run(kernel, jax.random.key(seed(1)), states, layout=layout, num_steps=problem.num_steps)


def functionals(u: np.ndarray) -> np.ndarray:
    """Functions of independent standard normals [n, d], all of mean 0: shape [n, functions]."""
    ranks = np.asarray(ndtr(u))
    each = [u, u**2 - 1, np.tanh(u) ** 3, *(np.cos(np.pi * k * ranks) for k in (1, 2, 3, 4))]
    pairs = [u[:, i] * u[:, j] for i, j in combinations(range(u.shape[1]), 2)]
    pairs += [np.cos(np.pi * ranks[:, i]) * u[:, j] ** 2 for i, j in combinations(range(u.shape[1]), 2)]
    return np.concatenate([*each, np.stack(pairs, axis=1)], axis=1)


def check_is_exact(problem: Problem, positions: Any) -> None:
    # A broken sampler may have run away to where these overflow; then its z-score is NaN, and it fails.
    with np.errstate(all="ignore"):
        values = functionals(np.asarray(problem.normals(positions), np.float64))
        standard_error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
        worst = np.max(np.abs(values.mean(axis=0) / standard_error))
    threshold = -NormalDist().inv_cdf(FALSE_ALARM / 2 / values.shape[1])
    within(worst, threshold, "standard errors off")


def check_leaves_invariant(problem: Problem, kernel: Any) -> None:
    positions, _, is_accepted, change = run_from_exact_draws(problem, kernel)
    low, high = problem.shares
    assert low < is_accepted <= high, "too few are accepted, or refused, for anything to show"
    assert change >= problem.least_change
    check_is_exact(problem, positions)


def rejects(problem: Problem, kernel: Any) -> None:
    with pytest.raises(AssertionError, match="standard errors"):
        check_leaves_invariant(problem, kernel)


# Broken kernels


def convert(kernel: Any, cls: type) -> Any:
    """Return the same fields as another class."""
    return tree.fill(cls, vars(kernel))


@pytree
class AcceptsAlways(gm.HMC):
    def _energy_error(self, *args):
        return jnp.zeros_like(super()._energy_error(*args))


@pytree
class HalvesTheEnergyError(gm.HMC):
    def _energy_error(self, *args):
        return super()._energy_error(*args) / 2


@pytree
class ForgetsKineticEnergy(gm.HMC):
    def _energy_error(self, state, momentum, end, terms):
        return super()._energy_error(state, momentum, replace(end, momentum=momentum), terms)


@pytree
class DrawsMomentaOfAnotherMass(gm.HMC):
    """Momenta of variance M, kinetic energy and velocity of a mass two thirds more."""

    def moving(self):
        heavier = jax.tree.map(lambda m: 0.6 * m, self.inverse_mass_matrix)
        return convert(self.with_inverse_mass_matrix(heavier), gm.HMC)

    def trajectory(self, start):
        return self.moving().trajectory(start)

    def _energy_error(self, *args):
        return self.moving()._energy_error(*args)


@pytree
class WeighsLeavesAlike(gm.NUTS):
    def _leapfrog(self, *args):
        near, velocity, leaf = super()._leapfrog(*args)
        return near, velocity, tree.replace(leaf, log_weight=jnp.zeros_like(leaf.log_weight))


@pytree
class ForgetsTurnsWithin(gm.NUTS):
    def _add_leaf(self, *args):
        return forget_turns(args[-1], super()._add_leaf(*args))

    def _add_block(self, *args):
        return forget_turns(args[-1], super()._add_block(*args))


def forget_turns(before, subtree):
    is_turning = before.progress.is_turning
    return tree.replace(subtree, progress=tree.replace(subtree.progress, is_turning=is_turning))


@pytree
class TreeOfAnotherMass(gm.NUTS):
    def trajectory(self, chance, state, momentum):
        heavier = jax.tree.map(lambda m: 0.6 * m, self.inverse_mass_matrix)
        return convert(self.with_inverse_mass_matrix(heavier), gm.NUTS).trajectory(
            chance, state, momentum
        )


@pytree
class CountsADimensionTooMany(gm.MAMS):
    def trajectory(self, *args):
        end, terms, gain = super().trajectory(*args)
        return end, terms, gain * 3 / 2


# Problems with one function

# Correlations of 0.9 and -0.7, scales that differ; and milder ones, which take larger steps.
STRONG = [[1, 0.9, -0.7], [0.9, 1, -0.5], [-0.7, -0.5, 1]], [1.0, 0.5, 2.0]
MILD = [[1, 0.566, -0.598], [0.566, 1, 0.085], [-0.598, 0.085, 1]], [1.0, 2**0.5, 0.7**0.5]


def of_exact(exact: Exact, kernel: Callable, **options: Any) -> Problem:
    """Make a problem: ``kernel(target, metric)``."""

    def draw(rng, n):
        return exact.draw(rng.normal(size=(n, 3)))

    return Problem(kernel(exact.target, exact.metric), draw, exact.normals, **options)


def hmc_on_a_gaussian() -> Problem:
    return of_exact(correlated_gaussian(*STRONG), lambda t, m: gm.HMC(t, 0.4, 4, m, jitter=0.3))


def hmc_on_a_funnel() -> Problem:
    return of_exact(funnel(), lambda t, m: gm.HMC(t, 0.7, 3, m))


OF_NUTS = {"num_chains": 8192, "num_steps": 3, "shares": (0.5, 1.0), "least_change": 4}
OF_MAMS = {"num_chains": 8192, "num_steps": 3, "shares": (0.5, 0.99), "least_change": 1}


def nuts_on_a_gaussian() -> Problem:
    return of_exact(correlated_gaussian(*MILD), lambda t, m: gm.NUTS(t, 0.75, m, 5), **OF_NUTS)


def nuts_on_a_funnel() -> Problem:
    return of_exact(funnel(), lambda t, m: gm.NUTS(t, 0.6, m, 5), **OF_NUTS)


def mams_on_a_gaussian() -> Problem:
    def kernel(target, metric):
        return gm.MAMS(target, 0.9, 3.0, metric, splitting=LEAPFROG)

    return of_exact(correlated_gaussian(*MILD), kernel, **OF_MAMS)


def mams_on_a_funnel() -> Problem:
    return of_exact(funnel(), lambda t, m: gm.MAMS(t, 1.0, 3.0), **OF_MAMS)


WEIGHTS, CENTRES, SPREADS = np.array([0.7, 0.3]), np.array([-1.0, 1.5]), np.array([0.8, 0.5])


def mixture_density(x):
    weights, centres, spreads = (jnp.float32(c) for c in (WEIGHTS, CENTRES, SPREADS))
    z = (x["along"] - centres) / spreads
    return jax.nn.logsumexp(-(z**2) / 2, b=weights / spreads), -(x["across"] ** 2) / 2


def mixture() -> Problem:
    """Two Gaussians of different weights and widths along one axis."""

    def draw(rng, n):
        which = (rng.random(n) < WEIGHTS[1]).astype(int)
        return {"along": rng.normal(CENTRES[which], SPREADS[which]), "across": rng.normal(size=(n, 1))}

    def normals(x):
        along = np.asarray(x["along"], np.float64)[:, None]
        with jax.enable_x64(True):
            rank = ndtr((along - CENTRES[None]) / SPREADS[None]) @ WEIGHTS
            return np.column_stack([ndtri(jnp.clip(rank, 1e-12, 1 - 1e-12)), x["across"]])

    metric = {"along": jnp.asarray(1.0), "across": jnp.asarray([1.0])}
    return Problem(gm.HMC(gm.LogDensity(mixture_density), 0.8, 3, metric), draw, normals)


# A posterior over rows on eight devices

NUM_ROWS, NOISE, PRIOR = 30, 2.0, 1.5


def rows_of_data() -> np.ndarray:
    """30 rows for 8 devices: 2 pad rows on the last, copies of an extreme row."""
    rows = np.random.default_rng(2).normal(0.5, NOISE, size=(NUM_ROWS, 2))
    rows[-1] = [4 * NOISE, -4 * NOISE]
    return rows


def log_prior(x):
    return -((x["mean"] / PRIOR) ** 2) / 2


def log_likelihood(x, block):
    return -jnp.sum((block - x["mean"][None]) ** 2, axis=1) / (2 * NOISE**2)


def gaussian_mean() -> Problem:
    """The mean of Gaussian rows whose variance is known: a Gaussian posterior."""
    data = gm.place(rows_of_data(), gm.make_mesh(data=8), P("data"))
    target = gm.Posterior(log_prior, gm.Plate(log_likelihood, data))
    precision = NUM_ROWS / NOISE**2 + PRIOR**-2
    mean = rows_of_data().sum(axis=0) / NOISE**2 / precision

    def draw(rng, n):
        return {"mean": mean + rng.normal(size=(n, 2)) / np.sqrt(precision)}

    def normals(x):
        return (np.asarray(x["mean"]) - mean) * np.sqrt(precision)

    metric = {"mean": jnp.full(2, 1 / precision)}
    return Problem(gm.HMC(target, 1.1, 4, metric), draw, normals, num_chains=8192)


PROBLEMS = [
    *(hmc_on_a_gaussian, hmc_on_a_funnel, mixture, nuts_on_a_gaussian, nuts_on_a_funnel),
    *(mams_on_a_gaussian, mams_on_a_funnel),
]
BROKEN_HMC = [AcceptsAlways, HalvesTheEnergyError, ForgetsKineticEnergy, DrawsMomentaOfAnotherMass]
BROKEN = [
    *((hmc_on_a_gaussian, broken) for broken in BROKEN_HMC),
    *((gaussian_mean, broken) for broken in (AcceptsAlways, HalvesTheEnergyError)),
    (mixture, HalvesTheEnergyError),
    (nuts_on_a_funnel, WeighsLeavesAlike),
    (nuts_on_a_gaussian, ForgetsTurnsWithin),
    (nuts_on_a_gaussian, TreeOfAnotherMass),
    (mams_on_a_gaussian, CountsADimensionTooMany),
]


@pytest.mark.statistical
@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_kernel_leaves_it_invariant(problem):
    check_leaves_invariant(problem(), problem().kernel)


@pytest.mark.statistical
@pytest.mark.parametrize(("problem", "broken"), BROKEN)
def test_a_broken_kernel_is_rejected(problem, broken):
    rejects(problem(), convert(problem().kernel, broken))


# Broken targets


def as_posterior(target: gm.Posterior, cls: type) -> Any:
    return cls(target.log_prior, *target.plates)


@pytree
class DropsTermsOfTheLastShard(gm.Posterior):
    def terms(self, position):
        return as_posterior(counting_rows(self, NUM_ROWS - 2), gm.Posterior).terms(position)

    def terms_and_grad(self, position):
        return self.terms(position), self.grad(position)


def drops_terms(target):
    return as_posterior(target, DropsTermsOfTheLastShard)


def counts_one_pad_row(target):
    return counting_rows(target, NUM_ROWS + 1)


@pytest.mark.statistical
def test_hmc_leaves_a_sharded_posterior_invariant():
    problem = gaussian_mean()
    assert problem.kernel.target.plates[0].rows.num_padded == NUM_ROWS + 2
    check_leaves_invariant(problem, problem.kernel)


@pytest.mark.statistical
@pytest.mark.parametrize("breaking", [drops_terms, counting_rows, counts_one_pad_row])
def test_a_broken_target_is_rejected(breaking):
    problem = gaussian_mean()
    rejects(problem, with_target(problem.kernel, breaking(problem.kernel.target)))
