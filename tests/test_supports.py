"""Supports that the model computes, from other latents or from data; TFP's; and ``sample_shape``."""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from tfp_like import HalfNormal

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.models import numpyro_sites as of_numpyro

MESH = gm.make_mesh(data=8)
Y = np.random.default_rng(0).normal(1, 1, size=21).astype(np.float32)


def below_a_latent(y):
    top = numpyro.sample("top", dist.Gamma(3, 1))
    level = numpyro.sample("level", dist.Uniform(0, top))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(level, 1), obs=y)


def above_a_latent(y):
    least = numpyro.sample("least", dist.Gamma(3, 1))
    levels = numpyro.sample("levels", dist.Pareto(least, 3.0).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(levels.sum(), 1), obs=y)


def rows_above_a_latent(y):
    least = numpyro.sample("least", dist.Gamma(3, 1))
    with numpyro.plate("rows", y.shape[0]):
        level = numpyro.sample("level", dist.Pareto(least, 3.0))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)


def rows_within_their_data(y):
    with numpyro.plate("rows", y.shape[0]):
        level = numpyro.sample("level", dist.Uniform(y - 1, y + 2))
        numpyro.sample("y", dist.Normal(level, 1), obs=y)


def within_the_data(y):
    level = numpyro.sample("level", dist.Uniform(y.min(), y.max()))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(level, 1), obs=y)


def as_eight_schools(y):
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Gamma(2, 1 / spread), sample_shape=(21,))
    numpyro.sample("y", dist.Normal(level, 1), obs=y)


STREAMED = (above_a_latent, rows_above_a_latent, rows_within_their_data)
WHOLE = (within_the_data, as_eight_schools)


def target_of(model):
    """A target whose log density and gradient were found to be NumPyro's."""
    if model in WHOLE:
        return gm.from_numpyro(model, Y, check=True)
    return gm.from_numpyro(model, gm.place(Y, MESH, P("data")), plates={"rows": "data"}, check=True)


@pytest.mark.parametrize("model", STREAMED + WHOLE)
def test_density_is_numpyro_s_and_starts_are_draws_from_the_prior(model):
    target = target_of(model)
    start = gm.prior_start(target)(jax.random.key(3))
    kept = jax.tree.map(np.asarray, dict(target.kept(target_position(target, start))))
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.substitute(data=kept):
        sites = numpyro.handlers.trace(model).get_trace(jnp.asarray(Y))
    for name, value in kept.items():
        assert value.shape == jnp.shape(sites[name]["value"])
        assert np.all(sites[name]["fn"].support(value)), name


def target_position(target, position):
    kernel = gm.HMC(target, step_size=0.1, num_integration_steps=1)
    return jax.jit(gm.HMC.init)(kernel, position).position


@pytest.mark.parametrize("is_of_rows", [False, True])
def test_a_jacobian_that_is_left_out_is_rejected(is_of_rows, monkeypatch):
    def model(y):  # of its own, as its program is
        least = numpyro.sample("least", dist.Gamma(4, 1))
        with numpyro.plate("rows", y.shape[0]) if is_of_rows else contextlib.nullcontext():
            level = numpyro.sample("level", dist.Pareto(least, 2.5))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(level, 1), obs=y)

    monkeypatch.setattr(of_numpyro, "log_jacobian_of", lambda *args: 0.0)
    with pytest.raises(ValueError, match="differs from NumPyro's"):
        target_of(model)


def test_draws_are_constrained():
    """Of a Uniform below a Gamma(2) the uniform is Exponential; both means are known."""

    def model():
        top = numpyro.sample("top", dist.Gamma(2, 1))
        numpyro.sample("level", dist.Uniform(0, top))

    target = gm.from_numpyro(model)
    draws = gm.sample(
        jax.random.key(0), target, num_chains=32, num_warmup=200, num_samples=200, progress=False
    )
    values = {name: np.asarray(x) for name, x in draws.position.items()}
    assert np.all((values["level"] > 0) & (values["level"] < values["top"]))
    for name, mean in (("top", 2.0), ("level", 1.0)):
        of_chains = values[name].mean(axis=1)
        error = of_chains.std(ddof=1) / np.sqrt(32)
        assert abs(of_chains.mean() - mean) < 4.5 * error


def test_what_only_the_model_can_unconstrain_is_refused():
    with pytest.raises(ValueError, match="'level': its support depends on other values of the model"):
        target_of(below_a_latent).unconstrain({"top": jnp.ones(()), "level": jnp.ones(())})


def test_bounds_of_a_plate_s_own_rows_are_computed_at_once():
    with pytest.warns(UserWarning, match="cannot be streamed.*evaluated at once"):
        gm.from_numpyro(within_the_data, gm.place(Y, MESH, P("data")), plates={"rows": "data"})


# Joint distributions.


def of_parts(least=HalfNormal(0.05)):  # noqa: B008
    """A joint of TFP's and NumPyro's distributions, some of rows, and the data of one part."""
    return gm.JointDistributionNamed(
        {
            "spread": least,
            "level": lambda spread: dist.Uniform(0, spread),
            "rows": lambda spread: gm.Sharded(HalfNormal(spread), num_rows=21),
            "y": lambda level, rows: gm.Sharded(dist.Normal(level + rows, 1.0)),
        },
        mesh=MESH,
    )


def test_a_joint_s_latents_are_constrained_by_the_model():
    joint = of_parts()
    target = joint.condition(y=Y)
    start = gm.prior_start(target)(jax.random.key(1))
    state = gm.HMC(target, step_size=0.01, num_integration_steps=1).init(start)
    kept = {n: np.asarray(x) for n, x in target.kept(state.position).items()}
    z = {name: np.asarray(x, np.float64)[: kept[name].size or 1] for name, x in start.items() if x.ndim}
    z |= {name: float(x) for name, x in start.items() if not x.ndim}
    share = 1 / (1 + np.exp(-z["level"]))
    np.testing.assert_allclose(kept["spread"], np.exp(z["spread"]), rtol=1e-5)
    np.testing.assert_allclose(kept["rows"], np.exp(z["rows"]), rtol=1e-5)
    np.testing.assert_allclose(kept["level"], share * kept["spread"], rtol=1e-5)
    log_jacobian = z["spread"] + z["rows"].sum() + np.log(kept["spread"] * share * (1 - share))
    expected = float(joint.log_prob(kept | {"y": Y})) + log_jacobian
    np.testing.assert_allclose(tree.total(state.terms), expected, rtol=1e-5)


# Arguments.


def test_a_model_s_own_check_or_plates_are_not_swallowed():
    def model(y, check=False, *, plates=None):
        below_a_latent(y + 1 if check else y)

    for name in ("check", "plates"):
        with pytest.raises(ValueError, match=rf"{name}: .*functools.partial\(model, {name}=...\)"):
            gm.from_numpyro(model, Y, **{name: {} if name == "plates" else True})
    gm.from_numpyro(model, Y)
    gm.from_numpyro(functools.partial(model, check=True), Y, check=True)

    def needs(y, check):
        below_a_latent(y)

    with pytest.raises(ValueError, match=r"functools.partial\(model, check=...\)"):
        gm.from_numpyro(needs, Y)


def test_lists_are_named_where_a_model_fails_on_them():
    with pytest.raises(TypeError, match=r"Its arguments \['y'\] are Python lists.*numpy.asarray"):
        gm.from_numpyro(below_a_latent, Y.tolist())

    def takes_lists(y, sizes):
        w = numpyro.sample("w", dist.Normal(0, 1).expand(sizes))
        numpyro.sample("y", dist.Normal(w.sum(), 1), obs=jnp.asarray(y))

    assert gm.from_numpyro(takes_lists, Y.tolist(), [3]).origin()["w"].shape == (3,)


def test_columns_of_pandas_are_arrays():
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(Y, index=range(5, 26))
    position = gm.from_numpyro(below_a_latent, column).origin()
    ours, arrays = (tree.total(gm.from_numpyro(below_a_latent, y).terms(position)) for y in (column, Y))
    assert ours == arrays
    labels = pandas.Series(["a", "b", "a"])
    with pytest.raises(ValueError, match=r"argument \['y'\]: expected an array of numbers"):
        gm.from_numpyro(below_a_latent, labels)
