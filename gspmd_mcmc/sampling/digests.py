"""Numbers by which a later call recognizes the data of a target, and what is kept of its draws.

They depend on values and global indices only: not on the mesh, the pad, the tiles or the processes.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.placement.padding import is_padded, real_rows
from gspmd_mcmc.sampling.run_state import DrawSpec, collect_all
from gspmd_mcmc.targets.local import is_row_values
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.targets.streaming.slots import RowSlots
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, path_str

NUM_SUMS = 4  # of each leaf that is kept, with random weights
# What another mesh or compiler may change of what is kept: this share of its root sum of squares.
MOST_CHANGE = 1e-4
ROW, LEAF = 0x9E3779B9, 0x85EBCA77  # odd numbers


# The data of a target.


def data_digests(target: Target) -> dict[str, str]:
    """Return a digest of the bits of each array of a target, by path.

    Rows of groups may come in another order within their group. The arrays that only say how rows lie
    are left out.
    """
    return {path: f"{int(x):08x}" for path, x in to_host(_data_digests(target)).items()}


@jax.jit
def _data_digests(target: Target) -> dict[str, jax.Array]:
    of_rows, of_slots = {}, set()
    for plate in target.plates:
        digests = _digests_of_rows(plate)
        leaves = jax.tree.leaves(plate.data)
        of_rows |= {id(x): digest for x, digest in zip(leaves, digests, strict=True)}
        of_slots |= {id(x) for x in jax.tree.leaves(plate.slots)}
    found = {}
    paths = jax.tree_util.tree_leaves_with_path(target, is_leaf=is_padded)  # meshes differ in their pad
    for path, leaf in ((p, x.values if is_padded(x) and x.order else real_rows(x)) for p, x in paths):
        if id(leaf) not in of_slots:
            digest = of_rows.get(id(leaf))
            found[path_str(path)] = (
                _row_digests(jnp.asarray(leaf)[None])[0] if digest is None else digest
            )
    return found


def _digests_of_rows(plate: Plate) -> list[jax.Array]:
    """Return a digest of each leaf of a plate's data; that of a later leaf covers the earlier ones.

    So values of one row stay together. Each row's hash covers the latent that the row has: its own, or
    that of its group.
    """
    rows, slots = plate.rows, plate.slots
    latent = slots.latent_of(jax.lax.iota(jnp.int32, rows.num_padded))
    if slots.order is not None:
        latent = slots.order.to_laid[latent]
    is_real = rows.is_real(1) if isinstance(slots, RowSlots) else slots.is_real
    of_row, found = _mixed(latent.astype(jnp.uint32) + jnp.uint32(ROW)), []
    for leaf in jax.tree.leaves(plate.data):
        of_row = _mixed(of_row * jnp.uint32(LEAF) + _row_digests(leaf))
        found.append(jnp.sum(jnp.where(is_real, of_row, 0), dtype=jnp.uint32))
    return found


def _row_digests(array: jax.Array) -> jax.Array:
    """Return a number for the bits of each row: [rows, ...] to [rows], uint32 that wraps around."""
    bits = _bits(array)
    # A bijection of each number: one that changes always changes the sum.
    mixed = _mixed(bits ^ _mixed_indices(bits.shape[1:])[None])
    return jnp.sum(mixed, axis=tuple(range(1, bits.ndim)), dtype=jnp.uint32)


def _bits(array: jax.Array) -> jax.Array:
    """Return the bits of numbers as uint32, with a last axis where they have more than 32."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 8:
        to = jnp.uint32 if array.dtype.itemsize == 8 else f"uint{8 * array.dtype.itemsize}"
        array = jax.lax.bitcast_convert_type(array, to)
    return array.astype(jnp.uint32)


def require_same_data(what: str, saved: dict[str, str], given: dict[str, str]) -> None:
    """Raise a ValueError that names the arrays of a target whose digests differ."""
    names = [name for name in saved | given if saved.get(name) != given.get(name)]
    if names:
        raise ValueError(
            f"{what}: the target's data {', '.join(names[:3])} are not those that it began with "
            f"({len(names)} of {len(given)} arrays differ). Give the same data, to the bit: prepare "
            "them in NumPy, as another mesh or version of JAX may round its results otherwise. To "
            "sample these data, begin a new run in another folder"
        )


# What is kept of a draw.


def kept_sums(target: Target, draw: DrawSpec, states: Any, layout: Layout) -> dict[str, list[float]]:
    """Describe what is kept of states: by leaf its largest value, size, and sums with random weights.

    `collect` is given infos that are made up, as states do not hold those of their last step.
    """
    found = to_host(_kept_sums(target, draw, states.position, layout=layout))
    return {name: [float(x) for x in sums] for name, sums in found.items()}


@partial(jax.jit, static_argnames="layout")
def _kept_sums(target: Target, draw: DrawSpec, position: PyTree, *, layout: Layout) -> dict:
    kept = collect_all(target, draw, position, _made_up_info(draw), layout)
    return {name: _sums(x) for name, x in named_leaves(kept, is_leaf=is_row_values).items()}


def _made_up_info(draw: DrawSpec) -> Any:
    """Return infos of all chains that differ between chains and between fields."""
    treedef, shapes = draw.info

    def made_up(number: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        value = jnp.arange(1, shape[0] + 1) + number
        if jnp.issubdtype(dtype, jnp.floating):
            value = value / (shape[0] + len(shapes))
        elif jnp.issubdtype(dtype, jnp.bool_):
            value = value % 2
        value = value.astype(dtype).reshape(-1, *(1,) * (len(shape) - 1))
        return jnp.broadcast_to(value, shape)

    return treedef.unflatten([made_up(i, *x) for i, x in enumerate(shapes)])


def _sums(leaf: Any) -> jax.Array:
    """Return the largest absolute value of a leaf [chains, ...], its size, and `NUM_SUMS` sums."""
    x = jnp.moveaxis(leaf.values, 1 + leaf.axis, 1) if is_row_values(leaf) else leaf
    is_counted = jnp.isfinite(x)
    if is_row_values(leaf):
        is_counted &= leaf.rows.is_real(x.ndim - 1)[None]
    x = jnp.where(is_counted, x, 0)
    x = jnp.concatenate([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.result_type(x.dtype, float))
    largest = jnp.max(jnp.abs(x), initial=0)
    x = x / jnp.where(largest > 0, largest, 1)
    index = _mixed_indices(x.shape)
    weights = [_mixed(index + jnp.uint32(i * ROW & 0xFFFFFFFF)) for i in range(NUM_SUMS)]
    signs = [jnp.where(w >> 31 == 0, x, -x) for w in weights]
    sums = [jnp.sum(s) for s in signs]
    return jnp.stack([largest, jnp.sqrt(jnp.sum(x * x)), *sums])


def require_same_kept(what: str, saved: dict[str, list[float]], given: dict[str, list[float]]) -> None:
    """Raise a ValueError that names the leaves that functions of a state compute otherwise."""
    for name in saved | given:
        here, there = given.get(name), saved.get(name)
        if here is None or there is None or not _is_same(np.array(there), np.array(here)):
            was, now = (
                "nothing" if x is None else f"at most {x[0]:.7g} in size" for x in (there, here)
            )
            raise ValueError(
                f"{what}: {name} of its draws is another quantity now. At the saved positions its size "
                f"was {was}, and is {now}. What collect computes has changed, or the target's derived, "
                "transform or bijections. Give the functions that the run began with, or begin a new "
                "run in another folder"
            )


def _is_same(there: np.ndarray, here: np.ndarray) -> bool:
    scaled = [np.concatenate([x[:1], x[0] * x[1:]]) for x in (there, here)]
    return bool(np.all(np.abs(scaled[0] - scaled[1]) <= MOST_CHANGE * max(scaled[0][1], scaled[1][1])))


# Hashes.


def _mixed_indices(shape: tuple[int, ...]) -> jax.Array:
    """Return a random number for each index of an array: the same ones for its part in a larger one."""
    mixed = jnp.zeros((1,) * len(shape), jnp.uint32)
    for axis in range(len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, (1,) * axis + shape[axis : axis + 1], axis)
        place = place.reshape(*place.shape, *(1,) * (len(shape) - axis - 1))
        mixed = _mixed(mixed * jnp.uint32(LEAF) + place + jnp.uint32(ROW))
    return jnp.broadcast_to(mixed, shape) if math.prod(shape) else jnp.zeros(shape, jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Mix the bits of 32-bit numbers, by the last steps of MurmurHash3 (Appleby, 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
