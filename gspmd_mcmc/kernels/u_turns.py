"""Where the balanced subtrees of a doubled trajectory begin and end, from O(log) marks.

References
----------
Phan, Pradhan and Jankowiak, arXiv 1912.11554, and Lao and Dillon, arXiv 2002.01184 (iterative trees);
Stan's additional checks across adjacent subtrees.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True, eq=False)
class Marks:
    """Where the balanced subtrees that are not complete begin; leaves [marks, ...].

    Leaf n of a doubling is marked when n is even, at the number of ones in n // 2. The subtrees that
    end at one leaf then begin at consecutive marks.
    """

    first: PyTree  # the momentum of the subtree's first leaf
    before: PyTree  # the momentum of the leaf before
    sum_before: PyTree  # the sum of momenta from the doubling's start to the leaf before


def mark(marks: Marks, leaf: jax.Array, here: Marks) -> Marks:
    """Mark a leaf, the number ``leaf`` of its doubling, if it is even: subtrees may begin there."""

    def write(array, x):
        place = jnp.minimum(_newest_mark(leaf), len(array) - 1)
        kept = jnp.where(leaf % 2 == 0, x, array[place])
        return jax.lax.dynamic_update_index_in_dim(array, kept, place, axis=0)

    return jax.tree.map(write, marks, here)


def _newest_mark(leaf: jax.Array) -> jax.Array:
    return jax.lax.population_count(leaf >> 1)


def marks_to_check(leaf: jax.Array, num_marks: int) -> tuple[jax.Array, jax.Array]:
    """Tell at which marks spans to this leaf are checked, and spans from the leaf before the mark.

    For every balanced subtree of halves a..b and c..d three spans may not turn: a..d, seen when d is
    added; a..c, seen when c is; and b..d, seen from the mark of c when d is. Where the halves are one
    leaf each the three are one.
    """
    mark, newest = jnp.arange(num_marks), _newest_mark(leaf)
    num_ending = jax.lax.population_count(leaf ^ (leaf + 1)) - 1  # subtrees of 2, 4, ... leaves
    ends = (newest - num_ending < mark) & (mark <= newest)
    ends_as_half = (newest - num_ending + 1 < mark) & (mark <= newest)
    begins_second_half = (num_ending == 0) & (mark == newest - 1)
    return ends | begins_second_half, ends_as_half
