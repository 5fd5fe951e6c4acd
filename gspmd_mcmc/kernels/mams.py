"""The Metropolis-adjusted microcanonical sampler: isokinetic trajectories, each put to the test.

References
----------
Robnik, Cohn-Gordon and Seljak, "Metropolis adjusted microcanonical Hamiltonian Monte Carlo", arXiv
2503.01707 (2025).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import hmc, isokinetic, settings
from gspmd_mcmc.kernels.hmc import DIVERGENT_ENERGY_ERROR, HMCState
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.isokinetic import MINIMAL_NORM, Span, Splitting
from gspmd_mcmc.kernels.jittered_hmc import spread
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets import checks, local
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields, static

MOST_STEPS = 1_000_000  # of a trajectory


@pytree
@dataclass(frozen=True, eq=False)
class MAMSInfo(Info):
    """What one transition of `MAMS` did; see `Info`.

    ``energy`` is the negative log density at the start, and the energy error if the proposal was
    accepted: a trajectory starts with no kinetic energy. ``energy_error`` is the change of the kinetic
    energy less that of the log density.
    """


@pytree
@dataclass(frozen=True, eq=False, init=False)
class MAMS(Kernel):
    """Microcanonical trajectories of one length for all chains, with a Metropolis test.

    A pytree that holds its target, as `HMC` is; other numbers compile nothing anew.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or any pytree with `terms`, `grad` and `terms_and_grad`, of two
        dimensions or more.
    step_size
        The distance of an integrator's step, in units of the metric: the speed is 1. About
        sqrt(d) times what it would be for `HMC`, where speeds are about sqrt(d).
    trajectory_length
        The distance of a trajectory, on average; a whole number of steps, at least one, is taken.
        About sqrt(d) for a target whose scales the metric knows.
    inverse_mass_matrix
        A tree like the position (diagonal), a metric object, or None (identity).
    jitter
        Between 0 and 1. `sample` spreads the lengths of its steps, each the same for all chains, evenly
        over (1 ± jitter) times ``trajectory_length``; `step` itself never does.
    splitting
        `MINIMAL_NORM`, two gradients an integrator's step, or `LEAPFROG`, one. Static.
    """

    target: Any
    step_size: jax.Array
    trajectory_length: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    jitter: jax.Array
    splitting: Splitting = static()
    is_per_chain: bool = static(default=False)

    def __init__(
        self,
        target: Any,
        step_size: float | jax.Array,
        trajectory_length: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        jitter: float | jax.Array = 1.0,
        splitting: Splitting = MINIMAL_NORM,
    ):
        settings.require_target("MAMS", target)
        settings.require("MAMS", "jitter", jitter, lambda x: 0 <= x <= 1, "a number between 0 and 1")
        set_fields(
            self,
            target=target,
            step_size=settings.step_size_of("MAMS", step_size),
            trajectory_length=isokinetic.length_of("MAMS", trajectory_length),
            inverse_mass_matrix=settings.metric_of("MAMS", target, inverse_mass_matrix),
            jitter=settings.strong(jitter, float),
            splitting=splitting,
        )

    def with_trajectory_length(self, trajectory_length: float | jax.Array) -> "MAMS":
        """Return the kernel with trajectories of another length; nothing compiles anew."""
        return tree.replace(self, trajectory_length=isokinetic.length_of("MAMS", trajectory_length))

    def one_leapfrog(self) -> "MAMS":
        """Return the kernel whose trajectories are one step: what a first step size is tried with."""
        return tree.replace(self, trajectory_length=jnp.zeros_like(self.trajectory_length))

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "MAMS":
        """Return the kernel of one step: the length of its trajectories, for all chains at once.

        It comes from the van der Corput sequence at the step's number, as in `JitteredHMC`: 2^k steps
        in a row see 2^k lengths evenly spread. The key is not used.
        """
        length = spread(step, self.jitter) * self.trajectory_length
        return tree.replace(self, trajectory_length=length)

    @init_anywhere
    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position; errors are those of `HMC.init`.

        Raises
        ------
        ValueError
            If the position has one dimension alone.
        """
        state = hmc.init("MAMS", self.target, self.inverse_mass_matrix, position)
        isokinetic.dimension("MAMS", self.target, state.position)
        return state

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, MAMSInfo]:
        """One transition: a fresh direction, a trajectory, a Metropolis test."""
        checks.check_not_baked(self.target)
        direction_key, accept_key = jax.random.split(rng_key)
        momentum = self.direction(direction_key, state)
        start = PhasePoint(state.position, momentum, state.log_density_grad)
        num_steps = self._num_steps()
        end, terms, gain = self.trajectory(start, num_steps)
        proposal, energy_error = self._propose(state, end, terms, gain)

        is_accepted = jnp.log(jax.random.uniform(accept_key, dtype=energy_error.dtype)) < -energy_error
        info = MAMSInfo(
            acceptance_rate=jnp.exp(jnp.minimum(0, -energy_error)),
            is_accepted=is_accepted,
            is_divergent=~(energy_error <= DIVERGENT_ENERGY_ERROR),
            energy=jnp.where(is_accepted, energy_error, 0) - state.log_density,
            energy_error=energy_error,
            num_integration_steps=num_steps * len(self.splitting.drifts),
        )
        return tree.where(is_accepted, proposal, state), info

    def direction(self, rng_key: jax.Array, state: HMCState) -> PyTree:
        """Draw a momentum with p·M⁻¹p = 1, uniform over directions."""
        noise = metrics.sample_momentum(rng_key, self.inverse_mass_matrix, state.position)
        span = Span.of(self.inverse_mass_matrix, local.zero_pad(self.target, noise))
        return span.combine(span.momentum())

    def trajectory(
        self, start: PhasePoint, num_steps: jax.Array
    ) -> tuple[PhasePoint, PyTree, jax.Array]:
        """Integrate isokinetic dynamics from a unit momentum; return the end, its terms, and ΔK."""
        return isokinetic.integrate(
            self.target,
            self.inverse_mass_matrix,
            self.splitting,
            start,
            self.step_size,
            num_steps,
        )

    def _num_steps(self) -> jax.Array:
        steps = jnp.round(self.trajectory_length / self.step_size)
        # The clip is before the cast, which would wrap; a length of no number asks for one step.
        return jnp.where(steps >= 1, jnp.minimum(steps, MOST_STEPS), 1).astype(jnp.int32)

    def _propose(
        self, state: HMCState, end: PhasePoint, terms: PyTree, gain: jax.Array
    ) -> tuple[HMCState, jax.Array]:
        """Return the state at a trajectory's end, and ΔE = ΔK - Σ(terms′ - terms).

        Differences are taken term by term, before any sum, as in `HMC`.
        """
        energy_error = gain - tree.total(tree.sub(terms, state.terms))
        proposal = HMCState(
            position=end.position,
            log_density=tree.total(terms),
            log_density_grad=end.log_density_grad,
            terms=terms,
        )
        # A log density of +inf is as wrong as NaN, and would never be left again.
        return proposal, jnp.where(jnp.isfinite(energy_error), energy_error, jnp.inf)
