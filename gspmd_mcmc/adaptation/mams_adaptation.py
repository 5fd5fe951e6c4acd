"""Warm-up of the Metropolis-adjusted microcanonical sampler: step size, trajectory length and metric.

References
----------
Robnik, Cohn-Gordon and Seljak, "Metropolis adjusted microcanonical Hamiltonian Monte Carlo", arXiv
2503.01707 (2025).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import batch_means
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Transition
from gspmd_mcmc.adaptation.batch_means import Length
from gspmd_mcmc.adaptation.hmc_burn_in import AfterHMCBurnIn
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState
from gspmd_mcmc.kernels.mams import MAMS
from gspmd_mcmc.tree import pytree, static

# The length over the distance that one independent draw of the slowest leaf takes. Of four posteriors
# and a Gaussian, it gave at least four fifths of the best length's least effective size a gradient.
LENGTH_FACTOR = 1 / 3
# Steps of a trajectory at most, while it is tuned and after.
MOST_STEPS = 1000


@pytree
@dataclass(frozen=True, eq=False)
class MAMSAdaptationState:
    """The tuning of step size and metric, and the length."""

    window: WindowState
    trajectory_length: Length


@pytree
@dataclass(frozen=True, eq=False)
class MAMSAdaptation(AfterHMCBurnIn):
    """Settings of a warm-up of `MAMS`, pooled over chains.

    The first tenth is a burn-in by HMC. Then step size and metric are tuned as `WindowAdaptation`
    does; the mean length of trajectories is sqrt(d) π/2 in units of the metric, a quarter of the period
    of a coordinate of that scale. In the end it is a third of the distance that one independent draw
    takes, of the leaf that takes longest, where that is more, or the metric was not learned; at most
    1000 steps.

    Parameters
    ----------
    target_acceptance_rate
        The mean acceptance rate, over chains that are not stuck, that the step size aims at.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; else the kernel's own is kept, and its units are taken for the
        target's scales.
    """

    target_acceptance_rate: float = 0.9
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)

    first_length: ClassVar[float] = math.pi / 2

    def __post_init__(self):
        if not 0 < self.target_acceptance_rate < 1:
            raise ValueError(
                "MAMSAdaptation: target_acceptance_rate: expected a number between 0 and 1, got "
                f"{self.target_acceptance_rate}"
            )

    @property
    def by_window(self) -> WindowAdaptation:
        """How step size and metric are tuned."""
        # The rate may be traced, which a constructor could not check.
        return tree.replace(self.by_hmc, target_acceptance_rate=self.target_acceptance_rate)

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
        return self.prepared(kernel, states)

    def init(self, kernel: MAMS, states: Any) -> MAMSAdaptationState:
        """Return the state after the burn-in."""
        window = self.by_window.init(self.arrived(kernel, states), states)
        return MAMSAdaptationState(window, Length.first(kernel, states.position))

    def begin(
        self,
        state: MAMSAdaptationState,
        kernel: MAMS,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> MAMSAdaptationState:
        """Begin a window: search a step size for its metric, and forget the draws."""
        window = self.by_window.begin(state.window, kernel, states, is_first, rng_key, acceptance_rates)
        # A draw covers one length.
        one = jnp.ones_like(state.trajectory_length.value)
        length = state.trajectory_length.begun(states.position, one)
        return MAMSAdaptationState(window, length)

    def tuned(self, kernel: MAMS, state: MAMSAdaptationState) -> MAMS:
        """Return the kernel with the step size, length and metric of this moment."""
        return _with_length(self.by_window.tuned(kernel, state.window), state)

    def update(
        self, state: MAMSAdaptationState, kernel: MAMS, transition: Transition
    ) -> MAMSAdaptationState:
        """Take in one step of all chains."""
        window = self.by_window.update(state.window, kernel, transition)
        length = state.trajectory_length.updated(transition.after.position)
        return MAMSAdaptationState(window, length)

    def end(
        self,
        state: MAMSAdaptationState,
        kernel: MAMS,
        states: Any,
        learns_metric: bool,
    ) -> MAMSAdaptationState:
        """End a window: a new metric, or the length that suits."""
        window = self.by_window.end(state.window, kernel, states, learns_metric)
        length = state.trajectory_length
        if not learns_metric:
            distance = self.final(kernel, state).trajectory_length
            measured = LENGTH_FACTOR * batch_means.slowest_correlation_time(length.batches) * distance
            # Where the metric's units are the target's, no length that is shorter is better.
            least = length.value if self.learns_metric else 0
            length = length.ended(jnp.maximum(measured, least))
        return MAMSAdaptationState(window, length)

    def final(self, kernel: MAMS, state: MAMSAdaptationState) -> MAMS:
        """Return the kernel with the averaged step size."""
        return _with_length(self.by_window.final(kernel, state.window), state)


def _with_length(kernel: MAMS, state: MAMSAdaptationState) -> MAMS:
    """Return the kernel with the length of this moment."""
    length = jnp.minimum(state.trajectory_length.value, MOST_STEPS * kernel.step_size)
    return tree.replace(kernel, trajectory_length=length)
