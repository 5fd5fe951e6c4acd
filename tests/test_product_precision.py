"""Products on chips that round their factors: those of metrics ask for full precision."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import gspmd_mcmc as gm
from gspmd_mcmc import LowRank, Rotated
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.metrics.dense_metric import DenseMetric
from gspmd_mcmc.kernels.metrics.low_rank_metric import LowRankMetric
from gspmd_mcmc.kernels.metrics.rotated_metric import RotatedMetric
from gspmd_mcmc.targets import likelihoods
from gspmd_mcmc.tree import pytree

HIGHEST = jax.lax.Precision.HIGHEST
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


# What a chip does, emulated: a product's factors are rounded to bfloat16 unless it asks for more


def rounding(function, *, hears):
    """Return a function whose products have rounded factors; those that ask not to if it ``hears``."""

    def run(*args):
        program, out = jax.make_jaxpr(function, return_shape=True)(*args)
        found = evaluate(program.jaxpr, program.consts, jax.tree.leaves(args), hears)
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return run


def evaluate(jaxpr, consts, args, hears):
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        given = [v.val if hasattr(v, "val") else values[v] for v in eqn.invars]
        if eqn.primitive.name == "dot_general" and not (hears and is_exact(eqn)):
            given = [jax.lax.reduce_precision(x, 8, 7) for x in given]
        if eqn.primitive.name in ("jit", "pjit"):
            program = eqn.params["jaxpr"]
            out = evaluate(program.jaxpr, program.consts, given, hears)
        else:
            out = eqn.primitive.bind(*given, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        values |= dict(zip(eqn.outvars, out, strict=True))
    return [v.val if hasattr(v, "val") else values[v] for v in jaxpr.outvars]


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
        exact, rounded = (rounding(function, hears=h)(self.metric, *args) for h in (True, False))
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
    apart = rounding(partial(likelihoods._product_with_exact_biases, 4), hears=False)
    whole = rounding(lambda x, w: x @ w.T, hears=False)
    np.testing.assert_allclose(apart(x, after) - apart(x, before), 0.004, atol=1e-6)
    np.testing.assert_array_equal(whole(x, after), whole(x, before))
