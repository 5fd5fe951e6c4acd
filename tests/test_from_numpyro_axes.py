"""Where a NumPyro model has the rows of a sharded plate, draws and parameters have them too.

The truth is NumPyro's: its `log_likelihood`, `Predictive` and `log_density` take these values.
"""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from models import mesh_of
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive, log_likelihood
from numpyro.infer.util import log_density, potential_energy, unconstrain_fn

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import run_state

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
LOW, HIGH = np.zeros((4, 1), np.float32), np.arange(1, 5, dtype=np.float32)[:, None]


def columns(y):
    """Rows are the last dimension of a nested plate: a latent in each, one in rows alone, one whole."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    rows = numpyro.plate("rows", y.shape[0], dim=-1)
    with rows:
        level = numpyro.sample("level", dist.Normal(mean, 1))
    with numpyro.plate("columns", y.shape[1], dim=-2), rows:
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        share = numpyro.sample("share", dist.Dirichlet(jnp.asarray([2.0, 1.0, 3.0])))
        double = numpyro.deterministic("double", 2 * scale)
        numpyro.sample("y", dist.Normal(level + double * share[..., 1], 0.5), obs=y.T)


def in_a_scan(y):
    def step(last, x):
        with numpyro.plate("rows", y.shape[0]):
            z = numpyro.sample("z", dist.Normal(0.5 * last, 1.0))
            numpyro.sample("y", dist.Normal(z, 0.5), obs=x)
        return z, z

    _, z = scan(step, jnp.zeros(y.shape[0]), y.T)
    numpyro.deterministic("path", z)


def constant_bounds(y):
    """Bounds that are constants of the model, with an axis for the rows."""
    with numpyro.plate("columns", 4, dim=-2), numpyro.plate("rows", y.shape[0], dim=-1):
        numpyro.sample("w", dist.Uniform(LOW, HIGH))
        numpyro.sample("y", dist.Normal(LOW + 1, 1), obs=y.T)


def first_of_several(y):
    """Rows are the outer dimension; an inner plate and an event lie behind them."""
    with numpyro.plate("rows", y.shape[0], dim=-2), numpyro.plate("columns", y.shape[1], dim=-1):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(z.sum(-1), 0.5), obs=y)


CASES = {
    "nested": (columns, 11, 3),
    "nested, square": (columns, 4, 4),
    "scan": (in_a_scan, 11, 3),
    "scan, square": (in_a_scan, 4, 4),
    "bounds, square": (constant_bounds, 4, 4),
    "rows are outside": (first_of_several, 11, 3),
}


@cache
def data(name):
    model, rows, columns = CASES[name]
    return model, RNG.normal(size=(rows, columns)).astype(np.float32)


@cache
def drawn(name, mesh):
    model, y = data(name)
    placed = y if mesh == "1" else gm.place(y, mesh_of(mesh), P("data"))
    target = gm.from_numpyro(model, placed, plates={"rows": "data"})
    kernel = gm.HMC(target, 0.05, 3)
    return target, gm.sample(KEY, target, kernel=kernel, num_chains=2, num_warmup=0, num_samples=3)


@pytest.fixture(autouse=True)
def _ranks():
    with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
        yield


@pytest.mark.parametrize("mesh", ["1", "8"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_draws_are_the_models_own(name, mesh):
    (model, y), (target, draws) = data(name), drawn(name, mesh)
    sites = handlers.trace(handlers.seed(model, 0)).get_trace(y)
    del sites["y"]
    shapes = {n: jnp.shape(s["value"]) for n, s in sites.items() if s["type"] != "plate"}
    assert {n: x.shape[2:] for n, x in draws.position.items()} == shapes
    latents = {n: jnp.asarray(x) for n, x in draws.position.items() if n in target.origin()}
    again = Predictive(model, latents, batch_ndims=2)(KEY, y)
    for n in shapes.keys() - latents.keys():  # deterministic sites, of the same draw
        np.testing.assert_allclose(draws.position[n], again[n], rtol=1e-5)
    last = {n: x[1, 2] for n, x in latents.items()}
    density = -potential_energy(model, (y,), {}, unconstrain_fn(model, (y,), {}, last))
    np.testing.assert_allclose(draws.stats["log_density"][1, 2], density, rtol=1e-4)
    _, found = log_density(model, (y,), {}, last)
    terms = log_likelihood(model, latents, y, batch_ndims=2)["y"][1, 2]
    np.testing.assert_allclose(terms, found["y"]["fn"].log_prob(found["y"]["value"]), rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in CASES if "bounds" not in n])
@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_unconstrain_and_rows_take_the_models_own_values(name):
    (model, y), (target, draws) = data(name), drawn(name, "8")
    params = {n: jnp.asarray(x[0, 1]) for n, x in draws.position.items() if n in target.origin()}
    position = target.unconstrain(params)
    assert {n: x.shape for n, x in position.items()} == {n: x.shape for n, x in target.origin().items()}
    for n, x in target.params(position).items():
        np.testing.assert_allclose(x, params[n], rtol=1e-4, atol=1e-6)
    # A row's term is that of all sites in the plate.
    hidden = target.hidden_from(target.plates[0], position)
    of_rows = target.plates[0].log_likelihood_rows(params, hidden)
    _, found = log_density(model, (y,), {}, params)
    in_rows = [
        s for s in found.values() if any(f.name == "rows" for f in s.get("cond_indep_stack", ()))
    ]
    want = sum(jnp.sum(s["fn"].log_prob(s["value"])) for s in in_rows if s["type"] == "sample")
    np.testing.assert_allclose(jnp.sum(of_rows), want, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_collected_values_and_files_have_the_models_axes(tmp_path):
    target, draws = drawn("nested", "8")
    options = {"kernel": draws.kernel, "num_chains": 2, "num_warmup": 0, "num_samples": 3}
    sink = gm.ZarrSink(tmp_path / "draws")
    saved = gm.sample(KEY, target, to=sink, **options)
    for n, x in draws.position.items():
        np.testing.assert_array_equal(saved.position[n], x)
        assert saved.position[n].dims[2:] == tuple(f"{n}_dim_{i}" for i in range(x.ndim - 2))

    def collect(params, info):
        return {"as it is": params["scale"], "of columns": params["scale"].sum(1)}

    collected = gm.sample(KEY, target, collect=collect, **options).position
    np.testing.assert_array_equal(collected["as it is"], draws.position["scale"])
    np.testing.assert_allclose(collected["of columns"], draws.position["scale"].sum(3), rtol=1e-5)
    assert draws.summary().rhat["share"].shape == (3, 11, 3)


def effects_of_patients(patient, y):
    """A latent of groups whose patients are the last of its axes."""
    with numpyro.plate("kinds", 2, dim=-2), numpyro.plate("patients", 5, dim=-1):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("visits", y.shape[0]):
        numpyro.sample("y", dist.Normal(effect[0, patient] - effect[1, patient], 0.5), obs=y)


@pytest.mark.filterwarnings("ignore:small data on many devices", "ignore:Groups:")
def test_groups_may_be_behind_another_axis(tmp_path):
    patient = np.repeat([0, 1, 3, 4], 8)  # nobody visits for patient 2
    y = RNG.normal(size=32).astype(np.float32)
    columns = gm.place({"patient": patient, "y": y}, mesh_of("8"), P("data"))
    plates = {"patients": "data", "visits": "data"}
    target = gm.from_numpyro(effects_of_patients, plates=plates, **columns)
    kernel = gm.HMC(target, 0.05, 3)
    options = {"kernel": kernel, "num_chains": 2, "num_warmup": 0, "num_samples": 3}
    draws = gm.sample(KEY, target, **options)
    effect = draws.position["effect"]
    assert effect.shape == (2, 3, 2, 5) and draws.groups["effect"].axis == 1
    density, _ = log_density(
        effects_of_patients, (patient, y), {}, {"effect": jnp.asarray(effect[1, 2])}
    )
    np.testing.assert_allclose(draws.stats["log_density"][1, 2], density, rtol=1e-4)
    names = {row.name for row in draws.summary().rows}
    assert names - {"log_density"} == {f"effect[{i}, patients={j}]" for i in range(2) for j in range(5)}
    of_groups = draws.summary(groups="patients").rows
    worst = {row.name.partition(": ")[2] for row in of_groups if row.name != "log_density"}
    assert worst and worst <= {"effect[0, :]", "effect[1, :]"}  # one of two numbers of each patient
    saved = gm.sample(KEY, target, to=gm.ZarrSink(tmp_path / "draws"), **options)
    np.testing.assert_array_equal(saved.position["effect"], effect)
    assert gm.open_draws(tmp_path / "draws").groups["effect"].axis == 1
    for some in (draws, saved):
        found = some.to_datatree()["posterior"]["effect"]
        assert found.dims == ("chain", "draw", "effect_dim_0", "patients")
        np.testing.assert_array_equal(found.sel(patients=3), effect[..., 3])


@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_buffers_of_padded_rows_are_sharded_where_the_model_has_them(monkeypatch):
    target, specs, spec_of = drawn("nested", "8")[0], {}, run_state._spec

    def noted(collected, layout):
        specs[collected.path[0].key] = spec = spec_of(collected, layout)
        return spec

    monkeypatch.setattr(run_state, "_spec", noted)
    kernel = gm.HMC(target, 0.05, 4)
    gm.sample(KEY, target, kernel=kernel, num_chains=2, num_warmup=0, num_samples=2)
    assert {n: specs[n] for n in ("level", "scale", "mean")} == {
        "level": P("data"),
        "scale": P(None, "data"),
        "mean": P(),
    }


@pytest.mark.filterwarnings("ignore:small data on many devices")
def test_a_run_goes_on_on_a_mesh_with_another_pad(tmp_path):
    model, y = data("nested")

    def sampled(mesh, num_samples, **options):
        target = gm.from_numpyro(model, gm.place(y, mesh_of(mesh), P("data")), plates={"rows": "data"})
        counts = {"num_chains": 2, "num_warmup": 0, "num_samples": num_samples, "progress": False}
        start = gm.uniform_start(target.origin(), 0.5)
        return gm.sample(KEY, target, start, kernel=gm.HMC(target, 0.05, 3), **counts, **options)

    sampled("8", 2, checkpoint=tmp_path / "run")
    both, whole = sampled("2x4", 4, checkpoint=tmp_path / "run"), sampled("2x4", 4)
    for n, x in whole.position.items():
        np.testing.assert_allclose(both.position[n], x, rtol=1e-4, atol=1e-5)
