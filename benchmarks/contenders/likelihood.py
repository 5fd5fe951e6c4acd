"""The categorical log likelihood as plain functions: the textbook's form, and those fastest on CPU.

Each peer was timed with one-hot and with gathered labels (they differ by under 5 %), with classes
last and classes first (by 15 to 40 %: last is faster with one chain, first with several), and with
a leading axis of one on the weights, which makes XLA take another matrix product: 1.4 times as fast
with one chain, unless the compiler partitions the product itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks import mnist_data
from benchmarks.contenders.placing import one_hot, place, scaled
from benchmarks.mnist_data import NUM_CLASSES


def rows_first(w: jax.Array, b: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the log likelihood from logits [rows, classes] and labels [rows]."""
    return _gathered(images @ w + b, labels)


def batched_rows(w: jax.Array, b: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Return what `rows_first` does, with a leading axis of one on the weights."""
    return _gathered((images @ w[None])[0] + b, labels)


def classes_first(w: jax.Array, b: jax.Array, images: jax.Array, hot: jax.Array) -> jax.Array:
    """Return the log likelihood from logits [classes, rows] and one-hot labels of that shape."""
    logits = w.T @ images.T + b[:, None]
    return (logits * hot).sum() - jax.nn.logsumexp(logits, axis=0).sum()


def of_task(task, mesh: Mesh) -> tuple:
    """Return a likelihood, in the task's form or the fastest, and the placed arrays that it takes."""
    data, chains = mnist_data.load(task.data_dir), task.chains
    is_textbook = task.form == "textbook"
    rows = len(data.labels)
    by_rows = PartitionSpec("data")
    images = place(mesh, by_rows, data.images.shape, scaled(data.images))
    if chains == 1 or is_textbook:
        likelihood = batched_rows if mesh.size == 1 and not is_textbook else rows_first
        return likelihood, (images, place(mesh, by_rows, (rows,), lambda i: data.labels[i]))
    columns = PartitionSpec(None, "data")
    hot = place(mesh, columns, (NUM_CLASSES, rows), lambda i: _hot_columns(data.labels, i))
    return classes_first, (images, hot)


def _gathered(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=1)
    return chosen.sum() - jax.nn.logsumexp(logits, axis=1).sum()


def _hot_columns(labels: np.ndarray, index: tuple) -> np.ndarray:
    return np.ascontiguousarray(one_hot(labels, index[1]).T)
