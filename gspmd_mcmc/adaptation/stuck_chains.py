"""Stuck chains: detected, given step sizes of their own, and moved only if none lets them leave.

A chain that starts in a bad place can reject every step that suits the others. If it counted, it would
drive the shared step size down for all, so shared numbers leave it out. But a narrow mode looks the
same: its chains reject steps that suit a wide one. The log density tells the two apart. A stuck chain
as high as the others stays where it is, and R-hat sees it. One below them walks with a step size of its
own: from a bad start it climbs to the others, in a lower mode it stays. Only a chain that no step size
lets walk takes the state of another chain, which is recorded as a `Move`.
"""

from collections.abc import Callable
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
    """A chain that took the state of another one during warm-up.

    Attributes
    ----------
    chain
        The number of the chain.
    step
        The number of steps that the run had taken.
    from_log_density, to_log_density
        The log density before and after, in nats.
    """

    chain: int
    step: int
    from_log_density: float
    to_log_density: float


def no_rates(like: jax.Array) -> jax.Array:
    """Return the recent acceptance rates of chains that have taken no step, [chains].

    They are at the threshold, so that the first step decides: a chain that rejects it counts as stuck.
    If they were ones, a stuck chain would count as well during the steps in which a step size moves
    fastest.
    """
    return jnp.full_like(like, STUCK_RATE)


def recent_rates(rates: jax.Array, acceptance_rates: jax.Array) -> jax.Array:
    """Update the recent acceptance rates [chains] with those of one step [chains]."""
    return (1 - NEWEST) * rates + NEWEST * acceptance_rates


def are_stuck_below(acceptance_rates: np.ndarray, log_densities: np.ndarray) -> np.ndarray:
    """Return for each chain whether it is stuck, and lower than the chains that are not.

    If half of the chains or more are stuck, the step size is at fault, and none counts as stuck.

    Parameters
    ----------
    acceptance_rates
        Those of all steps so far, [chains, steps]. A chain is stuck if the recent ones are under 0.1.
    log_densities
        The chains' log densities now, [chains].
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
    """Give chains the states of others.

    Parameters
    ----------
    rng_key
        Chain c draws from ``fold_in(rng_key, c)``, so that every mesh makes the same choices.
    states
        A kernel's states, leaves [chains, ...].
    moves, are_sources
        Which chains move, and which chains their new states are drawn from, [chains].
    """
    chains = jnp.arange(moves.size)
    logits = jnp.where(are_sources, 0.0, -jnp.inf)
    keys = jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(chains)
    drawn = jax.vmap(lambda key: jax.random.categorical(key, logits))(keys)
    source = jnp.where(moves, drawn, chains)
    # States of other devices are sent only where a chain moves.
    return jax.lax.cond(
        jnp.any(moves),
        lambda states: jax.tree.map(lambda x: jnp.take(x, source, axis=0), states),
        lambda states: states,
        states,
    )


def helped(
    rng_key: jax.Array, states: Any, is_stuck: jax.Array, walk: Callable[[jax.Array, Any], Any]
) -> tuple[Any, jax.Array, jax.Array]:
    """Let stuck chains walk with step sizes of their own, and move those that cannot.

    Parameters
    ----------
    rng_key
        For the walk and for the choice of sources.
    states
        A kernel's states, leaves [chains, ...].
    is_stuck
        Which chains are stuck, [chains].
    walk
        ``walk(rng_key, states)``: the states after steps of each chain's own size, the mean acceptance
        rates [chains], and the leapfrogs of all chains.

    Returns
    -------
    states, moves, leapfrogs
        The new states, which chains were moved [chains], and the leapfrogs that it took.
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
