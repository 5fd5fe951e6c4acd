"""What a reader should be told of a layout besides its numbers."""

from jax.sharding import PartitionSpec as P

from gspmd_mcmc.views.layout.layouts import DELETED, DEVICE, HOST, NOWHERE, LeafLayout
from gspmd_mcmc.views.notation import LARGE_BYTES, partitions


def remarks(leaf: LeafLayout) -> tuple[str, ...]:
    """Write the remarks on a leaf; the same words for the same thing, so that they can be gathered."""
    return tuple(
        note
        for note in (_whereabouts(leaf), _padding(leaf), *_uneven(leaf), *_of_spec(leaf), _whole(leaf))
        if note
    )


def _whereabouts(leaf: LeafLayout) -> str:
    if leaf.memory == DELETED:
        return "deleted, or donated to a program: it holds no memory any more"
    if leaf.label == "traced":
        return "traced: its layout is the compiler's choice, so look at it outside jit"
    if leaf.label == "not placed":
        return "has no sharding: give it one, or place it on a mesh"
    if leaf.shape is None and leaf.grid is None and leaf.devices:
        return "a sharding alone: visualize(sharding, shape=...) draws its blocks"
    if leaf.memory not in (DEVICE, HOST, NOWHERE):
        return f"in the memory {leaf.memory}, not counted in the total"
    return ""


def _padding(leaf: LeafLayout) -> str:
    if leaf.num_rows is None or leaf.shape is None:
        return ""
    return f"{leaf.num_rows} rows + {leaf.shape[0] - leaf.num_rows} pad (copies of the last real row)"


def _uneven(leaf: LeafLayout) -> list[str]:
    if leaf.shape is None or leaf.grid is None:
        return []
    return [
        f"axis {axis} has {size} elements, which {parts} blocks do not divide: pad it by "
        f"{-size % parts} to {size + -size % parts} (JAX refuses it as it is)"
        for axis, (size, parts) in enumerate(zip(leaf.shape, leaf.grid.parts, strict=True))
        if size % parts
    ]


def _of_spec(leaf: LeafLayout) -> list[str]:
    if leaf.spec is None:
        return []
    notes = (
        ["any: an axis that is left to the compiler"]
        if P.UNCONSTRAINED in partitions(leaf.spec)
        else []
    )
    axes = sorted(leaf.spec.unreduced)
    partial = f"not summed over {', '.join(axes)} yet: its copies are partial sums"
    return [*notes, partial] if axes else notes


def _whole(leaf: LeafLayout) -> str:
    is_whole = leaf.num_shards == 1 and leaf.replication > 1 and leaf.memory == DEVICE
    if not is_whole or (leaf.bytes_per_device or 0) < LARGE_BYTES:
        return ""
    return "large, and whole on every device: lay it over a mesh axis if it need not be"
