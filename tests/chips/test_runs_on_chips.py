"""Whole runs on chips: warm-ups, what happens between windows, sampling, diagnostics."""

import math
import re
import sys
from typing import Any

import programs
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.columns import TEMPORARY_BYTES
from gspmd_mcmc.planning.run_programs import BUFFERS, SET_UP, STEPS, programs_of

PLAN: Any = sys.modules[gm.plan_sample.__module__]
ONCE = {"start", SET_UP, BUFFERS}  # and the summary's: planned once a model


def audited(run):
    """Say what is wrong with the programs of a run; memory and speed are of all of it."""
    found = []
    for name, program in run.programs.items():
        plan = program.plan
        if plan.compiled is None:
            found.append(f"{name}: refused, {plan.refusal}")
            continue
        if plan.report.unknown:
            found.append(f"{name}: unknown {plan.report.unknown[:3]}")
        if re.search(r"\b(f64|c128)\[", plan.compiled.text):
            found.append(f"{name}: float64")
        if plan.report.largest_constant_bytes > 100_000:
            found.append(f"{name}: {plan.report.constants[0]}")
        found += [f"{name}: {atomic}" for atomic in plan.atomics()]
        names = {loop.name for nest in plan.report.loop_nests for loop in nest}
        if name.startswith(STEPS) and "leapfrog" in names:
            inside = [c for c in plan.report.collectives if c.loops_within("leapfrog") is not None]
            over_rows = [c for c in inside if "data" in c.axes]
            if [c.kind for c in over_rows] != ["all-reduce"]:
                found.append(f"{name}: in a leapfrog {inside}")
    return found


@pytest.fixture
def only(monkeypatch):
    """Plan the programs of a run of which a test says so."""

    def some(is_wanted):
        def programs_of_some(*args):
            found = programs_of(*args)
            for name in [name for name in found.calls if not is_wanted(name)]:
                del found.calls[name]
            return found

        monkeypatch.setattr(PLAN, "programs_of", programs_of_some)

    return some


@pytest.mark.parametrize(
    ("on", "axes", "model", "kernel", "most"),
    [
        ("TPU v3", {"data": 8}, "mnist", programs.KERNELS["HMC"], 100e6),
        ("8 x H100", {"data": 8}, "movielens", None, 500e6),
    ],
)
def test_a_run_fits_with_its_draws(on, axes, model, kernel, most):
    """All of it, from the start to the diagnostics, which take blocks as large as they may."""
    counts: dict[str, Any] = {"num_chains": 2, "num_warmup": 200, "num_samples": 100}
    run = gm.plan_sample(programs.MODELS[model], on=on, kernel=kernel, **axes, **counts)
    print(run)
    assert audited(run) == []
    assert run.fits
    sizes = {name: program.peak_bytes for name, program in run.programs.items()}
    summaries = {name for name in sizes if name.startswith("summary of ")}
    assert max(size for name, size in sizes.items() if name not in summaries) < most
    # A block's temporaries are bounded by what CPUs take; a TPU's sorts and whole tiles take more.
    assert 0 < max(sizes[name] for name in summaries) < 2 * TEMPORARY_BYTES + most
    assert set(sizes) > ONCE
    draws = run.programs[BUFFERS].plan.report.output_bytes
    shapes = programs.MODELS[model](gm.make_abstract_mesh(data=8))[1]
    numbers = sum(math.prod(x.shape) for x in shapes.values()) / 8  # at least that many on a device
    assert run.peak_bytes > draws > counts["num_chains"] * counts["num_samples"] * 4 * numbers
    assert run.roofline().per_second > 100


WARM_UPS: dict[str, Any] = {
    "SNAPER": ("TPU v3", {"data": 8}, "mnist", programs.KERNELS["JitteredHMC"], gm.SNAPERAdaptation()),
    "ChEES": ("8 x H100", {"data": 8}, "mnist", programs.KERNELS["JitteredHMC"], gm.ChEESAdaptation()),
    "MAMS": ("TPU v5e", {"chains": 2, "data": 4}, "mnist", programs.KERNELS["MAMS"], None),
    "MCLMC": ("8 x H100", {"data": 8}, "mnist", programs.KERNELS["MCLMC"], None),
    "low rank": ("TPU v3", {"data": 8}, "mnist", None, gm.WindowAdaptation(metric=gm.LowRank())),
    "per chain": (
        *("TPU v3", {"chains": 2, "data": 4}, "mnist", programs.KERNELS["HMC"]),
        gm.PerChainAdaptation(gm.WindowAdaptation(metric=gm.Diagonal())),
    ),
}


@pytest.mark.parametrize("name", WARM_UPS)
def test_a_warm_up_is_right_on_chips(name, only):
    on, axes, model, kernel, warmup = WARM_UPS[name]
    only(
        lambda program: (
            program == "start" or re.match(f"{STEPS}|begin|end|stuck|{BUFFERS}|{SET_UP}", program)
        )
    )
    counts: dict[str, Any] = {"num_chains": 4, "num_warmup": 200, "num_samples": 100}
    run = gm.plan_sample(programs.MODELS[model], on=on, kernel=kernel, warmup=warmup, **axes, **counts)
    assert audited(run) == []
    assert run.fits
