"""A dense metric over groups of small leaves, diagonal elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.sharding import NamedSharding

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.metrics.metric import (
    Metric,
    as_array,
    check_named,
    is_known,
    local_names,
    names_of,
    product,
)
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, like_position, pytree, set_fields, static


@pytree
@dataclass(frozen=True, eq=False, init=False)
class DenseMetric(Metric):
    """M⁻¹ = S C S: scales S of all elements, correlations C = L Lᵀ within groups of leaves.

    Scales are separate from correlations, and momenta and velocities use one factor L: in float32
    elements of very different scales lose no accuracy, and M⁻¹ is symmetric to rounding.

    Parameters
    ----------
    variances
        A tree like the position: the squares of S.
    factors
        For each group, the lower Cholesky factor L [d, d] of its correlations; d is the number of
        elements of the group's leaves, in the position's order.
    groups
        For each factor, the names at the top of the position of the leaves that it couples; ``x`` is
        the name of a bare array. These leaves must be whole on every device; all others stay diagonal.
    """

    variances: PyTree = like_position()
    factors: tuple[jax.Array, ...]
    inverses: tuple[jax.Array, ...]  # L⁻¹: every step draws a momentum, and a solve is slow
    groups: tuple[tuple[str, ...], ...] = static()

    def __init__(self, variances: PyTree, factors: Sequence[Any], groups: Sequence[Sequence[str]]):
        groups = read_groups("DenseMetric", groups)
        if len(factors) != len(groups):
            raise ValueError(f"DenseMetric: {len(groups)} groups, but {len(factors)} factors")
        factors = tuple(as_array(factor) for factor in factors)
        inverses = tuple(_inverse(*pair) for pair in zip(groups, factors, strict=True))
        set_fields(self, variances=variances, factors=factors, inverses=inverses, groups=groups)

    @classmethod
    def of_covariances(
        cls, variances: PyTree, covariances: Mapping[tuple[str, ...], Any] | Any
    ) -> "DenseMetric":
        """Return the metric of given covariances, factored in float64.

        Parameters
        ----------
        variances
            A tree like the position, of arrays. Leaves of a group take the diagonal of its covariance
            instead, so that for a metric of the whole position any position will do.
        covariances
            The covariance [d, d] of the whole position, in the order of its flattened leaves; or one
            for each group of leaves, ``{("w", "b"): covariance}``.

        Raises
        ------
        ValueError
            If a covariance is not symmetric and positive definite, or has another size than its group.
        """
        if not isinstance(covariances, Mapping):
            covariances = {tuple(dict.fromkeys(names_of(variances))): covariances}
        variances = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x, float)), variances)
        groups = read_groups("DenseMetric", list(covariances))
        blocks = Groups.of("DenseMetric", variances, groups)
        factors, diagonals = [], []
        for group, size, covariance in zip(groups, blocks.sizes, covariances.values(), strict=True):
            factor, diagonal = _factor_of(group, size, np.asarray(covariance, np.float64))
            factors.append(jnp.asarray(factor, blocks.dtype))
            diagonals.append(jnp.asarray(diagonal, blocks.dtype))
        return cls(blocks.replace(variances, diagonals), factors, groups)

    def velocity(self, momentum: PyTree) -> PyTree:
        """Return M⁻¹ p."""
        scaled = jax.tree.map(lambda p, v: p * jnp.sqrt(v), momentum, self.variances)
        scaled = self._groups().map(
            scaled, self.factors, lambda x, factor: product(factor, product(x, factor, 1), 1)
        )
        return jax.tree.map(lambda x, v: x * jnp.sqrt(v), scaled, self.variances)

    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        """Draw p = S⁻¹ L⁻ᵀ z ~ N(0, M)."""
        normals = tree.normal_like(rng_key, position)
        solved = self._groups().map(normals, self.inverses, lambda z, inverse: product(z, inverse, 1))
        return jax.tree.map(lambda x, v: x * jax.lax.rsqrt(v), solved, self.variances)

    def laid_out(self, target: Target, what: str) -> "DenseMetric":
        """Lay the variances out as positions are; raise for a group that is not whole everywhere."""
        coupled = [name for group in self.groups for name in group]
        check_named(what, coupled, self.variances)
        for name, rows in local_names(target, self.variances).items():
            if name in coupled:
                raise ValueError(
                    f"{what}: dense over {name!r}, which is local to a plate of {rows} and so never in "
                    "one place; name only the other leaves, as in DenseBlock, or use a low-rank metric"
                )
        laid = super().laid_out(target, what)
        _check_whole(what, laid.variances, coupled)
        sizes = self._groups().sizes
        for i, (group, factor, size) in enumerate(zip(self.groups, self.factors, sizes, strict=True)):
            if np.shape(factor) != (size, size):
                raise ValueError(
                    f"{what}: factor {i}, of {group}: expected shape {(size, size)}, got "
                    f"{np.shape(factor)}"
                )
        return laid

    def _groups(self) -> "Groups":
        return Groups.of("DenseMetric", self.variances, self.groups)


@dataclass(frozen=True)
class Groups:
    """Which leaves of a position belong to which group, and how many elements they have."""

    members: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, what: str, position: PyTree, groups: Sequence[Sequence[str]]) -> "Groups":
        """Find the leaves by the names at the top of the position; no group stands for all of them."""
        check_named(what, [n for group in groups for n in group], position)
        names, leaves = names_of(position), jax.tree.leaves(position)
        members = [tuple(i for i, name in enumerate(names) if name in group) for group in groups]
        sizes = [sum(int(np.prod(np.shape(leaves[i]))) for i in group) for group in members]
        return cls(tuple(members), tuple(sizes), jnp.result_type(*leaves))

    def vectors(self, position: PyTree, batch: int = 0) -> list[jax.Array]:
        """Concatenate the leaves of each group, after ``batch`` leading axes: [..., d]."""
        leaves = jax.tree.leaves(position)
        return [
            jnp.concatenate([leaves[i].reshape(*leaves[i].shape[:batch], -1) for i in group], axis=-1)
            for group in self.members
        ]

    def replace(self, position: PyTree, vectors: Sequence[jax.Array]) -> PyTree:
        """Put vectors [d] back in the places of the groups' leaves."""
        leaves, treedef = jax.tree.flatten(position)
        for group, vector in zip(self.members, vectors, strict=True):
            ends = np.cumsum([np.size(leaves[i]) for i in group])
            for i, part in zip(group, jnp.split(vector, ends[:-1]), strict=True):
                leaves[i] = part.reshape(np.shape(leaves[i])).astype(leaves[i].dtype)
        return jax.tree.unflatten(treedef, leaves)

    def map(self, position: PyTree, factors: Sequence[jax.Array], function: Any) -> PyTree:
        """Replace each group's vector x by ``function(x, factor)``."""
        pairs = zip(self.vectors(position), factors, strict=True)
        return self.replace(position, [function(x, factor) for x, factor in pairs])


def read_groups(what: str, groups: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """Read groups of names: each a name or a sequence of names, and none of them twice."""
    read = tuple((group,) if isinstance(group, str) else tuple(group) for group in groups)
    names = [name for group in read for name in group]
    if not all(read) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{what}: expected groups of names of leaves, got {groups!r}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what}: {twice[0]!r} is in more than one group, or twice in one")
    return read


def _factor_of(group: tuple[str, ...], size: int, covariance: np.ndarray) -> tuple[Any, Any]:
    """Return the Cholesky factor of the correlations, and the variances."""
    if covariance.shape != (size, size):
        raise ValueError(
            f"DenseMetric: covariance of {group}: expected shape {(size, size)}, got {covariance.shape}"
        )
    variances = np.diag(covariance)
    if not np.allclose(covariance, covariance.T) or not np.all(variances > 0):
        raise ValueError(f"DenseMetric: covariance of {group}: expected it symmetric, variances > 0")
    scales = np.sqrt(variances)
    try:
        return np.linalg.cholesky(covariance / np.outer(scales, scales)), variances
    except np.linalg.LinAlgError as error:
        raise ValueError(f"DenseMetric: covariance of {group}: not positive definite") from error


def _inverse(group: tuple[str, ...], factor: Any) -> Any:
    """Return L⁻¹; of a shape that stands for a factor, a shape."""
    if np.ndim(factor) != 2 or len(set(np.shape(factor))) != 1:
        raise ValueError(
            f"DenseMetric: factor of {group}: expected a square matrix, got shape {np.shape(factor)}"
        )
    if isinstance(factor, jax.ShapeDtypeStruct):
        return factor
    return solve_triangular(factor, jnp.eye(len(factor), dtype=factor.dtype), lower=True)


def _check_whole(what: str, variances: PyTree, coupled: Sequence[str]) -> None:
    """Raise if an array that is coupled is known to lie in parts."""
    for name, leaf in zip(names_of(variances), jax.tree.leaves(variances), strict=True):
        sharding = getattr(leaf, "sharding", None) if is_known(leaf) else None
        if name in coupled and isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            raise ValueError(
                f"{what}: dense over {name!r}, which is sharded as {sharding.spec}; leave it out of "
                "the groups, or use a low-rank metric"
            )
