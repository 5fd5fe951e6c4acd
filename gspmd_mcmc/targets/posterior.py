"""A posterior: a prior over shared parameters, and plates of rows that are streamed over the mesh.

A target answers three questions of a position: its `terms`, its `grad`, and both at once. Terms are
a tree of arrays whose elements add up to the log density; they are kept apart so that two positions
are compared by the sum of differences, never by the difference of sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.targets import tiling
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
    tile_rows: int | None = static()

    def __init__(self, log_likelihood: Callable, data: PyTree, *, tile_rows: int | None = None):
        if tile_rows is not None and (not isinstance(tile_rows, int) or tile_rows < 1):
            raise ValueError(f"tile_rows: expected an integer of at least 1, got {tile_rows!r}")
        arrays, rows = read_rows(data)
        set_fields(
            self,
            log_likelihood=as_partial(log_likelihood),
            data=arrays,
            rows=rows,
            tile_rows=tile_rows,
        )

    def terms(self, params: PyTree) -> jax.Array:
        """Two-float sums of the terms of each tile, shape [blocks, tiles, 2]."""
        _, tile = self._plan(params)

        def body(carry, block_tile, is_counted):
            return carry, tiling.tile_sum(self.log_likelihood(params, block_tile), is_counted)

        _, out = tiling.stream(body, (), self.data, self.rows, tile)
        return jnp.swapaxes(out, 0, 1)

    def grad(self, params: PyTree) -> PyTree:
        """Gradient of the sum of all terms, shaped like ``params``; the terms are not computed."""
        return self._with_grad(params, lambda terms, is_counted: ())[0]

    def terms_and_grad(self, params: PyTree) -> tuple[jax.Array, PyTree]:
        """Return `terms` and `grad` from one pass."""
        grad, out = self._with_grad(params, tiling.tile_sum)
        return jnp.swapaxes(out, 0, 1), grad

    def log_likelihood_rows(self, params: PyTree) -> jax.Array:
        """Return the terms of the real rows, each apart, shape [rows] (for LOO and the like)."""
        return self.log_likelihood(params, self.data)[: self.rows.num_rows]

    def _plan(self, params: PyTree) -> tuple[tiling.Likelihood, int]:
        likelihood = tiling.probe(self.log_likelihood, params, self.data, self.rows)
        return likelihood, tiling.tile_rows(likelihood, self.rows, self.tile_rows)

    def _with_grad(self, params: PyTree, tile_out: Callable) -> tuple[PyTree, Any]:
        """Accumulate the gradient of the leaves that the likelihood reads; the others stay out."""
        likelihood, tile = self._plan(params)
        leaves, treedef = jax.tree.flatten(params)
        is_read = likelihood.is_read
        read = [leaf for leaf, r in zip(leaves, is_read, strict=True) if r]

        def terms_of(read_leaves, block_tile):
            left = iter(read_leaves)
            merged = [next(left) if r else leaf for leaf, r in zip(leaves, is_read, strict=True)]
            return self.log_likelihood(jax.tree.unflatten(treedef, merged), block_tile)

        def body(carry, block_tile, is_counted):
            terms, pullback = jax.vjp(lambda x: terms_of(x, block_tile), read)
            (grads,) = pullback(is_counted.astype(terms.dtype))
            return tree.add(carry, grads), tile_out(terms, is_counted)

        zeros = [jnp.zeros((self.rows.num_blocks, *leaf.shape), leaf.dtype) for leaf in read]
        sums, out = tiling.stream(body, zeros, self.data, self.rows, tile)
        read_grads = iter([jnp.sum(s, axis=0) for s in sums])
        grads = [next(read_grads) if r else None for r in is_read]
        grads = [jnp.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
        return jax.tree.unflatten(treedef, grads), out

    def __repr__(self) -> str:
        name = getattr(self.log_likelihood.func, "__name__", repr(self.log_likelihood.func))
        return f"Plate({name}, {self.rows})"


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Posterior:
    """A log density: a prior over the parameters plus the log likelihoods of plates of rows.

    Parameters
    ----------
    log_prior
        ``log_prior(params) -> summands``: a tree of arrays whose elements add up to the log prior. An
        array the shape of a latent (best: differences are then taken element by element), or scalars.
    plates
        One `Plate` or more.
    transform
        ``transform(position) -> params``: a reparameterisation, applied once per gradient, before the
        rows are streamed. It must preserve volume (a rotation, a shift): no Jacobian is added. Pass
        arrays that it needs through ``jax.tree_util.Partial``.
    """

    log_prior: Partial
    plates: tuple[Plate, ...]
    transform: Partial | None

    def __init__(self, log_prior: Callable, *plates: Plate, transform: Callable | None = None):
        for i, plate in enumerate(plates):
            if not isinstance(plate, Plate):
                raise TypeError(f"Posterior: plate {i}: expected a Plate, got {type(plate).__name__}")
        set_fields(
            self,
            log_prior=as_partial(log_prior),
            plates=plates,
            transform=None if transform is None else as_partial(transform),
        )

    def params(self, position: PyTree) -> PyTree:
        """Return the model's parameters at a position."""
        return position if self.transform is None else self.transform(position)

    def terms(self, position: PyTree) -> PyTree:
        """Return a tree of arrays whose elements add up to the log density."""
        params = self.params(position)
        return {"prior": self._prior(params), "plates": tuple(p.terms(params) for p in self.plates)}

    def grad(self, position: PyTree) -> PyTree:
        """Gradient of the log density, shaped like the position."""
        params, pullback = self._linearise(position)
        _, grads = self._prior_and_grad(params)
        for plate in self.plates:
            grads = tree.add(grads, plate.grad(params))
        return pullback(grads)

    def terms_and_grad(self, position: PyTree) -> tuple[PyTree, PyTree]:
        """Return `terms` and `grad` from one pass over the rows."""
        params, pullback = self._linearise(position)
        prior, grads = self._prior_and_grad(params)
        plates = []
        for plate in self.plates:
            terms, plate_grads = plate.terms_and_grad(params)
            plates.append(terms)
            grads = tree.add(grads, plate_grads)
        return {"prior": prior, "plates": tuple(plates)}, pullback(grads)

    def _prior(self, params: PyTree) -> PyTree:
        return summands(self.log_prior, self.log_prior(params))

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
