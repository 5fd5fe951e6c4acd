"""How long draws stay correlated, from means of batches; and the windows of microcanonical warm-ups.

A batch of b draws whose correlation falls as exp(-t / T) has a mean of variance r σ² with
r = 2 T/b (1 - T/b (1 - exp(-b/T))). So r, averaged over the position's elements, tells T, and that the
time 2 T that one independent draw takes, without any lag being kept, and with no need that b be much
longer than T.

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
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import Pad, PyTree, like_position, pytree

# T/b from r; beyond the last the batches are too short to tell more.
TIMES = np.logspace(-3, np.log10(4), 200)
RATIOS = 2 * TIMES * (1 - TIMES * -np.expm1(-1 / TIMES))
LEAST_BATCHES = 2
# A batch is as many times the length.
BATCH_LENGTHS = 10
# Shares of warm-up at which windows end: two of the HMC burn-in, the second learns a metric; then
# three that learn one each; one that measures the correlation, one in which the step size settles.
ENDS = (0.05, 0.1, 0.2, 0.4, 0.7, 0.9, 1.0)
LEARN_METRIC = (False, True, True, True, True, False, False)
ENDS_WITH_METRIC_HELD = (0.1, 0.8, 1.0)
LEAST_WARMUP = 20


@pytree
@dataclass(frozen=True, eq=False)
class Batches:
    """Moments of each chain's draws, and of the means of its batches of consecutive draws.

    Attributes
    ----------
    length
        Draws of a batch, [].
    draws, means
        Moments so far, leaves [chains, ...].
    sum
        Of the draws of the batch that is not complete, leaves [chains, ...].
    """

    length: jax.Array
    draws: Moments
    means: Moments
    sum: PyTree = like_position(has_chains=True, pad=Pad.ZERO)


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


def correlation_time(batches: Batches, dimension: int) -> jax.Array:
    """Draws that one independent draw takes, a mean over the position's elements; NaN if unknown."""
    return _time(batches, tree.total([total for total, _ in _ratios(batches)]) / dimension)


def slowest_correlation_time(batches: Batches) -> jax.Array:
    """Draws that one independent draw takes, a mean over the elements of the slowest leaf."""
    means = [total / jnp.maximum(count, 1) for total, count in _ratios(batches)]
    return _time(batches, jnp.max(jnp.stack(means)))


def _ratios(batches: Batches) -> list[tuple[jax.Array, jax.Array]]:
    """Return of each leaf r, summed over its elements, and how many there are."""

    def ratio(of_means, of_draws):
        # The pad of local latents does not move, and counts for nothing.
        moves = of_draws > 0
        r = jnp.where(moves, of_means / jnp.where(moves, of_draws, 1), 0)
        return jnp.sum(r), jnp.sum(moves).astype(r.dtype)

    of_means, of_draws = (jax.tree.leaves(_variance(m)) for m in (batches.means, batches.draws))
    return [ratio(a, b) for a, b in zip(of_means, of_draws, strict=True)]


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
    """The length of a trajectory, or that after which a direction is forgotten, as it is tuned.

    Attributes
    ----------
    value
        In units of the metric.
    is_measured
        Whether it is that of the correlation.
    batches
        Of this window's draws.
    """

    value: jax.Array
    is_measured: jax.Array
    batches: Batches

    @classmethod
    def first(cls, kernel: Any, positions: PyTree) -> "Length":
        """Return the kernel's length, as that of the metric's scale."""
        batches = init(positions, jnp.ones((), jnp.int32))
        return cls(kernel.trajectory_length, jnp.zeros((), bool), batches)

    def begun(self, positions: PyTree, lengths_a_draw: jax.Array) -> "Length":
        """Forget the draws; a batch is ten lengths, of which a draw covers a number."""
        draws = jnp.maximum(jnp.round(BATCH_LENGTHS / lengths_a_draw), 1).astype(jnp.int32)
        return tree.replace(self, batches=init(positions, draws))

    def updated(self, positions: PyTree) -> "Length":
        """Take in one draw of every chain."""
        return tree.replace(self, batches=update(self.batches, positions))

    def ended(self, measured: jax.Array) -> "Length":
        """End a window in which the metric was held: the first measures the length, which stays.

        NaN if the window was too short to tell: it stays what it was.
        """
        keeps = self.is_measured | jnp.isnan(measured)
        value = jnp.where(keeps, self.value, measured).astype(self.value.dtype)
        return tree.replace(self, value=value, is_measured=jnp.ones_like(self.is_measured))


def windows(num_warmup: int, learns_metric: bool) -> list[Window]:
    """Cut warm-up into windows; the metric is held in all of them if it is not to be learned."""
    if num_warmup < LEAST_WARMUP:
        return [Window(0, num_warmup, False)] if num_warmup else []
    shares = ENDS if learns_metric else ENDS_WITH_METRIC_HELD
    learn = LEARN_METRIC if learns_metric else (False,) * len(shares)
    ends = [round(share * num_warmup) for share in shares]
    return [Window(a, b, x) for a, b, x in zip([0, *ends], ends, learn, strict=False)]


def dimension_of_chain(kernel: Any, positions: PyTree) -> int:
    """Count the real elements of a chain's position, for positions with leaves [chains, ...]."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
    return isokinetic.dimension(type(kernel).__name__, kernel.target, shapes)


def steepness(kernel: Any, states: Any) -> jax.Array:
    """Median over chains of the gradient's length in the metric, sqrt(g·M⁻¹g)."""

    def squared(grad):
        return isokinetic.Span.of(kernel.inverse_mass_matrix, grad).products[0, 0]

    return jnp.sqrt(jnp.median(jax.vmap(squared)(states.log_density_grad)))


def change_of_scale(kernel: Any, metric: Any, states: Any) -> jax.Array:
    """Return the ratio of steps that turn directions alike, in a new metric and in the kernel's.

    It is 1 where no gradient turns one: chains that never left a mode.
    """
    new = steepness(tree.replace(kernel, inverse_mass_matrix=metric), states)
    change = steepness(kernel, states) / new
    return jnp.where(jnp.isfinite(change), change, 1).astype(kernel.step_size.dtype)


def first_step_size(kernel: Any, states: Any, dimension: int) -> jax.Array:
    """Return a step in which the gradient turns a direction by a quarter; the kernel's if it is 0."""
    now = kernel.step_size
    found = 0.25 * (dimension - 1) / steepness(kernel, states)
    return jnp.where(jnp.isfinite(found), found, now).astype(now.dtype)
