"""E-BFMI is that of every step, whatever is kept of them.

Chains climb slowly from far off, so that their energies fall: each momentum changes the energy little
compared with its range. Thinning leaves the steps as they are, so the truth is the run that keeps all.
"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from seeds import seed

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.energy import OF_STEPS, bfmi
from gspmd_mcmc.sampling import run as runs

pytestmark = pytest.mark.filterwarnings("ignore:.*had not arrived")
STEPS, THIN = 600, 30
TARGET = gm.LogDensity(lambda x: -0.5 * x**2)
KERNELS = {
    "HMC": lambda: gm.HMC(TARGET, 0.05, 1),
    "NUTS": lambda: gm.NUTS(TARGET, 0.02, max_tree_depth=1),
}


def sample(name="HMC", thin=THIN, num_samples=STEPS // THIN, **options):
    start = gm.per_chain(jnp.full((2, 50), 10.0) + jnp.arange(2.0)[:, None])
    counts = {"num_chains": 2, "num_warmup": 0, "thin": thin, "num_samples": num_samples}
    key = jax.random.key(seed(0))
    return gm.sample(key, TARGET, start, kernel=KERNELS[name](), progress=False, **counts, **options)


@cache
def truth(name="HMC"):
    energy = np.asarray(sample(name, thin=1, num_samples=STEPS).stats["energy"], np.float64)
    changes = np.diff(energy, axis=1) ** 2
    return changes.sum(axis=1) / ((energy - energy.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)


@pytest.mark.parametrize("name", KERNELS)
def test_thinned_draws_have_the_e_bfmi_of_every_step(name):
    draws = sample(name)
    assert truth(name).max() < 0.1
    np.testing.assert_allclose(draws.bfmi, truth(name), rtol=1e-3)
    assert np.min(bfmi(draws.stats["energy"])) > 3 * truth(name).max()  # of the energies that are kept
    assert any("E-BFMI is under 0.3 (chain" in text for text in draws.summary().warnings)


@pytest.mark.parametrize("thin", [1, 2, 7])
def test_every_thinning_gives_the_same(thin):
    draws = sample(thin=thin, num_samples=STEPS // thin)
    np.testing.assert_allclose(draws.bfmi, truth(), rtol=0.03 if STEPS % thin else 1e-3)
    assert set(draws.stats) >= set(OF_STEPS) or thin == 1
    assert not set(draws.stats) & set(OF_STEPS) or thin > 1


def test_it_does_not_depend_on_chunks_or_on_where_draws_are(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 3)
    sink = gm.ZarrSink(tmp_path / "draws")
    for draws in (sample(), sample(device_bytes=500), sample(to=sink), gm.open_draws(sink.path)):
        np.testing.assert_allclose(draws.bfmi, truth(), rtol=1e-3)
        assert any("E-BFMI is under" in text for text in draws.summary().warnings)


def test_it_survives_a_stop_and_a_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 3)
    first = sample(checkpoint=tmp_path, callback=lambda report: report.done < 7)
    assert first.num_draws == 7
    np.testing.assert_allclose(sample(checkpoint=tmp_path).bfmi, truth(), rtol=1e-3)


def test_a_store_without_sums_over_steps_says_that_it_is_not_known():
    draws = sample()
    kept = {name: x for name, x in draws.stats.items() if name not in OF_STEPS}
    earlier = dataclasses.replace(draws, stats=kept)
    assert np.isnan(earlier.bfmi).all()
    summary = earlier.summary()
    assert not any("E-BFMI" in text for text in summary.warnings)
    assert any("E-BFMI is not known: one of 30 steps is kept" in x for x in summary.notes)


def test_chains_that_do_not_move_have_none():
    stats = dict.fromkeys(("energy", *OF_STEPS, "log_density"), np.zeros((2, 5)))
    draws = dataclasses.replace(sample(), stats=stats)
    assert np.isnan(draws.bfmi).all()


def test_the_plot_has_it_too():
    draws = sample()
    above, below = gm.plots.energy(draws).axes
    np.testing.assert_array_equal(below.lines[0].get_xdata(), draws.bfmi)
    assert "its changes over 30 steps" in [t.get_text() for t in above.get_legend().get_texts()]
