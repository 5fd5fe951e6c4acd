"""Burn-in by Hamiltonian dynamics, with which warm-ups of microcanonical kernels begin.

Microcanonical particles keep a speed of 1, and a gradient of length g turns them within a distance of
about d / g. Where g is 1e9, as it is far from a posterior, they can only take tiny steps, and never
arrive. Hamiltonian particles gain speed as they fall, and a fresh momentum takes it away. So chains
step with HMC, tuned as by `WindowAdaptation`, until there is a first metric.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import batch_means
from gspmd_mcmc.adaptation.adaptation import Adaptation, Stage, Transition, WindowStart
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState
from gspmd_mcmc.kernels.hmc import HMC, HMCState, OneLeapfrog
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, like_position, pytree, static

# The mean number of leapfrogs of a trajectory in the burn-in; at most there are twice as many.
MEAN_LEAPFROGS = 16


@pytree
@dataclass(frozen=True, eq=False)
class HMCOnStates(Kernel):
    """Steps of an HMC from another kernel's states, whose other fields stay as they are."""

    hmc: HMC

    @property
    def step_size(self) -> jax.Array:
        """The step size of the HMC."""
        return self.hmc.step_size

    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position."""
        return self.hmc.init(position)

    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, Info]:
        """Take a step of one chain."""
        start = HMCState(state.position, state.log_density, state.log_density_grad, state.terms)
        end, info = self.hmc.step(rng_key, start)
        return tree.replace(state, **vars(end)), info


@pytree
@dataclass(frozen=True, eq=False)
class BurnInHMC(Kernel):
    """HMC whose trajectories have 1 to 32 leapfrogs, a number that is drawn at each step."""

    target: Target
    step_size: jax.Array
    inverse_mass_matrix: PyTree = like_position()
    gradient_precision: str = static()
    is_per_chain: bool = static(default=False)

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        """Return the kernel with the target, the step size, the metric and the precision of another."""
        metric, precision = kernel.inverse_mass_matrix, kernel.gradient_precision
        return cls(kernel.target, kernel.step_size, metric, precision)

    def one_leapfrog(self) -> HMCOnStates:
        """Return the kernel whose steps are one leapfrog; it tries first step sizes."""
        return HMCOnStates(OneLeapfrog.of(self))

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> HMCOnStates:
        """Return the kernel of one step, its number of leapfrogs drawn for all chains at once."""
        length, most = MEAN_LEAPFROGS * self.step_size, 2 * MEAN_LEAPFROGS
        hmc = JitteredHMC(self.target, self.step_size, length, self.inverse_mass_matrix, most, 1.0)
        hmc = tree.replace(hmc, gradient_precision=self.gradient_precision)
        return HMCOnStates(hmc.with_jitter(rng_key, step))

    def init(self, position: PyTree) -> HMCState:
        """Evaluate the target at a position."""
        return OneLeapfrog.of(self).init(position)

    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, Info]:
        """Take step number 0 of one chain."""
        return self.with_jitter(rng_key, jnp.zeros((), jnp.int32)).step(rng_key, state)


@pytree
@dataclass(frozen=True, eq=False)
class HMCBurnInState:
    """The tuning of the HMC, and the number of dimensions of the position."""

    window: WindowState
    dimension: int = static()


@pytree
@dataclass(frozen=True, eq=False)
class HMCBurnIn(Adaptation):
    """The first stage of a warm-up: another kernel's chains step by HMC and learn a metric.

    During the stage the kernel holds the step size of the HMC. At the end its step size is sqrt(d)
    times that, and its trajectory length ``first_length`` sqrt(d), in units of the metric.
    """

    by_window: WindowAdaptation  # how the HMC is tuned
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
        self, state: HMCBurnInState, kernel: Kernel, states: Any, start: WindowStart
    ) -> HMCBurnInState:
        """Begin a window: search for the step size of its metric, and forget the moments."""
        window = self.by_window.begin(state.window, BurnInHMC.of(kernel), states, start)
        return tree.replace(state, window=window)

    def tuned(self, kernel: Kernel, state: HMCBurnInState) -> Kernel:
        """Return the kernel with the current step size and metric."""
        tuned = self.by_window.tuned(kernel, state.window)
        return tree.replace(tuned, trajectory_length=MEAN_LEAPFROGS * tuned.step_size)

    def update(self, state: HMCBurnInState, kernel: Kernel, transition: Transition) -> HMCBurnInState:
        """Learn from one step of all chains."""
        return tree.replace(state, window=self.by_window.update(state.window, kernel, transition))

    def end(
        self, state: HMCBurnInState, kernel: Kernel, states: Any, learns_metric: bool
    ) -> HMCBurnInState:
        """End a window: update the metric, if one is learned."""
        window = self.by_window.end(state.window, kernel, states, learns_metric)
        return tree.replace(state, window=window)

    def final(self, kernel: Kernel, state: HMCBurnInState) -> Kernel:
        """Return the kernel for the stages that follow."""
        root = math.sqrt(state.dimension)
        kernel = self.by_window.final(kernel, state.window)
        return tree.replace(
            kernel,
            step_size=root * kernel.step_size,
            trajectory_length=jnp.full_like(kernel.step_size, self.first_length * root),
        )


class AfterHMCBurnIn(Adaptation):
    """A warm-up whose first stage is `HMCBurnIn`. Subclasses have at least these settings."""

    metric: Any  # the kind to learn
    adapt_mass_matrix: bool  # or keep the kernel's own
    first_length: ClassVar[float] = 1.0  # before it is measured, over sqrt(d), in units of the metric
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    @property
    def by_hmc(self) -> WindowAdaptation:
        """The adaptation of the HMC of the burn-in."""
        return WindowAdaptation(metric=self.metric, adapt_mass_matrix=self.adapt_mass_matrix)

    def stages(self, num_warmup: int) -> list[Stage]:
        """Cut warm-up into two stages: the burn-in, until it has learned a metric, and the kernel's."""
        windows = batch_means.windows(num_warmup, self.learns_metric)
        is_last = [w.learns_metric == self.learns_metric for w in windows]
        count = is_last.index(True) + 1 if True in is_last else len(windows)
        burn_in = HMCBurnIn(self.by_hmc, self.first_length)
        return [Stage(burn_in, windows[:count]), Stage(self, windows[count:])]

    def arrived(self, kernel: Kernel, states: Any) -> Kernel:
        """Return the kernel with a first step size for where the burn-in ended."""
        dimension = batch_means.dimension_of_chain(kernel, states.position)
        return tree.replace(kernel, step_size=batch_means.first_step_size(kernel, states, dimension))
