"""Products on chips that round their factors: metrics and log densities' terms ask for more."""

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from models import mesh_of
from scipy import stats

import gspmd_mcmc as gm
from benchmarks.emulation import Emulated, emulated
from gspmd_mcmc import LowRank, Rotated, tree
from gspmd_mcmc.adaptation.hmc_burn_in import BurnInHMC
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.metrics.dense_metric import DenseMetric
from gspmd_mcmc.kernels.metrics.low_rank_metric import LowRankMetric
from gspmd_mcmc.kernels.metrics.rotated_metric import RotatedMetric
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.identity import facts_of_run, require_same
from gspmd_mcmc.sampling.run import Plan
from gspmd_mcmc.targets import likelihoods
from gspmd_mcmc.tree import pytree

DEFAULT, HIGH, HIGHEST = jax.lax.Precision
SIZE, NUM_CHAINS, NUM_STEPS = 8, 24_000, 5


def inner(eqn):
    """Return the programs that an equation runs."""
    found = jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
    return [getattr(x, "jaxpr", x) for x in found if hasattr(x, "eqns") or hasattr(x, "jaxpr")]


def products(jaxpr):
    """Yield all products of a program, those in its loops and calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for program in inner(eqn):
            yield from products(program)


def is_exact(eqn):
    return eqn.params["precision"] in (HIGHEST, (HIGHEST, HIGHEST))


# Two factors, and little besides: what rounding adds to them is as large as that. Their axes are given:
# an eigensolver has others, where eigenvalues are equal, on each make of processor.

AXES = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]
EIGENVALUES = np.where(np.arange(SIZE) < SIZE - 2, 0.003**2, SIZE / 2)
COVARIANCE = AXES * EIGENVALUES @ AXES.T


def dense():
    return DenseMetric.of_covariances({"x": jnp.ones(SIZE)}, {("x",): COVARIANCE})


def low_rank():
    vectors, eigenvalues = jnp.asarray(AXES.T, jnp.float32), jnp.asarray(EIGENVALUES, jnp.float32)
    return LowRankMetric({"x": jnp.ones(SIZE)}, {"x": vectors}, eigenvalues)


def rotated():
    variances = {"x": jnp.asarray(EIGENVALUES, jnp.float32)}
    return RotatedMetric(variances, {"x": (jnp.asarray(AXES, jnp.float32),)})


METRICS = {"dense": dense, "low-rank": low_rank, "rotated": rotated}
ESTIMATORS = {
    "dense": gm.Dense(),
    "low-rank": LowRank(2, 8),
    "rotated": Rotated({"x": (jnp.asarray(AXES, jnp.float32),)}),
}
every_metric = pytest.mark.parametrize("name", list(METRICS))


@every_metric
def test_every_product_asks_for_full_precision(name):
    position, metric = {"x": jnp.zeros(SIZE)}, METRICS[name]()
    positions, estimator = {"x": jnp.zeros((4, SIZE))}, ESTIMATORS[name]

    def learn(positions):
        return estimator.final(estimator.update(estimator.init(positions), positions), positions)

    draw = partial(metrics.sample_momentum, jax.random.key(0), metric)
    programs = {
        "velocity": jax.make_jaxpr(metric.velocity)(position),
        "momentum": jax.make_jaxpr(draw)(position),
        "estimate": jax.make_jaxpr(learn)(positions),
    }
    found = {what: list(products(program.jaxpr)) for what, program in programs.items()}
    assert found["velocity"] and found["momentum"] and found["estimate"]
    assert [eqn for eqns in found.values() for eqn in eqns if not is_exact(eqn)] == []


# Metrics on a chip: factors of products are rounded to bfloat16, unless they ask for more


@pytree
@dataclass(frozen=True, eq=False)
class OnChip(metrics.Metric):
    """A metric whose own products are a chip's."""

    metric: Any
    hears: Any

    def velocity(self, momentum):
        return self._products(lambda m, p: m.velocity(p), momentum)

    def sample_momentum(self, rng_key, position):
        return self._products(lambda m, k, x: m.sample_momentum(k, x), rng_key, position)

    def _products(self, function, *args):
        exact, rounded = (
            emulated(function, "tpu", f)(self.metric, *args) for f in ("float32", "bfloat16")
        )
        return jax.tree.map(partial(jnp.where, self.hears), exact, rounded)


def gaussian(x, precision):
    return -0.5 * x["x"] * jnp.matmul(precision, x["x"], precision=HIGHEST)


@jax.jit
def few_steps(kernel, keys, positions):
    def chain(key, position):
        def one(state, i):
            return kernel.step(jax.random.fold_in(key, i), state)[0], None

        return jax.lax.scan(one, kernel.init(position), jnp.arange(NUM_STEPS))[0].position

    return jax.vmap(chain)(keys, positions)["x"]


def worst_share(metric):
    """Of draws within one standard deviation along an axis, after steps from the distribution.

    In standard errors. Of a variance they are too large where single chains are thrown far off.
    """
    starts = np.random.default_rng(1).normal(size=(NUM_CHAINS, SIZE)) @ (AXES * np.sqrt(EIGENVALUES)).T
    target = gm.LogDensity(gaussian, jnp.asarray(np.linalg.inv(COVARIANCE), jnp.float32))
    kernel = gm.HMC(target, 0.4, 4, metric)
    keys = jax.random.split(jax.random.key(0), NUM_CHAINS)
    x = np.asarray(few_steps(kernel, keys, {"x": jnp.asarray(starts, jnp.float32)}), np.float64)
    assert np.mean(np.all(x != starts.astype(np.float32), axis=1)) > 0.7
    share, expected = np.mean((x @ AXES) ** 2 < EIGENVALUES, axis=0), stats.chi2.cdf(1, 1)
    return np.abs(share - expected).max() / np.sqrt(expected * (1 - expected) / NUM_CHAINS)


@every_metric
def test_a_chip_that_rounds_products_keeps_the_distribution(name):
    """Its draws are as wide as they should be; where it does not hear what we ask they are not."""
    heard, unheard = (worst_share(OnChip(METRICS[name](), jnp.asarray(h))) for h in (True, False))
    assert heard < 4
    assert unheard > 8


def test_a_small_move_of_a_factor_models_bias_is_kept_on_a_chip():
    """bfloat16 has nothing between -2.5 and a 64th more: as a factor, a bias would not have moved."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = (jax.random.normal(key, (n, 4)) for key, n in zip(keys, (50, 30), strict=True))
    x, w = (jnp.concatenate([factor, jnp.ones_like(factor[:, :1])], axis=1) for factor in (x, w))
    before, after = (w.at[:, 4].set(bias) for bias in (-2.5, -2.496))
    apart = emulated(partial(likelihoods._product_with_exact_biases, 4), "tpu")
    whole = emulated(lambda x, w: x @ w.T, "tpu")
    np.testing.assert_allclose(apart(x, after) - apart(x, before), 0.004, atol=1e-6)
    np.testing.assert_array_equal(whole(x, after), whole(x, before))


def test_a_function_without_products_is_not_emulated():
    """What hides them, as a kernel does, would be taken for exact."""
    with pytest.raises(ValueError, match="tpu: the function has no matrix product"):
        emulated(jnp.sin, "tpu")(jnp.ones(3))


@pytest.mark.parametrize("name", ["1", "8"])
def test_an_emulated_chip_rounds_products_on_any_mesh(name):
    """Rows over a mesh are in a program of each device, within that of all."""
    x = np.asarray(jax.random.normal(jax.random.key(0), (64, 4)))
    rows = gm.place(x, mesh_of(name), P("data"))
    target = gm.Posterior(lambda w: -0.5 * w**2, gm.Plate(lambda w, x: (x @ w) ** 2, rows))
    w = jax.random.normal(jax.random.key(1), (4,))
    as_stored, as_rounded = (
        np.sum(np.asarray(terms(w)["plates"][0], np.float64))
        for terms in (target.terms, emulated(target.terms, "tpu"))
    )
    rounded = (np.asarray(v.astype(jnp.bfloat16), np.float64) for v in (x, w))
    np.testing.assert_allclose(
        as_stored, np.sum((x.astype(np.float64) @ np.asarray(w)) ** 2), rtol=1e-5
    )
    np.testing.assert_allclose(as_rounded, np.sum(np.matmul(*rounded) ** 2), rtol=1e-5)
    assert abs(as_rounded - as_stored) > 1e-4 * abs(as_stored)


# Kernels: terms in full precision, gradients in one of the device's

DIMENSION, ROWS, NUM_DRAWS, NOISE = 4, 30, 4000, 0.27
DESIGN = np.random.default_rng(2).normal(size=(ROWS, DIMENSION)).astype(np.float32)
DESIGN[:, 0] = 1.003  # bfloat16 has nothing between 1 and 1.0078, and takes this column for ones
ANSWER = (DESIGN @ np.full(DIMENSION, 3.0) + np.random.default_rng(3).normal(size=ROWS)).astype(
    np.float32
)
KERNELS = {
    "HMC": partial(gm.HMC, step_size=0.02, num_integration_steps=5),
    "JitteredHMC": partial(gm.JitteredHMC, step_size=0.02, trajectory_length=0.1),
    "NUTS": partial(gm.NUTS, step_size=0.02, max_tree_depth=5),
    "MAMS": partial(gm.MAMS, step_size=0.04, trajectory_length=0.16),
}
every_kernel = pytest.mark.parametrize("name", list(KERNELS))


def residuals(x, design, answer):
    return -0.5 * ((design @ x - answer) / NOISE) ** 2


def regression_rows(x, rows):
    return residuals(x, rows["design"], rows["answer"])


def flat(x):
    return jnp.zeros(())


def regression(platform, mesh=None):
    """Rows of a regression, as if they were on a platform: this one computes in full precision."""
    rows = {"design": DESIGN, "answer": ANSWER}
    plate = gm.Plate(regression_rows, rows if mesh is None else gm.place(rows, mesh, P("data")))
    plate = tree.replace(plate, rows=replace(plate.rows, platform=platform))
    return gm.Posterior(flat, plate)


@partial(jax.jit, static_argnames="num_steps")
def run(kernel, positions, num_steps):
    """Take steps of chains that are independent of each other; also return the acceptance rate."""

    def chain(key, position):
        def one(state, i):
            state, info = kernel.step(jax.random.fold_in(key, i), state)
            return state, info.acceptance_rate

        state, rates = jax.lax.scan(one, kernel.init(position), jnp.arange(num_steps))
        return state.position, jnp.mean(rates)

    return jax.vmap(chain)(jax.random.split(jax.random.key(0), len(positions)), positions)


def worst_moment(kernel):
    """Of means and variances after steps from the posterior, in standard errors."""
    precision = DESIGN.T.astype(np.float64) @ DESIGN / NOISE**2
    mean = np.linalg.solve(precision, DESIGN.T.astype(np.float64) @ ANSWER / NOISE**2)
    rng = np.random.default_rng(4)
    starts = rng.multivariate_normal(mean, np.linalg.inv(precision), NUM_DRAWS)
    x, rates = run(kernel, jnp.asarray(starts, jnp.float32), 10)
    assert np.mean(rates) > 0.5
    squares = (np.asarray(x, np.float64) - mean) ** 2 / np.diag(np.linalg.inv(precision))
    z = (np.asarray(x, np.float64) - mean) / np.sqrt(np.diag(np.linalg.inv(precision)))
    errors = np.mean(z, axis=0), (np.mean(squares, axis=0) - 1) / np.sqrt(2)
    return np.abs(errors).max() * np.sqrt(NUM_DRAWS)


@pytest.mark.parametrize(
    ("name", "full", "low", "high"),
    [(name, "float32", 0, 4) for name in ("HMC", "NUTS", "MAMS")] + [("HMC", "bfloat16", 8, np.inf)],
)
def test_bfloat16_gradients_leave_moments_right_and_a_bfloat16_test_does_not(name, full, low, high):
    target = Emulated(gm.LogDensity(residuals, DESIGN, ANSWER), "tpu", full)
    kernel = KERNELS[name](target, gradient_precision="bfloat16")
    assert low <= worst_moment(kernel) < high


@every_kernel
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_all_gradients_of_a_step_have_one_precision_and_terms_have_float32s(name, platform):
    """The first of a trajectory, which `init` or the step before took, and the last one too."""
    given = "bfloat16_3x" if platform == "tpu" else None
    kernel = KERNELS[name](regression(platform), gradient_precision=given)
    position = jnp.zeros(DIMENSION)
    state = jax.eval_shape(kernel.init, position)
    for method, args in (("init", (position,)), ("step", (jax.random.key(0), state))):
        program = jax.make_jaxpr(getattr(type(kernel), method))(kernel, *args)
        found = Counter(
            eqn.params["precision"][0]
            for eqn in products(program.jaxpr)
            if any(ROWS in v.aval.shape for v in eqn.invars)
        )
        num_gradients = 1 if method == "init" or name == "NUTS" else 2  # one in a loop
        of_gradients = HIGH if platform == "tpu" else HIGHEST
        # A gradient is two products. Terms alone are another one; those of a gradient come with it.
        expected = Counter({of_gradients: 2 * num_gradients})
        assert found == expected + Counter({HIGHEST: platform == "tpu"})


@pytest.mark.parametrize(("name", "meshes"), [("HMC", ("1", "8")), ("NUTS", ("8",))])
def test_with_terms_apart_a_leapfrog_has_one_all_reduce_and_chains_are_as_on_one_device(name, meshes):
    ends, starts = [], 3 + 0.05 * np.random.default_rng(5).normal(size=(2, DIMENSION))
    with jax.enable_x64(True):
        for mesh in meshes:
            kernel = KERNELS[name](regression("tpu", mesh_of(mesh)), gradient_precision="bfloat16")
            program = run.lower(kernel, starts, 5).compile()
            ends.append([np.asarray(x) for x in program(kernel, starts)])
    assert np.mean(ends[0][1]) > 0.5
    np.testing.assert_allclose(ends[-1][0], ends[0][0], rtol=1e-9)
    assert gm.communication(program).runs("all-reduce", within="leapfrog") == 1


def test_the_precision_of_gradients_is_the_devices_unless_one_asks_for_more():
    defaults = {
        platform: [make(regression(platform)).gradient_precision for make in KERNELS.values()]
        for platform in ("cpu", "gpu", "tpu", "abstract")
    }
    full = ["float32"] * len(KERNELS)
    # NUTS needs the terms at each leapfrog.
    of_device = [
        ["float32" if k == "NUTS" else p for k in KERNELS] for p in ("tensorfloat32", "bfloat16_3x")
    ]
    assert defaults == {"cpu": full, "gpu": of_device[0], "tpu": of_device[1], "abstract": full}
    make = KERNELS["HMC"]
    with jax.default_matmul_precision("highest"):
        assert make(regression("tpu")).gradient_precision == "float32"
    with jax.enable_x64(True):
        assert make(regression("gpu")).gradient_precision == "float32"
    assert gm.MCLMC(regression("tpu"), 0.1, 1.0).gradient_precision == "float32"


@every_kernel
@pytest.mark.parametrize(
    ("platform", "given", "message"),
    [
        ("cpu", "float16", "gradient_precision: expected one of float32, .*, got 'float16'"),
        (
            "cpu",
            "tensorfloat32",
            "is on a cpu, which has no tensorfloat32 products; expected one of float32, or",
        ),
        (
            "gpu",
            "bfloat16",
            "is on a gpu, which has no bfloat16 .* expected one of tensorfloat32, float32",
        ),
        (
            "tpu",
            "tensorfloat32",
            "is on a tpu, which has no tensorfloat32 .* expected one of bfloat16_3x, bfloat16, ",
        ),
    ],
)
def test_a_precision_that_is_unknown_or_not_the_devices_is_refused(name, platform, given, message):
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        KERNELS[name](regression(platform), gradient_precision=given)


@every_kernel
def test_kernels_that_stand_for_another_have_its_precision(name):
    """Else the first gradient of their trajectories, which is the state's, would be of another one."""
    kernel = KERNELS[name](regression("tpu"), gradient_precision="bfloat16")
    burn_in = BurnInHMC.of(kernel)
    stand_ins: Any = (
        kernel.with_jitter(jax.random.key(0), jnp.int32(0)),
        kernel.one_leapfrog(),
        burn_in.with_jitter(jax.random.key(0), jnp.int32(0)).hmc,
        burn_in.one_leapfrog().hmc,
    )
    assert {k.gradient_precision for k in stand_ins} == {"bfloat16"}


def test_the_precision_is_a_part_of_a_runs_identity():
    target = regression("tpu")
    layout = read_layout(None, target, jnp.zeros(DIMENSION), 1, has_chains=False)

    def facts(precision):
        kernel = KERNELS["HMC"](target, gradient_precision=precision)
        plan = Plan(jax.random.key(0), gm.WindowAdaptation(), Partial(flat), None, 1, 0, 1, 1)
        return facts_of_run(plan, kernel, layout)

    require_same(facts("bfloat16"), facts("bfloat16"), "folder")
    with pytest.raises(
        ValueError, match="kernel.gradient_precision: saved 'bfloat16', given 'float32'"
    ):
        require_same(facts("bfloat16"), facts("float32"), "folder")


def test_on_a_cpu_a_kernels_gradient_is_the_program_of_its_targets():
    kernel, x = KERNELS["HMC"](regression("cpu")), jnp.zeros(DIMENSION)
    for method in ("grad", "terms_and_grad"):
        programs = [
            jax.jit(lambda thing, x, m=method: getattr(thing, m)(x)).lower(thing, x).compile()
            for thing in (kernel.target, kernel)
        ]
        # But for source lines, names of arguments, and the precision, which the CPU does not read.
        rest = r"metadata={[^}]*}|HloModule.*|FileNames[\s\S]*?\n\n\n|_target|, operand_precision={.*?}"
        theirs, ours = (re.sub(rest, "", str(program.as_text())) for program in programs)
        assert ours == theirs and "ROOT" in ours
