"""A posterior: a prior over shared parameters, and plates of rows that are streamed over the mesh."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey, KeyPath, Partial, SequenceKey

from gspmd_mcmc import tree
from gspmd_mcmc.groups.orders import Order
from gspmd_mcmc.jax_private import open_program
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import whole
from gspmd_mcmc.placement.numbers import num_nonfinite
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets import bijections as bijective
from gspmd_mcmc.targets.anywhere import grad_anywhere, on_any_mesh, terms_and_grad_anywhere
from gspmd_mcmc.targets.function import as_partial, name_of_function, noting_shapes, summands
from gspmd_mcmc.targets.local import Local, arrays, as_laid, cut, held, without, wrap
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.targets.streaming.rows import Rows
from gspmd_mcmc.targets.streaming.tiling import is_live
from gspmd_mcmc.targets.target import Target, blame_data, blame_summand
from gspmd_mcmc.tree import PyTree, pytree, set_fields, static


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Posterior(Target):
    """A log density: a prior over the parameters plus the log likelihoods of plates of rows.

    Parameters
    ----------
    log_prior
        ``log_prior(params) -> summands``: a tree of arrays whose elements add up to the log prior of
        the shared parameters; local ones (`Plate`) are not in ``params``. An array of a latent's shape
        is best, as differences are then taken element by element; scalars serve too. None if all
        latents are local. Write a flat prior as ``lambda params: jnp.zeros(())``.
    plates
        One `Plate` or more.
    transform
        ``transform(position) -> params``: a reparameterization, applied once per gradient, before the
        rows are streamed. It must preserve volume (a rotation, a shift), as no Jacobian is added. Bind
        arrays that it needs with ``jax.tree_util.Partial``. It acts within each row of a local leaf,
        because rows may be padded and in another order: a sum over rows is refused. `Draws`,
        ``derived`` and ``collect`` have the parameters; positions are those before it.
    bijections
        Alternatively, a tree of NumPyro bijections (``numpyro.distributions.biject_to(support)``) for
        the constrained latents, each at its latent's place in the position; other latents need no
        entry. Positions are then unconstrained, parameters and `Draws` are constrained, and the
        Jacobians are added. The bijection of a local latent acts within a row.
    derived
        ``derived(params) -> dict``: what `Draws` keep of a draw in addition to its parameters, which
        must be a dict too. It sees all parameters, whole.
    """

    readers: ClassVar[str] = "neither log_prior nor a plate"

    log_prior: Partial
    plates: tuple[Plate, ...]
    transform: Partial | None
    bijections: PyTree
    derived: Partial | None
    latents: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = static()  # where a model tells them
    prior: Partial | None = field(repr=False)  # the density does not depend on it

    def __init__(
        self,
        log_prior: Callable | None,
        *plates: Plate,
        transform: Callable | None = None,
        bijections: PyTree = None,
        derived: Callable | None = None,
    ):
        if transform is not None and bijections is not None:
            raise ValueError("Posterior: expected one of transform and bijections, got both")
        for i, plate in enumerate(plates):
            if not isinstance(plate, Plate):
                raise TypeError(f"Posterior: plate {i}: expected a Plate, got {type(plate).__name__}")
        _check_names(plates)
        set_fields(
            self,
            log_prior=as_partial(_no_prior if log_prior is None else log_prior),
            plates=_with_bijections(plates, bijections),
            transform=None if transform is None else as_partial(transform),
            bijections=bijections,
            derived=None if derived is None else as_partial(derived),
            latents=(),
            prior=None,
        )

    # Positions and parameters.

    def transformed(self, position: PyTree) -> PyTree:
        """Return the position after the reparameterization, before bijections."""
        if self.transform is None:
            return position
        if not any(map(is_padded, jax.tree.leaves(position, is_leaf=is_padded))):
            return self.transform(position)
        stored = arrays(as_laid(self, position))
        with noting_shapes(self.transform, position=stored):
            return held(self, self.transform(stored), "transform")

    def unconstrain(self, params: PyTree) -> PyTree:
        """Return the position of constrained values, by the inverse of the bijections.

        Raises
        ------
        ValueError
            If there is a ``transform``: it is a function without an inverse.
        """
        if self.transform is not None:
            raise ValueError(
                "unconstrain: the position of these parameters is not known, because transform has no "
                "inverse here. Write the inverse as a function of your own; to start where a run "
                "ended, pass sample gspmd_mcmc.per_chain(draws.state.position)"
            )
        return super().unconstrain(params)

    def local_rows(self, position: PyTree) -> list[Rows | None]:
        """Return for each leaf the rows of the plate that it is local to, or None.

        Raises
        ------
        ValueError
            If a plate names a leaf that is not there, or two plates of other rows name one leaf.
        """
        paths = jax.tree_util.tree_leaves_with_path(position, is_leaf=is_padded)
        found: list[Rows | None] = [None] * len(paths)
        for plate in self.plates:
            for i, rows in enumerate(plate.local_rows(position)):
                other = found[i]
                if rows is not None and other is not None and not other.is_same(rows):
                    raise ValueError(
                        f"local: {tree.path_str(paths[i][0])} is local to plates of other rows: "
                        f"{other}, and {rows}{_why_not_same(other, rows)}"
                    )
                found[i] = other if rows is None else rows
        self._check_groups(position, [path for path, _ in paths])
        return found

    def _check_groups(self, position: PyTree, paths: list[KeyPath]) -> None:
        """Raise where rows read latents of groups, and no plate of the groups gives them a prior."""
        of_groups = [p.local_rows(position) for p in self.plates if not p.has_group_latents]
        for plate in self.plates:
            for i, rows in enumerate(plate.local_rows(position)):
                if not plate.has_group_latents or rows is None or any(f[i] for f in of_groups):
                    continue
                name = tree.path_str(paths[i])
                raise ValueError(
                    f"local: {name} is one for each group, and no plate of the groups gives it a "
                    f"prior. Add one: Plate(log_prior_of_group, groups.place(), local=...) with {name}"
                )

    def local_orders(self, position: PyTree) -> list[Order | None]:
        """Return for each leaf the order in which its rows lie; None where it is the user's."""
        of_plates = zip(*(plate.local_orders(position) for plate in self.plates), strict=True)
        found = [next((o for o in orders if o is not None), None) for orders in of_plates]
        return found or super().local_orders(position)

    def local_axes(self, position: PyTree) -> list[int]:
        """Return for each leaf the axis that parameters have its rows on; positions have the first."""
        of_plates = [plate.local_axes(position) for plate in self.plates]
        return [max(axes) for axes in zip(super().local_axes(position), *of_plates, strict=True)]

    def kept(self, position: PyTree) -> PyTree:
        """Return what `Draws` keep of a position: the parameters, local ones as `RowValues`."""
        values = self.constrained(position)
        kept = wrap(self, values, values)
        return kept if self.derived is None else kept | self.derived(cut(self, values))

    # The log density.

    @on_any_mesh
    def terms(self, position: PyTree) -> PyTree:
        """Return a tree of arrays whose elements add up to the log density."""
        params, log_jacobians = self._shared_params(position)
        plates = tuple(p.terms(params, self.hidden_from(p, params)) for p in self.plates)
        return {"prior": self._prior(params), "jacobians": log_jacobians, "plates": plates}

    @grad_anywhere
    def grad(self, position: PyTree) -> PyTree:
        """Gradient of the log density, shaped like the position."""
        (params, log_jacobians), pullback = jax.vjp(self._shared_params, position)
        _, grads = self._prior_and_grad(params)
        for plate in self.plates:
            grads = tree.add(grads, plate.grad(params, self.hidden_from(plate, params)))
        return pullback((grads, tree.ones_like(log_jacobians)))[0]

    @terms_and_grad_anywhere
    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return `terms` and `grad` from one pass over the rows."""
        (params, log_jacobians), pullback = jax.vjp(self._shared_params, position)
        prior, grads = self._prior_and_grad(params)
        plates = []
        for plate in self.plates:
            terms, plate_grads = plate.terms_and_grad(params, self.hidden_from(plate, params))
            plates.append(terms)
            grads = tree.add(grads, plate_grads)
        terms = {"prior": prior, "jacobians": log_jacobians, "plates": tuple(plates)}
        return terms, pullback((grads, tree.ones_like(log_jacobians)))[0]

    def _shared_params(self, position: PyTree) -> tuple[PyTree, list[jax.Array]]:
        """Return parameters, local ones unconstrained yet: those are constrained a tile at a time."""
        params = self.transformed(as_laid(self, position))
        bijective.check(self.bijections, params)
        is_shared = [rows is None for rows in self.local_rows(params)]
        return bijective.constrain(self.bijections, params, is_shared)

    def _prior_and_grad(self, params: PyTree) -> tuple[PyTree, PyTree]:
        prior, pullback = jax.vjp(self._prior, params)
        return prior, pullback(tree.ones_like(prior))[0]

    def _prior(self, params: PyTree) -> PyTree:
        is_local = [rows is not None for rows in self.local_rows(params)]
        shared = without(params, is_local)
        if not jax.tree.leaves(shared):
            return ()
        try:
            with noting_shapes(self.log_prior, params=shared):
                value = self.log_prior(shared)
        except KeyError as error:
            if not any(is_local) or error.args[0] not in params:
                raise
            raise ValueError(
                f"log_prior: {error.args[0]!r} is local to a plate, and log_prior sees shared latents "
                "only; write its prior in the plate's log_likelihood, a term a row"
            ) from error
        return summands(self.log_prior, value)

    # What the terms are.

    def densities(self, terms: PyTree) -> PyTree:
        """Return the terms of the prior and of the plates."""
        return terms["prior"], terms["plates"]

    def single_floats(self, terms: PyTree) -> PyTree:
        """Return the terms that are plain floats: those of plates are two-float sums."""
        return {name: value for name, value in terms.items() if name != "plates"}

    def layout_of_terms(self, terms: PyTree) -> PyTree:
        """Say of each term how it lies: the sums of a plate lie where its rows do."""
        return whole(terms) | {"plates": tuple(P(plate.rows.axes) for plate in self.plates)}

    def blame(self, position: PyTree, path: KeyPath, count: int) -> str:
        """Name the row or the summand that is NaN or infinite, and the data that it reads."""
        if path[0].key == "plates":
            return self._blame_row(position, path[1].idx)
        found = blame_summand(tree.replace(self, plates=(), derived=None, prior=None), path, count)
        is_prior = path[0].key == "prior"
        return f"log_prior ({name_of_function(self.log_prior)}): {found}" if is_prior else found

    def _blame_row(self, position: PyTree, index: int) -> str:
        """Name the first row of a plate whose term is not finite, and its data if those are not."""
        plate, params = self.plates[index], self.params(position)
        hidden = self.hidden_from(plate, params)
        rows = np.asarray(to_host(plate.log_likelihood_rows(params, hidden)))
        bad = np.flatnonzero(~np.isfinite(rows))
        if not bad.size:
            return f"{plate}: the terms of all rows are finite, but not their sum or a Jacobian"
        found = (
            f"{plate}: {bad.size} rows have a term that is NaN or infinite, the first is row {bad[0]}"
        )
        leaves, treedef = jax.tree_util.tree_flatten_with_path(plate.data)

        def terms(*leaves):
            data = treedef.unflatten(leaves)
            return tree.replace(plate, data=data).log_likelihood_rows(params, hidden)

        are_read = is_live(open_program(jax.make_jaxpr(terms)(*(leaf for _, leaf in leaves))))
        for (path, leaf), is_read in zip(leaves, are_read, strict=True):
            if is_read and num_nonfinite(leaf[plate.slots.laid_row(bad[0])]):
                where = (GetAttrKey("plates"), SequenceKey(index), GetAttrKey("data"), *path)
                return f"{found}; {blame_data(where, num_nonfinite(leaf))}"
        return found

    def __repr__(self) -> str:
        return f"Posterior({', '.join(map(repr, self.plates))})"


def _why_not_same(one: Rows, other: Rows) -> str:
    """Say why rows that may look alike are not, where groups have to do with it."""
    if not one.order and not other.order:
        return ""
    if one.mesh != other.mesh:
        return ". They lie on different meshes; make them of one Groups"
    if one.num_rows != other.num_rows:
        return ""
    return (
        ". They are groups of other keys, or in another order: lay both by one Groups, by its place, "
        "and by its place_rows(rows, keys=...) if keys differ"
    )


def _with_bijections(plates: tuple[Plate, ...], bijections: PyTree) -> tuple[Plate, ...]:
    """Give plates the bijections of their latents.

    Of several plates of one latent the first counts its Jacobian: of groups and their rows, the groups.
    """
    counting: list[Local] = []
    given: dict[int, Plate] = {}
    for i in sorted(range(len(plates)), key=lambda i: plates[i].has_group_latents):
        given[i] = plates[i]
        if plates[i].local:
            replaced = {"bijections": bijections, "jacobians_elsewhere": tuple(counting)}
            given[i] = tree.replace(plates[i], **replaced)
            counting.append(plates[i].local)
    return tuple(given[i] for i in range(len(plates)))


def _check_names(plates: tuple[Plate, ...]) -> None:
    """Raise where other groups have the same name: draws could not tell them apart."""
    digests: dict[str, str] = {}
    for labels in (plate.labels for plate in plates):
        if labels is None or not labels.name:
            continue
        if digests.setdefault(labels.name, labels.digest) != labels.digest:
            raise ValueError(
                f"Posterior: two Groups have the name {labels.name!r}. Lay rows of the same groups by "
                "place_rows(rows, keys) of one of them, or call them differently: Groups(..., name=...)"
            )


def _no_prior(params: PyTree) -> PyTree:
    names = (tree.path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))
    raise ValueError(
        f"log_prior: it is None, but rows share the latents {', '.join(names)}, which would be flat, "
        "and perhaps improper. Write their log prior; if a flat one is meant, write "
        "log_prior=lambda params: jnp.zeros(())"
    )
