"""Microcanonical Langevin Monte Carlo: isokinetic dynamics with noise, and no Metropolis test.

References
----------
Robnik, De Luca, Silverstein and Seljak, "Microcanonical Hamiltonian Monte Carlo", JMLR 24 (2023);
Robnik and Seljak, "Fluctuation without dissipation: microcanonical Langevin Monte Carlo" (2024).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.errors import answers
from gspmd_mcmc.kernels import hmc, isokinetic
from gspmd_mcmc.kernels.hmc import DIVERGENT_ENERGY_ERROR
from gspmd_mcmc.kernels.integrators import MINIMAL_NORM, PhasePoint, Splitting
from gspmd_mcmc.kernels.isokinetic import Span
from gspmd_mcmc.kernels.kernel import Info, Kernel, positive, splitting_of, target_of
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Pad, PyTree, derived, like_position, pytree, set_fields, static

MOST_REFRESHMENT = 50.0  # step sizes in a decoherence length: nothing of the old momentum is left


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCState:
    """The position and the direction of a chain, and the target there."""

    position: PyTree = like_position()
    momentum: PyTree = like_position(pad=Pad.ZERO)  # p·M⁻¹p = 1; zero before the first step
    log_density: jax.Array = derived()  # []
    log_density_grad: PyTree = like_position(pad=Pad.ZERO, is_derived=True)
    terms: PyTree = derived()  # the target's summands, kept apart


@pytree
@dataclass(frozen=True, eq=False, init=False)
class MCLMC(Kernel):
    """Unadjusted microcanonical Langevin Monte Carlo: a step is one or two gradients.

    Draws are biased, by an amount that falls with the step size; `MAMS` is the form without bias. A
    pytree that holds its target, as `HMC` is; other numbers recompile nothing.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or a `Target` of your own, of two dimensions or more.
    step_size
        The distance of a step, in units of the metric: the speed is 1. About sqrt(d) times the step
        size of `HMC`, where speeds are about sqrt(d).
    trajectory_length
        The distance over which the direction decorrelates: L of the papers. sqrt(d) for a target whose
        scales the metric knows.
    inverse_mass_matrix
        A tree like the position (diagonal), a metric object, or None (identity).
    splitting
        `MINIMAL_NORM`, two gradients a step, or `LEAPFROG`, one. Static.
    """

    is_adjusted: ClassVar[bool] = False
    note: ClassVar[str] = (
        "These draws are biased, most of all in the tails: the kernel has no Metropolis test, and "
        "R-hat and ESS do not show the bias. It falls with the step size. Where it matters, compare "
        "with a smaller step size, or use MAMS, which has no bias."
    )

    target: Target
    step_size: jax.Array
    trajectory_length: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    splitting: Splitting = static()

    @answers(
        "Call it as MCLMC(target, step_size, trajectory_length, inverse_mass_matrix)",
        L="it is trajectory_length= here",
    )
    def __init__(
        self,
        target: Target,
        step_size: float | jax.Array,
        trajectory_length: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        splitting: Splitting = MINIMAL_NORM,
    ):
        set_fields(
            self,
            target=target_of("MCLMC", target),
            step_size=positive("MCLMC", "step_size", step_size),
            trajectory_length=positive("MCLMC", "trajectory_length", trajectory_length),
            inverse_mass_matrix=metrics.laid_out("MCLMC", target, inverse_mass_matrix),
            splitting=splitting_of("MCLMC", splitting),
        )

    def with_trajectory_length(self, trajectory_length: float | jax.Array) -> "MCLMC":
        """Return the kernel with another decoherence length; nothing is recompiled."""
        length = positive("MCLMC", "trajectory_length", trajectory_length)
        return tree.replace(self, trajectory_length=length)

    @init_anywhere
    def init(self, position: PyTree) -> MCLMCState:
        """Evaluate the target at a position; errors are those of `HMC.init`.

        The momentum is zero, so that the refreshed momentum of the first step is all noise: uniform
        over the sphere, and different for each chain.

        Raises
        ------
        ValueError
            If the position has only one dimension.
        """
        start = hmc.init(self, position)
        isokinetic.dimension("MCLMC", self.target, start.position)
        return MCLMCState(momentum=jax.tree.map(jnp.zeros_like, start.position), **vars(start))

    @step_anywhere
    def step(self, rng_key: jax.Array, state: MCLMCState) -> tuple[MCLMCState, Info]:
        """Take one step: noise, kicks and drifts, noise (O B A B ... O).

        ``acceptance_rate`` of its `Info` is 1 where the step was made. It is 0 where the energy error
        exceeded 1000 or was not finite: the chain then stays, and continues in a fresh direction. The
        rate does not show the bias. ``energy`` is the negative log density at the end of the step, and
        ``energy_error`` the change of the kinetic energy minus that of the log density.
        """
        checks.check_not_baked(self.target)
        start_key, end_key = jax.random.split(rng_key)
        point, gain = self._set_out(start_key, state)
        point, terms, more = self._move(point)
        momentum, fresh, last = self._arrive(end_key, point)
        energy_error = hmc.energy_error(gain + more + last, terms, state.terms)
        moves = energy_error <= DIVERGENT_ENERGY_ERROR

        moved = MCLMCState(point.position, momentum, tree.total(terms), point.log_density_grad, terms)
        new = tree.where(moves, moved, tree.replace(state, momentum=fresh))
        info = Info(
            acceptance_rate=moves.astype(energy_error.dtype),
            is_accepted=moves,
            is_divergent=~moves,
            energy=-new.log_density,
            energy_error=energy_error,
            num_integration_steps=jnp.asarray(len(self.splitting.drifts), jnp.int32),
        )
        return new, info

    def _set_out(self, rng_key: jax.Array, state: MCLMCState) -> tuple[PhasePoint, jax.Array]:
        """Refresh the momentum, and take the first kick; also return ΔK."""
        point = PhasePoint(state.position, state.momentum, state.log_density_grad)
        count, span = self._dimension(point), self._span(rng_key, point)
        refreshed = span.refreshed(span.momentum(), self._noise(count))
        turned, gain = span.kicked(refreshed, self.step_size * self.splitting.kicks[0], count)
        return tree.replace(point, momentum=span.combine(turned)), gain

    def _move(self, point: PhasePoint) -> tuple[PhasePoint, PyTree, jax.Array]:
        """Take the drifts and the kicks between them; return the terms at the end, and ΔK."""
        metric, count = self.inverse_mass_matrix, self._dimension(point)
        drifts, kicks = self.splitting.drifts, self.splitting.kicks[1:-1]
        gain = jnp.zeros_like(self.step_size)
        for drift, kick in zip(drifts[:-1], kicks, strict=True):
            position = isokinetic.drift(metric, point, self.step_size * drift)
            moved = PhasePoint(position, point.momentum, self.grad(position))
            point, more = isokinetic.kick(metric, moved, self.step_size * kick, count)
            gain = gain + more
        position = isokinetic.drift(metric, point, self.step_size * drifts[-1])
        terms, grad = self.terms_and_grad(position)
        return PhasePoint(position, point.momentum, grad), terms, gain

    def _arrive(self, rng_key: jax.Array, point: PhasePoint) -> tuple[PyTree, PyTree, jax.Array]:
        """Take the last kick and refresh the momentum; return it, one that is all noise, and ΔK."""
        count, span = self._dimension(point), self._span(rng_key, point)
        turned, gain = span.kicked(span.momentum(), self.step_size * self.splitting.kicks[-1], count)
        momentum = span.combine(span.refreshed(turned, self._noise(count)))
        noise, norm = span.vectors[2], jnp.sqrt(span.products[2, 2])
        return momentum, jax.tree.map(lambda z: z / norm.astype(z.dtype), noise), gain

    def _span(self, rng_key: jax.Array, point: PhasePoint) -> Span:
        noise = self.sample_momentum(rng_key, point.position)
        return Span.of(self.inverse_mass_matrix, point.momentum, point.log_density_grad, noise)

    def _dimension(self, point: PhasePoint) -> int:
        return isokinetic.dimension("MCLMC", self.target, point.position)

    def _noise(self, dimension: int) -> jax.Array:
        """Return the weight of the noise with which half a step refreshes a unit momentum.

        sqrt((exp(ε / L) - 1) / d): the correlation of the direction falls as exp(-distance / L).
        """
        share = jnp.minimum(self.step_size / self.trajectory_length, MOST_REFRESHMENT)
        return jnp.sqrt(jnp.expm1(share) / dimension)
