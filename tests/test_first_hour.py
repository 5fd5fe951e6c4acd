"""What a newcomer tries in the first hour: settings where `sample` takes them, mistakes, words."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import reporting

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 60).reshape(20, 3)
POSITION = {"w": jnp.zeros(3)}


def log_prior(params):
    return -0.5 * params["w"] ** 2


def log_likelihood(params, block):
    return -0.5 * (block["y"] - block["x"] @ params["w"]) ** 2


TARGET = gm.Posterior(log_prior, gm.Plate(log_likelihood, {"x": X, "y": jnp.ones(20)}))


def sample(target: Any = TARGET, position: Any = POSITION, rng_key: Any = KEY, **options):
    options = {"num_warmup": 30, "num_samples": 10, "progress": False} | options
    return gm.sample(rng_key, target, position, **options)


# Settings of the default kernel and warm-up.


def test_settings_go_where_they_belong_and_are_kept_in_checkpoints(tmp_path):
    steps, folder, settings = [], tmp_path, {}
    for rate in (0.6, 0.99):
        folder = tmp_path / str(rate)
        settings = {"target_acceptance_rate": rate, "max_tree_depth": 2, "metric": gm.Diagonal()}
        draws = sample(checkpoint=folder, num_warmup=60, **settings)
        assert isinstance(draws.kernel, gm.NUTS)
        assert draws.kernel.max_tree_depth == 2
        assert np.max(draws.stats["num_integration_steps"]) <= 3
        metric = draws.kernel.inverse_mass_matrix
        assert isinstance(metric, dict), "by default a dense one is learned"
        steps.append(float(draws.kernel.step_size))
    assert steps[1] < 0.6 * steps[0]
    longer = sample(checkpoint=folder, num_warmup=60, **settings | {"num_samples": 20})
    assert longer.num_draws == 20
    assert longer.kernel.max_tree_depth == 2
    assert float(longer.kernel.step_size) == steps[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tree_depth": 5, "kernel": gm.NUTS(TARGET, 0.1)}, "of the kernel, and a kernel is given"),
        ({"max_tree_depth": 5, "num_chains": 64}, "max_tree_depth: .* JitteredHMC, which has no trees"),
        (
            {"target_acceptance_rate": 0.9, "warmup": gm.WindowAdaptation()},
            r"write warmup=WindowAdaptation\(target_acceptance_rate=0.9\)",
        ),
        (
            {"metric": gm.Dense(), "warmup": gm.PerChainAdaptation()},
            "metric: it is a setting of the warm",
        ),
        (
            {"target_acceptance_rate": 0.9, "kernel": gm.MCLMC(TARGET, 0.1, 1.0)},
            "target_acceptance_rate: .* MCLMCAdaptation, which has no such setting; it has energy_",
        ),
        ({"metric": "dense"}, r"metric: expected an object such as Diagonal\(\), got str"),
        ({"metric": gm.Dense}, "metric: expected .*, got the class Dense itself"),
        ({"kernel": gm.NUTS}, r"kernel: expected .* NUTS\(target, step_size=0.1\), got the class NUTS"),
        ({"kernel": "nuts"}, "kernel: expected an object such as NUTS.*, got str"),
        ({"warmup": gm.WindowAdaptation}, "warmup: expected .*, got the class WindowAdaptation"),
        ({"warmup": gm.WindowAdaptation(metric=gm.Dense)}, "metric: expected .*, got the class Dense"),
        ({"target": gm.Posterior}, "got the class Posterior itself"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, message):
    with pytest.raises(TypeError, match=message):
        sample(**options)


def test_settings_of_a_warm_up_that_is_left_out_are_refused():
    with pytest.raises(ValueError, match="target_acceptance_rate: num_warmup=0 tunes nothing"):
        sample(target_acceptance_rate=0.9, num_warmup=0)
    with pytest.raises(ValueError, match="expected a number between 0 and 1, got 90"):
        sample(target_acceptance_rate=90)


# What is not finite, and what is to blame for it.


def nan_prior(params):
    return jnp.nan * params["w"]


def scaled_prior(scale, params):
    return -0.5 * (params["w"] / scale) ** 2


def without_derivative(x):  # finite at 0, where its gradient is NaN
    return -jnp.linalg.norm(x)


NAN_DATA = {"x": X, "y": jnp.ones(20), "unread": jnp.full(20, jnp.nan)}


def start_of(prior, data=NAN_DATA, likelihood=log_likelihood):
    target = gm.Posterior(prior, gm.Plate(likelihood, data))
    with pytest.raises(gm.NonFiniteStart) as raised:
        sample(target)
    return str(raised.value)


def test_a_prior_that_is_not_finite_is_blamed_and_no_data():
    message = start_of(nan_prior)
    assert "log_prior (nan_prior): its summand ['prior'] has 3 values" in message
    assert "unread" not in message


def test_what_a_prior_binds_is_blamed_where_it_is_not_finite():
    message = start_of(Partial(scaled_prior, jnp.float32(jnp.nan)))
    assert "['prior'] has 3 values" in message
    assert "data .log_prior" in message


def test_data_are_blamed_for_the_row_that_reads_them():
    message = start_of(log_prior, NAN_DATA | {"y": jnp.ones(20).at[7].set(jnp.nan)})
    assert "1 rows have a term that is NaN or infinite, the first is row 7" in message
    assert "data .plates[0].data['y'] has 1 values" in message


def test_a_gradient_that_is_not_finite_is_named_and_no_run_begins():
    target = gm.LogDensity(without_derivative)
    message = r"finite, but its gradient at \(the whole\) has 3 values"
    with pytest.raises(gm.NonFiniteStart, match=message):
        gm.HMC(target, 0.1, 1).init(jnp.zeros(3))
    with pytest.raises(gm.NonFiniteStart, match=r"chains \[2\] of 4 .* in chain 2 .*" + message):
        sample(target, gm.per_chain(jnp.ones((4, 3)).at[2].set(0)))


# Raw errors that get words.


def closed_over(params, block):
    return -0.5 * (block["y"] - block["x"] @ params["w"]) ** 2 + jnp.zeros(200)


def reshaped(params, block):
    return log_likelihood(params, block).reshape(200)


@pytest.mark.parametrize("likelihood", [closed_over, reshaped])
def test_a_number_of_rows_that_is_written_into_a_likelihood_is_named(likelihood):
    rows = {"x": jnp.ones((200, 3)), "y": jnp.ones(200)}
    message = f"{likelihood.__name__}: it takes all 200 rows at once, but not a block of 127 of them"
    with pytest.raises(ValueError, match=message):
        sample(gm.Posterior(log_prior, gm.Plate(likelihood, rows)))


MATRIX = "A covariance matrix becomes a metric by .*of_covariances"


@pytest.mark.parametrize("matrix", [jnp.eye(3), jnp.ones((3, 3)), gm.Dense()])
def test_a_matrix_where_variances_are_meant_has_words(matrix):
    with pytest.raises(ValueError, match=MATRIX):
        gm.HMC(TARGET, 0.1, 1, inverse_mass_matrix=matrix).init(POSITION)


def test_a_covariance_is_a_metric_as_the_message_shows():
    metric = gm.DenseMetric.of_covariances(POSITION, np.eye(3) + 0.5)
    state, _ = jax.jit(gm.HMC.step)(
        kernel := gm.HMC(TARGET, 0.1, 1, metric), KEY, kernel.init(POSITION)
    )
    assert np.isfinite(state.log_density)


def test_hmc_names_the_kernel_that_has_a_length():
    with pytest.raises(TypeError, match=r"JitteredHMC\(target, step_size, trajectory_length\)"):
        gm.HMC(TARGET, 0.1, trajectory_length=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="HMC: expected num_integration_steps"):
        gm.HMC(TARGET, 0.1)


def test_a_program_of_ones_own_loops_over_steps_as_the_message_of_sample_shows():
    scan = "jax.lax.scan(lambda state, key: kernel.step(key, state), state, keys)"
    loop = f"lambda kernel, keys, state: {scan}"
    with pytest.raises(TypeError, match=re.escape(f"jax.jit({loop})")):
        jax.jit(lambda key: sample(rng_key=key))(KEY)
    kernel = gm.HMC(TARGET, 0.1, 2)
    _, info = jax.jit(eval(loop))(kernel, jax.random.split(KEY, 5), kernel.init(POSITION))
    assert info.acceptance_rate.shape == (5,)


@pytest.mark.parametrize("y", [np.array(["a"] * 20), np.array([None] * 20)])
def test_labels_that_are_no_numbers_are_named(y):
    with pytest.raises(ValueError, match=r"plate data \['y'\]: expected an array.*np.unique"):
        gm.Plate(log_likelihood, {"x": X, "y": y})


@pytest.mark.parametrize(
    ("position", "error"), [({"weights": jnp.zeros(3)}, KeyError), ({"w": jnp.zeros(2)}, TypeError)]
)
def test_an_error_of_a_users_function_tells_what_it_was_called_with(position, error):
    with pytest.raises(error) as raised:
        sample(position=position)
    name, leaf = next(iter(position.items()))
    expected = f"log_likelihood was called with params {{'{name}': 'float32[{len(leaf)}]'}}, block "
    assert any(note.startswith(expected) for note in raised.value.__notes__)


# Modules: pytrees of arrays that can be called, as equinox has them.


@jax.tree_util.register_dataclass
@dataclass
class Shifted:
    mean: Any
    act: Any  # a leaf that is no array

    def __call__(self, x):
        return -0.5 * (self.act(x) - self.mean) ** 2


def module_prior(module):
    return -0.5 * (module.mean - 3) ** 2


def test_a_module_is_a_position_and_not_called():
    target, position = gm.LogDensity(module_prior), Shifted(jnp.zeros(3), None)
    draws = sample(target, position, num_warmup=0, kernel=gm.HMC(target, 0.1, 3))
    assert type(draws.position) is Shifted
    assert draws.position.mean.shape == (4, 10, 3)
    with pytest.raises(TypeError, match=r"position .act: expected an array of floats, got .*partition"):
        sample(target, Shifted(jnp.zeros(3), jnp.sin))


def test_a_modules_arrays_are_arguments_of_a_log_density(compiled):
    targets = [gm.LogDensity(Shifted(jnp.full(3, x), jnp.sin)) for x in (1.0, 4.0)]
    step, position, found = jax.jit(gm.HMC.step), jnp.ones(3), []
    for target in targets:
        kernel = gm.HMC(target, 0.1, 3)
        assert [leaf.shape for leaf in jax.tree.leaves(target)] == [(3,)]
        found.append(step(kernel, KEY, kernel.init(position))[0].log_density)
    assert sum("step" in name for name in compiled) == 1, compiled
    assert np.isclose(targets[1].terms(position)[0], -0.5 * (np.sin(1) - 4) ** 2)
    assert found[0] != found[1]


# Progress where there is no terminal.


def test_a_log_file_gets_a_line_a_minute(capsys, monkeypatch):
    kernel = gm.HMC(TARGET, 0.1, 1)
    gm.sample(KEY, TARGET, POSITION, kernel=kernel, num_warmup=0, num_samples=10)
    assert capsys.readouterr().err == ""  # it took no minute
    monkeypatch.setattr(reporting, "SECONDS_A_LINE", 0)
    gm.sample(KEY, TARGET, POSITION, kernel=kernel, num_warmup=0, num_samples=10)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"sampling: 10/10 \d+ leapfrogs/s acc \d.\d\d div 0 step 0.1", lines[-1])
    assert len(lines) <= 10


# Precision that was switched between two calls.


@pytest.mark.parametrize("was_double", [False, True])
def test_continuing_in_another_precision_is_refused_in_words(was_double, tmp_path):
    with jax.enable_x64(was_double):
        target = gm.LogDensity(module_prior)
        position = Shifted(jnp.zeros(3), None)
        kernel = gm.HMC(target, 0.1, 3)
        options: dict[str, Any] = {"num_warmup": 0, "kernel": kernel}
        draws = sample(target, position, **options, checkpoint=tmp_path / "run")
        ended = sample(target, position, **options)
    computed = "float64, and JAX now computes in float32" if was_double else "float32, and .* float64"
    with jax.enable_x64(not was_double):
        with pytest.raises(ValueError, match=f"initial_position: .* in {computed}: jax_enable_x64"):
            sample(target, ended, num_warmup=0)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            sample(target, position, **options | {"num_samples": 20}, checkpoint=tmp_path / "run")
        begun = jax.tree.map(np.asarray, ended.state.position)
        again = gm.LogDensity(module_prior)
        more = sample(again, gm.per_chain(begun), num_warmup=0, kernel=gm.HMC(again, 0.1, 3))
        assert more.num_draws == draws.num_draws
