"""ChEES: step size, metric and trajectory length of jittered HMC, learned by all chains together.

The trajectory length climbs the ChEES criterion, the change in the estimator of the expected square:
E[(|z'|² - |z|²)²] for trajectories from z to z', positions centred and in units of their scales.

References
----------
Hoffman, Radul and Sountsov, "An Adaptive-MCMC Scheme for Setting Trajectory Lengths in Hamiltonian
Monte Carlo", AISTATS (2021).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import adam, dual_averaging, stuck_chains
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Adaptation, Transition, Window
from gspmd_mcmc.adaptation.criterion import ChangeOfSquares, Criterion, Trajectories
from gspmd_mcmc.adaptation.estimators.diagonal import Diagonal
from gspmd_mcmc.adaptation.step_size_search import find_step_size
from gspmd_mcmc.adaptation.window import first_metric
from gspmd_mcmc.kernels.hmc import HMC
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.tree import PyTree, each_chain, like_position, pytree, static

# Where windows end, in parts of warm-up. The first finds the posterior, with no metric yet; five learn
# a metric each; the last, with that metric, the step size and the trajectory length. Where coefficients
# are strongly correlated chains come together only with a metric that knows it, and that is learned
# only from chains that have: each of many short windows mixes better than the one before.
WINDOW_ENDS = (0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0)
# The mean number of leapfrogs that the first trajectories have, and the most until there is a metric.
FIRST_LEAPFROGS, FIRST_MAX_LEAPFROGS = 4, 128
# Where the length begins in the windows after the first metrics: near the best one where a metric knows
# all that there is to know. Chains that have not come together yet drive it far beyond, and it would
# need more steps to come back than to grow where it has to.
FIRST_LENGTH, NUM_FIRST_METRICS = 1.25, 3
# A step's acceptance rates count as this much at least in their harmonic mean: one alone could else
# bring it to zero.
LEAST_RATE = 0.05


@pytree
@dataclass(frozen=True, eq=False)
class ChEESState:
    """What is tuned, and what has been seen.

    Attributes
    ----------
    step_size
        The recursion of the step size.
    log_trajectory_length, log_trajectory_length_average, num_updates
        Of this moment; averaged over the window, with weights that grow linearly; steps in it.
    ascent
        The optimiser's state.
    max_leapfrogs, jitter
        The kernel's.
    inverse_mass_matrix, moments
        The metric, and what this window has seen of positions.
    num_metrics
        How many metrics there were but the first, which knows nothing.
    variances, spread
        The squares of the positions' scales, in whose units the criterion is; moments for them, where
        the metric is not these variances itself.
    criterion
        The criterion's own state.
    rates
        Recent acceptance rates, [chains].
    """

    step_size: dual_averaging.DualAveragingState
    log_trajectory_length: jax.Array
    log_trajectory_length_average: jax.Array
    num_updates: jax.Array
    ascent: adam.AdamState
    max_leapfrogs: jax.Array
    jitter: jax.Array
    inverse_mass_matrix: PyTree = like_position()
    moments: PyTree
    num_metrics: jax.Array
    variances: PyTree = like_position()
    spread: PyTree
    criterion: Any
    rates: jax.Array = each_chain()


@pytree
@dataclass(frozen=True, eq=False)
class ChEESAdaptation(Adaptation):
    """Settings of a warm-up of `JitteredHMC` by many chains together; 32 or more are advised.

    Chains whose recent acceptance rate is under 0.1, while most others move, have no part in the shared
    step size.

    Parameters
    ----------
    target_acceptance_rate
        What the harmonic mean over chains of acceptance rates is to be; their mean is then higher.
    learning_rate
        Of the log trajectory length: its step in units of the gradient's recent size.
    length_cost
        The criterion is divided by the number of leapfrogs to this power: with 0 it is the change of a
        step, with 1 the change for the work. With 0 it is so flat beyond its first maximum that some
        runs settle on trajectories several times as long as others.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`; a
        warm-up that is driven without one keeps the kernel's own.
    criterion
        What trajectories are to change: `ChangeOfSquares` here.
    """

    target_acceptance_rate: float = 0.6
    learning_rate: float = 0.05
    length_cost: float = 0.35
    metric: Any = None
    criterion: Criterion = static(default=ChangeOfSquares())

    needs_end: ClassVar[bool] = True
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    def __post_init__(self):
        if not 0 < self.target_acceptance_rate < 1:
            raise ValueError(
                f"{type(self).__name__}: target_acceptance_rate: expected a number between 0 and 1, "
                f"got {self.target_acceptance_rate}"
            )

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up at `WINDOW_ENDS`; with fewer than 20 steps nothing but numbers is learned."""
        if num_warmup < 20:
            return [Window(0, num_warmup, False)] if num_warmup else []
        ends = [round(part * num_warmup) for part in WINDOW_ENDS]
        spans = list(zip([0, *ends], ends, strict=False))
        return [Window(a, b, a > 0 and b < num_warmup) for a, b in spans]

    def prepare(self, kernel: Any, states: Any) -> Any:
        """Return the kernel with a first metric.

        Raises
        ------
        TypeError
            If the kernel is no `JitteredHMC`.
        ValueError
            If there are fewer than two chains.
        """
        name = type(self).__name__
        if not isinstance(kernel, JitteredHMC):
            raise TypeError(
                f"{name} tunes a JitteredHMC, whose trajectory length is one number for all chains; "
                f"got {type(kernel).__name__}"
            )
        if len(states.log_density) < 2:
            raise ValueError(
                f"{name}: expected at least 2 chains, as it learns from their differences (32 or more "
                "are advised), got 1; use NUTS and WindowAdaptation"
            )
        return kernel if self.metric is None else first_metric(self.metric, kernel, states.position)

    def init(self, kernel: Any, states: Any) -> ChEESState:
        """Return the state before any step."""
        positions = states.position
        zero = jnp.zeros_like(kernel.step_size)
        return ChEESState(
            step_size=dual_averaging.init(kernel.step_size),
            log_trajectory_length=jnp.log(FIRST_LEAPFROGS * kernel.step_size),
            log_trajectory_length_average=zero,
            num_updates=zero,
            ascent=adam.init(zero),
            max_leapfrogs=kernel.max_leapfrogs,
            jitter=kernel.jitter,
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            moments=self._no_moments(positions),
            num_metrics=jnp.zeros((), jnp.int32),
            variances=Diagonal().identity(positions),
            spread=self._no_spread(positions),
            criterion=self.criterion.init(kernel.target, positions),
            rates=stuck_chains.no_rates(states.log_density),
        )

    def begin(
        self,
        state: ChEESState,
        kernel: Any,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> ChEESState:
        """Begin a window: search a step size that suits the chain in the middle; forget the moments."""

        def middle_rate(kernel, key):
            return jnp.median(acceptance_rates(kernel, key))[None]

        found = find_step_size(self.final(kernel, state), rng_key, middle_rate)
        is_early = (state.num_metrics > 0) & (state.num_metrics <= NUM_FIRST_METRICS)
        is_early &= self.metric is not None  # the units of a kernel's own may be far from the scales
        length = jnp.where(is_early, jnp.log(FIRST_LENGTH), state.log_trajectory_length)
        length = jnp.where(is_first, jnp.log(FIRST_LEAPFROGS * found), length)
        zero = jnp.zeros_like(found)
        return tree.replace(
            state,
            step_size=dual_averaging.init(found),
            log_trajectory_length=length,
            log_trajectory_length_average=zero,
            num_updates=zero,
            ascent=adam.init(zero),
            moments=self._no_moments(states.position),
            spread=self._no_spread(states.position),
        )

    def tuned(self, kernel: Any, state: ChEESState) -> Any:
        """Return the kernel with the step size and the trajectory length of this moment."""
        return _with(kernel, state, state.step_size.log_step_size, state.log_trajectory_length)

    def update(self, state: ChEESState, kernel: HMC, transition: Transition) -> ChEESState:
        """Take in one step of all chains; what is summed over chains is summed here, once."""
        info, positions = transition.info, transition.after.position
        trajectories = self._trajectories(state, kernel, transition)
        measured, square, rate = self.criterion.measure(state.criterion, trajectories)
        gains = self.gains(kernel, square, rate)
        rates = stuck_chains.recent_rates(state.rates, info.acceptance_rate)
        gradient, harmonic_rate = _over_chains(info.acceptance_rate, gains, rates)

        ascent, step = adam.update(state.ascent, gradient)
        step_size = dual_averaging.update(state.step_size, harmonic_rate, self.target_acceptance_rate)
        length = state.log_trajectory_length + self.learning_rate * step
        length = _within_bounds(state, state.step_size.log_step_size, length)
        num_updates = state.num_updates + 1
        average = state.log_trajectory_length_average
        return tree.replace(
            state,
            step_size=step_size,
            log_trajectory_length=length,
            log_trajectory_length_average=average + 2 / (num_updates + 1) * (length - average),
            num_updates=num_updates,
            ascent=ascent,
            moments=() if self.metric is None else self.metric.update(state.moments, positions),
            spread=state.spread if self._is_diagonal else Diagonal().update(state.spread, positions),
            criterion=self.criterion.update(state.criterion, measured, trajectories, kernel.target),
            rates=rates,
        )

    def gains(self, kernel: HMC, square: jax.Array, rate: jax.Array) -> jax.Array:
        """Return what each trajectory would gain by being longer, [chains].

        The derivative of square / work^cost by the log of the trajectory length, the work being its
        leapfrogs, in units of time: half a step more than the length.
        """
        # The number of leapfrogs was rounded up, by a half in the mean.
        work = kernel.num_integration_steps.astype(rate.dtype) * kernel.step_size
        time = work - kernel.step_size / 2
        cost = self.length_cost * square * time / work
        return (rate * time - cost) / work**self.length_cost

    def end(self, state: ChEESState, kernel: Any, states: Any, learns_metric: bool) -> ChEESState:
        """End a window: learn the metric."""
        if not learns_metric:
            return state
        metric = state.inverse_mass_matrix
        if self.metric is not None:
            metric = self.metric.final(state.moments, states.position)
        is_variances = self._is_diagonal
        variances = metric if is_variances else Diagonal().final(state.spread, states.position)
        learned = tree.replace(state, inverse_mass_matrix=metric, variances=variances)
        return tree.replace(learned, num_metrics=state.num_metrics + 1)

    def final(self, kernel: Any, state: ChEESState) -> Any:
        """Return the kernel with the averages of step size and trajectory length."""
        average, last = state.log_trajectory_length_average, state.log_trajectory_length
        length = jnp.where(state.num_updates > 0, average, last)
        step_size = dual_averaging.final_step_size(state.step_size)
        return _with(kernel, state, jnp.log(step_size), length)

    @property
    def _is_diagonal(self) -> bool:
        """Whether the metric is the variances in whose units the criterion is."""
        return isinstance(self.metric, Diagonal)

    def _no_moments(self, positions: PyTree) -> PyTree:
        return () if self.metric is None else self.metric.init(positions)

    def _no_spread(self, positions: PyTree) -> PyTree:
        return () if self._is_diagonal else Diagonal().init(positions)

    def _trajectories(self, state: ChEESState, kernel: HMC, transition: Transition) -> Trajectories:
        before, end = transition.before.position, transition.end
        assert end is not None
        velocity = jax.vmap(lambda p: metrics.velocity(kernel.inverse_mass_matrix, p))(end.momentum)
        return Trajectories(before, end.position, velocity, state.variances)


def _with(kernel: Any, state: ChEESState, log_step_size: jax.Array, log_length: jax.Array) -> Any:
    """Return the kernel with these numbers and the metric of this moment."""
    return tree.replace(
        kernel,
        step_size=jnp.exp(log_step_size),
        trajectory_length=jnp.exp(_within_bounds(state, log_step_size, log_length)),
        inverse_mass_matrix=state.inverse_mass_matrix,
    )


def _within_bounds(state: ChEESState, log_step_size: jax.Array, log_length: jax.Array) -> jax.Array:
    """Clip a log length: the longest trajectory is one leapfrog to the most."""
    first_most = jnp.minimum(FIRST_MAX_LEAPFROGS, state.max_leapfrogs)
    most = jnp.where(state.num_metrics > 0, state.max_leapfrogs, first_most)
    shortest = log_step_size - jnp.log1p(state.jitter)
    return jnp.clip(log_length, shortest, shortest + jnp.log(most.astype(shortest.dtype)))


def _over_chains(rates: jax.Array, gains: jax.Array, recent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean of gains, weighted by acceptance rates, and the harmonic mean of the rates.

    Proposals that are not finite have no part in the first; chains that are stuck, while more than half
    of all are not, have none in the second.
    """
    weights = jnp.where(jnp.isfinite(gains), rates, 0)
    weighted = jnp.where(weights > 0, gains, 0) * weights
    inverse = 1 / jnp.maximum(rates, LEAST_RATE)
    moves = (recent >= stuck_chains.STUCK_RATE).astype(rates.dtype)
    rows = jnp.stack([weights, weighted, moves, moves * inverse, inverse])
    weight, gain, num_moving, inverse_moving, inverse_all = jnp.sum(rows, axis=1)

    most_move = 2 * num_moving > len(rates)
    harmonic = jnp.where(most_move, num_moving / inverse_moving, len(rates) / inverse_all)
    return jnp.where(weight > 0, gain / jnp.where(weight > 0, weight, 1), 0), harmonic
