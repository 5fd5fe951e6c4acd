"""A model of named sites, turned into a posterior whose plates are streamed.

Joint distributions and NumPyro models come here. Both can be run again on any block of rows: with the
block's rows of their sharded arguments and of the latents that live there. A plate's term of a row is
then the sum of its sites' log probabilities in that row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from gspmd_mcmc import tree
from gspmd_mcmc.jax_private import open_program
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.mesh import axes_of
from gspmd_mcmc.placement.padding import is_padded, num_real_rows, real_rows, values_of
from gspmd_mcmc.targets.bijections import ByModel, constrain
from gspmd_mcmc.targets.function import of_model
from gspmd_mcmc.targets.independence import coupling_of
from gspmd_mcmc.targets.local import lay_out
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.targets.streaming.rows import row_axes
from gspmd_mcmc.targets.streaming.tiling import is_live
from gspmd_mcmc.tree import PyTree, path_str

# Rows of the block on which a model is tried.
TRIAL_ROWS = 3


class CannotStream(ValueError):
    """A plate couples its rows, so that blocks of them cannot be evaluated apart.

    Attributes
    ----------
    plate, reason
        Its name, and what couples them.
    read_by
        The plate whose rows read it, if that is why.
    """

    def __init__(self, plate: str, reason: str, read_by: str | None = None):
        super().__init__(f"plate {plate!r} cannot be streamed: {reason}")
        self.plate, self.reason, self.read_by = plate, reason, read_by


@dataclass(frozen=True)
class Site:
    """A named part of a model.

    Attributes
    ----------
    name
        Its name: of a latent, the position's.
    plate
        The sharded plate that it lies in, or None.
    latent
        Shape and dtype of the unconstrained value, its rows first; None for an observed site.
    bijection
        Of a constrained latent.
    axis
        The axis that the plate's rows are on in the model's own values.
    """

    name: str
    plate: str | None
    latent: jax.ShapeDtypeStruct | None = None
    bijection: Any = None
    axis: int = 0


@dataclass(frozen=True, eq=False)
class Streamed:
    """How the rows of a plate are streamed.

    Attributes
    ----------
    terms
        ``terms(leaves, dummies, params, block)``: a term for each row of a block of ``data``.
    data
        The arguments that have its rows.
    local
        Names of the latents that a block has rows of.
    groups
        The plate that its rows lie with, if they read it by an index.
    """

    terms: Callable
    data: Any
    local: tuple[str, ...]
    groups: str | None = None


@dataclass(frozen=True, eq=False)
class SiteModel(ABC):
    """A model whose sites have names, and whose arguments have the rows of plates.

    Attributes
    ----------
    name, door
        What the model is called, and what a user calls to make a target of it.
    args
        The tree of arguments; arrays are `Padded` or as they are placed.
    sites
        All sites.
    plate_of_leaf
        For each leaf of the arguments, the plate whose rows are its leading axis, or None.
    num_rows
        The rows of each sharded plate.
    derived_names
        Further values that `Draws` keep with the latents.
    """

    name: str
    door: str
    args: PyTree
    sites: tuple[Site, ...]
    plate_of_leaf: tuple[str | None, ...]
    num_rows: dict[str, int]
    derived_names: tuple[str, ...]

    @abstractmethod
    def log_probs(self, values: dict, args: PyTree, sizes: dict, wanted: tuple) -> dict[str, jax.Array]:
        """Run the model, and return log probabilities of the wanted sites, by row within a plate.

        ``values`` are constrained values of all latents, rows first; plates may have other ``sizes``
        than their own (name to rows).
        """

    @abstractmethod
    def derived(self, args: PyTree, params: dict) -> dict[str, jax.Array]:
        """Return the further values that `Draws` keep, in the model's own shapes.

        ``params`` are constrained values of all latents, rows first.
        """

    @abstractmethod
    def draw(self, args: PyTree, rng_key: jax.Array) -> dict[str, jax.Array]:
        """Draw the latents from their prior: unconstrained values, rows first."""

    @property
    def latents(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Names and shapes of the latents, in the order of the sites."""
        return {s.name: s.latent for s in self.sites if s.latent is not None}

    @property
    def bijections(self) -> dict[str, Any]:
        """Bijections of constrained latents."""
        return {s.name: s.bijection for s in self.sites if s.bijection is not None}

    @property
    def by_model(self) -> frozenset[str]:
        """Latents that come unconstrained, as only the model knows their support."""
        return frozenset(s.name for s in self.sites if is_by_model(s))

    def posterior(self) -> Posterior:
        """Build the target.

        Raises
        ------
        CannotStream
            If the model cannot be evaluated on blocks of a plate, or reads another plate's rows there.
        """
        standins = self._standins()
        streamed = self.streamed(*standins)
        model, function = self.without_arrays(), partial(of_model, self.door)
        plates = []
        for name, x in streamed.items():
            terms = function(_Named(x.terms, f"{self.name}.{name}"), *standins)
            plate = Plate(terms, x.data, local=x.local)
            axes = ((s.name, s.axis) for s in self.sites if s.axis and s.name in x.local)
            plates.append(tree.replace(plate, row_axes=tuple(axes)))
        prior = function(_Named(model._prior, self.name), *standins)
        target = tree.replace(
            Posterior(prior, *plates, bijections=self.bijections or None),
            latents=tuple(self.latents.items()),
            derived=function(model.derived, self.args) if self.derived_names else None,
            prior=function(model.draw, self.args),
        )
        for i, (name, x) in enumerate(streamed.items()):
            if x.groups is not None and (coupling := _coupling_of(target, i)):
                raise CannotStream(x.groups, f"plate {name!r} reads it, and {coupling}", name)
        return target

    def streamed(self, leaves: list, dummies: dict) -> dict[str, Streamed]:
        """Say of each plate how it is streamed, given stand-ins for rows that are not there.

        Raises
        ------
        CannotStream
            As `posterior`.
        """
        for plate in (*self.num_rows, None):
            self.check_apart(plate, leaves, dummies)
        return {plate: self.streamed_alone(plate) for plate in self.num_rows}

    def streamed_alone(self, plate: str) -> Streamed:
        """Return how a plate is streamed that reads no other."""
        terms = partial(self.without_arrays()._rows, plate)
        return Streamed(terms, self.leaves_of(plate), self.latents_of(plate))

    def without_arrays(self) -> Self:
        """Return what functions of a target hold: data of other values are no other program."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.args)
        # The posterior has the bijections, whose bounds may be data.
        bare = (replace(s, bijection=s.bijection if is_by_model(s) else None) for s in self.sites)
        return tree.replace(self, args=shapes, sites=tuple(bare))

    def _prior(self, leaves: list, dummies: dict, params: PyTree) -> dict[str, jax.Array]:
        """Log probabilities of the sites outside of sharded plates."""
        sizes = dict.fromkeys(self.num_rows, 1)
        wanted = tuple(s.name for s in self.sites if s.plate is None)
        return self.log_probs(dummies | params, self._tree(leaves), sizes, wanted)

    def _rows(self, plate: str, leaves: list, dummies: dict, params: PyTree, block: list) -> jax.Array:
        """Terms of the rows of a plate's block; the other plates are one row each."""
        rows = iter(block)
        pairs = zip(leaves, self.plate_of_leaf, strict=True)
        leaves = [next(rows) if p == plate else x for x, p in pairs]
        return self.terms_of(plate, {plate: len(block[0])}, leaves, dummies | params)

    def terms_of(self, plate: str, sizes: dict[str, int], leaves: list, values: dict) -> jax.Array:
        """Terms of a plate's rows where plates have other sizes; those that are not named have 1."""
        wanted = tuple(s.name for s in self.sites if s.plate == plate)
        sizes = dict.fromkeys(self.num_rows, 1) | sizes
        terms = self.log_probs(values, self._tree(leaves), sizes, wanted)
        num = sizes[plate]
        return sum(jnp.sum(x.reshape(num, -1), axis=1) for x in terms.values())  # pyright: ignore

    def log_probs_of_all(
        self, sizes: dict[str, int], leaves: list, values: dict
    ) -> dict[str, jax.Array]:
        """Log probabilities of all sites where plates have these sizes."""
        return self.log_probs(values, self._tree(leaves), sizes, tuple(s.name for s in self.sites))

    def _standins(self) -> tuple[list, dict]:
        """Return what stands for rows that are not there: an argument's first, any of a latent."""
        pairs = zip(self.leaves(), self.plate_of_leaf, strict=True)
        leaves = [real_rows(x) if plate is None else _first_row(values_of(x)) for x, plate in pairs]
        zeros = {
            s.name: jnp.zeros((1, *s.latent.shape[1:]), s.latent.dtype)
            for s in self.sites
            if s.latent is not None and s.plate is not None
        }
        return leaves, _constrained(self.bijections, zeros)

    def check_apart(
        self, plate: str | None, leaves: list, dummies: dict, is_read: bool = False
    ) -> None:
        """Try a plate's block (or the prior) in the abstract: it runs, and reads no stand-in.

        A plate that the rows of another one read needs no arguments.
        """
        for owner, name in self.foreign_reads(plate, leaves, dummies, is_read):
            where = "sites outside of it" if plate is None else f"the sites of plate {plate!r}"
            raise CannotStream(owner, f"{where} read its {name}, which couples its rows")

    def foreign_reads(
        self, plate: str | None, leaves: list, dummies: dict, is_read: bool = False
    ) -> list[tuple[str, str]]:
        """Return the stand-ins that a plate's block (or the prior) reads: whose they are, and names."""
        if plate is None:
            jaxpr = jax.make_jaxpr(self._prior)(leaves, dummies, self.shapes_of({}))
        elif not is_read and not self.leaves_of(plate):
            raise CannotStream(plate, "no argument of the model has its rows")
        else:
            jaxpr = self._trace_block(plate, leaves, dummies)
        owner_of = {s.name: s.plate for s in self.sites}
        owners = [*self.plate_of_leaf, *(owner_of[name] for name in sorted(dummies))]
        paths = jax.tree_util.tree_leaves_with_path(self.args, is_leaf=is_padded)
        names = [f"argument {_argument(path)}" for path, _ in paths]
        names += [f"latent {name!r}" for name in sorted(dummies)]
        live = is_live(open_program(jaxpr))[: len(owners)]
        found = zip(owners, names, live, strict=True)
        return [(o, name) for o, name, reads in found if reads and o is not None and o != plate]

    def _trace_block(self, plate: str, leaves: list, dummies: dict) -> Any:
        num = min(TRIAL_ROWS, self.num_rows[plate])
        block = [
            jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype) if p == plate else x
            for x, p in zip(leaves, self.plate_of_leaf, strict=True)
        ]

        def terms(leaves, dummies, params):
            return self.terms_of(plate, {plate: num}, leaves, dummies | params)

        try:
            return jax.make_jaxpr(terms)(block, dummies, self.shapes_of({plate: num}))
        except Exception as error:  # anything that a model does on a block and not on the whole
            raise fails_on_block(plate, num, error) from error

    def shapes_of(self, sizes: dict[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the constrained latents outside of plates, and of plates of these sizes."""
        position = {}
        for site in self.sites:
            if site.latent is not None and (site.plate is None or site.plate in sizes):
                rows = () if site.plate is None else (sizes[site.plate],)
                shape = (*rows, *site.latent.shape[len(rows) :])
                position[site.name] = jax.ShapeDtypeStruct(shape, site.latent.dtype)
        return jax.eval_shape(partial(_constrained, self.bijections), position)

    def latents_of(self, plate: str) -> tuple[str, ...]:
        """Names of the latents in a plate."""
        return tuple(s.name for s in self.sites if s.plate == plate and s.latent is not None)

    def leaves_of(self, plate: str) -> list:
        """Return the leaves of the arguments that have a plate's rows."""
        return [x for x, p in zip(self.leaves(), self.plate_of_leaf, strict=True) if p == plate]

    def leaves(self) -> list:
        """Return the leaves of the arguments, `Padded` or as they are placed."""
        return jax.tree.leaves(self.args, is_leaf=is_padded)

    def _tree(self, leaves: list) -> PyTree:
        return jax.tree.structure(self.args, is_leaf=is_padded).unflatten(leaves)


def fails_on_block(plate: str, num: int, error: Exception) -> CannotStream:
    """Return the error of a plate on whose blocks a model fails."""
    first = (*str(error).strip().splitlines(), "")[0]
    reason = f"{type(error).__name__}: {first}"[:300]
    return CannotStream(plate, f"on {num} of its rows alone, the model fails with {reason}")


def _coupling_of(target: Posterior, which: int) -> str | None:
    """Say in words which row of a plate depends on the rows beside it; None if none does."""
    return coupling_of(target, which, lay_out(target, target.origin()))


def is_by_model(site: Site) -> bool:
    """Tell whether only the model knows a latent's support."""
    return isinstance(site.bijection, ByModel)


def fitting_plates(args: PyTree, num_rows: dict[str, int], axes: dict[str, Any]) -> list[list[str]]:
    """Find for each leaf of the arguments the plates whose rows it may have, by length and mesh axis.

    Leaves that no mesh has placed count by their length alone.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(args, is_leaf=is_padded):
        rows, over = num_real_rows(leaf, f"argument {path_str(path)}"), row_axes(values_of(leaf))
        found.append([p for p, n in num_rows.items() if n == rows and over in (None, axes_of(axes[p]))])
    return found


def cannot_draw(what: str, distribution: Any) -> ValueError:
    """Return the error of a distribution that has no draws."""
    return ValueError(
        f"prior_start: {what} has a distribution that cannot be drawn from, "
        f"{type(distribution).__name__}. Give it a proper prior, or start around a position: "
        "gspmd_mcmc.uniform_start(target.origin())"
    )


def must_be_continuous(what: str) -> ValueError:
    """Return the error of a discrete latent."""
    return ValueError(
        f"{what} and not observed: HMC moves through continuous space. Sum it out of the log density, "
        "or observe it"
    )


@jax.jit
def _constrained(bijections: dict[str, Any], values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return constrain(bijections, values, [True] * len(values))[0]


def _argument(path: Any) -> str:
    is_key = len(path) == 1 and isinstance(path[0], DictKey)
    return path[0].key if is_key else path_str(path)


def _first_row(values: Any) -> Any:
    if isinstance(values, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *values.shape[1:]), values.dtype)
    return jnp.asarray(np.asarray(to_host(values[:1])))


@dataclass(frozen=True, eq=False)
class _Named:
    """A function under the name that messages have for it; it pickles, as draws do that hold it."""

    function: Callable
    name: str

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    @property
    def __name__(self) -> str:
        return self.name

    def __repr__(self) -> str:  # without the model, which may have placeholders for its arrays
        return self.name
