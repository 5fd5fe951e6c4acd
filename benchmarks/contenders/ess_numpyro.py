"""NumPyro's NUTS with vectorised chains, stepped as ``MCMC(..., jit_model_args=True)`` steps it.

The data are arguments of the program. Of what ``MCMC.run`` does anew at every call, only the kernel's
``init`` is part of the warm-up here.
"""

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import NUTS

from benchmarks.contenders.ess_program import EssProgram, Problem, Sampled, by_chain

DISTRIBUTIONS = ("numpyro",)


def nuts(task) -> EssProgram:
    """NUTS with its defaults: diagonal metric, a step size and a metric for each chain."""
    log_density, data, start = Problem.of(task).for_peers()
    shapes = {name: x.shape[1:] for name, x in start.items()}

    def model(data):
        position = {name: numpyro.sample(name, _flat(shape)) for name, shape in shapes.items()}
        numpyro.factor("log_density", log_density(position, data))

    kernel = NUTS(model)

    @jax.jit
    def advance(state, data):
        def body(state, _):
            state = kernel.sample(state, (data,), {})
            return state, state.num_steps

        return jax.lax.scan(body, state, length=task.num_warmup)

    @jax.jit
    def collect(state, data):
        def body(state, _):
            state = kernel.sample(state, (data,), {})
            return state, (state.z, state.num_steps)

        return by_chain(jax.lax.scan(body, state, length=task.num_samples)[1])

    def warm_up(rng_key):
        keys = jax.random.split(rng_key, task.chains)
        return advance(kernel.init(keys, task.num_warmup, start, (data,), {}), data)

    def sample(_, state):
        return Sampled(*collect(state, data))

    return EssProgram(warm_up, sample)


def _flat(shape: tuple[int, ...]) -> dist.Distribution:
    return dist.ImproperUniform(constraints.independent(constraints.real, len(shape)), (), shape)
