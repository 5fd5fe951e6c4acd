"""What metric objects have in common: leaves reached by name, and checks of what they are given."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from gspmd_mcmc import tree
from gspmd_mcmc.targets.local import rows_of
from gspmd_mcmc.tree import PyTree

# TPUs and GPUs round the factors of a product unless it asks for more: velocities would be of another
# matrix than momenta, and energies of a third.
product = partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)
NO_MATRIX = (
    "A tree like the position holds a variance for each number. A covariance matrix becomes a metric "
    "by DenseMetric.of_covariances(variances, {names: matrix}), of gspmd_mcmc.kernels.metrics.dense_metric; "
    "one such as Dense() is learned: sample(metric=Dense())"
)


def names_of(position: PyTree) -> list[str]:
    """Name the entry at the top of the position that each leaf belongs to; ``x`` for a bare array."""
    return [tree.name_of(path[:1]) for path, _ in tree_leaves_with_path(position)]


def check_named(what: str, names: Sequence[str], position: PyTree) -> None:
    """Raise unless every name is that of an entry at the top of the position."""
    known = names_of(position)
    for name in names:
        if name not in known:
            raise ValueError(f"{what}: the position has no leaf {name!r}; it has {sorted(set(known))}")


def check_shapes(what: str, given: PyTree, position: PyTree) -> None:
    """Raise unless a tree has the structure and the shapes of a position."""
    given, like = (jax.tree.map(np.shape, t) for t in (given, position))
    if given != like:
        raise ValueError(
            f"{what}: expected a tree of shapes like the position's, {like}, got {given}. {NO_MATRIX}"
        )


def check_positive(what: str, variances: PyTree) -> None:
    """Raise unless all variances that are known now are positive."""
    for path, leaf in tree_leaves_with_path(variances):
        if is_known(leaf) and not jnp.all(leaf > 0):
            raise ValueError(f"{what} {tree.path_str(path)}: expected positive variances. {NO_MATRIX}")


def is_known(leaf: Any) -> bool:
    """Tell whether the values of an array can be looked at now."""
    return not (tree.is_staging() or tree.is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))


def as_array(leaf: Any) -> Any:
    """Return an array; a shape that stands for one stays."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def local_names(target: Any, position: PyTree) -> dict[str, Any]:
    """Return the names of the leaves that are local to a plate of the target, each with its rows."""
    found = zip(names_of(position), rows_of(target, position), strict=True)
    return {name: rows for name, rows in found if rows is not None}
