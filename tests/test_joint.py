"""Joint distributions: three forms of one model, and the posteriors that they condition to."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from models import Exponential, mesh_of, real
from scipy import stats

import gspmd_mcmc as gm
from gspmd_mcmc import (
    JointDistributionCoroutine,
    JointDistributionNamed,
    JointDistributionSequential,
    Sharded,
    communication,
)
from gspmd_mcmc.models.site_model import CannotStream
from gspmd_mcmc.placement.padding import real_rows
from gspmd_mcmc.tree import total

Root = JointDistributionCoroutine.Root
KEY = jax.random.key(0)
SIZES = [1, 7, 8]


# One model in three forms: w ~ N(0, 1), u_i ~ N(0, 2), y_i ~ N(w + u_i, 0.5)


def of_rows(u, w, name=None):
    return Sharded(dist.Normal(w + u, 0.5), name=name)


def rows(num_rows, name=None):
    return Sharded(dist.Normal(0.0, 2.0), num_rows=num_rows, name=name)


def coroutine_model(num_rows):
    w = yield Root(dist.Normal(0.0, 1.0), name="w")
    u = yield rows(num_rows, "u")
    yield of_rows(u, w, "y")


def make(form, num_rows=13, mesh=None):
    if form == "sequential":
        parts = [dist.Normal(0.0, 1.0), rows(num_rows), of_rows]
        return JointDistributionSequential(parts, mesh=mesh)
    if form == "named":
        parts = {"w": dist.Normal(0.0, 1.0), "u": rows(num_rows), "y": of_rows}
        return JointDistributionNamed(parts, mesh=mesh)
    return JointDistributionCoroutine(coroutine_model, num_rows, mesh=mesh)


def entries(value):
    """Return w, u and y of any form's value."""
    return [value[n] for n in ("w", "u", "y")] if isinstance(value, dict) else list(value)


def by_hand(w, u, y):
    """Log probabilities in float64."""
    w, u, y = (real(x).astype(np.float64) for x in (w, u, y))
    parts = (stats.norm.logpdf(w), stats.norm.logpdf(u, 0, 2), stats.norm.logpdf(y, w + u, 0.5))
    return [np.sum(part) for part in parts]


FORMS = ["sequential", "named", "coroutine"]


@pytest.mark.parametrize("form", FORMS)
def test_log_prob_on_every_mesh(form):
    w, u, y = entries(make(form, 13, mesh_of(8)).sample(KEY))
    expected = by_hand(w, u, y)
    for size in SIZES:
        joint = make(form, 13, mesh_of(size))
        value = joint.sample(KEY)
        for ours, first in zip(entries(value), (w, u, y), strict=True):
            np.testing.assert_allclose(real(ours), real(first), rtol=0, atol=5e-7)
        np.testing.assert_allclose(joint.log_prob(value), sum(expected), rtol=1e-6)
        parts = joint.log_prob_parts(value)
        assert type(parts) is type(value)
        np.testing.assert_allclose(entries(parts), expected, rtol=2e-6)


def test_structures_and_names():
    value = make("sequential", 8, mesh_of(8)).sample(KEY)
    assert isinstance(value, list) and make("sequential").names == ("var0", "var1", "var2")
    value = make("named", 8, mesh_of(8)).sample(KEY)
    assert list(value) == ["w", "u", "y"] and make("named").names == ("w", "u", "y")
    value = make("coroutine", 8, mesh_of(8)).sample(KEY)
    assert value._fields == make("coroutine").names == ("w", "u", "y")
    assert isinstance(value, tuple) and jax.tree.structure(value) == jax.tree.structure(
        make("coroutine", 8, mesh_of(8)).sample(jax.random.key(1))
    )


def test_forms_agree_on_the_sample():
    """Part i draws from fold_in(key, i), whatever the form."""
    samples = [entries(make(form, 13, mesh_of(8)).sample(KEY)) for form in FORMS]
    for other in samples[1:]:
        for a, b in zip(samples[0], other, strict=True):
            np.testing.assert_array_equal(real(a), real(b))
    np.testing.assert_array_equal(
        samples[0][0], dist.Normal(0.0, 1.0).sample(jax.random.fold_in(KEY, 0))
    )


def test_the_order_of_a_dict_does_not_matter():
    parts = {"y": of_rows, "u": rows(8), "w": dist.Normal(0.0, 1.0)}
    backward = JointDistributionNamed(parts, mesh=mesh_of(8))
    assert backward.names == ("u", "w", "y")
    value = backward.sample(KEY)
    assert list(value) == ["y", "u", "w"]
    expected = sum(by_hand(value["w"], value["u"], value["y"]))
    np.testing.assert_allclose(backward.log_prob(value), expected, rtol=1e-6)


def test_functions_take_the_most_recent_values_first():
    seen = {}

    def third(second, first):
        seen["third"] = (second, first)
        return dist.Normal(second, 1.0)

    def fourth(*before):
        seen["fourth"] = before
        return dist.Normal(before[0], 1.0)

    joint = JointDistributionSequential(
        [dist.Normal(0.0, 1.0), lambda x: dist.Normal(x, 1.0), third, fourth]
    )
    with jax.disable_jit():
        joint.log_prob([1.0, 2.0, 3.0, 4.0])
    assert seen == {"third": (2.0, 1.0), "fourth": (3.0, 2.0, 1.0)}


def test_arguments_with_a_default():
    joint = JointDistributionNamed(
        {"w": dist.Normal(0.0, 1.0), "y": lambda w, scale=0.5: dist.Normal(w, scale)}
    )
    expected = stats.norm.logpdf(1.0) + stats.norm.logpdf(2.0, 1.0, 0.5)
    np.testing.assert_allclose(joint.log_prob({"w": 1.0, "y": 2.0}), expected, rtol=1e-6)


@pytest.mark.parametrize("form", ["named", "coroutine"])
def test_many_samples(form):
    joint = make(form, 16, mesh_of(8))
    values = joint.sample(KEY, (2, 3))
    assert [x.shape for x in entries(values)] == [(2, 3), (2, 3, 16), (2, 3, 16)]
    assert entries(values)[1].sharding.spec == P(None, None, "data")
    fifth = joint.sample(jax.random.fold_in(KEY, 5))
    for many, one in zip(entries(values), entries(fifth), strict=True):
        np.testing.assert_allclose(many[1, 2], one, rtol=0, atol=5e-7)
    totals = jax.vmap(jax.vmap(joint.log_prob))(values)
    np.testing.assert_allclose(totals[1, 2], joint.log_prob(fifth), rtol=1e-6)


def regression(x, num_weights):
    """Rows as an argument, a constrained latent, and a latent for each row."""
    weights = yield Root(dist.Normal(jnp.zeros(num_weights), 1.0).to_event(1), name="weights")
    scale = yield Root(dist.HalfNormal(1.0), name="scale")
    rate = yield Sharded(dist.Gamma(2.0, 1.0), num_rows=x.shape[0], name="rate")
    yield Sharded(dist.Normal(x @ weights + rate, scale), name="y")


X = np.random.default_rng(0).normal(size=(1013, 3)).astype(np.float32)


def regression_on(size):
    mesh = mesh_of(size)
    return JointDistributionCoroutine(regression, gm.place(X, mesh, P("data")), 3, mesh=mesh)


@pytest.fixture(scope="module")
def observed():
    return regression_on(8).sample(KEY)


def direct(position, y):
    """Log density of the position of `regression`, and the Jacobians of its two exponentials."""
    weights, scale, rate = position["weights"], jnp.exp(position["scale"]), jnp.exp(position["rate"])
    log_density = -0.5 * jnp.sum(weights**2) - 1.5 * jnp.log(2 * jnp.pi)
    log_density += 0.5 * jnp.log(2 / jnp.pi) - 0.5 * scale**2 + position["scale"]
    log_density += jnp.sum(jnp.log(rate) - rate + position["rate"])
    away = (y - jnp.asarray(X, jnp.float64) @ weights - rate) / scale
    return log_density + jnp.sum(-0.5 * away**2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi))


@pytest.mark.parametrize("size", [1, 7])
def test_a_posterior_against_the_joint_and_float64(observed, size):
    joint, y = regression_on(size), observed.y.unpad()
    target = joint.condition(y=y)
    # Away from where y was drawn, so that sums over rows do not cancel.
    observed = observed._replace(weights=observed.weights + 0.5, scale=jnp.float32(0.7))
    assert {name: x.shape for name, x in target.origin().items()} == {
        **{"weights": (3,), "scale": (), "rate": (1013,)}
    }
    position = {
        "weights": observed.weights,
        "scale": jnp.log(observed.scale),
        "rate": jnp.log(observed.rate.unpad()),
    }
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), position)
        exact = jax.value_and_grad(direct)(wide, np.asarray(y, np.float64))
        value, grads = jax.tree.map(np.asarray, exact)
    state = gm.HMC(target, 0.01, 3).init(position)
    np.testing.assert_allclose(state.log_density, value, rtol=1e-6)
    np.testing.assert_allclose(total(target.terms(state.position)), value, rtol=1e-6)
    jacobians = position["scale"] + jnp.sum(position["rate"])
    own = joint.log_prob((observed.weights, observed.scale, observed.rate.unpad(), y))
    np.testing.assert_allclose(state.log_density, own + jacobians, rtol=1e-6)
    for name, grad in grads.items():
        ours = np.asarray(real_rows(state.log_density_grad[name]))
        assert np.linalg.norm(ours - grad) < 1e-6 * np.linalg.norm(grad), name


def test_gradients_of_the_joint_itself(observed):
    joint, y = regression_on(8), observed.y
    position = (observed.weights, observed.scale, observed.rate.unpad())

    def log_prob(joint, position, y):
        return joint.log_prob((*position, y))

    grads = jax.jit(jax.grad(log_prob, 1))(joint, position, y)
    y, (weights, scale, rate) = y.unpad().astype(float), [np.asarray(x, float) for x in position]
    away = (y - X.astype(float) @ weights - rate) / scale
    expected = [
        X.T @ away / scale - weights,
        -scale + np.sum(away**2 - 1) / scale,
        1 / rate - 1 + away / scale,
    ]
    for ours, exact in zip(grads, expected, strict=True):
        assert np.linalg.norm(ours - exact) < 2e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("num_rows", [8000, 8003])
def test_a_joint_log_prob_needs_all_reduces_alone(num_rows):
    joint = make("coroutine", num_rows, mesh_of(8))
    value = joint.sample(KEY)
    report = communication(type(joint).log_prob, joint, value)
    assert {(c.kind) for c in report.collectives} == {"all-reduce"}
    assert sum(c.num_bytes for c in report.collectives) == 8  # two parts have rows
    assert report.largest_constant_bytes < 1000


def test_data_as_a_part_of_a_function():
    x = X[:13]
    parts = {
        "w": dist.Normal(jnp.zeros(3), 1.0).to_event(1),
        "y": Partial(lambda x, w: Sharded(dist.Normal(x @ w, 1.0)), gm.place(x, mesh_of(8), P("data"))),
    }
    joint = JointDistributionNamed(parts, mesh=mesh_of(8))
    value = joint.sample(KEY)
    w = np.asarray(value["w"], float)
    expected = stats.norm.logpdf(w).sum() + stats.norm.logpdf(real(value["y"]), x @ w).sum()
    np.testing.assert_allclose(joint.log_prob(value), expected, rtol=1e-6)
    target = joint.condition(y=value["y"])
    state = gm.HMC(target, 0.01, 3).init({"w": value["w"]})
    np.testing.assert_allclose(state.log_density, expected, rtol=1e-6)
    report = communication(type(joint).log_prob, joint, value)
    assert {c.kind for c in report.collectives} == {"all-reduce"}


def test_two_plates_and_a_plate_without_data():
    def model(num_rows):
        w = yield dist.Normal(0.0, 1.0)
        yield Sharded(dist.Normal(w, 1.0), num_rows=5, name="few")
        yield Sharded(dist.Normal(w, 2.0), num_rows=num_rows, name="many")
        yield dist.Normal(w, 3.0)

    joint = JointDistributionCoroutine(model, 13, mesh=mesh_of(8))
    w, few, many, last = joint.sample(KEY)
    target = joint.condition(many=many, var3=last)
    assert len(target.plates) == 2
    position = {"var0": w, "few": real(few)}
    state = gm.HMC(target, 0.01, 3).init(position)
    np.testing.assert_allclose(state.log_density, joint.log_prob((w, few, many, last)), rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_distributions_of_ones_own(form):
    own, theirs = Exponential(2.0), lambda rate: Sharded(Exponential(rate), num_rows=13, name="y")

    def model():
        rate = yield Root(own, name="rate")
        yield theirs(rate)

    joint = {
        "sequential": lambda: JointDistributionSequential([own, theirs], mesh=mesh_of(8)),
        "named": lambda: JointDistributionNamed({"rate": own, "y": theirs}, mesh=mesh_of(8)),
        "coroutine": lambda: JointDistributionCoroutine(model, mesh=mesh_of(8)),
    }[form]()
    value = joint.sample(KEY)
    rate, y = value.values() if isinstance(value, dict) else value
    expected = stats.expon.logpdf(rate, scale=0.5) + stats.expon.logpdf(real(y), scale=1 / rate).sum()
    np.testing.assert_allclose(joint.log_prob(value), expected, rtol=1e-6)
    target = joint.condition(y=y)
    state = gm.HMC(target, 0.01, 3).init({joint.names[0]: rate})
    np.testing.assert_allclose(state.log_density, expected, rtol=1e-6)


# Errors


@pytest.mark.parametrize("form", FORMS)
def test_values_that_do_not_fit(form):
    joint = make(form, 8)
    w, u, y = 0.5, np.zeros(8), np.zeros(8)
    pack = (lambda *x: dict(zip("wuy", x, strict=False))) if form == "named" else lambda *x: list(x)
    with pytest.raises(ValueError, match="value"):
        joint.log_prob(pack(w, u))
    with pytest.raises(ValueError, match=r"expected one value of shape \[8\], got \[7\]"):
        joint.log_prob(pack(w, u[1:], y))
    with pytest.raises(ValueError, match=r"expected one value of shape \[\], got \[8\]"):
        joint.log_prob(pack(u, u, y))
    with pytest.raises(ValueError, match="not Sharded"):
        joint.log_prob(pack(gm.Padded(jnp.zeros(8), 7), u, y))
    with pytest.raises((TypeError, ValueError), match="value: expected"):
        joint.log_prob(0.5)


def test_values_of_other_parts():
    with pytest.raises(ValueError, match="got 4 values"):
        make("sequential", 8).log_prob([0.5, np.zeros(8), np.zeros(8), 0.0])
    with pytest.raises(ValueError, match="expected a dict"):
        make("named", 8).log_prob({"w": 0.5, "u": np.zeros(8), "z": np.zeros(8)})
    with pytest.raises(TypeError, match="list or tuple"):
        make("coroutine", 8).log_prob({"w": 0.5, "u": np.zeros(8), "y": np.zeros(8)})


def rooted(part):
    def model():
        yield Root(part)

    return JointDistributionCoroutine(model)


@pytest.mark.parametrize("part", [3.0, None, dist.Normal, "normal"])
@pytest.mark.parametrize(
    ("make_one", "name"),
    [
        (lambda part: JointDistributionSequential([dist.Normal(0, 1), part]), "part 1"),
        (lambda part: JointDistributionNamed({"x": part}), "'x'"),
        (lambda part: JointDistributionSequential([lambda: part]).sample(KEY), "part 'var0'"),
        (lambda part: rooted(part).sample(KEY), "part 'var0'"),
    ],
    ids=["list", "dict", "function", "generator"],
)
def test_parts_that_are_no_distribution(make_one, name, part):
    with pytest.raises(TypeError, match=f"{name}: expected a distribution"):
        make_one(part)


def of_b(b):
    return dist.Normal(b, 1)


def of_a(a):
    return dist.Normal(a, 1)


NAMED_X = Sharded(dist.Normal(0, 1), num_rows=8, name="x")
WRONG = {
    "generator": lambda: JointDistributionCoroutine(lambda: dist.Normal(0, 1)).sample(KEY),
    "no parts": lambda: JointDistributionSequential([]).sample(KEY),
    "list of parts": lambda: JointDistributionSequential({"x": dist.Normal(0, 1)}),
    "dict of parts": lambda: JointDistributionNamed([dist.Normal(0, 1)]),  # pyright: ignore
    "two parts are called 'x'": lambda: JointDistributionSequential(
        [NAMED_X, NAMED_X], mesh=mesh_of(8)
    ).sample(KEY),
    "identifier": lambda: JointDistributionNamed({"a b": dist.Normal(0, 1)}),
    "only 0 parts before it": lambda: JointDistributionSequential([of_a]),
    "takes 'b', which is none of": lambda: JointDistributionNamed({"y": of_b}),
    "circle": lambda: JointDistributionNamed({"a": of_b, "b": of_a}),
    "make_mesh": lambda: make("named").sample(KEY),
    "rng_key": lambda: make("named", 8, mesh_of(8)).sample(0),  # pyright: ignore
    "Padded": lambda: make("named", 13, mesh_of(8)).sample(KEY, 3),
}


@pytest.mark.parametrize("match", WRONG)
def test_a_joint_that_is_wrong_is_refused(match):
    with pytest.raises((TypeError, ValueError), match=match):
        WRONG[match]()


def test_a_program_that_closes_over_the_arrays():
    x = gm.place(np.zeros((100_000, 3), np.float32), mesh_of(8), P("data"))
    joint = JointDistributionCoroutine(regression, x, 3, mesh=mesh_of(8))
    value = (jnp.zeros(3), 1.0, jnp.ones(100_000), jnp.zeros(100_000))
    with pytest.raises(ValueError, match="jax.jit"):
        jax.jit(joint.log_prob)(value)
    np.testing.assert_allclose(jax.jit(type(joint).log_prob)(joint, value), joint.log_prob(value))


def test_observations_that_do_not_fit(observed):
    joint = make("coroutine", 8, mesh_of(8))
    with pytest.raises(ValueError, match="no part 'z'"):
        joint.condition(z=1.0)
    with pytest.raises(ValueError, match="no part is left"):
        joint.condition(w=1.0, u=np.zeros(8), y=np.zeros(8))
    with pytest.raises(ValueError, match=r"shape \[8\], got \[7\]"):
        joint.condition(u=np.zeros(7), y=np.zeros(8))
    discrete = JointDistributionSequential([dist.Bernoulli(0.5), lambda x: dist.Normal(x, 1.0)])
    with pytest.raises(ValueError, match="discrete"):
        discrete.condition(var1=0.5)
    scalar = JointDistributionSequential([dist.Normal(0.0, 1.0), Sharded(dist.Normal(0.0, 1.0))])
    with pytest.raises(ValueError, match="num_rows="):
        scalar.condition(var0=0.5)


def centred(x):
    w = yield Root(dist.Normal(0.0, 1.0))
    yield Sharded(dist.Normal((x - jnp.mean(x)) * w, 1.0), name="y")


def random_walk(num_rows):
    u = yield Root(Sharded(dist.Normal(0.0, 1.0), num_rows=num_rows))
    yield Sharded(dist.Normal(jnp.cumsum(u), 1.0), name="y")


def summed(num_rows):
    u = yield Root(Sharded(dist.Normal(0.0, 1.0), num_rows=num_rows))
    yield Root(Sharded(dist.Normal(0.0, 1.0), num_rows=num_rows), name="y")
    yield dist.Normal(jnp.sum(u), 1.0)


def rows_of_its_own(num_rows):
    w = yield Root(dist.Normal(0.0, 1.0))
    yield Sharded(dist.Normal(w * jnp.arange(13.0), 1.0), name="y")


@pytest.mark.parametrize(
    ("model", "argument"),
    [(centred, X[:13, 0]), (random_walk, 13), (summed, 13), (rows_of_its_own, 13)],
)
def test_rows_that_are_coupled_are_refused(model, argument):
    joint = JointDistributionCoroutine(model, argument, mesh=mesh_of(8))
    with pytest.raises(CannotStream):
        joint.condition(y=np.linspace(0, 1, 13))
