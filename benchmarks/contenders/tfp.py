"""TensorFlow Probability on JAX: a joint distribution with a `Sharded` likelihood, under pmap.

The way of TFP's notebook "Distributed inference with TFP and JAX": every device holds a shard of
the rows and the whole position, and `Sharded` sums the log likelihood, and by its transpose the
gradient, over the devices. Several chains are a vmap inside the pmap.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from tensorflow_probability.substrates import jax as tfp

from benchmarks import mnist_data
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import one_hot, place, replicate, row_mesh, scaled

DISTRIBUTIONS = ("tfp-nightly",)

tfd = tfp.distributions
Root = tfp.experimental.distribute.JointDistributionCoroutine.Root
JointDistribution = tfp.experimental.distribute.JointDistributionCoroutine
Sharded = tfp.experimental.distribute.Sharded


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    start = mnist_data.start_position(task.chains)
    position = replicate(mesh, [start["w"], start["b"]])
    data = _shards(mnist_data.load(task.data_dir), mesh, task.devices)
    logits = _rows_first if task.chains == 1 else _classes_first

    def log_density(w, b, images, hot):
        def model():
            w = yield Root(tfd.Sample(tfd.Normal(0.0, 1.0), [784, 10]))
            b = yield Root(tfd.Sample(tfd.Normal(0.0, 1.0), [10]))
            labels = tfd.OneHotCategorical(logits=logits(w, b, images), dtype=jnp.float32)
            yield Sharded(tfd.Independent(labels, 1), shard_axis_name="data")

        return JointDistribution(model).log_prob((w, b, hot))

    return _program(log_density, position, data, mesh, task)


def _rows_first(w, b, images):
    # The leading axis of one is 1.4 times as fast, as in `likelihood`.
    return (images @ w[None])[0] + b


def _classes_first(w, b, images):
    # The fastest with several chains, as in `likelihood`; the distribution wants classes last.
    return (w.T @ images.T + b[:, None]).T


def _shards(data: mnist_data.Mnist, mesh, devices: int) -> tuple[jax.Array, jax.Array]:
    """Return images and one-hot labels with a leading axis of devices, as pmap takes them."""
    images = data.images.reshape(devices, -1, 784)
    labels = data.labels.reshape(devices, -1)
    spec = PartitionSpec("data")
    hot_shape = (*labels.shape, mnist_data.NUM_CLASSES)
    return (
        place(mesh, spec, images.shape, scaled(images)),
        place(mesh, spec, hot_shape, lambda index: one_hot(labels, index[0])),
    )


def _program(log_density, position, data, mesh, task) -> HmcProgram:
    in_axes = (None, *(0 for _ in data))
    pmap = functools.partial(jax.pmap, axis_name="data", in_axes=in_axes, out_axes=None)

    def kernel(data):
        def target(w, b):
            return log_density(w, b, *data)

        return tfp.mcmc.HamiltonianMonteCarlo(
            jax.vmap(target) if task.chains > 1 else target,
            step_size=task.step_size,
            num_leapfrog_steps=task.leapfrogs,
        )

    def init(position, *data):
        return kernel(data).bootstrap_results(position)

    def transition(carry, *data):
        rng_key, position, results = carry
        rng_key, step_key = jax.random.split(rng_key)
        return rng_key, *kernel(data).one_step(position, results, seed=step_key)

    results = pmap(init)(position, *data)
    accepted = results.accepted_results
    w_grad, b_grad = accepted.grads_target_log_prob
    return HmcProgram(
        transition=pmap(transition),
        carry=replicate(mesh, (jax.random.key(1), position, results)),
        data=data,
        gradients=task.chains * task.leapfrogs,
        acceptance=lambda carry: jnp.exp(jnp.minimum(0, carry[2].log_accept_ratio)),
        evaluate=lambda: (accepted.target_log_prob, {"w": w_grad, "b": b_grad}),
        devices=task.devices,
    )
