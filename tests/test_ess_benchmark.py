"""The benchmark of effective sample sizes: one posterior for all, honest counts, its rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ess
from benchmarks.contenders import ess_ours
from benchmarks.contenders.ess_program import EssProgram, Problem, Sampled, counts, union
from benchmarks.ess_models import MODELS, hierarchical, regression

RNG = np.random.default_rng(0)


def small_digits():
    images = RNG.integers(0, 256, (30, 784)).astype(np.uint8)
    return {"image": images, "label": RNG.integers(0, 10, 30).astype(np.int32)}


# What each model reads, smaller where its own is large or comes from files
DATA = {
    "eight_schools": {"y": np.array([28.0, 8.0, -3.0]), "sigma": np.array([15.0, 10.0, 16.0])},
    "arK": {"lags": RNG.normal(size=(12, 5)), "y": RNG.normal(size=12)},
    "gp_regr": {"squared_distance": (np.arange(5.0)[:, None] - np.arange(5.0)) ** 2, "y": np.ones(5)},
    "german_credit": regression.GERMAN_CREDIT.load(None),
    "item_response": hierarchical.ITEM_RESPONSE.load(None),
    "stochastic_volatility": {"y": RNG.normal(size=20)},
    "groups": hierarchical.simulate_groups(50),
    "mnist_6000": small_digits(),
    "mnist_60000": small_digits(),
}


@pytest.fixture(params=[name for name in MODELS if name != "mnist_60000"])
def problem(request) -> Problem:
    model = MODELS[request.param]
    data = {
        name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in DATA[model.name].items()
    }
    return Problem(model, data, model.start(data, 1, seed=1))


def test_ours_and_peers_sample_the_same_density(problem):
    """Up to a constant: differences between two points, and the gradient, agree."""
    log_density, data, start = problem.for_peers()
    here = jax.tree.map(lambda x: x[0], start)
    there = jax.tree.map(lambda x: 0.9 * x + 0.01, here)
    target = ess_ours.target_of(problem)

    def ours(position, target):
        return sum(jnp.sum(term) for term in jax.tree.leaves(target.terms(position)))

    peers, evaluate = jax.jit(jax.value_and_grad(log_density)), jax.jit(ours)
    with jax.numpy_rank_promotion("allow"):  # as a user's program has it
        (value, gradient), (other, _) = peers(here, data), peers(there, data)
        own_gradient = jax.jit(lambda x, target: target.grad(x))(here, target)
        own_difference = evaluate(here, target) - evaluate(there, target)
    scale = abs(float(value)) + 1
    np.testing.assert_allclose(own_difference, value - other, atol=2e-5 * scale)
    for name in gradient:
        size = float(jnp.max(jnp.abs(gradient[name])))
        np.testing.assert_allclose(own_gradient[name], gradient[name], atol=2e-4 * size)


def test_lock_step_charges_every_chain_the_longest_trajectory():
    leapfrogs = np.array([[1, 7], [3, 1]])
    assert counts(leapfrogs, in_lock_step=True) == {"leapfrogs": 12, "evaluated": 20}
    assert counts(leapfrogs, in_lock_step=False) == {"leapfrogs": 12, "evaluated": 12}


def test_compile_time_counts_nested_intervals_once():
    assert union([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (8.0, 9.0)]) == pytest.approx(6.0)


def test_compiling_is_parted_from_running(tmp_path):
    @jax.jit
    def draw(key):
        return jax.random.normal(key, (2, 5, 3))

    program = EssProgram(
        lambda key: (key, jnp.array([4, 6])),
        lambda key, _: Sampled({"x": draw(key)}, jnp.array([[1] * 5, [2] * 5])),
    )
    path = str(tmp_path / "draws.npz")
    first, second = program.run(0, path), program.run(0, path)
    assert first["sampling"]["compile_s"] > 0 == second["sampling"]["compile_s"]
    assert first["warmup"]["leapfrogs"] == 10
    assert first["sampling"]["leapfrogs"] == 15
    assert first["sampling"]["evaluated"] == 20
    with np.load(path) as draws:
        assert draws["x"].shape == (2, 5, 3)


WARMUP = {"seconds": 3.0, "leapfrogs": 600}
SAMPLING = {"seconds": 1.0, "leapfrogs": 400, "evaluated": 500, "compile_s": 0.0}


def test_effective_draws_are_shared_out_over_seconds_and_gradients():
    result = ess.judged(np.array([1.0, 1.004]), np.array([200.0, 800.0, 400.0]), WARMUP, SAMPLING)
    assert result["verdict"] == "converged"
    assert result["ess"]["least"] == {
        "size": 200.0,
        "per_s": 200.0,
        "per_s_all": 50.0,
        "per_1000": 500.0,
        "per_1000_all": 200.0,
    }
    assert result["ess"]["median"]["per_s"] == 400.0


@pytest.mark.parametrize(
    ("worst", "verdict"),
    [(1.01, "converged"), (1.02, "doubtful"), (1.06, "not converged"), (np.nan, "not converged")],
)
def test_who_has_not_converged_has_no_effective_sample_size(worst, verdict):
    result = ess.judged(np.array([1.0, worst]), np.array([100.0, 100.0]), WARMUP, SAMPLING)
    assert result["verdict"] == verdict
    assert ("ess" in result) == (verdict != "not converged")
