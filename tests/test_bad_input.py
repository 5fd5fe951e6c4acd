"""Each bad input has an error of its own, which names what is wrong."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.adaptation import dual_averaging
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.diagnostics.summary import summarise

KEY = jax.random.key(0)
MESH = gm.make_mesh(chains=2, data=4)
X = np.linspace(-1, 1, 20, dtype=np.float32).reshape(10, 2)
Y = np.ones(10, np.float32)
NOT_FINITE = (jnp.nan, jnp.inf, -jnp.inf)


def log_prior(params):
    return -0.5 * params["w"] ** 2


def log_likelihood(params, block):
    return -0.5 * (block["y"] - block["x"] @ params["w"]) ** 2


def log_of_y(params, block):
    return jnp.log(block["y"]) * jnp.sum(params["w"] ** 2)


def data(x=X, y=Y):
    return gm.place({"x": x, "y": y}, MESH, P("data"))


def posterior(likelihood=log_likelihood, prior=log_prior, **arrays):
    return gm.Posterior(prior, gm.Plate(likelihood, data(**arrays)))


TARGET = posterior()
POSITION = {"w": np.zeros(2, np.float32)}


def sample(target: Any = TARGET, position=POSITION, rng_key=KEY, **options):
    options = {"num_warmup": 0, "num_samples": 1, "progress": False} | options
    return gm.sample(rng_key, target, position, **options)


def with_one(array, index, value):
    changed = np.array(array)
    changed[index] = value
    return changed


# Numbers that are not finite.


@pytest.mark.parametrize("value", NOT_FINITE)
def test_data_that_are_not_finite_are_named(value):
    target = posterior(x=with_one(X, (7, 1), value))
    with pytest.raises(gm.NonFiniteStart, match=r"data .*\['x'\] has 1 values that are NaN or inf"):
        gm.HMC(target, 0.1, 1).init(POSITION)


def test_sample_names_data_that_are_not_finite():
    target = posterior(y=with_one(Y, 3, np.nan))
    with pytest.raises(gm.NonFiniteStart, match=r"chains \[0, 1, 2, 3\] of 4.*data .*\['y'\] has 1"):
        sample(target)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_start_that_is_not_finite_is_named(value):
    with pytest.raises(gm.NonFiniteStart, match=r"position \['w'\] has 1 values"):
        gm.HMC(TARGET, 0.1, 1).init({"w": jnp.array([0.0, value])})


def test_a_chain_whose_start_is_not_finite_is_named():
    position = {"w": with_one(np.zeros((4, 2), np.float32), (2, 1), np.nan)}
    with pytest.raises(gm.NonFiniteStart, match=r"chains \[2\] of 4 .* in chain 2 position \['w'\]"):
        sample(position=position)


def test_the_row_whose_term_is_not_finite_is_named():
    """Rows 5 and 8 alone lie where the logarithm is not finite; copies of the last row do not."""
    target = posterior(log_of_y, y=with_one(with_one(Y, 5, 0), 8, -1))
    message = r"Plate\(log_of_y, 10 rows .*: 2 rows have a term .* the first is row 5"
    with pytest.raises(gm.NonFiniteStart, match=message):
        gm.HMC(target, 0.1, 1).init({"w": jnp.ones(2)})


def test_the_summand_that_is_not_finite_is_named():
    target = gm.LogDensity(lambda x: {"good": -(x**2), "bad": jnp.log(x)})
    with pytest.raises(gm.NonFiniteStart, match=re.escape("its summand ['bad'] has 2 values")):
        gm.HMC(target, 0.1, 1).init(jnp.array([-1.0, 1.0, 0.0]))


def test_a_start_that_never_is_finite_ends_in_an_error():
    with pytest.raises(gm.NonFiniteStart, match=r"chains \[0, 1, 2, 3\] of 4.*position \['w'\] has 2"):
        sample(position=lambda key: {"w": jnp.full(2, jnp.nan)})


def test_chains_that_accept_next_to_nothing_are_warned_of_in_the_run_and_in_its_summary():
    """The energy of a step that is too large for its scale errs by hundreds, not by a thousand."""
    kernel = gm.HMC(gm.LogDensity(log_prior), 3.0, 1)
    with pytest.warns(gm.SamplingWarning, match="next to no proposal is accepted: the median accept"):
        draws = sample(kernel.target, {"w": jnp.full(3, 2.0)}, kernel=kernel, num_samples=20)
    assert not np.any(draws.stats["is_divergent"])
    assert any(x.startswith("next to no proposal is accepted") for x in draws.summary().warnings)


def nan_beyond_wall(x):
    return jnp.where(x < 1, -0.5 * x**2, jnp.nan)


def infinite_beyond_wall(x):
    return jnp.where(x < 1, -0.5 * x**2, jnp.inf)


def nothing_beyond_wall(x):
    return jnp.where(x < 1, -0.5 * x**2, -jnp.inf)


@pytest.mark.parametrize("fn", [nan_beyond_wall, infinite_beyond_wall, nothing_beyond_wall])
def test_proposals_that_are_not_finite_are_divergent_and_never_kept(fn):
    target = gm.LogDensity(fn)
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


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64, jnp.uint8])
def test_a_position_that_is_not_floating_is_refused(dtype):
    message = re.escape("position ['w']: expected a floating dtype, got " + jnp.dtype(dtype).name)
    with pytest.raises(TypeError, match=message):
        sample(position={"w": jnp.zeros(2, dtype)})
    with pytest.raises(TypeError, match=message):
        gm.HMC(TARGET, 0.1, 1).init({"w": jnp.zeros(2, dtype)})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_position_of_few_digits_is_refused(dtype):
    """A chain whose moves are rounded to them has twice the standard deviation of its target."""
    message = re.escape(f"position ['w']: expected float32 or float64, got {jnp.dtype(dtype).name}")
    for start in ({"w": jnp.zeros(2, dtype)}, lambda key: {"w": jnp.zeros(2, dtype)}):
        with pytest.raises(TypeError, match=message):
            sample(position=start)
    with pytest.raises(TypeError, match=message):
        gm.HMC(TARGET, 0.1, 1).init({"w": jnp.zeros(2, dtype)})


def test_a_drawn_start_that_is_not_floating_is_refused():
    with pytest.raises(TypeError, match=re.escape("position ['w']: expected a floating dtype")):
        sample(position=lambda key: {"w": jnp.zeros(2, int)})


def log_prior_of_one(params):
    return -0.5 * params["w"] ** 2 + 0 * jnp.zeros_like(params["free"])


@jax.jit
def likelihood_of_one(params, block):
    return -0.5 * (block["y"] - block["x"] @ params["w"]) ** 2


@pytest.mark.parametrize("prior", [log_prior, log_prior_of_one, None])
def test_a_latent_that_nothing_reads_is_refused(prior):
    """Chains would walk it to 4e12, as nothing but the momentum moves them; R-hat alone would tell."""
    plate = gm.Plate(likelihood_of_one, data())
    target = gm.Posterior(flat if prior is None else prior, plate)
    position = POSITION | {"free": np.zeros(1, np.float32)}
    message = re.escape("position ['free']: neither log_prior nor a plate reads it")
    with pytest.raises(ValueError, match=message):
        sample(target, position)
    with pytest.raises(ValueError, match=message):
        gm.HMC(target, 0.1, 1).init(position)
    with pytest.raises(ValueError, match=re.escape("position [1]: nothing reads it")):
        sample(gm.LogDensity(jax.jit(lambda x: -(x[0] ** 2))), [jnp.zeros(2), jnp.zeros(2)])


def flat(params):
    return jnp.zeros(())


def test_a_flat_prior_is_taken_where_the_likelihood_reads_the_latent():
    target = gm.Posterior(flat, gm.Plate(likelihood_of_one, data()))
    assert np.isfinite(gm.HMC(target, 0.1, 1).init(POSITION).log_density)


@pytest.mark.parametrize("position", [{}, None, ()])
def test_an_empty_position_is_refused(position):
    with pytest.raises(ValueError, match="position: expected a tree with at least one array"):
        sample(position=position)


def test_a_padded_position_is_refused():
    position = {"w": gm.place(np.zeros(9, np.float32), MESH, P("data"))}
    with pytest.raises(
        ValueError, match=r"position \['w'\]: got Padded\(float32\[12\]: 9 rows \+ 3 pad"
    ):
        sample(position=position)


def test_padded_data_are_refused_where_nothing_masks_them():
    with pytest.raises(ValueError, match=r"LogDensity data \[0\]\['x'\]: got Padded.*use Posterior"):
        gm.LogDensity(lambda x, d: -(x**2), data())


def plain(x):
    return -0.5 * x**2


@pytest.mark.parametrize("position", [np.zeros((4, 3), np.float32), np.zeros(4, np.float32)])
def test_a_position_that_could_have_chains_or_not_is_ambiguous(position):
    message = "leading axis of num_chains=4.*accepts it with and without.*per_chain.*uniform_start"
    with pytest.raises(ValueError, match=message):
        sample(gm.LogDensity(plain), position)


@pytest.mark.parametrize(
    ("mark", "shape"), [(gm.per_chain, (4, 1, 3)), (gm.uniform_start, (4, 1, 4, 3))]
)
def test_per_chain_and_uniform_start_say_which(mark, shape):
    target = gm.LogDensity(plain)
    draws = sample(target, mark(jnp.zeros((4, 3))), kernel=gm.HMC(target, 0.1, 4))
    assert draws.position.shape == shape


def test_per_chain_needs_one_position_a_chain():
    message = r"per_chain position \['w'\]: expected a leading axis of num_chains=4, got shape \(3, 2\)"
    with pytest.raises(ValueError, match=message):
        sample(position=gm.per_chain({"w": np.zeros((3, 2), np.float32)}))


def test_a_position_on_another_mesh_is_refused():
    other = gm.make_mesh(model=2, devices=jax.devices()[:2])
    position = gm.place({"w": np.zeros(2)}, other, P("model"))
    with pytest.raises(ValueError, match=r"position \['w'\] lies on .* but mesh="):
        sample(position=position)


def test_a_shared_latent_on_the_axis_of_the_rows_is_refused():
    position = gm.place({"w": np.zeros(4)}, MESH, P("data"))
    with pytest.raises(
        ValueError, match=r"position \['w'\] lies over mesh axis 'data', which the rows"
    ):
        sample(position=position)


# Data.


def test_leaves_with_different_rows_are_refused():
    with pytest.raises(ValueError, match=re.escape("['x'] has 10, ['y'] has 9")):
        gm.Plate(log_likelihood, {"x": X, "y": Y[:9]})


def test_a_scalar_among_the_data_is_refused():
    message = r"plate data \['s'\]: expected a leading axis of rows, got a scalar.*Partial"
    with pytest.raises(ValueError, match=message):
        gm.Plate(log_likelihood, {"x": X, "s": 1.0})


def test_a_spec_that_names_no_mesh_axis_is_refused():
    with pytest.raises(
        ValueError, match=r"leaf \['x'\] of shape \(10, 2\).*the mesh has no axis 'rows'"
    ):
        gm.place({"x": X}, MESH, P("rows"))


@pytest.mark.parametrize("empty", [{}, None, {"x": []}])
def test_a_plate_of_no_leaf_is_refused(empty):
    with pytest.raises(ValueError, match="expected a tree with at least one array, got no leaf"):
        gm.Plate(log_likelihood, empty)


def test_a_plate_of_no_rows_is_refused():
    with pytest.raises(ValueError, match=r"expected at least one row, got none in \['x'\]"):
        gm.Plate(log_likelihood, {"x": X[:0]})


def test_more_devices_than_exist_are_refused():
    with pytest.raises(ValueError, match="the axes multiply to 64, but there are 8 devices"):
        gm.make_mesh(chains=8, data=8)


@pytest.mark.parametrize("tile_rows", [0, -1, 2.5])
def test_a_tile_of_no_whole_number_of_rows_is_refused(tile_rows):
    with pytest.raises(ValueError, match="tile_rows: expected"):
        gm.Plate(log_likelihood, data(), tile_rows=tile_rows)


# Log densities.


def a_sum(params, block):
    return jnp.sum(log_likelihood(params, block))


def a_column(params, block):
    return log_likelihood(params, block)[:, None]


def a_pair(params, block):
    return log_likelihood(params, block), log_likelihood(params, block)


def nothing(params, block):
    return None


@pytest.mark.parametrize(
    ("likelihood", "got"),
    [(a_sum, "float32[]"), (a_column, "float32[3, 1]"), (a_pair, "('float32[3]', "), (nothing, "None")],
)
def test_a_likelihood_without_a_term_a_row_is_refused(likelihood, got):
    """Blocks of 12 padded rows over 4 devices have 3 rows."""
    expected = f"{likelihood.__name__}: expected one term for each row of the block, shape [3]"
    with pytest.raises(ValueError, match=re.escape(expected) + ".*" + re.escape(f"got {got}")):
        gm.HMC(posterior(likelihood), 0.1, 1).init(POSITION)


def integers(params, block):
    return jnp.ones(block["y"].shape, int)


def test_a_likelihood_that_returns_integers_is_refused():
    with pytest.raises(TypeError, match="integers: expected floating terms, got dtype int32"):
        sample(posterior(integers))


def an_integer(params):
    return {"a": jnp.zeros(()), "b": jnp.ones((), int)}


def test_a_prior_that_returns_integers_is_refused():
    message = r"an_integer: expected floating summands, got dtype int32 at \['b'\]"
    with pytest.raises(TypeError, match=message):
        sample(posterior(prior=an_integer))


def test_a_log_density_that_returns_integers_is_refused():
    with pytest.raises(TypeError, match="expected floating summands, got dtype int32"):
        gm.HMC(gm.LogDensity(lambda x: jnp.sum(x > 0)), 0.1, 1).init(jnp.zeros(3))


def no_summand(params):
    return None


def test_a_log_density_that_returns_nothing_is_refused():
    """A forgotten return would otherwise sample from a flat density, or leave the prior out."""
    with pytest.raises((TypeError, ValueError), match="no_summand: expected"):
        gm.HMC(gm.LogDensity(no_summand), 0.1, 1).init(jnp.zeros(3))
    with pytest.raises((TypeError, ValueError), match="no_summand: expected"):
        gm.HMC(posterior(prior=no_summand), 0.1, 1).init(POSITION)


def test_a_plate_that_is_none_is_refused():
    with pytest.raises(TypeError, match="Posterior: plate 0: expected a Plate, got function"):
        gm.Posterior(log_prior, log_likelihood)  # pyright: ignore[reportArgumentType]


# Counts.


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("num_chains", 0, 1),
        ("num_chains", -4, 1),
        ("num_chains", 4.0, 1),
        ("num_warmup", -1, 0),
        ("num_warmup", 10.0, 0),
        ("num_samples", -1, 0),
        ("num_samples", 1.5, 0),
        ("num_samples", "3", 0),
        ("num_samples", True, 0),
        ("num_samples", None, 0),
        ("thin", 0, 1),
    ],
)
def test_a_count_that_is_none_is_refused(name, value, least):
    message = f"{name}: expected an integer of at least {least}, got {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        sample(**{name: value})


def test_numpy_integers_are_counts():
    target = gm.LogDensity(plain)
    counts = {"num_chains": np.int64(2), "num_warmup": np.int32(2), "num_samples": np.int64(3)}
    warmup = gm.WindowAdaptation(adapt_step_size=False)
    draws = sample(target, jnp.zeros(()), kernel=gm.HMC(target, 0.1, 5), warmup=warmup, **counts)
    assert (draws.num_chains, draws.num_draws) == (2, 3)


@pytest.mark.parametrize("device_bytes", [-1, "1GB"])
def test_device_bytes_that_are_no_size_are_refused(device_bytes):
    with pytest.raises(ValueError, match="device_bytes: expected"):
        sample(device_bytes=device_bytes)


def test_chains_that_their_axis_does_not_divide_are_refused():
    message = "num_chains=3 does not divide over mesh axis 'chains' of size 2; use a multiple of 2"
    with pytest.raises(ValueError, match=message):
        sample(num_chains=3)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, float("nan")])
def test_a_target_acceptance_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="target_acceptance_rate: expected a number between 0 and 1"):
        gm.WindowAdaptation(target_acceptance_rate=rate)


# Keys.


@pytest.mark.parametrize(
    ("key", "got"),
    [
        (jax.random.PRNGKey(0), "dtype uint32"),
        (jax.random.split(jax.random.key(0), 2), r"shape \(2,\)"),
        (0, "got int"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_single_typed_key_is_refused(key, got):
    with pytest.raises(TypeError, match=rf"rng_key: expected one typed key, jax\.random\.key.*{got}"):
        sample(rng_key=key)


def test_a_key_that_depends_on_the_layout_warns():
    target, key = gm.LogDensity(plain), jax.random.key(0, impl="rbg")
    with pytest.warns(gm.SamplingWarning, match="kind rbg: only threefry keys give the same chain"):
        draws = sample(target, gm.per_chain(jnp.zeros(4)), key, kernel=gm.HMC(target, 0.1, 4))
    assert draws.num_draws == 1


@pytest.fixture(scope="module")
def draws():
    return sample(kernel=gm.HMC(TARGET, 0.1, 4))


# Settings of a run.

WRONG = [
    ("checkpoint", 3, "checkpoint: expected the path of a folder, got 3"),
    ("checkpoint", b"run", "checkpoint: expected the path of a folder"),
    ("every", None, "every: expected a number of seconds, got None"),
    ("every", True, "every: expected a number of seconds, got True"),
    ("device_bytes", True, "device_bytes: expected a number of bytes or None, got True"),
    ("progress", "no", "progress: expected True or False, got 'no'"),
    ("collect", "w", "collect: expected a function, got 'w'"),
    ("callback", "log", "callback: expected a function, got 'log'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_setting_of_another_kind_is_refused(name, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sample(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": 3}, "path: expected the path of a folder, got 3"),
        ({"num_samples": "3"}, "num_samples: expected an integer of at least 0, got '3'"),
        ({"progress": "no"}, "progress: expected True or False, got 'no'"),
        ({"callback": "log"}, "callback: expected a function, got 'log'"),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_resume(options, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        gm.resume(**{"path": tmp_path, "target": TARGET, **options})


@pytest.mark.parametrize("wrong", [("w",), (["w"],), (3.0,), (None, "w"), (None, 2.5), (None, -1)])
def test_a_summary_of_no_number_of_superchains_or_rows_is_refused(wrong, draws):
    name = ("num_superchains", "max_rows")[len(wrong) - 1]
    with pytest.raises((TypeError, ValueError), match=f"{name}: expected an integer"):
        draws.summary(*wrong)


@pytest.mark.parametrize("is_double", [False, True])
def test_a_kernel_of_another_precision_is_refused(is_double):
    with jax.enable_x64(is_double):
        kernel = gm.HMC(TARGET, 0.1, 1)
    with (
        jax.enable_x64(not is_double),
        pytest.raises(ValueError, match="kernel: its numbers are float.*jax_enable_x64 was switched"),
    ):
        sample(kernel=kernel, rng_key=jax.random.key(0))


# Kernels.


def test_a_kernel_of_another_target_is_refused():
    with pytest.raises(ValueError, match="kernel: it was built on another target"):
        sample(kernel=gm.HMC(posterior(), 0.1, 1))


@pytest.mark.parametrize("step_size", [0, -0.1, float("nan"), float("inf"), np.ones(2), "a", None])
def test_a_step_size_that_is_not_positive_is_refused(step_size):
    with pytest.raises((TypeError, ValueError), match="HMC: step_size: expected a positive number"):
        gm.HMC(TARGET, step_size, 1)


@pytest.mark.parametrize("count", [0, -1, 1.5, np.ones(2, int)])
def test_a_number_of_leapfrogs_under_one_is_refused(count):
    with pytest.raises(ValueError, match="HMC: num_integration_steps: expected"):
        gm.HMC(TARGET, 0.1, count)


@pytest.mark.parametrize("jitter", [-0.1, 1.1, float("nan")])
def test_a_jitter_out_of_range_is_refused(jitter):
    with pytest.raises(ValueError, match="HMC: jitter: expected a number between 0 and 1"):
        gm.HMC(TARGET, 0.1, 1, jitter=jitter)


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


@pytest.mark.parametrize("target", [plain, 3, None])
def test_a_target_without_terms_is_refused(target):
    missing = r"\['terms', 'grad', 'terms_and_grad'\]"
    message = rf"(HMC|NUTS): expected a target .* without {missing}; wrap .*LogDensity"
    with pytest.raises(TypeError, match=message):
        gm.HMC(target, 0.1, 1)
    with pytest.raises(TypeError, match=message):
        sample(target)


# Draws to go on from.


def test_draws_of_another_target_are_refused(draws):
    with pytest.raises(ValueError, match=r"these draws are of another target.*per_chain\(draws\.state"):
        sample(posterior(), draws)


def test_draws_of_another_number_of_chains_are_refused(draws):
    with pytest.raises(ValueError, match="draws to continue have 4 chains, got 2"):
        sample(position=draws, num_chains=2)


def test_draws_are_not_gone_on_from_with_another_kernel(draws):
    with pytest.raises(ValueError, match="draws are continued with their own kernel"):
        sample(position=draws, kernel=draws.kernel)


def test_a_kernel_may_be_made_in_a_program_of_numbers_and_a_metric_from_outside():
    """They are known while the program is staged, where jnp would trace what they are compared with."""
    target = gm.LogDensity(lambda x: -(x**2))
    step_size, negative, metric = jnp.float32(0.1), jnp.float32(-0.1), jnp.float32(2.0)

    def step_size_of(x):
        return x * gm.HMC(target, step_size, 10, inverse_mass_matrix=metric).step_size

    assert float(jax.jit(step_size_of)(1.0)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="HMC: step_size: expected a positive number"):
        jax.jit(lambda x: x * gm.HMC(target, negative, 10).step_size)(1.0)


# Chains that cannot move, or are none.


def nowhere_but_at_zero(x):
    return jnp.where(x == 0, -0.5 * x**2, jnp.nan)


@pytest.mark.parametrize("kernel", [gm.NUTS, gm.MAMS])
def test_chains_that_diverge_at_every_step_stay_and_say_so(kernel):
    target = gm.LogDensity(nowhere_but_at_zero)
    kernel = kernel(target, 0.1) if kernel is gm.NUTS else kernel(target, 0.1, 1.0)
    with pytest.warns(gm.SamplingWarning, match="40 of 40 transitions after warm-up diverged"):
        draws = sample(target, gm.per_chain(jnp.zeros((4, 3))), kernel=kernel, num_samples=10)
    assert not np.any(draws.position)
    assert "no chain has moved" in str(draws.summary())


@pytest.mark.parametrize("kernel", [gm.NUTS, gm.MAMS, gm.MCLMC])
def test_a_warm_up_in_which_nothing_can_move_ends_with_a_step_size_and_says_so(kernel):
    """The gradient is zero where the chains are, so that none tells MAMS and MCLMC a first step."""
    target = gm.LogDensity(nowhere_but_at_zero)
    kernel = kernel(target, 0.1) if kernel is gm.NUTS else kernel(target, 0.1, 1.0)
    start = gm.per_chain(jnp.zeros((4, 3)))
    with pytest.warns(gm.SamplingWarning, match="40 of 40 transitions after warm-up diverged"):
        draws = sample(target, start, kernel=kernel, num_warmup=300, num_samples=10)
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
    target = gm.LogDensity(nowhere_but_at_zero)
    with pytest.raises(ValueError, match="expected a leading axis of num_chains=4, got shape"):
        gm.sample(KEY, target, gm.per_chain(jnp.zeros((0, 3))), progress=False)
    with pytest.raises(ValueError, match="num_chains: expected an integer of at least 1, got 0"):
        gm.sample(KEY, target, gm.per_chain(jnp.zeros((0, 3))), num_chains=0, progress=False)
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
    text = str(summarise({"x": draws}, {"log_density": draws[..., 1]}))
    assert "x[0]" in text and "over 1.01" not in text
