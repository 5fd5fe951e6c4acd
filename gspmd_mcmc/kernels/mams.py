"""The Metropolis-adjusted microcanonical sampler: isokinetic trajectories, each with a Metropolis test.

References
----------
Robnik, Cohn-Gordon and Seljak, "Metropolis adjusted microcanonical Hamiltonian Monte Carlo", arXiv
2503.01707 (2025).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import hmc, isokinetic
from gspmd_mcmc.kernels.hmc import HMCState
from gspmd_mcmc.kernels.integrators import MINIMAL_NORM, PhasePoint, Splitting
from gspmd_mcmc.kernels.isokinetic import Span
from gspmd_mcmc.kernels.jittered_hmc import spread
from gspmd_mcmc.kernels.kernel import Info, Kernel, fraction, positive, splitting_of, target_of
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.product_precision import gradient_precision_of
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields, static

MOST_STEPS = 1_000_000  # of a trajectory


@pytree
@dataclass(frozen=True, eq=False, init=False)
class MAMS(Kernel):
    """Microcanonical trajectories of one length for all chains, with a Metropolis test.

    A pytree that holds its target, as `HMC` is; other numbers recompile nothing.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or a `Target` of your own, of two dimensions or more.
    step_size
        The distance of a step of the integrator, in units of the metric: the speed is 1. About
        sqrt(d) times the step size of `HMC`, where speeds are about sqrt(d).
    trajectory_length
        The mean distance of a trajectory, which takes a whole number of steps, at least one. About
        sqrt(d) for a target whose scales the metric knows.
    inverse_mass_matrix
        A tree like the position (diagonal), a metric object, or None (identity).
    jitter
        Between 0 and 1. `sample` spreads the lengths of its steps, each the same for all chains, evenly
        over (1 ± jitter) times ``trajectory_length``; `step` itself never does.
    splitting
        `MINIMAL_NORM`, two gradients a step of the integrator, or `LEAPFROG`, one. Static.
    gradient_precision
        As in `HMC`. Static.
    """

    target: Target
    step_size: jax.Array
    trajectory_length: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    jitter: jax.Array
    splitting: Splitting = static()
    gradient_precision: str = static()
    is_per_chain: bool = static(default=False)

    def __init__(
        self,
        target: Target,
        step_size: float | jax.Array,
        trajectory_length: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        jitter: float | jax.Array = 1.0,
        splitting: Splitting = MINIMAL_NORM,
        gradient_precision: str | None = None,
    ):
        set_fields(
            self,
            target=target_of("MAMS", target),
            step_size=positive("MAMS", "step_size", step_size),
            trajectory_length=positive("MAMS", "trajectory_length", trajectory_length),
            inverse_mass_matrix=metrics.laid_out("MAMS", target, inverse_mass_matrix),
            jitter=fraction("MAMS", "jitter", jitter),
            splitting=splitting_of("MAMS", splitting),
            gradient_precision=gradient_precision_of("MAMS", target, gradient_precision),
        )

    def with_trajectory_length(self, trajectory_length: float | jax.Array) -> "MAMS":
        """Return the kernel with trajectories of another length; nothing is recompiled."""
        length = positive("MAMS", "trajectory_length", trajectory_length)
        return tree.replace(self, trajectory_length=length)

    def one_leapfrog(self) -> "MAMS":
        """Return the kernel of one step a trajectory: the search for a first step size uses it."""
        return tree.replace(self, trajectory_length=jnp.zeros_like(self.trajectory_length))

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "MAMS":
        """Return the kernel of one step: the length of its trajectories, for all chains at once.

        It comes from the van der Corput sequence at the number of the step, as in `JitteredHMC`: 2^k
        steps in a row see 2^k lengths evenly spread. The key is not used.
        """
        length = spread(step, self.jitter) * self.trajectory_length
        return tree.replace(self, trajectory_length=length)

    @init_anywhere
    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position; errors are those of `HMC.init`.

        Raises
        ------
        ValueError
            If the position has only one dimension.
        """
        state = hmc.init(self, position)
        isokinetic.dimension("MAMS", self.target, state.position)
        return state

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, Info]:
        """Take one step: a fresh direction, a trajectory, a Metropolis test.

        ``energy`` of its `Info` is the negative log density at the start, plus the energy error if the
        proposal was accepted: a trajectory starts with no kinetic energy. Its ``energy_error`` is the
        change of the kinetic energy minus that of the log density.
        """
        checks.check_not_baked(self.target)
        direction_key, accept_key = jax.random.split(rng_key)
        momentum = self.direction(direction_key, state)
        num_steps = self._num_steps()
        start = PhasePoint(state.position, momentum, state.log_density_grad)
        end, terms, gain = self.trajectory(start, num_steps)
        return hmc.metropolis_test(
            accept_key,
            state,
            HMCState.at(end.position, terms, end.log_density_grad),
            hmc.energy_error(gain, terms, state.terms),
            -state.log_density,
            num_steps * len(self.splitting.drifts),
            Info,
        )

    def direction(self, rng_key: jax.Array, state: HMCState) -> PyTree:
        """Draw a momentum with p·M⁻¹p = 1, uniform over directions."""
        noise = self.sample_momentum(rng_key, state.position)
        span = Span.of(self.inverse_mass_matrix, noise)
        return span.combine(span.momentum())

    def trajectory(
        self, start: PhasePoint, num_steps: jax.Array
    ) -> tuple[PhasePoint, PyTree, jax.Array]:
        """Integrate isokinetic dynamics from a unit momentum; return the end, its terms, and ΔK."""
        metric = self.inverse_mass_matrix
        dimension = isokinetic.dimension("MAMS", self.target, start.position)
        return isokinetic.integrate(
            self, metric, self.splitting, start, self.step_size, num_steps, dimension
        )

    def _num_steps(self) -> jax.Array:
        steps = jnp.round(self.trajectory_length / self.step_size)
        # The clip comes before the cast, which would wrap; a NaN length asks for one step.
        return jnp.where(steps >= 1, jnp.minimum(steps, MOST_STEPS), 1).astype(jnp.int32)
