"""Dual averaging of the step size.

References
----------
Nesterov, "Primal-dual subgradient methods for convex problems", Mathematical Programming 120 (2009);
Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 15 (2014), section 3.2.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc.tree import pytree

GAMMA, T0, KAPPA = 0.05, 10.0, 0.75
# Acceptance rates are rounded to multiples of 1/64: the recursion amplifies rounding errors, and a mesh
# sums in another order than one device. So the step sizes of all meshes are the same.
RESOLUTION = 64
# At least this many multiples lie between the target and 1: nearer to 1 the multiples are finer, and
# the shortfall is stretched as much, or the recursion would take thousands of steps.
LEAST_STEPS, MOST_SHORTFALL = 6, 1.0
# Bounds for chains that can make no step, or for which no step is too long: float32 has no positive
# number below 1e-38, and a step of 0 would be accepted.
LEAST_STEP_SIZE, MOST_STEP_SIZE = 1e-30, 1e30


@pytree
@dataclass(frozen=True, eq=False)
class DualAveragingState:
    """Scalars of the recursion, all in log step size."""

    log_step_size: jax.Array
    log_step_size_average: jax.Array
    gradient_average: jax.Array
    num_updates: jax.Array
    mu: jax.Array  # what the log step size shrinks towards


def init(step_size: jax.Array) -> DualAveragingState:
    """Start from a step size, and shrink towards it.

    Hoffman and Gelman shrink towards ten times the first step size. Here the first step size comes from
    a search, so that its scale is right, and ten times it would waste the first steps of each window.
    """
    log_step_size = jnp.log(step_size)
    zero = jnp.zeros_like(log_step_size)
    return DualAveragingState(
        log_step_size=log_step_size,
        log_step_size_average=zero,
        gradient_average=zero,
        num_updates=zero,
        mu=log_step_size,
    )


def update(
    state: DualAveragingState, acceptance_rate: jax.Array, target_acceptance_rate: float
) -> DualAveragingState:
    """Move the log step size against the shortfall of the acceptance rate."""
    t = state.num_updates + 1
    eta = 1 / (t + T0)
    shortfall = _shortfall(acceptance_rate, target_acceptance_rate)
    gradient_average = (1 - eta) * state.gradient_average + eta * shortfall
    log_step_size = state.mu - jnp.sqrt(t) / GAMMA * gradient_average
    log_step_size = jnp.clip(log_step_size, math.log(LEAST_STEP_SIZE), math.log(MOST_STEP_SIZE))
    weight = t**-KAPPA
    return DualAveragingState(
        log_step_size=log_step_size,
        log_step_size_average=weight * log_step_size + (1 - weight) * state.log_step_size_average,
        gradient_average=gradient_average,
        num_updates=t,
        mu=state.mu,
    )


def _shortfall(acceptance_rate: jax.Array, target_acceptance_rate: float) -> jax.Array:
    """Return the target minus the rate, rounded; stretched by a power of 2 for a target near 1."""
    _, exponent = jnp.frexp(jnp.asarray(LEAST_STEPS / RESOLUTION / (1 - target_acceptance_rate)))
    stretch = jnp.ldexp(jnp.ones_like(acceptance_rate), jnp.maximum(exponent, 0))
    rate = jnp.round(acceptance_rate * stretch * RESOLUTION) / RESOLUTION
    return jnp.minimum(stretch * target_acceptance_rate - rate, MOST_SHORTFALL)


def final_step_size(state: DualAveragingState) -> jax.Array:
    """Return the averaged step size, to be kept; the first one if there was no update."""
    log_step_size = jnp.where(state.num_updates > 0, state.log_step_size_average, state.log_step_size)
    return jnp.exp(log_step_size)


def check_target(settings: Any) -> None:
    """Raise unless the ``target_acceptance_rate`` of a warm-up is a rate."""
    name, rate = type(settings).__name__, settings.target_acceptance_rate
    if callable(rate):
        raise TypeError(
            f"{name}: it takes settings, and no kernel or log density, got {rate!r}; sample brings "
            f"them together: sample(rng_key, target, kernel=NUTS(target, 0.1), warmup={name}())"
        )
    if not 0 < rate < 1:
        raise ValueError(
            f"{name}: target_acceptance_rate: expected a number between 0 and 1, got {rate}"
        )
