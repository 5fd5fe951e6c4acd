"""Microcanonical Langevin Monte Carlo: isokinetic dynamics with noise, and no Metropolis test.

References
----------
Robnik, De Luca, Silverstein and Seljak, "Microcanonical Hamiltonian Monte Carlo", JMLR 24 (2023);
Robnik and Seljak, "Fluctuation without dissipation: microcanonical Langevin Monte Carlo" (2024).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import hmc, isokinetic, settings
from gspmd_mcmc.kernels.hmc import DIVERGENT_ENERGY_ERROR
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.isokinetic import MINIMAL_NORM, Span, Splitting
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets import checks, local
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.tree import Pad, PyTree, derived, like_position, pytree, set_fields, static

MOST_REFRESHMENT = 50.0  # step sizes a decoherence length: nothing of the old momentum is left


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCState:
    """Where a chain is, which way it goes, and what it need not compute again."""

    position: PyTree = like_position()
    momentum: PyTree = like_position(pad=Pad.ZERO)  # p·M⁻¹p = 1; zero before the first step
    log_density: jax.Array = derived()  # []
    log_density_grad: PyTree = like_position(pad=Pad.ZERO, is_derived=True)
    terms: PyTree = derived()  # the target's summands, apart


@pytree
@dataclass(frozen=True, eq=False)
class MCLMCInfo(Info):
    """What one step of `MCLMC` did; see `Info`.

    ``acceptance_rate`` is 1 where the step was made and 0 where it was refused, because its energy
    error exceeded 1000 or was not finite; the chain then stays and goes on in a fresh direction. It
    tells nothing of the bias. ``energy`` is the negative log density where the step ended.
    ``energy_error``, the change of the kinetic energy less that of the log density, has the variance
    over steps that tuning holds small.
    """


@pytree
@dataclass(frozen=True, eq=False, init=False)
class MCLMC(Kernel):
    """Unadjusted microcanonical Langevin Monte Carlo: a step is one or two gradients.

    Draws are biased, by an amount that falls with the step size; `MAMS` is its form without bias. A
    pytree that holds its target, as `HMC` is; other numbers compile nothing anew.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or any pytree with `terms`, `grad` and `terms_and_grad`, of two
        dimensions or more.
    step_size
        The distance of a step, in units of the metric: the speed is 1. About sqrt(d) times what
        it would be for `HMC`, where speeds are about sqrt(d).
    trajectory_length
        The distance after which the direction is forgotten: L of the papers. sqrt(d) for a target whose
        scales the metric knows.
    inverse_mass_matrix
        A tree like the position (diagonal), a metric object, or None (identity).
    splitting
        `MINIMAL_NORM`, two gradients a step, or `LEAPFROG`, one. Static.
    """

    note: ClassVar[str] = (
        "These draws are biased, tails the most: the kernel has no Metropolis test, and R-hat and ESS "
        "see nothing of it. The bias falls with the step size. Where it matters, compare with a "
        "smaller one, or use MAMS, which has none."
    )

    target: Any
    step_size: jax.Array
    trajectory_length: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    splitting: Splitting = static()

    def __init__(
        self,
        target: Any,
        step_size: float | jax.Array,
        trajectory_length: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        splitting: Splitting = MINIMAL_NORM,
    ):
        settings.require_target("MCLMC", target)
        set_fields(
            self,
            target=target,
            step_size=settings.step_size_of("MCLMC", step_size),
            trajectory_length=isokinetic.length_of("MCLMC", trajectory_length),
            inverse_mass_matrix=settings.metric_of("MCLMC", target, inverse_mass_matrix),
            splitting=splitting,
        )

    def with_trajectory_length(self, trajectory_length: float | jax.Array) -> "MCLMC":
        """Return the kernel with another decoherence length; nothing compiles anew."""
        return tree.replace(self, trajectory_length=isokinetic.length_of("MCLMC", trajectory_length))

    @init_anywhere
    def init(self, position: PyTree) -> MCLMCState:
        """Evaluate the target at a position; errors are those of `HMC.init`.

        The momentum is zero: noise is all there is in the first step's refreshed momentum, which so is
        uniform over the sphere, and another one for each chain.

        Raises
        ------
        ValueError
            If the position has one dimension alone.
        """
        start = hmc.init("MCLMC", self.target, self.inverse_mass_matrix, position)
        isokinetic.dimension("MCLMC", self.target, start.position)
        return MCLMCState(
            position=start.position,
            momentum=jax.tree.map(jnp.zeros_like, start.position),
            log_density=start.log_density,
            log_density_grad=start.log_density_grad,
            terms=start.terms,
        )

    @step_anywhere
    def step(self, rng_key: jax.Array, state: MCLMCState) -> tuple[MCLMCState, MCLMCInfo]:
        """One step: noise, kicks and drifts, noise (O B A B ... O).

        ΔE = ΔK - Σ(terms′ - terms), differences taken term by term before any sum, as in `HMC`.
        """
        checks.check_not_baked(self.target)
        start_key, end_key = jax.random.split(rng_key)
        point, gain = self._set_out(start_key, state)
        point, terms, more = self._move(point)
        momentum, fresh, last = self._arrive(end_key, point)
        energy_error = gain + more + last - tree.total(tree.sub(terms, state.terms))
        # A log density of +inf is as wrong as NaN, and would never be left again.
        energy_error = jnp.where(jnp.isfinite(energy_error), energy_error, jnp.inf)
        moves = energy_error <= DIVERGENT_ENERGY_ERROR

        moved = MCLMCState(point.position, momentum, tree.total(terms), point.log_density_grad, terms)
        new = tree.where(moves, moved, tree.replace(state, momentum=fresh))
        info = MCLMCInfo(
            acceptance_rate=moves.astype(energy_error.dtype),
            is_accepted=moves,
            is_divergent=~moves,
            energy=-new.log_density,
            energy_error=energy_error,
            num_integration_steps=jnp.asarray(len(self.splitting.drifts), jnp.int32),
        )
        return new, info

    def _set_out(self, rng_key: jax.Array, state: MCLMCState) -> tuple[PhasePoint, jax.Array]:
        """Refresh the momentum, and take the first kick; return ΔK too."""
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
            moved = PhasePoint(position, point.momentum, self.target.grad(position))
            point, more = isokinetic.kick(metric, moved, self.step_size * kick, count)
            gain = gain + more
        position = isokinetic.drift(metric, point, self.step_size * drifts[-1])
        terms, grad = self.target.terms_and_grad(position)
        return PhasePoint(position, point.momentum, grad), terms, gain

    def _arrive(self, rng_key: jax.Array, point: PhasePoint) -> tuple[PyTree, PyTree, jax.Array]:
        """Take the last kick and refresh the momentum; return it, one all of noise, and ΔK."""
        count, span = self._dimension(point), self._span(rng_key, point)
        turned, gain = span.kicked(span.momentum(), self.step_size * self.splitting.kicks[-1], count)
        momentum = span.combine(span.refreshed(turned, self._noise(count)))
        noise, norm = span.vectors[2], jnp.sqrt(span.products[2, 2])
        return momentum, jax.tree.map(lambda z: z / norm.astype(z.dtype), noise), gain

    def _span(self, rng_key: jax.Array, point: PhasePoint) -> Span:
        noise = metrics.sample_momentum(rng_key, self.inverse_mass_matrix, point.position)
        noise = local.zero_pad(self.target, noise)
        return Span.of(self.inverse_mass_matrix, point.momentum, point.log_density_grad, noise)

    def _dimension(self, point: PhasePoint) -> int:
        return isokinetic.dimension("MCLMC", self.target, point.position)

    def _noise(self, dimension: int) -> jax.Array:
        """Return the share of standard normals in a unit momentum that half a step refreshes.

        sqrt((exp(ε / L) - 1) / d): the direction's correlation falls as exp(-distance / L).
        """
        share = jnp.minimum(self.step_size / self.trajectory_length, MOST_REFRESHMENT)
        return jnp.sqrt(jnp.expm1(share) / dimension)
