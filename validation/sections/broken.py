"""Samplers that are wrong on purpose: what a test of samplers must reject.

Each entry of `BREAKS` takes a right kernel and returns a wrong one with the same settings. They break
the target that the kernel holds, or its metric, and so serve any kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.targets.bijections import is_bijection
from gspmd_mcmc.tree import PyTree, pytree

MOMENTUM_SCALE = 2.0


@pytree
@dataclass(frozen=True, eq=False)
class ScaledJacobian:
    """A bijection that counts a share of its log Jacobian; the right share is 1."""

    bijection: Any
    share: jax.Array  # []

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.bijection(x)

    def log_abs_det_jacobian(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self.share * self.bijection.log_abs_det_jacobian(x, y)

    @property
    def inv(self) -> Any:
        return self.bijection.inv


@pytree
@dataclass(frozen=True, eq=False)
class Mistaken:
    """A metric whose velocities are the identity's, and its momenta too if their scale is 1.

    The momenta of every other leaf are scaled, so that kernels that look at directions alone, and not
    at the size of momenta, are wrong too.
    """

    scale: jax.Array  # []

    def velocity(self, momentum: PyTree) -> PyTree:
        return momentum

    def sample_momentum(self, rng_key: jax.Array, position: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree.normal_like(rng_key, position))
        scaled = [self.scale * z if i % 2 else z for i, z in enumerate(leaves)]
        return jax.tree.unflatten(treedef, scaled)

    def laid_out(self, target: Any, what: str) -> "Mistaken":
        return self

    def check_fits(self, kernel: str, position: PyTree) -> None:
        """Fits any position."""


def distorted(kernel: Any, jacobian_share: float, momentum_scale: float) -> Any:
    """Count a share of all Jacobians, and scale momenta; a right sampler where both numbers are 1.

    The numbers are leaves: one program serves all of them.

    Raises
    ------
    ValueError
        If the kernel has a metric: the wrong momenta are written for the identity.
    """
    if kernel.inverse_mass_matrix is not None:
        raise ValueError("distorted: expected a kernel whose metric is the identity")
    target, share = kernel.target, jnp.asarray(jacobian_share)
    wrong = jax.tree.map(lambda b: ScaledJacobian(b, share), target.bijections, is_leaf=is_bijection)
    plates = tuple(tree.replace(p, bijections=wrong) if p.local else p for p in target.plates)
    target = tree.replace(target, bijections=wrong, plates=plates)
    return tree.replace(
        kernel, target=target, inverse_mass_matrix=Mistaken(jnp.asarray(momentum_scale))
    )


def forgets_jacobian(kernel: Any) -> Any:
    """Leave the Jacobians of constrained latents out, shared and local ones."""
    return distorted(kernel, 0.0, 1.0)


def mistakes_momenta(kernel: Any) -> Any:
    """Draw momenta of another metric than the kinetic energy's."""
    return distorted(kernel, 1.0, MOMENTUM_SCALE)


def drops_terms(kernel: Any) -> Any:
    """Leave the likelihood of the last real row's observations out; the prior of its latents stays.

    The plate's data must have a leaf ``is_seen``, whose zeros take observations out.
    """
    (plate,) = kernel.target.plates
    rows = jnp.arange(plate.rows.num_padded)[:, None]
    is_seen = jnp.where(rows == plate.rows.num_rows - 1, 0, plate.data["is_seen"])
    return _with_plate(kernel, data=plate.data | {"is_seen": is_seen})


def counts_pad_rows(kernel: Any) -> Any:
    """Forget the mask: the copies of the last row that fill the mesh count as rows of their own."""
    rows = kernel.target.plates[0].rows
    return _with_plate(kernel, rows=replace(rows, num_rows=rows.num_padded))


BREAKS: dict[str, Callable[[Any], Any]] = {
    "wrong Jacobian": forgets_jacobian,
    "dropped terms": drops_terms,
    "counted pad rows": counts_pad_rows,
    "wrong momentum scale": mistakes_momenta,
}


def _with_plate(kernel: Any, **changes: Any) -> Any:
    (plate,) = kernel.target.plates
    plates = (tree.replace(plate, **changes),)
    return tree.replace(kernel, target=tree.replace(kernel.target, plates=plates))
