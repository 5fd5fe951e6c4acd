"""What TFP's users bring: its distributions, its spelling, and what its tests of `distribute` ask for.

The cases are those of TFP's own tests of `Sharded` and of joint distributions, in words of ours. They
run on stand-ins with TFP's methods, and on TFP's own distributions where it is installed.
"""

# Calls that are spelled as TFP spells them.
# pyright: reportCallIssue=false, reportArgumentType=false

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import tfp_like
from jax.sharding import PartitionSpec as P
from models import mesh_of
from scipy import stats

import gspmd_mcmc as gm
from gspmd_mcmc import (
    JointDistributionCoroutine,
    JointDistributionNamed,
    JointDistributionSequential,
    Sharded,
)
from gspmd_mcmc.models.site_model import CannotStream
from gspmd_mcmc.tree import total

pytestmark = pytest.mark.filterwarnings("ignore:shape requires ndarray")  # TFP's own code
KEY = jax.random.key(0)
MESH = mesh_of(8)
GRID = gm.make_mesh(data=4, model=2)
NORMAL = tfp_like.Normal(0.0, 1.0)


@pytest.fixture(params=["stand-in", "TFP"], scope="module")
def tfd(request):
    return tfp_like if request.param == "stand-in" else tfp_like.real_tfp().distributions


# Calls as TFP spells them: each is taken, or told today's spelling.


def joint_of_three():
    parts = [NORMAL, Sharded(NORMAL, num_rows=8), lambda u, w: Sharded(tfp_like.Normal(u + w, 1.0))]
    return JointDistributionSequential(parts, mesh=MESH)


def grid_of(num_rows, num_columns, axis):
    return Sharded(tfp_like.Normal(jnp.zeros([num_rows, num_columns]), 1.0), axis, mesh=GRID)


ROWS = np.linspace(-1, 1, 8).astype(np.float32)
SPELLINGS = {
    "sample: seed=: the key comes first here. Call it as sample": [
        lambda: joint_of_three().sample(3, seed=KEY),
        lambda: joint_of_three().sample(seed=KEY),
        lambda: Sharded(NORMAL, mesh=MESH, num_rows=8).sample(seed=KEY),
    ],
    r"expected one typed key, jax.random.key\(": [lambda: joint_of_three().sample(3)],
    "shard_axis_name=: it is axis= here, an axis of the mesh": [
        lambda: Sharded(NORMAL, shard_axis_name="data")
    ],
    r"one value of all parts, as sample returns it: log_prob\(\[a, b\]\)": [
        lambda: joint_of_three().log_prob(0.5, ROWS, ROWS),
        lambda: JointDistributionNamed({"a": NORMAL}).log_prob(a=0.5),
    ],
    r"Name the parts that are observed: condition\(y=y\)": [
        lambda: joint_of_three().condition((None, None, ROWS))
    ],
    r"a joint distribution by its condition\(y=data\)": [
        lambda: gm.HMC(joint_of_three(), 0.1, 1),
        lambda: gm.sample(KEY, joint_of_three(), num_warmup=1, num_samples=1),
    ],
    r"the names of the latents: of a model, a dict such as target.origin\(\)": [
        lambda: gm.HMC(joint_of_three().condition(var1=ROWS, var2=ROWS), 0.1, 1).init((0.5,))
    ],
    "A joint takes parts and mesh=": [
        lambda: JointDistributionSequential([NORMAL], validate_args=True),
        lambda: JointDistributionNamed({"a": NORMAL}, use_vectorized_map=True),
        lambda: JointDistributionCoroutine(lambda: None, batch_ndims=0),
    ],
    r"Rows over the axes of both are Sharded\(distribution, axis=\('data', 'model'\)\)": [
        lambda: Sharded(Sharded(NORMAL, "data"), "model")
    ],
    r"lays rows over both axes, 4 rows over 8 devices. .* axis=P\('data', 'model'\)": [
        lambda: Sharded(tfp_like.Normal(jnp.zeros([4, 2]), 1.0), ("data", "model"), mesh=GRID).sample(
            KEY
        )
    ],
    "axis 1 has 3 elements, which 2 devices do not divide": [
        lambda: Sharded(tfp_like.Normal(jnp.zeros([4, 3]), 1.0), P("data", "model"), mesh=GRID).sample(
            KEY
        )
    ],
    "the spec has 2 entries, the leaf 1 axes": [
        lambda: Sharded(NORMAL, P("data", "model"), mesh=GRID, num_rows=8).sample(KEY)
    ],
    "axis: expected each mesh axis once": [lambda: Sharded(NORMAL, P("data", "data"), mesh=GRID)],
    r"axis=\(\) lays rows over none": [lambda: Sharded(NORMAL, num_rows=8).sample(KEY)],
    "Make its parts parts of the outer one": [
        lambda: JointDistributionSequential([joint_of_three()]).sample(KEY)
    ],
    "value: expected one of part 'var2' too, got 2 values": [
        lambda: joint_of_three().sample(KEY, value=(0.5, ROWS))
    ],
    r"value: expected the parts \['var0', 'var1', 'var2'\], got 4 values": [
        lambda: joint_of_three().sample(KEY, value=(0.5, ROWS, None, None))
    ],
    r"part 'var1': expected one value of shape \[8\], got \[7\]": [
        lambda: joint_of_three().sample(KEY, value=(0.5, ROWS[1:], None))
    ],
}


@pytest.mark.parametrize(
    ("match", "call"), [(match, call) for match, calls in SPELLINGS.items() for call in calls]
)
def test_todays_spelling_is_told(match, call):
    with pytest.raises((TypeError, ValueError), match=match):
        call()


def test_what_tfps_have_and_ours_have_not():
    joint, sharded = joint_of_three(), Sharded(NORMAL, mesh=MESH, num_rows=8)
    with pytest.raises(AttributeError, match=r"has no experimental_pin: condition\(y=y\) is the post"):
        joint.experimental_pin(var2=ROWS)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="Sharded has no event_shape: jax.eval_shape"):
        sharded.event_shape  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018
    shapes = jax.eval_shape(type(sharded).sample, sharded, KEY)
    assert (shapes.shape, shapes.dtype) == ((8,), np.float32)
    assert [x.shape for x in jax.eval_shape(type(joint).sample, joint, KEY)] == [(), (8,), (8,)]
    with pytest.raises(AttributeError, match="Sequential has no nothing$"):
        joint.nothing  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018


@pytest.mark.parametrize("wrong", [1.5, -1, np.nan, np.inf, None, "3", True, [[2], [3]], (2, -1)])
def test_sample_shapes_that_are_none(wrong):
    for one in (JointDistributionSequential([NORMAL]), Sharded(NORMAL, mesh=MESH, num_rows=8)):
        with pytest.raises(ValueError, match="sample_shape: expected a whole number"):
            one.sample(KEY, wrong)


@pytest.mark.parametrize(
    "shape", [3, np.int64(3), 3e0, np.float32(3), [3], (np.int32(3),), np.array([3])]
)
def test_sample_shapes_of_any_whole_numbers(shape):
    joint = JointDistributionSequential([NORMAL])
    np.testing.assert_array_equal(joint.sample(KEY, shape)[0], joint.sample(KEY, (3,))[0])
    assert Sharded(NORMAL, mesh=MESH, num_rows=8).sample(KEY, shape).shape == (3, 8)


def test_a_hundred_thousand_samples():
    (draws,) = JointDistributionSequential([NORMAL]).sample(KEY, 1e5)
    assert draws.shape == (100_000,)
    assert abs(float(jnp.mean(draws))) < 4 / np.sqrt(1e5)


def test_parts_that_are_given_are_kept_and_the_others_drawn():
    """Of TFP's ``sample(value=(x, None, z))``: z does not change what x is drawn from."""
    joint = joint_of_three()
    whole = joint.sample(KEY)
    first = joint.sample(KEY, value=(7.0, None, None))
    np.testing.assert_array_equal(first[1], whole[1])  # part i draws from fold_in(key, i)
    np.testing.assert_allclose(first[2] - whole[2], 7 - float(whole[0]), rtol=1e-4)
    middle = joint.sample(KEY, value=(None, ROWS, None))
    assert middle[1] is ROWS and float(middle[0]) == float(whole[0])
    np.testing.assert_allclose(middle[2] - ROWS, whole[2] - whole[1], atol=1e-5)
    last = joint.sample(KEY, value=(None, None, ROWS))
    np.testing.assert_array_equal(last[1], whole[1])
    many = joint.sample(KEY, 2, value=(7.0, None, None))
    assert [np.shape(x) for x in many] == [(2,), (2, 8), (2, 8)]
    by_name = JointDistributionNamed({"w": NORMAL, "y": lambda w: tfp_like.Normal(w, 1.0)})
    assert by_name.sample(KEY, value={"w": 2.0, "y": None})["w"] == 2.0


# Distributions as parts


def test_roots_and_names_are_tfps_own(tfd):
    def model():
        w = yield tfd.JointDistributionCoroutine.Root(tfd.Normal(0.0, 1.0, name="slope"))
        yield tfd.Normal(w, 1.0)
        yield Sharded(tfd.Normal(w, 1.0, name="inner"), num_rows=8)
        yield Sharded(tfd.Normal(w, 1.0, name="inner"), num_rows=8, name="outer")

    assert JointDistributionCoroutine(model, mesh=MESH).names == ("slope", "var1", "inner", "outer")


def test_tfps_sharded_is_told_ours():
    tfp = tfp_like.real_tfp()
    theirs = tfp.experimental.distribute.Sharded(tfp.distributions.Normal(0.0, 1.0), "i")
    for make in (lambda: Sharded(theirs), lambda: JointDistributionSequential([theirs]).sample(KEY)):
        with pytest.raises(TypeError, match=r"inside pmap over \('i',\). Take gspmd_mcmc.Sharded"):
            make()


@pytest.mark.parametrize("module", ["python.distributions", "substrates.numpy.distributions"])
def test_tfp_that_is_not_on_jax_is_refused(module):
    members = dict.fromkeys(("sample", "log_prob"), lambda self, *args: None)
    members["__module__"] = f"tensorflow_probability.{module}.normal"
    Theirs = type("Normal", (), members)
    match = r"does not compute on JAX. Import TFP as .*\.jax, of tfp-nightly: stable TFP, 0.25"
    for make in (Sharded, lambda d: JointDistributionSequential([d]).sample(KEY)):
        with pytest.raises(TypeError, match=match):
            make(Theirs())


# Rows of a latent as TFP's users write them: a distribution (or one of ones), columns, its law.
HALF, WIDE = stats.halfnorm(0, 2), stats.norm(0.5, 2)
ROWS_IN_EVENTS = {
    "Sample of a number": (lambda tfd, x: tfd.Sample(tfd.Normal(0.5, 2.0), 13), (), WIDE),
    "Sample of numbers": (lambda tfd, x: tfd.Sample(tfd.HalfNormal(2.0), [13]), (), HALF),
    "Sample of columns": (lambda tfd, x: tfd.Sample(tfd.HalfNormal(2.0), [13, 3]), (3,), HALF),
    "Sample of events": (
        *(lambda tfd, x: tfd.Sample(tfd.Sample(tfd.Normal(0.5, 2.0), [3]), [13]), (3,), WIDE),
    ),
    "Independent": (lambda tfd, x: tfd.Independent(tfd.HalfNormal(2.0 * x), 1), (), HALF),
}


@pytest.mark.parametrize("kind", ROWS_IN_EVENTS)
def test_rows_in_an_event_are_taken_apart(tfd, kind):
    """13 rows on 8 devices: the posterior is the joint, and the Jacobian of what TFP takes for it."""
    latent, columns, law = ROWS_IN_EVENTS[kind]

    def model(ones):
        z = yield Sharded(latent(tfd, ones), name="z")
        yield Sharded(tfd.Normal(z.reshape(z.shape[0], -1).sum(1), 1.0), name="y")

    ones = gm.place(np.ones(13, np.float32), MESH, P("data"))
    target = JointDistributionCoroutine(model, ones, mesh=MESH).condition(y=np.linspace(-1, 1, 13))
    assert target.origin()["z"].shape == (13, *columns)
    x = np.random.default_rng(0).normal(size=(13, *columns)).astype(np.float32)
    state = gm.HMC(target, 0.1, 1).init({"z": x})
    z = np.asarray(target.kept(state.position)["z"])[:13].astype(float)
    expected = law.logpdf(z).sum()
    expected += stats.norm.logpdf(np.linspace(-1, 1, 13), z.reshape(13, -1).sum(1)).sum()
    if law is HALF:
        bijector = tfd.HalfNormal(2.0).experimental_default_event_space_bijector()
        np.testing.assert_allclose(z, bijector.forward(x), rtol=1e-6)
        expected += np.sum(bijector.forward_log_det_jacobian(x, event_ndims=0), dtype=float)
    else:
        np.testing.assert_array_equal(z, x)
    np.testing.assert_allclose(total(state.terms), expected, rtol=1e-6)


def test_numpyros_rows_in_an_event_are_taken_apart():
    def model(x):
        yield Sharded(dist.Normal(x, 1.0).to_event(2), name="z")
        yield Sharded(dist.Normal(0.0, 1.0), num_rows=13, name="u")

    x = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
    joint = JointDistributionCoroutine(model, gm.place(x, MESH, P("data")), mesh=MESH)
    target = joint.condition(u=np.zeros(13))
    state = gm.HMC(target, 0.1, 1).init({"z": np.zeros((13, 3))})
    expected = stats.norm.logpdf(x.astype(float)).sum() + 13 * stats.norm.logpdf(0)
    np.testing.assert_allclose(total(state.terms), expected, rtol=1e-6)


def test_an_event_that_couples_its_rows_is_refused_with_a_cure():
    coupled = dist.MultivariateNormal(jnp.zeros(8), jnp.eye(8))
    joint = JointDistributionNamed({"u": Sharded(coupled), "y": Sharded(NORMAL, num_rows=8)}, mesh=MESH)
    with pytest.raises(CannotStream, match=r"num_rows=.*arguments of the model.*out of Sharded"):
        joint.condition(y=ROWS)


def test_a_half_normal_near_zero_seldom_diverges(tfd):
    """Without its bijector half of the line has no density: 1,987 of 4,000 transitions diverged."""
    parts = [tfd.HalfNormal(0.05), lambda s: tfd.Normal(0.0, 1.0 + s)]
    target = JointDistributionSequential(parts).condition(var1=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gm.SamplingWarning)
        kernel = gm.HMC(target, 0.1, 8, jitter=0.5)
        options = {"num_chains": 4, "num_warmup": 200, "num_samples": 100, "progress": False}
        draws = gm.sample(KEY, target, kernel=kernel, **options)
    assert np.sum(draws.stats["is_divergent"]) < 8
    assert np.all(np.asarray(draws.position["var0"]) > 0)


def test_a_distribution_without_a_bijector_is_refused():
    class Unknown(tfp_like.HalfNormal):
        def experimental_default_event_space_bijector(self):
            return None

    joint = JointDistributionNamed({"s": Unknown(1.0), "y": lambda s: tfp_like.Normal(s, 1.0)})
    with pytest.raises(ValueError, match="part 's': Unknown has no default event space bijector"):
        joint.condition(y=0.3)


# Axes of the mesh


def values_of_devices(sample):
    return {s.device: np.asarray(s.data) for s in sample.addressable_shards}


def test_rows_over_two_axes_in_either_order():
    """The values are the same; which device has which rows is not. All devices' rows are others."""
    one, other = (
        Sharded(NORMAL, axes, mesh=GRID, num_rows=16).sample(KEY)
        for axes in (("data", "model"), ("model", "data"))
    )
    np.testing.assert_array_equal(one, other)
    assert len(np.unique(one)) == 16
    by_device = [values_of_devices(x) for x in (one, other)]
    assert any(np.any(by_device[0][d] != by_device[1][d]) for d in jax.devices())


def test_two_axes_of_an_array_on_two_axes_of_the_mesh(tfd):
    sharded = Sharded(tfd.Normal(jnp.zeros([8, 4]), 1.0), P("data", "model"), mesh=GRID)
    sample = sharded.sample(KEY)
    assert sample.sharding.spec == P("data", "model")
    assert {s.data.shape for s in sample.addressable_shards} == {(2, 2)}
    rows = Sharded(tfd.Normal(jnp.zeros([8, 4]), 1.0), "data", mesh=GRID).sample(KEY)
    np.testing.assert_array_equal(sample, rows)
    expected = stats.norm.logpdf(np.asarray(sample, float)).sum()
    np.testing.assert_allclose(sharded.log_prob(sample), expected, rtol=1e-6)
    assert sharded.sample(KEY, 3).sharding.spec == P(None, "data", "model")
    uneven = Sharded(tfd.Normal(jnp.zeros([5, 4]), 1.0), P("data", "model"), mesh=GRID).sample(KEY)
    assert (uneven.num_rows, uneven.values.sharding.spec) == (5, P("data", "model"))


def test_rows_and_columns_of_data_on_two_axes_of_the_mesh():
    """A matrix of 13 x 4 on 4 x 2 devices."""
    watched = np.random.default_rng(0).integers(0, 2, (13, 4)).astype(np.int32)

    def model():
        u = yield Sharded(tfp_like.Sample(NORMAL, [13, 3]), "data", name="u")
        v = yield tfp_like.Sample(NORMAL, [4, 3], name="v")
        rows = tfp_like.Independent(tfp_like.Bernoulli(u @ v.T), 2)
        yield Sharded(rows, P("data", "model"), name="watched")

    target = JointDistributionCoroutine(model, mesh=GRID).condition(watched=watched)
    (plate,) = target.plates
    assert {s.data.shape for s in plate.data[0].addressable_shards} == {(4, 2)}
    rng = np.random.default_rng(1)
    u, v = rng.normal(size=(13, 3)).astype(np.float32), rng.normal(size=(4, 3)).astype(np.float32)
    state = gm.HMC(target, 0.01, 3).init({"u": u, "v": v})
    logits = u.astype(float) @ v.T
    expected = np.sum(watched * logits - np.logaddexp(0, logits))
    expected += stats.norm.logpdf(u.astype(float)).sum() + stats.norm.logpdf(v.astype(float)).sum()
    np.testing.assert_allclose(total(state.terms), expected, rtol=1e-6)


def test_no_axis_with_and_without_a_mesh(tfd):
    """``axis=()``: the same model, whole on every device, or with no mesh at all."""

    def model(axis):
        w = yield tfd.Normal(0.0, 1.0, name="w")
        yield Sharded(tfd.Normal(w, 1.0), axis, num_rows=13, name="y")

    laid = JointDistributionCoroutine(model, "data", mesh=MESH)
    value = laid.sample(KEY)
    y = np.asarray(value.y.unpad())
    for mesh in (None, MESH):
        joint = JointDistributionCoroutine(model, (), mesh=mesh)
        ours = joint.sample(KEY)
        np.testing.assert_allclose(ours.y, y, atol=5e-7)
        np.testing.assert_allclose(joint.log_prob(ours), laid.log_prob(value), rtol=1e-6)
    target = joint.condition(y=y)
    (plate,) = target.plates
    assert plate.rows.num_blocks == 1
    terms = gm.HMC(target, 0.1, 1).init({"w": value.w}).terms
    np.testing.assert_allclose(total(terms), laid.log_prob(value), rtol=1e-6)


def test_parts_on_different_axes(tfd):
    """Users over one axis and movies over another, each with what is measured of them alone."""

    def model():
        w = yield tfd.Normal(0.0, 1.0, name="w")
        u = yield Sharded(tfd.Normal(w, 1.0), "data", num_rows=8, name="u")
        v = yield Sharded(tfd.Normal(w, 2.0), "model", num_rows=4, name="v")
        yield Sharded(tfd.Normal(u, 1.0), "data", name="of_u")
        yield Sharded(tfd.Normal(v, 1.0), "model", name="of_v")

    joint = JointDistributionCoroutine(model, mesh=GRID)
    value = joint.sample(KEY)
    assert (value.u.sharding.spec, value.v.sharding.spec) == (P("data"), P("model"))
    w, u, v, of_u, of_v = (np.asarray(x, float) for x in value)
    expected = stats.norm.logpdf(w) + stats.norm.logpdf(u, w).sum() + stats.norm.logpdf(v, w, 2).sum()
    expected += stats.norm.logpdf(of_u, u).sum() + stats.norm.logpdf(of_v, v).sum()
    np.testing.assert_allclose(joint.log_prob(value), expected, rtol=2e-6)
    target = joint.condition(of_u=value.of_u, of_v=value.of_v)
    assert len(target.plates) == 2
    state = gm.HMC(target, 0.1, 1).init({"w": value.w, "u": value.u, "v": value.v})
    np.testing.assert_allclose(total(state.terms), expected, rtol=2e-6)


def test_a_mesh_of_explicit_axes_in_a_part():
    mesh = jax.make_mesh((8,), ("data",))
    joint = JointDistributionSequential([NORMAL, Sharded(NORMAL, mesh=mesh, num_rows=8)])
    value = joint.sample(KEY)
    assert value[1].sharding == jax.NamedSharding(mesh, P("data"))
    expected = sum(stats.norm.logpdf(np.asarray(x, float)).sum() for x in value)
    np.testing.assert_allclose(joint.log_prob(value), expected, rtol=1e-6)


# Gradients


@pytest.mark.parametrize("size", [1, 8])
def test_gradients_along_the_path_of_a_sample(tfd, size):
    """Of log p(x(m); m) for x drawn around m, in m and in a scale: 0, and -n / scale."""

    def log_prob_of_its_sample(m, scale):
        parts = [
            tfd.Normal(m, scale),
            lambda w: Sharded(tfd.Normal(w, scale), num_rows=8),
            lambda u, w: Sharded(tfd.Normal(u + w, scale)),
        ]
        joint = JointDistributionSequential(parts, mesh=mesh_of(size))
        return joint.log_prob(joint.sample(KEY))

    of_m, of_scale = jax.jit(jax.grad(log_prob_of_its_sample, (0, 1)))(0.3, 1.5)
    np.testing.assert_allclose([of_m, of_scale], [0, -17 / 1.5], atol=2e-5)


def test_a_diamond_of_parts(tfd):
    """Two parts depend on one, and one on both: each is evaluated once, and its gradient is whole."""
    parts = {
        "a": tfd.Normal(0.0, 1.0),
        "b": lambda a: tfd.Normal(a, 1.0),
        "c": lambda a: tfd.Normal(-a, 1.0),
        "d": lambda b, c: Sharded(tfd.Normal(b * c, 1.0), num_rows=8),
    }
    joint = JointDistributionNamed(parts, mesh=MESH)
    value = {"a": 0.5, "b": 1.0, "c": -2.0, "d": ROWS}
    expected = stats.norm.logpdf([0.5, 0.5, -1.5]).sum() + stats.norm.logpdf(ROWS, -2).sum()
    np.testing.assert_allclose(joint.log_prob(value), expected, rtol=1e-6)
    grad = jax.grad(lambda a: joint.log_prob(value | {"a": a}))(0.5)
    np.testing.assert_allclose(grad, -0.5 + 0.5 + 1.5, rtol=1e-6)


# Chains


def sharded_latents():
    w = yield Sharded(tfp_like.Sample(NORMAL, [13, 2]), name="w")
    s = yield tfp_like.HalfNormal(1.0, name="s")
    yield Sharded(tfp_like.Independent(tfp_like.Normal(w, s + 0.1), 2), name="y")


def test_a_chain_with_sharded_momenta_is_the_same_on_any_mesh():
    def chains_on(size):
        joint = JointDistributionCoroutine(sharded_latents, mesh=mesh_of(size))
        target = joint.condition(y=np.linspace(-1, 1, 26).reshape(13, 2))
        options = {"num_chains": 2, "num_warmup": 0, "num_samples": 8, "progress": False}
        start, kernel = gm.prior_start(target), gm.HMC(target, 0.05, 4)
        draws = gm.sample(KEY, target, start, kernel=kernel, **options)
        return jax.tree.map(np.asarray, draws.position), np.asarray(draws.stats["is_accepted"])

    (one, accepted), (eight, also) = chains_on(1), chains_on(8)
    np.testing.assert_array_equal(accepted, also)
    assert accepted.mean() > 0.5
    for name, x in one.items():
        np.testing.assert_allclose(eight[name], x, atol=1e-5)
    rows = np.diff(one["w"], axis=1).reshape(2, 7, 13, 2)[accepted[:, 1:]]
    assert len(np.unique(rows)) == rows.size  # every row has momenta of its own
