"""BlackJAX: HMC whose log density reads row-sharded arguments; several chains by vmap."""

import functools

import blackjax
import jax
import jax.numpy as jnp
from blackjax.mcmc.metrics import Metric
from jax.scipy.stats import norm

from benchmarks import mnist_data
from benchmarks.contenders import factorisation, grouped, likelihood
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import replicate, row_mesh

DISTRIBUTIONS = ("blackjax",)


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    log_likelihood, data = likelihood.of_task(task, mesh)
    position = replicate(mesh, mnist_data.start_position(task.chains))

    def log_density(params, *data):
        return _log_prior(params) + log_likelihood(params["w"], params["b"], *data)

    size = sum(leaf.size for leaf in jax.tree.leaves(position)) // task.chains
    lay_out = functools.partial(replicate, mesh)
    return _program(log_density, position, data, lay_out, task, jnp.ones(size))


def movielens(task) -> HmcProgram:
    """Matrix factorisation; a user's latents lie with the user's row."""
    mesh = row_mesh(task.devices)
    watched, position = factorisation.load(task, mesh)
    log_likelihood = factorisation.log_likelihood(task, blocks=mesh.size)

    def log_density(params, watched):
        return _log_prior(params) + log_likelihood(params, watched)

    lay_out = functools.partial(factorisation.lay_out, mesh, len(watched))
    # One vector of all momenta would be gathered on every device; a metric by leaves keeps them.
    metric = Metric(_normal_like, _kinetic_energy, check_turning=_unused, scale=_unused)
    return _program(log_density, position, (watched,), lay_out, task, metric)


def groups_effect(task) -> HmcProgram:
    """A random effect of each user."""
    return _groups(task, "effect")


def groups_ratings(task) -> HmcProgram:
    """Biases and factors of users and films."""
    return _groups(task, "ratings")


def _groups(task, name: str) -> HmcProgram:
    mesh = row_mesh(task.devices)
    rows, position = grouped.load(task, name, mesh)
    log_likelihood = grouped.log_likelihood(task, name)

    def log_density(params, rows):
        return _log_prior(params) + log_likelihood(params, rows)

    size = sum(leaf.size for leaf in jax.tree.leaves(position)) // task.chains
    lay_out = functools.partial(replicate, mesh)
    return _program(log_density, position, (rows,), lay_out, task, jnp.ones(size))


def _normal_like(rng_key, position):
    leaves, treedef = jax.tree.flatten(position)
    keys = jax.random.split(rng_key, len(leaves))
    draws = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, draws)


def _kinetic_energy(momentum, position=None):
    return 0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(momentum))


def _unused(*args, **kwargs):
    raise NotImplementedError("HMC needs it not")


def _log_prior(params):
    return sum(norm.logpdf(leaf).sum() for leaf in jax.tree.leaves(params))


def _program(log_density, position, data, lay_out, task, inverse_mass_matrix) -> HmcProgram:
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

    state = jax.jit(init)(position, *data)
    carry = lay_out((jax.random.key(1), state, jnp.zeros_like(state.logdensity)))
    return HmcProgram(
        transition=jax.jit(transition, out_shardings=jax.tree.map(lambda x: x.sharding, carry)),
        carry=carry,
        data=data,
        units=task.units,
        acceptance=lambda carry: carry[2],
        evaluate=lambda: (state.logdensity, state.logdensity_grad),
        devices=task.devices,
    )
