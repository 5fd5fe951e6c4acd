"""Window adaptation: dual averaging of the step size all along, the metric in growing windows.

References
----------
Stan Reference Manual, "HMC algorithm parameters: automatic parameter tuning" (windowed adaptation);
Hoffman and Gelman, JMLR 15 (2014), algorithm 4 (the first step size).
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gspmd_mcmc.adaptation import dual_averaging, welford
from gspmd_mcmc.tree import PyTree, pytree

FAST_START, FAST_END, FIRST_SLOW = 75, 50, 25
MAX_DOUBLINGS = 60


class Window(NamedTuple):
    """Steps ``start`` to ``end`` of warm-up, in which the metric is learned or held."""

    start: int
    end: int
    learns_metric: bool


@pytree
@dataclass(frozen=True, eq=False)
class WindowState:
    """The recursion of the step size, and the moments of the positions in this window."""

    step_size: dual_averaging.DualAveragingState
    moments: welford.Moments


@dataclass(frozen=True)
class WindowAdaptation:
    """Settings of a warm-up, pooled over chains.

    Attributes
    ----------
    target_acceptance_rate
        The mean acceptance rate over chains that the step size aims at.
    adapt_mass_matrix
        Whether a diagonal inverse mass matrix is learned; else the kernel's own is kept.
    adapt_step_size
        Whether the step size is tuned; else the kernel's own is kept.
    first_step_factor
        What the step size that the first window's search finds is multiplied by. A quarter suits chains
        that start at a mode, where one leapfrog looks safer than it is elsewhere.
    """

    target_acceptance_rate: float = 0.8
    adapt_mass_matrix: bool = True
    adapt_step_size: bool = True
    first_step_factor: float = 1.0

    def __post_init__(self):
        if not 0 < self.target_acceptance_rate < 1:
            raise ValueError(
                "WindowAdaptation: target_acceptance_rate: expected a number between 0 and 1, got "
                f"{self.target_acceptance_rate}"
            )

    def started_at_mode(self) -> "WindowAdaptation":
        """Return settings for chains that start exactly at a mode."""
        return replace(self, first_step_factor=self.first_step_factor / 4)

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows: fast, slow ones that double, fast; scaled to short runs."""
        fast_start, fast_end = FAST_START, FAST_END
        if num_warmup < FAST_START + FAST_END + FIRST_SLOW:
            fast_start, fast_end = int(0.15 * num_warmup), int(0.1 * num_warmup)
        if not self.adapt_mass_matrix or num_warmup < 20:
            return [Window(0, num_warmup, False)] if num_warmup else []
        ends = _doubling_ends(fast_start, num_warmup - fast_end)
        slow = [Window(a, b, True) for a, b in zip([fast_start, *ends], ends, strict=False)]
        return [
            Window(0, fast_start, False),
            *slow,
            Window(num_warmup - fast_end, num_warmup, False),
        ]

    def init(self, step_size: jax.Array, positions: PyTree) -> WindowState:
        """Start a window from a step size and positions [chains, ...]."""
        return WindowState(
            step_size=dual_averaging.init(step_size),
            moments=welford.init(positions),
        )

    def update(self, state: WindowState, positions: PyTree, acceptance_rate: jax.Array) -> WindowState:
        """Take in one step of all chains: positions [chains, ...], acceptance rates [chains]."""
        mean_rate = jnp.mean(acceptance_rate)
        return WindowState(
            step_size=dual_averaging.update(state.step_size, mean_rate, self.target_acceptance_rate),
            moments=welford.update(state.moments, positions),
        )

    def tuned(self, kernel: Any, state: WindowState) -> Any:
        """Return the kernel with the step size of this moment of the recursion."""
        if not self.adapt_step_size:
            return kernel
        return kernel.with_step_size(jnp.exp(state.step_size.log_step_size))

    def final(self, kernel: Any, state: WindowState) -> Any:
        """Return the kernel with the averaged step size."""
        if not self.adapt_step_size:
            return kernel
        return kernel.with_step_size(dual_averaging.final_step_size(state.step_size))


def _doubling_ends(start: int, stop: int) -> list[int]:
    """Return the ends of windows of 25, 50, 100, ... steps; the last takes any short rest."""
    ends, length = [], min(FIRST_SLOW, stop - start)
    while start < stop:
        end = start + length
        if end + 2 * length > stop:
            end = stop
        ends.append(end)
        start, length = end, 2 * length
    return ends


def find_step_size(kernel: Any, rng_key: jax.Array, mean_acceptance_rate: Any) -> jax.Array:
    """Double or halve the step size until one leapfrog's acceptance rate crosses 0.8.

    Parameters
    ----------
    kernel
        The kernel of all chains.
    rng_key
        Each try draws from ``fold_in(rng_key, try)``.
    mean_acceptance_rate
        ``mean_acceptance_rate(kernel, rng_key)``: the mean over chains of one step's acceptance rate.
    """
    one_step = kernel.one_leapfrog()

    def rate(step_size, i):
        return mean_acceptance_rate(one_step.with_step_size(step_size), jax.random.fold_in(rng_key, i))

    grows = rate(kernel.step_size, 0) > 0.8
    factor = jnp.where(grows, 2.0, 0.5).astype(kernel.step_size.dtype)

    def crosses_not(carry):
        _, i, last = carry
        return (i < MAX_DOUBLINGS) & ((last > 0.8) == grows)

    def try_next(carry):
        step_size, i, _ = carry
        step_size = step_size * factor
        return step_size, i + 1, rate(step_size, i)

    start = (kernel.step_size, 1, jnp.where(grows, 1.0, 0.0))
    step_size, _, _ = jax.lax.while_loop(crosses_not, try_next, start)
    return jnp.where(grows, step_size / 2, step_size)
