"""Symplectic integrators of Hamiltonian dynamics, tree-shaped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax

from gspmd_mcmc import tree
from gspmd_mcmc.tree import PyTree, pytree


class Differentiable(Protocol):
    """A target, or a kernel, which has gradients of its own precision."""

    def grad(self, position: PyTree) -> PyTree:
        """Return the gradient of the log density."""
        ...

    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return the terms of the log density, and the same gradient."""
        ...


@pytree
@dataclass(frozen=True, eq=False)
class PhasePoint:
    """A point of phase space, with the gradient there: trees of one structure."""

    position: PyTree
    momentum: PyTree
    log_density_grad: PyTree


def velocity_verlet(
    point: PhasePoint, step_size: jax.Array, grad: Callable, velocity: Callable
) -> PhasePoint:
    """One leapfrog: half a kick, a drift, half a kick; one gradient.

    Second order in the step size, reversible and volume preserving.

    References
    ----------
    Verlet, Physical Review 159 (1967); Leimkuhler and Reich, Simulating Hamiltonian Dynamics (2004).
    """
    return velocity_verlet_with_terms(point, step_size, lambda x: ((), grad(x)), velocity)[0]


def velocity_verlet_with_terms(
    point: PhasePoint, step_size: jax.Array, terms_and_grad: Callable, velocity: Callable
) -> tuple[PhasePoint, PyTree]:
    """One leapfrog that also returns the target's terms at its end, from the pass of the gradient."""
    momentum = tree.axpy(step_size / 2, point.log_density_grad, point.momentum)
    position = tree.axpy(step_size, velocity(momentum), point.position)
    terms, log_density_grad = terms_and_grad(position)
    momentum = tree.axpy(step_size / 2, log_density_grad, momentum)
    return PhasePoint(position, momentum, log_density_grad), terms


def integrate(
    point: PhasePoint,
    step_size: jax.Array,
    num_integration_steps: jax.Array,
    density: Differentiable,
    velocity: Callable,
) -> tuple[PhasePoint, PyTree]:
    """Take a number of leapfrogs, at least one; return their end, and the target's terms there.

    The number may be traced; the program is the same for any number. The terms come with
    the last gradient: L leapfrogs are L reductions over a mesh, and L passes over the data, or one more
    if terms have another precision than gradients.
    """

    def leapfrog(_, point):
        return velocity_verlet(point, step_size, density.grad, velocity)

    with jax.named_scope("leapfrog"):  # reports of a program's communication name the loop so
        point = jax.lax.fori_loop(0, num_integration_steps - 1, leapfrog, point)
    return velocity_verlet_with_terms(point, step_size, density.terms_and_grad, velocity)
