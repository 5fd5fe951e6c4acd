"""Placing rows over devices with plain JAX, block by block, so that no second copy is made."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def row_mesh(devices: int) -> Mesh:
    """Return a mesh of the first devices with one Auto axis, ``data``."""
    present = jax.devices()
    if len(present) < devices:
        raise RuntimeError(f"{devices} devices were asked for, {len(present)} are present")
    axis = {"axis_types": (AxisType.Auto,), "devices": present[:devices]}
    return jax.make_mesh((devices,), ("data",), **axis)


def place(mesh: Mesh, spec: PartitionSpec, shape: tuple, block: Callable) -> jax.Array:
    """Place an array whose ``block(index)`` is made for each device alone."""
    return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), block)


def replicate(mesh: Mesh, values):
    """Lay a tree of arrays whole on every device."""
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec()))


def scaled(images: np.ndarray) -> Callable:
    """Return the blocks of float32 images between 0 and 1."""
    return lambda index: images[index] / np.float32(255)


def one_hot(labels: np.ndarray, index, num_classes: int = 10) -> np.ndarray:
    """Return a block of one-hot labels, float32 [rows, classes]."""
    return np.eye(num_classes, dtype=np.float32)[labels[index]]
