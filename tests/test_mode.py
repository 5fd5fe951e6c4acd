"""A mode that was found is returned, whatever its curvature or a later step does."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import mode as modes

KEY = jax.random.key(seed(0))
TIMES = jnp.linspace(0.1, 2.0, 12)
SCALE = 0.1


@jax.custom_vjp
def decay(rate, times):
    """Solve x' = -rate x, x(0) = 1, by a function whose gradient is its own, as a solver's is."""
    return jnp.exp(-rate * times)


def _forwards(rate, times):
    return decay(rate, times), (rate, times)


def _backwards(kept, ct):
    rate, times = kept
    return jnp.sum(ct * -times * decay(rate, times)), jnp.zeros_like(times)


decay.defvjp(_forwards, _backwards)


def on_host(rate, times):
    """Return exp(-rate times), computed by NumPy."""
    return jax.pure_callback(
        lambda r, t: np.exp(-np.asarray(r) * np.asarray(t)), jax.typeof(times), rate, times
    )


@jax.custom_vjp
def decay_on_host(rate, times):
    return on_host(rate, times)


def _backwards_on_host(kept, ct):
    rate, times = kept
    return jnp.sum(ct * -times * on_host(rate, times)), jnp.zeros_like(times)


decay_on_host.defvjp(lambda rate, times: (on_host(rate, times), (rate, times)), _backwards_on_host)


def solve(rate, times):
    ode = pytest.importorskip("jax.experimental.ode")
    found = ode.odeint(lambda x, t, rate: -rate * x, jnp.ones(()), jnp.insert(times, 0, 0.0), rate)
    return found[1:]


def log_density(solution, rate, times, observed):
    return -0.5 * ((observed - solution(rate, times)) / SCALE) ** 2


def target_of(solution):
    observed = jnp.exp(-1.3 * TIMES)  # Without noise: the mode is 1.3.
    return gm.LogDensity(lambda rate, *data: log_density(solution, rate, *data), TIMES, observed)


# At the mode the residuals vanish, and the curvature is the sum of squared derivatives.
CURVATURE = float(np.sum((np.asarray(TIMES) * np.exp(-1.3 * np.asarray(TIMES)) / SCALE) ** 2))


@pytest.mark.parametrize("solution", [decay, solve], ids=["custom_vjp", "odeint"])
def test_a_gradient_of_its_own_has_a_curvature(solution):
    mode = gm.find_mode(KEY, target_of(solution), jnp.float32(1.0), tolerance=1e-6)
    assert mode.is_converged
    np.testing.assert_allclose(mode.position, 1.3, atol=2e-3)
    np.testing.assert_allclose(mode.curvature, CURVATURE, rtol=2e-2)


NO_HESSIAN = "find_mode: the Hessian cannot be computed, so the curvature is left at one"


def test_a_gradient_without_derivative_leaves_the_mode_and_warns_before_the_search(monkeypatch):
    with pytest.warns(gm.SamplingWarning, match=NO_HESSIAN):
        mode = gm.find_mode(KEY, target_of(decay_on_host), jnp.float32(1.0), tolerance=1e-6)
    np.testing.assert_allclose(mode.position, 1.3, atol=2e-3)
    assert mode.is_converged and float(mode.curvature) == 1.0
    monkeypatch.setattr(modes, "_climb", lambda *args, **options: pytest.fail("it climbed"))
    with warnings.catch_warnings(), pytest.raises(gm.SamplingWarning, match=NO_HESSIAN):
        warnings.simplefilter("error")
        gm.find_mode(KEY, target_of(decay_on_host), jnp.float32(1.0))


def test_no_probes_ask_for_no_hessian():
    mode = gm.find_mode(KEY, target_of(decay_on_host), jnp.float32(1.0), num_probes=0)
    np.testing.assert_allclose(mode.position, 1.3, atol=1e-2)


def test_a_hessian_that_runs_out_of_memory_leaves_the_mode(monkeypatch):
    class Curvature:
        """A program that is lowered, and fails as it runs."""

        lower = staticmethod(modes._curvature.lower)

        def __call__(self, *args, **options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(modes, "_curvature", Curvature())
    with pytest.warns(gm.SamplingWarning, match=f"{NO_HESSIAN}.*RESOURCE_EXHAUSTED"):
        mode = gm.find_mode(KEY, target_of(decay), jnp.float32(1.0), tolerance=1e-6)
    np.testing.assert_allclose(mode.position, 1.3, atol=2e-3)


def test_coupled_rows_are_found_before_the_search(monkeypatch):
    plate = gm.Plate(lambda mu, y: -0.5 * (y - y.mean() - mu) ** 2, jnp.arange(8.0))
    target = gm.Posterior(lambda mu: -0.5 * mu**2, plate)
    monkeypatch.setattr(modes, "_climb", lambda *args, **options: pytest.fail("it climbed"))
    with pytest.raises(gm.CoupledRows, match="depends on the rows beside it"):
        gm.find_mode(KEY, target, jnp.float32(0.0))


@jax.custom_vjp
def with_a_wrong_gradient(x):
    return -0.5 * x**2


with_a_wrong_gradient.defvjp(
    lambda x: (with_a_wrong_gradient(x), x), lambda x, cotangent: (cotangent * x,)
)


def test_a_search_that_finds_no_step_is_not_converged():
    """The gradient has the wrong sign: at 2, where it is taken for a gain, each step loses."""
    target = gm.LogDensity(with_a_wrong_gradient)
    with pytest.warns(gm.SamplingWarning, match="stopped where a step should gain .* no step gains"):
        mode = gm.find_mode(jax.random.key(0), target, jnp.full(3, 2.0), num_probes=0)
    assert not mode.is_converged
    np.testing.assert_array_equal(mode.position, 2.0)
