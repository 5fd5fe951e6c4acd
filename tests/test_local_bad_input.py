"""What is wrong with local latents is said in an error that names the latent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm

MESH = gm.make_mesh(data=8)
ROWS = gm.place(np.ones(13, np.float32), MESH, P("data"))
FEWER_ROWS = gm.place(np.ones(12, np.float32), MESH, P("data"))
POSITION = {"mean": np.zeros(16, np.float32), "theta": np.zeros(13, np.float32)}


def log_prior(x):
    return -0.5 * x["mean"] ** 2


def log_likelihood(x, y):
    return -0.5 * (y - x["theta"]) ** 2 - 0.5 * (x["theta"] - jnp.mean(x["mean"])[None]) ** 2


def posterior(local: Any = "theta", prior=log_prior, likelihood=log_likelihood, rows=ROWS):
    return gm.Posterior(prior, gm.Plate(likelihood, rows, local=local))


def init(target, position):
    return gm.HMC(target, 0.1, 2).init(position)


def sample(target, position):
    kernel = gm.HMC(target, 0.1, 2)
    return gm.sample(
        jax.random.key(0), target, position, kernel=kernel, num_warmup=0, num_samples=1, progress=False
    )


def check_refused(match, target, position=POSITION, kind: type[Exception] = ValueError):
    """By a kernel and by `sample`, which must not hide the error while it looks for chains."""
    for start in (init, sample):
        with pytest.raises(kind, match=match):
            start(target, position)


def over_rows(*shape):
    return jax.device_put(jnp.zeros(shape), NamedSharding(MESH, P("data")))


def test_what_is_right_is_accepted():
    """The same calls as below, with nothing wrong: rows as they are, padded by `place`, or in full."""
    padded = gm.place(POSITION["theta"], MESH, P("data"))
    for theta in (POSITION["theta"], padded, over_rows(16), list(np.zeros(13, np.float32))):
        theta = jnp.asarray(theta) if isinstance(theta, list) else theta
        assert np.isfinite(init(posterior(), POSITION | {"theta": theta}).log_density)


# Rows.


@pytest.mark.parametrize("shape", [(12,), (14,), (12, 3), ()])
def test_a_local_latent_of_other_rows_is_named(shape):
    match = r"position \['theta'\] is local to a plate of 13 rows \+ 3 pad.*leading axis of 13, got"
    check_refused(match, posterior(), POSITION | {"theta": np.zeros(shape, np.float32)})


def test_a_padded_local_latent_of_other_rows_is_named():
    theta = gm.place(np.zeros(14, np.float32), MESH, P("data"))
    match = r"position \['theta'\] is local .*leading axis of 13, got Padded.*14 rows"
    check_refused(match, posterior(), POSITION | {"theta": theta})


def test_a_metric_of_other_rows_is_named():
    metric = {"mean": np.ones(16), "theta": np.ones(12)}
    with pytest.raises(ValueError, match=r"\['theta'\] is local to a plate of 13 rows.*got"):
        gm.HMC(posterior(), 0.1, 2, metric)


def reads_theta(x, y):
    return -(x["theta"] ** 2) * y


def test_a_latent_that_is_local_to_plates_of_different_rows_is_named():
    fewer = gm.Plate(reads_theta, FEWER_ROWS, local="theta")
    target = gm.Posterior(log_prior, *posterior().plates, fewer)
    check_refused(r"\['theta'\] is local to plates of other rows: 13 rows.*, and 12 rows", target)


# What `local` says.


def test_a_name_that_is_not_there_is_named():
    check_refused(r"no leaf 'thata'; they have \['mean', 'theta'\]", posterior(local="thata"))
    check_refused(r"no leaf 'rho'; they have \['mean', 'theta'\]", posterior(local=("theta", "rho")))


@pytest.mark.parametrize("prefix", [{"theta": True}, (False, True), {"theta": {"x": True}}])
def test_a_prefix_that_does_not_fit_is_shown_with_the_parameters(prefix):
    check_refused(r"local: .* is no prefix of the parameters .*'theta'", posterior(local=prefix))


@pytest.mark.parametrize(
    "wrong", [3, 1.5, b"theta", ["theta", True], {"theta": 1}, object(), np.ones(2)]
)
def test_local_of_another_type_is_shown(wrong):
    with pytest.raises(TypeError, match="local: expected names of leaves, or a tree of True and False"):
        gm.Plate(log_likelihood, ROWS, local=wrong)


def reads_mean_only(x, y):
    return -0.5 * (y - jnp.mean(x["mean"])[None]) ** 2


def test_a_local_latent_that_the_likelihood_does_not_read_is_named():
    match = r"the log likelihood does not read \['theta'\]"
    check_refused(match, posterior(likelihood=reads_mean_only))


# What is shared.


def test_a_shared_latent_over_the_axis_of_the_rows_is_named():
    match = r"position \['mean'\] lies over mesh axis 'data'.*Plate\(\.\.\., local="
    check_refused(match, posterior(), POSITION | {"mean": over_rows(16)})


def test_a_padded_shared_latent_is_named():
    mean = gm.place(np.zeros(15, np.float32), MESH, P("data"))
    check_refused(r"position \['mean'\]: got Padded", posterior(), POSITION | {"mean": mean})


def prior_of_theta(x):
    return log_prior(x), -0.5 * x["theta"] ** 2


def test_a_log_prior_that_asks_for_a_local_latent_is_refused():
    check_refused("log_prior: .theta. is local to a plate", posterior(prior=prior_of_theta))


def test_shared_latents_need_a_log_prior():
    check_refused(
        r"log_prior: it is None, but rows share .*'mean'.*log_prior=lambda", posterior(prior=None)
    )


def test_local_latents_alone_need_none():
    target = gm.Posterior(None, gm.Plate(reads_theta, ROWS, local=True))
    state = init(target, {"theta": np.full(13, 2, np.float32)})
    np.testing.assert_allclose(state.log_density, -4 * 13, rtol=1e-6)


# Terms that are not finite.


def sees_its_own(x, y):
    """NaN in the row of a two."""
    assert set(x) == {"mean", "rho"}, "not its own latents"
    return jnp.where(y == 2, jnp.nan, -((x["rho"] - jnp.mean(x["mean"])[None]) ** 2))


def test_a_row_of_one_plate_of_two_that_is_not_finite_is_named():
    y = np.ones(12, np.float32)
    y[7] = 2
    plate = gm.Plate(sees_its_own, gm.place(y, MESH, P("data")), local="rho")
    target = gm.Posterior(log_prior, *posterior().plates, plate)
    check_refused(
        "sees_its_own.*1 rows have a term that is NaN .* the first is row 7",
        target,
        POSITION | {"rho": np.zeros(12, np.float32)},
        gm.NonFiniteStart,
    )


def test_a_row_that_is_not_finite_is_named():
    theta = POSITION["theta"].copy()
    theta[12] = np.nan
    check_refused(
        r"position \['theta'\] has", posterior(), POSITION | {"theta": theta}, gm.NonFiniteStart
    )
