"""A plain log density of everything at once."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.tree_util import Partial

from gspmd_mcmc.placement.numbers import as_arrays
from gspmd_mcmc.placement.padding import refuse_padded
from gspmd_mcmc.targets import bijections as bijective
from gspmd_mcmc.targets.anywhere import grad_anywhere, on_any_mesh, terms_and_grad_anywhere
from gspmd_mcmc.targets.function import as_partial, name_of_function, noting_shapes, summands
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, pytree, set_fields


@pytree
@dataclass(frozen=True, eq=False, init=False)
class LogDensity(Target):
    """A log density as one function of the position and of data.

    Parameters
    ----------
    fn
        ``fn(position, *data)`` -> a scalar, or a tree of summands whose elements add up to the log
        density. Separate summands (one per observation, say) keep energy differences exact where a
        float32 scalar would be rounded: at 4e6 it resolves a quarter of a nat.
    data
        Trees of arrays, as `place` lays them out, which enter programs as arguments. `Padded` arrays
        are refused, as nothing would mask their pad.
    bijections
        A tree of NumPyro bijections for constrained latents, as for `Posterior`: ``fn`` and `Draws` see
        constrained values, positions are unconstrained, and the Jacobians are added.
    """

    fn: Partial
    data: tuple
    bijections: PyTree

    def __init__(self, fn: Callable, *data: PyTree, bijections: PyTree = None):
        refuse_padded(data, "LogDensity data", "use Posterior with a Plate, which masks them")
        arrays = as_arrays("LogDensity data", data)
        set_fields(self, fn=as_partial(fn), data=arrays, bijections=bijections)

    @on_any_mesh
    def terms(self, position: PyTree) -> PyTree:
        """Return the summands of the log density."""
        bijective.check(self.bijections, position)
        everywhere = [True] * len(jax.tree.leaves(position))
        params, log_jacobians = bijective.constrain(self.bijections, position, everywhere)
        with noting_shapes(self.fn, position=params):
            value = self.fn(params, *self.data)
        terms = summands(self.fn, value)
        return terms if self.bijections is None else {"fn": terms, "jacobians": log_jacobians}

    grad = grad_anywhere(Target.grad)
    terms_and_grad = terms_and_grad_anywhere(Target.terms_and_grad)

    def densities(self, terms: PyTree) -> PyTree:
        """Return the summands without Jacobians."""
        return terms if self.bijections is None else terms["fn"]

    def __repr__(self) -> str:
        return f"LogDensity({name_of_function(self.fn)})"
