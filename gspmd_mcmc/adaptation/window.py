"""Window adaptation: dual averaging of the step size throughout, the metric in growing windows.

References
----------
Stan Reference Manual, "HMC algorithm parameters: automatic parameter tuning" (windowed adaptation).
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import dual_averaging, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Adaptation, AnyKernel, Transition, Window, WindowStart
from gspmd_mcmc.adaptation.step_size_search import find_step_size
from gspmd_mcmc.kernels.hmc import HamiltonianKernel
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.tree import PyTree, each_chain, like_position, pytree, static

FAST_START, FAST_END, FIRST_SLOW = 75, 50, 25


@pytree
@dataclass(frozen=True, eq=False)
class WindowState:
    """The recursion of the step size, the metric, and what this window has seen."""

    step_size: dual_averaging.DualAveragingState
    inverse_mass_matrix: PyTree = like_position()
    moments: PyTree  # of the positions in this window
    rates: jax.Array = each_chain()  # recent acceptance rates, [chains]


@pytree
@dataclass(frozen=True, eq=False)
class WindowAdaptation(Adaptation):
    """Settings of a warm-up, pooled over chains: step size and metric.

    Parameters
    ----------
    target_acceptance_rate
        The target of the mean acceptance rate over chains that are not stuck.
    metric
        The kind of metric that is learned (`Diagonal`, `Dense`, `DenseBlock`, `LowRank`, `Rotated`).
        None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; otherwise the kernel keeps its own.
    adapt_step_size
        Whether the step size is tuned; otherwise the kernel keeps its own.
    first_step_factor
        A factor on the step size that the search of the first window finds. A quarter suits chains that
        start at a mode, where one leapfrog looks safer than it is elsewhere.
    """

    target_acceptance_rate: float = 0.8
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)
    adapt_step_size: bool = static(default=True)
    first_step_factor: float = 1.0

    default_for: ClassVar[type[HamiltonianKernel]] = HamiltonianKernel

    def __post_init__(self):
        dual_averaging.check_target(self)

    def from_mode(self) -> "WindowAdaptation":
        """Return the settings for chains that start exactly at a mode."""
        return replace(self, first_step_factor=self.first_step_factor / 4)

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows: fast, slow ones that double, fast; in short runs 15, 75, 10 %."""
        if not self.adapt_mass_matrix or num_warmup < 20:
            return super().windows(num_warmup)
        if num_warmup < FAST_START + FIRST_SLOW + FAST_END:
            slow_start = int(0.15 * num_warmup)
            slow_ends = [num_warmup - int(0.1 * num_warmup)]
        else:
            slow_start = FAST_START
            slow_ends = _doubling_ends(slow_start, num_warmup - FAST_END)
        learn_metric = [False, *[True] * len(slow_ends), False]
        return Window.cut([slow_start, *slow_ends, num_warmup], learn_metric)

    def prepare(self, kernel: AnyKernel, states: Any) -> AnyKernel:
        """Return the kernel with a first metric; raise a TypeError if it has no Metropolis test."""
        if not kernel.is_adjusted:
            raise TypeError(
                f"WindowAdaptation: {type(kernel).__name__} has no Metropolis test, and so no "
                "acceptance rate to tune by; use MCLMCAdaptation for MCLMC"
            )
        return super().prepare(kernel, states)

    def init(self, kernel: Kernel, states: Any) -> WindowState:
        """Return the state before any step."""
        return WindowState(
            step_size=dual_averaging.init(kernel.step_size),
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            moments=self.init_moments(states),
            rates=stuck_chains.no_rates(states.log_density),
        )

    def begin(self, state: WindowState, kernel: Kernel, states: Any, start: WindowStart) -> WindowState:
        """Begin a window: search for a step size with its metric, and reset the moments."""
        return self.restarted(state, states, self.searched_step_size(self.final(kernel, state), start))

    def searched_step_size(self, kernel: Kernel, start: WindowStart) -> jax.Array:
        """Return the step size that a window begins with, of a kernel with its metric."""
        if not self.adapt_step_size:
            return kernel.step_size
        found = find_step_size(kernel, start.rng_key, start.acceptance_rates)
        return found * jnp.where(start.is_first, self.first_step_factor, 1.0).astype(found.dtype)

    def restarted(self, state: WindowState, states: Any, step_size: jax.Array) -> WindowState:
        """Return the state of a window that begins with a step size."""
        return tree.replace(
            state, step_size=dual_averaging.init(step_size), moments=self.init_moments(states)
        )

    def tuned(self, kernel: AnyKernel, state: WindowState) -> AnyKernel:
        """Return the kernel with the current step size of the recursion."""
        return self._with(kernel, state, jnp.exp(state.step_size.log_step_size))

    def update(self, state: WindowState, kernel: Kernel, transition: Transition) -> WindowState:
        """Take in one step of all chains."""
        rates = transition.info.acceptance_rate
        return tree.replace(
            state,
            step_size=dual_averaging.update(
                state.step_size, _mean_rate(rates, state.rates), self.target_acceptance_rate
            ),
            moments=self.update_moments(state.moments, transition.after),
            rates=stuck_chains.recent_rates(state.rates, rates),
        )

    def end(self, state: WindowState, kernel: Kernel, states: Any, learns_metric: bool) -> WindowState:
        """End a window: learn the metric from its moments."""
        if not (learns_metric and self.learns_metric):
            return state
        metric = self.metric.final(state.moments, states.position)
        return tree.replace(state, inverse_mass_matrix=metric)

    def final(self, kernel: AnyKernel, state: WindowState) -> AnyKernel:
        """Return the kernel with the averaged step size."""
        return self._with(kernel, state, dual_averaging.final_step_size(state.step_size))

    def _with(self, kernel: AnyKernel, state: WindowState, step_size: jax.Array) -> AnyKernel:
        step_size = step_size if self.adapt_step_size else kernel.step_size
        metric = state.inverse_mass_matrix
        return tree.replace(kernel, step_size=step_size, inverse_mass_matrix=metric)


def _mean_rate(rates: jax.Array, recent: jax.Array) -> jax.Array:
    """Mean acceptance rate over the chains that are not stuck; one reduction over chains."""
    is_stuck = (recent < stuck_chains.STUCK_RATE).astype(rates.dtype)
    total, of_stuck, num_stuck = jnp.sum(jnp.stack([rates, is_stuck * rates, is_stuck]), axis=1)
    # Where half of them or more are stuck, the step size is what does not suit them.
    are_few = 2 * num_stuck < rates.size
    of_stuck, num_stuck = jnp.where(are_few, of_stuck, 0), jnp.where(are_few, num_stuck, 0)
    return (total - of_stuck) / (rates.size - num_stuck)


def _doubling_ends(start: int, stop: int) -> list[int]:
    """Return the ends of windows of 25, 50, 100, ... steps; the last one takes a short remainder."""
    ends, length = [], FIRST_SLOW
    while start < stop:
        end = start + length
        if end + 2 * length > stop:
            end = stop
        ends.append(end)
        start, length = end, 2 * length
    return ends
