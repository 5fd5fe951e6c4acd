"""Warm-up of the Metropolis-adjusted microcanonical sampler: step size, trajectory length and metric.

References
----------
Robnik, Cohn-Gordon and Seljak, "Metropolis adjusted microcanonical Hamiltonian Monte Carlo", arXiv
2503.01707 (2025).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import correlation, dual_averaging
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Transition, Window
from gspmd_mcmc.adaptation.correlation import Length
from gspmd_mcmc.adaptation.window import first_metric
from gspmd_mcmc.kernels.mams import MAMS
from gspmd_mcmc.tree import PyTree, pytree, static

# In burn-in the scale of the target is not known, only what a step may be.
FIRST_STEPS = 10
# The length over the distance that one independent draw takes.
LENGTH_FACTOR = 0.3
# Steps of a trajectory at most, while it is tuned and after.
MOST_STEPS = 1000


@pytree
@dataclass(frozen=True, eq=False)
class MAMSAdaptationState:
    """The recursion of the step size, the length, the metric, and what this window has seen."""

    step_size: dual_averaging.DualAveragingState
    trajectory_length: Length
    inverse_mass_matrix: PyTree
    moments: PyTree


@pytree
@dataclass(frozen=True, eq=False)
class MAMSAdaptation:
    """Settings of a warm-up of `MAMS`, pooled over chains.

    The length of trajectories is ten steps in burn-in, sqrt(d) in units of the metric once that is
    learned, and in the end 0.3 times the distance that one independent draw takes; at most 1000 steps.

    Parameters
    ----------
    target_acceptance_rate
        The mean acceptance rate over chains that the step size aims at.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; else the kernel's own is kept, and its units are taken for the
        target's scales.
    """

    target_acceptance_rate: float = 0.9
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)

    needs_end: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    def __post_init__(self):
        if not 0 < self.target_acceptance_rate < 1:
            raise ValueError(
                "MAMSAdaptation: target_acceptance_rate: expected a number between 0 and 1, got "
                f"{self.target_acceptance_rate}"
            )

    @property
    def learns_metric(self) -> bool:
        """Whether there is a metric to learn, and an estimator to learn it with."""
        return self.adapt_mass_matrix and self.metric is not None

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows: burn-in, the metric's, the length's, and one to settle."""
        return correlation.windows(num_warmup, self.learns_metric)

    def prepare(self, kernel: Any, states: Any) -> Any:
        """Return the kernel with a first metric, if one is to be learned.

        Raises
        ------
        TypeError
            If the kernel is not `MAMS`.
        """
        if not isinstance(kernel, MAMS):
            raise TypeError(
                f"MAMSAdaptation: expected a MAMS kernel, got {type(kernel).__name__}; use "
                "WindowAdaptation, or MCLMCAdaptation for MCLMC"
            )
        return first_metric(self.metric, kernel, states.position) if self.learns_metric else kernel

    def init(self, kernel: MAMS, states: Any) -> MAMSAdaptationState:
        """Return the state before any step."""
        return MAMSAdaptationState(
            step_size=dual_averaging.init(kernel.step_size),
            trajectory_length=Length.first(kernel, states.position),
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            moments=self._no_moments(states),
        )

    def begin(
        self,
        state: MAMSAdaptationState,
        kernel: MAMS,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> MAMSAdaptationState:
        """Begin a window: forget its moments; the first one guesses a step size from the gradients."""
        count = correlation.dimension_of_chain(kernel, states.position)
        guess = correlation.first_step_size(kernel, states, count)
        step_size = jnp.where(is_first, guess, dual_averaging.final_step_size(state.step_size))
        one = jnp.ones_like(step_size)  # a draw covers one length
        return tree.replace(
            state,
            step_size=dual_averaging.init(step_size),
            trajectory_length=state.trajectory_length.begun(states.position, one),
            moments=self._no_moments(states),
        )

    def tuned(self, kernel: MAMS, state: MAMSAdaptationState) -> MAMS:
        """Return the kernel with the step size, length and metric of this moment."""
        return self._with(kernel, state, jnp.exp(state.step_size.log_step_size))

    def update(
        self, state: MAMSAdaptationState, kernel: MAMS, transition: Transition
    ) -> MAMSAdaptationState:
        """Take in one step of all chains; their acceptance rates are summed over them."""
        positions = transition.after.position
        mean_rate = jnp.mean(transition.info.acceptance_rate)
        moments = state.moments
        if self.learns_metric:
            moments = self.metric.update(moments, positions)
        return tree.replace(
            state,
            step_size=dual_averaging.update(state.step_size, mean_rate, self.target_acceptance_rate),
            trajectory_length=state.trajectory_length.updated(positions),
            moments=moments,
        )

    def end(
        self,
        state: MAMSAdaptationState,
        kernel: MAMS,
        states: Any,
        rng_key: jax.Array,
        learns_metric: bool,
    ) -> tuple[MAMSAdaptationState, Any]:
        """End a window: a new metric, or the length that suits the one there is."""
        count = correlation.dimension_of_chain(kernel, states.position)
        if learns_metric and self.learns_metric:
            return self._with_metric(state, kernel, states, count), states
        distance = self.final(kernel, state).trajectory_length
        length = state.trajectory_length.ended(count, distance, LENGTH_FACTOR)
        return tree.replace(state, trajectory_length=length), states

    def final(self, kernel: MAMS, state: MAMSAdaptationState) -> MAMS:
        """Return the kernel with the averaged step size."""
        return self._with(kernel, state, dual_averaging.final_step_size(state.step_size))

    def _with(self, kernel: MAMS, state: MAMSAdaptationState, step_size: jax.Array) -> MAMS:
        length = state.trajectory_length.now(FIRST_STEPS * step_size)
        return tree.replace(
            kernel,
            step_size=step_size,
            trajectory_length=jnp.minimum(length, MOST_STEPS * step_size),
            inverse_mass_matrix=state.inverse_mass_matrix,
        )

    def _with_metric(
        self, state: MAMSAdaptationState, kernel: MAMS, states: Any, dimension: int
    ) -> MAMSAdaptationState:
        """Learn the metric; the step size is to turn directions as much as in the old one."""
        metric = self.metric.final(state.moments, states.position)
        now = self.final(kernel, state)
        change = correlation.change_of_scale(now, metric, states)
        return tree.replace(
            state,
            step_size=dual_averaging.init(change * now.step_size),
            trajectory_length=state.trajectory_length.scaled(dimension),
            inverse_mass_matrix=metric,
        )

    def _no_moments(self, states: Any) -> PyTree:
        return self.metric.init(states.position) if self.learns_metric else ()
