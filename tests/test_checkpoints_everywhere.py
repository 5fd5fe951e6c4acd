"""Each sampler is saved, killed and continued: in threads, in x64, on 8 devices, on Explicit meshes."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import run as runs

NUM_ROWS = 13
Y = np.random.default_rng(0).normal(size=NUM_ROWS)
SAMPLERS: dict[str, Callable] = {
    "HMC": lambda target: gm.HMC(target, 0.2, 3),
    "NUTS": lambda target: gm.NUTS(target, 0.3, max_tree_depth=3),
    "JitteredHMC": lambda target: gm.JitteredHMC(target, 0.2, 1.0),
    "MAMS": lambda target: gm.MAMS(target, 0.2, 1.0),
    "MCLMC": lambda target: gm.MCLMC(target, 0.2, 1.0),
}


def prior(x):
    return -0.5 * x["mean"] ** 2


def likelihood(x, rows):
    return -0.5 * (rows["y"] - x["z"]) ** 2 - 0.5 * (x["z"] - x["mean"]) ** 2


def one_device() -> Any:
    return gm.make_mesh(data=1, devices=jax.devices()[:1])


def eight_devices() -> Any:
    return gm.make_mesh(chains=2, data=4)


def explicit() -> Any:
    return jax.make_mesh((2, 4), ("chains", "data"), axis_types=(AxisType.Explicit,) * 2)


class Killed(Exception):
    """The end of a run between two chunks."""


@contextlib.contextmanager
def killed_after(num_chunks: int) -> Iterator[None]:
    """End runs of this thread when they have saved as many chunks."""
    chunk, done, thread = runs.Run.chunk, [], threading.get_ident()

    def chunk_or_die(self, *args, **options):
        if threading.get_ident() == thread:
            done.append(1)
            if len(done) > num_chunks:
                raise Killed
        chunk(self, *args, **options)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(runs.Run, "chunk", chunk_or_die)
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 6)


def run(sampler: str, mesh: Any, path: Any = None) -> gm.Draws:
    """Run the script, which saves the run after each chunk."""
    target = gm.Posterior(prior, gm.Plate(likelihood, gm.place({"y": Y}, mesh, P("data")), local="z"))
    return gm.sample(
        jax.random.key(0),
        target,
        {"mean": jnp.zeros(()), "z": jnp.zeros(NUM_ROWS)},
        kernel=SAMPLERS[sampler](target),
        num_chains=4,
        num_warmup=12,
        num_samples=12,
        checkpoint=path,
        every=0,
        progress=False,
    )


def assert_continued_runs_are_whole_runs(sampler: str, mesh: Any, path: Any) -> gm.Draws:
    """Kill a run in warm-up and again in sampling; compare with one that nothing interrupts."""
    for num_chunks in (2, 2):
        with killed_after(num_chunks):
            run(sampler, mesh, path)
    draws, whole = run(sampler, mesh, path), run(sampler, mesh)
    assert 0 < draws.num_draws == whole.num_draws
    for ours, theirs in ((draws.position, whole.position), (draws.stats, whole.stats)):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    # The chains have moved: what is compared is not where they started.
    assert np.std(draws.position["z"]) > 0.1
    return draws


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("mesh", [eight_devices, explicit])
def test_on_eight_devices(sampler, mesh, tmp_path):
    assert_continued_runs_are_whole_runs(sampler, mesh(), tmp_path)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_under_x64(sampler, tmp_path):
    with jax.enable_x64(True):
        draws = assert_continued_runs_are_whole_runs(sampler, one_device(), tmp_path)
    assert draws.position["z"].dtype == np.float64


def test_in_threads(tmp_path):
    """All five at once, each in its thread."""
    found: dict[str, Any] = {}

    def act(sampler):
        try:
            found[sampler] = run(sampler, one_device(), tmp_path / sampler)
        except Exception as error:
            found[sampler] = error

    whole = {name: run(name, one_device()) for name in SAMPLERS}
    for _ in range(2):  # begun, and continued: there is nothing left to draw
        threads = [threading.Thread(target=act, args=(name,)) for name in SAMPLERS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
        assert not any(thread.is_alive() for thread in threads)
        for sampler, draws in whole.items():
            jax.tree.map(np.testing.assert_array_equal, found[sampler].position, draws.position)
