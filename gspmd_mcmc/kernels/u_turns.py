"""U-turns of the balanced subtrees of a doubled trajectory, from O(log) marks.

A span of leaves turns unless ρ·v > 0 at both its ends, where ρ is the sum of its momenta and v = M⁻¹p.
Marks hold velocities: with M symmetric no check then needs a product with the metric.

At most two marks serve all the subtrees that end at a leaf, except at every eighth leaf. So the newest
two are checked with every leaf, and all of them once a block of eight.

References
----------
Phan, Pradhan and Jankowiak, arXiv 1912.11554, and Lao and Dillon, arXiv 2002.01184 (iterative trees);
Betancourt, arXiv 1701.02434 (the criterion); Stan's additional checks across adjacent subtrees.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.tree import PyTree, pytree

BLOCK = 8  # leaves; at its last leaf three subtrees or more end


@pytree
@dataclass(frozen=True, eq=False)
class Marks:
    """The starts of the balanced subtrees that are not complete; leaves [marks + 1, ...].

    Leaf n of a doubling is marked if n is even, at the number of ones in n // 2. The subtrees that end
    at one leaf then begin at consecutive marks. The last place takes leaves that are not marked.
    """

    # Leaves [marks + 1, 3, ...], one array to write: the velocities of the subtree's first leaf and of
    # the leaf before, and the sum of momenta from the doubling's start to the leaf before.
    vectors: PyTree
    product_before: jax.Array  # p·v of the leaf before


@pytree
@dataclass(frozen=True, eq=False)
class Path:
    """What U-turns depend on, of the leaves of a doubling so far."""

    velocity: PyTree  # at the newest leaf, or at the leaf before the first
    product: jax.Array  # p·v there; before the first leaf unknown, and not used
    first_product: jax.Array  # p·v of the first leaf
    momentum_sum: PyTree
    marks: Marks
    num_leaves: jax.Array  # the same for all vmapped chains, so never mapped


def begin(velocity: PyTree, zero: jax.Array, max_doublings: int) -> Path:
    """Return the path without leaves, after a leaf of that velocity."""
    num_marks = max(max_doublings - 1, 1)
    none = jax.tree.map(lambda v: jnp.zeros((num_marks + 1, 3, *v.shape), v.dtype), velocity)
    return Path(
        velocity=velocity,
        product=zero,
        first_product=zero,
        momentum_sum=jax.tree.map(jnp.zeros_like, velocity),
        marks=Marks(none, jnp.zeros((num_marks + 1,), zero.dtype)),
        num_leaves=jnp.zeros((), jnp.int32),
    )


def add(path: Path, momentum: PyTree, velocity: PyTree) -> Path:
    """Add a leaf, and mark it if it is even, because subtrees may begin there."""
    leaf, nowhere = path.num_leaves, len(path.marks.product_before) - 1
    place = jnp.where(leaf % 2 == 0, _newest_mark(leaf), nowhere)
    vectors = jax.tree.map(lambda *x: jnp.stack(x), velocity, path.velocity, path.momentum_sum)
    here = Marks(vectors, path.product)
    product = dot(momentum, velocity)
    return Path(
        velocity=velocity,
        product=product,
        first_product=jnp.where(leaf == 0, product, path.first_product),
        momentum_sum=tree.add(path.momentum_sum, momentum),
        marks=jax.tree.map(lambda array, x: write_slice(array, x[None], place), path.marks, here),
        num_leaves=leaf + 1,
    )


def turns_at_newest_marks(path: Path, momentum: PyTree) -> jax.Array:
    """Tell whether spans from the newest two marks to the newest leaf make a U-turn.

    Those are all spans that are checked at this leaf, except where three subtrees or more end.
    """
    leaf = path.num_leaves - 1
    count = min(2, _num_marks(path))
    place = jnp.maximum(_newest_mark(leaf) - count + 1, 0)
    marks = jax.tree.map(lambda array: read_slice(array, place, count), path.marks)
    return _turns(path, momentum, place + jnp.arange(count), marks)


def turns_at_end_of_block(path: Path, momentum: PyTree) -> jax.Array:
    """Tell whether spans from any mark to the newest leaf make a U-turn, if a block ends there."""
    count = _num_marks(path)
    if count <= 2:
        return jnp.zeros((), bool)

    def at_all_marks(path, momentum):
        marks = jax.tree.map(lambda array: array[:count], path.marks)
        return _turns(path, momentum, jnp.arange(count), marks)

    def none(path, momentum):
        return jnp.zeros_like(path.product, bool)

    return jax.lax.cond(path.num_leaves % BLOCK == 0, at_all_marks, none, path, momentum)


def _turns(path: Path, momentum: PyTree, places: jax.Array, marks: Marks) -> jax.Array:
    """Apply the criterion to spans that begin at marks, or at the leaf before them.

    All products are taken at once: where momenta are sharded, one reduction serves all of them.
    (ρ + p)·v of the leaf before is ρ·v + p·v, and at the newest leaf p·M⁻¹p′ = v·p′.
    """
    first, before, sum_before = (jax.tree.map(lambda x, i=i: x[:, i], marks.vectors) for i in range(3))
    total = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(places), *x.shape)), path.momentum_sum)
    rho = tree.sub(total, sum_before)
    at_last = _dots(rho, path.velocity)
    spans = (_dots_each(rho, first) > 0) & (at_last > 0)
    at_before = _dots_each(rho, before) + marks.product_before
    spans_from_before = (at_before > 0) & (at_last + _dots(before, momentum) > 0)
    of_spans, of_spans_from_before = marks_to_check(path.num_leaves - 1, places)
    return jnp.any((of_spans & ~spans) | (of_spans_from_before & ~spans_from_before))


def whole_turns(
    path: Path, momentum_sum: PyTree, far: PyTree, near: PyTree, velocity: Any
) -> jax.Array:
    """Tell whether the tree and a subtree that was added to it make a U-turn.

    Spans are the whole; the tree and the first leaf of the subtree; the near end of the tree and the
    subtree.

    Parameters
    ----------
    path
        The subtree's.
    momentum_sum, far, near
        Of the tree without the subtree: the sum of momenta, and those of its far and near end.
    velocity
        M⁻¹ of a momentum.
    """
    far_velocity, near_velocity = velocity(far), velocity(near)
    first, last = jax.tree.map(lambda array: array[0, 0], path.marks.vectors), path.velocity
    whole, across = tree.add(momentum_sum, path.momentum_sum), tree.add(near, path.momentum_sum)
    products = [
        *(dot(whole, far_velocity), dot(whole, last)),
        *(dot(across, near_velocity), dot(across, last)),
        dot(momentum_sum, far_velocity) + dot(far, first),
        dot(momentum_sum, first) + path.first_product,
    ]
    return ~jnp.all(jnp.stack(products) > 0)


def marks_to_check(leaf: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tell at which marks spans to this leaf are checked, and spans from the leaf before the mark.

    In every balanced subtree of halves a..b and c..d three spans may not turn: a..d, checked when d is
    added; a..c, when c is added; and b..d, from the mark of c when d is added. Where each half is one
    leaf, the three are one.
    """
    newest = _newest_mark(leaf)
    num_ending = jax.lax.population_count(leaf ^ (leaf + 1)) - 1  # subtrees of 2, 4, ... leaves
    ends = (newest - num_ending < places) & (places <= newest)
    ends_as_half = (newest - num_ending + 1 < places) & (places <= newest)
    begins_second_half = (num_ending == 0) & (places == newest - 1)
    return ends | begins_second_half, ends_as_half


def _newest_mark(leaf: jax.Array) -> jax.Array:
    return jax.lax.population_count(leaf >> 1)


def _num_marks(path: Path) -> int:
    return len(path.marks.product_before) - 1


# Products as dots, which take one pass, where XLA on CPUs would write x * y before it sums


def dot(x: PyTree, y: PyTree) -> jax.Array:
    """Inner product of two trees."""
    return _sum(jax.tree.map(_contract, x, y))


def _dots(xs: PyTree, y: PyTree) -> jax.Array:
    """Inner products of trees [n, ...] with one tree: shape [n]."""
    return _sum(jax.tree.map(_contract, xs, y))


def _dots_each(xs: PyTree, ys: PyTree) -> jax.Array:
    """Inner products of trees [n, ...] with as many: shape [n]."""
    return _sum(jax.tree.map(jax.vmap(_contract), xs, ys))


def _contract(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tensordot(x, y, axes=y.ndim, precision=jax.lax.Precision.HIGHEST)


def _sum(products: PyTree) -> jax.Array:
    return sum(jax.tree.leaves(products), start=jnp.zeros(()))


# Slices at a place that is the same for all vmapped chains: the rules of vmap would make gathers and
# scatters of them, with a bounds check that reads what is overwritten


def read_slice(array: jax.Array, place: jax.Array, count: int) -> jax.Array:
    """Return ``array[place : place + count]``."""
    return _reader(0, count)(array, place)


def write_slice(array: jax.Array, x: jax.Array, place: jax.Array) -> jax.Array:
    """Return the array with ``x`` at ``array[place : place + len(x)]``."""
    return _writer(0)(array, x, place)


@cache
def _reader(axis: int, count: int) -> Any:
    def plain(array, place):
        return jax.lax.dynamic_slice_in_dim(array, place, count, axis)

    def batched(size, is_batched, array, place):
        if is_batched[1]:
            return jax.vmap(plain, _axes(is_batched))(array, place), True
        return _reader(axis + 1, count)(array, place), True

    read = jax.custom_batching.custom_vmap(plain)
    read.def_vmap(batched)
    return read


@cache
def _writer(axis: int) -> Any:
    def plain(array, x, place):
        return jax.lax.dynamic_update_slice_in_dim(array, x, place, axis)

    def batched(size, is_batched, array, x, place):
        if is_batched[2]:
            return jax.vmap(plain, _axes(is_batched))(array, x, place), True
        array, x = (
            value if is_mapped else jnp.broadcast_to(value, (size, *value.shape))
            for value, is_mapped in zip((array, x), is_batched[:2], strict=True)
        )
        return _writer(axis + 1)(array, x, place), True

    write = jax.custom_batching.custom_vmap(plain)
    write.def_vmap(batched)
    return write


def _axes(is_batched: list[bool]) -> list[int | None]:
    return [0 if one else None for one in is_batched]
