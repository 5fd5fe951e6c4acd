"""Numbers that are NaN or infinite: which leaf of a tree has them, in words."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from gspmd_mcmc import tree
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.tree import PyTree


def nonfinite(of: PyTree) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path of each leaf that has values that are not finite, and how many."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(of):
        if count := num_nonfinite(leaf):
            yield path, count


def num_nonfinite(leaf: Any) -> int:
    """Count the values of an array that are NaN or infinite."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return 0
    return int(to_host(jnp.sum(~jnp.isfinite(leaf))))


def blame_summand(data: PyTree, path: KeyPath, count: int) -> str:
    """Name a summand, and what is not finite of the data that it may read."""
    found = f"its summand {tree.path_str(path)} has {count} values that are NaN or infinite there"
    for data_path, data_count in nonfinite(data):
        return f"{found}; {blame_data(data_path, data_count)}"
    return found


def blame_data(path: KeyPath, count: int) -> str:
    """Name a leaf of the target's data."""
    return f"the target's data {tree.path_str(path)} has {count} values that are NaN or infinite"
