"""What a kernel is: settings on a target, whose steps leave the target's density as it is."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels import settings
from gspmd_mcmc.tree import PyTree, over_steps, pytree


@pytree
@dataclass(frozen=True, eq=False)
class Info:
    """What one transition did; every field is a scalar.

    Attributes
    ----------
    acceptance_rate
        min(1, exp(-energy_error)): the probability with which the proposal was accepted.
    is_accepted, is_divergent
        Whether the chain moved; whether the energy error exceeded 1000 or was not finite.
    energy
        The Hamiltonian where the transition ended, in nats.
    energy_error
        The Hamiltonian of the proposal less that of the start, in nats, summed over differences.
    num_integration_steps
        Gradients.
    """

    acceptance_rate: jax.Array = over_steps(jnp.add, is_mean=True)
    is_accepted: jax.Array
    is_divergent: jax.Array = over_steps(jnp.logical_or)
    energy: jax.Array
    energy_error: jax.Array
    num_integration_steps: jax.Array = over_steps(jnp.add)


class Kernel(ABC):
    """A sampler of a target: a frozen dataclass, registered by `pytree`, that holds the target.

    A kernel of your own has these three settings, `init` and `step`; what else is here has a meaning
    that serves most. Fields of its state say by `like_position` which of them are trees like the
    position; all are mapped over chains.

    Attributes
    ----------
    target, step_size, inverse_mass_matrix
        What it samples; what warm-ups tune. A kernel without one of the last two has None there.
    is_per_chain
        Whether step size and metric have a first axis of chains. Static.
    draws_momenta
        Whether each transition draws its momenta anew: its energies are then judged by E-BFMI.
    max_tree_depth
        Of a sampler that has trees: how often a trajectory doubles at most.
    note
        What a summary says of all draws of the kernel, as no statistic of theirs shows it.
    """

    draws_momenta: ClassVar[bool] = False
    max_tree_depth: int | None = None
    note: ClassVar[str] = ""

    target: Any
    step_size: jax.Array
    inverse_mass_matrix: Any
    is_per_chain: bool = False

    @abstractmethod
    def init(self, position: PyTree) -> Any:
        """Return the state at a position.

        It has the fields ``position``, ``log_density``, ``log_density_grad`` and ``terms``, and others
        of any name.
        """

    @abstractmethod
    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, Info]:
        """Take a step of one chain."""

    def transition(self, rng_key: jax.Array, state: Any) -> tuple[Any, Info, Any]:
        """Take a step; return besides where its trajectory ended, accepted or not, if it tells that."""
        return *self.step(rng_key, state), None

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "Kernel":
        """Return the kernel of step number ``step``, with what all chains share in it drawn."""
        return self

    def one_leapfrog(self) -> "Kernel":
        """Return the kernel whose steps are one leapfrog: what a first step size is tried with."""
        return self

    def with_step_size(self, step_size: float | jax.Array) -> Self:
        """Return the kernel with another step size; nothing compiles anew."""
        return tree.replace(self, step_size=settings.step_size_of(type(self).__name__, step_size))

    def with_inverse_mass_matrix(self, inverse_mass_matrix: Any) -> Self:
        """Return the kernel with another metric; one of another structure is another program."""
        metric = settings.metric_of(type(self).__name__, self.target, inverse_mass_matrix)
        return tree.replace(self, inverse_mass_matrix=metric)
