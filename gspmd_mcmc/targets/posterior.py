"""A posterior: a prior over shared parameters, and plates of rows that are streamed over the mesh.

A target answers three questions of a position: its `terms`, its `grad`, and both at once. Terms are
a tree of arrays whose elements add up to the log density; they are kept apart so that two positions
are compared by the sum of differences, never by the difference of sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets import tiling
from gspmd_mcmc.targets.local import Local, lay_out, without, wrap
from gspmd_mcmc.targets.rows import Rows, read_rows
from gspmd_mcmc.tree import PyTree, pytree, set_fields, static


def as_partial(function: Callable) -> Partial:
    """Wrap a function as a pytree, so that a `Partial`'s arrays enter programs as arguments."""
    if not callable(function):
        raise TypeError(f"expected a function, got {type(function).__name__}")
    return function if isinstance(function, Partial) else Partial(function)


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Plate:
    """Rows that are independent given the parameters, and the log likelihood of each.

    Build it outside jit: it reads the layout of its data from their shardings and keeps it.

    Parameters
    ----------
    log_likelihood
        ``log_likelihood(params, block) -> terms``: for a block of any number of rows (the leaves of
        ``data`` with fewer rows), one term per row, shape [rows]. A function at module level, or a
        ``jax.tree_util.Partial`` of one whose bound arrays enter programs as arguments.
    data
        A tree of arrays with the same leading axis of rows, as `place` returns them (`Padded` leaves
        are masked), or plain arrays: one block, no mesh.
    local
        The latents that belong to rows, one to each: a name, names, or a tree of True and False that
        is a prefix of the parameters. Their leading axis is the plate's rows, and they lie where the
        rows lie. In ``log_likelihood`` ``params`` has their rows of the block, and whole leaves
        else; their prior is written there too, per row.
    tile_rows
        Rows of a tile; chosen from the bytes of the likelihood's intermediates when None.

    Raises
    ------
    ValueError
        If there are no rows, or leaves disagree in their rows.
    """

    log_likelihood: Partial
    data: PyTree
    rows: Rows = static()
    local: Local = static()
    tile_rows: int | None = static()

    def __init__(
        self,
        log_likelihood: Callable,
        data: PyTree,
        *,
        local: Any = (),
        tile_rows: int | None = None,
    ):
        if tile_rows is not None and (not isinstance(tile_rows, int) or tile_rows < 1):
            raise ValueError(f"tile_rows: expected an integer of at least 1, got {tile_rows!r}")
        arrays, rows = read_rows(data)
        set_fields(
            self,
            log_likelihood=as_partial(log_likelihood),
            data=arrays,
            rows=rows,
            local=Local.read(local),
            tile_rows=tile_rows,
        )

    def terms(self, params: PyTree, hidden: Sequence[bool] | None = None) -> jax.Array:
        """Two-float sums of the terms of each tile, shape [blocks, tiles, 2].

        ``hidden`` marks leaves that the likelihood is not shown: those local to other plates.
        """
        split, tile = self._plan(params, hidden)

        def body(carry, block_tile, is_counted):
            data, local = block_tile
            terms = self.log_likelihood(split.visible(split.read, local), data)
            return carry, (), tiling.tile_sum(terms, is_counted)

        _, _, out = tiling.stream(body, (), (), self._blocks(split), self.rows, tile)
        return jnp.swapaxes(out, 0, 1)

    def grad(self, params: PyTree, hidden: Sequence[bool] | None = None) -> PyTree:
        """Gradient of the sum of all terms, shaped like ``params``; the terms are not computed."""
        return self._with_grad(params, hidden, lambda terms, is_counted: ())[0]

    def terms_and_grad(
        self, params: PyTree, hidden: Sequence[bool] | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Return `terms` and `grad` from one pass."""
        grad, out = self._with_grad(params, hidden, tiling.tile_sum)
        return jnp.swapaxes(out, 0, 1), grad

    def log_likelihood_rows(self, params: PyTree) -> jax.Array:
        """Return the terms of the real rows, each apart, shape [rows] (for LOO and the like)."""
        return self.log_likelihood(lay_out(self, params), self.data)[: self.rows.num_rows]

    def local_rows(self, params: PyTree) -> list[Rows | None]:
        """Return for each leaf the plate's rows if it is local to the plate, else None."""
        num_leaves = len(jax.tree.leaves(params, is_leaf=is_padded))
        flags = self.local.flags(params) if self.local else [False] * num_leaves
        return [self.rows if is_local else None for is_local in flags]

    def _plan(self, params: PyTree, hidden: Sequence[bool] | None) -> tuple["_Split", int]:
        is_local = [rows is not None for rows in self.local_rows(params)]
        is_hidden = hidden or [False] * len(is_local)
        likelihood = tiling.probe(
            self.log_likelihood, params, is_local, is_hidden, self.data, self.rows
        )
        split = _Split.of(params, is_local, is_hidden, likelihood.is_read)
        return split, tiling.tile_rows(likelihood, self.rows, self.tile_rows)

    def _blocks(self, split: "_Split") -> tuple[PyTree, list[jax.Array]]:
        return self.rows.blocks(self.data), self.rows.local_blocks(split.local)

    def _with_grad(
        self, params: PyTree, hidden: Sequence[bool] | None, tile_out: Callable
    ) -> tuple[PyTree, Any]:
        """Accumulate the gradient of the leaves that the likelihood reads; the others stay out.

        That of shared leaves is summed per block, and over the blocks at the end: one all-reduce. That
        of local leaves stays where their rows are.
        """
        split, tile = self._plan(params, hidden)

        def body(carry, block_tile, is_counted):
            data, local = block_tile
            terms, pullback = jax.vjp(
                lambda read, local: self.log_likelihood(split.visible(read, local), data),
                split.read,
                local,
            )
            shared_grads, local_grads = pullback(is_counted.astype(terms.dtype))
            return tree.add(carry, shared_grads), local_grads, tile_out(terms, is_counted)

        zeros = [jnp.zeros((self.rows.num_blocks, *leaf.shape), leaf.dtype) for leaf in split.read]
        data, local = self._blocks(split)
        no_grads = [jnp.zeros_like(leaf) for leaf in local]
        sums, by_row, out = tiling.stream(body, zeros, no_grads, (data, local), self.rows, tile)
        shared_grads = [jnp.sum(s, axis=0) for s in sums]
        return split.merge(shared_grads, [self.rows.join(g) for g in by_row], jnp.zeros_like), out

    def __repr__(self) -> str:
        name = getattr(self.log_likelihood.func, "__name__", repr(self.log_likelihood.func))
        return f"Plate({name}, {self.rows})"


@dataclass(frozen=True)
class _Split:
    """The leaves of the parameters by what a plate does with them.

    Local ones it cuts as its rows, shared ones that its likelihood reads need a gradient, unread ones
    do not, and hidden ones (local to another plate) the likelihood is not shown.
    """

    treedef: Any
    leaves: list[jax.Array]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, params: PyTree, is_local, is_hidden, is_read) -> "_Split":
        paths, treedef = jax.tree_util.tree_flatten_with_path(params)
        kinds = []
        for (path, _), local, hides, reads in zip(paths, is_local, is_hidden, is_read, strict=True):
            if local and not reads:
                raise ValueError(
                    f"local: the log likelihood does not read {tree.path_str(path)}, so nothing gives "
                    "it a density. The prior of a local latent is a term of its plate's rows"
                )
            kinds.append("local" if local else "hidden" if hides else "read" if reads else "unread")
        return cls(treedef, [leaf for _, leaf in paths], tuple(kinds))

    @property
    def read(self) -> list[jax.Array]:
        return self._of_kind("read")

    @property
    def local(self) -> list[jax.Array]:
        return self._of_kind("local")

    def visible(self, read: list, local: list) -> PyTree:
        """Return what the likelihood is shown, with other leaves for the first two kinds."""
        params = self.merge(read, local, lambda leaf: leaf)
        return without(params, [kind == "hidden" for kind in self.kinds])

    def merge(self, read: list, local: list, rest: Callable) -> PyTree:
        """Put the parameters together from other leaves; ``rest`` makes those of the last two kinds."""
        new = {"read": iter(read), "local": iter(local)}
        merged = [
            next(new[kind]) if kind in new else rest(leaf)
            for leaf, kind in zip(self.leaves, self.kinds, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, merged)

    def _of_kind(self, kind: str) -> list[jax.Array]:
        return [leaf for leaf, k in zip(self.leaves, self.kinds, strict=True) if k == kind]


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Posterior:
    """A log density: a prior over the parameters plus the log likelihoods of plates of rows.

    Parameters
    ----------
    log_prior
        ``log_prior(params) -> summands``: a tree of arrays whose elements add up to the log prior of
        the shared parameters; local ones (`Plate`) are not in ``params``. An array the shape of a
        latent (best: differences are then taken element by element), or scalars. None where all
        latents are local.
    plates
        One `Plate` or more.
    transform
        ``transform(position) -> params``: a reparameterisation, applied once per gradient, before the
        rows are streamed. It must preserve volume (a rotation, a shift): no Jacobian is added. Pass
        arrays that it needs through ``jax.tree_util.Partial``. Local leaves keep their rows.
    """

    log_prior: Partial
    plates: tuple[Plate, ...]
    transform: Partial | None

    def __init__(self, log_prior: Callable | None, *plates: Plate, transform: Callable | None = None):
        for i, plate in enumerate(plates):
            if not isinstance(plate, Plate):
                raise TypeError(f"Posterior: plate {i}: expected a Plate, got {type(plate).__name__}")
        set_fields(
            self,
            log_prior=as_partial(_no_prior if log_prior is None else log_prior),
            plates=plates,
            transform=None if transform is None else as_partial(transform),
        )

    def params(self, position: PyTree) -> PyTree:
        """Return the parameters at a position."""
        return position if self.transform is None else self.transform(position)

    def local_rows(self, params: PyTree) -> list[Rows | None]:
        """Return for each leaf the rows of the plate that it is local to, or None.

        Raises
        ------
        ValueError
            If a plate names a leaf that is not there, or two plates of other rows name one leaf.
        """
        paths = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_padded)
        found: list[Rows | None] = [None] * len(paths)
        for plate in self.plates:
            for i, rows in enumerate(plate.local_rows(params)):
                other = found[i]
                if rows is not None and other is not None and not other.is_same(rows):
                    raise ValueError(
                        f"local: {tree.path_str(paths[i][0])} is local to plates of other rows: "
                        f"{other}, and {rows}"
                    )
                found[i] = other if rows is None else rows
        return found

    def kept(self, position: PyTree) -> PyTree:
        """Return what `Draws` keep of a position: the position, local leaves as `RowValues`."""
        return wrap(position, self.local_rows(position))

    def terms(self, position: PyTree) -> PyTree:
        """Return a tree of arrays whose elements add up to the log density."""
        params = self.params(position)
        plates = tuple(p.terms(params, self._hidden(p, params)) for p in self.plates)
        return {"prior": self._prior(params), "plates": plates}

    def grad(self, position: PyTree) -> PyTree:
        """Gradient of the log density, shaped like the position."""
        params, pullback = self._linearise(position)
        _, grads = self._prior_and_grad(params)
        for plate in self.plates:
            grads = tree.add(grads, plate.grad(params, self._hidden(plate, params)))
        return pullback(grads)

    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return `terms` and `grad` from one pass over the rows."""
        params, pullback = self._linearise(position)
        prior, grads = self._prior_and_grad(params)
        plates = []
        for plate in self.plates:
            terms, plate_grads = plate.terms_and_grad(params, self._hidden(plate, params))
            plates.append(terms)
            grads = tree.add(grads, plate_grads)
        return {"prior": prior, "plates": tuple(plates)}, pullback(grads)

    def _hidden(self, plate: Plate, params: PyTree) -> list[bool]:
        """Mark the leaves that are local to other plates only: no function sees those."""
        of_any, own = self.local_rows(params), plate.local_rows(params)
        return [a is not None and b is None for a, b in zip(of_any, own, strict=True)]

    def _prior(self, params: PyTree) -> PyTree:
        shared = without(params, [rows is not None for rows in self.local_rows(params)])
        if not jax.tree.leaves(shared):
            return ()
        return summands(self.log_prior, self.log_prior(shared))

    def _prior_and_grad(self, params: PyTree) -> tuple[PyTree, PyTree]:
        prior, pullback = jax.vjp(self._prior, params)
        return prior, pullback(tree.ones_like(prior))[0]

    def _linearise(self, position: PyTree) -> tuple[PyTree, Callable]:
        if self.transform is None:
            return position, lambda grads: grads
        params, pullback = jax.vjp(self.transform, position)
        return params, lambda grads: pullback(grads)[0]

    def __repr__(self) -> str:
        return f"Posterior({', '.join(map(repr, self.plates))})"


def _no_prior(params: PyTree) -> PyTree:
    raise ValueError(
        f"Posterior: log_prior is None, but there are shared parameters: {jax.tree.structure(params)}"
    )


def summands(function: Callable, value: PyTree) -> PyTree:
    """Check that a log density's summands are floating arrays."""
    name = getattr(getattr(function, "func", function), "__name__", repr(function))
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves:
        raise TypeError(f"{name}: expected a scalar or a tree of summands, got {value!r}")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name}: expected floating summands, got dtype {jnp.result_type(leaf)} at "
                f"{tree.path_str(path)}"
            )
    return jax.tree.map(jnp.asarray, value)
