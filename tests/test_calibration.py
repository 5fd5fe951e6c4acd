"""Samplers draw from the posterior: calibration and Geweke's test, in forms small enough for every day.

HMC on a mesh whose last device has a pad row, other kernels on one device, and one test a kernel;
``python -m validation`` has all of them. Broken samplers are put to the same tests on the
same seeds, and fail.
"""

import math

import jax
import numpy as np
import pytest
from seeds import seed, within

import gspmd_mcmc as gm
from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.targets.bijections import is_bijection
from validation.sections import geweke, sbc, shapes
from validation.sections.broken import BREAKS, distorted
from validation.sections.sbc import chi_square_p, ecdf_p

THIN, NUM_DRAWS = 5, 31
NUM_CHAINS, NUM_STEPS = 1024, 40


@pytest.fixture(scope="module")
def target():
    return sbc.target_on(gm.make_mesh(chains=2, data=2, devices=jax.devices()[:4]))


def test_the_mesh_has_a_pad_row(target):
    rows = target.plates[0].rows
    assert (rows.num_rows, rows.num_padded) == (sbc.NUM_GROUPS, sbc.NUM_GROUPS + 1)


# Simulation-based calibration of HMC


@pytest.fixture(scope="module")
def hmc(target):
    return sbc.KERNELS["HMC"](target)


def in_one_form(kernel):
    """Return the same sampler in the form that may have wrong Jacobians: most cases share a program."""
    return distorted(kernel, 1.0, 1.0) if kernel.inverse_mass_matrix is None else kernel


def calibrate(kernel, target):
    kernel = in_one_form(kernel)
    return sbc.run(kernel, target, jax.random.key(seed(0)), THIN, num_draws=NUM_DRAWS)


def check_calibrated(*result):
    """No p-value is below `sbc.LEAST_P`; of what is 0 to the last digit its logarithm is finite."""
    within(-math.log10(max(sbc.least_p(*result), 1e-300)), -math.log10(sbc.LEAST_P), "-log10 of p")


@pytest.mark.statistical
def test_hmc_is_calibrated(target, hmc):
    result = calibrate(hmc, target)
    assert len(result[0]) >= 6
    check_calibrated(*result)
    within(sbc.LEAST_WORTH / sbc.efficiency(result[1]), 1, "of the worth of a draw")


@pytest.mark.statistical
@pytest.mark.parametrize("breaks", BREAKS)
def test_calibration_rejects(target, hmc, breaks):
    with pytest.raises(AssertionError, match="-log10 of p"):
        check_calibrated(*calibrate(BREAKS[breaks](hmc), target))


def test_what_breaks_momenta_and_jacobians_breaks_nothing_else(hmc):
    """The form that is calibrated is HMC: its Jacobians, momenta and velocities are the plain one's."""
    form, x = in_one_form(hmc), np.linspace(-2, 2, 5, dtype=np.float32)
    pairs = [
        jax.tree.leaves(
            (kernel.target.bijections, kernel.target.plates[0].bijections), is_leaf=is_bijection
        )
        for kernel in (form, hmc)
    ]
    assert len(pairs[0]) >= 2
    for ours, plain in zip(*pairs, strict=True):
        jacobians = [bijection.log_abs_det_jacobian(x, plain(x)) for bijection in (ours, plain)]
        np.testing.assert_array_equal(ours(x), plain(x))
        np.testing.assert_array_equal(*jacobians)
    position, wrong = {"a": x, "b": x[:3]}, distorted(hmc, 1.0, 2.0)
    momenta = [
        metrics.sample_momentum(jax.random.key(0), kernel.inverse_mass_matrix, position)
        for kernel in (form, hmc, wrong)
    ]
    jax.tree.map(np.testing.assert_array_equal, *momenta[:2])
    assert np.any(momenta[2]["b"] != momenta[1]["b"])
    velocity = metrics.velocity(form.inverse_mass_matrix, momenta[1])
    jax.tree.map(np.testing.assert_array_equal, velocity, momenta[1])


@pytest.mark.statistical
def test_a_sampler_of_the_prior_shows_in_the_log_likelihood_alone(target, hmc):
    """Why the log likelihood is among the functionals: latents of an unseen group are calibrated."""
    p = sbc.p_values(*calibrate(BREAKS["dropped terms"](hmc), target))
    assert min(p["last effect"]) > sbc.LEAST_P
    assert max(p["log likelihood"]) < sbc.LEAST_P


# Geweke's test


def joint_test(kernel, target):
    return geweke.run(kernel, target, jax.random.key(seed(0)), NUM_CHAINS, NUM_STEPS)


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["NUTS", "MAMS"])
def test_joint_distribution(name):
    """On one device, where programs compile soonest; kernels on meshes are compared elsewhere."""
    target = sbc.target_on(None)
    kernel = sbc.KERNELS[name](target)
    z, rate = joint_test(kernel, target)
    assert len(z) >= 6
    within(geweke.largest_z(z), geweke.MOST_Z, "standard errors off")
    assert rate > geweke.LEAST_ACCEPTED
    # The same program, so that every kernel has a negative control at no cost.
    broken, _ = joint_test(BREAKS["dropped terms"](kernel), target)
    with pytest.raises(AssertionError, match="without terms"):
        within(geweke.largest_z(broken), geweke.LEAST_Z_OF_BROKEN, "standard errors off without terms")


# The tests themselves


@pytest.mark.statistical
@pytest.mark.parametrize("p_value", [chi_square_p, ecdf_p])
def test_ranks_that_pile_up_are_rejected(p_value):
    rng = np.random.default_rng(seed(0))
    assert p_value(rng.integers(0, 64, 256), 64) > sbc.LEAST_P
    assert p_value(rng.integers(0, 48, 256), 64) < sbc.LEAST_P
    at_ends = np.where(rng.random(256) < 0.5, rng.integers(0, 16, 256), rng.integers(48, 64, 256))
    assert p_value(at_ends, 64) < sbc.LEAST_P


# The shapes' truths


@pytest.mark.statistical
def test_normals_of_the_shapes_are_those_of_exact_draws():
    """Draws made from the definitions, and not from the density, pass; others do not."""
    rng = np.random.default_rng(seed(0))
    v, z = 3 * rng.normal(size=(4, 500)), rng.normal(size=(4, 500, 9))
    funnel = {"v": v, "x": z * np.exp(v / 2)[..., None]}
    x = rng.normal(0, 10, size=(4, 500))
    banana = {"along": x, "bent": rng.normal(10 - 0.1 * x**2, 1)}
    for shape, draws in ((shapes.centred_funnel(), funnel), (shapes.banana(), banana)):
        within(*shapes.largest_z(shapes.moments(shape.normals(draws))), "standard errors off")
        moved = {name: 1.2 * leaf for name, leaf in draws.items()}
        with pytest.raises(AssertionError, match="of the moved"):
            within(*shapes.largest_z(shapes.moments(shape.normals(moved))), "of the moved")
