"""Stuck and lost chains: told from the others, and restarted from them.

A chain that starts in a bad place can reject everything that suits the rest. Were it to count, it would
drive a shared step size down for all; left where it is, it would never join them. Or it wanders where
there is next to no mass (a mixture whose one component has collapsed onto a datum), and the metric and
the trajectory length that all share become what suits that place.
"""

from typing import Any

import jax
import jax.numpy as jnp

STUCK_RATE = 0.1
# Weight of the newest step in a chain's recent acceptance rate: its memory is about ten steps.
NEWEST = 0.1
# How far below the others, in nats, a chain is lost: this, and this for each element of the position.
LOST, LOST_AN_ELEMENT = 50.0, 5.0


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


def are_stuck(rates: jax.Array) -> jax.Array:
    """Tell of each chain whether it is stuck: its recent acceptance rate is under 0.1.

    None is if half of the chains or more would be: it is then the step size that does not suit them.
    """
    is_stuck = rates < STUCK_RATE
    return is_stuck & (2 * jnp.sum(is_stuck) < is_stuck.size)


def are_lost(log_densities: jax.Array, num_elements: int) -> jax.Array:
    """Tell of each chain whether it is lost: 50 nats and 5 an element below the median.

    Where it is would have to be e⁵ = 148 times as wide as where the others are, in every direction, to
    hold e⁻⁵⁰ of their mass; so a mode is not taken for a bad place. Fewer than half are lost.
    """
    below = jnp.median(log_densities) - log_densities
    return below > LOST + LOST_AN_ELEMENT * num_elements


def restarted(rng_key: jax.Array, states: Any, is_stuck: jax.Array) -> Any:
    """Put each stuck or lost chain where another one is, drawn from those that are neither.

    Parameters
    ----------
    rng_key
        Chain c draws from ``fold_in(rng_key, c)``, so that every mesh makes the same choices.
    states
        A kernel's states, leaves [chains, ...].
    is_stuck
        [chains]; if all chains are stuck none is moved.
    """
    source = _sources(rng_key, is_stuck)
    # States of other devices are sent only where a chain is stuck.
    return jax.lax.cond(
        jnp.any(is_stuck),
        lambda states: jax.tree.map(lambda x: jnp.take(x, source, axis=0), states),
        lambda states: states,
        states,
    )


def _sources(rng_key: jax.Array, is_stuck: jax.Array) -> jax.Array:
    """Return for each chain the number of the one whose state it takes, its own unless it is stuck."""
    chains = jnp.arange(is_stuck.size)
    logits = jnp.where(is_stuck & ~jnp.all(is_stuck), -jnp.inf, 0.0)
    keys = jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(chains)
    drawn = jax.vmap(lambda key: jax.random.categorical(key, logits))(keys)
    return jnp.where(is_stuck & ~jnp.all(is_stuck), drawn, chains)
