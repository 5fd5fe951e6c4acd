"""Warm-up of microcanonical Langevin Monte Carlo: step size, decoherence length and metric.

Without a Metropolis test there is no acceptance rate to aim at. What is held small is the variance of a
step's energy error, by dimension: it bounds the bias, and grows as the sixth power of the step size.

References
----------
Robnik, De Luca, Silverstein and Seljak, "Microcanonical Hamiltonian Monte Carlo", JMLR 24 (2023),
section 4; Robnik and Seljak, "Fluctuation without dissipation: microcanonical Langevin Monte
Carlo" (2024).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import correlation
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Transition, Window
from gspmd_mcmc.adaptation.correlation import Length
from gspmd_mcmc.adaptation.window import first_metric
from gspmd_mcmc.kernels.mclmc import MCLMC
from gspmd_mcmc.tree import PyTree, pytree, static

# The recursion of the step size remembers so many steps, and listens less to a step whose squared error
# is far from what is desired, by its logarithm in units of TRUST.
MEMORY = 150
TRUST = 1.5
GREATEST_ERROR, LEAST_RATIO = 1e6, 1e-8
# After a refused step the step size may not grow at once to what was refused.
RECOVERY = 1.02
# In burn-in chains fall: the direction is forgotten in two steps, so that what is gained is not climbed
# again on the other side, an error as large as what a step gains is allowed, and memory is short.
FIRST_STEPS = 2
MEMORY_IN_BURN_IN = 5
# L over the distance that one independent draw takes, as in the reference.
LENGTH_FACTOR = 0.4


@pytree
@dataclass(frozen=True, eq=False)
class StepSize:
    """The recursion of the step size."""

    value: jax.Array
    weight: jax.Array  # of the steps that are remembered
    most: jax.Array  # that is allowed after a refused step


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCAdaptationState:
    """The recursion of the step size, the length, the metric, and what this window has seen."""

    step_size: StepSize
    trajectory_length: Length
    inverse_mass_matrix: PyTree
    moments: PyTree


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCAdaptation:
    """Settings of a warm-up of `MCLMC`, pooled over chains.

    The length is two steps in burn-in, sqrt(d) in units of the metric once that is learned, and in
    the end 0.4 times the distance that one independent draw takes.

    Parameters
    ----------
    energy_variance
        The variance of a step's energy error, by dimension, that the step size aims at. Smaller is less
        bias; the step size goes with its sixth root.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; else the kernel's own is kept, and its units are taken for the
        target's scales.
    """

    energy_variance: float = 5e-4
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)

    needs_end: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    def __post_init__(self):
        if not self.energy_variance > 0:
            raise ValueError(
                "MCLMCAdaptation: energy_variance: expected a positive number, got "
                f"{self.energy_variance}"
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
            If the kernel is not `MCLMC`.
        """
        if not isinstance(kernel, MCLMC):
            raise TypeError(
                f"MCLMCAdaptation: expected an MCLMC kernel, got {type(kernel).__name__}; use "
                "WindowAdaptation, or MAMSAdaptation for MAMS"
            )
        return first_metric(self.metric, kernel, states.position) if self.learns_metric else kernel

    def init(self, kernel: MCLMC, states: Any) -> MCLMCAdaptationState:
        """Return the state before any step."""
        return MCLMCAdaptationState(
            step_size=_restarted(kernel.step_size),
            trajectory_length=Length.first(kernel, states.position),
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            moments=self._no_moments(states),
        )

    def begin(
        self,
        state: MCLMCAdaptationState,
        kernel: MCLMC,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> MCLMCAdaptationState:
        """Begin a window: forget its moments; the first one guesses a step size from the gradients."""
        count = correlation.dimension_of_chain(kernel, states.position)
        guess = correlation.first_step_size(kernel, states, count)
        step_size = tree.where(is_first, _restarted(guess), state.step_size)
        lengths = step_size.value / state.trajectory_length.now(FIRST_STEPS * step_size.value)
        return tree.replace(
            state,
            step_size=step_size,
            trajectory_length=state.trajectory_length.begun(states.position, lengths),
            moments=self._no_moments(states),
        )

    def tuned(self, kernel: MCLMC, state: MCLMCAdaptationState) -> MCLMC:
        """Return the kernel with the step size, length and metric of this moment."""
        return tree.replace(
            kernel,
            step_size=state.step_size.value,
            trajectory_length=state.trajectory_length.now(FIRST_STEPS * state.step_size.value),
            inverse_mass_matrix=state.inverse_mass_matrix,
        )

    def update(
        self, state: MCLMCAdaptationState, kernel: MCLMC, transition: Transition
    ) -> MCLMCAdaptationState:
        """Take in one step of all chains; three numbers are summed over them."""
        positions = transition.after.position
        count = correlation.dimension_of_chain(kernel, positions)
        gain = transition.after.log_density - transition.before.log_density
        in_burn_in = state.trajectory_length.phase == correlation.BURN_IN
        desired = self.energy_variance * count + jnp.where(in_burn_in, gain, 0) ** 2
        memory = jnp.where(in_burn_in, MEMORY_IN_BURN_IN, MEMORY)
        moments = state.moments
        if self.learns_metric:
            moments = self.metric.update(moments, positions)
        return tree.replace(
            state,
            step_size=_updated(state.step_size, transition.info, desired, memory),
            moments=moments,
            trajectory_length=state.trajectory_length.updated(positions),
        )

    def end(
        self,
        state: MCLMCAdaptationState,
        kernel: MCLMC,
        states: Any,
        rng_key: jax.Array,
        learns_metric: bool,
    ) -> tuple[MCLMCAdaptationState, Any]:
        """End a window: a new metric, or the length that suits the one there is."""
        count = correlation.dimension_of_chain(kernel, states.position)
        if learns_metric and self.learns_metric:
            return self._with_metric(state, kernel, states, count), states
        length = state.trajectory_length.ended(count, state.step_size.value, LENGTH_FACTOR)
        return tree.replace(state, trajectory_length=length), states

    def final(self, kernel: MCLMC, state: MCLMCAdaptationState) -> MCLMC:
        """Return the kernel to keep: that of the last moment, whose memory is an average."""
        return self.tuned(kernel, state)

    def _with_metric(
        self, state: MCLMCAdaptationState, kernel: MCLMC, states: Any, dimension: int
    ) -> MCLMCAdaptationState:
        """Learn the metric; the step size is to turn directions as much as in the old one."""
        metric = self.metric.final(state.moments, states.position)
        change = correlation.change_of_scale(self.tuned(kernel, state), metric, states)
        return tree.replace(
            state,
            step_size=_restarted(change * state.step_size.value),
            trajectory_length=state.trajectory_length.scaled(dimension),
            inverse_mass_matrix=metric,
        )

    def _no_moments(self, states: Any) -> PyTree:
        return self.metric.init(states.position) if self.learns_metric else ()


def _restarted(step_size: jax.Array) -> StepSize:
    """Forget all but the step size."""
    return StepSize(
        value=step_size, weight=jnp.zeros_like(step_size), most=jnp.full_like(step_size, jnp.inf)
    )


def _updated(step_size: StepSize, info: Any, desired: jax.Array, memory: jax.Array) -> StepSize:
    """Move the step size by the squared energy errors of one step of all chains, [chains].

    With ξ the squared error over the desired variance, [chains] too, the step size that would have
    given ξ = 1 is ε ξ^(-1/6). What is remembered has ξ = 1 at the step size of this moment: so that was
    chosen.
    """
    is_made = ~info.is_divergent
    ratios = jnp.minimum(jnp.abs(info.energy_error), GREATEST_ERROR) ** 2 / desired + LEAST_RATIO
    weights = jnp.where(is_made, jnp.exp(-0.5 * (jnp.log(ratios) / (6 * TRUST)) ** 2), 0)
    weighted, weight, refused = jnp.mean(jnp.stack([weights * ratios, weights, 1.0 - is_made]), axis=1)

    remembered = (memory - 1) / (memory + 1) * step_size.weight
    total = remembered + weight
    change = (remembered + weighted) / jnp.where(total > 0, total, 1)
    factor = jnp.where(total > 0, change ** (-1 / 6), 1)
    shrunk = step_size.value * (1 - refused / 2)
    most = jnp.where(refused > 0, shrunk, RECOVERY * step_size.most)
    kept = StepSize(value=jnp.minimum(step_size.value * factor, most), weight=total, most=most)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), kept, step_size)
