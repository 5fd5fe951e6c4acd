"""Simulation-based calibration of a hierarchical model with local latents.

256 parameters are drawn from the prior and a data set from each; the sampler of a data set's posterior
is right only if the parameters' ranks among its draws are uniform. One program samples all data sets:
they are leaves of the target, mapped over. Every functional's ranks are put to a chi-square test and
to the simultaneous band of their empirical distribution.

A chain starts at the parameters that made its data, which are an exact draw of its posterior, and is
put back there at a random one of its L + 1 places: what comes after that stands for the chain run
backwards. For a reversible kernel the ranks are then uniform however slowly it mixes (Besag and
Clifford). Thinning is for power: `thinning` measures in a pilot run how many steps are worth an
independent draw of the functional that mixes worst, and keeps one draw in so many.

References
----------
Talts, Betancourt, Simpson, Vehtari and Gelman, arXiv 1804.06788; Säilynoja, Bürkner and Vehtari,
Statistics and Computing 32 (2022), the band; Modrák et al., Bayesian Analysis (2023), that the log
likelihood must be among the functionals; Besag and Clifford, Biometrika 76 (1989).
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from numpyro.distributions import biject_to, constraints
from scipy.stats import binom, chi2

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.diagnostics.ess import ess_mean
from gspmd_mcmc.targets import local
from gspmd_mcmc.tree import PyTree
from validation.sections.broken import BREAKS

NUM_SETS, NUM_DRAWS, NUM_BINS = 256, 63, 16
LEAST_P = 1e-4
LEAST_WORTH = 0.4  # effective draws a draw: a kernel that stands still is calibrated too
MESHES = {"1": None, "8": {"data": 8}, "2x4": {"chains": 2, "data": 4}}
NUM_GROUPS, NUM_SEEN = 3, 4  # rows, which no mesh divides, and the most observations of one
SPREAD = 0.5  # of the logarithms of the scale and of the groups' noise


# The model: mean ~ N(0, 1), scale ~ LogNormal(0, SPREAD); for each group effect ~ N(mean, scale),
# noise ~ LogNormal(0, SPREAD), and observations y ~ N(effect, noise), not as many in each group.


def log_prior(params):
    return -0.5 * params["mean"] ** 2, _log_normal(params["scale"])


def log_likelihood(params, block):
    effect, noise = params["effect"], params["noise"]
    seen = jnp.sum(log_observations(effect, noise, block["y"], block["is_seen"]), axis=1)
    z = (effect - params["mean"]) / params["scale"]
    return seen - 0.5 * z**2 - jnp.log(params["scale"]) + _log_normal(noise)


def log_observations(effect, noise, y, is_seen):
    """Log density of each observation [rows, observations], up to a constant."""
    z = (y - effect[:, None]) / noise[:, None]
    return is_seen * (-0.5 * z**2 - jnp.log(noise)[:, None])


def _log_normal(x):
    return -0.5 * (jnp.log(x) / SPREAD) ** 2 - jnp.log(x)


def mesh_of(name: str) -> Mesh | None:
    """Return one of `MESHES`; "1" is one device, with no mesh."""
    axes = MESHES[name]
    return None if axes is None else gm.make_mesh(**axes)


def target_on(mesh: Mesh | None) -> gm.Posterior:
    """Return the model's target on a mesh, its rows over ``data``, its observations all zero."""
    counts = np.array([NUM_SEEN - i % 2 for i in range(NUM_GROUPS)])
    is_seen = (np.arange(NUM_SEEN)[None] < counts[:, None]).astype(np.float32)
    data = {"y": np.zeros((NUM_GROUPS, NUM_SEEN), np.float32), "is_seen": is_seen}
    placed = data if mesh is None else gm.place(data, mesh, P("data"))
    plate = gm.Plate(log_likelihood, placed, local=("effect", "noise"))
    positive = biject_to(constraints.positive)
    return gm.Posterior(log_prior, plate, bijections={"scale": positive, "noise": positive})


def chain_axis_of(mesh: Mesh | None) -> str | None:
    """Return the mesh axis that data sets and chains lie over, if there is one."""
    return "chains" if mesh is not None and "chains" in mesh.shape else None


def draw_position(rng_key: jax.Array) -> PyTree:
    """Draw from the prior: an unconstrained position of real rows."""
    keys = jax.random.split(rng_key, 4)
    mean, scale = jax.random.normal(keys[0]), SPREAD * jax.random.normal(keys[1])
    effect = mean + jnp.exp(scale) * jax.random.normal(keys[2], (NUM_GROUPS,))
    noise = SPREAD * jax.random.normal(keys[3], (NUM_GROUPS,))
    return {"mean": mean, "scale": scale, "effect": effect, "noise": noise}


def draw_observations(rng_key: jax.Array, target: gm.Posterior, position: PyTree) -> jax.Array:
    """Draw y given a position of real rows; the plate's pad rows are copies of the last."""
    rows = target.plates[0].rows
    normals = jax.random.normal(rng_key, (NUM_GROUPS, NUM_SEEN))
    y = position["effect"][:, None] + jnp.exp(position["noise"])[:, None] * normals
    return jnp.concatenate([y, jnp.repeat(y[-1:], rows.num_padded - rows.num_rows, axis=0)])


def with_observations(kernel: Any, y: jax.Array) -> Any:
    """Return the kernel on other observations: leaves of its target, mapped over or not."""
    (plate,) = kernel.target.plates
    plate = tree.replace(plate, data=plate.data | {"y": y})
    return tree.replace(kernel, target=tree.replace(kernel.target, plates=(plate,)))


def functionals(target: gm.Posterior, position: PyTree, y: jax.Array) -> dict[str, jax.Array]:
    """What is ranked, from a position of real rows; the target is the right one, whatever is sampled.

    Parameters that the data say little of show errors of the prior, the log likelihood those of the
    likelihood: a sampler that draws from the prior passes on every parameter, and fails there.
    """
    effect, noise, is_seen = position["effect"], position["noise"], target.plates[0].data["is_seen"]
    y, is_seen = y[:NUM_GROUPS], is_seen[:NUM_GROUPS]
    seen = jnp.sum(log_observations(effect, jnp.exp(noise), y, is_seen))
    of_groups = ((effect - position["mean"]) * jnp.exp(-position["scale"])) ** 2 / 2
    prior = -(position["mean"] ** 2) / 2 - jnp.sum(of_groups) - NUM_GROUPS * position["scale"]
    prior -= (position["scale"] ** 2 + jnp.sum(noise**2)) / (2 * SPREAD**2)
    return {
        "mean": position["mean"],
        "log scale": position["scale"],
        "first effect": effect[0],
        "last effect": effect[-1],
        "last log noise": noise[-1],
        "sum of effects": jnp.sum(effect),
        "sum of log noise": jnp.sum(noise),
        "last group as seen from above": _log_marginal(position, y[-1], is_seen[-1]),
        "log likelihood": seen,
        "log density": seen + prior,
    }


def _log_marginal(position, y, is_seen):
    """Log density of a group's average, of noise 1, given the rest: what counting it twice adds."""
    num = jnp.sum(is_seen)
    variance = jnp.exp(2 * position["scale"]) + 1 / num
    z2 = (jnp.sum(is_seen * y) / num - position["mean"]) ** 2 / variance
    return -0.5 * z2 - 0.5 * jnp.log(variance)


# Kernels, by name: settings that suit every data set of this model.

KERNELS: dict[str, Callable[[Any], Any]] = {
    "HMC": lambda target: gm.HMC(target, 0.25, 8),
    "NUTS": lambda target: gm.NUTS(target, 0.3, max_tree_depth=5),
    "JitteredHMC": lambda target: gm.JitteredHMC(target, 0.25, 2.0),
    "MAMS": lambda target: gm.MAMS(target, 0.8, 3.0),
}


# Ranks


@partial(jax.jit, static_argnames=("num_sets", "chain_axis"))
def draw_data_sets(target: Any, rng_key: jax.Array, num_sets: int, chain_axis: str | None):
    """Draw positions from the prior and observations from each; leaves [sets, ...]."""
    keys = jax.random.split(rng_key, (2, num_sets))
    positions = jax.vmap(draw_position, spmd_axis_name=chain_axis)(keys[0])
    draw = jax.vmap(draw_observations, (0, None, 0), spmd_axis_name=chain_axis)
    return positions, draw(keys[1], target, positions)


@partial(jax.jit, static_argnames=("num_draws", "chain_axis"))
def sample_all(
    kernel: Any,
    target: Any,
    rng_key: jax.Array,
    positions: PyTree,
    observations: jax.Array,
    return_at: jax.Array,  # [sets]
    thin: jax.Array,
    *,
    num_draws: int,
    chain_axis: str | None,
) -> tuple[dict, dict]:
    """Sample all data sets in one program.

    Returns
    -------
    of_truth, of_draws
        The `functionals`, [sets] and [draws, sets].
    """
    num_sets = len(return_at)

    def over_sets(function, *axes):
        return jax.vmap(function, axes, spmd_axis_name=chain_axis)

    def init(y, position):
        # Laid out by the right target: a wrong one may think that pad rows are real.
        return with_observations(kernel, y).init(local.lay_out(target, position))

    def measure(y, state):
        return functionals(target, local.cut(target, state.position), y)

    def step(i, states):
        shared_key, chains_key = jax.random.split(jax.random.fold_in(rng_key, i))
        drawn = kernel.with_jitter(shared_key, i)

        def one(rng_key, y, state):
            here = with_observations(drawn, y)
            return type(here).step(here, rng_key, state)[0]

        return over_sets(one, 0, 0, 0)(jax.random.split(chains_key, num_sets), observations, states)

    starts = over_sets(init, 0, 0)(observations, positions)

    def draw(states, i):
        states = over_sets(tree.where, 0, 0, 0)(i == return_at, starts, states)
        states = jax.lax.fori_loop(i * thin, (i + 1) * thin, step, states)
        return states, over_sets(measure, 0, 0)(observations, states)

    of_truth = over_sets(lambda y, x: functionals(target, x, y), 0, 0)(observations, positions)
    return of_truth, jax.lax.scan(draw, starts, jnp.arange(num_draws))[1]


def run(
    kernel: Any,
    target: gm.Posterior,
    rng_key: jax.Array,
    thin: int,
    num_sets: int = NUM_SETS,
    num_draws: int = NUM_DRAWS,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return `sample_all`'s functionals for data sets that depend on the key alone.

    ``kernel`` samples; ``target`` is the model it should sample, and makes the data.
    """
    chain_axis = chain_axis_of(target.plates[0].rows.mesh)
    data_key, place_key, chain_key = jax.random.split(rng_key, 3)
    positions, observations = draw_data_sets(target, data_key, num_sets, chain_axis)
    return_at = jax.random.randint(place_key, (num_sets,), 0, num_draws + 1)
    of_truth, of_draws = sample_all(
        kernel,
        target,
        chain_key,
        positions,
        observations,
        return_at,
        jnp.asarray(thin),
        num_draws=num_draws,
        chain_axis=chain_axis,
    )
    return jax.tree.map(np.asarray, of_truth), jax.tree.map(np.asarray, of_draws)


def ranks_of(truth: np.ndarray, draws: np.ndarray, seed: int = 0) -> np.ndarray:
    """Ranks [sets], 0 to the number of draws, of truths [sets] among draws [draws, sets].

    Draws that equal the truth, of a chain that has not moved, are put on either side of it at random.
    """
    below, equal = np.sum(draws < truth, axis=0), np.sum(draws == truth, axis=0)
    return below + np.random.default_rng(seed).integers(0, equal + 1)


# Tests of uniformity


def chi_square_p(ranks: np.ndarray, num_ranks: int, num_bins: int = NUM_BINS) -> float:
    """p-value of Pearson's chi-square of ranks 0 to ``num_ranks - 1`` in bins of as many ranks each."""
    if num_ranks % num_bins:
        raise ValueError(f"num_bins: expected a divisor of {num_ranks} ranks, got {num_bins}")
    counts = np.bincount(ranks * num_bins // num_ranks, minlength=num_bins)
    expected = len(ranks) / num_bins
    return float(chi2.sf(np.sum((counts - expected) ** 2) / expected, num_bins - 1))


def ecdf_p(ranks: np.ndarray, num_ranks: int) -> float:
    """p-value of the simultaneous band of the empirical distribution function of ranks.

    The statistic is the smallest two-sided binomial tail of the function's values at all ranks: the
    widest band of pointwise intervals of one level that it leaves. Its law is found exactly, by the
    recursion over ranks of Säilynoja, Bürkner and Vehtari: the probability of staying inside.
    """
    num = len(ranks)
    counts = np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1]
    tails, transitions = _binomial_law(num, num_ranks)
    # A sum of floats that should be equal may differ in its last digits.
    is_inside = tails > (1 + 1e-9) * tails[np.arange(num_ranks - 1), counts].min()
    inside = np.eye(1, num + 1)[0]
    for transition, allowed in zip(transitions, is_inside, strict=True):
        inside = (inside @ transition) * allowed
    return max(0.0, 1.0 - float(inside.sum()))


@lru_cache(maxsize=4)
def _binomial_law(num: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Law of how many of ``num`` uniform ranks fall below each point: its tails, and its steps.

    Returns
    -------
    tails
        Two-sided tail of a count at a point, [points, counts].
    transitions
        From a count at a point to one at the next, [points, counts, counts].
    """
    counts = np.arange(num + 1)
    at = np.arange(1, num_ranks)[:, None] / num_ranks
    tails = 2 * np.minimum(binom.cdf(counts[None], num, at), binom.sf(counts[None] - 1, num, at))
    # Of those at or above a point, ranks are uniform over the points that are left.
    more, left = counts[None] - counts[:, None], (num - counts)[:, None]
    shares = 1 / np.arange(num_ranks, 1, -1)[:, None, None]
    return tails, binom.pmf(more[None], left[None], shares)


def p_values(of_truth: dict, of_draws: dict) -> dict[str, tuple[float, float]]:
    """p-values of chi-square and of the band, for each functional."""
    num_ranks = len(next(iter(of_draws.values()))) + 1
    ranks = {name: ranks_of(of_truth[name], of_draws[name]) for name in of_truth}
    return {name: (chi_square_p(r, num_ranks), ecdf_p(r, num_ranks)) for name, r in ranks.items()}


# Records


def efficiency(of_draws: dict) -> float:
    """Effective draws for each draw, of the worst functional: the mean over data sets of each."""
    columns = {name: jnp.asarray(draws)[None] for name, draws in of_draws.items()}  # [1, draws, sets]
    sizes = ess_mean(columns)
    return min(float(np.mean(size)) / len(of_draws[name]) for name, size in sizes.items())


def thinning(kernel: Any, target: gm.Posterior, rng_key: jax.Array) -> int:
    """Steps between draws for them to be nearly independent, from a pilot run that keeps every step."""
    return max(1, math.ceil(1 / efficiency(run(kernel, target, rng_key, thin=1)[1])))


def least_p(of_truth: dict, of_draws: dict) -> float:
    """Smallest p-value of all functionals and both tests."""
    return min(min(both) for both in p_values(of_truth, of_draws).values())


def records(kernel_names: Iterable[str], quick: bool) -> list[dict[str, Any]]:
    """Calibrate kernels on every mesh, and put broken ones to the same tests on the last.

    Parameters
    ----------
    kernel_names
        Of `KERNELS`; others are left out.
    quick
        One mesh instead of all.
    """
    rows = []
    for name in (n for n in kernel_names if n in KERNELS):
        for mesh_name in list(MESHES)[-1:] if quick else MESHES:
            target = target_on(mesh_of(mesh_name))
            kernel = KERNELS[name](target)
            thin = thinning(kernel, target, jax.random.key(1))
            row = {"section": "sbc", "kernel": name, "mesh": mesh_name, "chains": NUM_SETS}
            rows += [row | judged for judged in _judge(kernel, target, thin)]
            if mesh_name == list(MESHES)[-1]:
                rows += [row | judged for judged in _judge_broken(kernel, target, thin)]
            jax.clear_caches()
    return rows


def _judge(kernel: Any, target: gm.Posterior, thin: int) -> list[dict[str, Any]]:
    result = run(kernel, target, jax.random.key(0), thin)
    p, worth = least_p(*result), efficiency(result[1])
    what = f"least p of {len(result[0])} functionals, chi-square and band; {thin} steps a draw"
    return [
        {"what": what, "value": p, "bound": LEAST_P, "passed": p > LEAST_P},
        {
            "what": "effective draws a draw, of the worst functional",
            "value": worth,
            "bound": LEAST_WORTH,
            "passed": worth > LEAST_WORTH,
        },
    ]


def _judge_broken(kernel: Any, target: gm.Posterior, thin: int) -> list[dict[str, Any]]:
    rows = []
    for name, breaks in BREAKS.items():
        p = least_p(*run(breaks(kernel), target, jax.random.key(0), thin))
        what = f"rejected: {name}, least p"
        rows.append({"what": what, "value": p, "bound": LEAST_P, "passed": p < LEAST_P})
    return rows
