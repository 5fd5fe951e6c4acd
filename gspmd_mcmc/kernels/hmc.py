"""Hamiltonian Monte Carlo.

References
----------
Duane, Kennedy, Pendleton and Roweth, "Hybrid Monte Carlo", Physics Letters B 195 (1987); Neal, "MCMC
using Hamiltonian dynamics", Handbook of Markov Chain Monte Carlo (2011).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import settings
from gspmd_mcmc.kernels.integrators import PhasePoint, integrate, velocity_verlet_with_terms
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets import checks, independence, local
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.tree import Pad, PyTree, derived, like_position, pytree, set_fields, static

DIVERGENT_ENERGY_ERROR = 1000.0


@pytree
@dataclass(frozen=True, eq=False)
class HMCState:
    """Where a chain is, and what it need not compute again."""

    position: PyTree = like_position()
    log_density: jax.Array = derived()  # []
    log_density_grad: PyTree = like_position(pad=Pad.ZERO, is_derived=True)
    terms: PyTree = derived()  # the target's summands, apart


@pytree
@dataclass(frozen=True, eq=False)
class HMCInfo(Info):
    """What one transition of `HMC` did; see `Info`."""


@pytree
@dataclass(frozen=True, eq=False, init=False)
class HMC(Kernel):
    """Hamiltonian Monte Carlo with a fixed number of leapfrogs, one number for all chains.

    A pytree that holds its target, so that data enter programs as arguments:
    ``step = jax.jit(type(kernel).step)``, then ``state, info = step(kernel, rng_key, state)``. Tuning
    changes leaves only and compiles nothing anew.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or any pytree with `terms`, `grad` and `terms_and_grad`.
    step_size
        Of a leapfrog, in units of the metric.
    num_integration_steps
        Leapfrogs of a trajectory, at least 1; L leapfrogs cost L gradients.
    inverse_mass_matrix
        A tree like the position (diagonal), or None (identity).
    jitter
        Between 0 and 1. `sample` draws the number of leapfrogs of each step, the same for all chains,
        uniformly from (1 ± jitter) times ``num_integration_steps``; `step` itself never does.
    """

    target: Any
    step_size: jax.Array
    num_integration_steps: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    jitter: jax.Array
    is_per_chain: bool = static(default=False)

    draws_momenta: ClassVar[bool] = True

    def __init__(
        self,
        target: Any,
        step_size: float | jax.Array,
        num_integration_steps: int | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        jitter: float | jax.Array = 0.0,
    ):
        settings.require_target("HMC", target)
        settings.require("HMC", "jitter", jitter, lambda x: 0 <= x <= 1, "a number between 0 and 1")
        set_fields(
            self,
            target=target,
            step_size=settings.step_size_of("HMC", step_size),
            num_integration_steps=_num_integration_steps_of(num_integration_steps),
            inverse_mass_matrix=settings.metric_of("HMC", target, inverse_mass_matrix),
            jitter=settings.strong(jitter, float),
        )

    def with_num_integration_steps(self, num_integration_steps: int | jax.Array) -> "HMC":
        """Return the kernel with another number of leapfrogs; nothing compiles anew."""
        count = _num_integration_steps_of(num_integration_steps)
        return tree.replace(self, num_integration_steps=count)

    def one_leapfrog(self) -> "OneLeapfrog":
        """Return the kernel whose steps are one leapfrog: what a first step size is tried with."""
        return OneLeapfrog.of(self)

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "HMC":
        """Return the kernel of one step: its number of leapfrogs drawn, for all chains at once."""
        low, high = 1 - self.jitter, 1 + self.jitter
        factor = jax.random.uniform(rng_key, dtype=self.jitter.dtype, minval=low, maxval=high)
        steps = jnp.round(factor * self.num_integration_steps).astype(self.num_integration_steps.dtype)
        return tree.replace(self, num_integration_steps=jnp.maximum(steps, 1))

    @init_anywhere
    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position.

        Raises
        ------
        TypeError, ValueError
            If a leaf is not floating, or data would become constants of a program.
        NonFiniteStart
            If, outside jit, the log density is not finite; the message names the leaf or term.
        """
        return init("HMC", self.target, self.inverse_mass_matrix, position)

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, HMCInfo]:
        """One transition: a fresh momentum, a trajectory, a Metropolis test."""
        return self.transition(rng_key, state)[:2]

    def transition(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, HMCInfo, PhasePoint]:
        """Take a step; return the trajectory's end too, whether it was accepted or not."""
        checks.check_not_baked(self.target)
        momentum_key, accept_key = jax.random.split(rng_key)
        momentum = metrics.sample_momentum(momentum_key, self.inverse_mass_matrix, state.position)
        momentum = local.zero_pad(self.target, momentum)
        start = PhasePoint(state.position, momentum, state.log_density_grad)
        end, terms = self.trajectory(start)
        proposal, energy_error = self._propose(state, start, end, terms)

        is_accepted = jnp.log(jax.random.uniform(accept_key, dtype=energy_error.dtype)) < -energy_error
        energy = metrics.kinetic_energy(self.inverse_mass_matrix, momentum) - state.log_density
        info = HMCInfo(
            acceptance_rate=jnp.exp(jnp.minimum(0, -energy_error)),
            is_accepted=is_accepted,
            is_divergent=~(energy_error <= DIVERGENT_ENERGY_ERROR),
            energy=energy + jnp.where(is_accepted, energy_error, 0),
            energy_error=energy_error,
            num_integration_steps=self.num_integration_steps,
        )
        return tree.where(is_accepted, proposal, state), info, end

    def trajectory(self, start: PhasePoint) -> tuple[PhasePoint, PyTree]:
        """Integrate Hamilton's equations from a point of phase space; return the end and its terms."""
        return integrate(
            start,
            self.step_size,
            self.num_integration_steps,
            self.target,
            self._velocity,
        )

    def _velocity(self, momentum: PyTree) -> PyTree:
        return metrics.velocity(self.inverse_mass_matrix, momentum)

    def _propose(
        self, state: HMCState, start: PhasePoint, end: PhasePoint, terms: PyTree
    ) -> tuple[HMCState, jax.Array]:
        """Return the state at a trajectory's end, and ΔH = -Σ(terms′ - terms) + ΔK.

        Differences are taken term by term, before any sum: a float32 log density of 4e6 could not
        resolve a tenth of a nat.
        """
        gain = tree.total(tree.sub(terms, state.terms))
        kinetic = metrics.kinetic_energy_difference(
            self.inverse_mass_matrix, end.momentum, start.momentum
        )
        proposal = HMCState(
            position=end.position,
            log_density=tree.total(terms),
            log_density_grad=end.log_density_grad,
            terms=terms,
        )
        # A log density of +inf is as wrong as NaN, and would never be left again.
        energy_error = kinetic - gain
        return proposal, jnp.where(jnp.isfinite(energy_error), energy_error, jnp.inf)


@pytree
@dataclass(frozen=True, eq=False, init=False)
class OneLeapfrog(HMC):
    """HMC of one leapfrog a step, which a program knows: it has the gradient once, and no loop."""

    @classmethod
    def of(cls, kernel: Any) -> "OneLeapfrog":
        """Return the one with the target, the step size and the metric of another kernel."""
        names = ("target", "step_size", "inverse_mass_matrix", "is_per_chain")
        values = {name: getattr(kernel, name) for name in names}
        one, none = jnp.ones((), int), jnp.zeros((), kernel.step_size.dtype)
        return tree.fill(cls, values | {"num_integration_steps": one, "jitter": none})

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "OneLeapfrog":
        """Return the kernel itself."""
        return self

    def trajectory(self, start: PhasePoint) -> tuple[PhasePoint, PyTree]:
        """Take the leapfrog; return where it ends and the terms there."""
        terms_and_grad = self.target.terms_and_grad
        return velocity_verlet_with_terms(start, self.step_size, terms_and_grad, self._velocity)


def init(kernel: str, target: Any, inverse_mass_matrix: PyTree | None, position: PyTree) -> HMCState:
    """Evaluate a target at a position, for the kernel of that name; see `HMC.init`."""
    checks.check_not_baked(target)
    position = checks.admit(target, position)
    settings.check_metric_fits(kernel, inverse_mass_matrix, position)
    terms, log_density_grad = target.terms_and_grad(position)
    log_density = tree.total(terms)
    checks.check_finite_start(target, position, log_density, log_density_grad)
    independence.check_rows(target, position)
    return HMCState(
        position=position,
        log_density=log_density,
        log_density_grad=log_density_grad,
        terms=terms,
    )


def _num_integration_steps_of(count: int | jax.Array) -> jax.Array:
    def holds(x) -> bool:
        return x >= 1 and x == int(x)

    settings.require("HMC", "num_integration_steps", count, holds, "at least 1 and whole")
    return settings.strong(count, int)
