"""Starts drawn from the prior: of NumPyro models and joint distributions, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import prior_start, tree
from gspmd_mcmc.targets.local import arrays

numpyro = pytest.importorskip("numpyro")
dist = numpyro.distributions

KEY = jax.random.key(0)
NUM_DRAWS = 4000
ROWS = 13


def hierarchy(count):
    mean = numpyro.sample("mean", dist.Normal(3, 0.5))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("patients", len(count)):
        effect = numpyro.sample("effect", dist.Normal(mean, sd))
        numpyro.sample("count", dist.Poisson(jnp.exp(effect)), obs=count)


def regression(x):
    root = gm.JointDistributionCoroutine.Root
    slope = yield root(dist.LogNormal(1, 0.5), name="slope")
    effect = yield gm.Sharded(dist.Normal(slope, 0.5), num_rows=ROWS, name="effect")
    yield gm.Sharded(dist.Normal(x + effect, 1), name="y")


COUNT = np.random.default_rng(0).poisson(3.0, size=ROWS)
X = np.linspace(-1, 1, ROWS, dtype=np.float32)


def numpyro_target(mesh=None):
    count = COUNT if mesh is None else gm.place(COUNT, mesh, P("data"))
    plates = None if mesh is None else {"patients": "data"}
    return gm.from_numpyro(hierarchy, count, plates=plates, check=False)


def joint(mesh):
    return gm.JointDistributionCoroutine(regression, gm.place(X, mesh, P("data")), mesh=mesh)


def joint_target(mesh=None):
    mesh = mesh or gm.make_mesh(data=1, devices=jax.devices()[:1])
    return joint(mesh).condition(y=X)


@pytest.fixture(scope="module")
def drawn():
    """Four thousand starts of each model, constrained."""
    keys = jax.random.split(jax.random.key(seed(0)), NUM_DRAWS)
    found = {}
    for make in (numpyro_target, joint_target):
        target = make()
        found[make] = target.params(jax.jit(jax.vmap(prior_start(target)))(keys))
    return found


def check_distribution(x, cdf, what):
    within(-np.log10(stats.kstest(np.ravel(x), cdf).pvalue), 4, f"-log10 of p of {what}")


@pytest.mark.statistical
def test_starts_of_a_numpyro_model_follow_its_prior(drawn):
    """Kolmogorov's test; an observed site is no reason to leave the prior."""
    params = drawn[numpyro_target]
    assert jax.tree.map(jnp.shape, params) == {
        "mean": (NUM_DRAWS,),
        "sd": (NUM_DRAWS,),
        "effect": (NUM_DRAWS, ROWS),
    }
    check_distribution(params["mean"], stats.norm(3, 0.5).cdf, "mean")
    check_distribution(params["sd"], stats.halfnorm.cdf, "sd")
    z = (params["effect"] - params["mean"][:, None]) / params["sd"][:, None]
    check_distribution(z, stats.norm.cdf, "effect")
    # The control: draws about zero, as `uniform_start` makes them, are told from the prior.
    with pytest.raises(AssertionError, match="p of moved"):
        check_distribution(params["mean"] - 0.1, stats.norm(3, 0.5).cdf, "moved means")


@pytest.mark.statistical
def test_starts_of_a_joint_distribution_follow_its_prior(drawn):
    params = drawn[joint_target]
    assert jax.tree.map(jnp.shape, params) == {"slope": (NUM_DRAWS,), "effect": (NUM_DRAWS, ROWS)}
    check_distribution(params["slope"], stats.lognorm(0.5, scale=np.e).cdf, "slope")
    z = (params["effect"] - params["slope"][:, None]) / 0.5
    check_distribution(z, stats.norm.cdf, "effect")


def test_a_start_of_a_joint_distribution_is_what_its_sample_draws():
    mesh = gm.make_mesh(data=4, devices=jax.devices()[:4])
    target = joint_target(mesh)
    params = target.params(prior_start(target)(KEY))
    value = joint(mesh).sample(KEY)
    np.testing.assert_allclose(params["slope"], value.slope, rtol=1e-5)
    np.testing.assert_allclose(params["effect"], np.asarray(value.effect.values)[:ROWS], rtol=1e-5)


@pytest.mark.parametrize("make", [numpyro_target, joint_target])
def test_chains_start_alike_on_every_mesh_and_rows_are_laid_out(make):
    """13 rows on 4 devices have a pad; nothing is sampled, so that draws are where chains start."""
    starts = []
    for mesh in (None, gm.make_mesh(chains=2, data=4)):
        target = make(mesh)
        options = {"mesh": mesh, "num_warmup": 0, "num_samples": 0, "progress": False}
        kernel = gm.HMC(target, 0.1, 1)
        draws = gm.sample(KEY, target, prior_start(target), kernel=kernel, **options)
        starts.append(arrays(draws.state.position))
    assert starts[1]["effect"].sharding.spec == P("chains", "data")
    for name, x in starts[0].items():
        there = np.asarray(starts[1][name])
        np.testing.assert_allclose(
            x, there[:, :ROWS] if there.ndim > 1 else there, rtol=2e-5, atol=1e-6
        )
        assert len(np.unique(np.asarray(x).reshape(4, -1)[:, 0])) == 4


def crossed(y, offset):
    with numpyro.plate("items", 5, dim=-2), numpyro.plate("people", ROWS, dim=-1):
        x = numpyro.sample("x", dist.Normal(offset, 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y.T)


def test_a_latent_whose_rows_are_not_numpyros_first_axis_has_them_first():
    mesh = gm.make_mesh(data=4, devices=jax.devices()[:4])
    y, offset = np.zeros((ROWS, 5), np.float32), 100 * np.arange(ROWS, dtype=np.float32)
    placed = gm.place({"y": y, "offset": offset}, mesh, P("data"))
    target = gm.from_numpyro(crossed, **placed, plates={"people": "data"}, check=False)
    position = prior_start(target)(KEY)
    assert dict(target.latents)["x"].shape == position["x"].shape == (ROWS, 5)
    np.testing.assert_allclose(position["x"], np.tile(offset[:, None], 5), atol=6)


@pytest.mark.parametrize(
    "target",
    [gm.LogDensity(lambda x: -(x**2)), gm.Posterior(lambda p: -(p["w"] ** 2))],
)
def test_a_target_of_functions_has_no_prior(target):
    with pytest.raises(TypeError, match=f"got {type(target).__name__}, which was written as functions"):
        prior_start(target)


def test_an_improper_prior_is_named():
    def improper(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        flat = numpyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), ()))
        numpyro.sample("y", dist.Normal(mean + flat, 1), obs=y)

    target = gm.from_numpyro(improper, np.zeros(3, np.float32), check=False)
    with pytest.raises(ValueError, match="site 'flat' has a distribution that cannot be drawn from"):
        prior_start(target)


def test_the_prior_enters_no_program_of_the_sampler():
    """The arrays that the model was called with are not held, nor passed on, a second time."""
    target = numpyro_target()
    without = tree.replace(target, prior=None)
    held = {id(x) for x in jax.tree.leaves(without)}
    assert {id(x) for x in jax.tree.leaves(target)} == held

    def bytes_of_arguments(target):
        kernel = gm.HMC(target, 0.1, 2)
        state = kernel.init(target.origin())
        program = jax.jit(gm.HMC.step).lower(kernel, jax.random.key(0), state).compile()
        memory = program.memory_analysis()
        assert memory is not None
        return memory.argument_size_in_bytes

    assert bytes_of_arguments(target) == bytes_of_arguments(without)
    with pytest.raises(TypeError, match="prior_start"):
        prior_start(without)
