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
from gspmd_mcmc.models import numpyro_sites as of_numpyro

X = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 2, 16).astype(np.uint8)


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


# What is refused.


def model(mean=lambda x, w: w, more=lambda w: None):
    """A normal of each row around a function of the data and of one latent, and something more."""

    def model(x):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean(x, w), 1), obs=x)
        more(w)

    return model


def subsampled(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", 16, subsample_size=4) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=x[rows, 0] * w), obs=y[rows])


def in_two_plates(x):
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("columns", 2, dim=-1), numpyro.plate("rows", x.shape[0], dim=-2):
        numpyro.sample("x", dist.Normal(level, 1), obs=x)


def discrete(x):
    with numpyro.plate("rows", x.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("x", dist.Normal(kind, 1), obs=x)


def param(x):
    level = numpyro.param("level", 1.0)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(level, 1), obs=x)


def closed_over(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * w + OFFSET[rows]), obs=y)


def walk(y):
    with numpyro.plate("rows", y.shape[0]):
        move = numpyro.sample("move", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(jnp.cumsum(move), 1), obs=y)


def never(w):
    numpyro.factor("never", -jnp.inf)


OFFSET = jnp.asarray(3 * X[:, 1])
COLUMN = X[:, 0]
# Totals of so many rows hide that tiles have means of their own.
MANY = np.random.default_rng(0).normal(size=3_000_000).astype(np.float32)
TWO_PLATES = {"rows": "data", "columns": "data"}
BESIDE = "depends on the rows beside it .* plates="
REFUSED = {
    "no such plate": (
        *(logistic, (X, Y), {"plates": {"users": "data"}}),
        r"plates: the model has no plate 'users'; it has \['rows'\]",
    ),
    "no such axis": (
        *(logistic, (X, Y), {"plates": {"rows": "model"}}),
        r"'rows' is to lie over .*model.* lie on a mesh with axes \['data'\]",
    ),
    "subsample": (subsampled, (X, Y), {}, "'rows' draws 4 of its 16 rows; HMC needs all of them"),
    "two sharded plates": (
        *(in_two_plates, (X,), {"plates": TWO_PLATES}),
        "site 'x' lies in plates .* which are all to be sharded",
    ),
    "discrete": (discrete, (COLUMN,), {}, "site 'kind' is discrete .* and not observed"),
    "param": (param, (COLUMN,), {}, "the model has numpyro.param sites"),
    "closed over": (
        *(closed_over, (X, Y), {"check": True}),
        "closed_over.rows, 16 rows.*: the term of row .* in another order",
    ),
    "centred": (model(mean=lambda x, w: w * (x - x.mean())), (COLUMN,), {"check": True}, BESIDE),
    "summed up": (model(mean=lambda x, w: w * jnp.cumsum(x)), (COLUMN,), {"check": True}, BESIDE),
    "walk of latents": (walk, (COLUMN,), {"check": True}, BESIDE),
    "a mean over three million rows": (
        *(model(mean=lambda x, w: w * (x - x.mean()) / x.std()), (MANY,), {"check": True}),
        BESIDE,
    ),
    "never finite": (
        *(model(more=never), (COLUMN,), {"check": True}),
        "NumPyro's log density is not finite at 10 points",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_is_wrong_is_refused(what):
    function, args, options, match = REFUSED[what]
    refuses(function, *args, match=match, **options)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(
    ("distribution", "bad", "num_bad"),
    [
        (dist.Bernoulli(logits=jnp.zeros(())), np.where(np.arange(16) == 3, 2, Y), 1),
        (dist.Poisson(2.0), np.where(np.arange(16) < 3, -1, Y.astype(int)), 3),
        (dist.Categorical(logits=jnp.zeros(3)), np.where(np.arange(16) == 15, 3, Y), 1),
        (dist.Gamma(2.0, 1.0), COLUMN, int((COLUMN < 0).sum())),
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
    refuses(model, COLUMN, bad, check=check, match=match)


def test_masked_observations_may_lie_outside_the_support():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]), numpyro.handlers.mask(mask=y < 2):
            numpyro.sample("y", dist.Bernoulli(logits=x[:, 0] * w), obs=y)

    target_of(model, X, np.where(np.arange(16) == 3, 2, Y))


def test_a_density_that_is_not_numpyro_s_is_refused(monkeypatch):
    right = of_numpyro.log_prob
    monkeypatch.setattr(of_numpyro, "log_prob", lambda *args: 1.01 * right(*args))
    refuses(logistic, X, Y, check=True, match="the streamed log density differs from NumPyro's by")


def test_what_is_not_checked_is_refused_when_it_is_sampled():
    target = target_of(model(mean=lambda x, w: w * (x - x.mean())), COLUMN)
    with pytest.raises(gm.CoupledRows, match="depends on the rows beside it"):
        gm.sample(jax.random.key(0), target, progress=False)


# Rows that cannot be streamed are evaluated at once, and said so. Their density is in
# test_from_numpyro.py.


def smoothed(y):
    with numpyro.plate("rows", y.shape[0]):
        level = numpyro.sample("level", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)
    numpyro.factor("smooth", -jnp.sum(jnp.diff(level) ** 2))


def others(w):
    with numpyro.plate("others", 5):
        numpyro.sample("other", dist.Normal(w, 1))


WHOLE = {
    "latents are read outside": (
        *(smoothed, ["rows"]),
        "plate 'rows' cannot be streamed: sites outside of it read its latent 'level'",
    ),
    "no argument": (
        *(model(more=others), ["rows", "others"]),
        "plate 'others' cannot be streamed: no argument of the model has its rows",
    ),
    "fails on a block": (
        *(model(mean=lambda x, w: w + OFFSET), ["rows"]),
        "plate 'rows' cannot be streamed: on 3 of its rows alone, the model fails with .*Error",
    ),
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_plate_that_cannot_be_streamed_is_evaluated_at_once(why):
    function, plates, match = WHOLE[why]
    with pytest.warns(UserWarning, match=match + r".*\. It is evaluated at once"):
        target_of(function, COLUMN, plates=dict.fromkeys(plates, "data"), check=True)


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


# Cheap log probabilities.

LOGITS = np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32)
ONES = np.random.default_rng(3).integers(0, 2, (5, 4)).astype(np.uint8)
KINDS = np.random.default_rng(4).integers(0, 4, 5)
MASK = np.random.default_rng(5).uniform(size=(5, 4)) < 0.5


def bernoulli(shape=(5, 4)):
    return dist.Bernoulli(logits=jnp.asarray(LOGITS)[: shape[0], : shape[1]])


def expanded():
    return dist.Bernoulli(logits=0.3).expand([5, 4])


def categorical(logits=LOGITS):
    return dist.Categorical(logits=jnp.asarray(logits))


DISTRIBUTIONS = {
    "Bernoulli": (bernoulli, ONES),
    "Bernoulli, one label": (bernoulli, np.uint8(1)),
    "Bernoulli, float labels": (bernoulli, ONES.astype(np.float32)),
    "Bernoulli, more labels": (bernoulli, np.stack([ONES] * 3)),
    "Bernoulli, one row of logits": (lambda: bernoulli((1, 4)), ONES),
    "Bernoulli, scalar": (lambda: dist.Bernoulli(logits=0.3), ONES),
    "Bernoulli of probabilities": (lambda: dist.Bernoulli(probs=0.3), ONES),
    "Independent": (lambda: bernoulli().to_event(1), ONES),
    "Independent over both": (lambda: bernoulli().to_event(2), ONES),
    "Independent of expanded": (lambda: expanded().to_event(1), ONES),
    "Independent of expanded, one label": (lambda: expanded().to_event(1), ONES[:1]),
    "Expanded": (lambda: bernoulli((1, 4)).expand([3, 5, 4]), ONES),
    "Expanded of independent": (lambda: bernoulli((1, 4)).to_event(1).expand([5]), ONES),
    "Masked": (lambda: bernoulli().mask(jnp.asarray(MASK)), ONES),
    "Masked by True": (lambda: bernoulli().mask(True), ONES),
    "Masked, a row of masks": (lambda: bernoulli().mask(jnp.asarray(MASK)[0]), ONES),
    "Masked, more masks": (lambda: bernoulli((1, 4)).mask(jnp.asarray(MASK)), ONES[:1]),
    "Masked rows": (lambda: bernoulli().to_event(1).mask(jnp.asarray(MASK)[:, 0]), ONES),
    "Independent of masked": (lambda: bernoulli().mask(jnp.asarray(MASK)).to_event(1), ONES),
    "Categorical": (categorical, KINDS),
    "Categorical, one kind": (categorical, np.int32(2)),
    "Categorical, more kinds": (categorical, np.stack([KINDS, KINDS[::-1]])),
    "Categorical, one row of logits": (lambda: categorical(LOGITS[0]), KINDS),
    "Categorical, independent": (lambda: categorical().to_event(1), KINDS),
    "Categorical, expanded": (lambda: categorical(LOGITS[0]).expand([5]), KINDS),
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
