"""Kinds of NumPyro models that are sampled as NumPyro samples them.

A mask within an event, a likelihood that is left out, a latent with no freedom, a network whose
parameters have priors, and models in several threads.
"""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import threading
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of
from numpyro import handlers
from numpyro.infer.util import potential_energy

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets.local import lay_out

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
Y = RNG.exponential(size=(16, 3)).astype(np.float32)
SEEN = np.ones((16, 3), bool)
Y[2, 1], SEEN[2, 1] = -1, False
X = RNG.normal(size=16).astype(np.float32)
PLATES = {"rows": "data"}


def check_density(model, *args, mesh="8"):
    """Hold the log density against NumPyro's, and return the target."""
    target = gm.from_numpyro(model, *gm.place(args, mesh_of(mesh), P("data")), plates=PLATES)
    position = {n: jnp.full(x.shape, 0.3) for n, x in target.origin().items()}
    terms = jax.jit(lambda target, z: target.terms(z))(target, lay_out(target, position))
    with jax.numpy_rank_promotion("allow"):
        want = -potential_energy(handlers.seed(model, 0), jax.tree.map(jnp.asarray, args), {}, position)
    np.testing.assert_allclose(tree.total(terms), want, rtol=1e-5)
    return target


# Masks.


def masked_within_an_event(y, seen, outer=True):
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("rows", y.shape[0]):
        one = dist.Exponential(rate).expand([3]).mask(seen).to_event(1)
        numpyro.sample("y", one.mask(outer), obs=y)


def masked_by_a_handler(y, seen):
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    rows, columns = numpyro.plate("rows", y.shape[0], dim=-2), numpyro.plate("columns", 3, dim=-1)
    with rows, columns, handlers.mask(mask=seen):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


@pytest.mark.parametrize("model", [masked_within_an_event, masked_by_a_handler])
def test_what_is_masked_may_be_impossible(model):
    check_density(model, Y, SEEN)


def test_what_is_not_masked_is_refused():
    others = SEEN.copy()
    others[2] = [False, True, False]
    with pytest.raises(ValueError, match="site 'y': 1 of its observations lie outside"):
        gm.from_numpyro(masked_within_an_event, Y, others)
    shown = partial(masked_within_an_event, outer=False)  # all is masked
    gm.from_numpyro(shown, Y, others, check=False)


# The prior alone.


def likelihood_left_out(x, is_prior=True):
    w = numpyro.sample("w", dist.Normal(1, 2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.deterministic("mean", w * x)
        if not is_prior:
            numpyro.sample("y", dist.Normal(w * x, 1), obs=x)


@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_a_plate_without_sample_sites_leaves_the_prior():
    target = check_density(likelihood_left_out, X)
    assert not target.plates
    kernel = gm.HMC(target, 1.0, 3)
    draws = gm.sample(KEY, target, kernel=kernel, num_warmup=0, num_samples=10, mesh=mesh_of("8"))
    mean = np.asarray(draws.position["w"])[..., None] * X
    np.testing.assert_allclose(draws.position["mean"], mean, rtol=1e-5)
    assert len(check_density(partial(likelihood_left_out, is_prior=False), X).plates) == 1


# Networks.


def network(y, layers=("bias", "weight")):
    """What `random_flax_module` does: a param site of all parameters, which priors replace."""
    params = numpyro.param("net$params", initial)
    params = params | {n: numpyro.sample(f"net/{n}", dist.Normal(0, 1)) for n in layers}
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(y * params["weight"] + params["bias"], 1), obs=y)


def initial(key):
    return {"bias": jnp.zeros(()), "weight": jax.random.normal(key, ())}


def test_a_network_whose_parameters_have_priors_is_sampled():
    target = check_density(network, X)
    assert set(target.origin()) == {"net/bias", "net/weight"}


def test_a_parameter_without_a_prior_is_refused():
    match = r"its density reads \['net\$params'\].*random_flax_module.*name all"
    with pytest.raises(ValueError, match=match):
        gm.from_numpyro(partial(network, layers=("bias",)), X)


# Latents without freedom.


def simplex_of_one(y):
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(1)))
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    numpyro.sample("other", dist.Normal(0, 1))  # MAMS and MCLMC need two dimensions
    nobody = numpyro.sample("nobody", dist.Normal(0, 1).expand([0]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        of_row = numpyro.sample("of_row", dist.Dirichlet(jnp.ones(1)))
        numpyro.sample("y", dist.Normal(mean * share[0] * of_row[..., 0] + nobody.sum(), 1), obs=y)


KERNELS = {
    "HMC": lambda target: gm.HMC(target, 0.1, 5),
    "NUTS": lambda target: gm.NUTS(target, 0.1),
    "MAMS": lambda target: gm.MAMS(target, 0.1, 1.0),
    "MCLMC": lambda target: gm.MCLMC(target, 0.1, 1.0),
    "JitteredHMC": lambda target: gm.JitteredHMC(target, 0.1, 1.0),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_a_latent_without_freedom_is_sampled(name):
    target = simplex_target()
    options = {"num_chains": 4, "num_warmup": 200, "num_samples": 200}
    draws = gm.sample(KEY, target, kernel=KERNELS[name](target), **options)
    np.testing.assert_array_equal(draws.position["share"], np.ones((4, 200, 1)))
    np.testing.assert_array_equal(draws.position["of_row"], np.ones((4, 200, 16, 1)))
    assert draws.position["nobody"].shape == (4, 200, 0)
    summary = draws.summary()
    error = np.mean(draws.position["mean"]) - X.sum() / 17
    assert abs(error) < 5 * summary.mcse_mean["mean"]


@cache
def simplex_target():
    return check_density(simplex_of_one, X)


# Threads.


def regression(number, x, y):
    w = numpyro.sample(f"w{number}", dist.Normal(0, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(w * x, sd), obs=y)


def test_models_may_be_sampled_in_threads():
    found, errors, barrier = {}, [], threading.Barrier(4)

    def sample(number):
        try:
            barrier.wait()
            target = gm.from_numpyro(partial(regression, number), X, 2 * X)
            kernel = gm.HMC(target, 0.05, 3)
            options = {"kernel": kernel, "num_chains": 2, "num_warmup": 0, "num_samples": 5}
            found[number] = gm.sample(jax.random.key(1), target, **options).position
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=sample, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(found[i].keys() == {f"w{i}", "sd"} for i in range(4))
    alone = gm.from_numpyro(partial(regression, 0), X, 2 * X)
    options = {"num_chains": 2, "num_warmup": 0, "num_samples": 5}
    again = gm.sample(jax.random.key(1), alone, kernel=gm.HMC(alone, 0.05, 3), **options)
    np.testing.assert_array_equal(found[0]["w0"], again.position["w0"])
