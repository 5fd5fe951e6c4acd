"""ChEES: step size, metric and trajectory length of jittered HMC, learned by all chains together.

The trajectory length climbs a criterion: the expected squared change E[|f(z') - f(z)|²] over
trajectories from z to z', of a function f of positions that are centered and in units of their scales.
That of ChEES, the change in the estimator of the expected square, has f = |z|². SNAPER has another.

References
----------
Hoffman, Radul and Sountsov, "An Adaptive-MCMC Scheme for Setting Trajectory Lengths in Hamiltonian
Monte Carlo", AISTATS (2021).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import adam, dual_averaging, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Adaptation, Transition, Window, WindowStart
from gspmd_mcmc.adaptation.estimators.estimator import Diagonal
from gspmd_mcmc.adaptation.step_size_search import find_step_size
from gspmd_mcmc.kernels.hmc import HMC
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Pad, PyTree, each_chain, like_position, pytree, static

# Ends of windows, as fractions of warm-up. The first window finds the posterior, without a metric; five
# learn a metric each; the last one, with that metric, tunes step size and trajectory length. Where
# coefficients are strongly correlated, chains converge only with a metric that knows it, and that is
# learned only from chains that have converged: each of many short windows mixes better than the last.
WINDOW_ENDS = (0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0)
# The mean number of leapfrogs of the first trajectories, and the largest until there is a metric.
FIRST_LEAPFROGS, FIRST_MAX_LEAPFROGS = 4, 128
# The first length in the windows after the first metrics: near the best one where the metric knows the
# posterior. Chains that have not converged drive the length far beyond it, and from there it would need
# more steps to return than it needs from here to grow where it has to.
FIRST_LENGTH, NUM_FIRST_METRICS = 1.25, 3
# A lower bound of acceptance rates in their harmonic mean, which a single one could bring to zero.
LEAST_RATE = 0.05


class Trajectories(NamedTuple):
    """What a criterion measures: positions and velocities, leaves [chains, ...]."""

    before: PyTree
    end: PyTree
    velocity: PyTree  # at the end
    variances: PyTree  # the squares of the scales, a tree like one position


class Criterion(Protocol):
    """A function f of the position that trajectories should change as much as possible."""

    def init(self, target: Target, positions: PyTree) -> Any:
        """Return the state before any step."""
        ...

    def measure(self, state: Any, trajectories: Trajectories) -> tuple[Any, jax.Array, jax.Array]:
        """Return a value for `update`; and |f' - f|² of each trajectory and its rate, [chains]."""
        ...

    def update(self, state: Any, measured: Any, trajectories: Trajectories, target: Target) -> Any:
        """Take in the starts of the trajectories."""
        ...


@pytree
@dataclass(frozen=True, eq=False)
class RunningMean:
    """The mean over chains and recent steps, about the last eighth of them."""

    count: jax.Array  # []
    mean: PyTree = like_position(pad=Pad.ZERO)

    @classmethod
    def of(cls, mean: PyTree) -> "RunningMean":
        """Begin at a first guess, which the first step replaces."""
        return cls(jnp.zeros(()), mean)

    def add(self, mean: PyTree) -> "RunningMean":
        """Take in the mean over chains of one step."""
        weight = 1 / (1 + self.count / 8)
        return RunningMean(self.count + 1, tree.axpy(weight, tree.sub(mean, self.mean), self.mean))


@dataclass(frozen=True)
class ChangeOfSquares:
    """The criterion of ChEES: f is |z|², the squared distance from the mean in units of the scales."""

    def init(self, target: Target, positions: PyTree) -> RunningMean:
        """Begin at the mean over chains."""
        return RunningMean.of(mean_of_chains(positions))

    def measure(self, state: RunningMean, trajectories: Trajectories) -> tuple[Any, Any, Any]:
        """Return nothing, the square of |z'|² - |z|², and its rate of change at the end."""
        before, end, velocity, variances = trajectories

        def products(before, end, velocity):
            moved, from_mean = tree.sub(end, before), tree.sub(end, state.mean)
            weigh = jax.tree.map(jnp.divide, (moved, velocity), (variances, variances))
            # Summed over differences, so that what does not move, as pads, does not count.
            both = tree.add(from_mean, tree.sub(before, state.mean))
            change, rate = tree.dot(weigh[0], both), 2 * tree.dot(weigh[1], from_mean)
            return change**2, 2 * change * rate

        return ((), *jax.vmap(products)(before, end, velocity))

    def update(
        self, state: RunningMean, measured: Any, trajectories: Trajectories, target: Target
    ) -> RunningMean:
        """Take in the starts of the trajectories."""
        return state.add(mean_of_chains(trajectories.before))


def mean_of_chains(x: PyTree) -> PyTree:
    """Return the mean over chains of leaves [chains, ...]."""
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), x)


@pytree
@dataclass(frozen=True, eq=False)
class ChEESState:
    """What is tuned, and what has been seen."""

    step_size: dual_averaging.DualAveragingState
    log_trajectory_length: jax.Array
    log_trajectory_length_average: jax.Array  # over the window, with weights that grow linearly
    num_updates: jax.Array  # in the window
    ascent: adam.AdamState
    max_leapfrogs: jax.Array  # this and the next one are of the kernel
    jitter: jax.Array
    inverse_mass_matrix: PyTree = like_position()
    moments: PyTree  # of the positions in this window, for the metric
    num_metrics: jax.Array  # learned so far
    variances: PyTree = like_position()  # the squares of the scales, units of the criterion
    spread: PyTree  # moments for them, where the metric is not these variances itself
    criterion: Any
    rates: jax.Array = each_chain()  # recent acceptance rates, [chains]


@pytree
@dataclass(frozen=True, eq=False)
class ChEESAdaptation(Adaptation):
    """Settings of a warm-up of `JitteredHMC` by many chains together; use 32 or more.

    Chains whose recent acceptance rate is under 0.1, while most others move, have no effect on the
    shared step size.

    Parameters
    ----------
    target_acceptance_rate
        The target of the harmonic mean of acceptance rates over chains; their mean is then higher.
    learning_rate
        Of the log trajectory length: its step, in units of the recent size of the gradient.
    length_cost
        The criterion is divided by the number of leapfrogs to this power: 0 maximizes the change of a
        step, 1 the change per leapfrog. With 0 the criterion is so flat beyond its first maximum that
        some runs settle on trajectories several times as long as others.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; otherwise the kernel keeps its own, or the identity.
    criterion
        The function that trajectories should change: `ChangeOfSquares` by default.
    """

    target_acceptance_rate: float = 0.6
    learning_rate: float = 0.05
    length_cost: float = 0.35
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)
    criterion: Criterion = static(default=ChangeOfSquares())

    kernel_type: ClassVar[type[JitteredHMC]] = JitteredHMC
    needs_end: ClassVar[bool] = True
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    def __post_init__(self):
        dual_averaging.check_target(self)

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up at `WINDOW_ENDS`; with fewer than 20 steps no metric is learned."""
        if num_warmup < 20:
            return super().windows(num_warmup)
        ends = [round(x * num_warmup) for x in WINDOW_ENDS]
        return Window.cut(ends, [False, *[True] * (len(ends) - 2), False])

    def prepare(self, kernel: JitteredHMC, states: Any) -> JitteredHMC:
        """Return the kernel with a first metric; raise a ValueError if there is only one chain."""
        kernel = super().prepare(kernel, states)
        if len(states.log_density) < 2:
            raise ValueError(
                f"{type(self).__name__}: expected at least 2 chains (better 32 or more), because it "
                "learns from their differences, got 1; use NUTS and WindowAdaptation"
            )
        return kernel

    def init(self, kernel: JitteredHMC, states: Any) -> ChEESState:
        """Return the state before any step."""
        return ChEESState(
            max_leapfrogs=kernel.max_leapfrogs,
            jitter=kernel.jitter,
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            num_metrics=jnp.zeros((), jnp.int32),
            variances=Diagonal().identity(states.position),
            criterion=self.criterion.init(kernel.target, states.position),
            rates=stuck_chains.no_rates(states.log_density),
            **self._of_window(kernel.step_size, jnp.log(FIRST_LEAPFROGS * kernel.step_size), states),
        )

    def _of_window(self, step_size: jax.Array, log_length: jax.Array, states: Any) -> dict[str, Any]:
        """Return what a window begins with."""
        zero = jnp.zeros_like(step_size)
        return {
            "step_size": dual_averaging.init(step_size),
            "log_trajectory_length": log_length,
            "log_trajectory_length_average": zero,
            "num_updates": zero,
            "ascent": adam.init(zero),
            "moments": self.init_moments(states),
            "spread": () if self._is_diagonal else Diagonal().init(states.position),
        }

    def begin(
        self, state: ChEESState, kernel: JitteredHMC, states: Any, start: WindowStart
    ) -> ChEESState:
        """Begin a window: search for a step size that suits the median chain; reset the moments."""

        def middle_rate(kernel, key):
            return jnp.median(start.acceptance_rates(kernel, key))[None]

        found = find_step_size(self.final(kernel, state), start.rng_key, middle_rate)
        is_early = (state.num_metrics > 0) & (state.num_metrics <= NUM_FIRST_METRICS)
        is_early &= self.learns_metric  # the units of a kernel's own may be far from the scales
        length = jnp.where(is_early, jnp.log(FIRST_LENGTH), state.log_trajectory_length)
        length = jnp.where(start.is_first, jnp.log(FIRST_LEAPFROGS * found), length)
        return tree.replace(state, **self._of_window(found, length, states))

    def tuned(self, kernel: JitteredHMC, state: ChEESState) -> JitteredHMC:
        """Return the kernel with the current step size and trajectory length."""
        return _with(kernel, state, state.step_size.log_step_size, state.log_trajectory_length)

    def update(self, state: ChEESState, kernel: HMC, transition: Transition) -> ChEESState:
        """Take in one step of all chains; all sums over chains are taken here, at once."""
        end, info = transition.end, transition.info
        assert end is not None
        velocity = jax.vmap(kernel.velocity)(end.momentum)
        trajectories = Trajectories(transition.before.position, end.position, velocity, state.variances)
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
        spread = state.spread
        if not self._is_diagonal:
            spread = Diagonal().update(spread, transition.after.position)
        return tree.replace(
            state,
            step_size=step_size,
            log_trajectory_length=length,
            log_trajectory_length_average=average + 2 / (num_updates + 1) * (length - average),
            num_updates=num_updates,
            ascent=ascent,
            moments=self.update_moments(state.moments, transition.after),
            spread=spread,
            criterion=self.criterion.update(state.criterion, measured, trajectories, kernel.target),
            rates=rates,
        )

    def gains(self, kernel: HMC, square: jax.Array, rate: jax.Array) -> jax.Array:
        """Return what each trajectory would gain by being longer, [chains].

        The derivative of square / work^cost with respect to the log of the trajectory length; the work
        is the time of its leapfrogs, half a step longer than the length.
        """
        # The number of leapfrogs was rounded up, by 1/2 on average.
        work = kernel.num_integration_steps.astype(rate.dtype) * kernel.step_size
        time = work - kernel.step_size / 2
        cost = self.length_cost * square * time / work
        return (rate * time - cost) / work**self.length_cost

    def end(
        self, state: ChEESState, kernel: JitteredHMC, states: Any, learns_metric: bool
    ) -> ChEESState:
        """End a window: learn the metric."""
        if not learns_metric:
            return state
        metric = state.inverse_mass_matrix
        if self.learns_metric:
            metric = self.metric.final(state.moments, states.position)
        variances = metric if self._is_diagonal else Diagonal().final(state.spread, states.position)
        learned = tree.replace(state, inverse_mass_matrix=metric, variances=variances)
        return tree.replace(learned, num_metrics=state.num_metrics + 1)

    def final(self, kernel: JitteredHMC, state: ChEESState) -> JitteredHMC:
        """Return the kernel with the averages of step size and trajectory length."""
        average, last = state.log_trajectory_length_average, state.log_trajectory_length
        length = jnp.where(state.num_updates > 0, average, last)
        step_size = dual_averaging.final_step_size(state.step_size)
        return _with(kernel, state, jnp.log(step_size), length)

    @property
    def _is_diagonal(self) -> bool:
        """Whether the metric itself is the variances that are the units of the criterion."""
        return self.learns_metric and isinstance(self.metric, Diagonal)


def _with(
    kernel: JitteredHMC, state: ChEESState, log_step_size: jax.Array, log_length: jax.Array
) -> JitteredHMC:
    """Return the kernel with these numbers and the current metric."""
    return tree.replace(
        kernel,
        step_size=jnp.exp(log_step_size),
        trajectory_length=jnp.exp(_within_bounds(state, log_step_size, log_length)),
        inverse_mass_matrix=state.inverse_mass_matrix,
    )


def _within_bounds(state: ChEESState, log_step_size: jax.Array, log_length: jax.Array) -> jax.Array:
    """Clip a log length, so that the longest trajectory has 1 to ``max_leapfrogs`` leapfrogs."""
    first_most = jnp.minimum(FIRST_MAX_LEAPFROGS, state.max_leapfrogs)
    most = jnp.where(state.num_metrics > 0, state.max_leapfrogs, first_most)
    shortest = log_step_size - jnp.log1p(state.jitter)
    return jnp.clip(log_length, shortest, shortest + jnp.log(most.astype(shortest.dtype)))


def _over_chains(rates: jax.Array, gains: jax.Array, recent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the mean of gains, weighted by acceptance rates, and the harmonic mean of the rates.

    The first leaves out proposals that are not finite; the second leaves out stuck chains, while more
    than half of all chains are not stuck.
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
