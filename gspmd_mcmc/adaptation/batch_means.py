"""The correlation time of draws, from means of batches, as microcanonical warm-ups need it.

A batch of b draws whose correlation falls as exp(-t / T) has a mean of variance r σ² with
r = 2 T/b (1 - T/b (1 - exp(-b/T))). So r, averaged over the elements of the position, gives T, and the
time 2 T of one independent draw. No lags are stored, and b need not be much longer than T.

References
----------
Flegal and Jones, "Batch means and spectral variance estimators in Markov chain Monte Carlo", Annals of
Statistics 38 (2010); Robnik, De Luca, Silverstein and Seljak, JMLR 24 (2023), section 4 (L from the
effective sample size).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import moments as streaming
from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Window
from gspmd_mcmc.kernels import isokinetic
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.kernels.mams import MAMS
from gspmd_mcmc.kernels.mclmc import MCLMC
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Pad, PyTree, like_position, pytree

# T/b from r; beyond the last one the batches are too short to tell.
TIMES = np.logspace(-3, np.log10(4), 200)
RATIOS = 2 * TIMES * (1 - TIMES * -np.expm1(-1 / TIMES))
LEAST_BATCHES = 2
# Lengths in a batch.
BATCH_LENGTHS = 10
# Fractions of warm-up at which windows end: two of the HMC burn-in, of which the second learns a
# metric; three that learn one each; one that measures the correlation; one that settles the step size.
ENDS = (0.05, 0.1, 0.2, 0.4, 0.7, 0.9, 1.0)
LEARN_METRIC = (False, True, True, True, True, False, False)
ENDS_WITH_METRIC_HELD = (0.1, 0.8, 1.0)
LEAST_WARMUP = 20


@pytree
@dataclass(frozen=True, eq=False)
class Batches:
    """Moments of each chain's draws, and of the means of its batches of consecutive draws."""

    length: jax.Array  # draws in a batch, []
    draws: Moments  # so far, leaves [chains, ...]
    means: Moments
    sum: PyTree = like_position(has_chains=True, pad=Pad.ZERO)  # of the incomplete batch


def init(positions: PyTree, length: jax.Array) -> Batches:
    """Return batches of no draws, for positions with leaves [chains, ...]."""
    none = streaming.init(positions)
    zeros = jax.tree.map(jnp.zeros_like, none.mean)
    return Batches(length=length, draws=none, means=streaming.init(positions), sum=zeros)


def update(batches: Batches, positions: PyTree) -> Batches:
    """Take in one draw of every chain; nothing is summed over chains."""
    draws = streaming.update(batches.draws, positions)
    total = jax.tree.map(lambda s, x: s + x.astype(s.dtype), batches.sum, positions)
    is_complete = draws.count % batches.length == 0
    mean = jax.tree.map(lambda s: s / batches.length.astype(s.dtype), total)
    return tree.replace(
        batches,
        draws=draws,
        means=tree.where(is_complete, streaming.update(batches.means, mean), batches.means),
        sum=jax.tree.map(lambda s: jnp.where(is_complete, 0, s), total),
    )


def correlation_time(batches: Batches, target: Target, dimension: int) -> jax.Array:
    """Return the draws per independent draw, averaged over elements of the position; NaN if unknown."""
    return _time(batches, tree.total([total for total, _ in _ratios(batches, target)]) / dimension)


def slowest_correlation_time(batches: Batches, target: Target) -> jax.Array:
    """Return the draws per independent draw, averaged over the elements of the slowest leaf."""
    means = [total / jnp.maximum(count, 1) for total, count in _ratios(batches, target)]
    return _time(batches, jnp.max(jnp.stack(means)))


def _ratios(batches: Batches, target: Target) -> list[tuple[jax.Array, jax.Array]]:
    """Return for each leaf r, summed over its real elements, and how many of them move."""

    def ratio(of_means, of_draws, real):
        # Pad does not move within a chain, but chains differ in it.
        moves = (real > 0) & (of_draws > 0)
        r = jnp.where(moves, of_means / jnp.where(moves, of_draws, 1), 0)
        return jnp.sum(r), jnp.sum(moves).astype(r.dtype)

    of_means, of_draws = _variance(batches.means), _variance(batches.draws)
    real = local.zero_pad(target, tree.ones_like(of_draws))
    leaves = map(jax.tree.leaves, (of_means, of_draws, real))
    return [ratio(*of_leaf) for of_leaf in zip(*leaves, strict=True)]


def _time(batches: Batches, ratio: jax.Array) -> jax.Array:
    known = batches.means.count >= LEAST_BATCHES
    return jnp.where(known, 2 * jnp.interp(ratio, RATIOS, TIMES) * batches.length, jnp.nan)


def _variance(moments: Moments) -> PyTree:
    """Variance about the mean of all chains."""

    def one(mean, squares):
        between = jnp.sum((mean - jnp.mean(mean, axis=0, keepdims=True)) ** 2, axis=0)
        count = moments.count.astype(mean.dtype)
        freedom = jnp.maximum(count * mean.shape[0] - 1, 1)
        return (jnp.sum(squares, axis=0) + count * between) / freedom

    return jax.tree.map(one, moments.mean, moments.sum_of_squares)


@pytree
@dataclass(frozen=True, eq=False)
class Length:
    """The length of trajectories, or over which directions decorrelate, as it is tuned."""

    value: jax.Array  # in units of the metric
    is_measured: jax.Array  # by the correlation of draws
    batches: Batches  # of the draws in this window

    @classmethod
    def first(cls, kernel: MAMS | MCLMC, positions: PyTree) -> "Length":
        """Return the length of the kernel, not yet measured."""
        batches = init(positions, jnp.ones((), jnp.int32))
        return cls(kernel.trajectory_length, jnp.zeros((), bool), batches)

    def begun(self, positions: PyTree, lengths_per_draw: jax.Array) -> "Length":
        """Reset the batches, to ten lengths each."""
        draws = jnp.maximum(jnp.round(BATCH_LENGTHS / lengths_per_draw), 1).astype(jnp.int32)
        return tree.replace(self, batches=init(positions, draws))

    def updated(self, positions: PyTree) -> "Length":
        """Take in one draw of every chain."""
        return tree.replace(self, batches=update(self.batches, positions))

    def ended(self, measured: jax.Array) -> "Length":
        """End a window that held the metric; the first one fixes the length, unless it is NaN."""
        keeps = self.is_measured | jnp.isnan(measured)
        value = jnp.where(keeps, self.value, measured).astype(self.value.dtype)
        return tree.replace(self, value=value, is_measured=jnp.ones_like(self.is_measured))


def windows(num_warmup: int, learns_metric: bool) -> list[Window]:
    """Cut warm-up into windows; the metric is held in all of them unless it is learned."""
    if num_warmup < LEAST_WARMUP:
        return [Window(0, num_warmup, False)] if num_warmup else []
    fractions = ENDS if learns_metric else ENDS_WITH_METRIC_HELD
    learn_metric = LEARN_METRIC if learns_metric else (False,) * len(fractions)
    return Window.cut([round(x * num_warmup) for x in fractions], learn_metric)


def dimension_of_chain(kernel: Kernel, positions: PyTree) -> int:
    """Count the real elements of the position of one chain, for positions with leaves [chains, ...]."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
    return isokinetic.dimension(type(kernel).__name__, kernel.target, shapes)


def steepness(kernel: Kernel, states: Any) -> jax.Array:
    """Median over chains of the length of the gradient in the metric, sqrt(g·M⁻¹g)."""

    def squared(grad):
        return isokinetic.Span.of(kernel.inverse_mass_matrix, grad).products[0, 0]

    return jnp.sqrt(jnp.median(jax.vmap(squared)(states.log_density_grad)))


def change_of_scale(kernel: Kernel, metric: PyTree, states: Any) -> jax.Array:
    """Return the factor of a step size that turns directions as much in a new metric; 1 on a mode."""
    new = steepness(tree.replace(kernel, inverse_mass_matrix=metric), states)
    change = steepness(kernel, states) / new
    return jnp.where(jnp.isfinite(change), change, 1).astype(kernel.step_size.dtype)


def first_step_size(kernel: Kernel, states: Any, dimension: int) -> jax.Array:
    """Return a step in which the gradient turns a direction by 1/4; without gradient, the kernel's."""
    now = kernel.step_size
    found = 0.25 * (dimension - 1) / steepness(kernel, states)
    return jnp.where(jnp.isfinite(found), found, now).astype(now.dtype)
