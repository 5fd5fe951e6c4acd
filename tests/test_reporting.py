"""What a run tells while it goes on: callback, JSON lines, log, profile; and what took the memory."""

import gzip
import json
import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import run as runs

KEY = jax.random.key(0)
WARMUP, DRAWS, CHAINS = 40, 25, 4


def log_prior(x):
    return -0.5 * x["w"] ** 2


def log_likelihood(x, rows):
    return -0.5 * (rows["y"] - x["w"][0]) ** 2


@pytest.fixture(scope="module")
def target():
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, {"y": jnp.ones(12)}))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 10)


def run(target, **changes):
    options: dict[str, Any] = {"num_samples": DRAWS, "num_warmup": WARMUP} | changes
    options |= {"kernel": gm.HMC(target, 0.3, 3), "num_chains": CHAINS, "progress": False}
    return gm.sample(KEY, target, {"w": jnp.zeros(2)}, **options)


def test_a_callback_is_told_every_chunk(target, small_chunks):
    reports = []
    draws = run(target, callback=reports.append)
    for phase, total in (("warm-up", WARMUP), ("sampling", DRAWS)):
        own = [r for r in reports if r.phase == phase]
        assert {r.total for r in own} == {total} and own[-1].done == total
        assert [r.done for r in own] == sorted({r.done for r in own}) and len(own) > 2
    sampled = [r for r in reports if r.phase == "sampling"]
    assert sum(r.leapfrogs for r in sampled) == int(draws.stats["num_integration_steps"].sum())
    assert sampled[-1].num_divergent == draws.num_divergent.sum()
    assert sampled[-1].step_size == pytest.approx(float(draws.kernel.step_size))
    weights = [r.leapfrogs for r in sampled]
    mean = sum(r.acceptance_rate * n for r, n in zip(sampled, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(float(draws.acceptance_rate.mean()), rel=1e-5)


def test_a_callback_that_raises_costs_no_draws(target, small_chunks):
    calls = []

    def callback(report):
        calls.append(report)
        raise KeyError("oops")

    with pytest.warns(gm.SamplingWarning, match="callback: it raised KeyError: 'oops'"):
        draws = run(target, callback=callback)
    assert draws.num_draws == DRAWS and len(calls) == 1


def test_json_lines_hold_the_reports_and_no_nan(target, small_chunks, tmp_path):
    path, reports = tmp_path / "run.jsonl", []
    lines = gm.JSONLines(path)

    def both(report):
        reports.append(report)
        lines(report)

    run(target, callback=both)
    lines(gm.ChunkReport("sampling", 1, 2, 0.5, 10, float("nan"), 0, 0.1))
    *found, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(f["phase"], f["done"], f["leapfrogs"]) for f in found] == [
        (r.phase, r.done, r.leapfrogs) for r in reports
    ]
    assert last["acceptance_rate"] is None and last["leapfrogs_per_second"] == 20.0
    assert last["time"] >= found[0]["time"]


def test_the_log_tells_phases_and_at_debug_chunks(target, small_chunks, caplog):
    with caplog.at_level(logging.INFO, logger="gspmd_mcmc"):
        run(target)
    phases = [r.getMessage() for r in caplog.records]
    assert [m.split(",")[0] for m in phases] == [
        "warm-up: 0 of 40 steps are done",
        "warm-up: 40 of 40 steps",
        "sampling: 0 of 25 steps are done",
        "sampling: 25 of 25 steps",
    ]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="gspmd_mcmc"):
        run(target)
    assert len(caplog.records) > len(phases)


def test_a_profile_shows_the_parts_of_a_run(target, tmp_path):
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # else every Python call is an event
    with jax.profiler.trace(tmp_path, create_perfetto_trace=True, profiler_options=options):
        run(target, to=gm.ZarrSink(tmp_path / "draws"), num_warmup=20, num_samples=2)
    (file,) = tmp_path.rglob("perfetto_trace.json.gz")
    with gzip.open(file) as trace:
        names = {event.get("name", "") for event in json.load(trace)["traceEvents"]}
    parts = {name.removeprefix("gspmd_mcmc ") for name in names if name.startswith("gspmd_mcmc ")}
    assert parts == {"warm-up", "adaptation", "sampling", "I/O"}


def test_memory_that_runs_out_is_explained(target):
    with pytest.raises(gm.OutOfDeviceMemory, match="out of device memory") as error:
        run(target, num_samples=1 << 44)
    text = str(error.value)
    assert "on each device: 18000000000000 draws of w" in text
    assert "Tiles of Plate(log_likelihood, 12 rows) have 12 rows" in text and "tile_rows=3)" in text


def test_memory_that_runs_out_at_the_start_is_explained(target, monkeypatch):
    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    monkeypatch.setattr("gspmd_mcmc.sampling.start.draw_start", fail)
    with pytest.raises(gm.OutOfDeviceMemory, match=r"no room\. The largest .* the target's data .*'y'"):
        run(target)


def test_another_error_of_the_devices_is_left_alone(target):
    def collect(position, info):
        def fail(x):
            raise RuntimeError("not memory")

        return jax.pure_callback(
            fail,
            jax.ShapeDtypeStruct((), jnp.float32),
            position["w"][0],
            vmap_method="sequential",
        )

    # JAX raises the latter where a program fails as it is dispatched.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="not memory"):
        run(target, collect=collect)
