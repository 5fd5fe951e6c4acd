"""A whole run planned: its programs are those that the run runs. By chips' compilers: tests/chips."""

import functools
import math
import re
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import Accelerator, communication
from gspmd_mcmc.planning.run_programs import BUFFERS, DATA, SET_UP, STEPS, programs_of

SAMPLE: Any = sys.modules[gm.plan_sample.__module__]
RUN: Any = sys.modules["gspmd_mcmc.sampling.run"]
S = jax.ShapeDtypeStruct


def effects_likelihood(params, block):
    z = (params["effect"] - params["mean"]) * jnp.exp(-params["log_sd"])
    return gm.poisson_log_rate(params["effect"], block["count"]) - 0.5 * z**2 - params["log_sd"]


def flat_prior(params):
    return -0.5 * params["mean"] ** 2, -0.5 * params["log_sd"] ** 2


def build(mesh, count: Any = S((2002,), jnp.int32), make: Any = S):  # noqa: B008 - immutable
    data = gm.place({"count": count}, mesh, P("data"))
    target = gm.Posterior(flat_prior, gm.Plate(effects_likelihood, data, local="effect"))
    shapes = {"effect": (2002,), "mean": (), "log_sd": ()}
    return target, {name: make(shape, jnp.float32) for name, shape in shapes.items()}


def hmc(target):
    return gm.HMC(target, step_size=0.1, num_integration_steps=3)


def warm_up():
    return gm.WindowAdaptation(metric=gm.Diagonal())


TURN = "end of warm-up"
COUNTS: dict[str, Any] = {"num_chains": 4, "num_warmup": 30, "num_samples": 12}
# Those that are compiled here, by their names in a plan and in the code; the others are in tests/chips.
PROGRAMS = {SET_UP: "set_up", BUFFERS: "empty_buffers", STEPS: "advance", TURN: "end_stage"}


@pytest.fixture(scope="module")
def planned():
    def some(*args):
        found = programs_of(*args)
        for name in found.calls.keys() - {"start", *PROGRAMS}:
            del found.calls[name]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SAMPLE, "programs_of", some)
        return gm.plan_sample(build, chains=2, data=4, kernel=hmc, warmup=warm_up(), **COUNTS)


@pytest.fixture(scope="module")
def run():
    """Reports of the programs of a run, as each was called first."""
    seen, mesh = {}, gm.make_mesh(chains=2, data=4)

    def watched(name, function):
        def call(*args, **named):
            if name not in seen:
                seen[name] = communication(
                    functools.partial(function, **named) if named else function, *args
                )
            return function(*args, **named)

        return call

    target, position = build(mesh, np.ones(2002, np.int32), jnp.zeros)
    with pytest.MonkeyPatch.context() as patch:
        for name in PROGRAMS.values():
            patch.setattr(RUN, name, watched(name, getattr(RUN, name)))
        kernel, key = hmc(target), jax.random.key(0)
        gm.sample(
            key, target, position, mesh=mesh, kernel=kernel, warmup=warm_up(), progress=False, **COUNTS
        )
    return seen


def wire(report):
    """What a report says of the collectives, in no order."""
    return sorted((c.kind, c.shape, c.axes, tuple(x.name for x in c.loops)) for c in report.collectives)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_is_planned_as_it_runs(name, planned, run):
    ours, theirs = planned.programs[name].plan.report, run[PROGRAMS[name]]
    assert wire(ours) == wire(theirs)
    assert ours.argument_bytes == theirs.argument_bytes
    assert ours.output_bytes == theirs.output_bytes
    assert ours.unknown == ()
    if name == STEPS:
        assert ours.runs("all-reduce", "leapfrog") == 1
        assert ours.alias_bytes == theirs.alias_bytes > 0.9 * ours.output_bytes


def test_a_plan_counts_what_the_run_holds_beside_a_program(planned):
    programs = planned.programs
    draws = programs[BUFFERS].plan.report.output_bytes
    # Of each draw the positions, padded, of the chains and rows of a device, and stats.
    assert draws >= 2 * 12 * 4 * (2002 // 4 + 2)
    assert programs[TURN].beside_bytes == draws
    assert programs[TURN].peak_bytes == programs[TURN].plan.report.peak_bytes + draws
    assert programs[STEPS].beside_bytes == 0
    data = programs["start"].plan.data_bytes
    assert data == 4 * math.ceil(2002 / 4)
    held = data + programs[SET_UP].plan.report.output_bytes
    assert programs[BUFFERS].beside_bytes == held
    assert planned.peak_bytes == max(p.peak_bytes for p in programs.values())
    assert planned.programs[planned.largest].peak_bytes == planned.peak_bytes
    assert planned.fits is None
    assert planned.buffer_draws == 12
    text = str(planned)
    assert f"in {planned.largest!r}" in " ".join(text.split())
    assert all(name in text for name in programs)


def with_device(planned, usable, refusal=None):
    device = Accelerator("toy", usable)
    programs = dict(planned.programs)
    steps = programs[STEPS]
    plan = replace(steps.plan, accelerator=device, refusal=refusal)
    programs[STEPS] = replace(steps, plan=plan)
    return replace(planned, device=device, programs=programs)


def test_a_run_fits_if_every_program_does_with_all_that_lies_beside_it(planned):
    assert with_device(planned, planned.peak_bytes).fits
    small = with_device(planned, planned.peak_bytes - 1)
    assert small.fits is False
    assert "DOES NOT FIT: at most" in str(small)


class Traced(Exception):
    """A run's programs are known; none is to be compiled."""


@pytest.fixture
def traced(monkeypatch):
    """Plan without compiling: give the programs of a run."""
    found = []

    def known(*args):
        found.append(programs_of(*args))
        raise Traced

    def programs(build, mesh=None, **options):
        monkeypatch.setattr(SAMPLE, "programs_of", known)
        with pytest.raises(Traced):
            gm.plan_sample(build, **({"data": 8} if mesh is None else mesh), **(COUNTS | options))
        return found[-1]

    return programs


def whole(mesh):
    """A large latent that is whole on every device."""
    data = gm.place({"x": S((64, 1500), jnp.float32), "y": S((64,), bool)}, mesh, P("data"))
    target = gm.Posterior(lambda p: -0.5 * p["w"] ** 2, gm.Plate(logistic_likelihood, data))
    return target, {"w": S((1500,), jnp.float32)}


def logistic_likelihood(params, block):
    return gm.bernoulli_logits(block["x"] @ params["w"], block["y"])


def test_draws_that_a_device_has_no_room_for_are_summarized_elsewhere(traced, tmp_path):
    found = traced(whole)
    assert {"summary of w", "summary of small leaves"} < set(found.calls)
    assert found.beside["summary of w"] == (DATA, SET_UP, BUFFERS)
    assert found.parts == {"summary of w"}
    assert "cut of draws" not in found.calls
    # 1,234 draws take the program of 1,500.
    assert "cut of draws" in traced(whole, num_samples=1234).calls
    few = traced(whole, num_samples=100, device_bytes=4 * 4 * 1500 * 10)
    assert 1 <= few.buffer_draws < 12
    assert not any("summary" in name for name in few.calls)
    stored = traced(whole, to=gm.ZarrSink(tmp_path / "draws"))
    assert stored.beside[STEPS] == (BUFFERS,)
    assert not any("summary" in name for name in stored.calls)
    assert not (tmp_path / "draws").exists()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"num_warmup": 0}, {"start", SET_UP, BUFFERS, STEPS, TURN}),
        ({"num_chains": 32}, {STEPS, "begin of a window", "stuck chains"}),  # JitteredHMC, SNAPER
        (
            {"kernel": lambda target: gm.MCLMC(target, 0.1, 1.0)},
            {f"{STEPS}, stage 1", f"{STEPS}, stage 2", "end of warm-up, stage 1"},
        ),
        ({"kernel": lambda target: gm.MAMS(target, 0.1, 1.0)}, {f"{STEPS}, stage 2"}),
        ({"warmup": gm.PerChainAdaptation(gm.WindowAdaptation())}, {STEPS}),
    ],
)
def test_every_kernel_and_warm_up_is_traced(options, names, traced):
    calls = traced(build, {"chains": 2, "data": 4}, **options).calls
    assert names <= set(calls)
    has_help = any(name.startswith("stuck chains") for name in calls)
    assert has_help == ("num_warmup" not in options and "warmup" not in options)


@pytest.mark.parametrize("start", ["per chain", "drawn", "none"])
def test_every_kind_of_start_is_traced(start, traced):
    def of(mesh):
        target, position = build(mesh)
        if start == "per chain":
            return target, gm.per_chain({k: S((4, *x.shape), x.dtype) for k, x in position.items()})
        return target, lambda key: {k: jax.random.normal(key, x.shape) for k, x in position.items()}

    if start == "none":
        with pytest.raises(ValueError, match="do not tell the shapes of its latents"):
            traced(lambda mesh: (build(mesh)[0], None))
    else:
        assert "start" in traced(of).calls


@pytest.mark.parametrize(
    ("build", "options", "error", "says"),
    [
        (lambda mesh: 1, {}, TypeError, "expected (target, initial_position), got a int"),
        (1, {}, TypeError, "build: expected a function of a mesh"),
        (build, {"num_chains": 0}, ValueError, "num_chains: expected an integer of at least 1"),
        (build, {"num_chains": 3}, ValueError, "num_chains=3 does not divide over mesh axis"),
        (build, {"on": "TPU v9"}, ValueError, "on='TPU v9'"),
        (build, {"kernel": lambda target: 1}, TypeError, "kernel: expected an object such as NUTS"),
    ],
)
def test_a_run_that_cannot_be_planned_says_why(build, options, error, says):
    with pytest.raises(error, match=re.escape(says)):
        gm.plan_sample(build, chains=2, data=4, **(COUNTS | options))
