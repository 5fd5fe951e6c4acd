"""Hamiltonian Monte Carlo whose trajectory length is jittered by a quasi-random sequence.

References
----------
Hoffman, Radul and Sountsov, "An Adaptive-MCMC Scheme for Setting Trajectory Lengths in Hamiltonian
Monte Carlo", AISTATS (2021); Sountsov and Hoffman, "Focusing on Difficult Directions for Learning HMC
Trajectory Lengths", arXiv:2110.11576 (2021); van der Corput, "Verteilungsfunktionen" (1935), whose
sequence is Halton's in base 2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import hmc, settings
from gspmd_mcmc.kernels.hmc import HMC, HMCInfo, HMCState
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.targets.anywhere import init_anywhere, step_anywhere
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields, static

# On a Gaussian, with the length that the criterion then finds, a step leaves less correlation than with
# 1: of the slowest direction for the same work too, of the worst direction's squares a step alone.
JITTER = 0.75


@pytree
@dataclass(frozen=True, eq=False, init=False)
class JitteredHMC(Kernel):
    """HMC with trajectories of lengths spread evenly over (1 ± jitter) T, by a quasi-random sequence.

    One length serves all chains of a step, so that they stay in lock-step; a fixed length would make
    HMC periodic in some directions of some posteriors. Step i takes h, between 0 and 1, from the van
    der Corput sequence in base 2, so 2^k steps in a row see 2^k lengths evenly spread, where random
    ones would leave gaps. As h depends on the step's number only, never on where a chain is, every
    step leaves the posterior as it is.

    A pytree that holds its target, as `HMC` is. Each step's length is set
    first: ``kernel.with_jitter(rng_key, i)`` is a plain `HMC`, whose `step` each chain then takes.

    Parameters
    ----------
    target
        A `Posterior`, a `LogDensity`, or any pytree with `terms`, `grad` and `terms_and_grad`.
    step_size
        Of a leapfrog, in units of the metric.
    trajectory_length
        T: the mean over steps of the time that a trajectory takes, in the units of the step size. The
        leapfrogs of a step are ceil((1 + jitter (2 h - 1)) T / step_size), so T / step_size + 1/2 in
        the mean.
    inverse_mass_matrix
        As `HMC` takes it.
    max_leapfrogs
        Leapfrogs of a trajectory at most.
    jitter
        Between 0 and 1. With 1, as in the papers, every fourth step is shorter than half of T and
        hardly moves; with less than a half there are directions that every step brings back.
    """

    target: Any
    step_size: jax.Array
    trajectory_length: jax.Array
    inverse_mass_matrix: PyTree | None = like_position()
    max_leapfrogs: jax.Array
    jitter: jax.Array
    is_per_chain: bool = static(default=False)

    draws_momenta: ClassVar[bool] = True

    def __init__(
        self,
        target: Any,
        step_size: float | jax.Array,
        trajectory_length: float | jax.Array,
        inverse_mass_matrix: PyTree | None = None,
        max_leapfrogs: int | jax.Array = 1000,
        jitter: float | jax.Array = JITTER,
    ):
        settings.require_target("JitteredHMC", target)
        settings.require(
            "JitteredHMC", "max_leapfrogs", max_leapfrogs, _is_count, "at least 1 and whole"
        )
        settings.require("JitteredHMC", "jitter", jitter, _is_share, "a number between 0 and 1")
        set_fields(
            self,
            target=target,
            step_size=settings.step_size_of("JitteredHMC", step_size),
            trajectory_length=_trajectory_length_of(trajectory_length),
            inverse_mass_matrix=settings.metric_of("JitteredHMC", target, inverse_mass_matrix),
            max_leapfrogs=settings.strong(max_leapfrogs, int),
            jitter=settings.strong(jitter, float),
        )

    def with_trajectory_length(self, trajectory_length: float | jax.Array) -> "JitteredHMC":
        """Return the kernel with another mean trajectory length; nothing compiles anew."""
        return tree.replace(self, trajectory_length=_trajectory_length_of(trajectory_length))

    def one_leapfrog(self) -> hmc.OneLeapfrog:
        """Return a kernel whose steps are one leapfrog: what a first step size is tried with."""
        return hmc.OneLeapfrog.of(self)

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> HMC:
        """Return the HMC of one step, for all chains at once; only the step's number matters."""
        return self._hmc(spread(step, self.jitter) * self.trajectory_length)

    def _hmc(self, length: jax.Array) -> HMC:
        count = jnp.ceil(length / self.step_size)
        # A length of no number asks for one leapfrog; the clip is before the cast, which would wrap.
        count = jnp.where(jnp.isnan(count), 1, jnp.clip(count, 1, self.max_leapfrogs))
        kernel = HMC(
            self.target,
            self.step_size,
            count.astype(self.max_leapfrogs.dtype),
            self.inverse_mass_matrix,
            jnp.zeros_like(self.step_size),
        )
        return tree.replace(kernel, is_per_chain=self.is_per_chain)

    @init_anywhere
    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position; errors are those of `HMC.init`."""
        return hmc.init("JitteredHMC", self.target, self.inverse_mass_matrix, position)

    @step_anywhere
    def step(self, rng_key: jax.Array, state: HMCState) -> tuple[HMCState, HMCInfo]:
        """One transition with the mean length; `with_jitter` has those of the sequence."""
        return self._hmc(self.trajectory_length).step(rng_key, state)


def spread(step: jax.Array, jitter: jax.Array) -> jax.Array:
    """Return what a step's length is times the mean: 2^k steps in a row spread it over 1 ± jitter."""
    h = van_der_corput(jnp.asarray(step) + 1, jitter.dtype)
    return 1 + jitter * (2 * h - 1)


def van_der_corput(index: jax.Array, dtype: Any = float) -> jax.Array:
    """Mirror an index's binary digits at the point: 1/2, 1/4, 3/4, 1/8, ... for 1, 2, 3, 4, ..."""
    bits = jnp.asarray(index).astype(jnp.uint32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        mask = jnp.uint32(mask)
        bits = ((bits >> shift) & mask) | ((bits & mask) << shift)
    bits = (bits >> 16) | (bits << 16)
    return bits.astype(jnp.result_type(dtype)) * 2.0**-32


def _is_count(x) -> bool:
    return x >= 1 and x == int(x)


def _is_share(x) -> bool:
    return 0 <= x <= 1


def _trajectory_length_of(length: float | jax.Array) -> jax.Array:
    def holds(x) -> bool:
        return 0 < x < float("inf")

    settings.require("JitteredHMC", "trajectory_length", length, holds, "a positive number")
    return settings.strong(length, float)
