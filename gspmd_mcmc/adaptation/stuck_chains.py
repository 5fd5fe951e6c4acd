"""Stuck chains: detected, given step sizes of their own, and moved only if none lets them leave.

A chain that starts in a bad place can reject every step that suits the others. If it counted, it would
drive the shared step size down for all, so shared numbers leave it out. But a narrow mode looks the
same: its chains reject steps that suit a wide one. The log density tells the two apart. A stuck chain
as high as the others stays where it is, and R-hat sees it. One below them walks with a step size of its
own: from a bad start it climbs to the others, in a lower mode it stays. Only a chain that no step size
lets walk takes the state of another chain, which is recorded as a `Move`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STUCK_RATE = 0.1
# Weight of the newest step in a chain's recent acceptance rate, which remembers about ten steps.
NEWEST = 0.1
# Older steps do not matter.
MEMORY = 100


class Move(NamedTuple):
    """A chain that took the state of another one during warm-up."""

    chain: int
    step: int  # of the run
    from_log_density: float  # in nats
    to_log_density: float


def no_rates(like: jax.Array) -> jax.Array:
    """Return the recent acceptance rates of chains that have taken no step, [chains].

    They are at the threshold, so that a chain that rejects its first step counts as stuck: a step size
    moves fastest during the first steps.
    """
    return jnp.full_like(like, STUCK_RATE)


def recent_rates(rates: jax.Array, acceptance_rates: jax.Array) -> jax.Array:
    """Update the recent acceptance rates [chains] with those of one step [chains]."""
    return (1 - NEWEST) * rates + NEWEST * acceptance_rates


def are_stuck_below(acceptance_rates: np.ndarray, log_densities: np.ndarray) -> np.ndarray:
    """Tell of each chain if its rates [chains, steps] say that it is stuck, and it is below the others.

    If half of the chains or more are stuck, the step size is at fault, and none counts as stuck.
    """
    latest = acceptance_rates[:, -MEMORY:]
    age = np.arange(latest.shape[1])[::-1]
    forgotten = (1 - NEWEST) ** latest.shape[1]
    recent = latest @ (NEWEST * (1 - NEWEST) ** age) + forgotten * STUCK_RATE
    is_stuck = recent < STUCK_RATE
    if 2 * is_stuck.sum() >= is_stuck.size:
        return np.zeros_like(is_stuck)
    return is_stuck & (log_densities < np.median(log_densities[~is_stuck]))


def moved(rng_key: jax.Array, states: Any, moves: jax.Array, are_sources: jax.Array) -> Any:
    """Give the chains that move the states [chains, ...] of others that are drawn among the sources.

    Chain c draws from ``fold_in(rng_key, c)``, so that every mesh makes the same choices.
    """
    chains = jnp.arange(moves.size)
    logits = jnp.where(are_sources, 0.0, -jnp.inf)
    keys = jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(chains)
    drawn = jax.vmap(lambda key: jax.random.categorical(key, logits))(keys)
    source = jnp.where(moves, drawn, chains)
    # States of other devices are sent only where a chain moves.
    take = partial(jax.tree.map, lambda x: jnp.take(x, source, axis=0))
    return jax.lax.cond(jnp.any(moves), take, lambda states: states, states)


def helped(
    rng_key: jax.Array, states: Any, is_stuck: jax.Array, walk: Callable[[jax.Array, Any], Any]
) -> tuple[Any, jax.Array, jax.Array]:
    """Let stuck chains walk with step sizes of their own, and move those that cannot.

    ``walk(rng_key, states)`` returns the states after steps of each chain's own size, its mean
    acceptance rate, and the leapfrogs of all. Returns the new states, the chains that were moved, and
    those leapfrogs.
    """
    walk_key, move_key = jax.random.split(rng_key)
    after, rates, leapfrogs = walk(walk_key, states)
    # A step smaller than rounding is accepted, and leads nowhere.
    walks = (rates >= STUCK_RATE) & (after.log_density != states.log_density)
    takes = is_stuck & walks
    kept = jax.tree.map(
        lambda new, old: jnp.where(takes.reshape(-1, *(1,) * (new.ndim - 1)), new, old), after, states
    )
    moves = is_stuck & ~walks
    return moved(move_key, kept, moves, ~is_stuck), moves, leapfrogs
