"""Symplectic integrators of Hamiltonian dynamics, tree-shaped."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from gspmd_mcmc import tree
from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True, eq=False)
class PhasePoint:
    """A point of phase space, with the gradient there.

    Attributes
    ----------
    position, momentum, log_density_grad
        Trees of one structure.
    """

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
    momentum = tree.axpy(step_size / 2, point.log_density_grad, point.momentum)
    position = tree.axpy(step_size, velocity(momentum), point.position)
    log_density_grad = grad(position)
    momentum = tree.axpy(step_size / 2, log_density_grad, momentum)
    return PhasePoint(position, momentum, log_density_grad)


def integrate(
    point: PhasePoint,
    step_size: jax.Array,
    num_integration_steps: jax.Array,
    grad: Callable,
    velocity: Callable,
) -> PhasePoint:
    """Take a number of leapfrogs, which may be traced; the program is the same for any number."""
    return jax.lax.fori_loop(
        0, num_integration_steps, lambda _, p: velocity_verlet(p, step_size, grad, velocity), point
    )
