"""BlackJAX: NUTS with its window adaptation, a chain at a time under vmap, and ChEES across chains."""

import blackjax
import jax
import jax.numpy as jnp
import optax

from benchmarks.contenders.ess_program import EssProgram, Problem, Sampled, by_chain

DISTRIBUTIONS = ("blackjax",)

LEARNING_RATE = 0.02
FIRST_STEP_SIZE = 0.1
# Its diagonal metric for ChEES holds a matrix of latents by latents.
MOST_LATENTS = 3000


def nuts(task) -> EssProgram:
    """NUTS with `window_adaptation`: diagonal metric, step size and metric for each chain."""
    log_density, data, start = Problem.of(task).for_peers()

    @jax.jit
    def tune(keys, start, data):
        def one(key, position):
            warmup = blackjax.window_adaptation(
                blackjax.nuts,
                lambda x: log_density(x, data),
                adaptation_info_fn=lambda state, info, adaptation: info.num_integration_steps,
            )
            (state, parameters), leapfrogs = warmup.run(key, position, task.num_warmup)
            return (state, _arrays(parameters)), leapfrogs

        return jax.vmap(one)(keys, start)

    @jax.jit
    def collect(key, warm, data):
        kernel = blackjax.nuts.build_kernel()

        def one(key, state, parameters):
            state, info = kernel(key, state, lambda x: log_density(x, data), **parameters)
            return state, info.num_integration_steps

        def body(state, key):
            keys = jax.random.split(key, task.chains)
            state, leapfrogs = jax.vmap(one)(keys, state, warm[1])
            return state, (state.position, leapfrogs)

        return by_chain(jax.lax.scan(body, warm[0], jax.random.split(key, task.num_samples))[1])

    def warm_up(key):
        return tune(jax.random.split(key, task.chains), start, data)

    def sample(key, warm):
        return Sampled(*collect(key, warm, data))

    return EssProgram(warm_up, sample)


def _arrays(parameters):
    """Keep what was adapted; functions and settings are the kernel's own defaults."""
    return {name: parameters[name] for name in ("step_size", "inverse_mass_matrix")}


def chees(task) -> EssProgram:
    """Jittered HMC tuned by `chees_adaptation`, with its diagonal metric where that can be held.

    Its criterion takes no matrices: latents of more than one axis are vectors to it.
    """
    log_density_of, data, given = Problem.of(task).for_peers()
    shapes = {name: x.shape[1:] for name, x in given.items()}
    start = {name: x.reshape(len(x), -1) if x.ndim > 2 else x for name, x in given.items()}
    latents = sum(x[0].size for x in start.values())
    metric = "diagonal" if latents <= MOST_LATENTS else None
    # Functions that the adaptation returns with its numbers; both programs are traced from them.
    functions = {}

    def log_density(position, data):
        return log_density_of(shaped(position), data)

    def shaped(position, *leading):
        return {name: jnp.reshape(x, (*leading, *shapes[name])) for name, x in position.items()}

    def adaptation(data):
        return blackjax.chees_adaptation(
            lambda x: log_density(x, data),
            task.chains,
            mass_matrix_estimation=metric,
            adaptation_info_fn=lambda state, info, adaptation: info.num_integration_steps,
        )

    @jax.jit
    def tune(key, start, data):
        warmup = adaptation(data)
        optimiser = optax.adam(LEARNING_RATE)
        (states, parameters), leapfrogs = warmup.run(
            key,
            start,
            FIRST_STEP_SIZE,
            optimiser,
            task.num_warmup,
            max_sampling_steps=task.num_samples,
        )
        functions.update({name: x for name, x in parameters.items() if callable(x)})
        numbers = {name: x for name, x in parameters.items() if not callable(x)}
        return (states, numbers), leapfrogs._wrapped_info

    @jax.jit
    def collect(key, warm, data):
        states, numbers = warm
        step = blackjax.dynamic_hmc(lambda x: log_density(x, data), **functions, **numbers).step

        def body(states, key):
            keys = jax.random.split(key, task.chains)
            states, info = jax.vmap(step)(keys, states)
            return states, (shaped(states.position, task.chains), info.num_integration_steps)

        return by_chain(jax.lax.scan(body, states, jax.random.split(key, task.num_samples))[1])

    def sample(key, warm):
        return Sampled(*collect(key, warm, data))

    return EssProgram(lambda key: tune(key, start, data), sample)
