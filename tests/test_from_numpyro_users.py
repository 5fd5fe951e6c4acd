"""What NumPyro's users run: other data, models that look at data, handlers, starts, Predictive.

Each line runs, with NumPyro's density (`from_numpyro` compares), or has a message that names the cure.
"""

# What numpyro.sample returns is typed as a number or an array.
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportAssignmentType=false

import functools
import math
import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import Predictive, log_likelihood
from numpyro.infer.reparam import CircularReparam, LocScaleReparam, TransformReparam
from numpyro.infer.util import potential_energy

import gspmd_mcmc as gm
from gspmd_mcmc import tree

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
Y = np.random.default_rng(1).normal(1, 1, size=12).astype(np.float32)
DEPT = np.repeat(np.arange(4), 3)
NOISE = 0.1 * np.random.default_rng(2).normal(size=12).astype(np.float32)
OTHER = (X[::-1].copy(), Y[::-1].copy())


def regression(x, y=None, scale=1.0):
    w = numpyro.sample("w", dist.Normal(0, scale).expand([2]).to_event(1))
    sd = numpyro.sample("sd", dist.Uniform(0, 5 * scale))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, sd), obs=y)


def observe(mean):
    with numpyro.plate("rows", 12):
        numpyro.sample("y", dist.Normal(mean, 1), obs=Y)


@jax.jit
def total(target, position):
    return tree.total(target.terms(position))


def log_density(target, position):
    return float(total(target, position))


# The same model with other data of the same shapes.

MADE_AGAIN = {
    "arguments": lambda x, y, scale: gm.from_numpyro(regression, x, y, scale),
    "by name": lambda x, y, scale: gm.from_numpyro(regression, x=x, scale=np.float32(scale), y=y),
    "partial": lambda x, y, scale: gm.from_numpyro(
        functools.partial(regression, y=y, scale=scale), jnp.asarray(x)
    ),
    "condition": lambda x, y, scale: gm.from_numpyro(
        handlers.condition(regression, data={"y": y, "sd": jnp.asarray(scale)}), x
    ),
    "two handlers": lambda x, y, scale: gm.from_numpyro(
        handlers.scale(handlers.condition(handlers.seed(regression, 3), {"y": y, "sd": scale}), scale),
        x,
    ),
}


@pytest.mark.parametrize("how", MADE_AGAIN)
def test_other_data_of_the_same_shapes_compile_nothing_new(how, compiled):
    """Numbers are data too, and so are the bounds of a support that they make."""
    grad = jax.jit(gm.Posterior.grad)
    first = MADE_AGAIN[how](X, Y, 1.0)
    before = grad(first, first.origin())
    compiled.clear()
    other = MADE_AGAIN[how](*OTHER, 2.0)
    after = grad(other, other.origin())
    assert compiled == []
    assert not np.allclose(after["w"], before["w"])


RUN = {"num_chains": 2, "num_warmup": 100, "num_samples": 100, "progress": False}


def response(slope):
    return X @ np.float32([slope, 2]) + NOISE


@cache
def draws(slope=1.0):
    target = gm.from_numpyro(regression, X, response(slope), check=False)
    return gm.sample(KEY, target, kernel=gm.HMC(target, 0.2, 4, jitter=0.5), **RUN)


def test_a_run_on_other_data_compiles_nothing_new_and_is_of_those(compiled):
    draws(1.0)
    compiled.clear()
    means = [np.asarray(draws(slope).position["w"]).mean(axis=(0, 1)) for slope in (1.0, -2.0)]
    assert compiled == []
    np.testing.assert_allclose(means, [[1, 2], [-2, 2]], atol=0.3)


def test_an_integer_may_be_a_size_and_a_list_is_no_array():
    def model(num, names, y):
        a = numpyro.sample("a", dist.Normal(0, 1).expand([num, len(names)]).to_event(2))
        observe(a.sum())

    assert gm.from_numpyro(model, 3, [1.0, 2.0], Y, check=False).origin()["a"].shape == (3, 2)


# Bounds that the model makes, or takes from arguments.


def constant_bounds():
    a = numpyro.sample("a", dist.Uniform(jnp.zeros(2), 1.0))
    b = numpyro.sample("b", dist.Uniform(0, jnp.sqrt(2.0)))
    c = numpyro.sample("c", dist.TruncatedNormal(0.0, 1.0, low=-jnp.ones(()), high=2.0))
    observe(a.sum() + b + c)


def bounds_of_arguments(y, high):
    a = numpyro.sample("a", dist.Uniform(y.min(), y.max()))
    b = numpyro.sample("b", dist.Uniform(0, high))
    with numpyro.plate("rows", 12):
        c = numpyro.sample("c", dist.Uniform(0, 2 * high))
        numpyro.sample("y", dist.Normal(a + b + c, 1), obs=y)


BOUNDED = {
    "made in the model": (constant_bounds, (), {}),
    "of arguments": (bounds_of_arguments, (Y, 2.0), {}),
    "of arguments, streamed": (bounds_of_arguments, (None, 2.0), {"plates": {"rows": "data"}}),
}


@pytest.mark.parametrize("which", BOUNDED)
def test_bounds_that_no_latent_decides_are_known(which):
    model, args, options = BOUNDED[which]
    if options:  # y.min() reads all rows, so it is an argument
        low_high = float(Y.min()), float(Y.max())
        model = functools.partial(streamed_bounds, *low_high)
        args = gm.place(Y, gm.make_mesh(data=8), P("data")), 2.0
    target = gm.from_numpyro(model, *args, check=True, **options)
    position = {n: jnp.full(z.shape, 0.3, z.dtype) for n, z in target.origin().items()}
    params = target.params(position)
    back = target.unconstrain(params)
    for name, z in position.items():
        np.testing.assert_allclose(back[name], z, rtol=1e-4)
    share = 1 / (1 + math.exp(-0.3))
    high = math.sqrt(2) if which == "made in the model" else 2.0
    np.testing.assert_allclose(params["b"], share * high, rtol=1e-5)


def streamed_bounds(low, most, y, high):
    a = numpyro.sample("a", dist.Uniform(low, most))
    b = numpyro.sample("b", dist.Uniform(0, high))
    with numpyro.plate("rows", y.shape[0]):
        c = numpyro.sample("c", dist.Uniform(0, 2 * high))
        numpyro.sample("y", dist.Normal(a + b + c, 1), obs=y)


class Own(dist.Distribution):
    """A user's distribution, twice an Exponential."""

    support = dist.constraints.positive

    def sample(self, key, sample_shape=()):
        return 2 * jax.random.exponential(key, sample_shape)

    def log_prob(self, value):
        return -value / 2 - math.log(2)


class OfBijector(dist.constraints.Constraint):
    """As NumPyro wraps bijectors of TFP: what it flattens to is no tree."""

    def __call__(self, x):
        return x > 0

    def tree_flatten(self):
        return object(), ()


class AsOfTFP(Own):
    support = OfBijector()


dist.biject_to.register(OfBijector, lambda constraint: dist.transforms.ExpTransform())


@pytest.mark.parametrize("distribution", [Own, AsOfTFP])
def test_a_distribution_that_numpyro_has_not_is_constrained(distribution):
    target = gm.from_numpyro(lambda: observe(numpyro.sample("a", distribution())), check=True)
    assert float(target.kept({"a": jnp.asarray(0.4)})["a"]) == pytest.approx(math.exp(0.4))
    start = gm.prior_start(target)
    assert len({float(start(jax.random.key(i))["a"]) for i in range(3)}) == 3


# Models that look at their data.


def looks(dept, y, number):
    with numpyro.plate("depts", number(dept)):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[dept], 1), obs=y)


NUMBERS = {
    "unique": lambda dept: len(np.unique(dept)),
    "int": lambda dept: int(np.max(dept)) + 1,
    "method": lambda dept: int(dept.max()) + 1,
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("dept", [DEPT, jnp.asarray(DEPT)], ids=["numpy", "jax"])
def test_a_model_may_look_at_its_data(number, dept):
    model = functools.partial(looks, number=NUMBERS[number])
    target = gm.from_numpyro(model, dept, Y, check=number == "unique")
    assert target.origin()["a"].shape == (4,)
    assert [x.shape for x in jax.tree.leaves(target.log_prior)].count((12,)) == 1  # y alone is data


def test_what_is_looked_at_is_no_row_of_a_block():
    model = functools.partial(looks, number=NUMBERS["unique"])
    dept, y = gm.place((DEPT, Y), gm.make_mesh(data=8), P("data"))
    with pytest.warns(UserWarning, match=r"looks at the values of its argument \['dept'\].*at once"):
        gm.from_numpyro(model, dept, y, plates={"rows": "data"}, check=False)
    with pytest.raises(ValueError, match=r"argument \['dept'\].*MB would become constants"):
        gm.from_numpyro(model, np.zeros(300_000, int), np.zeros(300_000, np.float32), check=False)


def test_a_value_that_only_a_run_has_cannot_be_looked_at():
    def by_a_latent():
        a = numpyro.sample("a", dist.Normal(0, 1))
        observe(a if a > 0 else -a)

    for model, args in ((by_a_latent, ()), (looks, (DEPT, Y, lambda x: int(jnp.max(x)) + 1))):
        with pytest.raises(ValueError, match=r"asks for a value that only the running program has"):
            gm.from_numpyro(model, *args)


# Handlers.


def centred():
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 3):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    angle = numpyro.sample("angle", dist.VonMises(0.3, 2.0))
    rate = numpyro.sample("rate", LOG_NORMAL)
    observe(theta.sum() + rate + angle)


LOG_NORMAL = dist.TransformedDistribution(dist.Normal(0, 1), dist.transforms.ExpTransform())
HANDLED = {
    "LocScaleReparam": (
        lambda: handlers.reparam(centred, config={"theta": LocScaleReparam(0)}),
        {"mu", "tau", "theta_decentered", "angle", "rate"},
        {"theta"},
    ),
    "TransformReparam": (
        lambda: handlers.reparam(centred, config={"rate": TransformReparam()}),
        {"mu", "tau", "theta", "angle", "rate_base"},
        {"rate"},
    ),
    "CircularReparam": (
        lambda: handlers.reparam(centred, config={"angle": CircularReparam()}),
        {"mu", "tau", "theta", "angle_unwrapped", "rate"},
        {"angle"},
    ),
    "seed": (lambda: handlers.seed(centred, 5), {"mu", "tau", "theta", "angle", "rate"}, set()),
    "scope": (
        lambda: handlers.scope(centred, prefix="of"),
        {"of/mu", "of/tau", "of/theta", "of/angle", "of/rate"},
        set(),
    ),
    "condition with a number": (
        lambda: handlers.condition(centred, data={"tau": 1.5}),
        {"mu", "theta", "angle", "rate"},
        set(),
    ),
}


@pytest.mark.parametrize("which", HANDLED)
def test_a_model_within_handlers(which):
    make, latents, derived = HANDLED[which]
    with jax.numpy_rank_promotion("allow"):
        target = gm.from_numpyro(make(), check=True)
    assert target.origin().keys() == latents
    assert target.kept(target.origin()).keys() == latents | derived


def test_draws_of_a_seeded_model_s_prior_differ():
    start = gm.prior_start(gm.from_numpyro(handlers.seed(centred, 5), check=False))
    one, other = (start(jax.random.key(i)) for i in range(2))
    assert float(one["mu"]) != float(other["mu"])


def test_substitute_does_not_hold_a_latent():
    with pytest.warns(UserWarning, match=r"'tau': handlers.substitute.*handlers.condition"):
        target = gm.from_numpyro(handlers.substitute(centred, data={"tau": 1.5}), check=False)
    assert "tau" in target.origin()


@pytest.mark.parametrize("which", ["block", "prng_key"])
def test_random_numbers_that_are_no_latents_are_told(which):
    def noisy():
        a = numpyro.sample("a", dist.Normal(0, 1))
        observe(a + jax.random.normal(numpyro.prng_key()))

    model = noisy if which == "prng_key" else handlers.block(centred, hide=["mu"])
    with pytest.warns(UserWarning, match="depends on random numbers that are no latents"):
        gm.from_numpyro(model, check=False)


def of_gamma(handler):
    with handler:
        a = numpyro.sample("a", dist.Gamma(3.0, 2.0))
    observe(a)


@pytest.mark.parametrize(
    ("handler", "scale"),
    [(lambda: handlers.scale(scale=0.3), 0.3), (lambda: handlers.mask(mask=False), 0.0)],
    ids=["scale", "mask"],
)
def test_a_scale_is_on_the_log_probability_alone(handler, scale):
    with pytest.warns(UserWarning, match=r"'a': its (scale|mask) is on its log probability alone"):
        target = gm.from_numpyro(lambda: of_gamma(handler()), check=True)
    prior, likelihood = dist.Gamma(3.0, 2.0).log_prob(math.exp(0.4)), dist.Normal(math.exp(0.4), 1)
    want = scale * float(prior) + 0.4 + float(likelihood.log_prob(Y).sum())
    assert log_density(target, {"a": jnp.asarray(0.4)}) == pytest.approx(want, rel=1e-5)


# What is no model to sample, or lacks a plate.


def test_a_model_without_latents_is_refused():
    for model in (lambda: observe(0.0), lambda: numpyro.deterministic("z", jnp.ones(3))):
        with pytest.raises(ValueError, match="the model has no latents, so there is nothing to sample"):
            gm.from_numpyro(model)


def test_a_while_loop_is_refused():
    def model():
        a = numpyro.sample("a", dist.Normal(0, 1))
        observe(jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * a), (0, a))[1])

    with pytest.raises(ValueError, match=r"reverse-mode gradients run loops backwards. Write lax.scan"):
        gm.from_numpyro(model)


def test_a_plate_that_is_missing_is_told():
    def without(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)

    def in_another(x, y):
        with numpyro.plate("columns", 2):
            w = numpyro.sample("w", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(x * w, 1), obs=x)

    gm.from_numpyro(without, X, Y, check=False)  # NumPyro says nothing either
    placed = gm.place((X, Y), gm.make_mesh(data=8), P("data"))
    for model, args in ((without, placed), (in_another, (X, Y))):
        with pytest.warns(
            UserWarning, match=r"'y': its 12 rows \(batch dimension -\d\) lie in no plate"
        ):
            gm.from_numpyro(model, *args, check=False)


def test_the_rounds_of_a_scan_need_no_plate():
    def walk(y):
        def move(level, value):
            level = numpyro.sample("level", dist.Normal(level, jnp.ones(3)).to_event(1))
            with numpyro.plate("columns", 3):
                numpyro.sample("y", dist.Normal(level, 1), obs=value)
            return level, None

        scan(move, jnp.zeros(3), y)

    assert gm.from_numpyro(walk, np.zeros((5, 3), np.float32)).origin()["level"].shape == (5, 3)


# Programs, settings, starts and draws.


def target():
    return draws().kernel.target


def test_a_program_takes_the_kernel_and_neither_a_model_nor_a_run():
    match = "A program of your own takes the kernel as an argument"
    with pytest.raises(TypeError, match="from_numpyro: .*" + match):
        jax.jit(lambda y: gm.from_numpyro(regression, X, y).origin())(Y)
    outside = target()
    with pytest.raises(TypeError, match="sample: .*" + match):
        jax.jit(lambda key: gm.sample(key, outside, num_samples=3).position)(KEY)


def test_a_depth_of_warm_up_is_a_run_of_its_own():
    with pytest.raises(
        ValueError, match=r"got \(5, 10\). For another depth in warm-up .* sample twice"
    ):
        gm.sample(KEY, target(), max_tree_depth=(5, 10))


def test_a_start_at_values_is_there():
    values = {"w": jnp.asarray([0.5, -0.5]), "sd": jnp.asarray(0.7)}
    start = gm.uniform_start(target().unconstrain(values), 0.0)
    jax.tree.map(np.testing.assert_allclose, target().params(start(KEY)), values)


def test_predictive_takes_draws():
    position = draws().position
    with jax.numpy_rank_promotion("allow"):
        new = Predictive(regression, position, batch_ndims=2)(KEY, X)["y"]
        terms = log_likelihood(regression, position, X, response(1.0), batch_ndims=2)["y"]
    assert new.shape == terms.shape == (2, 100, 12)
    of_last = {n: x[0, -1] for n, x in position.items()}
    want = log_density(target(), target().unconstrain(of_last))
    prior = dist.Normal(0, 1).log_prob(of_last["w"]).sum() + dist.Uniform(0, 5).log_prob(of_last["sd"])
    jacobian = jnp.log(of_last["sd"] * (1 - of_last["sd"] / 5))
    np.testing.assert_allclose(want, terms[0, -1].sum() + prior + jacobian, rtol=1e-5)


def test_draws_pickle_and_go_on():
    again = pickle.loads(pickle.dumps(draws()))
    jax.tree.map(np.testing.assert_array_equal, again.position, draws().position)
    kept = [gm.sample(KEY, d.kernel.target, d, **RUN).position for d in (draws(), again)]
    jax.tree.map(np.testing.assert_array_equal, *kept)


def test_rows_on_a_mesh_say_what_to_pickle():
    data = gm.place((X, Y), gm.make_mesh(data=8), P("data"))
    target = gm.from_numpyro(regression, *data, plates={"rows": "data"}, check=False)
    with pytest.raises(TypeError, match=r"pickle: rows lie over a mesh.*to_datatree"):
        pickle.dumps(target)


# Models of NumPyro's own tests and examples, in our words: each density is compared with NumPyro's.


def beta_bernoulli(y):
    p = numpyro.sample("p", dist.Beta(jnp.asarray([1.1, 1.1]), jnp.asarray([1.1, 1.1])))
    numpyro.sample("y", dist.Bernoulli(p), obs=y)


def dirichlet_categorical(y):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("y", dist.Categorical(p), obs=y)


def change_point(count):
    rate = 1 / jnp.mean(count)
    early = numpyro.sample("early", dist.Exponential(rate))
    late = numpyro.sample("late", dist.Exponential(rate))
    when = numpyro.sample("when", dist.Uniform(0, 1)) * count.size
    mean = jnp.where(when > jnp.arange(count.size), early, late)
    numpyro.sample("count", dist.Poisson(mean), obs=count)


def improper(y):
    loc = numpyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))
    scale = numpyro.sample("scale", dist.ImproperUniform(dist.constraints.positive, (), ()))
    numpyro.sample("y", dist.Normal(loc, scale), obs=y)


def gaussian_process(x, y):
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 1.0))
    squares = (x[:, None, 0] - x[None, :, 0]) ** 2
    covariance = jnp.exp(-0.5 * squares / length) + (noise + 1e-4) * jnp.eye(12)
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


def horseshoe(x, y):
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    lam = numpyro.sample("lam", dist.HalfCauchy(jnp.ones(2)))
    w = numpyro.sample("w", dist.Normal(0, lam * tau))
    numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def network(x, y):
    hidden = jnp.tanh(x @ numpyro.sample("w1", dist.Normal(jnp.zeros((2, 3)), 1).to_event(2)))
    mean = hidden @ numpyro.sample("w2", dist.Normal(jnp.zeros(3), 1).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(precision)), obs=y)


def ordered_regression(x, y):
    cut = numpyro.sample(
        "cut", dist.TransformedDistribution(UNIT.expand([2]), dist.transforms.OrderedTransform())
    )
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.OrderedLogistic(b * x[:, 0], cut), obs=y)


def mixture(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    centres = numpyro.sample("centres", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        parts = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(centres, 1))
        numpyro.sample("y", parts, obs=y)


def imputed(x, y):
    missing = np.isnan(y)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    filled = numpyro.sample("filled", dist.Normal(0, 1).expand([int(missing.sum())]).to_event(1))
    values = jnp.asarray(np.nan_to_num(y)).at[np.nonzero(missing)[0]].set(filled)
    numpyro.sample("y", dist.Normal(x @ w, 1), obs=values)


def two_chances(y):
    with numpyro.plate_stack("plates", [3, 4]):
        p = numpyro.sample("p", dist.Beta(2, 2))
        numpyro.sample("y", dist.Binomial(5, p), obs=y)


def autoregression(y):
    a = numpyro.sample("a", dist.Uniform(-1, 1))
    sd = numpyro.sample("sd", dist.HalfNormal(1))

    def move(before, now):
        numpyro.sample("y", dist.Normal(a * before, sd), obs=now)
        return now, None

    scan(move, y[0], y[1:])


def correlation(y):
    sds = numpyro.sample("sds", dist.HalfCauchy(jnp.ones(2)).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, concentration=1))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(2), scale_tril=sds[:, None] * chol), obs=y)


UNIT = dist.Normal(0, 1)
GAPS = np.where(np.arange(12) % 5 == 2, np.nan, Y).astype(np.float32)
COUNTS = np.random.default_rng(2).integers(0, 3, 12)
THEIRS = {
    "beta and Bernoulli": (beta_bernoulli, (np.stack([COUNTS > 0, COUNTS > 1], axis=1).astype(int),)),
    "Dirichlet and categorical": (dirichlet_categorical, (COUNTS,)),
    "change point": (change_point, (COUNTS,)),
    "improper": (improper, (Y,)),
    "Gaussian process": (gaussian_process, (X, Y)),
    "horseshoe": (horseshoe, (X, Y)),
    "neural network": (network, (X, Y)),
    "ordered regression": (ordered_regression, (X, COUNTS)),
    "mixture": (mixture, (Y,)),
    "imputed": (imputed, (X, GAPS)),
    "stack of plates": (two_chances, (COUNTS.reshape(3, 4),)),
    "autoregression": (autoregression, (Y,)),
    "correlation": (correlation, (X,)),
}


@pytest.mark.parametrize("name", THEIRS)
def test_models_of_numpyro_s_own_tests(name):
    model, args = THEIRS[name]
    target = gm.from_numpyro(model, *args, check=False)
    position = {n: jnp.full(z.shape, 0.2, z.dtype) for n, z in target.origin().items()}
    with jax.numpy_rank_promotion("allow"):
        theirs = jax.jit(lambda z: -potential_energy(handlers.seed(model, 0), args, {}, z))
        want = float(theirs(position))
    assert log_density(target, position) == pytest.approx(want, rel=1e-5)
