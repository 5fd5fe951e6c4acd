"""Constrained latents of a `Posterior` written as functions: densities, Jacobians, draws, errors.

Densities and gradients are held against NumPyro's transforms in float64, evaluated at once and without
the package. Without the Jacobians they fail.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import check_close, mesh_of
from numpyro.distributions import biject_to, constraints, transforms
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.targets import bijections
from gspmd_mcmc.targets.local import arrays, cut, lay_out

KEY = jax.random.key(seed(0))
ROWS = 13
POSITIVE = biject_to(constraints.positive)
SIMPLEX = biject_to(constraints.simplex)
INTERVAL = biject_to(constraints.interval(-1.0, 3.0))
ORDERED = transforms.OrderedTransform()
DATA = np.random.default_rng(0).gamma(2.0, 1.0, ROWS).astype(np.float32)

BOTH_FLOATS = pytest.mark.parametrize("is_double", [False, True], ids=["float32", "float64"])


# Shared latents: a scale, weights, a share in an interval, cut points, one unconstrained. Local ones of
# each row: a rate, and a simplex.


def log_prior(x):
    return {
        "scale": -x["scale"] + 2 * jnp.log(x["scale"]),
        "weights": jnp.asarray([1.0, 0.5, 2.0]) * jnp.log(x["weights"]),
        "share": jnp.log(x["share"] + 1) + 3 * jnp.log(3 - x["share"]),
        "cuts": -0.5 * x["cuts"] ** 2,
        "free": -0.5 * x["free"] ** 2,
    }


def log_likelihood(x, rows):
    rate, parts = x["rate"], x["parts"]
    along = parts @ x["weights"] + x["share"] * x["cuts"][0]
    terms = jnp.log(rate) - rate * (rows * x["scale"] + along**2) + jnp.sum(jnp.log(parts), axis=1)
    return terms + x["free"] * jnp.log(rate)


SHAPES = {
    "scale": (),
    "weights": (2,),
    "share": (),
    "cuts": (3,),
    "free": (),
    "rate": (ROWS,),
    "parts": (ROWS, 2),
}
OF = {
    "scale": POSITIVE,
    "weights": SIMPLEX,
    "share": INTERVAL,
    "cuts": ORDERED,
    "rate": POSITIVE,
    "parts": SIMPLEX,
}
LOCAL = ("rate", "parts")


class Fields(NamedTuple):
    shared: dict
    rows: Any


def flat(x):
    return x


def as_nested(x):
    """The same latents in dicts within dicts and a list."""
    inner = {"scale": x["scale"], "list": [x["weights"], x["share"]]}
    return {"inner": inner, "rest": (x["cuts"], x["free"]), "rows": {n: x[n] for n in LOCAL}}


def of_nested(x):
    inner = {"scale": x["inner"]["scale"], "weights": x["inner"]["list"][0], **x.get("rows", {})}
    return inner | {"share": x["inner"]["list"][1], "cuts": x["rest"][0], "free": x["rest"][1]}


NESTED = {
    "inner": {"scale": POSITIVE, "list": [SIMPLEX, INTERVAL]},
    "rest": (ORDERED, None),
    "rows": {"rate": POSITIVE, "parts": SIMPLEX},
}


def as_fields(x):
    return Fields({n: x[n] for n in SHAPES if n not in LOCAL}, {n: x[n] for n in LOCAL})


def of_fields(x):
    return x.shared | {n: a for n, a in (x.rows or {}).items() if a is not None}


FIELDS = Fields({n: OF[n] for n in OF if n not in LOCAL}, {n: OF[n] for n in LOCAL})

# What the latents are packed in, the bijections there, and what is local.
TREES: dict[str, tuple[Callable, Callable, Any, Any]] = {
    "dict": (flat, flat, OF, LOCAL),
    "dict with None": (flat, flat, OF | {"free": None}, LOCAL),
    "nested": (as_nested, of_nested, NESTED, "rows"),
    "named tuple": (as_fields, of_fields, FIELDS, "rows"),
}


def posterior(way="dict", num_devices=8):
    _, unpack, of, local = TREES[way]
    data = gm.place(DATA, mesh_of(num_devices), P("data"))
    plate = gm.Plate(lambda x, rows: log_likelihood(unpack(x), rows), data, local=local)
    return gm.Posterior(lambda x: log_prior(unpack(x)), plate, bijections=of)


def position(dtype: Any = np.float32):
    rng = np.random.default_rng(1)
    return {n: jnp.asarray(0.7 * rng.normal(size=shape), dtype) for n, shape in SHAPES.items()}


# An account of our own: NumPy's closed forms of the bijections, all rows at once.


def constrained(z):
    """Constrained values, and the sum of the log Jacobians."""
    x, log_jacobian = {"free": z["free"]}, 0.0
    for name in ("scale", "rate"):
        x[name] = jnp.exp(z[name])
        log_jacobian += jnp.sum(z[name])
    share = jax.nn.sigmoid(z["share"])
    x["share"] = 4 * share - 1
    log_jacobian += jnp.log(4 * share * (1 - share))
    x["cuts"] = jnp.concatenate([z["cuts"][:1], z["cuts"][0] + jnp.cumsum(jnp.exp(z["cuts"][1:]))])
    log_jacobian += jnp.sum(z["cuts"][1:])
    for name in ("weights", "parts"):
        x[name], more = broken_stick(z[name])
        log_jacobian += jnp.sum(more)
    return x, log_jacobian


def broken_stick(z):
    """Stick breaking as in Stan's manual, its Jacobian by automatic differentiation."""
    shift = jnp.log(z.shape[-1] - jnp.arange(z.shape[-1]))

    def one(z):
        taken = jax.nn.sigmoid(z - shift)
        left = jnp.cumprod(1 - taken)
        return jnp.append(taken * jnp.append(1.0, left[:-1]), left[-1])

    def both(z):
        jacobian = jax.jacobian(lambda z: one(z)[:-1])(z)
        return one(z), jnp.linalg.slogdet(jacobian)[1]

    return jax.vmap(both)(z) if z.ndim > 1 else both(z)


@cache
def expected():
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):

        def log_density(z):
            x, log_jacobian = constrained(z)
            data = jnp.asarray(DATA, jnp.float64)
            return tree.total(log_prior(x)) + jnp.sum(log_likelihood(x, data)) + log_jacobian

        z = {n: jnp.asarray(a, jnp.float64) for n, a in position().items()}
        value, grad = jax.jit(jax.value_and_grad(log_density))(z)
        return jax.device_get({"log density": value, **grad})


def check_density(target, pack=flat, unpack=flat, is_double=True):
    with jax.enable_x64(is_double):
        z = {n: jnp.asarray(a, jnp.result_type(float)) for n, a in position().items()}
        laid = lay_out(target, pack(z))
        terms, grad = jax.jit(type(target).terms_and_grad)(target, laid)
        got = unpack(cut(target, grad)) | {"log density": tree.total(terms)}
        check_close(got, expected(), 1e-9 if is_double else 1e-5)


@BOTH_FLOATS
@pytest.mark.parametrize("num_devices", [1, 8])
def test_density_and_gradient_have_the_jacobians(num_devices, is_double):
    with jax.enable_x64(is_double):
        target = posterior(num_devices=num_devices)
    check_density(target, is_double=is_double)


@pytest.mark.parametrize("way", TREES)
def test_bijections_may_stand_in_any_tree(way):
    pack, unpack, _, _ = TREES[way]
    with jax.enable_x64(True):
        check_density(posterior(way), pack, unpack)


def all_summands(x, rows):
    return log_prior(x), log_likelihood(x, rows)


def test_a_log_density_has_bijections_too():
    with jax.enable_x64(True):
        of = TREES["dict"][2]
        target = gm.LogDensity(all_summands, jax.tree.map(jnp.asarray, DATA), bijections=of)
        check_density(target)
        z = position(float)
        params = target.kept(z)
        for name, want in constrained(z)[0].items():
            np.testing.assert_allclose(params[name], want, rtol=1e-9)
            np.testing.assert_allclose(target.unconstrain(params)[name], z[name], rtol=1e-6, atol=1e-9)


def test_missing_jacobians_are_rejected(monkeypatch):
    def without_jacobians(*args):
        return constrain(*args)[0], []

    constrain = bijections.constrain
    monkeypatch.setattr(bijections, "constrain", without_jacobians)
    with jax.enable_x64(True), pytest.raises(AssertionError, match="differs by"):
        check_density(posterior(num_devices=4))  # where no other test has a program


# Parameters and back.


def seen_again(x, rows):
    return -x["rate"] * rows


def test_a_jacobian_counts_once_where_two_plates_have_the_latent():
    data = gm.place(DATA, mesh_of("8"), P("data"))
    plates = [gm.Plate(seen_again, data, local="rate") for _ in range(2)]
    target = gm.Posterior(None, *plates, bijections={"rate": POSITIVE})
    log_rate = jnp.linspace(-1, 2, ROWS)
    value = tree.total(target.terms(lay_out(target, {"rate": log_rate})))
    expected = np.sum(-2 * np.exp(log_rate) * DATA + np.asarray(log_rate))
    np.testing.assert_allclose(float(value), expected, rtol=1e-5)


@pytest.mark.parametrize("way", TREES)
def test_parameters_are_constrained_and_unconstrain_undoes_that(way):
    pack, unpack, _, _ = TREES[way]
    target = posterior(way)
    params = target.params(pack(position()))
    with jax.numpy_rank_promotion("allow"):
        want = constrained(position())[0]
    for name, x in unpack(params).items():
        np.testing.assert_allclose(x, want[name], rtol=1e-5, atol=1e-6)
    back = target.unconstrain(params)
    assert jax.tree.structure(back) == jax.tree.structure(pack(position()))
    for name, z in unpack(back).items():
        np.testing.assert_allclose(z, position()[name], rtol=1e-4, atol=1e-5)


def test_a_posterior_without_bijections_has_its_position_as_parameters():
    target = gm.Posterior(lambda x: -(x["free"] ** 2))
    assert target.params({"free": 2.0}) == {"free": 2.0} == target.unconstrain({"free": 2.0})


# Draws


def of_shared(x):
    gamma = (SHAPE - 1) * jnp.log(x["x"]) - RATE * x["x"]
    return gamma, (CONCENTRATION - 1) * jnp.log(x["p"])


def of_rows(x, concentration):
    return jnp.sum((concentration - 1) * jnp.log(x["q"]), axis=1)


SHAPE, RATE = np.asarray([3.0, 4.0], np.float32), np.asarray([1.0, 2.0], np.float32)
CONCENTRATION = np.asarray([2.0, 2.5, 4.0], np.float32)
OF_ROWS = np.asarray([[2.0, 2, 3], [4, 2, 2], [2, 3, 2]], np.float32)


@pytest.fixture(scope="module")
def draws() -> gm.Draws:
    """Gamma and Dirichlet variables; of the latter one for each of 3 rows on 2 devices."""
    plate = gm.Plate(of_rows, gm.place(OF_ROWS, mesh_of(2), P("data")), local="q")
    target = gm.Posterior(of_shared, plate, bijections={"x": POSITIVE, "p": SIMPLEX, "q": SIMPLEX})
    kernel = gm.HMC(target, 0.5, 5, jitter=0.5)
    origin = {"x": jnp.zeros(2), "p": jnp.zeros(2), "q": jnp.zeros((3, 2))}
    options = {"num_chains": 4, "num_warmup": 0, "num_samples": 20}
    return gm.sample(KEY, target, origin, kernel=kernel, progress=False, **options)  # pyright: ignore


def test_draws_are_constrained_and_states_are_not(draws):
    x = jax.tree.map(np.asarray, draws.position)
    assert {n: a.shape[2:] for n, a in x.items()} == {"x": (2,), "p": (3,), "q": (3, 3)}
    assert all(np.all(a > 0) for a in x.values())
    for name in "pq":
        np.testing.assert_allclose(x[name].sum(axis=-1), 1, rtol=1e-5)
    assert {n: a.shape[1:] for n, a in arrays(draws.state.position).items()} == {
        "x": (2,),
        "p": (2,),
        "q": (4, 2),
    }
    target = draws.kernel.target
    params = jax.vmap(lambda z: cut(target, target.params(z)))(draws.state.position)
    for name, a in x.items():
        np.testing.assert_allclose(a[:, -1], params[name], rtol=1e-5, atol=1e-6)


# Errors.


def init(of, at=None, **options):
    target = gm.Posterior(lambda x: -(x["a"]["b"] ** 2), bijections=of, **options)
    return gm.HMC(target, 0.1, 1).init({"a": {"b": jnp.ones(2)}} if at is None else at)


@pytest.mark.parametrize("of", [{"c": POSITIVE}, {"a": {"c": POSITIVE}}, {"a": {"b": {"c": POSITIVE}}}])
def test_a_bijection_of_a_leaf_that_is_not_there_is_refused(of):
    with pytest.raises(ValueError, match="bijections.*: the position has no such leaf, it has"):
        init(of)


@pytest.mark.parametrize("of", [{"a": {"b": jnp.exp}}, {"a": 3.0}, {"a": {"b": constraints.positive}}])
def test_what_is_no_bijection_is_refused(of):
    with pytest.raises(TypeError, match=r"bijections.*: expected a NumPyro transform .*, got"):
        init(of)


def test_a_bijection_above_leaves_serves_them_all():
    state = init({"a": POSITIVE}, {"a": {"b": jnp.asarray([0.5, 1.0])}})
    np.testing.assert_allclose(state.log_density, -(np.e + np.e**2) + 1.5, rtol=1e-6)


def test_both_a_transform_and_bijections_are_refused():
    with pytest.raises(ValueError, match="expected one of transform and bijections, got both"):
        init({"a": {"b": POSITIVE}}, transform=flat)
