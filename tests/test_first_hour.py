"""What a newcomer tries in the first hour: settings where `sample` takes them, mistakes, words."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm

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
    steps, folder = [], tmp_path
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
    longer = gm.resume(folder, TARGET, num_samples=20, progress=False)
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
