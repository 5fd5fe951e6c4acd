"""Stuck chains: told from the others, given a step size of their own, and only then moved to others.

A chain that starts in a bad place can reject everything that suits the rest. Were it to count, it would
drive a shared step size down for all; so shared numbers leave it out. But a narrow mode looks the same
from outside: its chains reject steps that suit a wide one. Height tells them apart. A chain as high as
the others stays where it is, and R-hat sees it. One that is below them walks with a step size of its
own: from a bad start it climbs to the others, in a lower mode it stays. Only a chain that can walk with
no step size at all takes the state of another, and that is recorded as a `Move`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

STUCK_RATE = 0.1
# Weight of the newest step in a chain's recent acceptance rate: its memory is about ten steps.
NEWEST = 0.1
# Steps after which nothing of a rate is remembered.
MEMORY = 100


class Move(NamedTuple):
    """A chain that took another's state during warm-up.

    Attributes
    ----------
    chain
        Its number.
    step
        Steps that the run had taken.
    from_log_density, to_log_density
        Where it was, in nats, and where it went on.
    """

    chain: int
    step: int
    from_log_density: float
    to_log_density: float


def no_rates(like: jax.Array) -> jax.Array:
    """Return the recent acceptance rates of chains that have taken no step, [chains].

    They are at the threshold: one rejected step tells that a chain is stuck, one that is accepted that
    it is not. Were they ones, a stuck chain would pass for well in the steps in which a step size moves
    fastest.
    """
    return jnp.full_like(like, STUCK_RATE)


def recent_rates(rates: jax.Array, acceptance_rates: jax.Array) -> jax.Array:
    """Take one step's acceptance rates [chains] into the recent ones [chains]."""
    return (1 - NEWEST) * rates + NEWEST * acceptance_rates


def are_stuck_below(acceptance_rates: np.ndarray, log_densities: np.ndarray) -> np.ndarray:
    """Tell of each chain whether it is stuck, and lower than the chains that are not.

    None is if half of the chains or more are stuck: it is then the step size that does not suit them.

    Parameters
    ----------
    acceptance_rates
        Of all steps so far, [chains, steps]; a chain is stuck if the recent ones are under 0.1.
    log_densities
        Where the chains are, [chains].
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
    """Put chains where others are.

    Parameters
    ----------
    rng_key
        Chain c draws from ``fold_in(rng_key, c)``, so that every mesh makes the same choices.
    states
        A kernel's states, leaves [chains, ...].
    moves, are_sources
        Which chains move, and which ones their new states are drawn from, [chains].
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
    """Let stuck chains walk by themselves, and move those that cannot.

    Parameters
    ----------
    rng_key
        For the walk and for the choice of sources.
    states
        A kernel's states, leaves [chains, ...].
    is_stuck
        [chains].
    walk
        ``walk(rng_key, states)``: the states after steps of each chain's own size, the mean acceptance
        rates [chains], and the leapfrogs of all chains.

    Returns
    -------
    states, moves, leapfrogs
        What the chains go on from, which of them were moved [chains], and what it took.
    """
    walk_key, move_key = jax.random.split(rng_key)
    after, rates, leapfrogs = walk(walk_key, states)
    # A step that rounding swallows is accepted, and goes nowhere.
    walks = (rates >= STUCK_RATE) & (after.log_density != states.log_density)
    takes = is_stuck & walks
    kept = jax.tree.map(
        lambda new, old: jnp.where(takes.reshape(-1, *(1,) * (new.ndim - 1)), new, old), after, states
    )
    moves = is_stuck & ~walks
    return moved(move_key, kept, moves, ~is_stuck), moves, leapfrogs
