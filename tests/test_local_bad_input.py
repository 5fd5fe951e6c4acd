"""What is wrong with local latents is said in an error that names the latent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import prior_of_mean

import gspmd_mcmc as gm

MESH = gm.make_mesh(data=8)
ROWS = gm.place(np.ones(13, np.float32), MESH, P("data"))
FEWER_ROWS = gm.place(np.ones(12, np.float32), MESH, P("data"))
POSITION = {"mean": np.zeros(16, np.float32), "theta": np.zeros(13, np.float32)}


def log_likelihood(x, y):
    return -0.5 * (y - x["theta"]) ** 2 - 0.5 * (x["theta"] - jnp.mean(x["mean"])[None]) ** 2


def reads_theta(x, y):
    return -(x["theta"] ** 2) * y


def reads_mean_only(x, y):
    return -0.5 * (y - jnp.mean(x["mean"])[None]) ** 2


def prior_of_theta(x):
    return prior_of_mean(x), -0.5 * x["theta"] ** 2


def sees_its_own(x, y):
    """NaN in the row of a two."""
    assert set(x) == {"mean", "rho"}, "not its own latents"
    return jnp.where(y == 2, jnp.nan, -((x["rho"] - jnp.mean(x["mean"])[None]) ** 2))


def posterior(*more, local: Any = "theta", prior=prior_of_mean, likelihood=log_likelihood):
    return gm.Posterior(prior, gm.Plate(likelihood, ROWS, local=local), *more)


def init(target, position):
    return gm.HMC(target, 0.1, 2).init(position)


def sample(target, position):
    options = {"num_warmup": 0, "num_samples": 1, "progress": False}
    return gm.sample(jax.random.key(0), target, position, kernel=gm.HMC(target, 0.1, 2), **options)


def over_rows(*shape):
    return jax.device_put(jnp.zeros(shape), NamedSharding(MESH, P("data")))


def place(num_rows):
    return gm.place(np.zeros(num_rows, np.float32), MESH, P("data"))


def test_what_is_right_is_accepted():
    """The same calls as below, with nothing wrong: rows as they are, padded by `place`, or in full."""
    for theta in (POSITION["theta"], place(13), over_rows(16), jnp.zeros(13)):
        assert np.isfinite(init(posterior(), POSITION | {"theta": theta}).log_density)
    alone = gm.Posterior(None, gm.Plate(reads_theta, ROWS, local=True))
    state = init(alone, {"theta": np.full(13, 2, np.float32)})
    np.testing.assert_allclose(state.log_density, -4 * 13, rtol=1e-6)


OF_13 = r"position \['theta'\] is local to a plate of 13 rows \+ 3 pad.*leading axis of 13, got"
NO_PREFIX = r"local: .* is no prefix of the parameters .*'theta'"
TWO = gm.place(np.where(np.arange(12) == 7, 2, 1).astype(np.float32), MESH, P("data"))
# Of each the error, a target, and what the position has besides.
WRONG = {
    "12 rows": (OF_13, posterior, {"theta": np.zeros(12, np.float32)}),
    "14 rows": (OF_13, posterior, {"theta": np.zeros(14, np.float32)}),
    "12 rows of 3": (OF_13, posterior, {"theta": np.zeros((12, 3), np.float32)}),
    "a scalar": (OF_13, posterior, {"theta": np.float32(0)}),
    "14 rows, padded": (OF_13 + " Padded.*14 rows", posterior, {"theta": place(14)}),
    "plates of other rows": (
        r"\['theta'\] is local to plates of other rows: 13 rows.*, and 12 rows",
        lambda: posterior(gm.Plate(reads_theta, FEWER_ROWS, local="theta")),
        {},
    ),
    "no such name": (
        r"no leaf 'thata'; they have \['mean', 'theta'\]",
        lambda: posterior(local="thata"),
        {},
    ),
    "one name of two": ("no leaf 'rho'; they have", lambda: posterior(local=("theta", "rho")), {}),
    "prefix of one": (NO_PREFIX, lambda: posterior(local={"theta": True}), {}),
    "prefix of a tuple": (NO_PREFIX, lambda: posterior(local=(False, True)), {}),
    "prefix that is deeper": (NO_PREFIX, lambda: posterior(local={"theta": {"x": True}}), {}),
    "unread": (
        r"the log likelihood does not read \['theta'\]",
        lambda: posterior(likelihood=reads_mean_only),
        {},
    ),
    "shared, over the rows' axis": (
        r"position \['mean'\] lies over mesh axis 'data'.*Plate\(\.\.\., local=",
        posterior,
        {"mean": over_rows(16)},
    ),
    "shared and padded": (r"position \['mean'\]: got Padded", posterior, {"mean": place(15)}),
    "read by the prior": (
        "log_prior: .theta. is local to a plate",
        lambda: posterior(prior=prior_of_theta),
        {},
    ),
    "no prior": (
        r"log_prior: it is None, but rows share .*'mean'.*log_prior=lambda",
        lambda: posterior(prior=None),
        {},
    ),
    "a row of a second plate": (
        "sees_its_own.*1 rows have a term that is NaN .* the first is row 7",
        lambda: posterior(gm.Plate(sees_its_own, TWO, local="rho")),
        {"rho": np.zeros(12, np.float32)},
    ),
    "a value": (
        r"position \['theta'\] has",
        posterior,
        {"theta": np.where(np.arange(13) == 12, np.nan, 0).astype(np.float32)},
    ),
}


@pytest.mark.parametrize("start", [init, sample])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what, start):
    """By a kernel and by `sample`, which must not hide the error while it looks for chains."""
    match, make, more = WRONG[what]
    with pytest.raises(ValueError, match=match) as error:
        start(make(), POSITION | more)
    assert isinstance(error.value, gm.NonFiniteStart) == (
        what in ("a value", "a row of a second plate")
    )


def test_a_metric_of_other_rows_is_named():
    metric = {"mean": np.ones(16), "theta": np.ones(12)}
    with pytest.raises(ValueError, match=r"\['theta'\] is local to a plate of 13 rows.*got"):
        gm.HMC(posterior(), 0.1, 2, metric)


@pytest.mark.parametrize(
    "wrong", [3, 1.5, b"theta", ["theta", True], {"theta": 1}, object(), np.ones(2)]
)
def test_local_of_another_type_is_shown(wrong):
    with pytest.raises(TypeError, match="local: expected names of leaves, or a tree of True and False"):
        gm.Plate(log_likelihood, ROWS, local=wrong)
