"""SNAPER: cross-chain adaptation whose trajectory length suits the direction that mixes slowest.

Like ChEES, but the criterion is along the leading principal component q of the posterior in units of
its scales: E[((q·z')² - (q·z)²)²]. The component is learned online, by Oja's rule over chains. In many
dimensions |z|² drowns the slow direction in the noise of the others; (q·z)² does not.

To the criterion of the paper λ E[(q·z' - q·z)²] is added, where λ is the variance of q·z. Squares
decorrelate most a quarter of a period later, means half a period later. For a Gaussian whose q·z' has
correlation ρ with q·z the sum is 2 λ² (3 - ρ - 2 ρ²), with its maximum at ρ = -1/4, beyond the quarter:
a step is then worth 2/3 more for means, and 1/8 less for squares.

References
----------
Sountsov and Hoffman, "Focusing on Difficult Directions for Learning HMC Trajectory Lengths",
arXiv:2110.11576 (2021); Oja, "A Simplified Neuron Model as a Principal Component Analyzer", Journal of
Mathematical Biology 15 (1982); Weng, Zhang and Hwang, "Candid Covariance-free Incremental Principal
Component Analysis", IEEE TPAMI 25 (2003).
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.chees import (
    ChEESAdaptation,
    Criterion,
    RunningMean,
    Trajectories,
    mean_of_chains,
)
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, pytree, static


@pytree
@dataclass(frozen=True, eq=False)
class PrincipalState:
    """The running mean of positions, and that of C q/|q|, whose direction is the leading one of C."""

    positions: RunningMean
    direction: RunningMean


@dataclass(frozen=True)
class ChangeAlongPrincipal:
    """SNAPER's (q·z)² and, with half its weight, q·z; q is the principal component, of length 1."""

    def init(self, target: Target, positions: PyTree) -> PrincipalState:
        """Begin at the mean over chains, and a random direction that is the same on every mesh."""
        one = jax.tree.map(lambda x: x[0], positions)
        direction = local.zero_pad(target, tree.normal_like(jax.random.key(0), one))
        return PrincipalState(RunningMean.of(mean_of_chains(positions)), RunningMean.of(direction))

    def measure(
        self, state: PrincipalState, trajectories: Trajectories
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return q·z at the start, the squared change, and its rate of change at the end."""
        before, end, velocity, variances = trajectories
        q = state.direction.mean
        dual = jax.tree.map(lambda q, v: q * jax.lax.rsqrt(v), q, variances)
        center = state.positions.mean

        def products(before, end, velocity):
            parts = (tree.sub(before, center), tree.sub(end, before), velocity)
            return tuple(tree.dot(dual, x) for x in parts)

        # What is learned from `start` must not depend on the ends, which may not be finite.
        parts = jax.vmap(products)(before, end, velocity)
        variance = jnp.sqrt(tree.dot(q, q))
        start, moved, rate = (x / jnp.where(variance > 0, variance, 1) for x in parts)
        change, change_rate = moved * (2 * start + moved), 2 * (start + moved) * rate
        square = change**2 + variance * moved**2
        return start, square, 2 * (change * change_rate + variance * moved * rate)

    def update(
        self, state: PrincipalState, measured: jax.Array, trajectories: Trajectories, target: Target
    ) -> PrincipalState:
        """Take in the starts of the trajectories: Oja's rule, the mean over chains of (q·z) z."""
        positions, variances = trajectories.before, trajectories.variances
        center = state.positions.mean

        def image(x, m, v):
            weight = measured.astype(x.dtype).reshape(-1, *(1,) * m.ndim)
            return jnp.mean(weight * (x - m[None]), axis=0) * jax.lax.rsqrt(v)

        images = local.zero_pad(target, jax.tree.map(image, positions, center, variances))
        return PrincipalState(
            state.positions.add(mean_of_chains(positions)), state.direction.add(images)
        )


@pytree
@dataclass(frozen=True, eq=False)
class SNAPERAdaptation(ChEESAdaptation):
    """Settings of a warm-up of `JitteredHMC` by many chains: `ChEESAdaptation`, along one direction.

    Parameters are those of `ChEESAdaptation`; ``criterion`` is `ChangeAlongPrincipal`, and
    ``length_cost`` is higher.
    """

    length_cost: float = 0.5
    criterion: Criterion = static(default=ChangeAlongPrincipal())

    default_for: ClassVar[type[JitteredHMC]] = JitteredHMC
