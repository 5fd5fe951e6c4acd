"""Hamiltonian Monte Carlo whose trajectory length is jittered by a quasi-random sequence.

References
----------
Hoffman, Radul and Sountsov, "An Adaptive-MCMC Scheme for Setting Trajectory Lengths in Hamiltonian
Monte Carlo", AISTATS (2021); Sountsov and Hoffman, "Focusing on Difficult Directions for Learning HMC
Trajectory Lengths", arXiv:2110.11576 (2021); van der Corput, "Verteilungsfunktionen" (1935), whose
sequence is Halton's in base 2.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.hmc import HMC, HamiltonianKernel, HMCState
from gspmd_mcmc.kernels.integrators import LEAPFROG, Splitting
from gspmd_mcmc.kernels.kernel import Info, count, fraction, positive, splitting_of, target_of
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.product_precision import gradient_precision_of
from gspmd_mcmc.targets.anywhere import step_anywhere
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields, static

# On a Gaussian, with the length that the criterion then finds, a step leaves less correlation than with
# a jitter of 1: in the slowest direction also for the same work, in the squares of the worst direction
# for a step alone.
JITTER = 0.75


@pytree
@dataclass(frozen=True, eq=False, init=False)
class JitteredHMC(HamiltonianKernel):
    """HMC with trajectories of lengths spread evenly over (1 ± jitter) T, by a quasi-random sequence.

    All chains of a step have one length, so that they stay in lock-step; a fixed length would make HMC
    periodic in some directions of some posteriors. Step i takes h, between 0 and 1, from the van der
    Corput sequence in base 2, so that 2^k steps in a row see 2^k lengths evenly spread, where random
    lengths would leave gaps. Because h depends on the number of the step only, never on the position,
    every step leaves the posterior invariant.

    A pytree that holds its target, as `HMC` is. The length of each step is set
    first: ``kernel.with_jitter(rng_key, i)`` is a plain `HMC`, whose `step` each chain then takes.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or a `Target` of your own.
    step_size
        The time of a step of the integrator, in units of the metric.
    trajectory_length
        T: the mean time of a trajectory over steps, in the units of the step size. A
        trajectory has ceil((1 + jitter (2 h - 1)) T / step_size) steps, T / step_size + 1/2 on average.
    inverse_mass_matrix
        A tree like the position (diagonal), a `Metric`, or None (identity).
    max_leapfrogs
        The largest number of steps of a trajectory.
    jitter
        Between 0 and 1. With 1, as in the papers, every fourth step is shorter than half of T and
        hardly moves; with less than 1/2 there are directions in which every step returns.
    gradient_precision
        As in `HMC`. Static.
    splitting
        As in `HMC`. Static.
    """

    target: Target
    step_size: jax.Array
    trajectory_length: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    max_leapfrogs: jax.Array
    jitter: jax.Array
    gradient_precision: str = static()
    splitting: Splitting = static()
    is_per_chain: bool = static(default=False)

    def __init__(
        self,
        target: Target,
        step_size: float | jax.Array,
        trajectory_length: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        max_leapfrogs: int | jax.Array = 1000,
        jitter: float | jax.Array = JITTER,
        gradient_precision: str | None = None,
        splitting: Splitting = LEAPFROG,
    ):
        set_fields(
            self,
            target=target_of("JitteredHMC", target),
            step_size=positive("JitteredHMC", "step_size", step_size),
            trajectory_length=positive("JitteredHMC", "trajectory_length", trajectory_length),
            inverse_mass_matrix=metrics.laid_out("JitteredHMC", target, inverse_mass_matrix),
            max_leapfrogs=count("JitteredHMC", "max_leapfrogs", max_leapfrogs),
            jitter=fraction("JitteredHMC", "jitter", jitter),
            gradient_precision=gradient_precision_of("JitteredHMC", target, gradient_precision),
            splitting=splitting_of("JitteredHMC", splitting),
        )

    def with_trajectory_length(self, trajectory_length: float | jax.Array) -> "JitteredHMC":
        """Return the kernel with another mean trajectory length; nothing is recompiled."""
        length = positive("JitteredHMC", "trajectory_length", trajectory_length)
        return tree.replace(self, trajectory_length=length)

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> HMC:
        """Return the HMC of one step, for all chains at once; only the step's number matters."""
        return self._hmc(spread(step, self.jitter) * self.trajectory_length)

    def _hmc(self, length: jax.Array) -> HMC:
        number = jnp.ceil(length / self.step_size)
        # A NaN length asks for one leapfrog; the clip comes before the cast, which would wrap.
        number = jnp.where(jnp.isnan(number), 1, jnp.clip(number, 1, self.max_leapfrogs))
        kernel = HMC(
            self.target,
            self.step_size,
            number.astype(self.max_leapfrogs.dtype),
            self.inverse_mass_matrix,
            jnp.zeros_like(self.step_size),
            splitting=self.splitting,
        )
        precision = self.gradient_precision
        return tree.replace(kernel, gradient_precision=precision, is_per_chain=self.is_per_chain)

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, Info]:
        """Take one step of the mean length; the kernels of `with_jitter` have those of the sequence."""
        return self._hmc(self.trajectory_length).step(rng_key, state)


def spread(step: jax.Array, jitter: jax.Array) -> jax.Array:
    """Return the length of a step over the mean: 2^k in a row are evenly spread in 1 ± jitter."""
    h = van_der_corput(jnp.asarray(step) + 1, jitter.dtype)
    return 1 + jitter * (2 * h - 1)


def van_der_corput(index: jax.Array, dtype: Any = float) -> jax.Array:
    """Mirror the binary digits of an index at the point: 1/2, 1/4, 3/4, 1/8, ... for 1, 2, 3, 4, ..."""
    bits = jnp.asarray(index).astype(jnp.uint32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        mask = jnp.uint32(mask)
        bits = ((bits >> shift) & mask) | ((bits & mask) << shift)
    bits = (bits >> 16) | (bits << 16)
    return bits.astype(jnp.result_type(dtype)) * 2.0**-32
