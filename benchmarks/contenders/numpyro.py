"""NumPyro: HMC with row-sharded model arguments and vectorised chains.

The kernel is stepped as ``MCMC(kernel, jit_model_args=True)`` steps it, with the model's arguments
as arguments of the jitted program, but without what ``MCMC.run`` does anew at every call. It takes
the same 20 leapfrogs at the same speed by ``num_steps`` as by ``trajectory_length``, whose ratio to
the step size is rounded up in float32.
"""

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.infer import HMC

from benchmarks import mnist_data
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.likelihood import fastest
from benchmarks.contenders.placing import replicate, row_mesh

DISTRIBUTIONS = ("numpyro",)


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    log_likelihood, data = fastest(mnist_data.load(task.data_dir), mesh, task.chains)
    position = replicate(mesh, mnist_data.start_position(task.chains))

    def model(*data):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([784, 10]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([10]).to_event(1))
        # Never slower than `dist.Categorical`, and about 20 % faster with four chains.
        numpyro.factor("labels", log_likelihood(w, b, *data))

    return _program(model, position, data, mesh, task)


def _program(model, position, data, mesh, task) -> HmcProgram:
    kernel = HMC(
        model,
        step_size=task.step_size,
        num_steps=task.leapfrogs,
        trajectory_length=None,
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    rng_key = jax.random.key(1)
    if task.chains > 1:
        rng_key = jax.random.split(rng_key, task.chains)
    state = replicate(mesh, kernel.init(rng_key, 0, position, data, {}))

    def transition(state, *data):
        return kernel.sample(state, data, {})

    return HmcProgram(
        transition=jax.jit(transition, out_shardings=jax.tree.map(lambda x: x.sharding, state)),
        carry=state,
        data=data,
        gradients=task.chains * task.leapfrogs,
        acceptance=lambda state: state.accept_prob,
        evaluate=lambda: (-state.potential_energy, jax.tree.map(lambda g: -g, state.z_grad)),
        devices=task.devices,
    )
