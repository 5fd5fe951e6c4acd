"""When the devices run out of memory: which arrays take it, and what would free some."""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.sampling.run import Run
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import path_str

MOST_NAMED = 5


class OutOfDeviceMemory(RuntimeError):
    """The arrays of a run do not fit on the devices; the message names the largest, and remedies."""


@dataclass
class Known:
    """What is known of a run so far."""

    target: Target
    run: Run | None = None


@contextlib.contextmanager
def explained(target: Target) -> Iterator[Known]:
    """Turn JAX's error of memory that ran out into an `OutOfDeviceMemory` that names what took it."""
    known = Known(target)
    try:
        yield known
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # The latter while it is dispatched.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sizes = sorted(_bytes_of_device(known), key=lambda item: -item[1])[:MOST_NAMED]
        shown = ", ".join(f"{name} {bytes_text(num_bytes)}" for name, num_bytes in sizes)
        tiles = "" if known.run is None else _smaller_tiles(known.run, str(error))
        said = str(error).splitlines()[0].rstrip(".")
        raise OutOfDeviceMemory(
            f"out of device memory: {said}. The largest arrays on each device: {shown}. Draws take "
            "less with a smaller device_bytes=, a larger thin=, collect=..., or to=ZarrSink(path); "
            f"data and latents take less on more devices.{tiles}"
        ) from error


def _bytes_of_device(known: Known) -> Iterator[tuple[str, float]]:
    """Yield the name of each array of a run, and its bytes on one device."""
    run = known.run
    states = None if run is None else run.state.states
    for what, tree in (("the target's data", known.target), ("the chains' states", states)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                shape = leaf.sharding.shard_shape(leaf.shape)
                yield f"{what} {path_str(path)}", math.prod(shape) * leaf.dtype.itemsize
    if run is None:
        return
    size, (collected, stats) = run.capacity, run.draw.one_draw
    for what, tree in ((f"{size} draws of", collected), (f"{size} draws' stat", stats)):
        for name, leaf in named_leaves(tree).items():
            num_bytes = math.prod(leaf.shape) * leaf.dtype.itemsize
            yield f"{what} {name}", num_bytes * size / run.layout.num_parts


def _smaller_tiles(run: Run, error: str) -> str:
    """Say for each plate how many rows a tile has, and how many would fit.

    The bytes asked for may take half of what is free, if both are known; else a quarter of the rows.
    """
    asked = re.search(r"allocat\w* (?:of )?(\d+) bytes", error)
    memory, share = jax.local_devices()[0].memory_stats() or {}, 0.25
    if asked and "bytes_limit" in memory:
        free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
        share = min(0.5, 0.5 * free / max(int(asked[1]), 1))
    target, layout, told = run.fixed.target, run.layout, ""
    if not isinstance(target, Posterior):
        return told
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in layout.shapes]
    params = jax.eval_shape(target.params, layout.treedef.unflatten(shapes))
    for plate in target.plates:
        rows = plate.rows_of_tile(params, target.hidden_from(plate, params))
        smaller = f"Plate(..., tile_rows={max(1, int(rows * share))})"
        told += f" Tiles of {plate} have {rows} rows; {smaller} makes them smaller."
    return told
