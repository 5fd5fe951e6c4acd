"""BlackJAX: HMC whose log density reads row-sharded arguments; several chains by vmap."""

import blackjax
import jax
import jax.numpy as jnp
from jax.scipy.stats import norm

from benchmarks import mnist_data
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.likelihood import fastest
from benchmarks.contenders.placing import replicate, row_mesh

DISTRIBUTIONS = ("blackjax",)


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    log_likelihood, data = fastest(mnist_data.load(task.data_dir), mesh, task.chains)
    position = replicate(mesh, mnist_data.start_position(task.chains))

    def log_density(params, *data):
        prior = sum(norm.logpdf(leaf).sum() for leaf in jax.tree.leaves(params))
        return prior + log_likelihood(params["w"], params["b"], *data)

    return _program(log_density, position, data, mesh, task)


def _program(log_density, position, data, mesh, task) -> HmcProgram:
    size = sum(leaf.size for leaf in jax.tree.leaves(position)) // task.chains
    inverse_mass_matrix = jnp.ones(size)

    def algorithm(data):
        # Built from the arguments at hand, so that the data are traced and not constants.
        return blackjax.hmc(
            lambda params: log_density(params, *data),
            step_size=task.step_size,
            inverse_mass_matrix=inverse_mass_matrix,
            num_integration_steps=task.leapfrogs,
        )

    def init(position, *data):
        start = algorithm(data).init
        return (jax.vmap(start) if task.chains > 1 else start)(position)

    def transition(carry, *data):
        rng_key, state, _ = carry
        rng_key, step_key = jax.random.split(rng_key)
        step = algorithm(data).step
        if task.chains > 1:
            step, step_key = jax.vmap(step), jax.random.split(step_key, task.chains)
        state, info = step(step_key, state)
        return rng_key, state, info.acceptance_rate

    state = replicate(mesh, jax.jit(init)(position, *data))
    carry = replicate(mesh, (jax.random.key(1), state, jnp.zeros_like(state.logdensity)))
    return HmcProgram(
        transition=jax.jit(transition, out_shardings=jax.tree.map(lambda x: x.sharding, carry)),
        carry=carry,
        data=data,
        gradients=task.chains * task.leapfrogs,
        acceptance=lambda carry: carry[2],
        evaluate=lambda: (state.logdensity, state.logdensity_grad),
        devices=task.devices,
    )
