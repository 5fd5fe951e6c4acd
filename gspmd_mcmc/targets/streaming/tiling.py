"""One pass over the rows of a plate, a tile at a time, in plain GSPMD.

Rows are cut into blocks, one a device, and each block into tiles that stay in cache: a tile's forward
and backward run before the next one is read, so nothing of the data's size is ever made. The gradient
of shared parameters is kept per block and summed over blocks after the last tile: one all-reduce.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.jax_private import open_program
from gspmd_mcmc.placement.explicit import explained
from gspmd_mcmc.placement.mapped_axes import mapped_axes
from gspmd_mcmc.placement.mesh import cores_of_device
from gspmd_mcmc.targets.resolution import warn_of_narrow_terms
from gspmd_mcmc.targets.streaming.kernels_inside import has_kernel
from gspmd_mcmc.targets.streaming.products import with_narrow_factor_first
from gspmd_mcmc.targets.streaming.rows import Rows
from gspmd_mcmc.targets.streaming.slots import Slots
from gspmd_mcmc.targets.streaming.two_float import two_float_sum
from gspmd_mcmc.tree import PyTree, path_str, widened

# Bytes of a tile's largest intermediate. On a CPU device of several cores two tiles
# (`_tiles_at_once`) fit the caches that they share. On a device of one core it fits that core's
# own, and operations are so small that XLA does not split them over threads, which would wait for
# the cores of other devices. But products of few rows are slow, and each tile adds up a gradient of
# what all rows share. Elsewhere tiles are large, as each costs a few kernel launches, and only
# bound the memory. So they are where data lie over a second mesh axis: each tile then ends in a sum
# over it.
TILE_BYTES_A_CORE = 9 << 18
TILE_BYTES_OF_ONE_CORE, SHARED_BYTES_TIMES, ENOUGH_ROWS = 5 << 15, 4, 256
TILE_BYTES_ELSEWHERE = 256 << 20
PROBE_ROWS = 127
# An intermediate that depends on latents exists once per chain, and again as its cotangent, partly in
# the same place. This is what two chains were measured to take; vmap does not tell how many there are.
COPIES = 3.5
# Equations that call a function of their operands, no more: branches are not looked into, nor what
# has a derivative of its own, which may read more.
CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint", "scan", "shard_map")


@dataclass(frozen=True)
class Likelihood:
    """What one trace of the likelihood tells, for given parameters.

    Attributes
    ----------
    is_read
        For each leaf of the parameters, whether the likelihood reads it.
    row_bytes
        Bytes of the largest intermediate, a row, what depends on latents counted `COPIES` times.
    shared_bytes
        Bytes of the parameters that it reads and all rows share.
    has_kernel
        Whether it holds a kernel, which the compiler cannot cut over devices.
    """

    is_read: tuple[bool, ...]
    row_bytes: int
    shared_bytes: int
    has_kernel: bool


def probe(
    terms_of: Callable, name: str, params: PyTree, is_local: list[bool], data: PyTree, rows: Rows
) -> Likelihood:
    """Trace the likelihood on a few rows: which parameters it reads, how much memory a row takes.

    ``terms_of(params, block)`` is the likelihood called ``name``, on the block's rows of local leaves.

    Raises
    ------
    ValueError, TypeError
        If it does not return one floating term a row.
    """
    num = min(rows.block_rows, PROBE_ROWS)

    def block_of(num: int) -> tuple[PyTree, PyTree]:
        def like(array: Any, has_rows: bool) -> jax.ShapeDtypeStruct:
            shape = (num, *jnp.shape(array)[1:]) if has_rows else jnp.shape(array)
            return jax.ShapeDtypeStruct(shape, jnp.result_type(array))

        leaves, treedef = jax.tree.flatten(params)
        shapes = map(like, leaves, is_local)
        return treedef.unflatten(shapes), jax.tree.map(lambda a: like(a, True), data)

    try:
        closed, out = jax.make_jaxpr(terms_of, return_shape=True)(*block_of(num))
    except (TypeError, ValueError) as error:
        try:
            jax.eval_shape(terms_of, *block_of(rows.num_rows))
        except Exception:  # whatever a user's function raises
            raise error from None
        raise ValueError(
            f"{name}: it takes all {rows.num_rows} rows at once, but not a block of {num} of them. "
            "It is called with blocks of any number of rows, so neither that number may be written "
            "into it (take it from the block: len(block[...])), nor may it read an array of rows "
            "that is not among the plate's data"
        ) from error
    _check_terms(name, out, num, block_of(num)[0])
    num_leaves, jaxpr = len(is_local), open_program(closed)
    is_read = tuple(is_live(jaxpr)[:num_leaves])
    shared = [
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf, reads, local in zip(jax.tree.leaves(params), is_read, is_local, strict=True)
        if reads and not local
    ]
    is_latent = [i < num_leaves for i in range(len(jaxpr.invars))]
    row_bytes = _row_bytes(jaxpr, is_latent, num, rows.platform)
    return Likelihood(is_read, row_bytes, sum(shared), has_kernel(jaxpr))


def _row_bytes(jaxpr: Any, is_latent: Sequence[bool], num: int, platform: str) -> int:
    """Bytes a row of the largest array with ``num`` rows; what depends on latents is one a chain."""
    of_latents = {id(v) for v, flag in zip(jaxpr.invars, is_latent, strict=True) if flag}
    most = 1
    for eqn in jaxpr.eqns:
        depends = [id(v) in of_latents for v in eqn.invars]
        if any(depends):
            of_latents |= {id(v) for v in eqn.outvars}
        if (form := _form_on(platform, eqn)) is not None:
            flags = depends[len(depends) - len(form.invars) :]
            most = max(most, _row_bytes(form, flags, num, platform))
        for v in (*eqn.invars, *eqn.outvars):
            if num in getattr(v.aval, "shape", ()):
                copies = COPIES if id(v) in of_latents else 1
                bytes_a_row = math.prod(v.aval.shape) * v.aval.dtype.itemsize / num
                most = max(most, int(copies * bytes_a_row))
    return most


def _form_on(platform: str, eqn: Any) -> Any:
    """Return the form that a function of several platforms has on a CPU, whose arrays count there.

    Elsewhere such a function, as one with a derivative of its own, keeps what it makes on the chip.
    """
    if platform != "cpu":
        return None
    if eqn.primitive.name.startswith("custom_vjp_call"):
        return open_program(eqn.params["call_jaxpr"])
    for branch, platforms in zip(
        eqn.params.get("branches", ()), eqn.params.get("branches_platforms") or (), strict=False
    ):
        if platforms is None or "cpu" in platforms:
            return open_program(branch)
    return None


def is_live(jaxpr: Any, is_wanted: Sequence[bool] | None = None) -> list[bool]:
    """Tell for each input of a program whether an output depends on it, of those that are wanted."""
    wanted = [True] * len(jaxpr.outvars) if is_wanted is None else is_wanted
    live = {id(v) for v, wants in zip(jaxpr.outvars, wanted, strict=True) if wants}
    for eqn in reversed(jaxpr.eqns):
        wanted = [id(v) in live for v in eqn.outvars]
        if any(wanted):
            reads = _reads(eqn, wanted)
            live |= {id(v) for v, is_read in zip(eqn.invars, reads, strict=True) if is_read}
    return [id(v) in live for v in jaxpr.invars]


def _reads(eqn: Any, wanted: Sequence[bool]) -> list[bool]:
    """Tell which operands of an equation what is wanted depends on; of a call, by what it calls."""
    called = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if eqn.primitive.name not in CALLS or called is None:
        return [True] * len(eqn.invars)
    # What a loop carries is read by its next round.
    is_loop = eqn.primitive.name == "scan"
    return is_live(open_program(called), None if is_loop else wanted)


def _check_terms(name: str, out: PyTree, num: int, params: PyTree) -> None:
    if isinstance(out, jax.ShapeDtypeStruct) and out.shape == (num,):
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise TypeError(f"{name}: expected floating terms, got dtype {out.dtype}")
        warn_of_narrow_terms(name, out)
        return
    got = jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", out)
    shapes = {path_str(p): a.shape for p, a in jax.tree_util.tree_leaves_with_path(params)}
    raise ValueError(
        f"{name}: expected one term for each row of the block, shape [{num}] for a block of "
        f"{num} rows, got {got} with parameters of shapes {shapes}. Return terms, not their sum"
    )


def tile_rows(likelihood: Likelihood, rows: Rows, asked: int | None) -> int:
    """Rows of a tile: as asked, or what the largest intermediate allows; tiles of a block are even."""
    most = asked or max(1, _most_rows(likelihood, rows))
    num_tiles = -(-rows.block_rows // most)
    if num_tiles > 1 and not asked:
        num_tiles += -num_tiles % _tiles_at_once(rows)
    return -(-rows.block_rows // num_tiles)


def _most_rows(likelihood: Likelihood, rows: Rows) -> int:
    if not _has_small_tiles(rows):
        return TILE_BYTES_ELSEWHERE // likelihood.row_bytes
    cores = cores_of_device(rows.mesh)
    most = TILE_BYTES_A_CORE * cores // likelihood.row_bytes
    if cores > 1:
        return most
    own = max(TILE_BYTES_OF_ONE_CORE, SHARED_BYTES_TIMES * likelihood.shared_bytes)
    return min(most, max(ENOUGH_ROWS, own // likelihood.row_bytes))


def _has_small_tiles(rows: Rows) -> bool:
    """Whether tiles are of a size that the caches of a CPU hold."""
    return rows.platform == "cpu" and not any(entry for spec in rows.specs for entry in spec)


def _tiles_at_once(rows: Rows) -> int:
    """Return how many tiles a round of the loop has.

    XLA runs on one core what adds rows up: products of few columns, scatters. A CPU device of several
    cores runs those of a tile while it runs what it can divide of another.
    """
    return 2 if _has_small_tiles(rows) and cores_of_device(rows.mesh) > 1 else 1


def stream(
    body: Callable,
    init: PyTree,
    by_local: PyTree,
    shared: PyTree,
    blocks: tuple[PyTree, PyTree],
    rows: Rows,
    num_rows: int,
    slots: Slots,
    bound: PyTree,
    has_kernel: bool = False,
) -> tuple[PyTree, PyTree, PyTree]:
    """Scan the tiles of all blocks at once.

    Parameters
    ----------
    body
        ``body(bound, carry, sums, shared, block_tile, is_counted) -> carry, sums, out`` for one tile of
        one block: its data, its latents and what is ``known`` of its rows. ``sums`` is the tile's part
        of ``by_local``; ``is_counted`` [tile] is False on padding and on rows that an earlier tile has
        counted.
    init
        What each block's carry starts from; leaves [blocks, ...].
    by_local
        What is added to, one to each row or slot; leaves [blocks, rows or slots of a block, ...].
    shared
        What all blocks read whole. Each has its own here: an operation that the compiler does not cut
        along its columns, such as a triangular solve, would gather the rows of all blocks otherwise.
    blocks
        The data [blocks, rows of a block, ...], and the local latents, one to each row or slot.
    rows, num_rows
        The layout of the rows, and how many a tile has.
    slots
        How rows lie with their local latents.
    bound
        Functions with the arrays that they bind, whole on every device. No gradient of them is taken.
        JAX raises where a body inside `jax.shard_map` closes over arrays that are placed on a mesh.
    has_kernel
        Whether ``body`` holds a kernel, so that each device is to run it for its block by itself.

    Returns
    -------
    carry, by_local, out
        Carry per block, leaves [blocks, ...]; ``by_local`` with what the tiles added; outputs per tile,
        leaves [tiles, blocks, ...].
    """
    shared = rows.per_block(
        jax.tree.map(lambda a: jnp.broadcast_to(a, (rows.num_blocks, *a.shape)), shared)
    )
    if rows.platform == "cpu":
        body = with_narrow_factor_first(body)
    each_block = _over_blocks(body, rows, has_kernel)

    def cut(arrays, start, size):
        at = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
        return jax.tree.map(at, arrays)

    def step(carries, index):
        carry, by_local = carries
        tile = slots.tile(index, num_rows, rows)
        of_latents = (tile.latent, tile.num_latents)
        data, latents = cut(blocks[0], tile.row, tile.num_rows), cut(blocks[1], *of_latents)
        block_tile = data, latents, tile.known
        sums = cut(by_local, *of_latents)
        carry, sums, out = each_block(bound, carry, sums, shared, block_tile, tile.is_counted)
        paste = partial(jax.lax.dynamic_update_slice_in_dim, start_index=tile.latent, axis=1)
        by_local = jax.tree.map(paste, by_local, sums)
        return (rows.per_block(carry), rows.per_block(by_local)), rows.per_block(out)

    num_tiles = -(-rows.block_rows // num_rows)
    start = (rows.per_block(init), rows.per_block(by_local))
    with jax.named_scope("tiles"), explained():
        (carry, by_local), out = jax.lax.scan(
            step, start, jnp.arange(num_tiles), unroll=_tiles_at_once(rows)
        )
    return carry, by_local, out


def _over_blocks(body: Callable, rows: Rows, has_kernel: bool) -> Callable:
    """Map over blocks: one block a device, or by the compiler, which cuts operations over devices.

    Cut by the compiler, a device's arrays keep an axis of one block, which makes sums slow on a CPU
    (see `_unmapped`). The compiler cannot cut a kernel along any axis of the mesh.
    """
    if rows.num_blocks == 1:
        return _unmapped(body)
    manual = set() if has_kernel else _manual_axes(rows)
    if manual is None:
        return lambda bound, *args: jax.vmap(partial(body, bound))(*args)
    here = P(rows.axes)
    specs = {"in_specs": (P(), *(here,) * 5), "out_specs": here, "axis_names": manual}
    return jax.shard_map(_unmapped(body), mesh=rows.mesh, check_vma=False, **specs)


def _manual_axes(rows: Rows) -> set[str] | None:
    """Return the axes that a program without kernels is cut over by hand; None: the compiler cuts all.

    The axes of maps over chains are among them, because `jax.shard_map` counts on that.
    """
    mapped = mapped_axes() if rows.platform == "cpu" else None
    return None if mapped is None or mapped & set(rows.axes) else {*mapped, *rows.axes}


def _unmapped(body: Callable) -> Callable:
    """Call ``body`` for the one block there is, without its axis, and put the axis back.

    With an axis of length 1 in their midst XLA's reductions on a CPU took three to five times as long.
    """

    def of_one_block(bound, *args):
        out = body(bound, *jax.tree.map(lambda a: jnp.squeeze(a, 0), args))
        return jax.tree.map(lambda a: a[None], out)

    return of_one_block


def tile_sum(terms: jax.Array, is_counted: jax.Array) -> jax.Array:
    """Two-float sum of the counted terms of one tile, shape [2], float32 at least."""
    terms = widened(terms)
    return two_float_sum(jnp.where(is_counted, terms, jnp.zeros_like(terms)))
