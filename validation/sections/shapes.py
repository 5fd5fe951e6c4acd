"""Shapes that samplers find hard, each of known law.

An ill-conditioned Gaussian, a funnel in both coordinates, a banana, and a Gaussian of 10^5 local
latents on eight devices. The first map their draws to independent standard normals, whose moments are
compared in units of their Monte Carlo error. The centred funnel is the negative control: it fails the
test that the others pass, and its chains diverge.

References
----------
Neal, "Slice sampling", Annals of Statistics 31 (2003), the funnel; Haario, Saksman and Tamminen,
Computational Statistics 14 (1999), the banana.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.diagnostics.ess import ess_mean
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.sampling.defaults import warmup_for
from gspmd_mcmc.targets import local
from gspmd_mcmc.tree import PyTree
from validation.judge import EXACT, Bounds
from validation.kernels import SETTINGS, Setting

FALSE_ALARM = 1e-3
MOST_RHAT, LEAST_ESS = 1.01, 400
STEPS, QUICK_STEPS = (1000, 2000), (500, 1000)  # of warm-up, and draws
# Their speed is bounded, so that in the centred funnel's neck they do not diverge: no control.
ISOKINETIC = ("MAMS", "MCLMC")
DIMENSIONS, CONDITION = 100, 1e4
NUM_FUNNEL, NECK = 9, 3.0
LENGTH, BEND = 10.0, 0.1  # the strongly bent banana of Haario and others


@dataclass(frozen=True)
class Shape:
    """A density of known law.

    Attributes
    ----------
    density, data
        ``density(position, *data)`` -> summands.
    origin
        Where chains start, with uniform jitter.
    normals
        ``normals(draws)``: independent standard normals, the last axis over them.
    acceptance_rate
        What warm-ups that aim at one are to aim at; None: each at its own.
    times_more
        Draws, for one of another shape.
    """

    density: Callable
    origin: PyTree
    normals: Callable[[PyTree], np.ndarray]
    data: tuple = ()
    acceptance_rate: float | None = None
    times_more: int = 1


def gaussian_density(x, whiten):
    return -0.5 * (whiten @ x["x"]) ** 2


def ill_conditioned() -> Shape:
    """A Gaussian of 100 dimensions, turned at random; variances from 1 to 10^4."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(DIMENSIONS, DIMENSIONS)))
    whiten = turn.T / np.sqrt(np.geomspace(1, CONDITION, DIMENSIONS))[:, None]

    def normals(draws):
        return np.asarray(draws["x"], np.float64) @ whiten.T

    origin = {"x": jnp.zeros(DIMENSIONS)}
    return Shape(gaussian_density, origin, normals, (jnp.asarray(whiten, jnp.float32),))


def funnel_density(x):
    return -0.5 * (x["v"] / NECK) ** 2, -0.5 * x["x"] ** 2 * jnp.exp(-x["v"]) - 0.5 * x["v"]


def centred_funnel() -> Shape:
    """v ~ N(0, 3), and nine x ~ N(0, exp(v / 2))."""

    def normals(draws):
        v, x = (np.asarray(draws[name], np.float64) for name in ("v", "x"))
        return np.concatenate([v[..., None] / NECK, x * np.exp(-v / 2)[..., None]], axis=-1)

    return Shape(funnel_density, {"v": jnp.zeros(()), "x": jnp.zeros(NUM_FUNNEL)}, normals)


def non_centred_density(x):
    return -0.5 * (x["v"] / NECK) ** 2, -0.5 * x["z"] ** 2


def non_centred_funnel() -> Shape:
    """The funnel in z = x exp(-v / 2); what is judged are v and x, taken back."""

    def normals(draws):
        v, z = (np.asarray(draws[name], np.float64) for name in ("v", "z"))
        return np.concatenate([v[..., None] / NECK, z], axis=-1)

    return Shape(non_centred_density, {"v": jnp.zeros(()), "z": jnp.zeros(NUM_FUNNEL)}, normals)


def banana_density(x):
    z = x["bent"] - BEND * (LENGTH**2 - x["along"] ** 2)
    return -0.5 * (x["along"] / LENGTH) ** 2, -0.5 * z**2


def banana() -> Shape:
    """x ~ N(0, 10) and y ~ N(0.1 (100 - x^2), 1): y has mean 0 and variance 201.

    Its curvature grows with x^2: at the step size of an acceptance rate of 0.95 leapfrogs are unstable
    beyond 2.3 standard deviations, where chains then come seldom and stay long. NUTS' variance of x was
    too small by a twentieth (60,000 draws, |z| 4.4), at a rate of 0.99 it is right (40,000 draws, |z|
    0.7). Trajectories of a fixed number of leapfrogs are shorter so, and need more draws.
    """

    def normals(draws):
        x, y = (np.asarray(draws[name], np.float64) for name in ("along", "bent"))
        return np.stack([x / LENGTH, y - BEND * (LENGTH**2 - x**2)], axis=-1)

    return Shape(banana_density, {"along": jnp.zeros(()), "bent": jnp.zeros(())}, normals, (), 0.99, 4)


SHAPES: dict[str, Callable[[], Shape]] = {
    "ill-conditioned Gaussian": ill_conditioned,
    "non-centred funnel": non_centred_funnel,
    "banana": banana,
}


@dataclass(frozen=True)
class Verdict:
    """What a run's draws are worth, and by how many standard errors they are off.

    Attributes
    ----------
    largest_z, bound
        Of all functionals, and what Bonferroni allows them.
    rhat, ess
        The worst of all normals.
    divergences
        Of all chains, after warm-up.
    """

    largest_z: float
    bound: float
    rhat: float
    ess: float
    divergences: int

    @property
    def passed(self) -> bool:
        """Whether the draws are right, and enough of them to tell."""
        is_worth = self.rhat <= MOST_RHAT and self.ess >= LEAST_ESS
        return self.largest_z < self.bound and is_worth


def moments(u: np.ndarray) -> np.ndarray:
    """Functions of standard normals [..., d], each of mean 0 and variance 1: [..., functions]."""
    products = u[..., 1:] * u[..., :-1]
    return np.concatenate([u, (u**2 - 1) / np.sqrt(2), products], axis=-1)


def limits(num: int, bounds: Bounds) -> np.ndarray:
    """Return what bias is let pass of the `moments` of so many normals: of products, as of means."""
    squares = np.full(num, bounds.variance / np.sqrt(2))
    return np.concatenate([np.full(num, bounds.mean), squares, np.full(num - 1, bounds.mean)])


def largest_z(values: np.ndarray, limits: np.ndarray | float = 0.0) -> tuple[float, float]:
    """Return the largest |z| of functionals [chains, draws, functionals] of mean 0 and variance 1.

    Of each, what its mean is beyond its limit; and the bound that all of them have.
    """
    sizes = np.asarray(ess_mean(jnp.asarray(values, jnp.float32)), np.float64)
    z = np.maximum(np.abs(values.mean(axis=(0, 1))) - limits, 0) * np.sqrt(sizes)
    return float(np.max(np.nan_to_num(z, nan=np.inf))), bound_of(values.shape[-1])


def bound_of(num: int) -> float:
    """The |z| that the largest of so many exceeds once in a thousand runs."""
    return -NormalDist().inv_cdf(FALSE_ALARM / 2 / num)


def judge(shape: Shape, draws: gm.Draws, bounds: Bounds = EXACT) -> Verdict:
    """Judge draws of a shape; biases within bounds are let pass."""
    u = shape.normals(draws.position)
    z, bound = largest_z(moments(u), limits(u.shape[-1], bounds))
    columns = jnp.asarray(u, jnp.float32)
    return Verdict(
        largest_z=z,
        bound=bound,
        rhat=float(jnp.max(gm.rhat(columns))),
        ess=float(jnp.min(gm.ess_bulk(columns))),
        divergences=int(np.sum(draws.num_divergent)),
    )


def sample(shape: Shape, setting: Setting, steps: tuple[int, int]) -> gm.Draws:
    """Sample a shape with a kernel's setting."""
    target = gm.LogDensity(shape.density, *shape.data)
    given = setting.arguments(target)
    warmup = given.pop("warmup", warmup_for(given["kernel"]))
    if shape.acceptance_rate is not None and hasattr(warmup, "target_acceptance_rate"):
        warmup = tree.replace(warmup, target_acceptance_rate=shape.acceptance_rate)
    return gm.sample(
        jax.random.key(0),
        target,
        shape.origin,
        num_chains=min(setting.chains),
        num_warmup=steps[0] * setting.thin,
        num_samples=steps[1] * shape.times_more,
        thin=setting.thin,
        warmup=warmup,
        progress=False,
        **given,
    )


# A Gaussian of many local latents: x_j ~ N(0, 1) and y_j ~ N(x_j + mean, s_j), given y.

NUM_ROWS = 100_003  # no mesh of eight divides it
BIG_STEPS, QUICK_BIG_STEPS = (300, 150), (150, 100)
BIG_CHAINS, GROUP = 4, 1000
MOST_ENERGY_ERROR = 0.01  # nats


def mean_prior(x):
    return -0.5 * x["mean"] ** 2


def row_density(x, block):
    z = (block["y"] - x["x"] - x["mean"]) / block["s"]
    return -0.5 * (z**2 + x["x"] ** 2)


def big_data(num_rows: int = NUM_ROWS) -> dict[str, np.ndarray]:
    """Draw y and s; float32, as they are sampled."""
    rng = np.random.default_rng(1)
    s = rng.uniform(0.5, 2, num_rows)
    y = rng.normal(0.3, np.sqrt(1 + s**2))
    return {"y": y.astype(np.float32), "s": s.astype(np.float32)}


def big_target(data: dict[str, np.ndarray]) -> gm.Posterior:
    """The posterior on all eight devices, its rows and their latents over them."""
    placed = gm.place(data, gm.make_mesh(data=8), P("data"))
    return gm.Posterior(mean_prior, gm.Plate(row_density, placed, local="x"))


def big_normals(data: dict[str, np.ndarray], draws: PyTree) -> tuple[np.ndarray, np.ndarray]:
    """Standard normals: of the shared mean [chains, draws], and of the latents given it [..., rows]."""
    y, s = (np.asarray(data[name], np.float64) for name in ("y", "s"))
    weights = 1 / (1 + s**2)
    precision = 1 + weights.sum()
    mean = np.asarray(draws["mean"], np.float64)
    of_mean = (mean - (weights * y).sum() / precision) * np.sqrt(precision)
    expected = (y - mean[..., None]) * weights
    return of_mean, (np.asarray(draws["x"]) - expected) / (s * np.sqrt(weights))


def big_z(data: dict[str, np.ndarray], draws: PyTree) -> dict[str, tuple[float, float]]:
    """Largest |z|, and its bound, of the shared mean and of the latents.

    Each is judged by its own effective sample size: the metric that a warm-up finds leaves latents that
    move at different speeds, some antithetic and some slow. Squares are averaged over groups.
    """
    of_mean, of_rows = big_normals(data, draws)
    num_groups = of_rows.shape[-1] // GROUP
    squares = (of_rows**2 - 1)[..., : num_groups * GROUP] / np.sqrt(2)
    groups = squares.reshape(*squares.shape[:-1], num_groups, GROUP).sum(axis=-1) / np.sqrt(GROUP)
    return {
        "shared mean": largest_z(moments(of_mean[..., None])),
        "means of latents": largest_z(of_rows),
        "variances of latents": largest_z(groups),
    }


def energy_errors(
    kernel: gm.HMC, state: Any, data: dict[str, np.ndarray], num: int
) -> list[tuple[float, float]]:
    """How far the kernel's energy errors are from the truth, and how far naive ones are, in nats.

    The truth is the Hamiltonian's difference between the two ends of a trajectory that float32 took, in
    NumPy's float64; naive is the difference of two float32 log densities.
    """
    return [_energy_error(kernel, state, data, jax.random.key(i)) for i in range(num)]


@jax.jit
def _trajectory(kernel, rng_key, state):
    momentum = metrics.sample_momentum(
        jax.random.split(rng_key)[0], kernel.inverse_mass_matrix, state.position
    )
    momentum = local.zero_pad(kernel.target, momentum)
    _, info, end = kernel.transition(rng_key, state)
    naive = state.log_density - tree.total(kernel.target.terms(end.position))
    naive += metrics.kinetic_energy(kernel.inverse_mass_matrix, end.momentum)
    naive -= metrics.kinetic_energy(kernel.inverse_mass_matrix, momentum)
    return momentum, info.energy_error, end, naive


def _energy_error(
    kernel: gm.HMC, state: Any, data: dict[str, np.ndarray], rng_key: jax.Array
) -> tuple[float, float]:
    momentum, reported, end, naive = _trajectory(kernel, rng_key, state)
    hamiltonian = partial(_hamiltonian, kernel.inverse_mass_matrix, data)
    truth = hamiltonian(end.position, end.momentum) - hamiltonian(state.position, momentum)
    return float(abs(reported - truth)), float(abs(naive - truth))


def _hamiltonian(inverse_mass_matrix, data, position, momentum) -> float:
    def exact(t):
        return {name: np.asarray(leaf, np.float64) for name, leaf in t.items()}

    x, p, m = exact(position), exact(momentum), exact(inverse_mass_matrix)
    y, s = (np.asarray(data[name], np.float64) for name in ("y", "s"))
    rows = x["x"][: len(y)]
    potential = x["mean"] ** 2 + np.sum(rows**2) + np.sum(((y - rows - x["mean"]) / s) ** 2)
    # The pad has no momentum.
    return float(potential + sum(np.sum(p[name] ** 2 * m[name]) for name in p)) / 2


def all_reduces_per_gradient(kernel: Any, state: Any) -> float:
    """All-reduces in a leapfrog of the compiled step of one chain."""
    step = jax.jit(type(kernel).step)
    report = gm.communication(step, kernel, jax.random.key(0), state, trips={"leapfrog": 16})
    return report.runs("all-reduce", within="leapfrog")


# Records


def records(kernel_names: Iterable[str], quick: bool) -> list[dict[str, Any]]:
    """Sample every shape with kernels of `SETTINGS`; the big Gaussian with HMC and NUTS alone."""
    rows = []
    for name in (n for n in kernel_names if n in SETTINGS):
        row = {"section": "shapes", "kernel": name, "mesh": "1", "chains": min(SETTINGS[name].chains)}
        rows += [row | r for r in _shape_records(name, QUICK_STEPS if quick else STEPS)]
        if name in ("HMC", "NUTS"):
            row = {"section": "shapes", "kernel": name, "mesh": "8", "chains": BIG_CHAINS}
            rows += [row | r for r in _big_records(name, QUICK_BIG_STEPS if quick else BIG_STEPS)]
        jax.clear_caches()
    return rows


def _shape_records(name: str, steps: tuple[int, int]) -> list[dict[str, Any]]:
    rows = []
    for what, make in SHAPES.items():
        verdict = _verdict(make(), SETTINGS[name], steps)
        rows.append(
            {
                "what": f"{what}: largest |z|, R-hat {verdict.rhat:.3f}, ESS {verdict.ess:.0f}, "
                f"{verdict.divergences} divergences",
                "value": verdict.largest_z,
                "bound": verdict.bound,
                "passed": verdict.passed,
            }
        )
    return rows if name in ISOKINETIC else [*rows, _control_record(name, steps)]


def _verdict(shape: Shape, setting: Setting, steps: tuple[int, int]) -> Verdict:
    return judge(shape, sample(shape, setting, steps), setting.bounds)


def _control_record(name: str, steps: tuple[int, int]) -> dict[str, Any]:
    verdict = _verdict(centred_funnel(), SETTINGS[name], steps)
    return {
        "what": f"rejected: centred funnel, divergences; R-hat {verdict.rhat:.3f}, ESS "
        f"{verdict.ess:.0f}, largest |z| {verdict.largest_z:.1f}",
        "value": verdict.divergences,
        "bound": 0,
        "passed": verdict.divergences > 0 and not verdict.passed,
    }


def _big_records(name: str, steps: tuple[int, int]) -> list[dict[str, Any]]:
    data = big_data()
    target = big_target(data)
    draws = gm.sample(
        jax.random.key(0),
        target,
        {"x": jnp.zeros(NUM_ROWS), "mean": jnp.zeros(())},
        num_chains=BIG_CHAINS,
        num_warmup=steps[0],
        num_samples=steps[1],
        progress=False,
        **SETTINGS[name].arguments(target),
    )
    rows = [
        {"what": f"10^5 latents, {what}: largest |z|", "value": z, "bound": bound, "passed": z < bound}
        for what, (z, bound) in big_z(data, draws.position).items()
    ]
    state = jax.tree.map(lambda x: x[0], draws.state)
    count = all_reduces_per_gradient(draws.kernel, state)
    what = "10^5 latents, all-reduces a gradient"
    rows.append({"what": what, "value": count, "bound": 1, "passed": count == 1})
    if isinstance(draws.kernel, gm.HMC):
        ours, naive = np.max(energy_errors(draws.kernel, state, data, 8), axis=0)
        what = f"10^5 latents, energy error's error in nats (naive: {naive:.2g})"
        bound = MOST_ENERGY_ERROR
        rows.append({"what": what, "value": float(ours), "bound": bound, "passed": bool(ours < bound)})
    return rows
