"""A first step size, by doubling and halving.

References
----------
Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 15 (2014), algorithm 4.
"""

from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates

MAX_DOUBLINGS = 60
CROSSED_RATE = 0.8


def find_step_size(kernel: Any, rng_key: jax.Array, acceptance_rates: AcceptanceRates) -> jax.Array:
    """Double or halve the step size until one leapfrog's acceptance rate crosses 0.8.

    Parameters
    ----------
    kernel
        The kernel of all chains, or of each: with a step size [chains] every chain's is searched.
    rng_key
        Each try draws from ``fold_in(rng_key, try)``.
    acceptance_rates
        ``acceptance_rates(kernel, rng_key)``: those of one step of all chains, [chains].
    """
    one_step = kernel.one_leapfrog()

    def rate(step_size, i):
        key = jax.random.fold_in(rng_key, i)
        rates = acceptance_rates(tree.replace(one_step, step_size=step_size), key)
        # The median: one chain in a bad place must not shrink the step for all.
        return rates if step_size.ndim else jnp.median(rates)

    grows = rate(kernel.step_size, 0) > CROSSED_RATE
    factor = jnp.where(grows, 2.0, 0.5).astype(kernel.step_size.dtype)

    def goes_on(last):
        return (last > CROSSED_RATE) == grows

    def crosses_not(carry):
        _, i, last = carry
        return (i < MAX_DOUBLINGS) & jnp.any(goes_on(last))

    def try_next(carry):
        step_size, i, last = carry
        step_size = jnp.where(goes_on(last), step_size * factor, step_size)
        return step_size, i + 1, jnp.where(goes_on(last), rate(step_size, i), last)

    start = (kernel.step_size, 1, jnp.where(grows, 1.0, 0.0))
    step_size, _, _ = jax.lax.while_loop(crosses_not, try_next, start)
    return jnp.where(grows, step_size / 2, step_size)
