"""What a target is: a log density that answers in summands kept apart."""

from abc import ABC, abstractmethod
from typing import Any

import jax

from gspmd_mcmc import tree
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets.rows import Rows
from gspmd_mcmc.tree import PyTree


class Target(ABC):
    """A log density: a frozen pytree whose leaves are its data.

    A target of your own has `terms`; the rest of what is here serves one whose latents are whole, and
    differentiates the terms. Terms are a tree of arrays whose elements add up to the log density: two
    positions are compared by the sum of differences, never by the difference of sums.

    Attributes
    ----------
    plates
        The plates whose rows are streamed.
    latents
        Names and shapes of the latents, where a model tells them.
    bijections
        A tree of the bijections of constrained latents, or None.
    prior
        A `PriorDraw`, where the latents can be drawn from their prior.
    """

    plates: tuple = ()
    latents: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = ()
    bijections: PyTree = None
    prior: Any = None

    @abstractmethod
    def terms(self, position: PyTree) -> PyTree:
        """Return a tree of arrays whose elements add up to the log density."""

    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return `terms` and `grad` from one evaluation."""
        terms, pullback = jax.vjp(self.terms, position)
        return terms, pullback(tree.ones_like(terms))[0]

    def grad(self, position: PyTree) -> PyTree:
        """Gradient of the log density, shaped like the position."""
        return self.terms_and_grad(position)[1]

    def local_rows(self, position: PyTree) -> list[Rows | None]:
        """Return for each leaf the rows of the plate that it is local to, or None."""
        return [None] * len(jax.tree.leaves(position, is_leaf=is_padded))

    def kept(self, position: PyTree) -> PyTree:
        """Return what `Draws` keep of a position."""
        return position

    def single_floats(self, terms: PyTree) -> PyTree:
        """Return the terms that are plain numbers, which rounding may cost digits."""
        return terms
