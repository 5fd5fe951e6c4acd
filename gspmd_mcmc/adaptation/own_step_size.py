"""Hamiltonian steps whose size each chain finds for itself, whatever the kernel."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.hmc_burn_in import BurnInHMC, HMCOnStates
from gspmd_mcmc.adaptation.step_size_search import find_step_size
from gspmd_mcmc.kernels.hmc import HMC, OneLeapfrog
from gspmd_mcmc.kernels.kernel import Kernel

# The step size is searched anew this often, as it changes on the way. Each search is followed by a step
# with it and with fractions of it: what suits one leapfrog may not suit a trajectory.
NUM_SEARCHES, PARTS = 10, (1.0, 0.5, 0.25)
MOST_LEAPFROGS = 16


def walk(
    kernel: Kernel, rng_key: jax.Array, states: Any, vmap: Callable
) -> tuple[Any, jax.Array, jax.Array]:
    """Take thirty steps of each chain with a step size that suits it where it is.

    The kernel is one for all chains. Fields of the states [chains, ...] that HMC lacks stay as they
    are. Returns the states, the mean of each chain's acceptance rates [chains], and the leapfrogs of
    all chains together.
    """
    chains = jnp.arange(states.log_density.size)

    def step(hmc_of, step_sizes, key, states):
        """Step each chain by ``hmc_of(kernel with its step size)``."""

        def one(step_size, chain, state):
            hmc = hmc_of(tree.replace(kernel, step_size=step_size))
            return HMCOnStates(hmc).step(jax.random.fold_in(key, chain), state)

        return vmap(one, (0, 0, 0))(step_sizes, chains, states)

    def search_and_step(carry, number):
        states, step_sizes, total, leapfrogs = carry
        search_key, key = jax.random.split(jax.random.fold_in(rng_key, number))

        def acceptance_rates(kernel, key):
            return step(OneLeapfrog.of, kernel.step_size, key, states)[1].acceptance_rate

        own = tree.replace(BurnInHMC.of(kernel), step_size=step_sizes, is_per_chain=True)
        step_sizes = find_step_size(own, search_key, acceptance_rates)

        def one_part(carry, part):
            states, total, leapfrogs = carry
            count_key, step_key = jax.random.split(jax.random.fold_in(key, part))
            # One number for all chains, so that no leapfrog asks whether others continue.
            count = jax.random.randint(count_key, (), 1, MOST_LEAPFROGS + 1)
            sizes = step_sizes * jnp.asarray(PARTS, step_sizes.dtype)[part]

            def hmc_of(kernel):
                return tree.fill(HMC, vars(OneLeapfrog.of(kernel)) | {"num_integration_steps": count})

            states, info = step(hmc_of, sizes, step_key, states)
            leapfrogs += count * chains.size
            return (states, total + info.acceptance_rate, leapfrogs), None

        carry = states, total, leapfrogs
        (states, total, leapfrogs), _ = jax.lax.scan(one_part, carry, jnp.arange(len(PARTS)))
        return (states, step_sizes, total, leapfrogs), None

    zeros = jnp.zeros_like(states.log_density)
    first = jnp.broadcast_to(kernel.step_size, chains.shape)
    carry = states, first, zeros, jnp.zeros((), jnp.int32)
    (states, _, total, leapfrogs), _ = jax.lax.scan(search_and_step, carry, jnp.arange(NUM_SEARCHES))
    return states, total / (NUM_SEARCHES * len(PARTS)), leapfrogs
