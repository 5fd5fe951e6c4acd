"""TensorFlow Probability on JAX: a joint distribution with a `Sharded` likelihood, under pmap.

The way of TFP's notebook "Distributed inference with TFP and JAX": every device holds a shard of
the rows and the whole position, and `Sharded` sums the log likelihood, and by its transpose the
gradient, over the devices. Several chains are a vmap inside the pmap.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from tensorflow_probability.substrates import jax as tfp

from benchmarks import mnist_data, movielens_data
from benchmarks.contenders import factorisation
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import one_hot, place, replicate, row_mesh, scaled

DISTRIBUTIONS = ("tfp-nightly",)

tfd = tfp.distributions
Root = tfp.experimental.distribute.JointDistributionCoroutine.Root
JointDistribution = tfp.experimental.distribute.JointDistributionCoroutine
IncrementLogProb = tfp.experimental.distributions.IncrementLogProb
Sharded = tfp.experimental.distribute.Sharded


def mnist(task) -> HmcProgram:
    """Multinomial logistic regression."""
    mesh = row_mesh(task.devices)
    start = mnist_data.start_position(task.chains)
    position = {name: replicate(mesh, start[name]) for name in ("w", "b")}
    data = _shards(mnist_data.load(task.data_dir), mesh, task.devices)
    fastest = _leading_axis if task.chains == 1 else _classes_first
    logits = _rows_first if task.form == "textbook" else fastest

    def log_density(w, b, images, hot):
        def model():
            w = yield Root(tfd.Sample(tfd.Normal(0.0, 1.0), [784, 10]))
            b = yield Root(tfd.Sample(tfd.Normal(0.0, 1.0), [10]))
            labels = tfd.OneHotCategorical(logits=logits(w, b, images), dtype=jnp.float32)
            yield Sharded(tfd.Independent(labels, 1), shard_axis_name="data")

        return JointDistribution(model).log_prob((w, b, hot))

    return _program(log_density, position, data, mesh, task)


def _rows_first(w, b, images):
    return images @ w + b


def _leading_axis(w, b, images):
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


def movielens(task) -> HmcProgram:
    """Matrix factorisation: users' latents are `Sharded` parts of the position, movies' are not."""
    mesh = row_mesh(task.devices)
    watched = movielens_data.load(task.data_dir)
    start = movielens_data.start_position(watched, task.chains)
    shards = {name: _by_device(leaf, name in "Uu", task.devices) for name, leaf in start.items()}
    by_device = watched.reshape(task.devices, -1, watched.shape[1])
    data = _place_shards(mesh, by_device)
    position = {name: _place_shards(mesh, leaf) for name, leaf in shards.items()}
    shapes = [leaf.shape[2:] for leaf in shards.values()]
    log_likelihood = factorisation.log_likelihood(task, blocks=1)

    def log_density(*parts_and_watched):
        *parts, watched = parts_and_watched

        def model():
            params = {}
            for name, shape in zip(shards, shapes, strict=True):
                prior = tfd.Sample(tfd.Normal(0.0, 1.0), shape)
                prior = Sharded(prior, shard_axis_name="data") if name in "Uu" else prior
                # What is yielded has its gradient summed over devices; the part itself has not.
                params[name] = yield Root(prior)
            # The likelihood in the form that all peers share.
            terms = IncrementLogProb(log_likelihood(params, watched))
            yield Sharded(terms, shard_axis_name="data")

        return JointDistribution(model).log_prob((*parts, jnp.zeros(0)))

    shard_axes = [["data"] if name in "Uu" else [] for name in shards]
    return _program(log_density, position, (data,), mesh, task, shard_axes)


def _by_device(leaf: np.ndarray, is_sharded: bool, devices: int) -> np.ndarray:
    """Return [devices, chains, ...]: each device's users, or a copy for each device."""
    if not is_sharded:
        return np.broadcast_to(leaf, (devices, *leaf.shape))
    chains, users, *rest = leaf.shape
    return leaf.reshape(chains, devices, users // devices, *rest).swapaxes(0, 1)


def _place_shards(mesh, values: np.ndarray) -> jax.Array:
    return place(mesh, PartitionSpec("data"), values.shape, lambda index: values[index])


def _program(log_density, position, data, mesh, task, shard_axes=None) -> HmcProgram:
    """With ``shard_axes``, everything that is carried has a leading axis of devices."""
    axis = None if shard_axes is None else 0
    in_axes = (axis, *(0 for _ in data))
    pmap = functools.partial(jax.pmap, axis_name="data", in_axes=in_axes, out_axes=axis)

    def kernel(data):
        def target(*parts):
            return log_density(*parts, *data)

        return tfp.mcmc.HamiltonianMonteCarlo(
            jax.vmap(target) if task.chains > 1 else target,
            step_size=task.step_size,
            num_leapfrog_steps=task.leapfrogs,
            experimental_shard_axis_names=shard_axes,
        )

    def init(position, *data):
        return kernel(data).bootstrap_results(position)

    def transition(carry, *data):
        rng_key, position, results = carry
        rng_key, step_key = jax.random.split(rng_key)
        return rng_key, *kernel(data).one_step(position, results, seed=step_key)

    parts = list(position.values())
    results = pmap(init)(parts, *data)
    rng_key = jax.random.key(1)
    if shard_axes is None:
        carry = replicate(mesh, (rng_key, parts, results))
    else:
        carry = jax.device_put(jnp.broadcast_to(rng_key, mesh.size), parts[0].sharding), parts, results
    return HmcProgram(
        transition=pmap(transition),
        carry=carry,
        data=data,
        units=task.units,
        acceptance=lambda carry: jnp.exp(jnp.minimum(0, carry[2].log_accept_ratio)),
        evaluate=lambda: _evaluate(results.accepted_results, list(position), shard_axes),
        devices=task.devices,
    )


def _evaluate(accepted, names, shard_axes):
    log_density, grads = accepted.target_log_prob, accepted.grads_target_log_prob
    if shard_axes is None:
        return log_density, dict(zip(names, grads, strict=True))
    parts = zip(names, grads, shard_axes, strict=True)
    return log_density[0], {name: _whole(np.asarray(grad), axes) for name, grad, axes in parts}


def _whole(part: np.ndarray, axes: list) -> np.ndarray:
    """Undo `_by_device`."""
    return np.concatenate(part, axis=1) if axes else part[0]
