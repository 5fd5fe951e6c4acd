"""Rows that belong to groups of unlike size: whole groups on each device, in blocks of one shape.

A device's rows are cut into tiles that all look alike: so many groups of one width, then so many of a
smaller one. A group has as many rows of its tile as its width says, the last ones copies where it has
fewer. So a latent of each group is spread over rows, and gradients of rows are summed over groups, by
slices, broadcasts and sums: on a chip without an index, and in an order that is always the same.
"""

import hashlib
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.groups.keys import (
    checked_keys,
    checked_labels,
    checked_name,
    index_of,
    labels_there,
    shown,
)
from gspmd_mcmc.groups.lookup_index import (
    LookupIndex,
    RowsByEntry,
    is_lookup_index,
    rows_by_entry,
)
from gspmd_mcmc.groups.orders import GroupedRows, GroupLabels, GroupTable, Order
from gspmd_mcmc.groups.readers import RowReader, check_shapes, own_rows, read_laid, rows_here
from gspmd_mcmc.groups.subgroups import Subgroups, number_within
from gspmd_mcmc.groups.tiles import (
    STEP,
    LaidChunks,
    LaidRows,
    laid_order,
    lay_chunks,
    lay_rows,
)
from gspmd_mcmc.multihost.agreement import require_agreement
from gspmd_mcmc.multihost.processes import spans_processes, to_host
from gspmd_mcmc.placement.mesh import auto_mesh, cores_of_device
from gspmd_mcmc.placement.numbers import as_array, check_numbers, refuse_sparse
from gspmd_mcmc.placement.padding import Padded, is_padded, real_rows, real_shape
from gspmd_mcmc.placement.place import check_spec, place
from gspmd_mcmc.tree import PyTree, path_str

TILE_ROWS = 1 << 20  # of chips; a CPU's tiles are chosen by a plate
# A GPU sums the rows of a width by a kernel of its own. While that is launched, it could move so many
# bytes (2.5 us at 3.35 TB/s). Of a row it moves so many, and the data thrice. Fewer widths pad more.
KERNEL_BYTES, LEAST_ROW_BYTES, PASSES = 8 << 20, 32, 3
STEPS_ON_GPUS = (STEP, 1.3, 1.6)
# Above so many times the rows there are, a placement warns.
WASTE = 1.5


class Groups:
    """Groups of rows, laid over a mesh so that the rows of a group lie on one device.

    Devices have as many groups each, and nearly as many rows; if groups are few, the last devices have
    fewer. The order in which groups lie is the same on every mesh, and nobody sees it: positions and
    draws have the order of ``labels``.

    Parameters
    ----------
    keys
        The group of each row: integers or strings, shape [rows], in any order; or `Table.key`.
    mesh, spec
        As for `place`: the mesh axes that groups and rows lie over. Without a mesh, one device.
    labels
        The labels that keys may have, in the order that latents have. None: those there are, sorted.
    name
        What a group is, such as "station": the coordinate of its latents in `Draws.to_datatree`, and
        for ``draws.summary(groups="station")``. None: the name of the keys, if they have one.
    tile_rows
        About how many rows a tile has. None: 2**20; on CPUs as in a `Plate`.
    allow_empty
        Whether labels may have no rows: latents of such groups have their prior alone. That is an
        error otherwise, as it may be a slip.

    Attributes
    ----------
    name
        The name, or "".
    labels
        Labels of the groups, shape [groups]: latent ``i`` belongs to ``labels[i]``.
    sizes
        Rows of each group, shape [groups].

    Raises
    ------
    ValueError
        If a key is missing, is no integer or string, or is not among the labels; if a group has no
        rows, and ``allow_empty`` does not say that it may; if the name is that of a coordinate of
        draws.

    Examples
    --------
    A latent per patient, and visits of each::

        patients = gm.Groups(visits["patient"], mesh, P("data"))

        def visit(params, row):
            return normal(row["y"], params["effect"] + params["slope"] * row["age"])

        def patient(params, row):
            return normal(params["effect"], 0.0, params["scale"])

        target = gm.Posterior(
            log_prior,
            gm.Plate(patient, patients.place(), local="effect"),
            gm.Plate(visit, patients.place_rows({"y": y, "age": age}), local="effect"),
        )
    """

    def __init__(
        self,
        keys: Any,
        mesh: Mesh | AbstractMesh | None = None,
        spec: P | None = None,
        *,
        labels: Any = None,
        name: str | None = None,
        tile_rows: int | None = None,
        allow_empty: bool = False,
    ):
        if mesh is not None:
            mesh = auto_mesh("Groups: mesh", mesh)
        if tile_rows is not None and (not isinstance(tile_rows, int) or tile_rows < 1):
            raise ValueError(f"tile_rows: expected an integer of at least 1, got {tile_rows!r}")
        if mesh is None and spec is not None and any(spec):
            raise ValueError(f"Groups: the spec {spec} names axes of a mesh, and there is no mesh")
        self.name = checked_name(keys, name)
        keys = checked_keys("keys", keys)
        self.mesh, self.spec = mesh, P() if spec is None else spec
        self.tile_rows = tile_rows
        self.labels = labels_there(keys) if labels is None else checked_labels(labels)
        self._index = index_of(keys, self.labels)
        self.sizes = np.bincount(self._index, minlength=len(self.labels))
        if not allow_empty and not self.sizes.all():
            raise ValueError(
                f"labels: {np.sum(self.sizes == 0)} groups have no rows, the first is "
                f"{shown(self.labels[np.argmin(self.sizes)])}. Leave them out of labels, as their "
                "latents have their prior alone; or keep these, Groups(..., allow_empty=True)"
            )
        splits = [] if mesh is None else check_spec("keys", self._index.shape, mesh, self.spec)
        self._num_blocks = splits[0] if splits else 1
        # One place of pad at least, whether or not the blocks divide the groups.
        self._block_groups = len(self.labels) // self._num_blocks + 1
        self._laid = laid_order(self.sizes)
        self._order = self._make_order()
        if spans_processes(mesh):
            keys, labels = _digest(self._index), self._order.digest
            facts = {"labels": labels, "keys": keys, "spec": str(self.spec)}
            require_agreement("Groups", facts)

    def __len__(self) -> int:
        """Return how many groups there are."""
        return len(self.labels)

    def __repr__(self) -> str:
        over = "" if self.mesh is None else f" over {self.spec} on {dict(self.mesh.shape)}"
        what = f"{self.name}, " if self.name else ""
        sizes = f"{self.sizes.min()} to {self.sizes.max()}"
        return f"Groups({what}{len(self)} groups of {sizes} rows{over})"

    def place(self, table: PyTree = None) -> GroupTable:
        """Lay one row for each group where the group lies.

        Parameters
        ----------
        table
            A tree of arrays [groups, ...], in the order of ``labels``. None: ``{"rows": sizes}``.

        Returns
        -------
        GroupTable
            Data of a `Plate` whose rows are the groups, where their latents have their prior.

        Raises
        ------
        ValueError
            If a leaf has another number of rows than there are groups.
        """
        table = {"rows": self.sizes.astype(np.int32)} if table is None else table
        laid = self._lay("table", table, self._places(), len(self), "groups, one row for each")
        return self._table(laid)

    def place_from_reader(self, reader: RowReader, shapes: PyTree) -> GroupTable:
        """Lay one row for each group, read in parts, so that no process holds all of them.

        Parameters
        ----------
        reader
            ``reader(groups)`` returns the rows of those groups, numbers that ascend in the order of
            ``labels``: a tree of arrays [len(groups), ...]. It is called once for each device of this
            process.
        shapes
            A tree like it, of `jax.ShapeDtypeStruct` [groups, ...] of all groups.

        Returns
        -------
        GroupTable
            What `place` returns for the whole arrays.

        Raises
        ------
        ValueError
            If shapes are not those of all groups, or the reader returns other rows than asked for.
        """
        check_shapes(shapes, len(self), "groups, one row for each")
        table = read_laid(reader, shapes, self._places(), self._sharding())
        if spans_processes(self.mesh):
            require_agreement("place_from_reader", _facts("table", table))
        return self._table(table)

    def local_groups(self) -> np.ndarray:
        """Return which groups the devices of this process hold, ascending; see `place_local`."""
        return rows_here(self._places(), self._sharding())

    def place_local(self, table: PyTree) -> GroupTable:
        """Lay one row for each group, of which each process gives its own.

        Parameters
        ----------
        table
            A tree of arrays [groups of this process, ...]: ``table[groups.local_groups()]``.

        Returns
        -------
        GroupTable
            What `place` returns for all groups together.

        Raises
        ------
        ValueError
            If a leaf has another number of rows than the process is to give.
        """
        shapes, reader = own_rows("table", table, self.local_groups(), len(self), "local_groups")
        return self.place_from_reader(reader, shapes)

    def place_rows(self, rows: PyTree, keys: Any = None) -> GroupedRows:
        """Lay rows with their groups.

        Parameters
        ----------
        rows
            A tree of arrays [rows, ...], or their shapes; `Padded` ones count without the pad. Of a
            `LookupIndex` the order is found here.
        keys
            The group of each row. None: the keys that the groups were made of. Another table's may
            leave groups out.

        Returns
        -------
        GroupedRows
            Data of a `Plate` whose latents of groups are ``local``: its log likelihood sees, for each
            row, the latent of the row's own group.

        Raises
        ------
        ValueError
            If leaves and keys differ in length, or a key is not among the labels.
        """
        laid, index = self._laid_rows(keys, rows)
        self._check_laid(laid, index)
        placed = self._lay("rows", rows, laid.row, len(index), "keys, one for each row")
        nodes = jax.tree.leaves(rows, is_leaf=is_lookup_index)
        by_entry = tuple(self._by_entry(x, laid) for x in nodes if is_lookup_index(x))
        return self._grouped(placed, laid, index, by_entry)

    def subgroups(self, keys: Any) -> Subgroups:
        """Find the groups within each group, such as the classes of schools.

        A latent for each subgroup is then one of groups, of shape [groups, most subgroups of one]: it
        lies with its group, and nothing is sent for it.

        Parameters
        ----------
        keys
            The subgroup of each row that the groups were made of: integers or strings, shape [rows],
            or `Table.key`. A key that two groups have names two subgroups: class "a" of each school.

        Returns
        -------
        Subgroups
            Which subgroup each row belongs to, for `lookup_within`, and which each group has.

        Raises
        ------
        ValueError
            If a key is missing or is no integer or string, or there is not one for each row.

        Examples
        --------
        Pupils in classes in schools::

            schools = gm.Groups(pupils["school"], mesh, P("data"))
            classes = schools.subgroups(pupils["class"])

            def of_school(params, row):
                mean = params["school"][:, None]
                of_classes = normal(params["class"], mean, 0.5)
                alone = normal(params["class"], 0.0, 1.0)  # proper, where there is no class
                terms = jnp.where(row["is_class"], of_classes, alone)
                return normal(params["school"], 0.0, 1.0) + jnp.sum(terms, axis=1)

            def of_pupil(params, row):
                return normal(row["score"], gm.lookup_within(params["class"], row["class"]), 1.0)

            local = ("school", "class")
            table, rows = {"is_class": classes.is_there}, {"score": score, "class": classes.number}
            target = gm.Posterior(
                None,
                gm.Plate(of_school, schools.place(table), local=local),
                gm.Plate(of_pupil, schools.place_rows(rows), local="class"),
            )
        """
        keys = checked_keys("keys", keys)
        labels = labels_there(keys)
        inner = index_of(keys, labels)
        num = len(self._index)
        if len(inner) != num:
            raise ValueError(f"keys: expected one for each of {num} rows, got {len(inner)}")
        return number_within(self._index, len(self), inner, labels)

    def local_rows(self, keys: Any = None) -> np.ndarray:
        """Return which rows the devices of this process hold, ascending; see `place_local_rows`."""
        return rows_here(self._laid_rows(keys)[0].row, self._sharding())

    def place_local_rows(self, rows: PyTree, keys: Any = None) -> GroupedRows:
        """Lay rows of which each process gives its own, ``rows[groups.local_rows()]``.

        Every process has the keys of all rows, and the other columns of its own alone.

        Parameters
        ----------
        rows
            A tree of arrays [rows of this process, ...].
        keys
            As for `place_rows`; the keys of all rows.

        Returns
        -------
        GroupedRows
            What `place_rows` returns for all rows together.

        Raises
        ------
        ValueError
            If a leaf has another number of rows than the process is to give.
        """
        laid, index = self._laid_rows(keys, rows)
        self._check_laid(laid, index)
        here = rows_here(laid.row, self._sharding())
        shapes, reader = own_rows("rows", rows, here, len(index), "local_rows")
        return self._grouped(read_laid(reader, shapes, laid.row, self._sharding()), laid, index)

    def place_rows_from_reader(
        self, reader: RowReader, shapes: PyTree, keys: Any = None
    ) -> GroupedRows:
        """Lay rows that are read in parts, so that no process holds all of them.

        Parameters
        ----------
        reader
            ``reader(rows)`` returns the rows of those numbers, which ascend: a tree of arrays
            [len(rows), ...]. It is called once for each device of this process.
        shapes
            A tree like it, of `jax.ShapeDtypeStruct` [rows, ...] of all rows.
        keys
            As for `place_rows`; the keys of all rows.

        Returns
        -------
        GroupedRows
            What `place_rows` returns for the whole arrays.

        Raises
        ------
        ValueError
            If shapes and keys differ in length, or the reader returns other rows than asked for.

        Examples
        --------
        ::

            images = np.memmap("images.u8", np.uint8, "r", shape=(60_000, 784))
            shapes = {"x": jax.ShapeDtypeStruct(images.shape, np.uint8)}
            groups.place_rows_from_reader(lambda rows: {"x": images[rows]}, shapes)
        """
        laid, index = self._laid_rows(keys, shapes)
        check_shapes(shapes, len(index), "keys, one for each row")
        self._check_laid(laid, index)
        return self._grouped(read_laid(reader, shapes, laid.row, self._sharding()), laid, index)

    def _table(self, rows: PyTree) -> GroupTable:
        """Return laid rows, one for each group and pad, as a table."""
        digest = self._order.digest
        held = jax.tree.map(lambda x: Padded(x, len(self), digest), rows)
        return GroupTable(held, self._order, len(self))

    def _laid_rows(self, keys: Any, rows: PyTree = ()) -> tuple[LaidRows | LaidChunks, np.ndarray]:
        """Return where rows lie, and the group of each."""
        index = self._index
        if keys is not None:
            index = index_of(checked_keys("keys", keys), self.labels)
        places, shape = self._place_of_group()[index], (self._num_blocks, self._block_groups)
        if self._platform() == "cpu":
            return lay_chunks(places, *shape), index
        steps, kernel_rows = (STEP,), 0.0
        if self._platform() == "gpu":
            steps = STEPS_ON_GPUS
            kernel_rows = KERNEL_BYTES / (LEAST_ROW_BYTES + PASSES * _row_bytes(rows))
        return lay_rows(places, *shape, self.tile_rows or TILE_ROWS, steps, kernel_rows), index

    def _sharding(self) -> NamedSharding | None:
        """Return where laid rows that are read go; None without a mesh."""
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                "Groups: a mesh of devices that are not there reads no rows; give their shapes to "
                "place or place_rows"
            )
        return None if self.mesh is None else NamedSharding(self.mesh, P(*self.spec[:1]))

    def _grouped(
        self, rows: PyTree, laid: LaidRows | LaidChunks, index: np.ndarray, by_entry: tuple = ()
    ) -> GroupedRows:
        if spans_processes(self.mesh):
            by_entries = {"rows by entry": str([x and x.tiles for x in by_entry])}
            require_agreement("place_rows", _facts("rows", rows) | by_entries)
        return GroupedRows(
            rows=rows,
            is_real=self._place(laid.is_real),
            slot_group=self._place(laid.slot_group),
            group_slot=self._place(laid.group_slot) if isinstance(laid, LaidRows) else None,
            place_of_row=self._place(laid.place_of_row),
            order=self._order,
            by_entry=by_entry,
            tiles=laid.tiles,
            num_rows=len(index),
            num_groups=len(self),
            tile_rows=self.tile_rows,
        )

    def _check_laid(self, laid: LaidRows | LaidChunks, index: np.ndarray) -> None:
        """Warn of rows that take much room; make sure that processes lay and cut them alike."""
        self._warn_of_waste(laid, index)
        if spans_processes(self.mesh):
            tiles = {"tiles": str(laid.tiles), "tile_rows": str(self.tile_rows)}
            cores = {"cores of a device": str(cores_of_device(self.mesh))}  # tiles of CPUs follow them
            require_agreement("place_rows", {"keys": _digest(index)} | tiles | cores)

    def _by_entry(self, column: LookupIndex, laid: LaidRows | LaidChunks) -> RowsByEntry | None:
        """Find a column's rows by entry; None on a CPU, which adds them up as they come."""
        if isinstance(laid, LaidChunks) or isinstance(column.index, jax.ShapeDtypeStruct):
            return None
        index = _take(column.index, laid.row)
        found = rows_by_entry(index, laid.is_real, column.entries, laid.tiles, self._num_blocks)
        return jax.tree.map(self._place, found)

    def _platform(self) -> str:
        """Return "cpu", "gpu" or "tpu"; of devices that are not there "abstract", unless they say."""
        if isinstance(self.mesh, AbstractMesh):
            return getattr(self.mesh.abstract_device, "platform", "abstract")
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        return device.platform

    def _lay(self, what: str, tree: PyTree, taken: np.ndarray, num: int, of_what: str) -> PyTree:
        """Check the rows of a tree, and lay those that are taken."""
        refuse_sparse(f"{what} ", tree)

        def lay(path: Any, leaf: Any) -> Any:
            name = f"{what} {path_str(path)}"
            shape = real_shape(leaf)
            if shape[:1] != (num,):
                raise ValueError(
                    f"{name}: expected shape [{num}, ...], as there are {num} {of_what}, got {shape}"
                )
            leaf = _take(leaf, taken)
            check_numbers(name, leaf)
            return self._place(leaf)

        return jax.tree_util.tree_map_with_path(lay, tree, is_leaf=is_padded)

    def _place(self, array: Any) -> Any:
        if self.mesh is None:
            return as_array("rows", array)
        return place(array, self.mesh, P(*self.spec[:1]))

    def _whole(self, array: np.ndarray) -> Any:
        return jnp.asarray(array) if self.mesh is None else place(array, self.mesh, P())

    def _places(self) -> np.ndarray:
        """Return the group of each place, of the pad the last one's; shape [padded groups]."""
        num_pad = self._num_blocks * self._block_groups - len(self)
        return np.concatenate([self._laid, np.repeat(self._laid[-1:], num_pad)])

    def _place_of_group(self) -> np.ndarray:
        places = np.empty(len(self), np.int64)
        places[self._laid] = np.arange(len(self))
        return places

    def _make_order(self) -> Order:
        places = self._place_of_group()
        num_pad = self._num_blocks * self._block_groups - len(self)
        to_seen = np.concatenate([places, np.repeat(places[-1:], num_pad)])
        facts = hashlib.sha256(str(self.labels.dtype).encode())
        for array in (self.labels, self._laid):
            facts.update(np.ascontiguousarray(array).tobytes())
        whole = (self._whole(x.astype(np.int32)) for x in (self._places(), to_seen))
        return Order(
            *whole, groups=GroupLabels(self.name, self.labels, self.sizes, facts.hexdigest()[:16])
        )

    def _warn_of_waste(self, laid: LaidRows | LaidChunks, index: np.ndarray) -> None:
        if len(laid.row) <= WASTE * len(index) + self._num_blocks:
            return
        sizes = np.bincount(index, minlength=len(self))
        largest, share = int(np.argmax(sizes)), -(-len(index) // self._num_blocks)
        warnings.warn(
            f"Groups: {len(index)} rows take the room of {len(laid.row)}: group "
            f"{shown(self.labels[largest])} has {sizes[largest]} rows, and an even share of "
            f"{self._num_blocks} devices is {share}. Devices wait for the one with the largest groups; "
            "fewer devices on this axis, or more on another (chains), waste less",
            SamplingWarning,
            stacklevel=4,
        )


def _row_bytes(rows: PyTree) -> int:
    def of_leaf(x: Any) -> int:
        return math.prod(np.shape(x)[1:]) * getattr(x, "dtype", np.dtype(float)).itemsize

    return sum(map(of_leaf, jax.tree.leaves(rows)))


def _facts(what: str, tree: PyTree) -> dict[str, str]:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{what} {path_str(path)}": f"{x.dtype}{list(x.shape[1:])}" for path, x in named}


def _digest(index: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(index).tobytes()).hexdigest()[:16]


def _take(leaf: Any, index: np.ndarray) -> Any:
    """Take rows of an array on the host, or say what shape that would have."""
    leaf = real_rows(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(index), *leaf.shape[1:]), leaf.dtype)
    return np.asanyarray(to_host(leaf) if isinstance(leaf, jax.Array) else leaf)[index]
