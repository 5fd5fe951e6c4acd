"""Groups within groups: numbered in each, with latents that lie where the outer group lies."""

from functools import cache

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from models import check_close
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets import local
from gspmd_mcmc.views.program.hlo import KINDS

KEY = jax.random.key(seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:Groups")

# mu ~ N(0, 1), a school ~ N(mu, 1), a class of it ~ N(school, 0.5²), a pupil ~ N(class, 1). School 3
# has no class "c", and an "a" has nothing to do with another school's.
NUM_SCHOOLS = 12
rng = np.random.default_rng(0)
SCHOOL = rng.permutation(np.repeat(np.arange(NUM_SCHOOLS), rng.integers(15, 60, NUM_SCHOOLS)))
NUMBER = rng.integers(0, np.where(SCHOOL == 3, 2, 3))
CLASS = np.array(["a", "b", "c"])[NUMBER]
SCORE = (np.sin(SCHOOL) + 0.5 * np.cos(5 * SCHOOL + NUMBER) + rng.normal(size=len(SCHOOL))).astype("f4")
LOCAL = ("school", "class")
POSITION = {"mu": (), "school": (NUM_SCHOOLS,), "class": (NUM_SCHOOLS, 3)}


def log_prior(x):
    return -0.5 * x["mu"] ** 2


def of_school(x, row):
    of_classes = -2 * (x["class"] - x["school"][:, None]) ** 2
    terms = jnp.where(row["is_class"], of_classes, -0.5 * x["class"] ** 2)
    return -0.5 * (x["school"] - x["mu"]) ** 2 + jnp.sum(terms, axis=1)


def of_pupil(x, row):
    return -0.5 * (row["score"] - gm.lookup_within(x["class"], row["class"])) ** 2


def schools_on(name):
    mesh = None if name == "none" else models.mesh_of(name)
    return gm.Groups(SCHOOL, mesh, P() if mesh is None else P("data"))


def target_on(name, number=None):
    schools = schools_on(name)
    classes = schools.subgroups(CLASS)
    rows = {"score": SCORE, "class": classes.number if number is None else number}
    return gm.Posterior(
        log_prior,
        gm.Plate(of_school, schools.place({"is_class": classes.is_there}), local=LOCAL),
        gm.Plate(of_pupil, schools.place_rows(rows), local="class"),
    )


def by_index(x):
    """The log density by an index of each pupil's class, all at once."""
    is_class = np.ones((NUM_SCHOOLS, 3), bool)
    is_class[3, 2] = False
    of_pupils = -0.5 * (SCORE - x["class"][SCHOOL, NUMBER]) ** 2
    return tree.total((log_prior(x), of_school(x, {"is_class": is_class}), of_pupils))


def test_subgroups_are_numbered_in_each_group():
    classes = schools_on("none").subgroups(CLASS)
    np.testing.assert_array_equal(classes.number, NUMBER)
    assert (len(classes), classes.is_there.shape) == (35, (NUM_SCHOOLS, 3))
    assert [list(classes.labels[i]) for i in (0, 3)] == [["a", "b", "c"], ["a", "b", np.ma.masked]]
    np.testing.assert_array_equal(classes.is_there.sum(axis=1), [3, 3, 3, 2, *[3] * 8])
    assert "35 in 12 groups, at most 3" in repr(classes)


@pytest.mark.parametrize("name", ["none", "8"])
def test_density_and_gradient_are_those_of_an_index(name):
    with jax.enable_x64(True):
        values = np.random.default_rng(1)
        position = {n: jnp.asarray(values.normal(size=s)) for n, s in POSITION.items()}
        target = target_on(name)
        terms, grad = target.terms_and_grad(local.lay_out(target, position))
        found = local.cut(target, grad) | {"log density": tree.total(terms)}
        value, expected = jax.value_and_grad(by_index)(position)
        check_close(found, expected | {"log density": value}, 1e-12)
        shifted = dict(position, **{"class": jnp.roll(position["class"], 1, axis=1)})
        with pytest.raises(AssertionError, match="differs by"):
            check_close({"value": by_index(shifted)}, {"value": value}, 1e-12)


def test_a_gradient_sends_what_all_schools_share_and_gathers_nothing():
    target = target_on("8")
    position = local.lay_out(target, {n: jnp.zeros(s) for n, s in POSITION.items()})
    classes = position["class"].values
    assert classes.sharding.shard_shape(classes.shape) == (2, 3)
    found = gm.communication(lambda t, x: t.grad(x), target, position)
    assert {k: found.count(k) for k in KINDS} == dict.fromkeys(KINDS, 0) | {"all-reduce": 1}
    assert sum(c.num_bytes for c in found.collectives) == 4, "the gradient of mu"


@cache
def moments():
    """Means and variances: the log density is quadratic."""
    with jax.enable_x64(True):
        origin, unravel = ravel_pytree({n: jnp.zeros(s) for n, s in POSITION.items()})
        grad, hessian = (f(lambda x: by_index(unravel(x)))(origin) for f in (jax.grad, jax.hessian))
        covariance = np.linalg.inv(-hessian)
        return unravel(jnp.asarray(covariance @ grad)), unravel(jnp.asarray(np.diag(covariance)))


def check_posterior(number=None):
    target = target_on("8", number)
    options = {"num_warmup": 150, "num_samples": 750, "num_chains": 4, "progress": False}
    position = {n: jnp.zeros(s) for n, s in POSITION.items()}
    kernel = gm.HMC(target, 0.1, 4, jitter=0.5)
    draws = gm.sample(KEY, target, position, kernel=kernel, **options)
    mean, variance = moments()
    for name in mean:
        centred = np.asarray(draws.position[name], np.float64) - np.asarray(mean[name])
        worst = max(models.moments_in_mcse(centred, np.sqrt(np.asarray(variance[name]))))
        within(worst, 5, f"standard errors off in {name}")


@pytest.mark.statistical
def test_draws_have_the_posterior_s_means_and_variances():
    check_posterior()


@pytest.mark.statistical
def test_draws_of_pupils_in_a_wrong_class_are_rejected():
    wrong = np.where(SCHOOL == 7, (NUMBER + 1) % 3, NUMBER).astype(np.int32)
    with pytest.raises(AssertionError, match="standard errors off in class"):
        check_posterior(wrong)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (CLASS[1:], f"keys: expected one for each of {len(SCHOOL)} rows"),
        ([None, *CLASS[1:]], "keys: 1 rows have no key, the first is row 0"),
        (NUMBER + 0.5, "keys: expected integers or strings, got float64"),
    ],
)
def test_bad_keys_are_named(keys, said):
    with pytest.raises(ValueError, match=said):
        schools_on("none").subgroups(keys)


def test_a_value_of_the_row_s_own_is_read_and_no_other():
    values = jnp.array([[1.0, jnp.inf], [jnp.nan, 4.0], [5.0, 6.0], [7.0, 8.0]])
    index = jnp.array([0, 1, 2, -1])
    np.testing.assert_array_equal(gm.lookup_within(values, index), [1, 4, np.nan, np.nan])
    grad = jax.grad(lambda x: jnp.sum(gm.lookup_within(x, index[:2])))(values[:2])
    np.testing.assert_array_equal(grad, [[1, 0], [0, 1]])
    wide = jnp.arange(600.0).reshape(1, 300, 2)  # more than a byte counts
    np.testing.assert_array_equal(gm.lookup_within(wide, jnp.array([255], jnp.uint8)), [[510, 511]])
    np.testing.assert_array_equal(gm.lookup_within(wide, jnp.array([299])), [[598, 599]])


def test_what_is_no_value_or_no_index_is_named():
    with pytest.raises(TypeError, match="lookup_within: index: expected one integer per row"):
        gm.lookup_within(jnp.zeros((4, 2)), jnp.zeros(4))
    with pytest.raises(ValueError, match="lookup_within: values: expected floating parameters"):
        gm.lookup_within(jnp.zeros(4), jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="lookup_within: values: expected those of 4 rows"):
        gm.lookup_within(jnp.zeros((3, 2)), jnp.zeros(4, jnp.int32))
