"""The contract of a kernel: settings on a target, whose steps leave the target's density invariant."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import Splitting
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.product_precision import FULL, products_in
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.anywhere import no_context_mesh
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, is_traced, over_steps, pytree


@pytree
@dataclass(frozen=True, eq=False)
class Info:
    """What one transition did; every field is a scalar.

    Attributes
    ----------
    acceptance_rate
        min(1, exp(-energy_error)): the probability that the proposal is accepted.
    is_accepted, is_divergent
        Whether the chain moved; whether the energy error exceeds 1000 or is not finite.
    energy
        The Hamiltonian at the end of the transition, in nats.
    energy_error
        The Hamiltonian of the proposal minus that of the start, in nats, summed over differences.
    num_integration_steps
        Gradient evaluations.
    """

    acceptance_rate: jax.Array = over_steps(jnp.add, is_mean=True)
    is_accepted: jax.Array
    is_divergent: jax.Array = over_steps(jnp.logical_or)
    energy: jax.Array
    energy_error: jax.Array
    num_integration_steps: jax.Array = over_steps(jnp.add)


class Kernel(ABC):
    """A sampler of a target: a frozen dataclass, registered by `pytree`, that holds the target.

    A kernel of your own has the three settings below, `init` and `step`. Everything else here has a
    default that suits most kernels. Fields of its state declare by `like_position` which of them are
    trees like the position; all of them are mapped over chains.

    Attributes
    ----------
    target, step_size, inverse_mass_matrix
        What the kernel samples, and what warm-up tunes. The last two are None where a kernel has none.
    is_per_chain
        Whether step size and metric have a first axis of chains. Static.
    gradient_precision
        The precision of matrix products in gradients: full, unless a kernel has the setting. Static.
    draws_momenta
        Whether each transition draws its momentum anew, so that E-BFMI judges its energies.
    is_adjusted
        Whether a Metropolis test corrects each step, so that acceptance rates can tune the step size.
    max_tree_depth
        The largest number of doublings of a trajectory, for kernels that build trees.
    note
        What a summary says of all draws of this kernel, because no statistic shows it.
    """

    draws_momenta: ClassVar[bool] = False
    is_adjusted: ClassVar[bool] = True
    max_tree_depth: int | None = None
    note: ClassVar[str] = ""

    target: Target
    step_size: jax.Array
    inverse_mass_matrix: PyTree
    is_per_chain: bool = False
    gradient_precision: str = FULL

    @abstractmethod
    def init(self, position: PyTree) -> Any:
        """Return the state at a position.

        It has the fields ``position``, ``log_density``, ``log_density_grad`` and ``terms``, and others
        of any name.
        """

    @abstractmethod
    def step(self, rng_key: jax.Array, state: Any) -> tuple[Any, Info]:
        """Take one step of one chain."""

    def transition(self, rng_key: jax.Array, state: Any) -> tuple[Any, Info, Any]:
        """Take a step; also return the end of its trajectory, accepted or not, or None."""
        return *self.step(rng_key, state), None

    def with_jitter(self, rng_key: jax.Array, step: jax.Array) -> "Kernel":
        """Return the kernel of step number ``step``: what all chains share in that step is drawn."""
        return self

    def one_leapfrog(self) -> "Kernel":
        """Return a kernel whose steps are one leapfrog: the search for a first step size uses it."""
        return self

    def default_warmup(self) -> Any:
        """Return the `Adaptation` that `sample` uses for this kernel unless told otherwise, or None."""
        return None

    def with_step_size(self, step_size: float | jax.Array) -> Self:
        """Return the kernel with another step size; nothing is recompiled."""
        return tree.replace(self, step_size=positive(type(self).__name__, "step_size", step_size))

    def with_inverse_mass_matrix(self, inverse_mass_matrix: PyTree) -> Self:
        """Return the kernel with another metric; one of another structure is another program."""
        metric = metrics.laid_out(type(self).__name__, self.target, inverse_mass_matrix)
        return tree.replace(self, inverse_mass_matrix=metric)

    def grad(self, position: PyTree) -> PyTree:
        """Return the gradient of the log density, its products in `gradient_precision`."""
        with products_in(self.gradient_precision):
            return self.target.grad(position)

    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return the target's terms, in full precision, and `grad`; if all is full, from one pass.

        Terms have 32 bits at least: the Metropolis test subtracts them and adds up the differences.
        """
        with products_in(FULL):
            if self.gradient_precision == FULL:
                terms, grad = self.target.terms_and_grad(position)
                return tree.widened(terms), grad
            terms = tree.widened(self.target.terms(position))
        # One pass after the other, so that what each holds of all rows is not there at the same time.
        terms, position = jax.lax.optimization_barrier((terms, position))
        return terms, self.grad(position)

    def velocity(self, momentum: PyTree) -> PyTree:
        """Return M⁻¹ p."""
        return metrics.velocity(self.inverse_mass_matrix, momentum)

    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        """Draw p ~ N(0, M), shaped like the position and zero in the pad of local latents."""
        momentum = metrics.sample_momentum(rng_key, self.inverse_mass_matrix, position)
        return local.zero_pad(self.target, momentum)


# The settings of kernels: checked, and turned into leaves of a pytree


def target_of(kernel: str, target: Any) -> Target:
    """Return a target; raise unless it is one."""
    if isinstance(target, type):
        raise TypeError(
            f"{kernel}: expected a target (Posterior, LogDensity), got the class {target.__name__} "
            "itself; build one of your functions and data"
        )
    if not isinstance(target, Target):
        raise TypeError(
            f"{kernel}: expected a target (Posterior, LogDensity), got {type(target).__name__}; wrap a "
            "function as gspmd_mcmc.LogDensity(fn, *data), a NumPyro model by "
            "gspmd_mcmc.from_numpyro(model, data), a joint distribution by its condition(y=data); a "
            "class of your own is a gspmd_mcmc.Target"
        )
    return target


def positive(kernel: str, name: str, value: float | jax.Array) -> jax.Array:
    """Return a positive number as a leaf."""
    return _leaf(kernel, name, value, float, lambda x: 0 < x < np.inf, "a positive number")


def fraction(kernel: str, name: str, value: float | jax.Array) -> jax.Array:
    """Return a number between 0 and 1 as a leaf."""
    return _leaf(kernel, name, value, float, lambda x: 0 <= x <= 1, "a number between 0 and 1")


def count(kernel: str, name: str, value: int | jax.Array) -> jax.Array:
    """Return a whole number of at least 1 as a leaf."""
    return _leaf(kernel, name, value, int, lambda x: x >= 1 and x == int(x), "at least 1 and whole")


def splitting_of(kernel: str, splitting: Any) -> Splitting:
    """Return a splitting; raise unless it is one."""
    if not isinstance(splitting, Splitting):
        raise TypeError(
            f"{kernel}: splitting: expected gspmd_mcmc.LEAPFROG or gspmd_mcmc.MINIMAL_NORM, got "
            f"{splitting!r}"
        )
    return splitting


def _leaf(kernel: str, name: str, value: Any, kind: type, holds: Callable, expected: str) -> jax.Array:
    """Turn a number into an uncommitted strong scalar, so that another number is no other program."""
    if is_traced(value):
        return value
    is_number = isinstance(value, int | float | np.number | np.ndarray | jax.Array)
    # On the host: in a program that is being staged jnp would trace the comparison.
    if not is_number or np.shape(value) or not holds(np.asarray(value)):
        raise ValueError(f"{kernel}: {name}: expected {expected}, got {value!r}")
    with no_context_mesh():
        return jnp.asarray(np.asarray(value), dtype=jnp.result_type(kind))
