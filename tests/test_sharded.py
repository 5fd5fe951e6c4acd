"""`Sharded`: the same sample and log probability on every mesh, right gradients, one reduction."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import Exponential, mesh_of, real
from scipy import stats

import gspmd_mcmc as gm
from gspmd_mcmc import Sharded, communication

KEY = jax.random.key(0)
SIZES = [1, 7, 8]


class Seeded(Exponential):
    """One that samples in TFP's way."""

    def sample(self, sample_shape=(), seed=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().sample(seed, sample_shape)


DISTRIBUTIONS = {
    "normal": lambda: dist.Normal(0.5, 2.0),
    "vectors": lambda: dist.Normal(jnp.arange(3.0), 1.0),
    "events": lambda: dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)),
    "categories": lambda: dist.Categorical(jnp.array([0.2, 0.3, 0.5])),
    "coins": lambda: dist.Bernoulli(0.3),
    "own": lambda: Exponential(2.0),
    "seeded": lambda: Seeded(2.0),
}


# Samples


@pytest.mark.parametrize(
    ("kind", "num_rows"), [("normal", 56), *((kind, 13) for kind in DISTRIBUTIONS)]
)
def test_samples_are_equal_on_every_mesh(kind, num_rows):
    """56 rows divide over every mesh here; 13 over the first only.

    Exactly, but where a distribution rounds twice, in ``location + scale * noise``: a compiler may do
    that in one step, on arrays of one shape and not of another.
    """

    def draw(size):
        sharded = Sharded(DISTRIBUTIONS[kind](), mesh=mesh_of(size), num_rows=num_rows)
        return real(sharded.sample(KEY))

    reference = draw(1)
    assert reference.shape[0] == num_rows and np.unique(reference).size > 1
    tolerance = 5e-7 if kind in ("vectors", "events") else 0
    for size in SIZES[1:]:
        np.testing.assert_allclose(draw(size), reference, rtol=0, atol=tolerance)


def test_a_sample_is_that_of_the_distribution_itself():
    sharded = Sharded(dist.Normal(0.5, 2.0), mesh=mesh_of(8), num_rows=24)
    expected = dist.Normal(0.5, 2.0).sample(KEY, (3, 24))
    np.testing.assert_allclose(sharded.sample(KEY, (3,)), expected, rtol=0, atol=5e-7)
    assert not np.array_equal(sharded.sample(KEY), sharded.sample(jax.random.key(1)))


def test_uneven_rows_are_padded_by_copies_of_the_last():
    sample = Sharded(dist.Normal(0, 1), mesh=mesh_of(8), num_rows=13).sample(KEY)
    assert isinstance(sample, gm.Padded)
    assert (sample.num_rows, sample.values.shape) == (13, (16,))
    assert sample.values.sharding == NamedSharding(mesh_of(8), P("data"))
    assert {s.data.shape for s in sample.values.addressable_shards} == {(2,)}
    np.testing.assert_array_equal(np.asarray(sample.values)[13:], sample.unpad()[-1])


def test_the_same_in_a_program_as_outside():
    sharded = Sharded(dist.Normal(0, 1), mesh=mesh_of(8), num_rows=13)
    inside, outside = jax.jit(Sharded.sample)(sharded, KEY), sharded.sample(KEY)
    assert isinstance(inside, gm.Padded) and inside.num_rows == 13
    np.testing.assert_array_equal(inside.values, outside.values)
    assert inside.values.sharding == outside.values.sharding


def test_rows_over_two_axes():
    mesh = gm.make_mesh(data=4, model=2)
    sample = Sharded(dist.Normal(0, 1), ("data", "model"), mesh=mesh, num_rows=16).sample(KEY)
    assert {s.data.shape for s in sample.addressable_shards} == {(2,)}
    np.testing.assert_array_equal(sample, dist.Normal(0, 1).sample(KEY, (16,)))


@pytest.mark.parametrize(
    ("distribution", "num_rows", "sample_shape", "shape", "spec"),
    [
        (dist.Normal(0.0, 1.0), None, 16, (16,), P("data")),
        (dist.Normal(0.0, 1.0), 8, (3,), (3, 8), P(None, "data")),
        (dist.Normal(jnp.zeros(8), 1.0), None, (), (8,), P("data")),
        (dist.Normal(jnp.zeros(8), 1.0), None, (3,), (3, 8), P(None, "data")),
        (dist.Dirichlet(jnp.ones(3)), None, (8,), (8, 3), P("data")),
        (dist.MultivariateNormal(jnp.zeros(8), jnp.eye(8)), None, (), (8,), P("data")),
        (Exponential(1.0), 8, (3,), (3, 8), P(None, "data")),
    ],
)
def test_which_axis_is_the_rows(distribution, num_rows, sample_shape, shape, spec):
    sharded = Sharded(distribution, mesh=mesh_of(8), num_rows=num_rows)
    sample = sharded.sample(KEY, sample_shape)
    assert sample.shape == shape
    assert sample.sharding.is_equivalent_to(NamedSharding(mesh_of(8), spec), sample.ndim)


def test_a_draw_sends_no_rows():
    """Elementwise draws need nothing; the pad is one row, sent to all."""
    for num_rows, most in ((8000, 0), (8003, 8)):
        sharded = Sharded(dist.Normal(0, 1), mesh=mesh_of(8), num_rows=num_rows)
        report = communication(Sharded.sample, sharded, KEY)
        assert sum(c.num_bytes for c in report.collectives) <= most
        assert report.temporary_bytes < 8 * 8000  # a device's rows, and no other's


# Log probabilities


def test_log_prob_is_equal_on_every_mesh():
    num_rows = 1013
    value = np.random.default_rng(0).normal(size=(num_rows, 3))
    expected = stats.norm.logpdf(value, [0, 1, 2], 1.5).sum()
    for size in SIZES:
        placed = gm.place(value, mesh_of(size), P("data"))
        sharded = Sharded(dist.Normal(jnp.arange(3.0), 1.5), mesh=mesh_of(size), num_rows=num_rows)
        total = sharded.log_prob(placed)
        assert total.shape == () and total.sharding.is_fully_replicated
        np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_log_prob_of_its_own_sample(kind):
    sharded = Sharded(DISTRIBUTIONS[kind](), mesh=mesh_of(8), num_rows=13)
    sample = sharded.sample(KEY)
    with jax.numpy_rank_promotion("allow"):
        expected = DISTRIBUTIONS[kind]().log_prob(jnp.asarray(real(sample))).sum()
    np.testing.assert_allclose(sharded.log_prob(sample), expected, rtol=2e-6)
    np.testing.assert_allclose(sharded.log_prob(real(sample)), expected, rtol=2e-6)


def gradients(placed):
    """Gradients of a log probability in the shared location and scale, and in the value."""

    def log_prob(location, scale, value):
        return Sharded(dist.Normal(location, scale)).log_prob(value)

    return jax.jit(jax.grad(log_prob, (0, 1, 2)))(jnp.float32(0.3), jnp.float32(1.5), placed)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_against_float64(size):
    """Of N(m, s): sum((x - m) / s²), sum((x - m)² / s³ - 1 / s), and -(x - m) / s² for each row."""
    value = np.random.default_rng(0).normal(size=1000) + 1
    location, scale, rows = gradients(gm.place(value, mesh_of(size), P("data")))
    away = value.astype(np.float32).astype(np.float64) - np.float64(np.float32(0.3))
    np.testing.assert_allclose(location, np.sum(away / 1.5**2), rtol=1e-6)
    np.testing.assert_allclose(scale, np.sum(away**2 / 1.5**3 - 1 / 1.5), rtol=1e-6)
    rows = rows.values if isinstance(rows, gm.Padded) else rows
    np.testing.assert_allclose(rows[:1000], -away / 1.5**2, rtol=1e-6)
    np.testing.assert_array_equal(rows[1000:], 0)  # the pad has no gradient
    assert {s.data.shape for s in rows.addressable_shards} == {(-(-1000 // size),)}


def test_parameters_that_have_rows():
    """A location for each row, padded or not, and a value that is padded."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 13))
    expected = stats.norm.logpdf(y, 2 * x, 1).sum()
    padded_x, padded_y = gm.place((x, y), mesh_of(8), P("data"))

    def log_prob(slope, x, y):
        return Sharded(dist.Normal(slope * x, 1.0)).log_prob(y)

    both = jax.jit(log_prob)(2.0, padded_x.values[:13], padded_y)
    np.testing.assert_allclose(both, expected, rtol=1e-6)
    slope_grad = jax.grad(log_prob)(2.0, jnp.asarray(x, jnp.float32), padded_y)
    np.testing.assert_allclose(slope_grad, np.sum((y - 2 * x) * x), rtol=1e-5)


def test_vmap_of_chains():
    sharded = Sharded(dist.Normal(0.0, 1.0), mesh=mesh_of(8), num_rows=13)
    keys = jax.random.split(KEY, 4)
    samples = jax.vmap(sharded.sample)(keys)
    one_by_one = [sharded.sample(key) for key in keys]
    np.testing.assert_array_equal(samples.values, np.stack([s.values for s in one_by_one]))
    expected = [float(sharded.log_prob(s)) for s in one_by_one]
    np.testing.assert_allclose(jax.vmap(sharded.log_prob)(samples), expected, rtol=1e-6)
    locations = jnp.arange(3.0)
    totals = jax.vmap(lambda m: Sharded(dist.Normal(m, 1.0)).log_prob(one_by_one[0]))(locations)
    expected = [stats.norm.logpdf(one_by_one[0].unpad(), m, 1).sum() for m in range(3)]
    np.testing.assert_allclose(totals, expected, rtol=1e-6)


def log_prob_of(location, value):
    return Sharded(dist.Normal(location, 1.0)).log_prob(value)


@pytest.mark.parametrize("num_rows", [8000, 8003])
@pytest.mark.parametrize("function", [log_prob_of, jax.grad(log_prob_of)])
def test_one_scalar_all_reduce_and_no_gather(num_rows, function):
    value = gm.place(np.zeros(num_rows, np.float32), mesh_of(8), P("data"))
    report = communication(function, jnp.float32(0.5), value)
    assert [(c.kind, c.num_bytes) for c in report.collectives] == [("all-reduce", 4)]
    assert report.largest_constant_bytes < 100


def test_a_sharded_is_an_argument_and_not_a_constant():
    location = gm.place(np.zeros(80000, np.float32), mesh_of(8), P("data"))
    sharded = Sharded(dist.Normal(location, 1.0))
    report = communication(Sharded.log_prob, sharded, location)
    assert [(c.kind, c.num_bytes) for c in report.collectives] == [("all-reduce", 4)]
    assert report.largest_constant_bytes < 100


def test_a_gather_would_be_seen():
    """Negative control of the tests of collectives."""
    value = gm.place(np.zeros(8000, np.float32), mesh_of(8), P("data"))

    def sorted_log_prob(location, value):
        return log_prob_of(location, jnp.sort(value) * jnp.arange(8000.0))

    kinds = {c.kind for c in communication(sorted_log_prob, 0.5, value).collectives}
    assert kinds != {"all-reduce"}


# Errors


NORMAL = dist.Normal(0, 1)
ON_8: dict[str, Any] = {"mesh": mesh_of(8)}
NO_DISTRIBUTIONS = [3.0, None, "normal", dist.Normal, object(), jnp.zeros(3), Sharded(NORMAL)]
NO_KEYS = [0, None, np.zeros(2, np.uint32), jax.random.split(KEY)]
TWICE = ("data", "data")
# Calls, what they are given, and the error that all of them raise.
WRONG = [
    (Sharded, NO_DISTRIBUTIONS, TypeError, "expected a distribution"),
    (lambda n: Sharded(NORMAL, num_rows=n), [0, -1, 2.5, "8", True], ValueError, "num_rows"),
    (lambda axis: Sharded(NORMAL, axis), [0, None, P(), ("data", 1)], TypeError, "axis"),
    (lambda axis: Sharded(NORMAL, axis), [TWICE], ValueError, "axis: expected each mesh axis once"),
    (
        lambda axis: Sharded(NORMAL, axis, **ON_8),
        ["rows", ("data", "rows")],
        ValueError,
        "no axis 'rows'",
    ),
    (lambda mesh: Sharded(NORMAL, mesh=mesh), ["data"], TypeError, "Sharded: mesh: expected a mesh"),
    (lambda key: Sharded(NORMAL, num_rows=8, **ON_8).sample(key), NO_KEYS, TypeError, "rng_key"),
    (lambda key: Sharded(NORMAL, num_rows=8).sample(key), [KEY], ValueError, "make_mesh"),
    (lambda key: Sharded(NORMAL, **ON_8).sample(key), [KEY], ValueError, "num_rows="),
    (lambda n: Sharded(NORMAL, num_rows=13, **ON_8).sample(KEY, (n,)), [3], ValueError, "jax.vmap"),
]


@pytest.mark.parametrize(
    ("call", "given", "error", "match"),
    [(call, x, error, match) for call, given, error, match in WRONG for x in given],
)
def test_what_is_wrong_is_refused(call, given, error, match):
    with pytest.raises(error, match=match):
        call(given)


@pytest.mark.parametrize(
    ("distribution", "num_rows", "value"),
    [
        (dist.Normal(0.0, 1.0), 8, np.zeros(7)),
        (dist.Normal(0.0, 1.0), 8, np.zeros((5, 8))),
        (dist.Normal(0.0, 1.0), 8, gm.Padded(jnp.zeros(8), 7)),
        (dist.Normal(0.0, 1.0), None, 0.5),
        (dist.Normal(0.0, 1.0), None, np.zeros((5, 8))),
        (dist.Normal(jnp.zeros(8), 1.0), None, np.zeros((5, 8))),
        (dist.Normal(jnp.zeros(8), 1.0), None, np.zeros(1)),
        (dist.Dirichlet(jnp.ones(3)), 8, np.ones((8, 2)) / 2),
        (Exponential(1.0), 8, np.zeros(7)),
        (Exponential(1.0), None, 0.5),
    ],
)
def test_values_with_other_rows(distribution, num_rows, value):
    with pytest.raises(ValueError, match="expected one value of shape"):
        Sharded(distribution, num_rows=num_rows).log_prob(value)
