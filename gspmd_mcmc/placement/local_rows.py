"""Rows that no process holds all of: each process gives its own, or reads what its devices need."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.multihost.agreement import counts_of_all, require_agreement
from gspmd_mcmc.multihost.processes import spans_processes
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.placement.mesh import auto_mesh
from gspmd_mcmc.placement.numbers import check_leaves, check_numbers, converted, refuse_sparse
from gspmd_mcmc.placement.padding import Padded, padded_rows
from gspmd_mcmc.placement.place import check_spec
from gspmd_mcmc.tree import PyTree, path_str

Reader = Callable[[int, int], Any]


def local_rows(num_rows: int, mesh: Mesh, spec: P) -> slice:
    """Return which of all rows the devices of this process hold, in `place`'s layout.

    A process reads only these, and passes them to `place_local`.

    Parameters
    ----------
    num_rows
        Rows of all processes together.
    mesh, spec
        As for `place`.

    Raises
    ------
    ValueError
        If the rows are not one slice: the devices of a process do not lie side by side on the mesh.
    """
    mesh = auto_mesh("local_rows: mesh", mesh)
    return _rows_of_process(num_rows, mesh, spec, jax.process_index())


@on_any_mesh
def place_local(tree: PyTree, mesh: Mesh, spec: P) -> PyTree:
    """Lay rows over a mesh; each process gives its own, `local_rows` of all rows.

    Nothing is sent: the rows of a process stay on its devices.

    Parameters
    ----------
    tree
        NumPy arrays [rows of this process, ...]. All have the same rows.
    mesh, spec
        As for `place`; one spec for all leaves, which lays rows over mesh axes.

    Returns
    -------
    PyTree
        What `place` returns for all rows together, those of the first process first. The last
        processes may give fewer rows: their devices hold pad, which copies the last row.

    Raises
    ------
    ValueError
        If a process gives more or fewer rows than its devices are to hold; the message says what each
        gave.
    ProcessesDisagree
        If leaves, shapes of rows or dtypes differ between processes.
    """
    refuse_sparse("leaf ", tree)
    check_leaves("leaf ", tree)
    auto_mesh("place_local: mesh", mesh)
    named = {path_str(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(tree)}
    counts = {name: x.shape[0] if x.ndim else 0 for name, x in named.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"place_local: expected leaves with the same rows, got {counts}")
    rows = _check_counts(_agreed_counts(named, mesh, spec), mesh, spec)
    start = rows.get(jax.process_index(), slice(0, 0)).start
    num_rows = max(r.stop for r in rows.values())
    leaves = [_place_rows(name, x, start, num_rows, mesh, spec) for name, x in named.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


@on_any_mesh
def place_from_reader(reader: Reader, shape: tuple[int, ...], dtype: Any, mesh: Mesh, spec: P) -> Any:
    """Lay an array over a mesh that is read in parts, so that no process holds all of it.

    Parameters
    ----------
    reader
        ``reader(start, stop)`` returns those rows. It is called once for the rows of each device of
        this process, and for the last row where pad copies it.
    shape, dtype
        Of the whole array.
    mesh, spec
        As for `place`.

    Returns
    -------
    jax.Array or Padded
        What `place` returns for the whole array.

    Raises
    ------
    ValueError
        If the reader returns other rows than asked for.
    ProcessesDisagree
        If shape, dtype or spec differ between processes.

    Examples
    --------
    A memory map, a Zarr array and row groups of a Parquet file::

        images = np.memmap("images.u8", np.uint8, "r", shape=(60_000, 784))
        place_from_reader(lambda a, b: images[a:b], images.shape, np.uint8, mesh, P("data"))

        images = zarr.open_array("images.zarr", mode="r")
        place_from_reader(lambda a, b: images[a:b], images.shape, images.dtype, mesh, P("data"))

        file = pyarrow.parquet.ParquetFile("table.parquet")
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = np.cumsum(groups)

        def read(start, stop):
            first, last = np.searchsorted(ends, [start, stop - 1], side="right")
            table = file.read_row_groups(list(range(first, last + 1)), columns=["x", "y"])
            skipped = start - (ends[first] - groups[first])
            rows = table.slice(skipped, stop - start)
            return np.column_stack([rows["x"], rows["y"]]).astype(np.float32)

        place_from_reader(read, (int(ends[-1]), 2), np.float32, mesh, P("data"))
    """
    auto_mesh("place_from_reader: mesh", mesh)
    shape, kind = tuple(int(n) for n in shape), jax.dtypes.canonicalize_dtype(dtype)
    if spans_processes(mesh):
        facts = {"shape": str(shape), "dtype": str(kind), "spec": str(spec), "mesh": str(mesh.shape)}
        require_agreement("place_from_reader", facts)
    if not shape:
        raise ValueError("place_from_reader: shape: expected rows, (num_rows, ...), got ()")
    splits = check_spec("(read)", shape, mesh, spec)
    return _place_by_reading("(read)", reader, shape, kind, NamedSharding(mesh, spec), splits)


def _place_by_reading(
    name: str, reader: Reader, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, splits: list
) -> jax.Array | Padded:
    """Make an array of what a reader returns for each shard, its pad copies of the last row."""
    rows = padded_rows(shape[0], splits[0]) if splits else shape[0]
    padded = (rows, *shape[1:])
    cached = _Reads(name, reader, shape, dtype, padded, sharding)
    values = jax.make_array_from_callback(padded, sharding, cached.shard)
    return values if rows == shape[0] else Padded(values, shape[0])


class _Reads:
    """Reads each range of rows once, and keeps it as long as devices of this process need it."""

    def __init__(self, name: str, reader: Reader, shape: tuple, dtype: Any, padded: tuple, sharding):
        self.name, self.reader, self.dtype = name, reader, dtype
        self.shape, self.padded = shape, padded
        indices = sharding.addressable_devices_indices_map(padded).values()
        self.uses = Counter(self._range(index) for index in indices)
        self.kept: dict[tuple[int, int], np.ndarray] = {}

    def shard(self, index: Any) -> np.ndarray:
        """Return one device's part."""
        rows = self._range(index)
        if rows not in self.kept:
            self.kept[rows] = self._read_padded(*rows)
        found = self.kept[rows]
        self.uses[rows] -= 1
        if self.uses[rows] <= 0:
            del self.kept[rows]
        return np.ascontiguousarray(found[(slice(None), *index[1:])])

    def _range(self, index: tuple) -> tuple[int, int]:
        start, stop, _ = index[0].indices(self.padded[0])
        return start, stop

    def _read_padded(self, start: int, stop: int) -> np.ndarray:
        last = min(stop, self.shape[0])
        # A shard of pad alone still has one real row to copy.
        first = min(start, last - 1)
        real = self._read(first, last)
        if first < start:
            return np.repeat(real, stop - start, axis=0)
        return (
            np.concatenate([real, np.repeat(real[-1:], stop - last, axis=0)]) if last < stop else real
        )

    def _read(self, start: int, stop: int) -> np.ndarray:
        found = np.asanyarray(self.reader(start, stop))
        expected = (stop - start, *self.shape[1:])
        if found.shape != expected:
            raise ValueError(
                f"leaf {self.name}: the reader was asked for rows {start} to {stop}: expected shape "
                f"{expected}, got {found.shape}"
            )
        check_numbers(f"leaf {self.name}", found, share=(stop - start) / self.shape[0])
        return converted(f"leaf {self.name}", found, self.dtype)


def _agreed_counts(named: dict[str, np.ndarray], mesh: Mesh, spec: P) -> list[int]:
    """Return how many rows each process gives; raise where they give other kinds of rows."""
    count = next(iter(named.values())).shape[0]
    if not spans_processes(mesh):
        return [count] * jax.process_count()
    facts = {f"leaf {name}": f"{x.dtype} rows of shape {x.shape[1:]}" for name, x in named.items()}
    require_agreement("place_local", facts | {"spec": str(spec), "mesh": str(dict(mesh.shape))})
    return counts_of_all(count)


def _check_counts(given: list[int], mesh: Mesh, spec: P) -> dict[int, slice]:
    """Return the rows of each process on the mesh, if it gives as many as its devices are to hold."""
    processes = sorted({d.process_index for d in mesh.devices.flat})
    # Processes that hold the same blocks give the same rows.
    num_rows = sum({_blocks_of_process(mesh, spec, p): given[p] for p in processes}.values())
    rows = {p: _rows_of_process(max(num_rows, 1), mesh, spec, p) for p in processes}
    if num_rows and all(r.stop - r.start == given[p] > 0 for p, r in rows.items()):
        return rows
    shown = ", ".join(
        f"process {p} gave {given[p]} (expected {r.stop - r.start})" for p, r in rows.items()
    )
    raise ValueError(
        f"place_local: {num_rows} rows under {spec} on mesh {dict(mesh.shape)}: {shown}. Each process "
        "gives the rows that its devices hold, at least one: rows[local_rows(num_rows, mesh, spec)]"
    )


def _place_rows(
    name: str, array: np.ndarray, start: int, num_rows: int, mesh: Mesh, spec: P
) -> jax.Array | Padded:
    shape = (num_rows, *array.shape[1:])
    splits = check_spec(name, shape, mesh, spec)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    return _place_by_reading(
        name,
        lambda a, b: array[a - start : b - start],
        shape,
        dtype,
        NamedSharding(mesh, spec),
        splits,
    )


def _rows_of_process(num_rows: int, mesh: Mesh, spec: P, process: int) -> slice:
    block = -(-num_rows // _num_blocks(mesh, spec))
    start, stop = _blocks_of_process(mesh, spec, process)
    return slice(min(start * block, num_rows), min(stop * block, num_rows))


def _num_blocks(mesh: Mesh, spec: P) -> int:
    entry = spec[0] if len(spec) else None
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[n] for n in names)


def _blocks_of_process(mesh: Mesh, spec: P, process: int) -> tuple[int, int]:
    """Return the first block of rows that a process' devices hold, and the one after their last."""
    entry = spec[0] if len(spec) else None
    num_blocks = _num_blocks(mesh, spec)
    where = NamedSharding(mesh, P(entry)).devices_indices_map((num_blocks,))
    found = {i[0].indices(num_blocks)[:2] for d, i in where.items() if d.process_index == process}
    if not found:
        return 0, 0
    start, stop = min(a for a, _ in found), max(b for _, b in found)
    if sum(b - a for a, b in found) != stop - start:
        raise ValueError(
            f"process {process} holds rows that do not lie side by side under {spec} on mesh "
            f"{dict(mesh.shape)}; make_mesh() lays the devices of a process side by side"
        )
    return start, stop
