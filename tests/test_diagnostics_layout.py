"""Diagnostics on 8 devices: what is sent, what is held, and where results lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.energy import bfmi
from gspmd_mcmc.diagnostics.ess import ess_mean, ess_sd, ess_tail
from gspmd_mcmc.diagnostics.mcse import mcse_sd
from gspmd_mcmc.diagnostics.rhat import nested_rhat, rank_nested_rhat, rhat
from gspmd_mcmc.diagnostics.statistics import statistics

LARGE = (4, 1000, 6040, 20)  # a local latent of MovieLens
BUDGET = 256 * 2**20

nested = functools.partial(nested_rhat, num_superchains=2)
rank_nested = functools.partial(rank_nested_rhat, num_superchains=2)
OF_RANKS = {"rhat": rhat, "ess_tail": ess_tail, "rank_nested": rank_nested}
OF_MOMENTS = {"mcse_sd": mcse_sd, "nested": nested}
ALL = {**OF_RANKS, **OF_MOMENTS, "statistics": statistics}


def laid(shape, mesh, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


@pytest.mark.parametrize("name", ALL)
def test_columns_over_devices_send_nothing_and_fit(name):
    """120,800 columns: 242 MB of draws on each device, and less than 256 MiB beside them."""
    program = compiled(ALL[name], laid(LARGE, gm.make_mesh(data=8), None, None, "data"))
    report = gm.communication(program)
    assert report.collectives == ()
    assert report.temporary_bytes < BUDGET
    assert {s.spec for s in jax.tree.leaves(program.output_shardings)} == {P("data")}
    results = len(jax.tree.leaves(program.output_shardings))
    # A tuple of results has 8 bytes of its own for each.
    assert 0 <= report.output_bytes - 755 * 20 * 4 * results <= 8 * results


def test_columns_of_the_last_axis_over_devices_send_nothing_either():
    for function in (rhat, ess_sd):
        x = laid((4, 100, 20, 80), gm.make_mesh(data=8), *[None] * 3, "data")
        assert gm.communication(compiled(function, x)).collectives == ()
    long = laid((4, 1000, 3, 160_000), gm.make_mesh(data=8), *[None] * 3, "data")
    report = gm.communication(compiled(ess_mean, long))
    assert report.collectives == ()
    assert report.temporary_bytes < BUDGET


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="its compiler cuts transforms over devices")
def test_a_fourier_transform_of_the_compiler_would_gather():
    """The control: with `jnp.fft` all columns come to every device."""

    def transform(x):
        return jnp.abs(jnp.fft.rfft(x, axis=1)).sum(axis=(0, 1))

    x = laid((4, 64, 800), gm.make_mesh(data=8), None, None, "data")
    assert gm.communication(compiled(transform, x)).count("all-gather") > 0


@pytest.mark.parametrize("name", OF_RANKS)
def test_ranks_of_chains_over_devices_send_along_chains_only(name):
    """The chains of a device's own columns are brought together: draws, and folded draws or scores."""
    shape = (4, 100, 800, 4)
    draws = laid(shape, gm.make_mesh(chains=2, data=4), "chains", None, "data")
    program = compiled(ALL[name], draws)
    report = gm.communication(program)
    assert {c.axes for c in report.collectives} == {("chains",)}
    assert 1 <= report.count("all-gather") <= 2
    of_all_chains = 4 * np.prod(shape) // 4
    assert sum(c.num_bytes for c in report.collectives) < 2.1 * of_all_chains
    assert {s.spec for s in jax.tree.leaves(program.output_shardings)} == {P("data")}


@pytest.mark.parametrize("name", OF_MOMENTS)
def test_moments_of_chains_over_devices_are_reduced_over_chains(name):
    """No draw is sent: sums over chains, the longest of them of autocovariances."""
    shape = (4, 100, 800, 4)
    draws = laid(shape, gm.make_mesh(chains=2, data=4), "chains", None, "data")
    report = gm.communication(compiled(ALL[name], draws))
    assert {(c.kind, c.axes) for c in report.collectives} == {("all-reduce", ("chains",))}
    half_lags = 4 * 100 // 2 * 800 * 4 // 4
    assert sum(c.num_bytes for c in report.collectives) < 4 * half_lags


def walks():
    return np.random.default_rng(0).normal(size=(4, 30, 16, 3)).cumsum(axis=1).astype(np.float32)


def test_placed_draws_give_the_same_results_laid_out_as_the_columns():
    """Chains and columns over devices; columns alone are a part of it, and send nothing (above)."""
    mesh = gm.make_mesh(chains=2, data=4)
    placed = jax.device_put(walks(), NamedSharding(mesh, P("chains", None, "data")))
    found, unplaced = statistics(placed), statistics(walks())
    for here, there in zip(found, unplaced, strict=True):
        assert here.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
        np.testing.assert_allclose(here, there, rtol=2e-4)
    assert bfmi(placed[:, :, 0, 0]).shape == (4,)
