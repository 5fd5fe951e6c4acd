"""NumPyro: HMC with row-sharded model arguments and vectorised chains.

The kernel is stepped as ``MCMC(kernel, jit_model_args=True)`` steps it, with the model's arguments
as arguments of the jitted program, but without what ``MCMC.run`` does anew at every call. It takes
the same 20 leapfrogs at the same speed by ``num_steps`` as by ``trajectory_length``, whose ratio to
the step size is rounded up in float32.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMC

from benchmarks import mnist_data
from benchmarks.contenders import factorisation, grouped, likelihood
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import replicate, row_mesh

DISTRIBUTIONS = ("numpyro",)
ROWS = "rows"  # the plate of `mnist_model`


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    log_likelihood, data = likelihood.of_task(task, mesh)
    position = replicate(mesh, mnist_data.start_position(task.chains))

    def model(*data):
        # Never slower than `dist.Categorical`, and about 20 % faster with four chains.
        numpyro.factor("labels", log_likelihood(*_weights(), *data))

    model = mnist_model if task.form == "textbook" else model
    return _program(model, position, data, functools.partial(replicate, mesh), task)


def mnist_model(images, labels, white=1):
    """As one would write it down; ``white`` is the greatest value of a pixel."""
    w, b = _weights()
    with numpyro.plate(ROWS, len(labels)):
        numpyro.sample("labels", dist.Categorical(logits=(images / white) @ w + b), obs=labels)


def _weights():
    w = numpyro.sample("w", dist.Normal(0, 1).expand([784, 10]).to_event(2))
    return w, numpyro.sample("b", dist.Normal(0, 1).expand([10]).to_event(1))


def movielens(task) -> HmcProgram:
    """Matrix factorisation; a user's latents lie with the user's row."""
    mesh = row_mesh(task.devices)
    watched, position = factorisation.load(task, mesh)
    log_likelihood = factorisation.log_likelihood(task, blocks=mesh.size)
    shapes = {name: leaf.shape[1:] for name, leaf in position.items()}

    def model(watched):
        params = {
            name: numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
            for name, shape in shapes.items()
        }
        numpyro.factor("watched", log_likelihood(params, watched))

    # One vector of all momenta would be gathered on every device; a metric of each site keeps them.
    metric = {(name,): jnp.ones(math.prod(shape)) for name, shape in shapes.items()}
    lay_out = functools.partial(factorisation.lay_out, mesh, len(watched))
    return _program(model, position, (watched,), lay_out, task, metric)


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
    first = 1 if task.chains > 1 else 0
    shapes = {site: leaf.shape[first:] for site, leaf in position.items()}

    def model(rows):
        params = {
            site: numpyro.sample(site, dist.Normal(0, 1).expand(shape).to_event(len(shape)))
            for site, shape in shapes.items()
        }
        numpyro.factor("stars", log_likelihood(params, rows))

    return _program(model, position, (rows,), functools.partial(replicate, mesh), task)


def _program(model, position, data, lay_out, task, inverse_mass_matrix=None) -> HmcProgram:
    kernel = HMC(
        model,
        step_size=task.step_size,
        num_steps=task.leapfrogs,
        trajectory_length=None,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        inverse_mass_matrix=inverse_mass_matrix,
    )
    rng_key = jax.random.key(1)
    if task.chains > 1:
        rng_key = jax.random.split(rng_key, task.chains)
    state = lay_out(kernel.init(rng_key, 0, position, data, {}))

    def transition(state, *data):
        return kernel.sample(state, data, {})

    return HmcProgram(
        transition=jax.jit(transition, out_shardings=jax.tree.map(lambda x: x.sharding, state)),
        carry=state,
        data=data,
        units=task.units,
        acceptance=lambda state: state.accept_prob,
        evaluate=lambda: (-state.potential_energy, jax.tree.map(lambda g: -g, state.z_grad)),
        devices=task.devices,
    )
