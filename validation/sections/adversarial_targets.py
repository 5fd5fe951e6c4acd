"""Targets that make samplers lie: each with an exact sampler of its own, in NumPy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

import gspmd_mcmc as gm
from gspmd_mcmc.tree import PyTree

Values = dict[str, np.ndarray]
FEW_CHAINS, MANY_CHAINS = 4, 64


@dataclass(frozen=True, eq=False)
class Adversary:
    """A target, where its chains start, and its law.

    Attributes
    ----------
    density
        ``density(position)`` -> summands; None of a NumPyro model.
    origin
        Default starts are spread around it.
    exact
        ``exact(rng, num)`` -> name to ``num`` independent draws: what is judged.
    read
        ``read(draws)`` -> the same names to arrays [chains, draws], of draws [chains, draws, ...].
    start
        ``start(rng, num_chains)`` -> positions of all chains; None: default starts.
    model
        A NumPyro model in place of a density.
    seeds
        A run for each.
    """

    density: Callable | None
    origin: PyTree
    exact: Callable[[np.random.Generator, int], Values]
    read: Callable[[PyTree], Values]
    start: Callable[[np.random.Generator, int], PyTree] | None = None
    model: Callable | None = None
    seeds: tuple[int, ...] = (0,)

    def target(self) -> Any:
        """Build the target."""
        if self.model is not None:
            return gm.from_numpyro(self.model)
        assert self.density is not None
        return gm.LogDensity(self.density)


def coordinates(draws: Any, which: tuple[int, ...] | None = None) -> Values:
    """Name coordinates of ``x`` [..., dimensions]."""
    x = np.asarray(draws["x"] if isinstance(draws, Mapping) else draws, np.float64)
    return {f"x[{i}]": x[..., i] for i in which or range(x.shape[-1])}


def independent(draw: Callable, density: Callable, num: int, origin: float = 0.0) -> Adversary:
    """Return a target of independent coordinates; ``draw(rng, shape)`` is their law."""
    return Adversary(
        lambda p: density(p["x"]),
        {"x": jnp.full(num, origin, jnp.float32)},
        lambda rng, n: coordinates(draw(rng, (n, num))),
        coordinates,
    )


# Several modes


def _log_normal(x: jax.Array, center: jax.Array, sd: float) -> jax.Array:
    return -0.5 * jnp.sum(((x - center) / sd) ** 2) - x.size * jnp.log(sd)


def _mixture_density(position, centers, sds, log_weights):
    each = [
        _log_normal(position["x"], jnp.asarray(center), sd) + weight
        for center, sd, weight in zip(centers, sds, log_weights, strict=True)
    ]
    return logsumexp(jnp.stack(each))


def _mixture_draws(rng, num, centers, sds, log_weights):
    weights = np.exp(log_weights) / np.sum(np.exp(log_weights))
    which = rng.choice(len(weights), num, p=weights)
    centers, sds = np.asarray(centers), np.asarray(sds)
    x = centers[which] + sds[which, None] * rng.normal(size=(num, centers.shape[1]))
    return _mixture_values({"x": x})


def _mixture_values(draws) -> Values:
    x = np.asarray(draws["x"], np.float64)
    return coordinates(draws, (0, 1)) | {"norm": np.linalg.norm(x, axis=-1)}


def _in_second(share: float, centers, sds, rng, num_chains: int) -> PyTree:
    """Start a share of the chains in the second mode, and the others in the first."""
    which = (np.arange(num_chains) < share * num_chains).astype(int)
    centers, sds = np.asarray(centers), np.asarray(sds)
    x = centers[which] + sds[which, None] * rng.normal(size=(num_chains, centers.shape[1]))
    return {"x": jnp.asarray(x, jnp.float32)}


def mixture(centers, sds, log_weights=None, share=None, seeds=(0,)) -> Adversary:
    """Return a mixture of spherical normals; ``share`` of the chains start in the second."""
    centers = tuple(tuple(map(float, center)) for center in centers)
    log_weights = tuple(log_weights or [0.0] * len(centers))
    law = {"centers": centers, "sds": tuple(map(float, sds)), "log_weights": log_weights}
    start = None if share is None else partial(_in_second, share, centers, sds)
    return Adversary(
        partial(_mixture_density, **law),
        {"x": jnp.zeros(len(centers[0]))},
        partial(_mixture_draws, **law),
        _mixture_values,
        start,
        seeds=seeds,
    )


# Curved and scaled

NECK, NUM_FUNNEL = 3.0, 9


def _funnel_density(p):
    return -0.5 * (p["v"] / NECK) ** 2, -0.5 * p["x"] ** 2 * jnp.exp(-p["v"]) - 0.5 * p["v"]


def _funnel_draws(rng, num):
    v = NECK * rng.normal(size=num)
    return {"v": v, "x[0]": np.exp(v / 2) * rng.normal(size=num)}


def centered_funnel() -> Adversary:
    """Neal's funnel: v ~ N(0, 3), nine x ~ N(0, exp(v / 2))."""
    origin = {"v": jnp.zeros(()), "x": jnp.zeros(NUM_FUNNEL)}
    return Adversary(
        _funnel_density,
        origin,
        _funnel_draws,
        lambda d: {"v": np.asarray(d["v"], np.float64)} | coordinates(d, (0,)),
    )


def non_centered_funnel() -> Adversary:
    """The same in z = x exp(-v / 2), taken back."""
    return Adversary(
        lambda p: (-0.5 * (p["v"] / NECK) ** 2, -0.5 * p["z"] ** 2),
        {"v": jnp.zeros(()), "z": jnp.zeros(NUM_FUNNEL)},
        _funnel_draws,
        lambda d: {
            "v": np.asarray(d["v"], np.float64),
            "x[0]": np.asarray(d["z"], np.float64)[..., 0] * np.exp(np.asarray(d["v"]) / 2),
        },
    )


def banana() -> Adversary:
    """x ~ N(0, 2), y ~ N(x^2 / 2, 1)."""

    def draw(rng, num):
        x = 2 * rng.normal(size=num)
        return coordinates(np.stack([x, x**2 / 2 + rng.normal(size=num)], axis=-1))

    def density(p):
        x, y = p["x"]
        return -0.5 * (x / 2) ** 2, -0.5 * (y - x**2 / 2) ** 2

    return Adversary(density, {"x": jnp.zeros(2)}, draw, coordinates)


def _grid_draws(rng, num, weight, *axes):
    """Draw from a density on a grid of points, spread evenly within cells."""
    grids = np.meshgrid(*axes, indexing="ij")
    p = weight(*grids).ravel()
    cells = np.unravel_index(rng.choice(p.size, num, p=p / p.sum()), grids[0].shape)
    return [
        axis[i] + (axis[1] - axis[0]) * rng.uniform(-0.5, 0.5, num)
        for axis, i in zip(axes, cells, strict=True)
    ]


def _polar(x: np.ndarray) -> Values:
    return {"angle": np.arctan2(x[..., 1], x[..., 0]), "radius": np.hypot(x[..., 0], x[..., 1])}


RADIUS, WIDTH, TUBE = 5.0, 0.2, 1.5


def ring() -> Adversary:
    """A circle of radius 5, 0.2 wide."""

    def draw(rng, num):
        (r,) = _grid_draws(
            rng, num, lambda r: r * np.exp(-0.5 * ((r - RADIUS) / WIDTH) ** 2), np.linspace(3, 7, 4001)
        )
        return {"angle": rng.uniform(-np.pi, np.pi, num), "radius": r}

    def density(p):
        return -0.5 * ((jnp.sqrt(jnp.sum(p["x"] ** 2)) - RADIUS) / WIDTH) ** 2

    origin = {"x": jnp.array([0.5, 0.5])}
    return Adversary(density, origin, draw, lambda d: _polar(np.asarray(d["x"], np.float64)))


def torus() -> Adversary:
    """A tube of radius 1.5 around a circle of radius 5, its wall 0.2 thick."""

    def wall(rho, z, root):
        return -0.5 * ((root((rho - RADIUS) ** 2 + z**2) - TUBE) / WIDTH) ** 2

    def draw(rng, num):
        axes = np.linspace(2, 8, 1201), np.linspace(-3, 3, 1201)
        rho, z = _grid_draws(rng, num, lambda rho, z: rho * np.exp(wall(rho, z, np.sqrt)), *axes)
        return {"angle": rng.uniform(-np.pi, np.pi, num), "radius": rho, "z": z}

    def density(p):
        return wall(jnp.sqrt(jnp.sum(p["x"][:2] ** 2)), p["x"][2], jnp.sqrt)

    def read(d):
        x = np.asarray(d["x"], np.float64)
        return _polar(x) | {"z": x[..., 2]}

    return Adversary(density, {"x": jnp.array([2.0, 2.0, 1.0])}, draw, read)


def plateau() -> Adversary:
    """Flat within a radius of 5, a steep edge around it."""

    def draw(rng, num):
        (r,) = _grid_draws(
            rng, num, lambda r: r * np.exp(-10 * np.maximum(r - 5, 0) ** 2), np.linspace(0, 7, 7001)
        )
        angle = rng.uniform(-np.pi, np.pi, num)
        return coordinates(r[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1))

    def density(p):
        radius = jnp.sqrt(jnp.sum(p["x"] ** 2) + 1e-12)
        return -10 * jnp.maximum(radius - 5, 0) ** 2

    return Adversary(density, {"x": jnp.zeros(2)}, draw, coordinates)


def _gaussian(cov: np.ndarray, which: tuple[int, ...] | None = None) -> Adversary:
    root = np.linalg.cholesky(cov)
    whiten = jnp.asarray(np.linalg.inv(root), jnp.float32)
    dims = len(cov)

    def exact(rng, num):
        return coordinates(rng.normal(size=(num, dims)) @ root.T, which)

    def density(p):
        return -0.5 * jnp.matmul(whiten, p["x"], precision="highest") ** 2

    return Adversary(density, {"x": jnp.zeros(dims)}, exact, partial(coordinates, which=which))


def ill_conditioned(dims: int = 20, condition: float = 1e6) -> Adversary:
    """A Gaussian turned at random, variances 1 to 10^6."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(dims, dims)))
    return _gaussian(turn @ np.diag(np.geomspace(1, condition, dims)) @ turn.T)


def autoregressive(dims: int = 200, rho: float = 0.99) -> Adversary:
    """A stationary AR(1) of 200 steps."""

    def exact(rng, num):
        e = rng.normal(size=(num, dims)) * np.sqrt(1 - rho**2)
        x = np.empty((num, dims))
        x[:, 0] = rng.normal(size=num)
        for t in range(1, dims):
            x[:, t] = rho * x[:, t - 1] + e[:, t]
        return coordinates(x, (0, dims // 2, dims - 1))

    def density(p):
        x = p["x"]
        return -0.5 * x[0] ** 2, -0.5 * (x[1:] - rho * x[:-1]) ** 2 / (1 - rho**2)

    read = partial(coordinates, which=(0, dims // 2, dims - 1))
    return Adversary(density, {"x": jnp.zeros(dims)}, exact, read)


SCALES = 10.0 ** np.arange(-6, 7)


def scales() -> Adversary:
    """Thirteen independent normals, standard deviations 1e-6 to 1e6."""
    by = jnp.asarray(SCALES, jnp.float32)
    return independent(
        lambda rng, shape: SCALES * rng.normal(size=shape), lambda x: -0.5 * (x / by) ** 2, len(SCALES)
    )


# Edges, simplexes, matrices


def hard_edges() -> Adversary:
    """An exponential beyond 0 and a uniform in (0, 1), written with -inf outside."""

    def draw(rng, num):
        return coordinates(np.stack([rng.exponential(size=num), rng.uniform(size=num)], axis=-1))

    def density(p):
        x, y = p["x"]
        return jnp.where((x > 0) & (y > 0) & (y < 1), -x, -jnp.inf)

    def start(rng, num_chains):
        return {"x": jnp.asarray(rng.uniform(0.2, 0.8, (num_chains, 2)), jnp.float32)}

    return Adversary(density, {"x": jnp.full(2, 0.5)}, draw, coordinates, start)


def dirichlet(concentration: float, size: int = 5) -> Adversary:
    """A symmetric Dirichlet distribution, as a NumPyro model."""
    import numpyro
    from numpyro import distributions as dist

    def model():
        numpyro.sample("x", dist.Dirichlet(jnp.full(size, concentration)))

    def exact(rng, num):
        return coordinates(rng.dirichlet([concentration] * size, num))

    return Adversary(None, None, exact, coordinates, model=model)


def lkj(size: int = 5) -> Adversary:
    """Correlation matrices, uniform over all of them: each correlation is 2 Beta(size / 2) - 1."""
    import numpyro
    from numpyro import distributions as dist

    names = [(i, j) for i in range(size) for j in range(i)]

    def model():
        numpyro.sample("x", dist.LKJCholesky(size, 1.0))

    def exact(rng, num):
        return {f"r[{i},{j}]": 2 * rng.beta(size / 2, size / 2, num) - 1 for i, j in names}

    def read(d):
        root = np.asarray(d["x"], np.float64)
        r = root @ np.swapaxes(root, -1, -2)
        return {f"r[{i},{j}]": r[..., i, j] for i, j in names}

    return Adversary(None, None, exact, read, model=model)


def horseshoe(size: int = 5) -> Adversary:
    """Local scales of half-Cauchy law times a global one, not centered, with no data."""

    def density(p):
        half_cauchy = p["log_scale"] - jnp.log1p(jnp.exp(2 * p["log_scale"]))
        return half_cauchy, -0.5 * p["z"] ** 2

    def draw(rng, num):
        scale = np.abs(rng.standard_cauchy((num, size)))
        return coordinates(np.arcsinh(scale * rng.normal(size=(num, size))))

    def read(d):
        z, scale = np.asarray(d["z"], np.float64), np.exp(np.asarray(d["log_scale"], np.float64))
        return coordinates(np.arcsinh(scale * z))

    origin = {"log_scale": jnp.zeros(size), "z": jnp.zeros(size)}
    return Adversary(density, origin, draw, read)


def offset_position(offset: float) -> Adversary:
    """A standard normal far from zero, where float32 numbers lie 1 (1e7) or 8 (1e8) apart."""
    return independent(
        lambda rng, shape: offset + rng.normal(size=shape),
        lambda x: -0.5 * (x - jnp.float32(offset)) ** 2,
        3,
        offset,
    )


def offset_density(offset: float, is_apart: bool) -> Adversary:
    """A standard normal whose log density has a large constant, as a summand or added up."""

    def density(x):
        terms = -0.5 * x**2
        return (terms, jnp.float32(offset)) if is_apart else jnp.sum(terms) + jnp.float32(offset)

    return independent(lambda rng, shape: rng.normal(size=shape), density, 3)


def _student(rng, shape):
    return rng.standard_t(3, shape)


def _gumbel(rng, shape):
    return rng.gumbel(size=shape)


def _far(distance: float, dims: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return (0.0,) * dims, (distance, *[0.0] * (dims - 1))


TWO_SEEDS = (0, 1, 2)
ADVERSARIES: dict[str, Callable[[], Adversary]] = {
    "two modes, sd 1 and 0.02": lambda: mixture(_far(6, 2), (1, 0.02), share=0.25, seeds=TWO_SEEDS),
    "two modes 10 apart": lambda: mixture(((-5.0, 0.0), (5.0, 0.0)), (1, 1), seeds=TWO_SEEDS),
    "two modes in 10 dimensions": lambda: mixture(_far(8, 10), (1, 1), share=0.25),
    "two modes that mix": lambda: mixture(_far(3, 2), (1, 1)),
    "a mode 40 nats lower": lambda: mixture(_far(30, 2), (1, 1), (0.0, -40.0), share=0.25),
    "spike and slab, 50 dimensions": lambda: mixture(_far(0, 50), (1, 1000), share=0.5),
    "centered funnel": centered_funnel,
    "non-centered funnel": non_centered_funnel,
    "banana": banana,
    "ring": ring,
    "torus": torus,
    "Student t, 3 degrees": lambda: independent(_student, lambda x: -2 * jnp.log1p(x**2 / 3), 10),
    "Cauchy": lambda: independent(
        lambda rng, shape: rng.standard_cauchy(shape), lambda x: -jnp.log1p(x**2), 5
    ),
    "Gumbel": lambda: independent(_gumbel, lambda x: -x - jnp.exp(-x), 10),
    "hard edges": hard_edges,
    "plateau": plateau,
    "scales 1e-6 to 1e6": scales,
    "condition 1e6": ill_conditioned,
    "correlation 0.999": lambda: _gaussian(np.array([[1, 0.999], [0.999, 1]])),
    "AR(0.99), 200 dimensions": autoregressive,
    "Dirichlet(0.1)": lambda: dirichlet(0.1),
    "Dirichlet(2)": lambda: dirichlet(2.0),
    "LKJ(1), 5 x 5": lkj,
    "horseshoe": horseshoe,
    "position at 1e7": lambda: offset_position(1e7),
    "position at 1e8": lambda: offset_position(1e8),
    "log density + 1e8, a summand": lambda: offset_density(1e8, True),
    "log density + 1e8, added up": lambda: offset_density(1e8, False),
}
