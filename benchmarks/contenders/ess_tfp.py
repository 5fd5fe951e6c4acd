"""TFP on JAX: the kernels that `windowed_adaptive_nuts` builds, on a log density of one's own."""

import jax
import jax.numpy as jnp
from tensorflow_probability.substrates import jax as tfp
from tensorflow_probability.substrates.jax.experimental.mcmc import (
    preconditioning_utils,
    windowed_sampling,
)

from benchmarks.contenders.ess_program import EssProgram, Problem, Sampled, by_chain

DISTRIBUTIONS = ("tfp-nightly",)
TARGET_ACCEPTANCE = 0.85


def nuts(task) -> EssProgram:
    """NUTS with windowed adaptation: one step size and one diagonal metric for all chains."""
    log_density, data, start = Problem.of(task).for_peers()
    names, shapes = list(start), {name: x.shape[1:] for name, x in start.items()}
    # Leaves as vectors, which is how `windowed_adaptive_nuts` hands them to its kernels.
    parts = [start[name].reshape(task.chains, -1) for name in names]

    def position(*parts):
        return {n: x.reshape(-1, *shapes[n]) for n, x in zip(names, parts, strict=True)}

    def kernel(data):
        def target(*parts):
            return jax.vmap(lambda x: log_density(x, data))(position(*parts))

        return _windowed_nuts(target, parts, task)

    @jax.jit
    def advance(key, data):
        tuned = kernel(data)
        carry = parts, tuned.bootstrap_results(parts)
        return jax.lax.scan(_stepping(tuned), carry, jax.random.split(key, task.num_warmup))

    @jax.jit
    def collect(key, carry, data):
        def body(carry, key):
            carry, leapfrogs = _stepping(kernel(data))(carry, key)
            return carry, (position(*carry[0]), leapfrogs)

        return by_chain(jax.lax.scan(body, carry, jax.random.split(key, task.num_samples))[1])

    def sample(key, warm):
        return Sampled(*collect(key, warm, data))

    return EssProgram(lambda key: advance(key, data), sample)


def _windowed_nuts(target, parts, task):
    """Return what `windowed_adaptive_nuts` runs, with its first step size and its settings."""
    size = sum(part.shape[-1] for part in parts)
    ones = [jnp.ones_like(part) for part in parts]
    momentum = preconditioning_utils.make_momentum_distribution(
        state_parts=parts, batch_shape=[task.chains], running_variance_parts=ones
    )
    variance = [
        tfp.experimental.stats.RunningVariance.from_stats(
            num_samples=jnp.zeros([]), mean=jnp.zeros_like(part), variance=jnp.ones_like(part)
        )
        for part in parts
    ]
    return windowed_sampling.make_windowed_adapt_kernel(
        kind="nuts",
        proposal_kernel_kwargs={
            "target_log_prob_fn": target,
            "step_size": jnp.asarray(0.5 * size**-0.25),
            "momentum_distribution": momentum,
        },
        dual_averaging_kwargs={
            "target_accept_prob": TARGET_ACCEPTANCE,
            "num_adaptation_steps": task.num_warmup,
            "reduce_fn": tfp.math.reduce_log_harmonic_mean_exp,
        },
        initial_running_variance=variance,
        chain_axis_names=None,
        shard_axis_names=None,
    )


def _stepping(kernel):
    """Return a step of a scan: the carry is position and results, the output its leapfrogs."""

    def step(carry, key):
        parts, results = kernel.one_step(*carry, seed=key)
        return (parts, results), _leapfrogs(results)

    return step


def _leapfrogs(results):
    while not hasattr(results, "leapfrogs_taken"):
        results = results.inner_results
    return results.leapfrogs_taken
