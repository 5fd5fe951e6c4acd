"""Warm-ups of microcanonical kernels begin with a burn-in by Hamiltonian dynamics.

Microcanonical particles keep a speed of 1, and a gradient of length g turns them within a distance of
about d / g. Where g is 1e9, as it is far from a posterior, they can take only tiny steps, and do not
arrive. Hamiltonian particles gain speed as they fall, and a fresh momentum takes it from them. So
chains step with HMC, tuned as `WindowAdaptation` does, until there is a first metric.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import batch_means
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Adaptation, Stage, Transition
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState
from gspmd_mcmc.kernels.hmc import HMC, HMCInfo, HMCState, OneLeapfrog
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.tree import PyTree, like_position, pytree, static

# Leapfrogs of the burn-in's trajectories, in the mean; twice as many at most.
MEAN_LEAPFROGS = 16


@pytree
@dataclass(frozen=True, eq=False)
class HMCOnStates(Kernel):
    """Steps of an HMC from another kernel's states: what they have besides stays as it is."""

    hmc: HMC

    @property
    def step_size(self) -> jax.Array:
        """That of the HMC."""
        return self.hmc.step_size

    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position."""
        return self.hmc.init(position)

    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, HMCInfo]:
        """Take a step of one chain."""
        start = HMCState(state.position, state.log_density, state.log_density_grad, state.terms)
        end, info = self.hmc.step(rng_key, start)
        return tree.replace(state, **vars(end)), info


@pytree
@dataclass(frozen=True, eq=False)
class BurnInHMC(Kernel):
    """HMC whose trajectories have 1 to 32 leapfrogs, whatever their size; others at each step."""

    target: Any
    step_size: jax.Array
    inverse_mass_matrix: PyTree = like_position()
    has_one_leapfrog: bool = static(default=False)
    is_per_chain: bool = static(default=False)

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        """Return the one for the target, the step size and the metric of another kernel."""
        return cls(kernel.target, kernel.step_size, kernel.inverse_mass_matrix)

    def one_leapfrog(self) -> "BurnInHMC":
        """Return the kernel whose steps are one leapfrog: what a first step size is tried with."""
        return tree.replace(self, has_one_leapfrog=True)

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> HMCOnStates:
        """Return the kernel of one step: its number of leapfrogs drawn, for all chains at once."""
        if self.has_one_leapfrog:
            return HMCOnStates(OneLeapfrog.of(self))
        length, most = MEAN_LEAPFROGS * self.step_size, 2 * MEAN_LEAPFROGS
        hmc = JitteredHMC(self.target, self.step_size, length, self.inverse_mass_matrix, most, 1.0)
        return HMCOnStates(hmc.with_jitter(rng_key, step))

    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position."""
        return OneLeapfrog.of(self).init(position)

    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, HMCInfo]:
        """Take a step of the first of the trajectories."""
        return self.with_jitter(rng_key, jnp.zeros((), jnp.int32)).step(rng_key, state)


@pytree
@dataclass(frozen=True, eq=False)
class HMCBurnInState:
    """The tuning of the HMC, and how many dimensions the position has."""

    window: WindowState
    dimension: int = static()


@pytree
@dataclass(frozen=True, eq=False)
class HMCBurnIn(Adaptation):
    """The first stage of a warm-up: another kernel's chains step by HMC, and a metric is learned.

    While it lasts the kernel holds the step size of the HMC. In the end its step size is sqrt(d) times
    that, and its length ``first_length`` sqrt(d), in units of the metric.

    Parameters
    ----------
    by_window
        How the HMC is tuned.
    first_length
        What the kernel's length is before it is measured, over sqrt(d).
    """

    by_window: WindowAdaptation
    first_length: float = static()

    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    def stepper(self, kernel: Kernel) -> BurnInHMC:
        """Return the HMC that takes the steps."""
        return BurnInHMC.of(kernel)

    def init(self, kernel: Kernel, states: Any) -> HMCBurnInState:
        """Return the state before any step."""
        dimension = batch_means.dimension_of_chain(kernel, states.position)
        hmc = tree.replace(kernel, step_size=kernel.step_size / math.sqrt(dimension))
        return HMCBurnInState(self.by_window.init(hmc, states), dimension)

    def begin(
        self,
        state: HMCBurnInState,
        kernel: Kernel,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> HMCBurnInState:
        """Begin a window: search a step size for its metric, and forget the moments."""
        hmc = BurnInHMC.of(kernel)
        window = self.by_window.begin(state.window, hmc, states, is_first, rng_key, acceptance_rates)
        return tree.replace(state, window=window)

    def tuned(self, kernel: Kernel, state: HMCBurnInState) -> Kernel:
        """Return the kernel with the step size and the metric of this moment."""
        tuned = self.by_window.tuned(kernel, state.window)
        return tree.replace(tuned, trajectory_length=MEAN_LEAPFROGS * tuned.step_size)

    def update(self, state: HMCBurnInState, kernel: Kernel, transition: Transition) -> HMCBurnInState:
        """Take in one step of all chains."""
        return tree.replace(state, window=self.by_window.update(state.window, kernel, transition))

    def end(
        self, state: HMCBurnInState, kernel: Kernel, states: Any, learns_metric: bool
    ) -> HMCBurnInState:
        """End a window: a new metric, if one is learned."""
        window = self.by_window.end(state.window, kernel, states, learns_metric)
        return tree.replace(state, window=window)

    def final(self, kernel: Any, state: HMCBurnInState) -> Kernel:
        """Return the kernel for the stages to come."""
        root = math.sqrt(state.dimension)
        kernel = self.by_window.final(kernel, state.window)
        return tree.replace(
            kernel,
            step_size=root * kernel.step_size,
            trajectory_length=jnp.full_like(kernel.trajectory_length, self.first_length * root),
        )


class AfterHMCBurnIn(Adaptation):
    """A warm-up that leaves its first windows to `HMCBurnIn`; subclasses have at least these settings.

    Attributes
    ----------
    metric, adapt_mass_matrix
        The kind of metric that is learned; whether one is, or the kernel's own is kept.
    first_length
        What a length is before it is measured, over sqrt(d) in units of the metric.
    """

    metric: Any
    adapt_mass_matrix: bool
    first_length: ClassVar[float] = 1.0
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    @property
    def learns_metric(self) -> bool:
        """Whether there is a metric to learn, and an estimator to learn it with."""
        return self.adapt_mass_matrix and self.metric is not None

    @property
    def by_hmc(self) -> WindowAdaptation:
        """How the HMC of the burn-in is tuned."""
        return WindowAdaptation(metric=self.metric, adapt_mass_matrix=self.adapt_mass_matrix)

    def stages(self, num_warmup: int) -> list[Stage]:
        """Cut warm-up: the burn-in, until it has learned a metric; then those of the kernel."""
        windows = batch_means.windows(num_warmup, self.learns_metric)
        is_last = [w.learns_metric == self.learns_metric for w in windows]
        count = is_last.index(True) + 1 if True in is_last else len(windows)
        burn_in = HMCBurnIn(self.by_hmc, self.first_length)
        return [Stage(burn_in, windows[:count]), Stage(self, windows[count:])]

    def arrived(self, kernel: Kernel, states: Any) -> Kernel:
        """Return the kernel with a first step size for where the burn-in has led."""
        dimension = batch_means.dimension_of_chain(kernel, states.position)
        return tree.replace(kernel, step_size=batch_means.first_step_size(kernel, states, dimension))
