"""A whole run planned: its programs are those that the run runs. By chips' compilers: tests/chips."""

import functools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import communication
from gspmd_mcmc.sampling import run_programs
from gspmd_mcmc.sampling.run_programs import BUFFERS, DATA, SET_UP, RunPrograms

SAMPLE: Any = sys.modules[gm.plan_sample.__module__]
RUN: Any = sys.modules["gspmd_mcmc.sampling.run"]
S = jax.ShapeDtypeStruct


def effects_likelihood(params, block):
    z = (params["effect"] - params["mean"]) * jnp.exp(-params["log_sd"])
    return gm.poisson_log_rate(params["effect"], block["count"]) - 0.5 * z**2 - params["log_sd"]


def flat_prior(params):
    return -0.5 * params["mean"] ** 2, -0.5 * params["log_sd"] ** 2


def build(mesh, count: Any = S((2002,), jnp.int32), make=S):  # noqa: B008 - immutable
    data = gm.place({"count": count}, mesh, P("data"))
    target = gm.Posterior(flat_prior, gm.Plate(effects_likelihood, data, local="effect"))
    shapes = {"effect": (2002,), "mean": (), "log_sd": ()}
    return target, {name: make(shape, jnp.float32) for name, shape in shapes.items()}


KERNELS = {
    "HMC": functools.partial(gm.HMC, step_size=0.1, num_integration_steps=3),
    "MCLMC": functools.partial(gm.MCLMC, step_size=0.1, momentum_decoherence_length=1.0),
}


def reports_of_run(monkeypatch, programs, **options):
    """Run `sample`, and report each of its programs as it is called; the first call of each name."""
    seen = {}

    def watched(name, function):
        def call(*args, **named):
            if name not in seen:
                called = functools.partial(function, **named) if named else function
                seen[name] = communication(called, *args)
            return function(*args, **named)

        return call

    for name in programs:
        monkeypatch.setattr(RUN, name, watched(name, getattr(RUN, name)))
    mesh = gm.make_mesh(chains=2, data=4)
    target, position = build(mesh, np.ones(2002, np.int32), jnp.zeros)
    kernel = options.pop("kernel")(target)
    gm.sample(jax.random.key(0), target, position, mesh=mesh, kernel=kernel, progress=False, **options)
    return seen


def wire(report):
    """What a report says of the collectives, in no order."""
    return sorted((c.kind, c.shape, c.axes, tuple(x.name for x in c.loops)) for c in report.collectives)
