"""Euclidean metrics: momenta p ~ N(0, M) for an inverse mass matrix M⁻¹ that the position is given.

An inverse mass matrix is the identity (None), diagonal (a tree like the position, whose elements are
the variances that the position is believed to have), or a `Metric`: `DenseMetric`, `LowRankMetric`,
`RotatedMetric`, or one of your own. Kernels call the functions here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path

from gspmd_mcmc import tree
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.anywhere import on_any_mesh
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree

# TPUs and GPUs round the factors of a product unless it asks for more: velocities would be of another
# matrix than momenta, and energies of a third.
product = partial(jnp.tensordot, precision=jax.lax.Precision.HIGHEST)
NO_MATRIX = (
    "A tree like the position holds a variance for each number. A covariance matrix becomes a metric "
    "by gspmd_mcmc.DenseMetric.of_covariances(position, matrix); one such as Dense() is learned: "
    "sample(metric=Dense())"
)


class Metric(ABC):
    """A symmetric, positive definite inverse mass matrix: a frozen pytree.

    A metric of your own has `velocity` and `sample_momentum`, both of one matrix M: energies come from
    the velocity, momenta from the draws.

    Attributes
    ----------
    variances
        A tree like the position that is part of the metric, or None.
    """

    variances: PyTree = None

    @abstractmethod
    def velocity(self, momentum: PyTree) -> PyTree:
        """Return M⁻¹ p, zero in the pad of local leaves where the momentum is."""

    @abstractmethod
    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        """Draw p ~ N(0, M), shaped like the position."""

    def laid_out(self, target: Target, what: str) -> Self:
        """Return the metric laid out as the target's positions are; raise if it cannot be."""
        if self.variances is None:
            return self
        return tree.replace(self, variances=_laid_out_variances(target, self.variances, what))

    def check_fits(self, what: str, position: PyTree) -> None:
        """Raise if the metric is for a position of other shapes."""
        if self.variances is not None:
            check_shapes(what, self.variances, position)


def sample_momentum(rng_key: jax.Array, inverse_mass_matrix: PyTree, position: PyTree) -> PyTree:
    """Draw p ~ N(0, M), shaped like the position."""
    if isinstance(inverse_mass_matrix, Metric):
        return _as_floats_of(position, inverse_mass_matrix.sample_momentum(rng_key, position))
    normals = tree.normal_like(rng_key, position)
    if inverse_mass_matrix is None:
        return normals
    scaled = jax.tree.map(lambda z, m: z * jax.lax.rsqrt(m), normals, inverse_mass_matrix)
    return _as_floats_of(position, scaled)


def velocity(inverse_mass_matrix: PyTree, momentum: PyTree) -> PyTree:
    """Return M⁻¹ p."""
    if inverse_mass_matrix is None:
        return momentum
    if isinstance(inverse_mass_matrix, Metric):
        return _as_floats_of(momentum, inverse_mass_matrix.velocity(momentum))
    return _as_floats_of(momentum, jax.tree.map(jnp.multiply, inverse_mass_matrix, momentum))


def _as_floats_of(like: PyTree, values: PyTree) -> PyTree:
    # Under x64 a matrix may have 64 bits, as NumPy's have, where the position has 32.
    return jax.tree.map(lambda x, y: y.astype(x.dtype), like, values)


def kinetic_energy(inverse_mass_matrix: PyTree, momentum: PyTree) -> jax.Array:
    """Return ½ p·M⁻¹p."""
    return 0.5 * tree.dot(momentum, velocity(inverse_mass_matrix, momentum))


def kinetic_energy_difference(inverse_mass_matrix: PyTree, new: PyTree, old: PyTree) -> jax.Array:
    """Return ½ (p′−p)·M⁻¹(p′+p): the difference of kinetic energies as a sum over differences."""
    return 0.5 * tree.dot(tree.sub(new, old), velocity(inverse_mass_matrix, tree.add(new, old)))


@on_any_mesh
def laid_out(kernel: str, target: Target, inverse_mass_matrix: PyTree) -> PyTree:
    """Check an inverse mass matrix, and lay it out as positions are."""
    what = f"{kernel}: inverse_mass_matrix"
    if inverse_mass_matrix is None:
        return None
    if isinstance(inverse_mass_matrix, Metric):
        return inverse_mass_matrix.laid_out(target, what)
    return _laid_out_variances(target, inverse_mass_matrix, what)


def check_fits(kernel: str, inverse_mass_matrix: PyTree, position: PyTree) -> None:
    """Raise unless an inverse mass matrix is for positions of these shapes."""
    what = f"{kernel}: inverse_mass_matrix"
    if isinstance(inverse_mass_matrix, Metric):
        inverse_mass_matrix.check_fits(what, position)
    elif inverse_mass_matrix is not None:
        check_shapes(what, inverse_mass_matrix, position)


def _laid_out_variances(target: Target, variances: PyTree, what: str) -> PyTree:
    variances = local.lay_out(target, variances, what)
    for path, leaf in tree_leaves_with_path(variances):
        if is_known(leaf) and not jnp.all(leaf > 0):
            raise ValueError(f"{what} {tree.path_str(path)}: expected positive variances. {NO_MATRIX}")
    return variances


# What metrics share: leaves reached by name, and checks of what they are given


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
    """Raise unless a tree has the structure, the classes and the shapes of a position."""
    (one, shapes), (other, like) = map(local.structure_and_shapes, (given, position))
    if shapes == like:
        for mine, its in zip(tree.classes_of(one), tree.classes_of(other), strict=False):
            if mine is not its and "builtins" not in (mine.__module__, its.__module__):
                raise ValueError(
                    f"{what}: its values are in a {mine.__qualname__}, the position's in another class "
                    f"{its.__qualname__}. A cell that defines a class makes a new one each time it "
                    "runs: make both trees after it"
                )
    if one != other or shapes != like:
        given, like = (local.real_shapes(t) for t in (given, position))
        raise ValueError(
            f"{what}: expected a tree of shapes like the position's, {like}, got {given}. {NO_MATRIX}"
        )


def is_known(leaf: Any) -> bool:
    """Tell whether the values of an array can be read now."""
    return not (tree.is_staging() or tree.is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct))


def as_array(leaf: Any) -> Any:
    """Return an array; a shape that stands for one stays a shape."""
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf)


def local_names(target: Target, position: PyTree) -> dict[str, Any]:
    """Return the names of the leaves that are local to a plate of the target, each with its rows."""
    found = zip(names_of(position), local.rows_of(target, position), strict=True)
    return {name: rows for name, rows in found if rows is not None}
