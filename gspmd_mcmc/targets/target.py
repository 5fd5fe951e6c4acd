"""What a target is: a log density that answers in summands kept apart."""

from abc import ABC, abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, Partial

from gspmd_mcmc import tree
from gspmd_mcmc.groups.orders import Order
from gspmd_mcmc.placement.explicit import SameObject, on_any_mesh, whole
from gspmd_mcmc.placement.mesh import named_sharding
from gspmd_mcmc.placement.numbers import nonfinite
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets import bijections as bijective
from gspmd_mcmc.targets.local import rows_first, rows_in_place
from gspmd_mcmc.targets.streaming.rows import HasLocalRows, Rows, platform_of
from gspmd_mcmc.tree import PyTree


class Target(SameObject, ABC):
    """A log density: a frozen pytree whose leaves are its data.

    A target of your own is a frozen dataclass, registered with `pytree`, that has `terms`. The other
    methods have defaults for latents that are unconstrained and whole on every device; gradients come
    from differentiating the terms. Terms are a tree of arrays whose elements add up to the log density.
    Two positions are compared by the sum of differences, never by the difference of sums.

    Attributes
    ----------
    plates
        The plates whose rows are streamed.
    latents
        Names and shapes of the latents, where a model tells them.
    bijections
        A tree of the bijections of constrained latents, or None.
    transform
        A reparameterization of the position, or None; `transformed` applies it.
    prior
        ``prior(rng_key)``: a draw of the unconstrained latents, by name, where their prior is known.
    readers
        Who reads a latent, in words: for the error about one that nobody reads.
    """

    plates: tuple = ()
    latents: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = ()
    bijections: PyTree = None
    transform: Partial | None = None
    prior: Partial | None = None
    readers: ClassVar[str] = "nothing"

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

    @property
    def platform(self) -> str:
        """What computes with the data: "cpu", "gpu", "tpu", or "abstract" if it is not there yet."""
        for plate in self.plates:
            return plate.rows.platform
        for leaf in jax.tree.leaves(self):
            if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
                sharding = named_sharding(leaf)
                return platform_of(leaf, sharding and sharding.mesh)
        return jax.default_backend()

    # The latents.

    def origin(self) -> PyTree:
        """Return zeros in the shapes of the latents, of a model that tells them.

        Raises
        ------
        ValueError
            If this target was written as functions, which tell no shapes.
        """
        if not self.latents:
            raise ValueError(
                f"{type(self).__name__}: its functions do not tell the shapes of its latents"
            )
        return {name: jnp.zeros(x.shape, x.dtype) for name, x in self.latents}

    def transformed(self, position: PyTree) -> PyTree:
        """Return the position after a reparameterization, before bijections."""
        return position

    @on_any_mesh
    def params(self, position: PyTree) -> PyTree:
        """Return the parameters at a position: constrained values, in the model's own shapes."""
        return rows_in_place(self, self.constrained(position))

    def constrained(self, position: PyTree) -> PyTree:
        """Return the parameters at a position, with the rows of local ones first."""
        params = self.transformed(position)
        everywhere = [True] * len(jax.tree.leaves(params))
        return bijective.constrain(self.bijections, params, everywhere)[0]

    @on_any_mesh
    def unconstrain(self, params: PyTree) -> PyTree:
        """Return the position of constrained values, by the inverse of the bijections."""
        return bijective.unconstrain(self.bijections, rows_first(self, params))

    def kept(self, position: PyTree) -> PyTree:
        """Return what `Draws` keep of a position: the parameters."""
        return self.params(position)

    def local_rows(self, position: PyTree) -> list[Rows | None]:
        """Return for each leaf the rows of the plate that it is local to, or None."""
        return [None] * len(jax.tree.leaves(position, is_leaf=is_padded))

    def local_orders(self, position: PyTree) -> list[Order | None]:
        """Return for each leaf the order in which its rows lie; None where it is the user's."""
        return [None] * len(jax.tree.leaves(position, is_leaf=is_padded))

    def local_axes(self, position: PyTree) -> list[int]:
        """Return for each leaf the axis that parameters have its rows on; positions have the first."""
        return [0] * len(jax.tree.leaves(position, is_leaf=is_padded))

    def hidden_from(self, plate: HasLocalRows, params: PyTree) -> list[bool]:
        """Mark the leaves that are local to other plates only: no function of the plate sees those."""
        of_any, own = self.local_rows(params), plate.local_rows(params)
        return [a is not None and b is None for a, b in zip(of_any, own, strict=True)]

    # The terms.

    def densities(self, terms: PyTree) -> PyTree:
        """Return the terms that can give a latent a density: the Jacobian of a bijection gives none."""
        return terms

    def single_floats(self, terms: PyTree) -> PyTree:
        """Return the terms that are plain floats, whose digits rounding may cost."""
        return terms

    def layout_of_terms(self, terms: PyTree) -> PyTree:
        """Say of each term how it lies on a user's mesh (`on_any_mesh`)."""
        return whole(terms)

    def blame(self, position: PyTree, path: KeyPath, count: int) -> str:
        """Say in words why ``count`` values of the term at a path are NaN or infinite."""
        return blame_summand(self, path, count)


def blame_summand(data: PyTree, path: KeyPath, count: int) -> str:
    """Name a summand, and what is not finite of the data that it may read."""
    found = f"its summand {tree.path_str(path)} has {count} values that are NaN or infinite there"
    for data_path, data_count in nonfinite(data):
        return f"{found}; {blame_data(data_path, data_count)}"
    return found


def blame_data(path: KeyPath, count: int) -> str:
    """Name a leaf of the target's data."""
    return f"the target's data {tree.path_str(path)} has {count} values that are NaN or infinite"
