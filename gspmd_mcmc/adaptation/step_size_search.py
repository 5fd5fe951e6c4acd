"""A first step size, by doubling and halving.

References
----------
Hoffman and Gelman, "The No-U-Turn Sampler", JMLR 15 (2014), algorithm 4.
"""

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates
from gspmd_mcmc.adaptation.dual_averaging import LEAST_STEP_SIZE, MOST_STEP_SIZE
from gspmd_mcmc.kernels.kernel import Kernel

MAX_DOUBLINGS = 60
CROSSED_RATE = 0.8


def find_step_size(kernel: Kernel, rng_key: jax.Array, acceptance_rates: AcceptanceRates) -> jax.Array:
    """Double or halve the step size until the acceptance rate of one leapfrog crosses 0.8.

    With a kernel that has a step size of each chain, [chains], one is found for every chain.
    """

    def rate(step_size, i):
        key = jax.random.fold_in(rng_key, i)
        rates = acceptance_rates(tree.replace(kernel, step_size=step_size).one_leapfrog(), key)
        # The median: one chain in a bad place must not shrink the step for all.
        return rates if kernel.is_per_chain else jnp.median(rates)

    def any_continues(carry):
        _, _, continues, i = carry
        return (i < MAX_DOUBLINGS) & jnp.any(continues)

    def try_one(carry):
        step_size, grows, continues, i = carry
        is_safe = rate(step_size, i) > CROSSED_RATE
        grows = jnp.where(i == 0, is_safe, grows)
        continues = continues & (is_safe == grows)
        factor = jnp.where(grows, 2.0, 0.5).astype(step_size.dtype)
        return jnp.where(continues, step_size * factor, step_size), grows, continues, i + 1

    # The first try is an iteration too, so that the step is compiled once.
    yes = jnp.ones(kernel.step_size.shape, bool)
    step_size, grows, _, _ = jax.lax.while_loop(
        any_continues, try_one, (kernel.step_size, yes, yes, jnp.zeros((), jnp.int32))
    )
    found = jnp.where(grows, step_size / 2, step_size)
    return jnp.clip(found, LEAST_STEP_SIZE, MOST_STEP_SIZE)
