"""When the devices have no room: which arrays take it, and what would make some."""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax

from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.sampling.run import Run
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views.notation import bytes_text

MOST_NAMED = 5


class OutOfDeviceMemory(RuntimeError):
    """The arrays of a run do not fit on the devices; the message names the largest, and ways out."""


@dataclass
class Known:
    """What is known of a run so far."""

    target: Target
    run: Run | None = None


@contextlib.contextmanager
def explained(target: Target) -> Iterator[Known]:
    """Turn JAX's error of memory that ran out into one that says what took it.

    Raises
    ------
    OutOfDeviceMemory
        In its place.
    """
    known = Known(target)
    try:
        yield known
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter while it is dispatched
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfDeviceMemory(_explain(known, str(error))) from error


def _explain(known: Known, error: str) -> str:
    sizes = sorted(_bytes_of_device(known), key=lambda item: -item[1])[:MOST_NAMED]
    shown = ", ".join(f"{name} {bytes_text(num_bytes)}" for name, num_bytes in sizes)
    tiles = "" if known.run is None else "".join(f" {t}" for t in _smaller_tiles(known.run, error))
    said = error.splitlines()[0].rstrip(".")
    return (
        f"out of device memory: {said}. The largest arrays on each device: {shown}. Draws take "
        "less with a smaller device_bytes=, a larger thin=, collect=..., or to=ZarrSink(path); data "
        f"and latents over more devices.{tiles}"
    )


def _bytes_of_device(known: Known) -> Iterator[tuple[str, float]]:
    """Give the arrays of a run, each with its bytes on one device."""
    run = known.run
    states = None if run is None else run.state.states
    for what, tree in (("the target's data", known.target), ("the chains' states", states)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                shape = leaf.sharding.shard_shape(leaf.shape)
                yield f"{what} {path_str(path)}", math.prod(shape) * leaf.dtype.itemsize
    if run is None:
        return
    collected, stats = run.draw.one_draw
    size, parts = run.capacity, run.layout.num_parts
    for what, tree in ((f"{size} draws of", collected), (f"{size} draws' stat", stats)):
        for name, leaf in named_leaves(tree).items():
            yield f"{what} {name}", math.prod(leaf.shape) * leaf.dtype.itemsize * size / parts


def _smaller_tiles(run: Run, error: str) -> Iterator[str]:
    """Say for each plate how many rows a tile has, and how many would fit."""
    target = run.target
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in run.layout.shapes]
    position = jax.tree.unflatten(run.layout.treedef, shapes)
    params = jax.eval_shape(target.params, position) if target.plates else None
    for plate in target.plates:
        rows = plate.rows_of_tile(params, target.hidden_from(plate, params))
        fitting = max(1, int(rows * _share_that_fits(error)))
        yield f"Tiles of {plate} have {rows} rows; Plate(..., tile_rows={fitting}) makes them smaller."


def _share_that_fits(error: str) -> float:
    """Estimate what share of the bytes asked for fits into half of what is free; else a quarter."""
    asked = re.search(r"allocat\w* (?:of )?(\d+) bytes", error)
    memory = jax.local_devices()[0].memory_stats() or {}
    if asked is None or "bytes_limit" not in memory:
        return 0.25
    free = memory["bytes_limit"] - memory.get("bytes_in_use", 0)
    return min(0.5, 0.5 * free / max(int(asked[1]), 1))
