"""Statistics of every column of draws: leaf by leaf, in blocks of bounded memory, where they lie.

Columns are all the axes of a leaf after [chains, draws]. A block takes a part of each shard of one
column axis, so that cutting blocks moves nothing between devices. Draws on the host (NumPy), and those
that are read from disk, go to the devices one slice of columns at a time.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.mesh import make_mesh
from gspmd_mcmc.tree import PyTree, is_traced, path_str

# Bytes of temporaries of a block on a device, and how many arrays of the size of the block a statistic
# (tails, or ranks of draws and of folded draws) holds at a time: measured by `communication`.
TEMPORARY_BYTES = 256 * 2**20
COPIES = 10
SMALL_LEAF = 1000  # numbers


@on_any_mesh
def per_leaf(statistic: Callable, draws: PyTree, copies: int = COPIES, **options: Any) -> PyTree:
    """Apply a statistic of columns to every leaf, JAX or NumPy or read from disk by ``leaf[index]``.

    The statistic is a function at module level (programs are cached by its identity), with hashable
    options, of floats [chains, draws, ...]. It may get a block of columns, and returns an array [...]
    or a tree of them. Results lie as the columns do, and are NumPy where the draws are not JAX.
    """

    def apply(leaf):
        function = _of_devices if isinstance(leaf, jax.Array) else _of_host
        return function(leaf, statistic, tuple(sorted(options.items())), copies)

    check_draws(draws)
    return jax.tree.map(apply, draws)


def by_name(
    compute: Callable[[PyTree], dict[str, PyTree]], named: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Compute statistics of leaves by name: small leaves of one width side by side, on one device.

    A program of statistics takes seconds to compile. ``compute`` takes a tree of draws, and gives trees
    like it by the names of statistics. It judges how finely draws are rounded, so none are widened.
    """
    small = {name: x for name, x in named.items() if math.prod(x.shape[2:]) <= SMALL_LEAF}
    found = {name: compute(leaf) for name, leaf in named.items() if name not in small}
    dtypes = {name: _float_of(jax.dtypes.canonicalize_dtype(x.dtype)) for name, x in small.items()}
    for dtype in dict.fromkeys(dtypes.values()):
        some = {name: x for name, x in small.items() if dtypes[name] == dtype}
        found |= _side_by_side(compute, some, dtype)
    return found


def _side_by_side(
    compute: Callable[[PyTree], dict[str, PyTree]], small: dict[str, Any], dtype: Any
) -> dict[str, dict[str, Any]]:
    flat = [
        x.reshape(*x.shape[:2], math.prod(x.shape[2:])).astype(dtype)
        for x in to_host(list(small.values()))
    ]
    beside = compute(np.concatenate(flat, axis=2))
    ends = np.cumsum([x.shape[2] for x in flat])[:-1]
    pieces = {key: np.split(x, ends) for key, x in beside.items()}
    return {
        name: {key: pieces[key][i].reshape(x.shape[2:]) for key in pieces}
        for i, (name, x) in enumerate(small.items())
    }


def as_float(x: jax.Array) -> jax.Array:
    """Return floats of at least single precision."""
    return x.astype(_float_of(x.dtype))


def _float_of(dtype: Any) -> Any:
    wanted = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.result_type(float)
    return jnp.promote_types(dtype, wanted)


def nan_columns(x: jax.Array) -> jax.Array:
    """Return NaN for each column of draws [chains, draws, ...], laid out as the columns are."""
    return jnp.sum(x, axis=(0, 1)) * jnp.nan


def needs_draws(least: int) -> Callable:
    """Decorate a statistic of columns: it is NaN where chains have fewer draws than ``least``."""

    def decorate(statistic: Callable) -> Callable:
        @functools.wraps(statistic)
        def call(x: jax.Array, *args: Any, **options: Any) -> Any:
            return nan_columns(x) if x.shape[1] < least else statistic(x, *args, **options)

        return call

    return decorate


def check_draws(draws: PyTree) -> None:
    """Raise, with the leaf's path, unless all leaves are real numbers [chains, draws, ...]."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(draws):
        shape, dtype = np.shape(leaf), jnp.result_type(leaf)
        if len(shape) < 2 or not shape[0]:
            raise ValueError(
                f"draws at {path_str(path)}: expected the shape [chains, draws, ...] with one chain or "
                f"more, got {list(shape)}. Give the draws of a single chain a leading axis: x[None]."
            )
        if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
            raise TypeError(
                f"draws at {path_str(path)}: expected floats, integers or booleans, got {dtype}. Give "
                "the real and imaginary parts of complex numbers separately; leave keys out."
            )


def _of_devices(leaf: jax.Array, statistic: Callable, options: tuple, copies: int) -> PyTree:
    # Inside a program shards are not known.
    shards = None if is_traced(leaf) else shards_of(leaf)
    return apply_to_columns(leaf, statistic, options, copies, shards)


def shards_of(leaf: Any) -> tuple[int, ...]:
    """Return in how many shards each column axis of an array, or of the shape of one, is cut."""
    local = leaf.sharding.shard_shape(leaf.shape)[2:]
    return tuple(n // max(m, 1) for n, m in zip(leaf.shape[2:], local, strict=True))


def _of_host(leaf: Any, statistic: Callable, options: tuple, copies: int) -> PyTree:
    """Compute on the devices, and hold there no more than a slice of the columns at a time."""
    num_columns = math.prod(leaf.shape[2:])
    num_bytes = max(math.prod(leaf.shape[:2]) * max(leaf.dtype.itemsize, 4) * copies, 1)
    of_device = max(TEMPORARY_BYTES // num_bytes, 1)
    if num_columns <= of_device:
        columns = _columns(leaf, 0, num_columns)
        results = jax.device_get(_of_devices(jnp.asarray(columns), statistic, options, copies))
        return jax.tree.map(lambda x: x.reshape(leaf.shape[2:]), results)
    mesh = make_mesh(devices=jax.local_devices())
    sharding = NamedSharding(mesh, P(None, None, *mesh.axis_names))
    num_slices = math.ceil(num_columns / (of_device * mesh.size))
    size = math.ceil(num_columns / num_slices / mesh.size) * mesh.size
    slices = []
    for start in range(0, num_columns, size):
        columns = _columns(leaf, start, min(start + size, num_columns))
        # Slices are of one size; the last is filled up with its last column.
        missing = size - columns.shape[2]
        columns = np.pad(columns, ((0, 0), (0, 0), (0, missing)), "edge") if missing else columns
        piece = jax.device_put(columns, sharding)
        slices.append(jax.device_get(_of_devices(piece, statistic, options, copies)))
    return jax.tree.map(lambda *x: np.concatenate(x)[:num_columns].reshape(leaf.shape[2:]), *slices)


def _columns(leaf: Any, start: int, end: int) -> np.ndarray:
    """Take columns [chains, draws, columns] of a leaf; no more of its first column axis is read."""
    if len(leaf.shape) == 2:
        return np.asarray(leaf)[:, :, None]
    inner = max(math.prod(leaf.shape[3:]), 1)
    first = start // inner
    rows = np.asarray(leaf[:, :, first : -(-end // inner)])
    columns = rows.reshape(*leaf.shape[:2], rows.shape[2] * inner)
    return columns[:, :, start - first * inner : end - first * inner]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def apply_to_columns(
    leaf: jax.Array, statistic: Callable, options: tuple, copies: int, shards: tuple[int, ...] | None
) -> PyTree:
    """Compute a statistic of the columns of a leaf, in blocks; the program of `per_leaf`."""

    def function(x):
        return statistic(as_float(x), **dict(options))

    # Inside a program the shards are not known: an axis could be cut into at most this many.
    num_shards = shards or tuple(math.gcd(n, jax.device_count()) for n in leaf.shape[2:])
    local = math.prod(leaf.shape) * max(leaf.dtype.itemsize, 4) * copies
    if shards:
        local //= math.prod(shards)
    if leaf.ndim == 2 or local <= TEMPORARY_BYTES:
        return function(leaf)
    return _by_blocks(function, leaf, num_shards, math.ceil(local / TEMPORARY_BYTES))


def _by_blocks(function: Callable, leaf, shards: tuple[int, ...], num_blocks: int):
    """Cut each shard of the longest column axis into blocks, and take one of every shard at a time."""
    lengths = [n // s for n, s in zip(leaf.shape[2:], shards, strict=True)]
    column_axis = int(np.argmax(lengths))
    length, axis = lengths[column_axis], column_axis + 2
    size = math.ceil(length / min(num_blocks, length))
    shape = (*leaf.shape[:axis], shards[column_axis], length, *leaf.shape[axis + 1 :])

    def block(start):
        # The shards are separated in the loop: before it, XLA would copy all of the draws.
        apart = leaf.reshape(shape)
        return function(jax.lax.dynamic_slice_in_dim(apart, start, size, axis + 1))

    # The last block begins early enough to be whole: some of its columns are computed twice.
    starts = np.minimum(np.arange(0, length, size), length - size)
    blocks = jax.lax.map(block, starts)
    join = functools.partial(_join, axis=column_axis + 1, length=length, shape=leaf.shape[2:])
    return jax.tree.map(join, blocks)


def _join(blocks: jax.Array, axis: int, length: int, shape: tuple[int, ...]) -> jax.Array:
    """Lay blocks [blocks, ...] side by side along a column axis, and merge it with its shards."""
    num_blocks, size = blocks.shape[0], blocks.shape[axis + 1]
    beside = jnp.moveaxis(blocks[:-1], 0, axis)
    whole = beside.reshape(*beside.shape[:axis], (num_blocks - 1) * size, *beside.shape[axis + 2 :])
    rest = length - (num_blocks - 1) * size
    last = jax.lax.slice_in_dim(blocks[-1], size - rest, size, axis=axis)
    return jnp.concatenate([whole, last], axis=axis).reshape(shape)
