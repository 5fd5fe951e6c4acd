"""What a warm-up is: settings whose pure functions carry a state through windows of steps.

A driver owns the loop. It steps all chains with the kernel that is `tuned` at this moment, hands each
step to `update`, and calls `begin` and `end` around every window; between any two steps all there is to
keep is the chains' states and the adaptation's state, both of them data.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax

from gspmd_mcmc.kernels.integrators import PhasePoint

AcceptanceRates = Callable[[Any, jax.Array], jax.Array]


class Window(NamedTuple):
    """Steps ``start`` to ``end`` of warm-up, in which the metric is learned or held."""

    start: int
    end: int
    learns_metric: bool


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
    info: Any
    end: PhasePoint | None


class Adaptation(Protocol):
    """Settings of a warm-up: a frozen pytree, whose own state is data that its functions return.

    States that are handed over have leaves [chains, ...]. All but `windows` are traced.

    Attributes
    ----------
    needs_end
        Whether `update` looks at the ends of trajectories.
    traced
        Names of the kernel's numbers that are recorded at each step.
    """

    needs_end: ClassVar[bool]
    traced: ClassVar[tuple[str, ...]]

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows that follow each other."""
        ...

    def prepare(self, kernel: Any, states: Any) -> Any:
        """Return the kernel with a metric of the structure that it will have; raise if it cannot."""
        ...

    def init(self, kernel: Any, states: Any) -> Any:
        """Return the adaptation's state before any step."""
        ...

    def begin(
        self,
        state: Any,
        kernel: Any,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> Any:
        """Begin a window; ``acceptance_rates(kernel, rng_key)`` tries one step of every chain."""
        ...

    def tuned(self, kernel: Any, state: Any) -> Any:
        """Return the kernel of the next step."""
        ...

    def update(self, state: Any, kernel: Any, transition: Transition) -> Any:
        """Take in a step of all chains, and the kernel that took it."""
        ...

    def end(self, state: Any, kernel: Any, states: Any, learns_metric: bool) -> Any:
        """End a window: learn the metric."""
        ...

    def final(self, kernel: Any, state: Any) -> Any:
        """Return the kernel to keep."""
        ...
