"""Hamiltonian Monte Carlo.

References
----------
Duane, Kennedy, Pendleton and Roweth, "Hybrid Monte Carlo", Physics Letters B 195 (1987); Neal, "MCMC
using Hamiltonian dynamics", Handbook of Markov Chain Monte Carlo (2011).
"""

from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import (
    LEAPFROG,
    PhasePoint,
    Splitting,
    integrate,
    velocity_verlet_with_terms,
)
from gspmd_mcmc.kernels.kernel import Info, Kernel, count, fraction, positive, splitting_of, target_of
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.product_precision import gradient_precision_of
from gspmd_mcmc.targets import checks, independence
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Pad, PyTree, derived, like_position, pytree, set_fields, static

DIVERGENT_ENERGY_ERROR = 1000.0
AnyInfo = TypeVar("AnyInfo", bound=Info)


@pytree
@dataclass(frozen=True, eq=False)
class HMCState:
    """The position of a chain, and the target there."""

    position: PyTree = like_position()
    log_density: jax.Array = derived()  # []
    log_density_grad: PyTree = like_position(pad=Pad.ZERO, is_derived=True)
    terms: PyTree = derived()  # the target's summands, kept apart

    @classmethod
    def at(cls, position: PyTree, terms: PyTree, log_density_grad: PyTree) -> "HMCState":
        """Return the state at a position with these terms and this gradient."""
        return cls(position, tree.total(terms), log_density_grad, terms)


class HamiltonianKernel(Kernel):
    """What kernels share whose transitions begin with a fresh momentum p ~ N(0, M)."""

    draws_momenta: ClassVar[bool] = True

    def one_leapfrog(self) -> "OneLeapfrog":
        """Return a kernel whose steps are one leapfrog: the search for a first step size uses it."""
        return OneLeapfrog.of(self)

    @init_anywhere
    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position.

        The state's arrays are its own, so that a step may be compiled with ``donate_argnums``.

        Raises
        ------
        TypeError, ValueError
            If a leaf is not floating, or data would become constants of a program.
        NonFiniteStart
            If, outside jit, the log density is not finite; the message names the leaf or term.
        """
        return init(self, position)


@pytree
@dataclass(frozen=True, eq=False, init=False)
class HMC(HamiltonianKernel):
    """Hamiltonian Monte Carlo with a fixed number of leapfrogs, one number for all chains.

    A pytree that holds its target, so that data enter programs as arguments:
    ``step = jax.jit(type(kernel).step)``, then ``state, info = step(kernel, rng_key, state)``. Tuning
    changes leaves only, and recompiles nothing.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or a `Target` of your own.
    step_size
        The time of a step of the integrator, in units of the metric.
    num_integration_steps
        Steps of a trajectory, at least 1; L leapfrogs cost L gradients.
    inverse_mass_matrix
        A tree like the position (diagonal), a `Metric`, or None (identity).
    jitter
        Between 0 and 1. `sample` draws the number of leapfrogs of each step, the same for all chains,
        uniformly from (1 ± jitter) times ``num_integration_steps``; `step` itself never does.
    trajectory_length
        Not a setting of this kernel; the error names `JitteredHMC`, which has one.
    gradient_precision
        The precision of matrix products in gradients, one that the device has: "float32"; on GPUs
        "tensorfloat32" too; on TPUs "bfloat16_3x" (three products of two bfloat16 terms) and
        "bfloat16". None: "tensorfloat32" on GPUs, "bfloat16_3x" on TPUs. The Metropolis test is always
        in float32, so that draws are exact. Static.
    splitting
        `LEAPFROG`, one gradient a step of the integrator, or `MINIMAL_NORM`, two. For many latents
        whose posterior is near a Gaussian of the metric's scales, `MINIMAL_NORM` with half as many
        steps of more than twice the size is cheaper. Static.
    """

    target: Target
    step_size: jax.Array
    num_integration_steps: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    jitter: jax.Array
    gradient_precision: str = static()
    splitting: Splitting = static()
    is_per_chain: bool = static(default=False)

    def __init__(
        self,
        target: Target,
        step_size: float | jax.Array,
        num_integration_steps: int | jax.Array | None = None,
        inverse_mass_matrix: PyTree | None = None,
        jitter: float | jax.Array = 0.0,
        trajectory_length: None = None,
        gradient_precision: str | None = None,
        splitting: Splitting = LEAPFROG,
    ):
        if num_integration_steps is None or trajectory_length is not None:
            raise TypeError(
                "HMC: expected num_integration_steps, the leapfrogs of a trajectory. A length is a "
                "setting of gspmd_mcmc.JitteredHMC(target, step_size, trajectory_length), which keeps "
                "it with sample(warmup=gspmd_mcmc.WindowAdaptation())"
            )
        set_fields(
            self,
            target=target_of("HMC", target),
            step_size=positive("HMC", "step_size", step_size),
            num_integration_steps=count("HMC", "num_integration_steps", num_integration_steps),
            inverse_mass_matrix=metrics.laid_out("HMC", target, inverse_mass_matrix),
            jitter=fraction("HMC", "jitter", jitter),
            gradient_precision=gradient_precision_of("HMC", target, gradient_precision),
            splitting=splitting_of("HMC", splitting),
        )

    def with_num_integration_steps(self, num_integration_steps: int | jax.Array) -> "HMC":
        """Return the kernel with another number of leapfrogs; nothing is recompiled."""
        number = count("HMC", "num_integration_steps", num_integration_steps)
        return tree.replace(self, num_integration_steps=number)

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "HMC":
        """Return the kernel of one step: its number of leapfrogs is drawn, for all chains at once."""
        low, high = 1 - self.jitter, 1 + self.jitter
        factor = jax.random.uniform(rng_key, dtype=self.jitter.dtype, minval=low, maxval=high)
        steps = jnp.round(factor * self.num_integration_steps).astype(self.num_integration_steps.dtype)
        return tree.replace(self, num_integration_steps=jnp.maximum(steps, 1))

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, Info]:
        """Take one step: a fresh momentum, a trajectory, a Metropolis test."""
        return self.transition(rng_key, state)[:2]

    def transition(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, Info, PhasePoint]:
        """Take one step; also return the end of the trajectory, accepted or not."""
        checks.check_not_baked(self.target)
        momentum_key, accept_key = jax.random.split(rng_key)
        momentum = self.sample_momentum(momentum_key, state.position)
        end, terms = self.trajectory(PhasePoint(state.position, momentum, state.log_density_grad))

        energy = metrics.kinetic_energy(self.inverse_mass_matrix, momentum) - state.log_density
        new, info = metropolis_test(
            accept_key,
            state,
            HMCState.at(end.position, terms, end.log_density_grad),
            self._energy_error(state, momentum, end, terms),
            energy,
            self.num_integration_steps * len(self.splitting.drifts),
            Info,
        )
        return new, info, end

    def trajectory(self, start: PhasePoint) -> tuple[PhasePoint, PyTree]:
        """Integrate Hamilton's equations from a point of phase space; return the end and its terms."""
        number = self.num_integration_steps
        return integrate(self.splitting, start, self.step_size, number, self, self.velocity)

    def _energy_error(
        self, state: HMCState, momentum: PyTree, end: PhasePoint, terms: PyTree
    ) -> jax.Array:
        kinetic = metrics.kinetic_energy_difference(self.inverse_mass_matrix, end.momentum, momentum)
        return energy_error(kinetic, terms, state.terms)


@pytree
@dataclass(frozen=True, eq=False, init=False)
class OneLeapfrog(HMC):
    """HMC of one leapfrog a step, known to the compiler: the program has one gradient and no loop."""

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        """Return the one with the target and the settings of another kernel that they share."""
        return tree.fill(
            cls,
            {
                "target": kernel.target,
                "step_size": kernel.step_size,
                "num_integration_steps": jnp.ones((), int),
                "inverse_mass_matrix": kernel.inverse_mass_matrix,
                "jitter": jnp.zeros((), kernel.step_size.dtype),
                "gradient_precision": kernel.gradient_precision,
                "splitting": LEAPFROG,
                "is_per_chain": kernel.is_per_chain,
            },
        )

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> Self:
        """Return the kernel itself."""
        return self

    def trajectory(self, start: PhasePoint) -> tuple[PhasePoint, PyTree]:
        """Take the leapfrog; return its end and the terms there."""
        return velocity_verlet_with_terms(start, self.step_size, self.terms_and_grad, self.velocity)


def init(kernel: Kernel, position: PyTree) -> HMCState:
    """Evaluate a kernel's target at a position; see `HMC.init`.

    Outside a program the state's arrays are copies: a program that is given the state may reuse their
    memory, and neither the caller's position nor the target's data may go with it.
    """
    checks.check_not_baked(kernel.target)
    position = checks.admit(kernel.target, position)
    metrics.check_fits(type(kernel).__name__, kernel.inverse_mass_matrix, position)
    terms, log_density_grad = kernel.terms_and_grad(position)
    state = HMCState.at(position, terms, log_density_grad)
    checks.check_finite_start(kernel.target, position, state.log_density, log_density_grad)
    independence.check_rows(kernel.target, position)
    return state if tree.is_staging() else jax.tree.map(jnp.copy, state)


def energy_error(kinetic: jax.Array, terms: PyTree, start_terms: PyTree) -> jax.Array:
    """Return ΔH = ΔK - Σ(terms′ - terms); infinite where it is not finite.

    Differences are taken term by term, before any sum: a float32 log density of 4e6 could not resolve a
    tenth of a nat. A log density of +inf is as wrong as NaN, and a chain there would never leave it.
    """
    error = kinetic - tree.total(tree.sub(terms, start_terms))
    return jnp.where(jnp.isfinite(error), error, jnp.inf)


def metropolis_test(
    rng_key: jax.Array,
    state: HMCState,
    proposal: HMCState,
    error: jax.Array,
    energy: jax.Array,
    num_integration_steps: jax.Array,
    info: type[AnyInfo],
) -> tuple[HMCState, AnyInfo]:
    """Accept a proposal of energy error ΔH with probability min(1, exp(-ΔH)).

    Parameters
    ----------
    rng_key
        Of the uniform number.
    state, proposal
        Of which one is returned.
    error, energy
        The energy error of the proposal, and the energy of the state.
    num_integration_steps
        Gradient evaluations of the trajectory.
    info
        The class of what is reported.
    """
    is_accepted = jnp.log(jax.random.uniform(rng_key, dtype=error.dtype)) < -error
    return tree.where(is_accepted, proposal, state), info(
        acceptance_rate=jnp.exp(jnp.minimum(0, -error)),
        is_accepted=is_accepted,
        is_divergent=~(error <= DIVERGENT_ENERGY_ERROR),
        energy=energy + jnp.where(is_accepted, error, 0),
        energy_error=error,
        num_integration_steps=num_integration_steps,
    )
