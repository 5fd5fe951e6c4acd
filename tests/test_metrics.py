"""Metrics: momenta and velocities of one matrix; estimators that find it, on every mesh the same."""

from dataclasses import dataclass
from functools import cache, partial
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import NUM_ROWS, OTHER_KINDS, hierarchy, hierarchy_starts, mesh_of, normal
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import Dense, DenseBlock, Diagonal, LowRank, Rotated, communication, tree
from gspmd_mcmc.adaptation.estimators.estimator import AGREEMENT
from gspmd_mcmc.adaptation.estimators.low_rank import slot_of
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.metrics.dense_metric import DenseMetric
from gspmd_mcmc.kernels.metrics.low_rank_metric import LowRankMetric
from gspmd_mcmc.kernels.metrics.rotated_metric import RotatedMetric
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.run_state import advance_chains as advance
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.targets import local

# A position of eight numbers: a [3], b [2, 2], c []; its vector has the leaves in this order

SIZE = 8


def split(x):
    """Turn vectors [..., 8] into positions."""
    x = jnp.asarray(x)
    return {"a": x[..., :3], "b": x[..., 3:7].reshape(*x.shape[:-1], 2, 2), "c": x[..., 7]}


def join(position, batch=0):
    """Turn positions into vectors [..., 8]."""
    leaves = [np.asarray(position[name]) for name in "abc"]
    return np.concatenate([x.reshape(*x.shape[:batch], -1) for x in leaves], axis=-1)


def a_covariance(size, rng):
    root = rng.normal(size=(size, 2 * size))
    scales = np.exp(rng.normal(size=size))
    return scales[:, None] * (root @ root.T) * scales / (2 * size)


def an_orthogonal(size, rng):
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


@dataclass
class Case:
    """A metric, and its M⁻¹ as NumPy has it."""

    metric: Any
    inverse: np.ndarray


def dense_case():
    rng = np.random.default_rng(0)
    group, rest = [0, 1, 2, 7], [3, 4, 5, 6]  # a and c; b
    inverse = np.zeros((SIZE, SIZE))
    inverse[np.ix_(group, group)] = a_covariance(4, rng)
    inverse[rest, rest] = [0.5, 1.0, 2.0, 3.0]
    ones = split(np.diagonal(inverse))
    covariance = inverse[np.ix_(group, group)]
    return Case(DenseMetric.of_covariances(ones, {("c", "a"): covariance}), inverse)


def low_rank_case():
    rng = np.random.default_rng(1)
    variances, columns = np.exp(rng.normal(size=SIZE)), an_orthogonal(SIZE, rng)[:, :3]
    eigenvalues = np.array([20.0, 3.0, 0.2])
    middle = np.eye(SIZE) + (columns * (eigenvalues - 1)) @ columns.T
    root = np.sqrt(variances)
    metric = LowRankMetric(split(variances), split(columns.T), jnp.asarray(eigenvalues))
    return Case(metric, root[:, None] * middle * root)


def rotated_case():
    rng = np.random.default_rng(2)
    variances = np.exp(rng.normal(size=SIZE))
    left, right, of_a = an_orthogonal(2, rng), an_orthogonal(2, rng), an_orthogonal(3, rng)
    rotation = np.eye(SIZE)
    rotation[:3, :3], rotation[3:7, 3:7] = of_a, np.kron(left, right)
    rotations = {"b": (left, right), "a": (of_a,)}
    metric = RotatedMetric(split(variances), rotations)
    return Case(metric, (rotation * variances) @ rotation.T)


def diagonal_case():
    variances = np.exp(np.random.default_rng(3).normal(size=SIZE))
    return Case(split(variances), np.diag(variances))


CASES = {
    "diagonal": diagonal_case,
    "dense": dense_case,
    "low-rank": low_rank_case,
    "rotated": rotated_case,
}
every_metric = pytest.mark.parametrize("name", list(CASES))


@every_metric
def test_velocity_is_the_inverse_mass_matrix_times_the_momentum(name):
    with jax.enable_x64(True):
        case = CASES[name]()
        momenta = np.random.default_rng(4).normal(size=(2, SIZE))
        got = [join(metrics.velocity(case.metric, split(p))) for p in momenta]
        np.testing.assert_allclose(got, momenta @ case.inverse, rtol=1e-12, atol=1e-14)
        new, old = (split(p) for p in momenta)
        energies = 0.5 * np.einsum("ki,ij,kj->k", momenta, case.inverse, momenta)
        difference = metrics.kinetic_energy_difference(case.metric, new, old)
        np.testing.assert_allclose(difference, energies[0] - energies[1], rtol=1e-12)
        np.testing.assert_allclose(metrics.kinetic_energy(case.metric, new), energies[0], rtol=1e-12)


@pytest.mark.parametrize("position", [np.zeros(3, int), {"b": 0.0, "a": np.zeros((2, 1))}])
def test_a_covariance_of_the_whole_position_is_a_metric(position):
    covariance = a_covariance(3, np.random.default_rng(7))
    kernel = gm.HMC(gm.LogDensity(lambda x: jnp.zeros(())), 0.1, 1)
    metric = gm.DenseMetric.of_covariances(position, covariance)
    momentum = jax.tree.map(lambda x: jnp.ones(np.shape(x)), position)
    velocity = kernel.with_inverse_mass_matrix(metric).velocity(momentum)
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(velocity)])
    np.testing.assert_allclose(flat, covariance.sum(1), rtol=1e-5)
    with pytest.raises(ValueError, match=r"expected shape \(3, 3\), got \(2, 2\)"):
        gm.DenseMetric.of_covariances(position, covariance[:2, :2])


NUM_MOMENTA = 20_000


def covariance_errors(metric, inverse):
    """Of the momenta's covariance against M, each element in its standard error."""
    keys = jax.random.split(jax.random.key(seed(0)), NUM_MOMENTA)
    like = split(np.zeros(SIZE, np.float32))
    momenta = jax.vmap(metrics.sample_momentum, (0, None, None))(keys, metric, like)
    p, mass = join(momenta, 1).astype(np.float64), np.linalg.inv(inverse)
    standard_error = np.sqrt((np.outer(np.diag(mass), np.diag(mass)) + mass**2) / NUM_MOMENTA)
    return np.abs(p.T @ p / NUM_MOMENTA - mass) / standard_error


# Of the largest of as many standard normals: probability 1e-3 for all that are looked at here.
LARGEST = NormalDist().inv_cdf(1 - 1e-3 / 2 / (len(CASES) * SIZE * (SIZE + 1) / 2))


@pytest.mark.statistical
@every_metric
def test_momenta_have_the_covariance_of_the_mass_matrix(name):
    case = CASES[name]()
    within(covariance_errors(case.metric, case.inverse).max(), LARGEST, "standard errors off")


@pytest.mark.statistical
@every_metric
def test_momenta_of_another_metric_are_told_apart(name):
    case = CASES[name]()
    other = jax.tree.map(lambda x: 1.1 * x, case.inverse)
    with pytest.raises(AssertionError, match="standard errors"):
        within(covariance_errors(case.metric, other).max(), 2 * LARGEST, "standard errors off")


# Float32


def test_float32_is_right_for_covariances_of_condition_a_million():
    """Scales from 1e-3 to 1, correlations of condition 3e5, as the posterior of diamonds has."""
    rng = np.random.default_rng(5)
    size = 26
    axes = an_orthogonal(size, rng)
    covariance = (axes * np.logspace(-5.5, 0, size)) @ axes.T
    scales = np.logspace(-3, 0, size) / np.sqrt(np.diag(covariance))
    covariance = covariance * np.outer(scales, scales)
    assert np.linalg.cond(covariance) > 1e6
    metric = DenseMetric.of_covariances({"x": jnp.ones(size)}, {("x",): covariance})
    keys = jax.random.split(jax.random.key(0), 50)
    position = {"x": jnp.zeros(size)}
    p = jax.vmap(metric.sample_momentum, (0, None))(keys, position)["x"]
    z = jax.vmap(tree.normal_like, (0, None))(keys, position)["x"]
    v = jax.vmap(metric.velocity)({"x": p})["x"]
    z, p, v = (np.asarray(x, np.float64) for x in (z, p, v))
    lower = np.linalg.cholesky(covariance)
    # Both in the coordinates in which momenta are z ~ N(0, I) and the metric is the identity.
    whitened_p, whitened_v = p @ lower, np.linalg.solve(lower, v.T).T
    assert np.abs(whitened_p - z).max() < 2e-3
    assert np.abs(whitened_v - whitened_p).max() < 2e-3
    energies = [0.5 * np.sum(row * (covariance @ row)) for row in p]
    got = [metrics.kinetic_energy(metric, {"x": jnp.asarray(row, jnp.float32)}) for row in p]
    np.testing.assert_allclose(got, energies, rtol=1e-4)


# Estimators

CHAINS, STEPS = 4, 400
NUM_DRAWS = CHAINS * STEPS


@jax.jit
def learn(estimator, draws):
    """Metric from draws: a position with leaves [steps, chains, ...]."""
    first = jax.tree.map(lambda x: x[0], draws)
    moments, _ = jax.lax.scan(lambda m, x: (estimator.update(m, x), None), estimator.init(first), draws)
    return estimator.final(moments, first)


def draws_of(covariance, seed=6, steps=STEPS):
    """Independent normal draws [steps, chains, d], each chain's from the same distribution."""
    normals = np.random.default_rng(seed).normal(size=(steps, CHAINS, len(covariance)))
    return normals @ np.linalg.cholesky(covariance).T + 3.0


def inverse_of(metric, size=SIZE):
    """The matrix M⁻¹ of a metric, column by column."""
    columns = jax.vmap(partial(metrics.velocity, metric))(split(np.eye(size, dtype=np.float32)))
    return join(columns, 1).T


def relative_spread(inverse, covariance):
    """Ratio of the largest to the least scale that is left in units of the metric: 1 is best."""
    eigenvalues = np.linalg.eigvals(np.linalg.solve(inverse, covariance)).real
    return np.sqrt(eigenvalues.max() / eigenvalues.min())


def in_standard_errors(got, covariance, where):
    standard_error = np.sqrt(
        (np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / NUM_DRAWS
    )
    return (np.abs(got - covariance) / standard_error)[where].max()


BLOCKS = {"a": [0, 1, 2], "b": [3, 4, 5, 6], "c": [7]}


def coupled(*groups):
    """Where M⁻¹ may differ from 0."""
    where = np.eye(SIZE, dtype=bool)
    for group in groups:
        members = [i for name in group for i in BLOCKS[name]]
        where[np.ix_(members, members)] = True
    return where


@pytest.mark.parametrize(
    ("estimator", "where"),
    [
        (Diagonal(), coupled()),
        (Dense(), coupled("abc")),
        (DenseBlock("a", "c"), coupled("ac")),
        (DenseBlock(("a", "c"), ("b",)), coupled("ac", "b")),
    ],
)
def test_estimators_find_the_covariance(estimator, where):
    covariance = a_covariance(SIZE, np.random.default_rng(7))
    draws = split(draws_of(covariance).astype(np.float32))
    got = inverse_of(learn(estimator, draws))
    # 5 / (1600 + 5) of the whole is the regularisation, far below the errors of 1,600 draws.
    assert in_standard_errors(got, covariance, where) < NormalDist().inv_cdf(1 - 1e-3 / SIZE**2)
    assert np.all(got[~where] == 0)
    assert in_standard_errors(got, 1.3 * covariance, where) > 5


@pytest.mark.parametrize(("apart", "counts"), [(0.3, 1), (30.0, 0)])
def test_means_of_chains_count_where_chains_agree(apart, counts):
    """The variance of their means is added to that within them, but for chains far from each other."""
    noise = np.random.default_rng(19).normal(size=(40, CHAINS, 2))
    noise = (noise - noise.mean(axis=0)) / noise.std(axis=0, ddof=1)
    means = apart * np.array([-1, -1, 1, 1.0])
    got = learn(Diagonal(), jnp.asarray(noise + means[:, None], jnp.float32))
    keep = 40 * CHAINS / (40 * CHAINS + 5)
    expected = keep * (1 + counts * means.var(ddof=1)) + (1 - keep) * 1e-3
    np.testing.assert_allclose(got, np.full(2, expected), rtol=1e-4)


def test_rotated_variances_are_those_along_the_rotation():
    case = rotated_case()
    draws = split(draws_of(case.inverse).astype(np.float32))
    estimator = Rotated({"b": case.metric.rotations["b"], "a": case.metric.rotations["a"]})
    got = inverse_of(learn(estimator, draws))
    errors = in_standard_errors(got, case.inverse, np.ones_like(got, bool))
    assert errors < NormalDist().inv_cdf(1 - 1e-3 / SIZE**2)
    assert relative_spread(got, case.inverse) < 1.2
    assert relative_spread(inverse_of(learn(Diagonal(), draws)), case.inverse) > 2


def with_factors(size, scales, seed):
    """One strong factor and one of two elements, at given scales."""
    rng = np.random.default_rng(seed)
    loadings = np.stack([3 * rng.normal(size=size), np.zeros(size)])
    loadings[1, :2] = [2.0, -2.0]
    return (np.diag(rng.uniform(0.3, 1, size)) + loadings.T @ loadings) * np.outer(scales, scales)


def test_low_rank_finds_factors():
    covariance = with_factors(SIZE, np.ones(SIZE), 8)
    draws = split(draws_of(covariance).astype(np.float32))
    metric = learn(LowRank(rank=3), draws)
    vectors = join(metric.vectors, 1)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(3), atol=1e-5)
    assert relative_spread(inverse_of(metric), covariance) < 1.5
    assert relative_spread(inverse_of(learn(Diagonal(), draws)), covariance) > 8


def test_low_rank_takes_noise_for_no_direction():
    """A thousand independent elements and 256 draws: sample eigenvalues reach 9, and mean nothing."""
    draws = {"x": jnp.asarray(draws_of(np.eye(1000), steps=64), jnp.float32)}
    metric = learn(LowRank(rank=3), draws)
    sample = np.asarray(draws["x"]).reshape(-1, 1000)
    assert np.linalg.norm(sample - sample.mean(0), 2) ** 2 / len(sample) > 8
    np.testing.assert_array_equal(metric.eigenvalues, 1)


@pytest.mark.parametrize("estimator", [Dense(), LowRank(rank=3)])
def test_no_scale_is_swamped_by_the_regularisation(estimator):
    """The same correlations at scales of 1 and of 1e-4 give the same metric in units of the scale."""
    scales = np.logspace(-4, 0, SIZE)
    covariance = with_factors(SIZE, scales, 8)
    draws = split(draws_of(covariance).astype(np.float32) - np.float32(3.0))
    spread = relative_spread(
        inverse_of(learn(estimator, draws)) / np.outer(scales, scales),
        covariance / np.outer(scales, scales),
    )
    assert spread < 1.5


@pytest.mark.parametrize("estimator", [Dense(), LowRank(rank=2), Rotated({"a": (np.eye(3),)})])
def test_a_chain_that_is_stuck_far_away_stretches_no_direction(estimator):
    x = draws_of(np.eye(SIZE)).astype(np.float32)
    x[:, 3] = 1000
    spread = relative_spread(inverse_of(learn(estimator, split(x))), np.eye(SIZE))
    assert spread < 1.3


def test_chains_that_agree_in_some_elements_only_stretch_nothing_that_is_stiff():
    axes = an_orthogonal(SIZE, np.random.default_rng(4))
    covariance = (axes * np.logspace(-5, 0, SIZE)) @ axes.T
    x, slow = draws_of(covariance), axes[:, -1]
    shifts = np.linspace(-1, 1, CHAINS)
    x = x + 1.2 * shifts[None, :, None] * slow
    within, between = x.var(axis=0).mean(axis=0), x.mean(axis=0).var(axis=0, ddof=1)
    do_agree = within + between < AGREEMENT**2 * within
    assert do_agree.any() and not do_agree.all()
    inverse = inverse_of(learn(Dense(), split((x - 3.0).astype(np.float32))))
    assert np.linalg.eigvals(np.linalg.solve(inverse, covariance)).real.min() > 0.5


@jax.jit
def before_any_draw(estimator, positions):
    return estimator.identity(positions), estimator.final(estimator.init(positions), positions)


@pytest.mark.parametrize("estimator", [Diagonal(), Dense(), DenseBlock("a"), LowRank(3), Rotated({})])
def test_the_first_metric_is_the_identity_and_compiles_nothing_anew(estimator):
    positions = split(draws_of(np.eye(SIZE))[0].astype(np.float32))
    identity, nothing = before_any_draw(estimator, positions)
    np.testing.assert_array_equal(inverse_of(identity), np.eye(SIZE))
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), m) for m in (identity, nothing)]
    assert jax.tree.structure(identity) == jax.tree.structure(nothing)
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(nothing))


@pytest.mark.parametrize("num_draws", [5, 8, 16, 21, 64, 1000])
def test_kept_draws_are_spread_over_all_so_far(num_draws):
    """The newest write to each place stays; gaps between kept draws differ by two at most."""
    slots = np.asarray(jax.vmap(lambda i: slot_of(i, 8))(jnp.arange(num_draws)))
    kept = np.sort(list({slot: i for i, slot in enumerate(slots)}.values()))
    assert len(kept) == min(num_draws, 8) and kept[-1] == num_draws - 1
    gaps = np.diff(kept)
    assert gaps.max() <= 2 * max(1, 2 * num_draws // 8) and kept[0] <= 2 * num_draws // 8


# On a mesh: local latents of 11 rows, shared ones, and metrics learned while chains move

RANK, LEAPFROGS = 3, 5


def estimators():
    rotation = an_orthogonal(2, np.random.default_rng(11))
    return {
        "diagonal": Diagonal(),
        "dense": DenseBlock("mean", "log_sd"),
        "low-rank": LowRank(RANK, num_kept=16),
        "rotated": Rotated({"effect": (None, rotation)}),
    }


MESH, NUM_PADDED = "2x4", 12


def chains_on(name):
    target, starts = hierarchy(name), hierarchy_starts()
    layout = read_layout(mesh_of(name), target, starts, CHAINS, has_chains=True)
    kernel = gm.HMC(target, 0.15, LEAPFROGS)
    return layout, kernel, init_chains(kernel, starts, layout=layout)


def learn_on(layout, estimators, kernel, states):
    """Learn all metrics over 50 steps, as a driver does; then move by the low-rank one."""
    positions = states.position

    def pinned(x, role=tree.Role()):  # noqa: B008
        return layout.pin(x, tree.roles(x, layout.treedef, role))

    moments = {n: pinned(e.init(positions)) for n, e in estimators.items()}

    def one(i, carry):
        states, moments = carry
        states, _ = advance(kernel, jax.random.key(0), i, states, layout)
        moments = {n: e.update(moments[n], states.position) for n, e in estimators.items()}
        return states, pinned(moments)

    with jax.named_scope("steps"):
        states, moments = jax.lax.fori_loop(0, 50, one, (states, moments))
    found = {n: e.final(moments[n], states.position) for n, e in estimators.items()}
    found = pinned(found, tree.Role(is_like_position=True))
    own = kernel.with_inverse_mass_matrix(found["low-rank"])
    with jax.named_scope("moves"):
        moved, _ = advance(own, jax.random.key(1), jnp.int32(0), states, layout)
    return found, layout.pin_positions(moved.position)


@cache
def learned_on(name) -> tuple[Any, Any, Any]:
    """Metrics, positions [chains, ...] that they led to, in float64; and the program."""
    with jax.enable_x64(True):
        layout, kernel, states = chains_on(name)
        program = jax.jit(partial(learn_on, layout))
        program = program.lower(estimators(), kernel, states).compile()
        return *program(estimators(), kernel, states), program


def cut(position, batch=0):
    rows = (slice(None),) * batch + (slice(NUM_ROWS),)
    return position | {"effect": np.asarray(position["effect"])[rows]}


def operator(metric, num_rows=NUM_PADDED):
    """What the metric does to a few momenta, whatever the signs of its vectors; without the pad."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(13)
        momentum = {"mean": rng.normal(), "log_sd": rng.normal(), "effect": rng.normal(size=(11, 2))}
        momentum["effect"] = np.pad(momentum["effect"], ((0, num_rows - NUM_ROWS), (0, 0)))
        momentum = jax.tree.map(jnp.asarray, momentum)
        return jax.tree.map(np.asarray, metrics.velocity(local.arrays(metric), momentum))


def test_metrics_and_moves_are_the_same_on_every_mesh():
    (expected, expected_moved, _), (got, moved, _) = learned_on("1"), learned_on(MESH)
    same = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    for kind, metric in got.items():
        jax.tree.map(same, cut(operator(metric)), operator(expected[kind], NUM_ROWS))
    jax.tree.map(same, cut(local.arrays(moved), 1), expected_moved)
    assert np.asarray(expected["low-rank"].eigenvalues)[0] > 1.5, (
        "a low-rank metric of no rank tests nothing"
    )


def test_metrics_lie_as_positions_do():
    found = local.arrays(learned_on(MESH)[0])
    assert found["low-rank"].vectors["effect"].sharding.spec == P(None, "data")
    for kind in ("low-rank", "rotated"):
        assert found[kind].variances["effect"].sharding.spec[:1] == ("data",)


def test_the_pad_of_local_latents_has_no_part_in_any_metric():
    found, moved = local.arrays(learned_on(MESH)[:2])
    np.testing.assert_array_equal(found["low-rank"].vectors["effect"][:, NUM_ROWS:], 0)
    with jax.enable_x64(True):
        start = chains_on(MESH)[2].position["effect"].values
    moved, start = np.asarray(moved["effect"]), np.asarray(start)
    np.testing.assert_array_equal(moved[:, NUM_ROWS:], start[:, NUM_ROWS:])
    assert moved.shape[1] == NUM_PADDED and np.all(moved[:, :NUM_ROWS] != start[:, :NUM_ROWS])
    for metric in found.values():
        assert np.all(operator(metric)["effect"][NUM_ROWS:] == 0)


def test_nothing_is_gathered_and_moments_send_nothing():
    found = communication(learned_on(MESH)[2])
    assert [kind for kind in OTHER_KINDS if found.count(kind)] == []
    of_a_step = [c for c in found.collectives if [loop.name for loop in c.loops] == ["steps"]]
    assert [c.axes for c in of_a_step] == [("data",)], "the kernel's own, of its energies"


@pytest.mark.parametrize(
    ("kind", "num_bytes"), [("dense", []), ("rotated", []), ("low-rank", [RANK * 4])]
)
def test_a_leapfrog_sends_the_shared_gradient_and_a_number_for_each_direction(kind, num_bytes):
    """Of one chain, in one all-reduce."""
    _, kernel, states = chains_on(MESH)
    metric = jax.tree.map(jnp.float32, learned_on(MESH)[0][kind])
    kernel, state = kernel.with_inverse_mass_matrix(metric), jax.tree.map(lambda x: x[0], states)
    found = communication(jax.jit(type(kernel).step), kernel, jax.random.key(0), state)
    assert [k for k in OTHER_KINDS if found.count(k)] == []
    assert [c.num_bytes for c in found.collectives if c.loops] == [2 * 4 + sum(num_bytes)]


# What does not fit is refused

ONES = {"w": jnp.ones((3, 2)), "b": jnp.ones(3)}


def on_plain(metric):
    return gm.HMC(gm.LogDensity(normal), 0.1, 1, metric).init(ONES)


def on_hierarchy(metric) -> Any:
    kernel = gm.HMC(hierarchy("8"), 0.1, 1, metric)
    return kernel.inverse_mass_matrix


def of_hierarchy(value=1.0):
    return {"mean": value, "log_sd": value, "effect": jnp.full((NUM_ROWS, 2), value)}


BAD = {
    "leaf": (lambda: on_plain(DenseMetric(ONES, (jnp.eye(3),), ("c",))), "no leaf 'c'; it has"),
    "leaf of Dense": (lambda: DenseBlock("c").init(ONES), "DenseBlock: the position has no leaf 'c'"),
    "factor": (lambda: on_plain(DenseMetric(ONES, (jnp.eye(2),), ("b",))), r"expected shape \(3, 3\)"),
    "factors": (lambda: DenseMetric(ONES, (), ("b",)), "1 groups, but 0 factors"),
    "twice": (lambda: DenseBlock(("w", "b"), ("b",)), "'b' is in more than one group"),
    "covariance": (lambda: DenseMetric.of_covariances(ONES, {("b",): np.ones((3, 3))}), "not positive"),
    "asymmetric": (
        lambda: DenseMetric.of_covariances(ONES, {("b",): np.triu(np.ones((3, 3)))}),
        "expected it symmetric",
    ),
    "variances": (lambda: on_plain(DenseMetric({"w": -ONES["w"], "b": ONES["b"]}, (), ())), "positive"),
    "axes": (lambda: on_plain(RotatedMetric(ONES, {"b": (None, None)})), r"'b' has shape \(3,\)"),
    "angle": (lambda: RotatedMetric(ONES, {"b": (2 * np.eye(3),)}), "expected an orthogonal matrix"),
    "rotation of Rotated": (lambda: Rotated({"b": (np.eye(2),)}).init(ONES), "has shape"),
    "vectors": (lambda: on_plain(LowRankMetric(ONES, ONES, jnp.ones(2))), "vectors of shapes"),
    "eigenvalues": (
        lambda: on_plain(LowRankMetric(ONES, jax.tree.map(lambda x: x[None], ONES), jnp.zeros(1))),
        "positive eigenvalues",
    ),
    "rank": (lambda: LowRank(0), "rank: expected an integer of at least 1, got 0"),
    "num_kept": (lambda: LowRank(2, num_kept=24), "expected a power of two"),
    "local": (
        lambda: on_hierarchy(DenseMetric(of_hierarchy(), (jnp.eye(22),), ("effect",))),
        "dense over 'effect', which is local to a plate of 11 rows",
    ),
    "local rotation": (
        lambda: on_hierarchy(RotatedMetric(of_hierarchy(), {"effect": (np.eye(11), None)})),
        "rotates the first axis of 'effect', which is local",
    ),
    "rows": (
        lambda: on_hierarchy(
            LowRankMetric(of_hierarchy() | {"effect": jnp.ones((4, 2))}, {}, jnp.ones(1))
        ),
        "vectors of shapes",
    ),
}


@pytest.mark.parametrize("case", list(BAD))
def test_what_does_not_fit_is_refused(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_dense_metric_over_a_leaf_that_lies_in_parts_is_refused():
    laid = gm.place({"w": np.ones((8, 2))}, mesh_of("8"), P("data"))
    with pytest.raises(ValueError, match="dense over 'w', which is sharded as"):
        gm.HMC(gm.LogDensity(normal), 0.1, 1, DenseMetric(laid, (jnp.eye(16),), ("w",)))


def test_a_low_rank_metric_of_real_rows_is_padded_with_nothing():
    """A user's own: vectors have the real rows; the pad takes no part."""
    vectors = {
        "mean": jnp.zeros(1),
        "log_sd": jnp.zeros(1),
        "effect": jnp.full((1, NUM_ROWS, 2), 22**-0.5),
    }
    laid = on_hierarchy(LowRankMetric(of_hierarchy(), vectors, jnp.full(1, 4.0)))
    effect = laid.vectors["effect"].values
    assert effect.shape == (1, 16, 2) and np.all(effect[:, NUM_ROWS:] == 0)
    assert effect.sharding.spec == P(None, "data")


def test_a_metric_of_shapes_is_laid_out_for_a_plan():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.float32), of_hierarchy())
    vectors = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), shapes)
    eigenvalues: Any = jax.ShapeDtypeStruct((2,), np.float32)
    laid = on_hierarchy(LowRankMetric(shapes, vectors, eigenvalues)).vectors["effect"].values
    assert laid.shape == (2, 16, 2) and laid.sharding.spec[:2] == (None, "data")
    factor: Any = jax.ShapeDtypeStruct((2, 2), np.float32)
    dense = on_hierarchy(DenseMetric(shapes, (factor,), (("mean", "log_sd"),)))
    assert dense.inverses == (factor,)
