"""Window adaptation: dual averaging of the step size all along, the metric in growing windows.

References
----------
Stan Reference Manual, "HMC algorithm parameters: automatic parameter tuning" (windowed adaptation).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import dual_averaging, stuck_chains
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Adaptation, Transition, Window
from gspmd_mcmc.adaptation.step_size_search import find_step_size
from gspmd_mcmc.kernels.mclmc import MCLMC
from gspmd_mcmc.tree import PyTree, each_chain, like_position, pytree, static

FAST_START, FAST_END, FIRST_SLOW = 75, 50, 25


@pytree
@dataclass(frozen=True, eq=False)
class WindowState:
    """The recursion of the step size, the metric, and what this window has seen.

    Attributes
    ----------
    step_size
        The recursion.
    inverse_mass_matrix
        The metric to step with.
    moments
        Of the positions of this window.
    rates
        Each chain's recent acceptance rate, [chains].
    """

    step_size: dual_averaging.DualAveragingState
    inverse_mass_matrix: PyTree = like_position()
    moments: PyTree
    rates: jax.Array = each_chain()


@pytree
@dataclass(frozen=True, eq=False)
class WindowAdaptation(Adaptation):
    """Settings of a warm-up, pooled over chains: step size and metric.

    Parameters
    ----------
    target_acceptance_rate
        The mean acceptance rate, over chains that are not stuck, that the step size aims at.
    metric
        The kind of metric that is learned (`Diagonal`, `Dense`, `DenseBlock`, `LowRank`, `Rotated`).
        None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; else the kernel's own is kept.
    adapt_step_size
        Whether the step size is tuned; else the kernel's own is kept.
    first_step_factor
        What the step size that the first window's search finds is multiplied by. A quarter suits chains
        that start at a mode, where one leapfrog looks safer than it is elsewhere.
    """

    target_acceptance_rate: float = 0.8
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)
    adapt_step_size: bool = static(default=True)
    first_step_factor: float = 1.0

    def __post_init__(self):
        if not 0 < self.target_acceptance_rate < 1:
            raise ValueError(
                "WindowAdaptation: target_acceptance_rate: expected a number between 0 and 1, got "
                f"{self.target_acceptance_rate}"
            )

    @property
    def learns_metric(self) -> bool:
        """Whether there is a metric to learn, and an estimator to learn it with."""
        return self.adapt_mass_matrix and self.metric is not None

    def from_mode(self) -> "WindowAdaptation":
        """Return the settings for chains that start exactly at a mode."""
        return replace(self, first_step_factor=self.first_step_factor / 4)

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows: fast, slow ones that double, fast; scaled to short runs."""
        return windows(num_warmup, self.adapt_mass_matrix)

    def prepare(self, kernel: Any, states: Any) -> Any:
        """Return the kernel with a first metric, if one is to be learned.

        Raises
        ------
        TypeError
            If the kernel is `MCLMC`, which has no acceptance rate to aim at.
        """
        if isinstance(kernel, MCLMC):
            raise TypeError(
                "WindowAdaptation: MCLMC has no Metropolis test, and so no acceptance rate to tune by; "
                "use MCLMCAdaptation"
            )
        if not self.learns_metric:
            return kernel
        return first_metric(self.metric, kernel, states.position)

    def init(self, kernel: Any, states: Any) -> WindowState:
        """Return the state before any step."""
        return WindowState(
            step_size=dual_averaging.init(kernel.step_size),
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            moments=self._no_moments(states),
            rates=stuck_chains.no_rates(states.log_density),
        )

    def begin(
        self,
        state: WindowState,
        kernel: Any,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> WindowState:
        """Begin a window: search a step size for its metric, and forget the moments."""
        if not self.adapt_step_size:
            return self.restarted(state, states, kernel.step_size)
        found = find_step_size(self.final(kernel, state), rng_key, acceptance_rates)
        factor = jnp.where(is_first, self.first_step_factor, 1.0).astype(found.dtype)
        return self.restarted(state, states, found * factor)

    def restarted(self, state: WindowState, states: Any, step_size: jax.Array) -> WindowState:
        """Return the state of a window that begins with a step size."""
        return tree.replace(
            state, step_size=dual_averaging.init(step_size), moments=self._no_moments(states)
        )

    def tuned(self, kernel: Any, state: WindowState) -> Any:
        """Return the kernel with the step size of this moment of the recursion."""
        return self._with(kernel, state, jnp.exp(state.step_size.log_step_size))

    def update(self, state: WindowState, kernel: Any, transition: Transition) -> WindowState:
        """Take in one step of all chains."""
        rates = transition.info.acceptance_rate
        moments = state.moments
        if self.learns_metric:
            moments = self.metric.update(moments, transition.after.position)
        return tree.replace(
            state,
            step_size=dual_averaging.update(
                state.step_size, _mean_rate(rates, state.rates), self.target_acceptance_rate
            ),
            moments=moments,
            rates=stuck_chains.recent_rates(state.rates, rates),
        )

    def end(self, state: WindowState, kernel: Any, states: Any, learns_metric: bool) -> WindowState:
        """End a window: the metric is that of its moments."""
        if not (learns_metric and self.learns_metric):
            return state
        metric = self.metric.final(state.moments, states.position)
        return tree.replace(state, inverse_mass_matrix=metric)

    def final(self, kernel: Any, state: WindowState) -> Any:
        """Return the kernel with the averaged step size."""
        return self._with(kernel, state, dual_averaging.final_step_size(state.step_size))

    def _with(self, kernel: Any, state: WindowState, step_size: jax.Array) -> Any:
        step_size = step_size if self.adapt_step_size else kernel.step_size
        metric = state.inverse_mass_matrix
        return tree.replace(kernel, step_size=step_size, inverse_mass_matrix=metric)

    def _no_moments(self, states: Any) -> PyTree:
        return self.metric.init(states.position) if self.learns_metric else ()


def _mean_rate(rates: jax.Array, recent: jax.Array) -> jax.Array:
    """Mean acceptance rate over the chains that are not stuck; one reduction over chains."""
    is_stuck = (recent < stuck_chains.STUCK_RATE).astype(rates.dtype)
    total, of_stuck, num_stuck = jnp.sum(jnp.stack([rates, is_stuck * rates, is_stuck]), axis=1)
    # Where half are stuck or more, it is the step size that does not suit them.
    are_few = 2 * num_stuck < rates.size
    of_stuck, num_stuck = jnp.where(are_few, of_stuck, 0), jnp.where(are_few, num_stuck, 0)
    return (total - of_stuck) / (rates.size - num_stuck)


def first_metric(estimator: Any, kernel: Any, positions: PyTree) -> Any:
    """Return the kernel with a metric of the structure that its estimator learns.

    A metric of that structure which the kernel has already stays as the first.

    Raises
    ------
    ValueError
        If the kernel's own metric is of another kind.
    """
    identity = jax.eval_shape(estimator.identity, positions)
    own = kernel.inverse_mass_matrix
    if own is None:
        return kernel.with_inverse_mass_matrix(estimator.identity(positions))
    if jax.tree.map(jnp.shape, own) != jax.tree.map(jnp.shape, identity):
        raise ValueError(
            f"inverse_mass_matrix: the kernel has one that is not of the kind that {estimator} learns; "
            "leave the kernel's out, learn another kind, or keep it by adapt_mass_matrix=False"
        )
    return kernel


def windows(num_warmup: int, adapt_mass_matrix: bool = True) -> list[Window]:
    """Cut warm-up into windows: fast, slow ones that double, fast; scaled to short runs."""
    fast_start, fast_end = FAST_START, FAST_END
    if num_warmup < FAST_START + FAST_END + FIRST_SLOW:
        fast_start, fast_end = int(0.15 * num_warmup), int(0.1 * num_warmup)
    if not adapt_mass_matrix or num_warmup < 20:
        return [Window(0, num_warmup, False)] if num_warmup else []
    ends = _doubling_ends(fast_start, num_warmup - fast_end)
    slow = [Window(a, b, True) for a, b in zip([fast_start, *ends], ends, strict=False)]
    return [
        Window(0, fast_start, False),
        *slow,
        Window(num_warmup - fast_end, num_warmup, False),
    ]


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
