"""A plain log density of everything at once."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.placement.numbers import check_leaves
from gspmd_mcmc.placement.padding import refuse_padded
from gspmd_mcmc.targets.anywhere import grad_anywhere, on_any_mesh, terms_and_grad_anywhere
from gspmd_mcmc.targets.functions import as_partial, name_of_function, noting_shapes, summands
from gspmd_mcmc.tree import PyTree, pytree, set_fields


@pytree
@dataclass(frozen=True, eq=False, init=False)
class LogDensity:
    """A log density as one function of the position and of data.

    Parameters
    ----------
    fn
        ``fn(position, *data)`` -> a scalar, or a tree of summands whose elements add up to the log
        density. Summands kept apart (one per observation, say) keep energy differences exact where a
        float32 scalar would be rounded: at 4e6 it resolves a quarter of a nat.
    data
        Trees of arrays, as `place` lays them out. They enter programs as arguments. They are seen as
        they are: rows that `place` had to pad are refused, as nothing would mask them.
    """

    fn: Partial
    data: tuple

    def __init__(self, fn: Callable, *data: PyTree):
        refuse_padded(data, "LogDensity data", "use Posterior with a Plate, which masks them")
        check_leaves("LogDensity data", data)
        set_fields(self, fn=as_partial(fn), data=data)

    @on_any_mesh
    def terms(self, position: PyTree) -> PyTree:
        """Return the summands of the log density."""
        with noting_shapes(self.fn, position=position):
            value = self.fn(position, *self.data)
        return summands(self.fn, value)

    @grad_anywhere
    def grad(self, position: PyTree) -> PyTree:
        """Gradient of the log density, shaped like the position."""
        return self.terms_and_grad(position)[1]

    @terms_and_grad_anywhere
    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return `terms` and `grad` from one evaluation."""
        terms, pullback = jax.vjp(self.terms, position)
        return terms, pullback(tree.ones_like(terms))[0]

    def __repr__(self) -> str:
        return f"LogDensity({name_of_function(self.fn)})"
