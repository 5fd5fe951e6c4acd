"""The contract of a warm-up: settings whose pure functions carry a state through windows of steps.

A run owns the loop. It steps all chains with the kernel, hands each step to `update`, takes the kernel
of the next step from `tuned`, and calls `begin` and `end` around every window. Between any two steps
the kernel, the states of the chains and the state of the adaptation are all there is to keep.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import PhasePoint
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.tree import PyTree, pytree

AnyKernel = TypeVar("AnyKernel", bound=Kernel)
AcceptanceRates = Callable[[Kernel, jax.Array], jax.Array]


class Window(NamedTuple):
    """Steps ``start`` to ``end`` of warm-up, in which the metric is learned or held."""

    start: int
    end: int
    learns_metric: bool

    @classmethod
    def cut(cls, ends: Sequence[int], learn_metric: Sequence[bool]) -> "list[Window]":
        """Return windows that follow each other from step 0, by their ends."""
        return [cls(*window) for window in zip([0, *ends], ends, learn_metric, strict=False)]


class Stage(NamedTuple):
    """Windows that follow each other, and the adaptation that they belong to."""

    adaptation: "Adaptation"
    windows: list[Window]


class Transition(NamedTuple):
    """One step of all chains, leaves [chains, ...]."""

    before: Any  # the states of the kernel
    after: Any
    info: Info  # what the kernel reports of the step
    end: PhasePoint | None  # of the trajectories, accepted or not; None unless the adaptation asks


class WindowStart(NamedTuple):
    """What an adaptation may use as a window begins."""

    is_first: jax.Array  # [], whether no step was taken before
    rng_key: jax.Array
    acceptance_rates: AcceptanceRates  # (kernel, rng_key) tries one step: a rate of each chain


class Adaptation(ABC):
    """Settings of a warm-up: a frozen pytree, whose own state is data that its functions return.

    A warm-up of your own has `init`, `tuned` and `update`; everything else has a default. States have
    leaves [chains, ...]; fields of the adaptation's own state declare by `like_position` and
    `each_chain` what they are. All functions but `stages` and `windows` are traced.

    Attributes
    ----------
    metric, adapt_mass_matrix
        The estimator of the metric, and whether one is learned. Where a warm-up has the first field and
        it is None, `sample` chooses one.
    kernel_type, default_for
        The kernels that this warm-up tunes; those that `sample` tunes by it unless told otherwise.
    is_per_chain
        Whether every chain has a state of its own, so that all leaves of the state are [chains, ...].
    needs_end
        Whether `update` reads the ends of trajectories.
    traced
        Names of the kernel's numbers that are recorded at each step.
    """

    metric: Any = ()
    adapt_mass_matrix: bool = True
    kernel_type: ClassVar[type[Kernel]] = Kernel
    default_for: ClassVar[type[Kernel] | tuple[()]] = ()
    is_per_chain: ClassVar[bool] = False
    needs_end: ClassVar[bool] = False
    traced: ClassVar[tuple[str, ...]] = ("step_size",)

    @property
    def learns_metric(self) -> bool:
        """Whether there is a metric to learn, and an estimator to learn it with."""
        return self.adapt_mass_matrix and self.metric not in (None, ())

    def stages(self, num_warmup: int) -> list[Stage]:
        """Cut warm-up into stages that follow each other, each with an adaptation."""
        return [Stage(self, self.windows(num_warmup))]

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows that follow each other: by default one, with the metric held."""
        return [Window(0, num_warmup, False)] if num_warmup else []

    def with_metric(self, choose: Callable[[], Any]) -> Self:
        """Return the settings with the estimator ``choose()``, where they leave the metric open."""
        return self if self.metric is not None else tree.replace(self, metric=choose())

    def from_mode(self) -> Self:
        """Return the settings for chains that start exactly at a mode."""
        return self

    def prepare(self, kernel: AnyKernel, states: Any) -> AnyKernel:
        """Return the kernel with a metric of the structure that will be learned.

        A metric of that structure that the kernel has already stays as the first. Raises a TypeError
        for a kernel that this warm-up does not tune, a ValueError for a metric of another kind.
        """
        if not isinstance(kernel, self.kernel_type):
            raise TypeError(
                f"{type(self).__name__} tunes {self.kernel_type.__name__}, got "
                f"{type(kernel).__name__}; without warmup=, sample takes the one for that kernel"
            )
        if not self.learns_metric:
            return kernel
        own = kernel.inverse_mass_matrix
        if own is None:
            return kernel.with_inverse_mass_matrix(self.metric.identity(states.position))
        identity = jax.eval_shape(self.metric.identity, states.position)
        if _structure_and_shapes(own) != _structure_and_shapes(identity):
            raise ValueError(
                f"inverse_mass_matrix: the kernel has one of another kind than {self.metric} learns; "
                "leave the kernel's out, learn another kind, or keep it by adapt_mass_matrix=False"
            )
        # A metric of NumPy's floats may be wider than the one that is learned.
        own = jax.tree.map(lambda x, learned: x.astype(learned.dtype), own, identity)
        return tree.replace(kernel, inverse_mass_matrix=own)

    def stepper(self, kernel: Kernel) -> Kernel:
        """Return the kernel that takes the steps."""
        return kernel

    @abstractmethod
    def init(self, kernel: Kernel, states: Any) -> Any:
        """Return the state of the adaptation before any step."""

    def begin(self, state: Any, kernel: Kernel, states: Any, start: WindowStart) -> Any:
        """Begin a window."""
        return state

    @abstractmethod
    def tuned(self, kernel: Kernel, state: Any) -> Kernel:
        """Return the kernel of the next step."""

    @abstractmethod
    def update(self, state: Any, kernel: Kernel, transition: Transition) -> Any:
        """Take in one step of all chains, and the kernel that took it."""

    def end(self, state: Any, kernel: Kernel, states: Any, learns_metric: bool) -> Any:
        """End a window: learn the metric."""
        return state

    def final(self, kernel: Kernel, state: Any) -> Kernel:
        """Return the kernel to keep."""
        return self.tuned(kernel, state)

    def init_moments(self, states: Any) -> PyTree:
        """Return the moments of no draws, for the metric that is learned."""
        return self.metric.init(states.position) if self.learns_metric else ()

    def update_moments(self, moments: PyTree, states: Any) -> PyTree:
        """Take one draw of every chain into the moments."""
        return self.metric.update(moments, states.position) if self.learns_metric else moments


def _structure_and_shapes(metric: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(metric), [jnp.shape(leaf) for leaf in jax.tree.leaves(metric)]


@pytree
@dataclass(frozen=True, eq=False)
class Untuned(Adaptation):
    """A warm-up that tunes nothing: the kernel stays as it is.

    Its steps are discarded, as of any warm-up. A sampler of your own that needs no tuning returns it
    from ``default_warmup``.

    Examples
    --------
    >>> sample(rng_key, target, position, kernel=kernel, warmup=gspmd_mcmc.Untuned())
    """

    def init(self, kernel: Kernel, states: Any) -> tuple[()]:
        """Return no state."""
        return ()

    def tuned(self, kernel: Kernel, state: Any) -> Kernel:
        """Return the kernel itself."""
        return kernel

    def update(self, state: Any, kernel: Kernel, transition: Transition) -> Any:
        """Learn nothing."""
        return state
