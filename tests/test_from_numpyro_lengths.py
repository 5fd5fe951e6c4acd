"""Arguments of equal lengths: rows of one plate or of another, or a table that rows look up.

Each model is streamed without a warning, and its log density is NumPyro's ``potential_energy``.
"""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

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

N = 48
RNG = np.random.default_rng(0)
X, Y, TABLE = RNG.normal(size=(3, N)).astype(np.float32)
INDEX = RNG.permutation(np.repeat(np.arange(0, N, 2), 2))  # half of the patients have no visits
OTHER = RNG.integers(0, N, N)


def two_plates(x, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("users", N):
        u = numpyro.sample("u", dist.Normal(mean, 1))
        numpyro.sample("x", dist.Normal(u, 1), obs=x)
    with numpyro.plate("films", N):
        v = numpyro.sample("v", dist.Normal(mean, 2))
        numpyro.sample("y", dist.Normal(v, 1), obs=y)


def visits(index, y, age):
    """As many visits as patients, with an argument of the patients that both read."""
    with numpyro.plate("patients", N):
        a = numpyro.sample("a", dist.Normal(0.3 * age, 1))
    with numpyro.plate("visits", N):
        numpyro.sample("y", dist.Normal(a[index] + 0.1 * age[index], 1), obs=y)


def visits_alone(index, y, age):
    """The patients' argument is read by visits alone."""
    with numpyro.plate("patients", N):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("visits", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[index] + 0.1 * jnp.log(1 + age**2)[index], 1), obs=y)


def looked_up(table, index, y):
    """A table as long as the rows, by an index of the rows."""
    scale = numpyro.sample("scale", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(scale * jnp.take(table, index), 1), obs=y)


def looked_up_by_visits(index, other, y, table):
    """A table as long as the plate of patients, by another index than theirs."""
    with numpyro.plate("patients", N):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("visits", N):
        numpyro.sample("y", dist.Normal(a[index] + table[other], 1), obs=y)


def by_number(x, y):
    """Rows are taken by their number in the plate."""
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N) as i:
        numpyro.sample("y", dist.Normal(w * x[i], 1), obs=y[i])


def a_sum(x, y):
    """Of an argument as long as the rows its mean alone is read."""
    w = numpyro.sample("w", dist.Normal(x.mean(), 1))
    with numpyro.plate("rows", N):
        numpyro.sample("y", dist.Normal(w + x.std(), 1), obs=y)


def bounds(low, y):
    """A latent's bounds are rows of the second of two plates."""
    with numpyro.plate("users", N):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(u, 1), obs=y)
    with numpyro.plate("films", N):
        numpyro.sample("v", dist.Uniform(low, low + 2))


CASES = {
    "two plates": (two_plates, {"x": X, "y": Y}, ("users", "films")),
    "visits": (visits, {"index": INDEX, "y": Y, "age": X}, ("patients", "visits")),
    "visits alone": (visits_alone, {"index": INDEX, "y": Y, "age": X}, ("patients", "visits")),
    "looked up": (looked_up, {"table": TABLE, "index": OTHER, "y": Y}, ("rows",)),
    "looked up by visits": (
        looked_up_by_visits,
        {"index": INDEX, "other": OTHER, "y": Y, "table": TABLE},
        ("patients", "visits"),
    ),
    "by number": (by_number, {"x": X, "y": Y}, ("rows",)),
    "a sum": (a_sum, {"x": X, "y": Y}, ("rows",)),
    "bounds": (bounds, {"low": X, "y": Y}, ("users", "films")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_placed", [True, False], ids=["8", "1"])
@pytest.mark.filterwarnings("ignore:Groups:")
def test_lengths_tell_nothing(name, is_placed):
    model, args, plates = CASES[name]
    columns = {n: x for n, x in args.items() if n != "table"}
    placed = args | gm.place(columns, mesh_of("8"), P("data")) if is_placed else args
    target = gm.from_numpyro(model, plates=dict.fromkeys(plates, "data"), **placed)
    assert [str(p).split(".")[1].split(",")[0] for p in target.plates] == list(plates)
    position = {
        n: 0.3 * jnp.sin(1 + jnp.arange(x.size)).reshape(x.shape) for n, x in target.origin().items()
    }
    terms = jax.jit(lambda target, z: target.terms(z))(target, lay_out(target, position))
    kwargs = jax.tree.map(jnp.asarray, args)
    with jax.numpy_rank_promotion("allow"):
        want = -potential_energy(handlers.seed(model, 0), (), kwargs, position)
    np.testing.assert_allclose(tree.total(terms), want, rtol=1e-5)


def test_a_latent_whose_plate_a_table_would_fit_is_sharded():
    columns = gm.place({"index": INDEX, "y": Y, "age": X}, mesh_of("8"), P("data"))
    target = gm.from_numpyro(visits, plates={"patients": "data", "visits": "data"}, **columns)
    assert [r is not None for r in target.local_rows(target.origin())] == [True]
    assert target.plates[1].has_group_latents
