"""Where draws gather: on the devices as long as they fit a share of memory, then on the host."""

import math
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.tree import PyTree

DEVICE_SHARE = 0.25


def capacity(shapes: PyTree, num_samples: int, num_shards: int, device_bytes: int | None) -> int:
    """How many draws a buffer on the devices holds.

    Parameters
    ----------
    shapes
        What one draw of all chains is: leaves [chains, ...].
    num_samples
        Draws that are asked for.
    num_shards
        In how many parts the chains lie.
    device_bytes
        Bytes for draws on each device; a quarter of its memory when None, no bound where the device
        reports none (a CPU's memory is the host's).
    """
    if device_bytes is None:
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        device_bytes = int(DEVICE_SHARE * limit) if limit else None
    if device_bytes is None:
        return num_samples
    draw = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(shapes)) / num_shards
    return min(num_samples, max(1, int(device_bytes // max(draw, 1))))


class HostDraws:
    """Draws on the host, filled from buffers shard by shard."""

    def __init__(self, buffers: PyTree, num_samples: int):
        self._arrays = jax.tree.map(
            lambda b: np.zeros((b.shape[0], num_samples, *b.shape[2:]), b.dtype), buffers
        )

    def fill(self, buffers: PyTree, start: int, count: int) -> None:
        """Copy the first ``count`` draws of the buffers to draws ``start`` and on."""
        jax.tree.map(lambda host, b: _copy(host, b, start, count), self._arrays, buffers)

    def draws(self, count: int) -> PyTree:
        """Return the first ``count`` draws."""
        return jax.tree.map(lambda a: a[:, :count], self._arrays)


def _copy(host: np.ndarray, buffer: jax.Array, start: int, count: int) -> Any:
    for shard in buffer.addressable_shards:
        if shard.replica_id == 0:
            chains, _, *rest = shard.index
            host[(chains, slice(start, start + count), *rest)] = np.asarray(shard.data)[:, :count]
