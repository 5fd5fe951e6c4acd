"""This package: `gspmd_mcmc.sample` with its defaults, or with a kernel that is named.

Its warm-up and its draws are two calls, so that each is timed: the second goes on from the first.
"""

import warnings
from typing import Any

import jax
import numpy as np

import gspmd_mcmc as gm
from benchmarks.contenders import ours
from benchmarks.contenders.ess_program import EssProgram, Problem, Sampled

DISTRIBUTIONS = ("gspmd_mcmc",)
# Images stay bytes, and the terms are the package's own.
OWN_LIKELIHOODS = {"mnist_6000": ours.log_likelihood, "mnist_60000": ours.log_likelihood}


def default(task) -> EssProgram:
    """`sample` with all defaults: NUTS below 32 chains, JitteredHMC tuned by SNAPER from there."""
    return _program(task, lambda target: None)


def snaper(task) -> EssProgram:
    """JitteredHMC tuned by SNAPER, whatever the number of chains."""
    return _program(task, lambda target: gm.JitteredHMC(target, 0.1, 1.0))


def mams(task) -> EssProgram:
    """The Metropolis-adjusted microcanonical sampler with its own warm-up."""
    return _program(task, lambda target: gm.MAMS(target, 0.1, 1.0))


def rotated(task) -> EssProgram:
    """`mams` with the metric's axes turned to those of the data: `Rotated`."""
    problem = Problem.of(task)
    metric = gm.Rotated(jax.tree.map(jax.numpy.asarray, problem.model.rotations(problem.data)))
    warmup = gm.MAMSAdaptation(metric=metric)
    return _program(task, lambda target: gm.MAMS(target, 0.1, 1.0), warmup)


def target_of(problem: Problem) -> Any:
    """Return the problem's posterior: a plate of rows, or a plain log density where there are none."""
    model = problem.model
    if model.log_prior is None:
        return gm.LogDensity(model.log_likelihood, problem.data)
    log_likelihood = OWN_LIKELIHOODS.get(model.name, model.log_likelihood)
    return gm.Posterior(model.log_prior, gm.Plate(log_likelihood, problem.data, local=model.local))


def _program(task, kernel_for, warmup=None) -> EssProgram:
    problem = Problem.of(task)
    target = target_of(problem)
    kernel = kernel_for(target)
    # Divergences and acceptance rates that differ are judged by R-hat here, as for the others.
    warnings.simplefilter("ignore", gm.SamplingWarning)

    def warm_up(rng_key):
        draws = gm.sample(
            rng_key,
            target,
            gm.per_chain(jax.tree.map(jax.numpy.asarray, problem.start)),
            num_chains=task.chains,
            num_warmup=task.num_warmup,
            num_samples=0,
            kernel=kernel,
            warmup=warmup,
            progress=False,
        )
        jax.block_until_ready(draws.state)
        return draws, draws.warmup["leapfrogs"]

    def sample(rng_key, warm):
        draws = gm.sample(
            rng_key,
            target,
            warm,
            num_chains=task.chains,
            num_warmup=0,
            num_samples=task.num_samples,
            progress=False,
        )
        leapfrogs = np.asarray(draws.stats["num_integration_steps"])
        return Sampled(draws.position, leapfrogs)

    return EssProgram(warm_up, sample)
