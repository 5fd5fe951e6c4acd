"""Symplectic integrators of Hamiltonian dynamics, tree-shaped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

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


class Splitting(NamedTuple):
    """Alternating kicks and drifts of a step, as fractions of the step size; kicks are first and last.

    Both are palindromes, so that a step is reversible: from its end with the momentum turned round it
    returns to its start. A step costs one gradient for each drift.
    """

    kicks: tuple[float, ...]
    drifts: tuple[float, ...]


LEAPFROG = Splitting(kicks=(0.5, 0.5), drifts=(1.0,))
# McLachlan, "On the numerical integration of ordinary differential equations by symmetric composition
# methods", SIAM J. Sci. Comput. 16 (1995); Omelyan, Mryglod and Folk, Comput. Phys. Commun. 151 (2003).
_OUTER = 0.1931833275037836
MINIMAL_NORM = Splitting(kicks=(_OUTER, 1 - 2 * _OUTER, _OUTER), drifts=(0.5, 0.5))


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
    splitting: Splitting,
    point: PhasePoint,
    step_size: jax.Array,
    num_steps: jax.Array,
    density: Differentiable,
    velocity: Callable,
) -> tuple[PhasePoint, PyTree]:
    """Take a number of steps of Hamilton's equations, at least one; return the end and its terms."""

    def drift(point, time):
        return tree.axpy(time, velocity(point.momentum), point.position)

    def kick(point, time):
        momentum = tree.axpy(time, point.log_density_grad, point.momentum)
        return tree.replace(point, momentum=momentum), ()

    return compose(splitting, point, step_size, num_steps, density, drift, kick)[:2]


def compose(
    splitting: Splitting,
    point: PhasePoint,
    step_size: jax.Array,
    num_steps: jax.Array,
    density: Differentiable,
    drift: Callable[[PhasePoint, jax.Array], PyTree],
    kick: Callable[[PhasePoint, jax.Array], tuple[PhasePoint, PyTree]],
) -> tuple[PhasePoint, PyTree, PyTree]:
    """Take a number of steps, at least one; return their end, the target's terms there, and all gains.

    Where one step ends and the next begins, two kicks at one position are one kick of both times. So an
    iteration of the loop is a gradient, a kick and a drift: what updates momenta and positions is one
    pass over both. The last gradient is separate: its kick is shorter, and the target's terms come with
    it. D drifts are D reductions over a mesh, and D passes over the data, or one more if terms have
    another precision than gradients. The number of steps may be traced; the program is the same for any
    number.

    Parameters
    ----------
    splitting, point, step_size, num_steps, density
        Of a step; the start, with the gradient there; the time of a step; how many; what gives
        gradients and terms.
    drift, kick
        Of a point and a time: the position after a drift; the point after a kick, and what the kick
        gained, a tree of numbers that are added up.
    """
    num_drifts = len(splitting.drifts)
    kicks = (*splitting.kicks[1:-1], 2 * splitting.kicks[-1])

    def at(i, fractions):
        """Return the time of drift or kick number i."""
        if num_drifts == 1:
            return step_size * fractions[0]
        return step_size * jnp.asarray(fractions, step_size.dtype)[i % num_drifts]

    def drifted(point, time):
        return tree.replace(point, position=drift(point, time))

    def turn(i, carry):
        point, gain = carry
        point = tree.replace(point, log_density_grad=density.grad(point.position))
        point, more = kick(point, at(i, kicks))
        return drifted(point, at(i + 1, splitting.drifts)), tree.add(gain, more)

    point, gain = kick(point, step_size * splitting.kicks[0])
    start = drifted(point, step_size * splitting.drifts[0]), gain
    with jax.named_scope("leapfrog"):  # reports of a program's communication name the loop so
        point, gain = jax.lax.fori_loop(0, num_steps * num_drifts - 1, turn, start)
    terms, grad = density.terms_and_grad(point.position)
    point = tree.replace(point, log_density_grad=grad)
    point, more = kick(point, step_size * splitting.kicks[-1])
    return point, terms, tree.add(gain, more)
