"""Warm-up of the Metropolis-adjusted microcanonical sampler: step size, trajectory length and metric.

References
----------
Robnik, Cohn-Gordon and Seljak, "Metropolis adjusted microcanonical Hamiltonian Monte Carlo", arXiv
2503.01707 (2025).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import batch_means, dual_averaging
from gspmd_mcmc.adaptation.adaptation import Transition, WindowStart
from gspmd_mcmc.adaptation.batch_means import Length
from gspmd_mcmc.adaptation.hmc_burn_in import AfterHMCBurnIn
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState
from gspmd_mcmc.kernels.mams import MAMS
from gspmd_mcmc.tree import pytree, static

# The length over the distance in which the slowest leaf gives one independent draw. On four posteriors
# and a Gaussian it gave at least 4/5 of the least effective size per gradient of the best length.
LENGTH_FACTOR = 1 / 3
# The largest number of steps of a trajectory, in warm-up and after it.
MOST_STEPS = 1000


@pytree
@dataclass(frozen=True, eq=False)
class MAMSTuning:
    """The tuning of step size and metric, and the length."""

    window: WindowState
    trajectory_length: Length


@pytree
@dataclass(frozen=True, eq=False)
class MAMSAdaptation(AfterHMCBurnIn):
    """Settings of a warm-up of `MAMS`, pooled over chains.

    The first tenth is a burn-in by HMC. Then step size and metric are tuned as in `WindowAdaptation`;
    the mean length of trajectories is sqrt(d) π/2 in units of the metric, a quarter of the period of a
    coordinate of that scale. At the end it becomes a third of the distance in which the slowest leaf
    gives one independent draw, where that is longer or the metric is not learned; at most 1000 steps.

    Parameters
    ----------
    target_acceptance_rate
        The target of the mean acceptance rate over chains that are not stuck.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; otherwise the kernel keeps its own, whose units are taken as the
        scales of the target.
    """

    target_acceptance_rate: float = 0.9
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)

    kernel_type: ClassVar[type[MAMS]] = MAMS
    default_for: ClassVar[type[MAMS]] = MAMS
    first_length: ClassVar[float] = math.pi / 2

    def __post_init__(self):
        dual_averaging.check_target(self)

    @property
    def by_window(self) -> WindowAdaptation:
        """How step size and metric are tuned."""
        # The rate may be traced, and a constructor could not check it.
        return tree.replace(self.by_hmc, target_acceptance_rate=self.target_acceptance_rate)

    def init(self, kernel: MAMS, states: Any) -> MAMSTuning:
        """Return the state after the burn-in."""
        window = self.by_window.init(self.arrived(kernel, states), states)
        return MAMSTuning(window, Length.first(kernel, states.position))

    def begin(self, state: MAMSTuning, kernel: MAMS, states: Any, start: WindowStart) -> MAMSTuning:
        """Begin a window: search for a step size with its metric, and reset the moments."""
        window = self.by_window.begin(state.window, kernel, states, start)
        one_length = jnp.ones_like(state.trajectory_length.value)
        length = state.trajectory_length.begun(states.position, lengths_per_draw=one_length)
        return MAMSTuning(window, length)

    def tuned(self, kernel: MAMS, state: MAMSTuning) -> MAMS:
        """Return the kernel with the current step size, length and metric."""
        return _with_length(self.by_window.tuned(kernel, state.window), state)

    def update(self, state: MAMSTuning, kernel: MAMS, transition: Transition) -> MAMSTuning:
        """Take in one step of all chains."""
        window = self.by_window.update(state.window, kernel, transition)
        length = state.trajectory_length.updated(transition.after.position)
        return MAMSTuning(window, length)

    def end(self, state: MAMSTuning, kernel: MAMS, states: Any, learns_metric: bool) -> MAMSTuning:
        """End a window: learn the metric, or measure the length."""
        window = self.by_window.end(state.window, kernel, states, learns_metric)
        length = state.trajectory_length
        if not learns_metric:
            distance = self.final(kernel, state).trajectory_length
            time = batch_means.slowest_correlation_time(length.batches, kernel.target)
            measured = LENGTH_FACTOR * time * distance
            # Where the units of the metric are those of the target, no shorter length is better.
            least = length.value if self.learns_metric else 0
            length = length.ended(jnp.maximum(measured, least))
        return MAMSTuning(window, length)

    def final(self, kernel: MAMS, state: MAMSTuning) -> MAMS:
        """Return the kernel with the averaged step size."""
        return _with_length(self.by_window.final(kernel, state.window), state)


def _with_length(kernel: MAMS, state: MAMSTuning) -> MAMS:
    """Return the kernel with the current length."""
    length = jnp.minimum(state.trajectory_length.value, MOST_STEPS * kernel.step_size)
    return tree.replace(kernel, trajectory_length=length)
