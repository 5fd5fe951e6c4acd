"""Isokinetic dynamics: a particle of speed 1 that the gradient steers, tree-shaped.

In coordinates z in which the metric is the identity, with a unit vector u in d dimensions,

    z' = u,    u' = (I - u uᵀ) g / (d - 1),    g the gradient of the log density p:

a flow that preserves p(z) times the uniform density of the sphere. A kick turns u along the great
circle towards g, in closed form; a drift moves z. Kicks contract the volume of the sphere by exp(-ΔK)
with ΔK = ∫ u·g dt, so ΔK - Δ log p plays the part of the energy error of HMC in the Metropolis test.

Momenta are p = M^½ u, with p·M⁻¹p = 1. Then a kick adds a multiple of the gradient in x to a multiple
of p, a drift adds a multiple of M⁻¹p to x, noise is N(0, M), and u·g is p·M⁻¹g. So any metric serves
that can apply M⁻¹ and draw momenta.

References
----------
Steeg and Galstyan, "Hamiltonian dynamics with non-Newtonian momentum for rapid sampling", NeurIPS 2021;
Robnik, De Luca, Silverstein and Seljak, "Microcanonical Hamiltonian Monte Carlo", JMLR 24 (2023);
Robnik and Seljak, "Fluctuation without dissipation: microcanonical Langevin Monte Carlo" (2024).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.integrators import Differentiable, PhasePoint, Splitting, compose
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, pytree

# Below this a kick takes the logarithm of 1 + little, above it that of large exponentials.
LARGE_KICK = 1.0
# A kick by δ contracts all directions by exp(-δ): beyond this float32 could not tell them apart, the
# step would not be reversible, and the energy error would mean nothing.
STRONGEST_KICK = 8.0


def dimension(kernel: str, target: Target, position: PyTree) -> int:
    """Count the real elements of the position of one chain, without those of pad.

    Raises
    ------
    ValueError
        If there is only one: a sphere in one dimension is two points, and nothing turns.
    """
    rows_of_leaves = local.rows_of(target, position)
    count = 0
    for leaf, rows in zip(jax.tree.leaves(position), rows_of_leaves, strict=True):
        count += leaf.size if rows is None else leaf.size // rows.num_padded * rows.num_rows
    if count < 2:
        raise ValueError(
            f"{kernel}: position: expected two dimensions at least, got {count}. A direction in one "
            "dimension cannot turn; use HMC or NUTS"
        )
    return count


@pytree
@dataclass(frozen=True, eq=False)
class Span:
    """Vectors at one position, of which momenta are combinations: coefficients [k], one each.

    Whatever happens to a momentum at a position needs only the products of these vectors, which are
    taken at once: where momenta are sharded, one reduction of scalars serves all of it.

    Attributes
    ----------
    vectors
        The momentum that arrives here, the gradient, and noise if the momentum is to be refreshed.
    products
        a·M⁻¹b for each pair of them, [k, k].
    """

    vectors: tuple[PyTree, ...]
    products: jax.Array

    @classmethod
    def of(cls, inverse_mass_matrix: PyTree, *vectors: PyTree) -> "Span":
        """Take the products of some vectors."""
        velocities = [metrics.velocity(inverse_mass_matrix, v) for v in vectors]
        upper = {
            (i, j): tree.dot(v, velocities[j])
            for i, v in enumerate(vectors)
            for j in range(i, len(vectors))
        }
        each = range(len(vectors))
        products = [jnp.stack([upper[min(i, j), max(i, j)] for j in each]) for i in each]
        return cls(vectors, jnp.stack(products))

    def combine(self, coefficients: jax.Array) -> PyTree:
        """Return a combination of the vectors."""

        def one(*leaves):
            return sum(c.astype(x.dtype) * x for c, x in zip(coefficients, leaves, strict=True))

        return jax.tree.map(one, *self.vectors)

    def momentum(self) -> jax.Array:
        """Return the momentum that arrives here, scaled to a unit vector; zero stays zero."""
        return self.unit(jnp.zeros_like(self.products[0]).at[0].set(1))

    def unit(self, coefficients: jax.Array) -> jax.Array:
        """Scale a combination to p·M⁻¹p = 1; zero stays zero."""
        squares = coefficients[:, None] * self.products * coefficients[None, :]
        norm = jnp.sqrt(jnp.maximum(jnp.sum(squares), 0))
        return coefficients / jnp.where(norm == 0, 1, norm)

    def refreshed(self, coefficients: jax.Array, noise: jax.Array) -> jax.Array:
        """Add some of the noise to a momentum, and scale it to a unit vector again."""
        return self.unit(coefficients.at[2].add(noise))

    def kicked(
        self, coefficients: jax.Array, time: jax.Array, dimension: int
    ) -> tuple[jax.Array, jax.Array]:
        """Turn a unit momentum towards the gradient for some time; also return ΔK.

        With e the direction of the gradient, w = u·e, δ = time |g| / (d - 1) and ζ = exp(-δ),
        u ← e (1 - ζ) (1 + ζ + w (1 - ζ)) + 2 ζ u, scaled to a unit vector: nothing overflows for large
        δ. ΔK is infinite for δ over 8, so that the step is refused; as δ depends on the position only,
        the reverse step is refused too.
        """
        norm = jnp.sqrt(self.products[1, 1])
        safe = jnp.where(norm == 0, 1, norm)
        cosine = jnp.clip(jnp.sum(coefficients * self.products[1]) / safe, -1, 1)
        delta = time * norm / (dimension - 1)
        zeta, rest = jnp.exp(-delta), -jnp.expm1(-delta)
        turned = (2 * zeta * coefficients).at[1].add(rest * (1 + zeta + cosine * rest) / safe)
        gain = (dimension - 1) * log_stretch(cosine, delta)
        return self.unit(turned), jnp.where(delta <= STRONGEST_KICK, gain, jnp.inf)


def log_stretch(cosine: jax.Array, delta: jax.Array) -> jax.Array:
    """Return log(cosh δ + w sinh δ), exact to rounding for small δ and finite for large ones."""
    small = jnp.minimum(delta, LARGE_KICK)
    near = jnp.log1p(2 * jnp.sinh(small / 2) ** 2 + cosine * jnp.sinh(small))
    far = delta - jnp.log(2) + jnp.logaddexp(jnp.log1p(cosine), jnp.log1p(-cosine) - 2 * delta)
    return jnp.where(delta < LARGE_KICK, near, far)


def kick(
    inverse_mass_matrix: PyTree, point: PhasePoint, time: jax.Array, dimension: int
) -> tuple[PhasePoint, jax.Array]:
    """Turn a momentum towards the gradient for some time; also return ΔK."""
    span = Span.of(inverse_mass_matrix, point.momentum, point.log_density_grad)
    turned, gain = span.kicked(span.momentum(), time, dimension)
    return tree.replace(point, momentum=span.combine(turned)), gain


def drift(inverse_mass_matrix: PyTree, point: PhasePoint, time: jax.Array) -> PyTree:
    """Return the position after moving along the momentum for some time."""
    return tree.axpy(time, metrics.velocity(inverse_mass_matrix, point.momentum), point.position)


def integrate(
    density: Differentiable,
    inverse_mass_matrix: PyTree,
    splitting: Splitting,
    point: PhasePoint,
    step_size: jax.Array,
    num_steps: jax.Array,
    dimension: int,
) -> tuple[PhasePoint, PyTree, jax.Array]:
    """Take a number of steps, at least one; return their end, the terms there, and ΔK of them all."""

    def drifted(point, time):
        return drift(inverse_mass_matrix, point, time)

    def kicked(point, time):
        return kick(inverse_mass_matrix, point, time, dimension)

    return compose(splitting, point, step_size, num_steps, density, drifted, kicked)
