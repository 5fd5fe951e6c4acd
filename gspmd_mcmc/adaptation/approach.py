"""Warm-ups of microcanonical kernels begin with an approach by Hamiltonian dynamics.

Microcanonical particles keep a speed of 1, and a gradient of length g turns them within a distance of
about d / g. Where g is 1e9, as it is far from a posterior, they can take no steps but tiny ones, and do
not arrive. Hamiltonian particles gain speed as they fall, and a fresh momentum takes it from them. So
chains step with HMC, tuned as `WindowAdaptation` does, until there is a first metric.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import correlation
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Transition, Window
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState, first_metric
from gspmd_mcmc.kernels.hmc import HMC, HMCInfo, HMCState, OneLeapfrog
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.tree import PyTree, pytree, static

# Leapfrogs of the approach's trajectories, in the mean; twice as many at most.
MEAN_LEAPFROGS = 16


@pytree
@dataclass(frozen=True, eq=False)
class Fall:
    """One step of HMC from another kernel's states: what they have besides stays as it is."""

    hmc: HMC

    @property
    def step_size(self) -> jax.Array:
        """That of the HMC."""
        return self.hmc.step_size

    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, HMCInfo]:
        """Take a step of one chain."""
        start = HMCState(state.position, state.log_density, state.log_density_grad, state.terms)
        end, info = self.hmc.step(rng_key, start)
        return tree.replace(state, **vars(end)), info


@pytree
@dataclass(frozen=True, eq=False)
class ApproachHMC:
    """HMC whose trajectories have 1 to 32 leapfrogs, whatever their size; others at each step."""

    target: Any
    step_size: jax.Array
    inverse_mass_matrix: PyTree

    @classmethod
    def of(cls, kernel: Any) -> Self:
        """Return the one for the target and the metric of another kernel, its step size to be tuned."""
        return cls(kernel.target, kernel.step_size, kernel.inverse_mass_matrix)

    @property
    def trajectory_length(self) -> jax.Array:
        """The mean time of a trajectory."""
        return MEAN_LEAPFROGS * self.step_size

    def one_leapfrog(self) -> "ApproachOfOneLeapfrog":
        """Return the kernel whose steps are one leapfrog: what a first step size is tried with."""
        return ApproachOfOneLeapfrog.of(self)

    def drawn(self, rng_key: jax.Array, step: jax.Array) -> Fall:
        """Return the kernel of one step: its number of leapfrogs drawn, for all chains at once."""
        length, most = self.trajectory_length, 2 * MEAN_LEAPFROGS
        hmc = JitteredHMC(self.target, self.step_size, length, self.inverse_mass_matrix, most, 1.0)
        return Fall(hmc.drawn(rng_key, step))


@pytree
@dataclass(frozen=True, eq=False)
class ApproachOfOneLeapfrog(ApproachHMC):
    """The same with one leapfrog a step, as a program then knows."""

    def drawn(self, rng_key: jax.Array, step: jax.Array) -> Fall:
        """Return the kernel of any step."""
        return Fall(OneLeapfrog.of(self))


@pytree
@dataclass(frozen=True, eq=False)
class ApproachState:
    """The tuning of the approach's HMC; that it is of this class tells that the approach goes on."""

    window: WindowState
    dimension: int = static()


class ApproachedAdaptation(ABC):
    """A warm-up that leaves the approach to HMC; then methods with an underscore take its place.

    Subclasses are frozen pytrees with at least these settings.
    """

    metric: Any
    adapt_mass_matrix: bool

    # What a length is before it is measured, over sqrt(d) in units of the metric.
    first_length: ClassVar[float] = 1.0
    needs_end: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ("step_size", "trajectory_length")

    @property
    def learns_metric(self) -> bool:
        """Whether there is a metric to learn, and an estimator to learn it with."""
        return self.adapt_mass_matrix and self.metric is not None

    @property
    def by_hmc(self) -> WindowAdaptation:
        """How the approach's HMC is tuned."""
        return WindowAdaptation(metric=self.metric, adapt_mass_matrix=self.adapt_mass_matrix)

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows: the approach, the metric's, the length's, and one to settle."""
        return correlation.windows(num_warmup, self.learns_metric)

    def prepared(self, kernel: Any, states: Any) -> Any:
        """Return the kernel with a first metric, if one is to be learned."""
        return first_metric(self.metric, kernel, states.position) if self.learns_metric else kernel

    def init(self, kernel: Any, states: Any) -> Any:
        """Return the state before any step."""
        dimension = correlation.dimension_of_chain(kernel, states.position)
        hmc = tree.replace(ApproachHMC.of(kernel), step_size=kernel.step_size / math.sqrt(dimension))
        return ApproachState(self.by_hmc.init(hmc, states), dimension)

    def begin(
        self,
        state: Any,
        kernel: Any,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> Any:
        """Begin a window: forget its moments; where there is a Metropolis test search a step size."""
        if not isinstance(state, ApproachState):
            return self._begin(state, kernel, states, rng_key, acceptance_rates)
        hmc = ApproachHMC.of(kernel)
        window = self.by_hmc.begin(state.window, hmc, states, is_first, rng_key, acceptance_rates)
        return tree.replace(state, window=window)

    def tuned(self, kernel: Any, state: Any) -> Any:
        """Return the kernel with the step size, length and metric of this moment."""
        if not isinstance(state, ApproachState):
            return self._tuned(kernel, state)
        return self.by_hmc.tuned(ApproachHMC.of(kernel), state.window)

    def update(self, state: Any, kernel: Any, transition: Transition) -> Any:
        """Take in one step of all chains; a few numbers are summed over them, once."""
        if not isinstance(state, ApproachState):
            return self._update(state, kernel, transition)
        return tree.replace(state, window=self.by_hmc.update(state.window, kernel, transition))

    def end(self, state: Any, kernel: Any, states: Any, learns_metric: bool) -> Any:
        """End a window: a new metric, or the length that suits.

        With the first metric, if one is learned, the approach is over.
        """
        if not isinstance(state, ApproachState):
            return self._end(state, kernel, states, learns_metric)
        hmc = ApproachHMC.of(kernel)
        window = self.by_hmc.end(state.window, hmc, states, learns_metric)
        state = tree.replace(state, window=window)
        if learns_metric != self.learns_metric:
            return state
        arrived = self.final(kernel, state)
        step_size = correlation.first_step_size(arrived, states, state.dimension)
        return self._init(tree.replace(arrived, step_size=step_size), states)

    def final(self, kernel: Any, state: Any) -> Any:
        """Return the kernel to keep."""
        if not isinstance(state, ApproachState):
            return self._final(kernel, state)
        root = math.sqrt(state.dimension)
        hmc = self.by_hmc.final(ApproachHMC.of(kernel), state.window)
        return tree.replace(
            kernel,
            step_size=root * hmc.step_size,
            trajectory_length=jnp.full_like(kernel.trajectory_length, self.first_length * root),
            inverse_mass_matrix=hmc.inverse_mass_matrix,
        )

    @abstractmethod
    def _init(self, kernel: Any, states: Any) -> Any:
        """Return the state with which the kernel's own windows begin, from a kernel for them."""

    @abstractmethod
    def _begin(
        self,
        state: Any,
        kernel: Any,
        states: Any,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> Any: ...

    @abstractmethod
    def _tuned(self, kernel: Any, state: Any) -> Any: ...

    @abstractmethod
    def _update(self, state: Any, kernel: Any, transition: Transition) -> Any: ...

    @abstractmethod
    def _end(self, state: Any, kernel: Any, states: Any, learns_metric: bool) -> Any: ...

    @abstractmethod
    def _final(self, kernel: Any, state: Any) -> Any: ...
