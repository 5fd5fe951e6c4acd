"""What a warm-up is: settings whose pure functions carry a state through windows of steps.

A run owns the loop. It steps all chains with the kernel, hands each step to `update`, takes the kernel
of the next step from `tuned`, and calls `begin` and `end` around every window; between any two steps
all there is to keep is the kernel, the chains' states and the adaptation's state, all of them data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import jax

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.tree import pytree

AcceptanceRates = Callable[[Kernel, jax.Array], jax.Array]


class Window(NamedTuple):
    """Steps ``start`` to ``end`` of warm-up, in which the metric is learned or held."""

    start: int
    end: int
    learns_metric: bool


class Stage(NamedTuple):
    """Windows that follow each other, and the adaptation that they are of."""

    adaptation: "Adaptation"
    windows: list[Window]


class Transition(NamedTuple):
    """One step of all chains, leaves [chains, ...].

    Attributes
    ----------
    before, after
        The kernel's states.
    info
        What the kernel tells of the step.
    end
        Where the trajectories ended, accepted or not; None unless the adaptation asks for it.
    """

    before: Any
    after: Any
    info: Info
    end: PhasePoint | None


class Adaptation(ABC):
    """Settings of a warm-up: a frozen pytree, whose own state is data that its functions return.

    A warm-up of your own has `windows`, `init`, `tuned` and `update`, and what else it needs. States
    that are handed over have leaves [chains, ...]; fields of the adaptation's own state say by
    `like_position` and `each_chain` what they are. All but `stages` and `windows` are traced.

    Attributes
    ----------
    metric
        The estimator of the metric that is learned. Where a warm-up has such a field and it is None,
        `sample` chooses one.
    is_per_chain
        Whether every chain has a state of its own, so that all of its leaves are [chains, ...].
    needs_end
        Whether `update` looks at the ends of trajectories.
    traced
        Names of the kernel's numbers that are recorded at each step.
    """

    metric: Any = ()
    is_per_chain: ClassVar[bool] = False
    needs_end: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ("step_size",)

    def stages(self, num_warmup: int) -> list[Stage]:
        """Cut warm-up into stages that follow each other, each with an adaptation."""
        return [Stage(self, self.windows(num_warmup))]

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows that follow each other."""
        return [Window(0, num_warmup, False)] if num_warmup else []

    def with_metric(self, choose: Callable[[], Any]) -> Self:
        """Return the settings with the estimator that ``choose()`` gives, where they leave it open."""
        return self if self.metric is not None else tree.replace(self, metric=choose())

    def from_mode(self) -> Self:
        """Return the settings for chains that start exactly at a mode."""
        return self

    def prepare(self, kernel: Kernel, states: Any) -> Kernel:
        """Return the kernel with a metric of the structure that it will have; raise if it cannot."""
        return kernel

    def stepper(self, kernel: Kernel) -> Kernel:
        """Return the kernel that takes the steps."""
        return kernel

    @abstractmethod
    def init(self, kernel: Kernel, states: Any) -> Any:
        """Return the adaptation's state before any step."""

    def begin(
        self,
        state: Any,
        kernel: Kernel,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> Any:
        """Begin a window; ``acceptance_rates(kernel, rng_key)`` tries one step of every chain."""
        return state

    @abstractmethod
    def tuned(self, kernel: Kernel, state: Any) -> Kernel:
        """Return the kernel of the next step."""

    @abstractmethod
    def update(self, state: Any, kernel: Kernel, transition: Transition) -> Any:
        """Take in a step of all chains, and the kernel that took it."""

    def end(self, state: Any, kernel: Kernel, states: Any, learns_metric: bool) -> Any:
        """End a window: learn the metric."""
        return state

    def final(self, kernel: Kernel, state: Any) -> Kernel:
        """Return the kernel to keep."""
        return self.tuned(kernel, state)


@pytree
@dataclass(frozen=True, eq=False)
class Untuned(Adaptation):
    """No warm-up: the kernel stays as it is."""

    def init(self, kernel: Kernel, states: Any) -> tuple[()]:
        """Return no state."""
        return ()

    def tuned(self, kernel: Kernel, state: Any) -> Kernel:
        """Return the kernel itself."""
        return kernel

    def update(self, state: Any, kernel: Kernel, transition: Transition) -> Any:
        """Learn nothing."""
        return state
