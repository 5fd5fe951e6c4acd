"""Each bad input has an error of its own, which names what is wrong."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.adaptation import dual_averaging
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.diagnostics.summary import summarize

KEY = jax.random.key(0)
MESH = gm.make_mesh(chains=2, data=4)
X = np.linspace(-1, 1, 20, dtype=np.float32).reshape(10, 2)
Y = np.ones(10, np.float32)
NOT_FINITE = (jnp.nan, jnp.inf, -jnp.inf)
NORMAL = gm.LogDensity(models.normal)
regression = models.regression


def log_of_y(params, block):
    return jnp.log(block["y"]) * jnp.sum(params["w"] ** 2)


def log_prior(params):
    return -0.5 * params["w"] ** 2


def log_prior_of_one(params):
    return log_prior(params) + 0 * jnp.zeros_like(params["free"])


def regression_of_one(params, block):
    _ = jnp.exp(params["free"])
    return regression(params, block)


def flat(params):
    return jnp.zeros(())


def data(x=X, y=Y):
    return gm.place({"x": x, "y": y}, MESH, P("data"))


def posterior(likelihood=regression, prior=log_prior, **arrays):
    return gm.Posterior(prior, gm.Plate(likelihood, data(**arrays)))


TARGET = posterior()
POSITION = {"w": np.zeros(2, np.float32)}
FREE = {"free": np.zeros(1, np.float32)}


def init(target: Any = TARGET, position: Any = POSITION):
    return gm.HMC(target, 0.1, 1).init(position)


def sample(target: Any = TARGET, position=POSITION, rng_key=KEY, **options):
    options = {"num_warmup": 0, "num_samples": 1, "progress": False} | options
    return gm.sample(rng_key, target, position, **options)


def both(**given):
    """Give it to a kernel and to `sample`, which must not hide the error while it looks for chains."""
    with pytest.raises((TypeError, ValueError)) as error:
        init(**given)
    with pytest.raises(type(error.value), match=re.escape(str(error.value)[:60])):
        sample(**given)
    raise error.value


def at_w(leaf):
    return {"position": {"w": leaf}}


def with_one(array, index, value):
    changed = np.array(array)
    changed[index] = value
    return changed


def refuses(call, error, match):
    with pytest.raises(error, match=match):
        call()


# Numbers that are not finite.


@pytest.mark.parametrize("value", NOT_FINITE)
def test_data_and_starts_that_are_not_finite_are_named(value):
    target = posterior(x=with_one(X, (7, 1), value))
    named = r"data .*\['x'\] has 1 values that are NaN or inf"
    refuses(lambda: init(target), gm.NonFiniteStart, named)
    start = {"w": jnp.array([0.0, value])}
    refuses(lambda: init(position=start), gm.NonFiniteStart, r"position \['w'\] has 1 values")


def log_of_all(x):
    return {"good": -(x**2), "bad": jnp.log(x)}


ZERO_Y = with_one(with_one(Y, 5, 0), 8, -1)  # copies of the last row, which are pad, have a logarithm
NONFINITE = {
    "data of chains": (
        lambda: sample(posterior(y=with_one(Y, 3, np.nan))),
        r"chains \[0, 1, 2, 3\] of 4.*data .*\['y'\] has 1",
    ),
    "start of a chain": (
        lambda: sample(position={"w": with_one(np.zeros((4, 2), np.float32), (2, 1), np.nan)}),
        r"chains \[2\] of 4 .* in chain 2 position \['w'\]",
    ),
    "row": (
        lambda: init(posterior(log_of_y, y=ZERO_Y), {"w": jnp.ones(2)}),
        r"Plate\(log_of_y, 10 rows .*: 2 rows have a term .* the first is row 5",
    ),
    "summand": (
        lambda: init(gm.LogDensity(log_of_all), jnp.array([-1.0, 1.0, 0.0])),
        r"its summand \['bad'\] has 2 values",
    ),
    "every drawn start": (
        lambda: sample(position=lambda key: {"w": jnp.full(2, jnp.nan)}),
        r"chains \[0, 1, 2, 3\] of 4.*position \['w'\] has 2",
    ),
}


@pytest.mark.parametrize("what", NONFINITE)
def test_what_is_not_finite_at_a_start_is_named(what):
    call, match = NONFINITE[what]
    refuses(call, gm.NonFiniteStart, match)


def test_chains_that_accept_next_to_nothing_are_warned_of_in_the_run_and_in_its_summary():
    """The energy of a step that is too large for its scale errs by hundreds, not by a thousand."""
    kernel = gm.HMC(NORMAL, 3.0, 1)
    with pytest.warns(gm.SamplingWarning, match="next to no proposal is accepted: the median accept"):
        draws = sample(NORMAL, {"w": jnp.full(3, 2.0)}, kernel=kernel, num_samples=20)
    assert not np.any(draws.stats["is_divergent"])
    assert any(x.startswith("next to no proposal is accepted") for x in draws.summary().warnings)


@pytest.mark.parametrize("beyond", [jnp.nan, jnp.inf])
def test_proposals_that_are_not_finite_are_divergent_and_never_kept(beyond):
    target = gm.LogDensity(lambda x: jnp.where(x < 1, -0.5 * x**2, beyond))
    kernel = gm.HMC(target, 0.5, 5)
    with pytest.warns(gm.SamplingWarning) as warned:
        draws = sample(target, gm.per_chain(jnp.zeros(4)), kernel=kernel, num_samples=64)
    assert any("transitions after warm-up diverged" in str(w.message) for w in warned)
    x, stats = np.asarray(draws.position), jax.tree.map(np.asarray, draws.stats)
    assert x.max() < 1
    assert np.isfinite(stats["log_density"]).all()
    assert not (stats["is_accepted"] & stats["is_divergent"]).any()
    assert (stats["acceptance_rate"][stats["is_divergent"]] == 0).all()
    assert stats["is_divergent"].any(axis=1).all()
    assert stats["is_accepted"].any(axis=1).all()


# Positions.


def of_two(x):
    return -(x[0] ** 2)


def padded(num_rows, mesh=MESH):
    return gm.place(np.zeros(num_rows, np.float32), mesh, P("data"))


OTHER_MESH = gm.make_mesh(model=2, devices=jax.devices()[:2])
NOT_FLOATING = r"position \['w'\]: expected a floating dtype, got "
UNREAD = r"position \['free'\]: neither log_prior nor a plate reads it"
NO_POSITION = "position: expected a tree with at least one array"
INT = jnp.zeros(2, int)
# Of each the error, the position, and what else differs.
POSITIONS = [
    (TypeError, NOT_FLOATING + "int32", {"w": INT}, {}),
    (TypeError, NOT_FLOATING, lambda key: {"w": INT}, {}),
    (ValueError, UNREAD, POSITION | FREE, {}),
    # Read times nothing.
    (ValueError, UNREAD, POSITION | FREE, {"target": posterior(prior=log_prior_of_one)}),
    # Read for nothing, in the program of each device.
    (ValueError, UNREAD, POSITION | FREE, {"target": posterior(regression_of_one)}),
    (
        *(ValueError, r"position \[1\]: nothing reads it", [jnp.zeros(2), jnp.zeros(2)]),
        {"target": gm.LogDensity(jax.jit(of_two))},
    ),
    (ValueError, NO_POSITION, {}, {}),
    (ValueError, NO_POSITION, None, {}),
    (ValueError, r"\['w'\]: got Padded\(float32\[12\]: 9 rows \+ 3 pad", {"w": padded(9)}, {}),
    (
        *(ValueError, "num_chains=4.*accepts it with and without.*per_chain.*uniform_start"),
        *(np.zeros((4, 3), np.float32), {"target": NORMAL}),
    ),
    (
        *(ValueError, r"per_chain .* \['w'\]: .* leading axis of num_chains=4, got shape \(3, 2\)"),
        *(gm.per_chain({"w": np.zeros((3, 2), np.float32)}), {}),
    ),
    (ValueError, "lies on .* but mesh=", gm.place({"w": np.zeros(2)}, OTHER_MESH, P("model")), {}),
    (
        *(ValueError, r"position \['w'\] lies over mesh axis 'data', which the rows"),
        *(gm.place({"w": np.zeros(4)}, MESH, P("data")), {}),
    ),
]


@pytest.mark.parametrize(("error", "match", "position", "options"), POSITIONS)
def test_a_position_that_is_none_is_refused(error, match, position, options):
    """One that nothing reads would be walked to 4e12: nothing but the momentum moves chains."""
    refuses(lambda: sample(position=position, **options), error, match)


@pytest.mark.parametrize(("match", "position"), [(NOT_FLOATING, {"w": INT}), (UNREAD, POSITION | FREE)])
def test_a_kernel_and_sample_say_the_same(match, position):
    refuses(lambda: both(position=position), (TypeError, ValueError), match)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_position_of_few_digits_is_refused(dtype):
    """A chain whose moves are rounded to them has twice the standard deviation of its target."""
    match = rf"position \['w'\]: expected float32 or float64, got {jnp.dtype(dtype).name}"
    leaf = jnp.zeros(2, dtype)
    refuses(lambda: both(**at_w(leaf)), TypeError, match)
    refuses(lambda: sample(position=lambda key: {"w": leaf}), TypeError, match)


def test_a_latent_that_a_bijection_alone_reads_is_refused():
    exp = pytest.importorskip("numpyro.distributions").transforms.ExpTransform()
    target = gm.LogDensity(of_two, bijections=[None, exp])
    match = r"position \[1\]: nothing reads it"
    refuses(lambda: init(target, [jnp.zeros(2), jnp.zeros(2)]), ValueError, match)


def test_a_flat_prior_is_taken_where_the_likelihood_reads_the_latent():
    assert np.isfinite(init(posterior(jax.jit(regression), flat)).log_density)


@pytest.mark.parametrize(
    ("mark", "shape"), [(gm.per_chain, (4, 1, 3)), (gm.uniform_start, (4, 1, 4, 3))]
)
def test_per_chain_and_uniform_start_say_which(mark, shape):
    draws = sample(NORMAL, mark(jnp.zeros((4, 3))), kernel=gm.HMC(NORMAL, 0.1, 4))
    assert draws.position.shape == shape


# Data and log densities.


def a_sum(params, block):
    return jnp.sum(regression(params, block))


def a_column(params, block):
    return regression(params, block)[:, None]


def nothing(params, block=None):
    return None


def integers(params, block):
    return jnp.ones(block["y"].shape, int)


def an_integer(params):
    return {"a": jnp.zeros(()), "b": jnp.ones((), int)}


def positive(x):
    return jnp.sum(x["w"] > 0)


# Blocks of 12 padded rows over 4 devices have 3 rows.
NO_TERMS = r": expected one term for each row of the block, shape \[3\].*got "
NO_LEAF = "expected a tree with at least one array, got no leaf"
PLATES = [
    (r"\['x'\] has 10, \['y'\] has 9", {"x": X, "y": Y[:9]}, {}),
    (r"\['s'\]: expected a leading axis of rows, got a scalar.*Partial", {"x": X, "s": 1.0}, {}),
    (NO_LEAF, None, {}),
    (r"expected at least one row, got none in \['x'\]", {"x": X[:0]}, {}),
    ("tile_rows: expected", {"x": X}, {"tile_rows": 2.5}),
]
INTEGER = "expected floating summands, got dtype int32"
TARGETS = [
    (ValueError, r"a_sum" + NO_TERMS + r"float32\[\]", posterior(a_sum)),
    (ValueError, "a_column" + NO_TERMS + r"float32\[3, 1\]", posterior(a_column)),
    (ValueError, "nothing" + NO_TERMS + "None", posterior(nothing)),
    (TypeError, "integers: expected floating terms, got dtype int32", posterior(integers)),
    (TypeError, rf"an_integer: {INTEGER} at \['b'\]", posterior(prior=an_integer)),
    (TypeError, f"positive: {INTEGER}", gm.LogDensity(positive)),
    # A forgotten return would otherwise sample from a flat density, or leave the prior out.
    (TypeError, "nothing: expected", gm.LogDensity(nothing)),
    ((TypeError, ValueError), "nothing: expected", posterior(prior=nothing)),
]


@pytest.mark.parametrize(("match", "rows", "options"), PLATES)
def test_a_plate_that_is_wrong_is_refused(match, rows, options):
    refuses(lambda: gm.Plate(regression, rows, **options), ValueError, match)


@pytest.mark.parametrize(("error", "match", "target"), TARGETS)
def test_a_target_that_is_wrong_is_refused(error, match, target):
    refuses(lambda: init(target), error, match)


def test_parts_of_a_target_of_another_kind_are_refused():
    padded_data = r"LogDensity data \[0\]\['x'\]: got Padded.*use Posterior"
    refuses(lambda: gm.LogDensity(flat, data()), ValueError, padded_data)
    no_plate: Any = regression
    match = "Posterior: plate 0: expected a Plate, got function"
    refuses(lambda: gm.Posterior(log_prior, no_plate), TypeError, match)


# Arguments of a run.


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("num_chains", 0, 1),
        ("num_chains", 4.0, 1),
        ("num_warmup", -1, 0),
        ("num_samples", 1.5, 0),
        ("num_samples", "3", 0),
        ("num_samples", True, 0),
        ("num_samples", None, 0),
        ("thin", 0, 1),
    ],
)
def test_a_count_that_is_none_is_refused(name, value, least):
    match = re.escape(f"{name}: expected an integer of at least {least}, got {value!r}")
    refuses(lambda: sample(**{name: value}), ValueError, match)


def test_numpy_integers_are_counts():
    counts = {"num_chains": np.int64(2), "num_warmup": np.int32(2), "num_samples": np.int64(3)}
    warmup = gm.WindowAdaptation(adapt_step_size=False)
    draws = sample(NORMAL, jnp.zeros(()), kernel=gm.HMC(NORMAL, 0.1, 5), warmup=warmup, **counts)
    assert (draws.num_chains, draws.num_draws) == (2, 3)


SETTINGS = [
    ("checkpoint", 3, "checkpoint: expected the path of a folder, got 3"),
    ("every", None, "every: expected a number of seconds, got None"),
    ("every", True, "every: expected a number of seconds, got True"),
    ("device_bytes", True, "device_bytes: expected a number of bytes or None, got True"),
    ("device_bytes", "1GB", "device_bytes: expected"),
    ("progress", "no", "progress: expected True or False, got 'no'"),
    ("collect", "w", "collect: expected a function, got 'w'"),
    ("callback", "log", "callback: expected a function, got 'log'"),
    (
        "num_chains",
        3,
        "num_chains=3 does not divide over mesh axis 'chains' of size 2; use a multiple of 2",
    ),
    ("rng_key", jax.random.PRNGKey(0), r"rng_key: expected one typed key, jax\.random\.key.*uint32"),
    ("rng_key", jax.random.split(KEY, 2), r"rng_key: expected one typed key, .*shape \(2,\)"),
    ("rng_key", 0, "rng_key: expected one typed key, .*got int"),
    ("position", {"w": "0"}, r"position \['w'\]: expected an array of fl.* str"),
    ("position", {"w": None}, r"got no leaf \(None is no leaf\)"),
    ("to", "draws", r"to: expected an object such as ZarrSink.*, got str"),
    ("collect", lambda x, info: None, "collect: expected arrays to keep"),
]


@pytest.mark.parametrize(("name", "value", "match"), SETTINGS)
def test_a_setting_of_another_kind_is_refused(name, value, match):
    refuses(lambda: sample(**{name: value}), (TypeError, ValueError), match)


def test_a_key_that_depends_on_the_layout_warns():
    key = jax.random.key(0, impl="rbg")
    with pytest.warns(gm.SamplingWarning, match="kind rbg: only threefry keys give the same chain"):
        draws = sample(NORMAL, gm.per_chain(jnp.zeros(4)), key, kernel=gm.HMC(NORMAL, 0.1, 4))
    assert draws.num_draws == 1


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, float("nan")])
def test_a_target_acceptance_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="target_acceptance_rate: expected a number between 0 and 1"):
        gm.WindowAdaptation(target_acceptance_rate=rate)


@pytest.fixture(scope="module")
def draws():
    return sample(kernel=gm.HMC(TARGET, 0.1, 4))


@pytest.mark.parametrize("wrong", [("w",), (["w"],), (3.0,), (None, "w"), (None, 2.5), (None, -1)])
def test_a_summary_of_no_number_of_superchains_or_rows_is_refused(wrong, draws):
    name = ("num_superchains", "max_rows")[len(wrong) - 1]
    with pytest.raises((TypeError, ValueError), match=f"{name}: expected an integer"):
        draws.summary(*wrong)


def test_earlier_draws_are_continued_with_their_own_target_kernel_and_chains(draws):
    match = r"these draws are of another target.*per_chain\(draws\.state"
    refuses(lambda: sample(posterior(), draws), ValueError, match)
    match = "have 4 chains, got 2"
    refuses(lambda: sample(position=draws, num_chains=2), ValueError, match)
    match = "with their own kernel"
    refuses(lambda: sample(position=draws, kernel=draws.kernel), ValueError, match)


# Kernels.


@pytest.mark.parametrize("is_double", [False, True])
def test_a_kernel_of_another_precision_is_refused(is_double):
    with jax.enable_x64(is_double):
        kernel = gm.HMC(TARGET, 0.1, 1)
    match = "kernel: its numbers are float.*jax_enable_x64 was switched"
    with jax.enable_x64(not is_double):
        refuses(lambda: sample(kernel=kernel, rng_key=jax.random.key(0)), ValueError, match)


KERNELS = {
    "step_size": ([0, -0.1, float("nan"), float("inf"), np.ones(2), "a", None], "a positive number"),
    "num_integration_steps": ([0, -1, 1.5, np.ones(2, int)], ""),
    "jitter": ([-0.1, 1.1, float("nan")], "a number between 0 and 1"),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, (vs, _) in KERNELS.items() for v in vs])
def test_a_setting_of_a_kernel_out_of_range_is_refused(name, value):
    settings = {"step_size": 0.1, "num_integration_steps": 1} | {name: value}
    with pytest.raises((TypeError, ValueError), match=f"HMC: {name}: expected {KERNELS[name][1]}"):
        gm.HMC(TARGET, **settings)


def test_changing_a_kernel_checks_what_building_one_does():
    kernel = gm.HMC(TARGET, 0.1, 1)
    with pytest.raises(ValueError, match="HMC: step_size: expected a positive number, got -1"):
        kernel.with_step_size(-1)
    with pytest.raises(ValueError, match="HMC: num_integration_steps: expected at least 1.* got 0"):
        kernel.with_num_integration_steps(0)


@pytest.mark.parametrize(
    "metric",
    [{"w": jnp.ones(3)}, {"w": jnp.ones(())}, {"v": jnp.ones(2)}, jnp.ones(2), {"w": -jnp.ones(2)}],
)
def test_an_inverse_mass_matrix_unlike_the_position_is_refused(metric):
    with pytest.raises(ValueError, match="inverse_mass_matrix"):
        sample(kernel=gm.HMC(TARGET, 0.1, 1, inverse_mass_matrix=metric))


@pytest.mark.parametrize("target", [flat, 3, None])
def test_what_is_no_target_is_refused(target):
    match = r"(HMC|NUTS): expected a target .*; wrap .*LogDensity.* class of your own is a .*Target"
    refuses(lambda: gm.HMC(target, 0.1, 1), TypeError, match)
    refuses(lambda: sample(target), TypeError, match)


def test_a_kernel_of_another_target_is_refused():
    kernel = gm.HMC(posterior(), 0.1, 1)
    refuses(lambda: sample(kernel=kernel), ValueError, "kernel: it was built on another target")


def test_a_kernel_may_be_made_in_a_program_of_numbers_and_a_metric_from_outside():
    """They are known while the program is staged, where jnp would trace what they are compared with."""
    step_size, negative, metric = jnp.float32(0.1), jnp.float32(-0.1), jnp.float32(2.0)

    def step_size_of(x):
        return x * gm.HMC(NORMAL, step_size, 10, inverse_mass_matrix=metric).step_size

    assert float(jax.jit(step_size_of)(1.0)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="HMC: step_size: expected a positive number"):
        jax.jit(lambda x: x * gm.HMC(NORMAL, negative, 10).step_size)(1.0)


# Chains that cannot move, or are none.


def nowhere_but_at_zero(x):
    return jnp.where(x == 0, -0.5 * x**2, jnp.nan)


# The gradient is zero where the chains are, so that none tells MAMS and MCLMC a first step.
@pytest.mark.parametrize(
    ("kernel", "num_warmup"),
    [(gm.NUTS, 0), (gm.MAMS, 300), (gm.MCLMC, 300)],
)
def test_chains_that_diverge_at_every_step_stay_and_say_so(kernel, num_warmup):
    target = gm.LogDensity(nowhere_but_at_zero)
    kernel = kernel(target, 0.1) if kernel is gm.NUTS else kernel(target, 0.1, 1.0)
    start = gm.per_chain(jnp.zeros((4, 3)))
    with pytest.warns(gm.SamplingWarning, match="40 of 40 transitions after warm-up diverged"):
        draws = sample(target, start, kernel=kernel, num_warmup=num_warmup, num_samples=10)
    assert not np.any(draws.position) and 0 < draws.kernel.step_size < np.inf
    assert "no chain has moved" in str(draws.summary())


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_step_size_that_nothing_stops_stays_in_float32(rate):
    def update(i, state):
        return dual_averaging.update(state, jnp.float32(rate), 0.8)

    state = jax.lax.fori_loop(0, 5000, update, dual_averaging.init(jnp.float32(1)))
    bound = (dual_averaging.LEAST_STEP_SIZE, dual_averaging.MOST_STEP_SIZE)[int(rate)]
    assert float(jnp.exp(state.log_step_size)) == pytest.approx(bound, rel=1e-3, abs=0)
    assert float(dual_averaging.final_step_size(state)) == pytest.approx(bound, rel=1e-3, abs=0)


def test_an_axis_of_no_chains_is_refused():
    start = gm.per_chain(jnp.zeros((0, 3)))
    match = "expected a leading axis of num_chains=4, got shape"
    refuses(lambda: sample(NORMAL, start), ValueError, match)
    match = "num_chains: expected an integer of at least 1, got 0"
    refuses(lambda: sample(NORMAL, start, num_chains=0), ValueError, match)
    with pytest.raises(ValueError, match="with one chain or more"):
        rhat(jnp.zeros((0, 10, 3)))


def test_a_latent_without_variance_leaves_a_metric_and_no_warning_of_its_own():
    draws = jnp.stack([jnp.ones((4, 50)), jax.random.normal(KEY, (4, 50))], axis=-1)
    metric = gm.Diagonal()
    moments = metric.init(draws[:, 0])
    for i in range(draws.shape[1]):
        moments = metric.update(moments, draws[:, i])
    variance = np.asarray(metric.final(moments, draws[:, 0]))
    assert np.all(np.isfinite(variance)) and np.all(variance > 0)
    text = str(summarize({"x": draws}, {"log_density": draws[..., 1]}))
    assert "x[0]" in text and "over 1.01" not in text


# Local latents.

ON_8 = gm.make_mesh(data=8)
ROWS = gm.place(np.ones(13, np.float32), ON_8, P("data"))
FEWER_ROWS = gm.place(np.ones(12, np.float32), ON_8, P("data"))
OF_ROWS = {"mean": np.zeros(16, np.float32), "theta": np.zeros(13, np.float32)}


def with_theta(x, y):
    return -0.5 * (y - x["theta"]) ** 2 - 0.5 * (x["theta"] - jnp.mean(x["mean"])[None]) ** 2


def reads_theta(x, y):
    return -(x["theta"] ** 2) * y


def reads_mean_only(x, y):
    return -0.5 * (y - jnp.mean(x["mean"])[None]) ** 2


def prior_of_theta(x):
    return models.prior_of_mean(x), -0.5 * x["theta"] ** 2


def sees_its_own(x, y):
    """NaN in the row of a two."""
    assert set(x) == {"mean", "rho"}, "not its own latents"
    return jnp.where(y == 2, jnp.nan, -((x["rho"] - jnp.mean(x["mean"])[None]) ** 2))


def local_posterior(local: Any = "theta", prior=models.prior_of_mean, likelihood=with_theta, more=None):
    plate = gm.Plate(likelihood, ROWS, local=local)
    return gm.Posterior(prior, plate) if more is None else gm.Posterior(prior, plate, more)


def over_rows(*shape):
    return jax.device_put(jnp.zeros(shape), jax.sharding.NamedSharding(ON_8, P("data")))


def test_local_latents_that_are_right_are_accepted():
    """The same calls as below, with nothing wrong: rows as they are, or padded by `place`."""
    for theta in (OF_ROWS["theta"], padded(13, ON_8), jnp.zeros(13)):
        assert np.isfinite(init(local_posterior(), OF_ROWS | {"theta": theta}).log_density)
    alone = gm.Posterior(None, gm.Plate(reads_theta, ROWS, local=True))
    state = init(alone, {"theta": np.full(13, 2, np.float32)})
    np.testing.assert_allclose(state.log_density, -4 * 13, rtol=1e-6)


OF_13 = r"position \['theta'\] is local to a plate of 13 rows \+ 3 pad.*leading axis of 13, got"
NO_PREFIX = r"local: .* is no prefix of the parameters .*'theta'"
TWO = gm.place(np.where(np.arange(12) == 7, 2, 1).astype(np.float32), ON_8, P("data"))
# Of each the error, what the target is made with, and what the position has besides.
LOCAL = [
    (OF_13, {}, {"theta": np.zeros(12, np.float32)}),
    (OF_13, {}, {"theta": np.zeros((12, 3), np.float32)}),
    (OF_13, {}, {"theta": np.float32(0)}),
    (OF_13 + r" shape \(16,\)", {}, {"theta": over_rows(16)}),  # as many as with the padding
    (OF_13 + " Padded.*14 rows", {}, {"theta": padded(14, ON_8)}),
    (
        r"\['theta'\] is local to plates of other rows: 13 rows.*, and 12 rows",
        {"more": gm.Plate(reads_theta, FEWER_ROWS, local="theta")},
        {},
    ),
    (r"no leaf 'thata'; they have \['mean', 'theta'\]", {"local": "thata"}, {}),
    ("no leaf 'rho'; they have", {"local": ("theta", "rho")}, {}),
    (NO_PREFIX, {"local": {"theta": True}}, {}),
    (NO_PREFIX, {"local": (False, True)}, {}),
    (NO_PREFIX, {"local": {"theta": {"x": True}}}, {}),
    (r"the log likelihood does not read \['theta'\]", {"likelihood": reads_mean_only}, {}),
    (
        r"position \['mean'\] lies over mesh axis 'data'.*Plate\(\.\.\., local=",
        {},
        {"mean": over_rows(16)},
    ),
    (r"position \['mean'\]: got Padded", {}, {"mean": padded(15, ON_8)}),
    ("log_prior: .theta. is local to a plate", {"prior": prior_of_theta}, {}),
    (r"log_prior: it is None, but rows share .*'mean'.*log_prior=lambda", {"prior": None}, {}),
    (
        "sees_its_own.*1 rows have a term that is NaN .* the first is row 7",
        {"more": gm.Plate(sees_its_own, TWO, local="rho")},
        {"rho": np.zeros(12, np.float32)},
    ),
    (r"position \['theta'\] has", {}, {"theta": with_one(OF_ROWS["theta"], 12, np.nan)}),
]


@pytest.mark.parametrize("start", [init, sample])
@pytest.mark.parametrize(("match", "made_with", "more"), LOCAL)
def test_what_is_wrong_with_local_latents_is_named(match, made_with, more, start):
    """By a kernel and by `sample`, which must not hide the error while it looks for chains."""
    with pytest.raises(ValueError, match=match) as error:
        start(local_posterior(**made_with), OF_ROWS | more)
    is_finite = "NaN" not in str(error.value)
    assert isinstance(error.value, gm.NonFiniteStart) != is_finite


def test_a_metric_of_other_rows_is_named():
    metric = {"mean": np.ones(16), "theta": np.ones(12)}
    with pytest.raises(ValueError, match=r"\['theta'\] is local to a plate of 13 rows.*got"):
        gm.HMC(local_posterior(), 0.1, 2, metric)


@pytest.mark.parametrize("wrong", [3, b"theta", ["theta", True], {"theta": 1}, np.ones(2)])
def test_local_of_another_type_is_shown(wrong):
    with pytest.raises(TypeError, match="local: expected names of leaves, or a tree of True and False"):
        gm.Plate(with_theta, ROWS, local=wrong)
