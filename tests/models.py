"""Densities, targets and starts that several test files share.

Functions here stand at the top of a module, as a user's do: programs are known by them. Densities are
written for one chain.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.diagnostics.mcse import mcse_mean

MESHES = {
    "1": {"data": 1},
    "7": {"data": 7},
    "8": {"data": 8},
    "2x4": {"chains": 2, "data": 4},
    "4x2": {"chains": 4, "data": 2},
    "data and model": {"data": 4, "model": 2},
}
OTHER_KINDS = ("all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def mesh_of(sizes: str | int | dict[str, int]) -> Mesh:
    """Make a mesh of as many devices as it needs: of `MESHES`, of 7, "2x4" or "2x2x2", or of sizes."""
    if isinstance(sizes, str) and sizes in MESHES:
        sizes = MESHES[sizes]
    if not isinstance(sizes, dict):
        counts = [int(n) for n in str(sizes).split("x")]
        names = ("data",) if len(counts) == 1 else ("chains", "data", "model")[: len(counts)]
        sizes = dict(zip(names, counts, strict=True))
    return gm.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def row_spec(sizes: dict[str, int]) -> P:
    """Lay rows over all devices that chains do not lie over."""
    return P(("data", "model")) if "model" in sizes else P("data")


# Three numbers in two leaves


def split_leaves(x) -> dict[str, jax.Array]:
    """Three numbers [..., 3] as leaves of two and of one."""
    return {"a": jnp.asarray(x[..., :2]), "b": jnp.asarray(x[..., 2])}


def joined(x) -> np.ndarray:
    """Undo `split_leaves`, of one position."""
    return np.append(x["a"], x["b"])


# Correlations, a quartic, scales that differ; the variances are a metric's, not the density's.
PRECISION = np.array([[1.0, 0.7, 0.0], [0.7, 2.0, -0.5], [0.0, -0.5, 30.0]])
VARIANCES = np.array([1.5, 0.5, 0.1])


def quartic(x, precision):
    """-½ x·Px - 0.02 Σ x⁴, as summands of each number."""
    x = jnp.append(x["a"], x["b"])
    return -0.5 * x * (precision @ x), -0.02 * x**4


def quartic_and_constant(x, precision, constant):
    return quartic(x, precision), constant


# Of any tree


def normal(x):
    """A standard normal in each number."""
    return jax.tree.map(lambda leaf: -0.5 * leaf**2, x)


def scaled_normal(x, scales):
    """A normal of mean 0 in each number; ``scales`` is a tree like the position."""
    return jax.tree.map(lambda value, scale: -0.5 * (value / scale) ** 2, x, scales)


def gaussian(x, precision):
    """-½ x·Px of a vector, as summands of each number."""
    return -0.5 * x * (precision @ x)


def regression(params, block):
    """Rows y of variance 1 around x · w."""
    return -0.5 * (block["y"] - block["x"] @ params["w"]) ** 2


def steep(x):
    return -(x**4)


def undefined_above_one(x):
    """A normal whose density is infinite above 1."""
    return jnp.where(x > 1, jnp.inf, -0.5 * x**2)


class Exponential:
    """A distribution of one's own: nothing but the two methods, and no pytree."""

    def __init__(self, rate):
        self.rate = rate

    def sample(self, rng_key, sample_shape=()):
        return jax.random.exponential(rng_key, sample_shape) / self.rate

    def log_prob(self, value):
        return jnp.log(self.rate) - self.rate * value


def prior_of_mean(x):
    return -0.5 * x["mean"] ** 2


def rows_with_effects(x, rows):
    """Rows y of variance 1 around a mean that they share and a standard normal effect of each."""
    return -0.5 * (rows["y"] - x["mean"] - x["effect"]) ** 2 - 0.5 * x["effect"] ** 2


# What tests compare


def real(value) -> np.ndarray:
    """The real rows of an array, `Padded` or not."""
    return value.unpad() if isinstance(value, gm.Padded) else np.asarray(value)


def check_close(got, want, tolerance: float) -> None:
    """Compare what is named in ``want``, in the norm of each array."""
    for name in want:
        a, b = np.asarray(got[name], np.float64), np.asarray(want[name], np.float64)
        assert a.shape == b.shape, name
        apart = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert apart <= tolerance, f"{name} differs by {apart:.2g}"


def counting_rows(target: gm.Posterior, num_rows: int | None = None) -> gm.Posterior:
    """Make a target of one plate count so many rows: of the padded ones, None all."""
    (plate,) = target.plates
    rows = replace(plate.rows, num_rows=num_rows or plate.rows.num_padded)
    return tree.replace(target, plates=(tree.replace(plate, rows=rows),))


# Exact laws: draws are made of independent standard normals, and can be turned back into them


class Exact(NamedTuple):
    """A target whose exact law is known.

    ``draw(u)`` makes positions of standard normals [n, 3], ``normals(positions)`` undoes it; ``metric``
    is a tree of variances like a position.
    """

    target: gm.LogDensity
    metric: Any
    draw: Callable[[np.ndarray], Any]
    normals: Callable[[Any], np.ndarray]


def _whitened(x, cholesky):
    u = jax.scipy.linalg.solve_triangular(cholesky, jnp.append(x["a"], x["b"]), lower=True)
    return -0.5 * u**2


def correlated_gaussian(correlation, scales) -> Exact:
    """A Gaussian of three numbers in two leaves."""
    cholesky = np.linalg.cholesky(np.array(correlation) * np.outer(scales, scales))

    def normals(x):
        return np.column_stack([x["a"], x["b"]]) @ np.linalg.inv(cholesky).T

    target = gm.LogDensity(_whitened, jnp.asarray(cholesky, jnp.float32))
    metric = split_leaves(np.square(scales).astype(np.float32))
    return Exact(target, metric, lambda u: split_leaves(u @ cholesky.T), normals)


def _funnel(x):
    return -0.5 * x["v"] ** 2, -0.5 * x["x"] ** 2 * jnp.exp(-x["v"]) - 0.5 * x["v"]


def funnel() -> Exact:
    """Neal's funnel, v ~ N(0, 1) and x | v ~ N(0, exp v) in two numbers."""

    def draw(u):
        return {"v": u[:, 0], "x": np.exp(u[:, :1] / 2) * u[:, 1:]}

    def normals(x):
        v = np.asarray(x["v"])
        return np.column_stack([v, np.asarray(x["x"]) * np.exp(-v / 2)[:, None]])

    return Exact(gm.LogDensity(_funnel), {"v": jnp.asarray(1.0), "x": jnp.ones(2)}, draw, normals)


# Shared latents and local ones, whose rows no mesh divides

NUM_ROWS, CHAINS = 11, 4


def _hyperprior(x):
    return -0.5 * x["mean"] ** 2, -0.5 * x["log_sd"] ** 2


def _effects(x, rows):
    prior = -0.5 * jnp.sum(x["effect"] ** 2, axis=1)
    centre = x["mean"] + jnp.exp(x["log_sd"]) * x["effect"][:, 0] * x["effect"][:, 1]
    return prior - 0.5 * (rows["y"] - centre) ** 2


def hierarchy(mesh: str, moved_row: int | None = None) -> gm.Posterior:
    """Two effects of each of 11 rows on a mesh of `MESHES`, their mean and log standard deviation."""
    y = np.random.default_rng(5).normal(1.0, 1.5, NUM_ROWS)
    if moved_row is not None:
        y[moved_row] += 1
    data = gm.place({"y": y}, mesh_of(mesh), row_spec(MESHES[mesh]))
    return gm.Posterior(_hyperprior, gm.Plate(_effects, data, local="effect"))


def hierarchy_starts() -> dict[str, jax.Array]:
    """Positions of four chains of `hierarchy`, of the default float."""
    rng = np.random.default_rng(6)
    shapes = {"mean": (CHAINS,), "log_sd": (CHAINS,), "effect": (CHAINS, NUM_ROWS, 2)}
    return {n: jnp.asarray(0.5 * rng.normal(size=shape)) for n, shape in shapes.items()}


def moments_in_mcse(position, scales, bias_of_squares: float = 0.0) -> tuple[float, float]:
    """Return the largest mean of x / scale, and of its square less 1, in Monte Carlo standard errors.

    ``position`` has leaves [chains, draws, ...]; squares may be wrong by ``bias_of_squares``.
    """
    units = jax.tree.map(lambda x, s: np.asarray(x) / s, position, scales)
    squares = jax.tree.map(lambda z: z**2 - 1, units)

    def worst(values, bias):
        errors = jax.tree.map(
            lambda x, m: np.max((np.abs(x.mean((0, 1))) - bias) / m), values, mcse_mean(values)
        )
        return max(jax.tree.leaves(errors))

    return worst(units, 0.0), worst(squares, bias_of_squares)


def autoregression(phi: float, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """AR(1) chains [chains, draws, ...] of unit innovations."""
    x = np.random.default_rng(seed).normal(size=shape)
    for n in range(1, shape[1]):
        x[:, n] += phi * x[:, n - 1]
    return x
