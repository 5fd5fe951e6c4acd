"""`from_numpyro`: NumPyro's density on every mesh, NumPyro's means, and draws in NumPyro's shapes.

Log density and gradient are held against ``numpyro.infer.util.potential_energy`` of everything at once
in float64, sampled means against NumPyro's own NUTS in units of their Monte Carlo standard errors.
Models that are wrong on purpose fail both.
"""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from arviz_stats import mcse  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import PartitionSpec as P
from models import check_close, mesh_of
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc import communication, tree
from gspmd_mcmc.models import numpyro_sites as of_numpyro
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.targets import bijections
from gspmd_mcmc.targets.local import arrays, cut, lay_out
from gspmd_mcmc.views.program.hlo import KINDS

KEY = jax.random.key(seed(0))
ROWS = P("data")
BOTH = {"data": 4, "model": 2}  # a mesh with two axes for rows
# Data are float32 numbers kept in float64, so that both precisions see the same.


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(np.float64)


def counts(seed: int, *shape: int, below: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, below, shape)


def labels(seed: int, *shape: int, share: float = 0.4) -> np.ndarray:
    return (np.random.default_rng(seed).uniform(size=shape) < share).astype(np.uint8)


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and where its rows lie.

    ``specs`` is a prefix of the arguments for `place`; None leaves everything unplaced. ``row_axis``
    tells of latents whose rows NumPyro has on another axis than the first.
    """

    model: Callable
    args: dict[str, Any]
    plates: dict[str, Any] = field(default_factory=lambda: {"rows": "data"})
    specs: Any = ROWS
    row_axis: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    falls_back: str | None = None

    def target(self, mesh: Any = "8", check: bool = False) -> gm.Posterior:
        """The model on a mesh, with its arrays as keyword arguments."""
        args = jax.tree.map(jnp.asarray, self.args)
        if self.specs is not None:
            args = gm.place(self.args, mesh_of(mesh), self.specs)
        kwargs = {**args, **self.constants}
        if self.falls_back is None:
            return gm.from_numpyro(self.model, plates=self.plates, check=check, **kwargs)
        with pytest.warns(UserWarning, match=self.falls_back):
            return gm.from_numpyro(self.model, plates=self.plates, check=check, **kwargs)


# Models.


def logistic(x, y, num_rows=None, scale=1.0, offset=0.0):
    """``scale`` multiplies the scales of the priors: another one is wrong on purpose."""
    w = numpyro.sample("w", dist.Normal(0, scale).expand([3]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 2 * scale))
    with numpyro.plate("rows", num_rows or x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b + offset), obs=y)


def logistic_of_a_dict(data, num_rows):
    logistic(data["of"]["x"], data["y"], num_rows)


def positional(x, y=None, *more, **named):
    assert len(more) == 1 and named.keys() == {"offset"}
    logistic(x, y, scale=more[0], **named)


def linear_predictor(x, offset, scale):
    """Two plates of the same rows one after the other, a shared argument, deterministic sites."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(scale))
    numpyro.deterministic("w_norm", jnp.sum(w**2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.deterministic("mean", x @ w)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=offset)


def softmax(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3, 4]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ w), obs=y)


def poisson(x, y):
    w = numpyro.sample("w", dist.Normal(0, 0.5).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w)), obs=y)


def eight_schools(y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", y.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_noncentred(y, sigma):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    numpyro.deterministic("range", jnp.stack([mu - tau, mu + tau]))
    with numpyro.plate("schools", 8):
        z = numpyro.sample("z", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def two_plates(score, price, scale=1.0):
    """Users and movies, each with latents of its own, and a shared level of that ``scale``."""
    level = numpyro.sample("level", dist.Normal(0, scale))
    spread = numpyro.sample("spread", dist.Gamma(20, 20))
    with numpyro.plate("users", score.shape[0]):
        taste = numpyro.sample("taste", dist.Normal(level, spread))
        numpyro.sample("score", dist.Normal(taste[:, None], 0.7).to_event(1), obs=score)
    with numpyro.plate("movies", price.shape[0]):
        fame = numpyro.sample("fame", dist.LogNormal(level, 0.5))
        numpyro.sample("price", dist.Exponential(fame), obs=price)


def mixture_by_factor(y):
    weights = numpyro.sample("weights", dist.Dirichlet(2 * jnp.ones(3)))
    centres = numpyro.sample(
        "centres", dist.TransformedDistribution(NORMALS, dist.transforms.OrderedTransform())
    )
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("rows", y.shape[0]):
        each = dist.Normal(centres, spread).log_prob(y[:, None])
        numpyro.factor("y", jax.nn.logsumexp(jnp.log(weights) + each, axis=1))


NORMALS = dist.Normal(jnp.asarray([-2.5, 0.9, 0.9]), jnp.asarray([0.5, 0.3, 0.3])).to_event(1)


def varying_effects(x, y):
    """Correlated intercepts and slopes of groups, five observations each."""
    average = numpyro.sample("average", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    cholesky = numpyro.sample("cholesky", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("groups", x.shape[0], dim=-2):
        tril = scale[:, None] * cholesky
        effect = numpyro.sample("effect", dist.MultivariateNormal(average, scale_tril=tril))
        mean = effect[..., 0] + effect[..., 1] * x
        with numpyro.plate("observations", x.shape[1], dim=-1):
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def inner_rows(x, y):
    """The sharded plate is the inner one: NumPyro has its rows last."""
    with numpyro.plate("kinds", 3, dim=-2):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0], dim=-1):
            noise = numpyro.sample("noise", dist.Gamma(2, 2))
            numpyro.sample("y", dist.Normal(level * x, noise), obs=y.T)


def outer_rows(y):
    """Rows of dim=-2 hold another plate whole, with latents of both."""
    with numpyro.plate("rows", y.shape[0], dim=-2):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("times", y.shape[1], dim=-1):
            noise = numpyro.sample("noise", dist.HalfNormal(1))
            numpyro.sample("y", dist.Normal(level, noise), obs=y)


def constrained_rows(count, series):
    """Local latents that are positive, on a simplex, in an interval, and correlation matrices."""
    phi = numpyro.sample("phi", dist.Dirichlet(jnp.ones(4)).expand([2]).to_event(1))
    with numpyro.plate("rows", count.shape[0]):
        share = numpyro.sample("share", dist.Dirichlet(jnp.asarray([1.0, 2.0])))
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        damping = numpyro.sample("damping", dist.Uniform(-1, 3))
        cholesky = numpyro.sample("cholesky", dist.LKJCholesky(2, 1.5))
        topics = jnp.log(share @ phi)
        numpyro.factor("words", jnp.sum(count * topics, axis=-1))
        scale = rate[:, None, None] * cholesky
        mean = damping[:, None] * jnp.ones(2)
        numpyro.sample("series", dist.MultivariateNormal(mean, scale_tril=scale), obs=series)


def scaled_and_masked(x, y, is_seen):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with handlers.scale(scale=2.5), numpyro.plate("rows", x.shape[0]):
        level = numpyro.sample("level", dist.Normal(0, 1))
        with handlers.mask(mask=is_seen):
            numpyro.sample("y", dist.Bernoulli(logits=x @ w + level), obs=y)
    with handlers.scale(scale=0.3):
        numpyro.sample("b", dist.Normal(0, 1))


def scaled_of_fixed_size(x, y, is_seen):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", 61), handlers.scale(scale=2.5), handlers.mask(mask=is_seen):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def hidden_markov(y):
    """Forward algorithm over a plate of times whose latents the recursion reads: rows are coupled."""
    moving = numpyro.sample("moving", dist.Dirichlet(jnp.asarray([[4.0, 1], [1, 4]])).to_event(1))
    centre = numpyro.sample("centre", dist.Normal(jnp.asarray([-1.5, 1.5]), 0.5).to_event(1))
    with numpyro.plate("times", y.shape[0]):
        shift = numpyro.sample("shift", dist.Normal(0, 0.3))
    each = dist.Normal(centre, 1.0).log_prob((y - shift)[:, None])

    def forward(log_state, log_each):
        moved = jax.nn.logsumexp(log_state[:, None] + jnp.log(moving), axis=0) + log_each
        return moved, None

    numpyro.factor("y", jax.nn.logsumexp(jax.lax.scan(forward, each[0], each[1:])[0]))


def volatility(y):
    """A latent for each time of NumPyro's own scan; no plate at all."""
    spread = numpyro.sample("spread", dist.Exponential(5))

    def move(level, value):
        level = numpyro.sample("level", dist.Normal(level, spread))
        numpyro.sample("y", dist.Normal(0, jnp.exp(level / 2)), obs=value)
        return level, None

    scan(move, jnp.zeros(()), y)


def ratings(user, score, bias_scale):
    """Ratings look users up: a plate reads the latents of another one."""
    with numpyro.plate("users", bias_scale.shape[0]):
        bias = numpyro.sample("bias", dist.Normal(0, bias_scale))
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("ratings", score.shape[0]):
        numpyro.sample("score", dist.Normal(level + bias[user], 1.0), obs=score)


X, Y = normal(0, 61, 3), labels(1, 61)
EFFECTS = 0.3 + normal(8, 13, 1) + 0.5 * normal(9, 13, 1) * normal(6, 13, 5) + 0.5 * normal(7, 13, 5)
SCHOOLS = {
    "y": np.array([28.0, 8, -3, 7, -1, 1, 18, 12]),
    "sigma": np.array([15.0, 10, 16, 11, 9, 11, 10, 18]),
}
TWO_PLATES = {"score": 0.5 + normal(2, 13, 3), "price": np.abs(normal(3, 21)) + 0.1}
CONSTRAINED = {"count": counts(4, 13, 4), "series": normal(5, 13, 2)}
MIXTURE = {"y": 0.4 * normal(10, 53) + 2.5 * (counts(11, 53, below=3) - 1)}
MASKED = {"x": X, "is_seen": labels(13, 61).astype(bool)}

CASES = {
    "logistic": Case(logistic, {"x": X, "y": Y}),
    "logistic, float labels": Case(logistic, {"x": X, "y": Y.astype(np.float64)}),
    "logistic, plate of a fixed size": Case(logistic, {"x": X, "y": Y}, constants={"num_rows": 61}),
    "logistic, plate not sharded": Case(logistic, {"x": X, "y": Y}, plates={}),
    "logistic, unplaced": Case(logistic, {"x": X, "y": Y}, specs=None),
    "logistic, a dict and a number": Case(
        logistic_of_a_dict, {"data": {"of": {"x": X}, "y": Y}}, constants={"num_rows": 61}
    ),
    "normal, a shared argument and deterministic sites": Case(
        linear_predictor,
        {"x": X, "offset": normal(2, 61), "scale": np.float64(1.5)},
        specs={"x": ROWS, "offset": ROWS, "scale": P()},
    ),
    "categorical": Case(softmax, {"x": X, "y": counts(3, 61, below=4)}),
    "Poisson": Case(poisson, {"x": X, "y": counts(3, 61)}),
    "schools, centred": Case(eight_schools, SCHOOLS, plates={"schools": "data"}),
    "schools, non-centred": Case(eight_schools_noncentred, SCHOOLS, plates={"schools": "data"}),
    "two plates": Case(two_plates, TWO_PLATES, plates={"users": "data", "movies": "data"}),
    "two plates, one sharded": Case(
        two_plates, TWO_PLATES, plates={"movies": "data"}, specs={"score": P(), "price": ROWS}
    ),
    "mixture by factor": Case(mixture_by_factor, MIXTURE),
    "varying effects": Case(
        varying_effects, {"x": normal(6, 13, 5), "y": EFFECTS}, plates={"groups": "data"}
    ),
    "inner rows": Case(inner_rows, {"x": normal(6, 13), "y": normal(7, 13, 3)}, row_axis={"noise": 1}),
    "outer rows": Case(outer_rows, {"y": normal(7, 13, 3)}),
    "constrained rows": Case(constrained_rows, CONSTRAINED),
    "scaled and masked": Case(scaled_and_masked, {"y": Y, **MASKED}),
    "scaled and masked, fixed size": Case(scaled_of_fixed_size, {"y": normal(2, 61), **MASKED}),
    "hidden Markov": Case(
        hidden_markov,
        {"y": normal(5, 13) + 1.5 * np.sign(normal(6, 13))},
        plates={"times": "data"},
        falls_back="plate 'times' cannot be streamed: sites outside of it read its argument .*'y'",
    ),
    "volatility": Case(volatility, {"y": normal(5, 29)}, plates={}),
    "ratings look users up": Case(
        ratings,
        {"user": counts(7, 61, below=13), "score": normal(8, 61), "bias_scale": 1 + counts(9, 13) / 4},
        plates={"users": "data", "ratings": "data"},
    ),
}


# All cases are seen in float64 on one mesh; these on one device too, and those in float32 as well.
ON_ONE_DEVICE = ["schools, centred", "two plates", "inner rows", "hidden Markov"]
IN_FLOAT32 = ["two plates", "constrained rows", "scaled and masked", "hidden Markov"]


# NumPyro's own answer, of everything at once.


def theirs(case: Case, position: dict) -> Any:
    """Log density of one position by ``potential_energy``."""
    axes = case.row_axis
    params = {n: jnp.moveaxis(x, 0, axes[n]) if n in axes else x for n, x in position.items()}
    kwargs = jax.tree.map(jnp.asarray, case.args) | case.constants
    with jax.numpy_rank_promotion("allow"):
        return -potential_energy(handlers.seed(case.model, 0), (), kwargs, params)


def shapes_of(target: gm.Posterior) -> tuple:
    return tuple(sorted((name, np.shape(x)) for name, x in dict(target.origin()).items()))


@cache
def expected(name: str, shapes: tuple) -> tuple[dict, dict]:
    """Two points of a case, as two chains, and NumPyro's log density and gradient there, in float64."""
    rng = np.random.default_rng(1)
    points = {n: (0.5 * rng.normal(size=(2, *shape))).astype(np.float32) for n, shape in shapes}
    with jax.enable_x64(True):
        doubled = {n: jnp.asarray(x, jnp.float64) for n, x in points.items()}
        value, grad = jax.jit(jax.vmap(jax.value_and_grad(partial(theirs, CASES[name]))))(doubled)
        return points, jax.device_get({"log density": value} | named(grad))


def named(grad: dict) -> dict:
    return {f"d/d{name}": g for name, g in grad.items()}


def ours(case: Case, target: gm.Posterior, mesh: Any, points: dict) -> dict:
    """Log density and gradient of two chains on a mesh, as a kernel starts from them."""
    points = {n: jnp.asarray(x, jnp.result_type(float)) for n, x in points.items()}
    on = None if case.specs is None else mesh_of(mesh)
    layout = read_layout(on, target, points, 2, has_chains=True)
    states = init_chains(gm.HMC(target, 0.1, 1), points, layout=layout)
    grad = jax.vmap(partial(cut, target))(states.log_density_grad)
    return {"log density": states.log_density} | named(grad)


def check_density(name: str, mesh: Any, is_double: bool, target: gm.Posterior | None = None) -> None:
    with jax.enable_x64(is_double):
        target = CASES[name].target(mesh) if target is None else target
        points, want = expected(name, shapes_of(target))
        got = ours(CASES[name], target, mesh, points)
        assert got.keys() == want.keys()
        check_close(got, want, 1e-9 if is_double else 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_log_density_and_gradient_are_numpyro_s(name):
    check_density(name, "2x4", is_double=True)


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_log_density_and_gradient_are_numpyro_s_in_float32(name):
    check_density(name, "8", is_double=False)


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_the_mesh_does_not_change_log_density_and_gradient(name):
    check_density(name, "1", is_double=True)


def test_rows_may_lie_over_two_mesh_axes():
    over = ("data", "model")
    case = replace(CASES["two plates"], specs=P(over), plates={"users": over, "movies": over})
    target = case.target(BOTH)
    assert [plate.rows.num_blocks for plate in target.plates] == [8, 8]
    check_density("two plates", BOTH, is_double=False, target=target)


@pytest.mark.parametrize("name", ["two plates", "hidden Markov"])
def test_terms_and_gradient_alone_are_those_of_one_pass(name):
    with jax.enable_x64(True):
        target = CASES[name].target("8")
        points, want = expected(name, shapes_of(target))
        position = lay_out(target, {n: jnp.asarray(x[1], jnp.float64) for n, x in points.items()})
        grad = cut(target, jax.jit(type(target).grad)(target, position))
        log_density = tree.total(jax.jit(type(target).terms)(target, position))
        check_close(
            {"log density": log_density} | named(grad), {k: x[1] for k, x in want.items()}, 1e-9
        )


def test_parameters_are_validated_where_the_model_is_read_and_in_no_other_trace(monkeypatch):
    """Of a Cholesky factor NumPyro would compile some ten programs in each."""
    validate, seen = dist.Distribution.validate_args, []

    def counted(self, strict=True):
        seen.append(type(self))
        return validate(self, strict)

    monkeypatch.setattr(dist.Distribution, "validate_args", counted)
    target = CASES["varying effects"].target("8", check=True)
    assert seen.count(dist.MultivariateNormal) == 1
    jax.jit(gm.HMC.init)(gm.HMC(target, 0.1, 1), target.origin())
    assert seen.count(dist.MultivariateNormal) == 1

    def below_zero(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0, -1)), 1), obs=y)

    with pytest.raises(ValueError, match="got invalid scale parameter"):
        gm.from_numpyro(below_zero, normal(0, 3))


def test_arguments_may_be_positional_and_variadic():
    x, y, offset = gm.place((X, Y, np.zeros(61)), mesh_of("8"), ROWS)
    target = gm.from_numpyro(positional, x, y, 1.0, plates={"rows": "data"}, offset=offset)
    check_density("logistic", "8", is_double=False, target=target)


# What is wrong on purpose is seen.


def rejects(name: str, target: gm.Posterior | None = None, mesh: str = "8") -> None:
    with pytest.raises(AssertionError, match="differs by"):
        check_density(name, mesh, is_double=True, target=target)


def log_prob_that_scales_by_numpyro_s_scale(evaluate, name, values, trace, sizes):
    site = trace[name]
    out = of_numpyro.log_prob(site["fn"], site["value"])
    return out if site["scale"] is None else site["scale"] * out


@pytest.mark.parametrize("name", ["logistic, plate of a fixed size", "scaled and masked, fixed size"])
def test_a_block_taken_for_a_subsample_and_scaled_up_is_rejected(monkeypatch, name):
    monkeypatch.setattr(of_numpyro.NumpyroModel, "_log_prob", log_prob_that_scales_by_numpyro_s_scale)
    rejects(name)


def constrain_without_jacobians(*args):
    return CONSTRAIN(*args)[0], []


CONSTRAIN = bijections.constrain


@pytest.mark.parametrize("name", ["two plates, one sharded", "constrained rows"])
def test_a_missing_jacobian_is_rejected(monkeypatch, name):
    monkeypatch.setattr(bijections, "constrain", constrain_without_jacobians)
    rejects(name)


def test_counting_pad_rows_is_rejected():
    with jax.enable_x64(True):
        target = CASES["logistic"].target("8")
        (plate,) = target.plates
        rows = replace(plate.rows, num_rows=plate.rows.num_padded)
        rejects("logistic", tree.replace(target, plates=(tree.replace(plate, rows=rows),)))


def test_another_prior_is_rejected():
    with jax.enable_x64(True):
        rejects("logistic", replace(CASES["logistic"], constants={"scale": 0.5}).target("8"))


# Sampled means. 4 standard errors a quantity, 36 quantities in all: were all of them independent,
# one run in four hundred would fail by chance. Seeds are fixed.

RUN: dict[str, Any] = {"num_chains": 4, "num_warmup": 300, "num_samples": 300}
SAMPLED_ON = {"two plates": "2", "schools, non-centred": "3"}


def run(target: gm.Posterior, **options) -> gm.Draws:
    options["kernel"] = gm.HMC(target, 0.1, 12, jitter=0.5)
    # A diagonal metric compiles sooner; at 0.8 a step in a thousand diverges on the schools.
    options["warmup"] = gm.WindowAdaptation(target_acceptance_rate=0.9, metric=gm.Diagonal())
    return gm.sample(KEY, target, progress=False, **RUN, **options)


@cache
def draws_of(name: str) -> gm.Draws:
    return run(CASES[name].target(SAMPLED_ON[name], check=True))


@cache
def nuts_draws(name: str) -> dict[str, np.ndarray]:
    case = CASES[name]
    kwargs = jax.tree.map(jnp.asarray, case.args) | case.constants
    mcmc = MCMC(NUTS(case.model), chain_method="vectorized", progress_bar=False, **RUN)
    with jax.numpy_rank_promotion("allow"):
        mcmc.run(jax.random.key(seed(1)), **kwargs)
    return jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))


def mean_and_error(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = draws.reshape(*draws.shape[:2], -1).astype(np.float64)
    columns = range(flat.shape[2])
    of_column = partial(mcse, chain_axis=0, draw_axis=1)
    errors = [of_column(flat[..., i]) for i in columns]
    return flat.mean(axis=(0, 1)), np.asarray(errors, np.float64)


def check_means(draws: gm.Draws, want: dict[str, np.ndarray]) -> None:
    got = jax.tree.map(np.asarray, draws.position)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape, name
        a, error_of_a = mean_and_error(got[name])
        b, error_of_b = mean_and_error(want[name])
        # A Cholesky factor has a corner of exact ones and zeros; those agree to rounding.
        error = np.sqrt(error_of_a**2 + error_of_b**2) + 1e-6
        worst = np.max(np.abs(a - b) / error)
        within(worst, 4, f"standard errors between means of {name}")


@pytest.mark.statistical
def test_means_are_those_of_nuts():
    check_means(draws_of("two plates"), nuts_draws("two plates"))


@pytest.mark.statistical
def test_means_under_another_prior_are_rejected():
    wrong = run(replace(CASES["two plates"], constants={"scale": 0.1}).target("2"))
    with pytest.raises(AssertionError, match="standard errors"):
        check_means(wrong, nuts_draws("two plates"))


# Draws.


def test_draws_are_constrained_and_have_the_real_rows():
    position = jax.tree.map(np.asarray, draws_of("two plates").position)
    shapes = {name: x.shape[2:] for name, x in position.items()}
    assert shapes == {"level": (), "spread": (), "taste": (13,), "fame": (21,)}
    assert np.all(position["spread"] > 0) and np.all(position["fame"] > 0)


def test_kept_values_of_a_simplex_and_of_ordered_numbers():
    target = CASES["mixture by factor"].target("2")
    kept = target.kept({name: z + 0.3 for name, z in target.origin().items()})
    assert kept["weights"].shape == (3,) and np.all(kept["weights"] > 0)
    np.testing.assert_allclose(kept["weights"].sum(), 1, rtol=1e-5)
    assert np.all(np.diff(kept["centres"]) > 0)


def test_draws_are_the_bijections_of_the_states():
    draws = draws_of("two plates")
    target = draws.kernel.target
    params = jax.vmap(lambda x: cut(target, target.params(x)))(draws.state.position)
    for name, x in draws.position.items():
        np.testing.assert_allclose(np.asarray(x)[:, -1], params[name], rtol=1e-6)


def test_local_latents_lie_over_the_mesh_with_their_rows():
    """13 users over 2 devices are 7 on each, 21 movies 11."""
    position = arrays(draws_of("two plates").state.position)
    shards = {n: {s.data.shape for s in x.addressable_shards} for n, x in position.items()}
    assert shards == {"level": {(4,)}, "spread": {(4,)}, "taste": {(4, 7)}, "fame": {(4, 11)}}


def of_position(position, info):
    return {"sum": jnp.sum(position["fame"]), "fame": position["fame"], "taste": position["taste"][-1]}


def test_collect_sees_constrained_values_of_the_real_rows():
    kept = run(draws_of("two plates").kernel.target, collect=of_position).position
    fame, taste = (np.asarray(draws_of("two plates").position[n]) for n in ("fame", "taste"))
    # Another program of the same chain: rounding grows along it.
    np.testing.assert_allclose(kept["fame"][:, 0], fame[:, 0], rtol=1e-3)
    np.testing.assert_allclose(kept["taste"][:, 0], taste[:, 0, -1], rtol=1e-3)
    np.testing.assert_allclose(kept["sum"], np.asarray(kept["fame"]).sum(axis=2), rtol=1e-5)
    assert kept["fame"].shape == fame.shape


def test_deterministic_sites_are_computed_from_the_latents_of_their_draw():
    """On a mesh that pads the schools."""
    position = jax.tree.map(np.asarray, draws_of("schools, non-centred").position)
    mu, tau, z = (position[name] for name in ("mu", "tau", "z"))
    assert position["theta"].shape == (4, 300, 8) and position["range"].shape == (4, 300, 2)
    np.testing.assert_allclose(
        position["theta"], mu[..., None] + tau[..., None] * z, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        position["range"], np.stack([mu - tau, mu + tau], axis=2), rtol=1e-4, atol=1e-4
    )


# What a leapfrog sends.


@pytest.mark.parametrize("name", ["logistic", "two plates", "varying effects"])
def test_a_leapfrog_has_one_all_reduce_and_no_gather(name):
    """The reductions of two plates come as one fused tuple."""
    kernel = gm.HMC(CASES[name].target("8"), 0.1, 5)
    state = jax.jit(gm.HMC.init)(kernel, kernel.target.origin())
    found = communication(jax.jit(gm.HMC.step), kernel, KEY, state)
    assert {k: found.count(k) for k in KINDS[1:]} == dict.fromkeys(KINDS[1:], 0)
    assert found.runs("all-reduce", within="leapfrog") == 1
    assert found.largest_constant_bytes < 1000
