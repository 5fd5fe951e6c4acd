"""Plates: rows that are independent given the parameters, streamed over the mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.groups.groups import Groups
from gspmd_mcmc.groups.lookup_index import with_orders
from gspmd_mcmc.groups.orders import GroupedRows, GroupLabels, GroupTable, Order
from gspmd_mcmc.placement.padding import is_padded, refuse_laid_by_groups
from gspmd_mcmc.targets import bijections
from gspmd_mcmc.targets.anywhere import grad_anywhere, on_any_mesh, terms_and_grad_anywhere
from gspmd_mcmc.targets.function import as_partial, name_of_function, noting_shapes
from gspmd_mcmc.targets.local import Local, as_laid, is_laid, rows_first, without
from gspmd_mcmc.targets.streaming import tiling
from gspmd_mcmc.targets.streaming.kernels_inside import kernels_where
from gspmd_mcmc.targets.streaming.rows import Rows, read_rows
from gspmd_mcmc.targets.streaming.slots import RowSlots, Slots, group_slots
from gspmd_mcmc.tree import PyTree, pytree, set_fields, static


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Plate:
    """Rows that are independent given the parameters, and the log likelihood of each.

    Build it outside jit: it reads the layout of its data from their shardings and keeps it.

    Parameters
    ----------
    log_likelihood
        ``log_likelihood(params, block) -> terms``: one term per row, shape [rows], for a block of any
        number of rows (the leaves of ``data`` with fewer rows). Arrays bound to it with
        ``jax.tree_util.Partial`` enter programs as arguments.
    data
        A tree of arrays with the same leading axis of rows, as `place` returns them (`Padded` leaves
        are masked). Plain arrays form one block without a mesh. Or rows of groups
        (`Groups.place_rows`), or the groups themselves (`Groups.place`).
    local
        The latents that belong to rows, one to each: a name, names, or a tree of True and False that
        is a prefix of the parameters. Their leading axis is the plate's rows, and they lie where the
        rows lie. Inside ``log_likelihood``, ``params`` holds the block's rows of these latents and all
        other leaves whole. Their prior belongs there too, in the term of each row. If the data are rows
        of groups, local latents are one to each group, ``params`` holds for each row those of its
        group, and their prior belongs in a plate of the groups.
    tile_rows
        Rows of a tile. None: chosen from the size of the likelihood's intermediates. Those of rows of
        groups are cut when they are placed.

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
    bijections: PyTree  # of local leaves; the `Posterior` that holds the plate sets them
    jacobians_elsewhere: tuple[Local, ...] = static()  # of local leaves, too: counted by other plates
    slots: Slots  # how rows lie with their local latents
    # Names of local leaves whose rows are not on the first axis of the user's parameters, and the axis.
    row_axes: tuple[tuple[str, int], ...] = static()

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
        if isinstance(data, GroupTable):
            arrays, rows = read_rows(data.table, data.order.digest)
            slots = RowSlots(rows, data.order)
        elif isinstance(data, GroupedRows):
            if tile_rows is not None:
                raise ValueError(
                    "tile_rows: rows of groups are cut into tiles when they are placed; "
                    f"Groups(..., tile_rows={tile_rows})"
                )
            arrays, laid = read_rows(data.rows)
            rows, slots = replace(laid, num_rows=data.num_rows), group_slots(data, laid)
        else:
            _refuse_groups_inside(data)
            arrays, rows = read_rows(data)
            slots = RowSlots(rows, None)
        set_fields(
            self,
            log_likelihood=as_partial(log_likelihood),
            data=arrays,
            rows=rows,
            local=Local.read(local),
            tile_rows=tile_rows,
            bijections=None,
            jacobians_elsewhere=(),
            slots=slots,
            row_axes=(),
        )

    @on_any_mesh
    def terms(self, params: PyTree, hidden: Sequence[bool] | None = None) -> jax.Array:
        """Two-float sums of the terms of each tile, shape [blocks, tiles, 2].

        ``hidden`` marks leaves that the likelihood is not shown: those local to other plates.
        """
        self._require_laid(params)
        split, tile, _ = self._plan(params, hidden)

        def body(bound, carry, sums, read, block_tile, is_counted):
            data, local, known = block_tile
            terms = self._with_bound(bound)._tile_terms(
                split, read, data, self.slots.take(local, known), known
            )
            return carry, sums, tiling.tile_sum(terms, is_counted)

        blocks = self.rows.blocks(self.data), self.slots.fill(split.local)
        _, _, out = tiling.stream(
            body, (), (), split.read, blocks, self.rows, tile, self.slots, self._bound
        )
        return jnp.swapaxes(out, 0, 1)

    @grad_anywhere
    def grad(self, params: PyTree, hidden: Sequence[bool] | None = None) -> PyTree:
        """Gradient of the sum of all terms, shaped like ``params``; the terms are not computed."""
        return self._with_grad(params, hidden, lambda *_: (), self.rows.platform)[0]

    @terms_and_grad_anywhere
    def terms_and_grad(
        self, params: PyTree, hidden: Sequence[bool] | None = None
    ) -> tuple[jax.Array, PyTree]:
        """Return `terms` and `grad` from one pass."""
        # A TPU's kernels at full precision take longer than the compiler's own products.
        kernels = "" if self.rows.platform == "tpu" else self.rows.platform
        grad, out = self._with_grad(params, hidden, tiling.tile_sum, kernels)
        return jnp.swapaxes(out, 0, 1), grad

    @on_any_mesh
    def log_likelihood_rows(self, params: PyTree, hidden: Sequence[bool] | None = None) -> jax.Array:
        """Return the terms of the real rows, each apart, shape [rows] (for LOO and the like)."""
        split = self._split(as_laid(self, rows_first(self, params)), hidden)
        of_rows = split.merge(split.read, self.slots.spread_all(split.local), lambda leaf: leaf)
        return self.slots.see(self.log_likelihood(without(of_rows, hidden or []), self.data))

    def block_terms(
        self, params: PyTree, block: PyTree, hidden: Sequence[bool] | None = None
    ) -> jax.Array:
        """Terms of the rows of one block; local leaves of ``params`` have its rows, unconstrained."""
        split = self._split(params, hidden)
        return self._terms(split, split.read, block, split.local)

    def rows_of_tile(self, params: PyTree, hidden: Sequence[bool] | None = None) -> int:
        """Return how many rows a tile has, for parameters of these shapes."""
        return self._plan(params, hidden)[1]

    def local_rows(self, position: PyTree) -> list[Rows | None]:
        """Return for each leaf the plate's rows if it is local to the plate, else None."""
        num_leaves = len(jax.tree.leaves(position, is_leaf=is_padded))
        flags = self.local.flags(position) if self.local else [False] * num_leaves
        return [self.slots.latents if is_local else None for is_local in flags]

    def local_orders(self, position: PyTree) -> list[Order | None]:
        """Return for each leaf that is local to the plate the order in which its rows lie, or None."""
        return [None if rows is None else self.slots.order for rows in self.local_rows(position)]

    def local_axes(self, position: PyTree) -> list[int]:
        """Return for each leaf the axis that parameters have the plate's rows on."""
        paths, axes = (
            jax.tree_util.tree_leaves_with_path(position, is_leaf=is_padded),
            dict(self.row_axes),
        )
        return [axes.get(tree.name_of(path[:1]), 0) if path else 0 for path, _ in paths]

    @property
    def labels(self) -> GroupLabels | None:
        """What the groups are called that local latents are one each of; None if rows have none."""
        return None if self.slots.order is None else self.slots.order.groups

    @property
    def has_group_latents(self) -> bool:
        """Whether local latents are those of groups of rows."""
        return not isinstance(self.slots, RowSlots)

    @property
    def _bound(self) -> PyTree:
        """The functions that a tile calls, with the arrays that they bind."""
        return self.log_likelihood, self.bijections

    def _with_bound(self, bound: PyTree) -> "Plate":
        """Return this plate with `_bound` as a tile is given it."""
        return tree.replace(self, log_likelihood=bound[0], bijections=bound[1])

    def _require_laid(self, params: PyTree) -> None:
        if not is_laid(self, params):
            raise ValueError(
                f"{self}: expected its local latents laid out with its rows, as in the state of a "
                "sampler. Evaluate a Posterior that holds the plate: it lays them out"
            )

    def _split(self, params: PyTree, hidden: Sequence[bool] | None) -> "_Split":
        is_local = [rows is not None for rows in self.local_rows(params)]
        return _Split.of(params, is_local, hidden or [False] * len(is_local))

    def _plan(
        self, params: PyTree, hidden: Sequence[bool] | None, kernels: str = ""
    ) -> tuple["_Split", int, bool]:
        """Sort the leaves, choose the size of tiles, and look for kernels, by one trace.

        ``kernels`` is the platform that the likelihood may have kernels of.
        """
        split, name = self._split(params, hidden), name_of_function(self.log_likelihood)

        def terms_of(params, block):
            leaves = replace(split, leaves=jax.tree.leaves(params))
            visible, _ = leaves.visible(leaves.read, leaves.local, self.bijections)
            with noting_shapes(self.log_likelihood, params=visible, block=block):
                return self.log_likelihood(visible, block)

        is_local = [kind == "local" for kind in split.kinds]
        with kernels_where(kernels):
            traced = tiling.probe(terms_of, name, params, is_local, self.data, self.rows)
        tile = self.slots.tile_rows(lambda: tiling.tile_rows(traced, self.rows, self.tile_rows))
        return split.less_unread(traced.is_read), tile, traced.has_kernel

    def _tile_terms(
        self, split: "_Split", read: list, data: PyTree, taken: list, known: Any
    ) -> jax.Array:
        """Terms of the rows of a tile, of the local latents that were taken for it."""
        data = with_orders(data, self.slots.orders(known))
        return self.slots.apply(lambda local: self._terms(split, read, data, local), taken)

    def _terms(self, split: "_Split", read: list, data: PyTree, local: list) -> jax.Array:
        """Terms of rows, with the Jacobians of their latents that no other plate counts."""
        params, log_jacobians = split.visible(read, local, self.bijections, self.jacobians_elsewhere)
        terms = self.log_likelihood(params, data)
        return sum((jnp.sum(j.reshape(len(terms), -1), axis=1) for j in log_jacobians), start=terms)

    def _with_grad(
        self,
        params: PyTree,
        hidden: Sequence[bool] | None,
        tile_out: Callable,
        kernels: str = "",
    ) -> tuple[PyTree, Any]:
        """Accumulate the gradient of the leaves that the likelihood reads; the others stay out.

        That of shared leaves is summed per block, and over the blocks at the end: one all-reduce. That
        of local leaves stays where their rows are.
        """
        self._require_laid(params)
        split, tile, has_kernel = self._plan(params, hidden, kernels)
        has_local_pad = bool(split.local) and self.rows.num_rows != self.rows.num_padded

        def body(bound, carry, sums, read, block_tile, is_counted):
            plate = self._with_bound(bound)
            data, local, known = block_tile
            if has_local_pad and self.slots.has_stale_pad:
                data, local = _without_pad((data, local), is_counted)
            with kernels_where(kernels):
                terms, pullback = jax.vjp(
                    lambda read, taken: plate._tile_terms(split, read, data, taken, known),
                    read,
                    self.slots.take(local, known),
                )
            grads = pullback(is_counted.astype(terms.dtype))
            if has_local_pad and self.slots.has_tiles_of_pad:  # Elsewhere that of pad is zero already.
                grads = tree.where(jnp.any(is_counted), grads, jax.tree.map(jnp.zeros_like, grads))
            sums = self.slots.add(sums, grads[1], known)
            return tree.add(carry, grads[0]), sums, tile_out(terms, is_counted)

        num_blocks = self.rows.num_blocks
        zeros = [jnp.zeros((num_blocks, *leaf.shape), tree.wide(leaf.dtype)) for leaf in split.read]
        blocks = self.rows.blocks(self.data), self.slots.fill(split.local)
        no_grads = [jnp.zeros(leaf.shape, tree.wide(leaf.dtype)) for leaf in blocks[1]]
        sums, by_local, out = tiling.stream(
            *(body, zeros, no_grads, split.read, blocks, self.rows, tile, self.slots, self._bound),
            has_kernel,
        )
        shared_grads = [jnp.sum(s, axis=0) for s in sums]
        grads = split.gradient(shared_grads, self.slots.gather_grads(by_local))
        return jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, params), out

    def __repr__(self) -> str:
        of = f" of {self.slots.latents.num_rows} groups" if self.has_group_latents else ""
        return f"Plate({name_of_function(self.log_likelihood)}, {self.rows}{of})"


def _refuse_groups_inside(data: PyTree) -> None:
    if isinstance(data, Groups):
        raise TypeError(
            f"plate data: expected arrays, got {data}. A plate of the groups takes "
            "groups.place(table), a plate of their rows groups.place_rows(rows)"
        )
    refuse_laid_by_groups(
        data, "plate data", "pass it as the plate's data, alone; Groups takes a tree of arrays"
    )


def _without_pad(block_tile: PyTree, is_counted: jax.Array) -> PyTree:
    """Put a real row of the tile, where it has one, in the place of each row that does not count.

    Latents of the pad stay behind while the real ones move, so that the likelihood may become undefined
    there, and zero times NaN would spoil the gradient of what all rows share.
    """
    real = jnp.argmax(is_counted)

    def fill(x):
        return jnp.where(is_counted.reshape(-1, *(1,) * (x.ndim - 1)), x, x[real][None])

    return jax.tree.map(fill, block_tile)


@dataclass(frozen=True)
class _Split:
    """The leaves of the parameters by what a plate does with them.

    Local ones it cuts as its rows, shared ones that its likelihood reads need a gradient, unread ones
    do not, and hidden ones (local to another plate) the likelihood is not shown.
    """

    given: Any  # the structure of the parameters; local ones may be `Padded`
    treedef: Any  # the same of plain arrays, as functions are shown them
    paths: tuple
    leaves: list[jax.Array]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, params: PyTree, is_local: Sequence[bool], is_hidden: Sequence[bool]) -> "_Split":
        """Sort by what is known without a trace: shared leaves count as read."""
        flat, given = jax.tree_util.tree_flatten_with_path(params)
        kinds = tuple(
            "local" if local else "hidden" if hides else "read"
            for local, hides in zip(is_local, is_hidden, strict=True)
        )
        treedef = jax.tree.structure(params, is_leaf=is_padded)
        return cls(given, treedef, tuple(path for path, _ in flat), [leaf for _, leaf in flat], kinds)

    def less_unread(self, is_read: Sequence[bool]) -> "_Split":
        """Set the shared leaves apart that nothing reads."""
        for path, kind, reads in zip(self.paths, self.kinds, is_read, strict=True):
            if kind == "local" and not reads:
                raise ValueError(
                    f"local: the log likelihood does not read {tree.path_str(path)}, so nothing gives "
                    "it a density. The prior of a local latent is a term of its plate's rows"
                )
        kinds = zip(self.kinds, is_read, strict=True)
        return replace(self, kinds=tuple(k if k != "read" or r else "unread" for k, r in kinds))

    @property
    def read(self) -> list[jax.Array]:
        """The shared leaves that the likelihood reads."""
        return [leaf for leaf, kind in zip(self.leaves, self.kinds, strict=True) if kind == "read"]

    @property
    def local(self) -> list[jax.Array]:
        """The local leaves."""
        return [leaf for leaf, kind in zip(self.leaves, self.kinds, strict=True) if kind == "local"]

    def visible(
        self, read: list, local: list, of_local: PyTree, elsewhere: tuple[Local, ...] = ()
    ) -> tuple[PyTree, list[jax.Array]]:
        """Return what the likelihood is shown, local leaves constrained, and their log Jacobians.

        Of leaves that are local ``elsewhere`` too the Jacobian is left out: it is counted there.
        """
        # No term depends on the other leaves. Those themselves, placed on a mesh, cannot be read here.
        params = self.merge(read, local, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
        is_local = [kind == "local" for kind in self.kinds]
        is_counted = is_local
        for other in elsewhere:
            is_counted = [c and not x for c, x in zip(is_counted, other.flags(params), strict=True)]
        params, log_jacobians = bijections.constrain(of_local, params, is_local, is_counted)
        return without(params, [kind == "hidden" for kind in self.kinds]), log_jacobians

    def gradient(self, read: list, local: list) -> PyTree:
        """Put a gradient together, shaped like the parameters; zero where nothing is read."""
        zeros = self.merge(read, local, jnp.zeros_like)
        return jax.tree.unflatten(self.given, jax.tree.leaves(zeros))

    def merge(self, read: list, local: list, rest: Callable) -> PyTree:
        """Put plain arrays together from other leaves; ``rest`` makes those of the last two kinds."""
        new = {"read": iter(read), "local": iter(local)}
        merged = [
            next(new[kind]) if kind in new else rest(leaf)
            for leaf, kind in zip(self.leaves, self.kinds, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, merged)
