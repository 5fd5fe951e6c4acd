"""Warm-up of microcanonical Langevin Monte Carlo: step size, decoherence length and metric.

Without a Metropolis test there is no acceptance rate. The target is instead a small variance of the
energy error of a step, per dimension: it bounds the bias, and grows as the sixth power of the step
size.

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
from gspmd_mcmc.adaptation import batch_means, stuck_chains
from gspmd_mcmc.adaptation.adaptation import Transition, WindowStart
from gspmd_mcmc.adaptation.batch_means import Length
from gspmd_mcmc.adaptation.dual_averaging import LEAST_STEP_SIZE, MOST_STEP_SIZE
from gspmd_mcmc.adaptation.hmc_burn_in import AfterHMCBurnIn
from gspmd_mcmc.kernels.mclmc import MCLMC
from gspmd_mcmc.tree import PyTree, each_chain, like_position, pytree, static

# The recursion of the step size remembers this many steps, and gives less weight to a step whose
# squared error is far from the target, by its logarithm in units of TRUST.
MEMORY = 150
TRUST = 1.5
GREATEST_ERROR, LEAST_RATIO = 1e6, 1e-8
# After a refused step the step size grows back only slowly to the one that was refused.
RECOVERY = 1.02
# L over the distance of one independent draw, as in the reference.
LENGTH_FACTOR = 0.4


@pytree
@dataclass(frozen=True, eq=False)
class StepSize:
    """The recursion of the step size."""

    value: jax.Array
    weight: jax.Array  # of the steps that are remembered
    most: jax.Array  # after a refused step


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCTuning:
    """The recursion of the step size, the length, the metric, and what this window has seen."""

    step_size: StepSize
    trajectory_length: Length
    inverse_mass_matrix: PyTree = like_position()
    moments: PyTree
    rates: jax.Array = each_chain()  # recent fractions of steps that it has made, [chains]


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCAdaptation(AfterHMCBurnIn):
    """Settings of a warm-up of `MCLMC`, pooled over chains.

    The first tenth is a burn-in by HMC. Then the length is sqrt(d) in units of the metric, and at the
    end 0.4 times the distance of one independent draw.

    Parameters
    ----------
    energy_variance
        The target of the variance of the energy error of a step, per dimension. A smaller one gives
        less bias; the step size is proportional to its sixth root.
    metric
        The kind of metric that is learned (`Diagonal`, ...). None leaves the choice to `sample`.
    adapt_mass_matrix
        Whether a metric is learned; otherwise the kernel keeps its own, whose units are taken as the
        scales of the target.
    """

    energy_variance: float = 5e-4
    metric: Any = None
    adapt_mass_matrix: bool = static(default=True)

    kernel_type: ClassVar[type[MCLMC]] = MCLMC
    default_for: ClassVar[type[MCLMC]] = MCLMC

    def __post_init__(self):
        if not self.energy_variance > 0:
            raise ValueError(
                "MCLMCAdaptation: energy_variance: expected a positive number, got "
                f"{self.energy_variance}"
            )

    def init(self, kernel: MCLMC, states: Any) -> MCLMCTuning:
        """Return the state after the burn-in."""
        return MCLMCTuning(
            step_size=_restarted(self.arrived(kernel, states).step_size),
            trajectory_length=Length.first(kernel, states.position),
            inverse_mass_matrix=kernel.inverse_mass_matrix,
            moments=self.init_moments(states),
            rates=stuck_chains.no_rates(states.log_density),
        )

    def begin(self, state: MCLMCTuning, kernel: MCLMC, states: Any, start: WindowStart) -> MCLMCTuning:
        """Begin a window: reset the moments."""
        lengths_per_draw = state.step_size.value / state.trajectory_length.value
        return tree.replace(
            state,
            trajectory_length=state.trajectory_length.begun(states.position, lengths_per_draw),
            moments=self.init_moments(states),
        )

    def tuned(self, kernel: MCLMC, state: MCLMCTuning) -> MCLMC:
        """Return the kernel with the current step size, length and metric."""
        return tree.replace(
            kernel,
            step_size=state.step_size.value,
            trajectory_length=state.trajectory_length.value,
            inverse_mass_matrix=state.inverse_mass_matrix,
        )

    def update(self, state: MCLMCTuning, kernel: MCLMC, transition: Transition) -> MCLMCTuning:
        """Take in one step of all chains; a few numbers are summed over them, once."""
        positions = transition.after.position
        desired = self.energy_variance * batch_means.dimension_of_chain(kernel, positions)
        return tree.replace(
            state,
            step_size=_updated(state.step_size, transition.info, desired, state.rates),
            moments=self.update_moments(state.moments, transition.after),
            trajectory_length=state.trajectory_length.updated(positions),
            rates=stuck_chains.recent_rates(state.rates, transition.info.acceptance_rate),
        )

    def end(self, state: MCLMCTuning, kernel: MCLMC, states: Any, learns_metric: bool) -> MCLMCTuning:
        """End a window: learn the metric, or measure the length."""
        if learns_metric and not self.learns_metric:
            return state
        if learns_metric:
            metric = self.metric.final(state.moments, states.position)
            # The new step size turns directions as much as the old one did.
            change = batch_means.change_of_scale(self.tuned(kernel, state), metric, states)
            step_size = _restarted(change * state.step_size.value)
            return tree.replace(state, step_size=step_size, inverse_mass_matrix=metric)
        count = batch_means.dimension_of_chain(kernel, states.position)
        time = batch_means.correlation_time(state.trajectory_length.batches, kernel.target, count)
        length = state.trajectory_length.ended(LENGTH_FACTOR * time * state.step_size.value)
        return tree.replace(state, trajectory_length=length)


def _restarted(step_size: jax.Array) -> StepSize:
    """Reset the recursion to a step size."""
    return StepSize(step_size, jnp.zeros_like(step_size), jnp.full_like(step_size, jnp.inf))


def _updated(step_size: StepSize, info: Any, desired: jax.Array | float, recent: jax.Array) -> StepSize:
    """Move the step size by the squared energy errors of one step of all chains, [chains].

    With ξ the squared error over the desired variance, the step size that would have given ξ = 1 is
    ε ξ^(-1/6). The remembered steps have ξ = 1 at the current step size, by its choice. Stuck chains,
    by their recent rates [chains], do not make it smaller.
    """
    is_made = ~info.is_divergent
    ratios = jnp.minimum(jnp.abs(info.energy_error), GREATEST_ERROR) ** 2 / desired + LEAST_RATIO
    weights = jnp.where(is_made, jnp.exp(-0.5 * (jnp.log(ratios) / (6 * TRUST)) ** 2), 0)
    is_stuck = recent < stuck_chains.STUCK_RATE
    rows = [weights * ratios, weights, ~is_made, is_stuck, ~is_made & is_stuck]
    rows = jnp.stack([x.astype(ratios.dtype) for x in rows])
    weighted, weight, refused, stuck, both = jnp.mean(rows, axis=1)
    # A stuck chain refuses any step; where half or more are stuck, the step size does not suit them.
    refused = refused - jnp.where(stuck < 0.5, both, 0)

    remembered = (MEMORY - 1) / (MEMORY + 1) * step_size.weight
    total = remembered + weight
    change = (remembered + weighted) / jnp.where(total > 0, total, 1)
    factor = jnp.where(total > 0, change ** (-1 / 6), 1)
    shrunk = step_size.value * (1 - refused / 2)
    most = jnp.where(refused > 0, shrunk, RECOVERY * step_size.most)
    value = jnp.clip(jnp.minimum(step_size.value * factor, most), LEAST_STEP_SIZE, MOST_STEP_SIZE)
    kept = StepSize(value=value, weight=total, most=most)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), kept, step_size)
