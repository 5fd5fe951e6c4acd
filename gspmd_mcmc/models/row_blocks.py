"""A model of named sites, turned into a posterior whose plates are streamed.

Joint distributions and NumPyro models come here. Both can be run again on any block of rows: with the
block's rows of their sharded arguments and of the latents that live there. A plate's term of a row is
then the sum of its sites' log probabilities in that row.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey

from gspmd_mcmc.functions.function import of_model
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.padding import Padded, is_padded, real_rows
from gspmd_mcmc.targets.bijections import constrain
from gspmd_mcmc.targets.plate import Plate
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.rows import row_axes
from gspmd_mcmc.targets.streaming.tiling import is_live
from gspmd_mcmc.tree import PyTree, path_str

# Rows of the block on which a model is tried.
TRIAL_ROWS = 3


class CannotStream(ValueError):
    """A plate couples its rows, so that blocks of them cannot be evaluated apart.

    Attributes
    ----------
    plate
        Its name.
    """

    def __init__(self, plate: str, reason: str):
        super().__init__(f"plate {plate!r} cannot be streamed: {reason}")
        self.plate = plate


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
    """

    name: str
    plate: str | None
    latent: jax.ShapeDtypeStruct | None


@dataclass(frozen=True, eq=False)
class Blocks:
    """A model, and which of its arguments' leaves are rows of which plate.

    Attributes
    ----------
    name
        What the model is called.
    evaluate
        ``evaluate(values, args, sizes, wanted) -> {site: log probability}``: run the model with the
        constrained values of all latents, for plates of other sizes than their own (``sizes``: name to
        rows). Those of a site in a sharded plate have the rows first.
    sites
        All sites.
    args
        The tree of arguments; arrays are `Padded` or as they are placed.
    plate_of_leaf
        For each leaf of the arguments, the plate whose rows are its leading axis, or None.
    num_rows
        The rows of each sharded plate.
    bijections
        Name to bijection, for constrained latents.
    door
        What a user calls to make a target of the model.
    """

    name: str
    evaluate: Callable
    sites: tuple[Site, ...]
    args: PyTree
    plate_of_leaf: tuple[str | None, ...]
    num_rows: dict[str, int]
    bijections: dict[str, Any]
    door: str

    def posterior(self) -> Posterior:
        """Build the target.

        Raises
        ------
        CannotStream
            If the model cannot be evaluated on blocks of a plate, or reads another plate's rows there.
        """
        standins = self._standins()
        for plate in (*self.num_rows, None):
            self._check_apart(plate, standins)
        model = self.without_arrays()
        prior = of_model(self.door, _named(model._prior, self.name), *standins)
        plates = [
            Plate(
                of_model(
                    self.door, _named(partial(model._rows, plate), f"{self.name}.{plate}"), *standins
                ),
                self._leaves_of(plate),
                local=self._local(plate),
            )
            for plate in self.num_rows
        ]
        return Posterior(prior, *plates, bijections=self.bijections or None)

    def without_arrays(self) -> "Blocks":
        """Return what functions of a target hold: data of other values are no other program."""
        return replace(self, args=jax.tree.map(_shape, self.args))

    def _prior(self, leaves: list, dummies: dict, params: PyTree) -> dict[str, jax.Array]:
        """Log probabilities of the sites outside of sharded plates."""
        sizes = dict.fromkeys(self.num_rows, 1)
        wanted = tuple(s.name for s in self.sites if s.plate is None)
        return self.evaluate(dummies | params, self._tree(leaves), sizes, wanted)

    def _rows(self, plate: str, leaves: list, dummies: dict, params: PyTree, block: list) -> jax.Array:
        """Terms of the rows of a plate's block; the other plates are one row each."""
        num = len(block[0])
        rows = iter(block)
        leaves = [
            next(rows) if p == plate else x for x, p in zip(leaves, self.plate_of_leaf, strict=True)
        ]
        sizes = dict.fromkeys(self.num_rows, 1) | {plate: num}
        wanted = tuple(s.name for s in self.sites if s.plate == plate)
        terms = self.evaluate(dummies | params, self._tree(leaves), sizes, wanted)
        return sum(jnp.sum(x.reshape(num, -1), axis=1) for x in terms.values())  # pyright: ignore

    def _standins(self) -> tuple[list, dict]:
        """Return what stands for rows that are not there: an argument's first, any of a latent."""
        leaves = [
            _whole(x) if plate is None else _first_row(x)
            for x, plate in zip(self._leaves(), self.plate_of_leaf, strict=True)
        ]
        zeros = {
            s.name: jnp.zeros((1, *s.latent.shape[1:]), s.latent.dtype)
            for s in self.sites
            if s.latent is not None and s.plate is not None
        }
        return leaves, _constrained(self.bijections, zeros)

    def _check_apart(self, plate: str | None, standins: tuple[list, dict]) -> None:
        """Try a plate's block (or the prior) in the abstract: it runs, and reads no stand-in."""
        leaves, dummies = standins
        if plate is None:
            jaxpr = jax.make_jaxpr(self._prior)(leaves, dummies, self._shapes(None, 1))
        else:
            jaxpr = self._trace_block(plate, leaves, dummies)
        owner_of = {s.name: s.plate for s in self.sites}
        owners = [*self.plate_of_leaf, *(owner_of[name] for name in sorted(dummies))]
        names = [f"argument {name}" for name in self._names()] + [
            f"latent {n!r}" for n in sorted(dummies)
        ]
        live = is_live(jaxpr.jaxpr)[: len(owners)]
        for is_read, owner, name in zip(live, owners, names, strict=True):
            if is_read and owner not in (None, plate):
                where = "sites outside of it" if plate is None else f"the sites of plate {plate!r}"
                raise CannotStream(owner, f"{where} read its {name}, which couples its rows")

    def _trace_block(self, plate: str, leaves: list, dummies: dict) -> Any:
        data = self._leaves_of(plate)
        if not data:
            raise CannotStream(plate, "no argument of the model has its rows")
        num = min(TRIAL_ROWS, self.num_rows[plate])
        block = [jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype) for x in map(_values, data)]
        try:
            return jax.make_jaxpr(partial(self._rows, plate))(
                leaves, dummies, self._shapes(plate, num), block
            )
        except Exception as error:  # anything that a model does on a block and not on the whole
            reason = f"on {num} of its rows alone, the model fails with {_short(error)}"
            raise CannotStream(plate, reason) from error

    def _shapes(self, plate: str | None, num: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the constrained latents that are shown to a block of a plate, or to the prior."""
        position = {}
        for site in self.sites:
            if site.latent is not None and site.plate in (None, plate):
                shape = site.latent.shape if site.plate is None else (num, *site.latent.shape[1:])
                position[site.name] = jax.ShapeDtypeStruct(shape, site.latent.dtype)
        return jax.eval_shape(lambda x: constrain(self.bijections, x, [True] * len(x))[0], position)

    def _leaves(self) -> list:
        return jax.tree.leaves(self.args, is_leaf=is_padded)

    def _names(self) -> list[str]:
        paths = jax.tree_util.tree_leaves_with_path(self.args, is_leaf=is_padded)
        return [
            p[0].key if len(p) == 1 and isinstance(p[0], DictKey) else path_str(p) for p, _ in paths
        ]

    def _tree(self, leaves: list) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(self.args, is_leaf=is_padded), leaves)

    def _leaves_of(self, plate: str) -> list:
        return [x for x, p in zip(self._leaves(), self.plate_of_leaf, strict=True) if p == plate]

    def _local(self, plate: str) -> tuple[str, ...]:
        return tuple(s.name for s in self.sites if s.plate == plate and s.latent is not None)


def rows_of_plates(args: PyTree, num_rows: dict[str, int], axes: dict[str, Any]) -> tuple:
    """Find the plate whose rows each leaf of the arguments has, by length and mesh axis.

    Leaves that no mesh has placed count by their length alone.
    """
    owners = []
    for leaf in jax.tree.leaves(args, is_leaf=is_padded):
        rows = leaf.num_rows if isinstance(leaf, Padded) else (np.shape(leaf) or (None,))[0]
        over = row_axes(_values(leaf))
        fits = [p for p, n in num_rows.items() if n == rows and over in (None, _as_tuple(axes[p]))]
        owners.append(fits[0] if fits else None)
    return tuple(owners)


@jax.jit
def _constrained(bijections: dict[str, Any], values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return constrain(bijections, values, [True] * len(values))[0]


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _as_tuple(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def unpadded(args: PyTree) -> PyTree:
    """Return a tree of arguments with the real rows of its `Padded` leaves."""
    return jax.tree.map(_whole, args, is_leaf=is_padded)


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, Padded) else leaf


def _whole(leaf: Any) -> Any:
    return real_rows(leaf) if isinstance(leaf, Padded) else leaf


def _first_row(leaf: Any) -> Any:
    values = _values(leaf)
    if isinstance(values, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *values.shape[1:]), values.dtype)
    return jnp.asarray(np.asarray(to_host(values[:1])))


def _named(function: Callable, name: str) -> Callable:
    def named(*args):
        return function(*args)

    named.__name__ = name
    return named


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
