"""What `from_numpyro` refuses, in plain words; and its cheap log probabilities, which are NumPyro's."""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.models import numpyro as of_numpyro

X = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, 16).astype(np.uint8)
POSITIVE = np.abs(X[:, 0])


def target_of(model, *args, plates=None, check=False, **kwargs):
    """A target of arguments whose rows lie over 8 devices."""
    placed, named = gm.place((args, kwargs), gm.make_mesh(data=8), P("data"))
    plates = {"rows": "data"} if plates is None else plates
    return gm.from_numpyro(model, *placed, plates=plates, check=check, **named)


def refuses(model, *args, match, error: type[Exception] = ValueError, **options):
    with pytest.raises(error, match=match):
        target_of(model, *args, **options)


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


# Plates.


def test_a_plate_that_the_model_has_not_is_refused():
    match = r"plates: the model has no plate 'users'; it has \['rows'\]"
    refuses(logistic, X, Y, plates={"users": "data"}, match=match)


@pytest.mark.parametrize("over", ["model", ("data", "model")])
def test_a_mesh_axis_that_the_mesh_has_not_is_refused(over):
    match = r"'rows' is to lie over .*model.* lie on a mesh with axes \['data'\]"
    refuses(logistic, X, Y, plates={"rows": over}, match=match)


def test_a_plate_that_draws_a_subsample_is_refused():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", 16, subsample_size=4) as rows:
            numpyro.sample("y", dist.Bernoulli(logits=x[rows, 0] * w), obs=y[rows])

    refuses(model, X, Y, match="'rows' draws 4 of its 16 rows; HMC needs all of them")


def test_a_subsample_of_a_plate_that_is_not_sharded_is_refused():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", 16, subsample_size=4) as rows:
            numpyro.sample("y", dist.Bernoulli(logits=x[rows, 0] * w), obs=y[rows])

    refuses(model, X, Y, plates={}, match="'rows' draws 4 of its 16 rows")


def test_a_site_in_two_sharded_plates_is_refused():
    def model(x):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("columns", 2, dim=-1), numpyro.plate("rows", x.shape[0], dim=-2):
            numpyro.sample("x", dist.Normal(level, 1), obs=x)

    plates = {"rows": "data", "columns": "data"}
    refuses(model, X, plates=plates, match="site 'x' lies in plates .* which are all to be sharded")


# Sites.


def test_a_discrete_latent_is_refused():
    def model(x):
        with numpyro.plate("rows", x.shape[0]):
            kind = numpyro.sample("kind", dist.Bernoulli(0.5))
            numpyro.sample("x", dist.Normal(kind, 1), obs=x)

    refuses(model, X[:, 0], match="site 'kind' is discrete .* and not observed")


def test_a_param_site_is_refused():
    def model(x):
        level = numpyro.param("level", 1.0)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(level, 1), obs=x)

    refuses(model, X[:, 0], match="the model has numpyro.param sites")


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("distribution", "bad", "num_bad"),
    [
        (dist.Bernoulli(logits=jnp.zeros(())), np.where(np.arange(16) == 3, 2, Y), 1),
        (dist.Poisson(2.0), np.where(np.arange(16) < 3, -1, Y.astype(int)), 3),
        (dist.Categorical(logits=jnp.zeros(3)), np.where(np.arange(16) == 15, 3, Y), 1),
        (dist.Gamma(2.0, 1.0), X[:, 0], int((X[:, 0] < 0).sum())),
        (dist.Bernoulli(logits=jnp.zeros(())), np.where(np.arange(16) == 3, np.nan, Y), 1),
    ],
)
def test_observations_outside_the_support_are_refused(distribution, bad, num_bad, check):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(w, 1), obs=x)
            numpyro.sample("y", distribution, obs=y)

    match = f"site 'y': {num_bad} of its observations lie outside the support"
    refuses(model, X[:, 0], bad, check=check, match=match)


def test_masked_observations_may_lie_outside_the_support():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]), numpyro.handlers.mask(mask=y < 2):
            numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * w), obs=y)

    target_of(model, X, np.where(np.arange(16) == 3, 2, Y))


# Rows that depend on each other.


def test_rows_that_are_closed_over_and_indexed_by_the_plate_are_refused():
    offset = jnp.asarray(3 * X[:, 1])

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]) as rows:
            numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * w + offset[rows]), obs=y)

    refuses(model, X, Y, check=True, match="model.rows, 16 rows.*: the term of row .* in another order")


@pytest.mark.parametrize(
    "couple", [lambda x: x - x.mean(0), lambda x: jnp.cumsum(x, 0), lambda x: x[::-1]]
)
def test_rows_that_are_coupled_through_the_data_are_refused(couple):
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=couple(x) @ w), obs=y)

    refuses(model, X, Y, check=True, match="depends on the rows beside it .* plates=")


def test_rows_that_are_coupled_through_their_latents_are_refused():
    def model(y):
        with numpyro.plate("rows", y.shape[0]):
            move = numpyro.sample("move", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(jnp.cumsum(move), 1), obs=y)

    refuses(model, X[:, 0], check=True, match="depends on the rows beside it")


def test_a_density_that_is_not_numpyro_s_is_refused(monkeypatch):
    right = of_numpyro.log_prob
    monkeypatch.setattr(of_numpyro, "log_prob", lambda *args: 1.01 * right(*args))
    refuses(logistic, X, Y, check=True, match="the streamed log density differs from NumPyro's by")


def test_what_is_not_checked_is_refused_when_it_is_sampled():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=(x - x.mean(0)) @ w), obs=y)

    target = target_of(model, X, Y)
    with pytest.raises(gm.CoupledRows, match="depends on the rows beside it"):
        gm.sample(jax.random.key(0), target, progress=False)


def test_a_mean_over_three_million_rows_is_refused():
    """Totals of so many rows hide that tiles have means of their own."""
    x = np.random.default_rng(0).normal(size=3_000_000).astype(np.float32)

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(w * (x - x.mean()) / x.std(), 1), obs=y)

    refuses(model, x, x, check=True, match="depends on the rows beside it")


def test_a_model_without_a_finite_density_is_refused():
    def model(x):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(w, 1), obs=x)
        numpyro.factor("never", -jnp.inf)

    match = "NumPyro's log density is not finite at 10 points"
    refuses(model, X[:, 0], check=True, match=match)


# Rows that cannot be streamed are evaluated at once, and said so. Their density is in
# test_from_numpyro.py.


def falls_back(model, *args, match, **options):
    with pytest.warns(UserWarning, match=match + r".*\. It is evaluated at once"):
        return target_of(model, *args, **options)


def test_a_plate_whose_latents_are_read_outside_of_it_is_evaluated_at_once():
    def model(y):
        with numpyro.plate("rows", y.shape[0]):
            level = numpyro.sample("level", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(level, 1), obs=y)
        numpyro.factor("smooth", -jnp.sum(jnp.diff(level) ** 2))

    match = "plate 'rows' cannot be streamed: sites outside of it read its latent 'level'"
    falls_back(model, X[:, 0], match=match, check=True)


def test_a_plate_without_rows_among_the_arguments_is_evaluated_at_once():
    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("others", 5):
            numpyro.sample("other", dist.Normal(level, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(level, 1), obs=y)

    match = "plate 'others' cannot be streamed: no argument of the model has its rows"
    falls_back(model, X[:, 0], plates={"rows": "data", "others": "data"}, match=match, check=True)


def test_a_model_that_fails_on_a_block_is_evaluated_at_once():
    weights = jnp.asarray(X[:, 1])

    def model(y):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(level + weights, 1), obs=y)

    match = "plate 'rows' cannot be streamed: on 3 of its rows alone, the model fails with .*Error"
    falls_back(model, X[:, 0], match=match, check=True)


# Arguments and packages.


def test_missing_arguments_are_named():
    refuses(logistic, X, match="missing a required argument: 'y'", error=TypeError)


def test_a_start_that_the_target_does_not_tell_is_asked_for():
    with pytest.raises(ValueError, match="do not tell the shapes of its latents"):
        gm.sample(jax.random.key(0), gm.LogDensity(lambda x: -(x**2)), progress=False)


def test_without_numpyro_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro", None)
    match = r"numpyro is missing: pip install 'gspmd_mcmc\[models\]' brings it"
    with pytest.raises(ImportError, match=match):
        gm.from_numpyro(logistic, X, Y)


# Cheap log probabilities.

LOGITS = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
ONES = np.random.default_rng(3).integers(0, 2, (5, 4)).astype(np.uint8)
KINDS = np.random.default_rng(4).integers(0, 4, 5)
MASK = np.random.default_rng(5).uniform(size=(5, 4)) < 0.5


def bernoulli(shape=(5, 4)):
    return dist.Bernoulli(logits=jnp.asarray(LOGITS)[: shape[0], : shape[1]])


def categorical():
    return dist.Categorical(logits=jnp.asarray(LOGITS))


DISTRIBUTIONS = {
    "Bernoulli": (bernoulli, ONES),
    "Bernoulli, one label": (bernoulli, np.uint8(1)),
    "Bernoulli, boolean labels": (bernoulli, ONES.astype(bool)),
    "Bernoulli, float labels": (bernoulli, ONES.astype(np.float32)),
    "Bernoulli, more labels": (bernoulli, np.stack([ONES] * 3)),
    "Bernoulli, one row of logits": (lambda: bernoulli((1, 4)), ONES),
    "Bernoulli, scalar": (lambda: dist.Bernoulli(logits=0.3), ONES),
    "Bernoulli of probabilities": (lambda: dist.Bernoulli(probs=0.3), ONES),
    "Independent": (lambda: bernoulli().to_event(1), ONES),
    "Independent twice": (lambda: bernoulli().to_event(1).to_event(1), ONES),
    "Independent over both": (lambda: bernoulli().to_event(2), ONES),
    "Independent of expanded": (
        lambda: dist.Bernoulli(logits=0.3).expand([5, 4]).to_event(1),
        ONES,
    ),
    "Independent of expanded, one label": (
        lambda: dist.Bernoulli(logits=0.3).expand([5, 4]).to_event(1),
        np.ones((1, 4), np.uint8),
    ),
    "Expanded": (lambda: bernoulli((1, 4)).expand([3, 5, 4]), ONES),
    "Expanded of independent": (lambda: bernoulli((1, 4)).to_event(1).expand([5]), ONES),
    "Masked": (lambda: bernoulli().mask(jnp.asarray(MASK)), ONES),
    "Masked by True": (lambda: bernoulli().mask(True), ONES),
    "Masked by False": (lambda: bernoulli().mask(False), ONES),
    "Masked, a row of masks": (lambda: bernoulli().mask(jnp.asarray(MASK)[0]), ONES),
    "Masked, more masks": (lambda: bernoulli((1, 4)).mask(jnp.asarray(MASK)), ONES[:1]),
    "Masked rows": (lambda: bernoulli().to_event(1).mask(jnp.asarray(MASK)[:, 0]), ONES),
    "Independent of masked": (lambda: bernoulli().mask(jnp.asarray(MASK)).to_event(1), ONES),
    "Masked of expanded": (lambda: bernoulli((1, 4)).expand([5, 4]).mask(jnp.asarray(MASK)), ONES),
    "Categorical": (categorical, KINDS),
    "Categorical, bytes": (categorical, KINDS.astype(np.uint8)),
    "Categorical, one kind": (categorical, np.int32(2)),
    "Categorical, more kinds": (categorical, np.stack([KINDS, KINDS[::-1]])),
    "Categorical, one row of logits": (lambda: dist.Categorical(logits=jnp.asarray(LOGITS[0])), KINDS),
    "Categorical, a batch of two axes": (
        lambda: dist.Categorical(logits=jnp.asarray(np.stack([LOGITS, -LOGITS]))),
        KINDS,
    ),
    "Categorical, independent": (lambda: categorical().to_event(1), KINDS),
    "Categorical, expanded": (
        lambda: dist.Categorical(logits=jnp.asarray(LOGITS[0])).expand([5]),
        KINDS,
    ),
    "Categorical, masked": (lambda: categorical().mask(jnp.asarray(MASK)[:, 0]), KINDS),
    "Normal": (lambda: dist.Normal(jnp.asarray(LOGITS), 1.0).to_event(1), ONES.astype(np.float32)),
    "Normal, masked": (lambda: dist.Normal(0.0, 1.0).mask(jnp.asarray(MASK)), LOGITS),
    "Dirichlet, expanded": (
        lambda: dist.Dirichlet(jnp.ones(4)).expand([5]),
        np.asarray(jax.nn.softmax(jnp.asarray(LOGITS))),
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_log_probabilities_are_numpyro_s(name):
    make, value = DISTRIBUTIONS[name]
    with jax.numpy_rank_promotion("allow"):
        got = of_numpyro.log_prob(make(), jnp.asarray(value))
        want = make().log_prob(jnp.asarray(value))
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [bernoulli, categorical], ids=["Bernoulli", "Categorical"])
def test_gradients_by_the_logits_are_numpyro_s(make):
    kind, value = type(make()), ONES if make is bernoulli else KINDS

    def total(log_prob, logits):
        with jax.numpy_rank_promotion("allow"):
            return jnp.sum(log_prob(kind(logits=logits), jnp.asarray(value)))

    got = jax.grad(lambda z: total(of_numpyro.log_prob, z))(jnp.asarray(LOGITS))
    want = jax.grad(lambda z: total(lambda d, v: d.log_prob(v), z))(jnp.asarray(LOGITS))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


# Arguments that are not data.


def test_a_numpy_scalar_may_be_the_size_of_a_plate():
    def model(num, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", num):
            numpyro.sample("y", dist.Bernoulli(logits=w), obs=y)

    y = gm.place(Y, gm.make_mesh(data=8), P("data"))
    target = gm.from_numpyro(model, np.int64(16), y, plates={"rows": "data"}, check=False)
    assert [plate.rows.num_rows for plate in target.plates] == [16]


def test_arguments_on_the_host_are_moved_to_the_device_once():
    """They would be sent again with every chunk of steps."""
    target = gm.from_numpyro(logistic, X, Y, check=False)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(target))
