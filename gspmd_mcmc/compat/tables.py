"""Columns of tables that other libraries hold, as NumPy arrays: numbers, and labels as indices.

Frames come in by Arrow's PyCapsule interface or the dataframe interchange protocol, files as Parquet.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.tree_util import DictKey, register_pytree_with_keys

from gspmd_mcmc.extras import need
from gspmd_mcmc.groups.keys import Key, positions

# What pandas calls an index without a name.
NAMELESS_INDEX = "__index_level_"


class Table(Mapping[str, np.ndarray]):
    """Columns by name, NumPy arrays of shape [rows]; see `read_table`.

    It goes into `place`, `Groups.place_rows` and `Plate` as a dict of its columns does. What comes out
    is a table of what lies on the devices, without labels.

    Attributes
    ----------
    labels
        Of each column that held labels, what its indices stand for, shape [labels].
    """

    def __init__(self, columns: dict[str, np.ndarray], labels: dict[str, np.ndarray]):
        self._columns, self.labels = columns, labels

    @property
    def num_rows(self) -> int:
        """How many rows there are; ``len`` is the number of columns."""
        return len(next(iter(self._columns.values())))

    def key(self, name: str) -> Key:
        """Return a column of labels or integers as the key of `Groups`, which keep its name.

        Raises
        ------
        ValueError
            If the column has floats.
        """
        column = self[name]
        if name in self.labels:
            return Key(name, column, self.labels[name])
        if column.dtype.kind not in "iub":
            raise ValueError(
                f"column {name!r}: expected labels or integers as the key of groups, got {column.dtype}"
            )
        labels, index = np.unique(column, return_inverse=True)
        return Key(name, index.astype(np.int32), labels)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._columns:
            raise KeyError(f"{name!r}: the table has {list(self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        shown = [f"{name} {self._kind(name)}" for name in self]
        return f"Table({self.num_rows} rows: {', '.join(shown)})"

    def _kind(self, name: str) -> str:
        return f"of {len(self.labels[name])} labels" if name in self.labels else str(self[name].dtype)


def _flatten(table: Table) -> tuple[list[tuple[Any, np.ndarray]], tuple[str, ...]]:
    return [(DictKey(name), column) for name, column in table.items()], tuple(table)


def _unflatten(names: tuple[str, ...], columns: Iterable[Any]) -> Table:
    return Table(dict(zip(names, columns, strict=True)), {})


# What programs are given are columns: labels stay on the host, and other labels compile nothing anew.
register_pytree_with_keys(Table, _flatten, _unflatten)


def read_table(
    source: Any,
    columns: Sequence[str] | str | None = None,
    *,
    labels: Mapping[str, Any] | None = None,
) -> Table:
    """Read columns of a frame, or of a Parquet file, as NumPy arrays.

    Numbers and booleans keep their dtype (`place` makes them what JAX holds, and checks that nothing is
    lost); decimals become float64. Strings and categories become indices, int32, of their labels. The
    labels of an ordered category (of pandas or Arrow, Polars' ``Enum``) are all of its categories in
    their order, those of other columns the ones that are there, sorted. Needs the extra ``tables``.

    Parameters
    ----------
    source
        A path of a Parquet file, or of a folder of them; or a frame of pandas, Polars, Arrow or any
        library with Arrow's PyCapsule interface or the dataframe interchange protocol; or a dict of
        arrays.
    columns
        Names of the columns to read. None: all, but for a nameless index of pandas.
    labels
        For columns by name, the labels that they may have: ``read_table(more, labels=table.labels)``
        gives each label the index that it has in another table. Names of other columns do not matter.

    Returns
    -------
    Table
        The columns by name; ``table.labels[name]`` says what indices stand for, and
        ``Groups(table.key(name), mesh, spec)`` lays rows with their groups.

    Raises
    ------
    ValueError
        If there are no rows; if a column is not there, or twice; if a value is missing or NaN; if a
        column holds dates or anything else that is neither number nor label; if a label is not among
        those given.
    TypeError
        If the source is no table.
    ImportError
        Without the extra ``tables``.

    Examples
    --------
    >>> table = gm.read_table("visits.parquet", columns=["patient", "age", "y"])  # doctest: +SKIP
    >>> patients = gm.Groups(table.key("patient"), mesh, P("data"))  # doctest: +SKIP
    """
    table = _arrow_table(source, [columns] if isinstance(columns, str) else columns)
    names = table.column_names
    if not names or not table.num_rows:
        raise ValueError(f"source: expected a table with rows, got {table.num_rows} rows of {names}")
    given = {} if labels is None else labels
    found: dict[str, np.ndarray] = {}
    found_labels: dict[str, np.ndarray] = {}
    for name in names:
        values, its_labels = _read_column(name, table.column(name))
        if name in given:
            wanted = _given_labels(name, given[name])
            values, its_labels = _relabeled(name, values, its_labels, wanted), wanted
        found[name] = values
        if its_labels is not None:
            found_labels[name] = its_labels
    return Table(found, found_labels)


def _arrow_table(source: Any, columns: Sequence[str] | None) -> Any:
    """Return an Arrow table of the columns that are asked for."""
    arrow = need("pyarrow", "tables")
    is_file = isinstance(source, str | os.PathLike)
    source = os.path.expanduser(source) if is_file else source
    try:
        table = need("pyarrow.parquet", "tables").ParquetDataset(source) if is_file else _taken(source)
    except arrow.ArrowException as error:
        cure = (
            "a path is one of a Parquet file. Read other files by their own library, and give its frame"
            if is_file
            else "give the columns that you need alone, frame[names], each of one type"
        )
        raise ValueError(f"source: Arrow cannot read it, {error}; {cure}") from error
    there = table.schema.names
    if columns is None:
        columns = [name for name in there if not name.startswith(NAMELESS_INDEX)]
    for name in columns:
        if there.count(name) != 1:
            raise ValueError(
                f"columns: expected names of one column each, and {name!r} is there "
                f"{there.count(name)} times; the source has {there}"
            )
    return table.read(columns=list(columns)) if is_file else table.select(list(columns))


def _taken(source: Any) -> Any:
    """Return an Arrow table of what offers one."""
    arrow = need("pyarrow", "tables")
    try:
        return arrow.table(source)
    except TypeError as error:
        if not hasattr(source, "__dataframe__"):
            raise TypeError(
                "source: expected a path, or a frame with Arrow's PyCapsule interface or the dataframe "
                f"interchange protocol, got {type(source).__name__}"
            ) from error
        return need("pyarrow.interchange", "tables").from_dataframe(source)


def _read_column(name: str, column: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the values of an Arrow column, and its labels if they are indices of them."""
    kinds, kind = need("pyarrow", "tables").types, column.type
    if kinds.is_dictionary(kind) or _is_string(kind):
        return _read_labels(name, column)
    if kinds.is_decimal(kind):
        column = column.cast("float64")
    elif not (
        kinds.is_null(kind)
        or kinds.is_boolean(kind)
        or kinds.is_integer(kind)
        or kinds.is_floating(kind)
    ):
        raise _wrong_kind(name, kind)
    if column.null_count:
        raise _missing(name, column.is_null().to_numpy())
    values = column.to_numpy()
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise _missing(name, np.isnan(values))
    return values, None


def _read_labels(name: str, column: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and labels of a column of strings or categories."""
    if _is_string(column.type):
        column = column.cast("large_string").dictionary_encode()
    is_ordered = column.type.ordered
    column = column.unify_dictionaries().combine_chunks()
    categories = column.dictionary
    if column.null_count:
        raise _missing(name, column.is_null().to_numpy(zero_copy_only=False))
    if categories.null_count:
        raise ValueError(f"column {name!r}: one of its categories is missing; give the others alone")
    values, index = _labels_of(name, categories), column.indices.to_numpy()
    used = np.unique(index)
    labels = values if is_ordered else np.unique(values[used])
    return positions(f"column {name!r}", values, labels)[index].astype(np.int32), labels


def _labels_of(name: str, categories: Any) -> np.ndarray:
    """Return the categories of an Arrow dictionary as an array of strings or integers."""
    kinds, kind = need("pyarrow", "tables").types, categories.type
    if _is_string(kind):
        return np.array(categories.to_pylist(), dtype=str)
    if kinds.is_integer(kind) or kinds.is_boolean(kind):
        return categories.to_numpy(zero_copy_only=False)
    raise _wrong_kind(name, f"labels of {kind}")


def _is_string(kind: Any) -> bool:
    kinds = need("pyarrow", "tables").types
    return kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)


def _given_labels(name: str, labels: Any) -> np.ndarray:
    wanted = np.asarray(labels)
    if wanted.ndim != 1 or not wanted.size or wanted.dtype.kind not in "iubU":
        raise ValueError(
            f"labels: column {name!r}: expected integers or strings of shape [labels], got "
            f"{wanted.dtype}{list(wanted.shape)}"
        )
    return wanted


def _relabeled(
    name: str, values: np.ndarray, labels: np.ndarray | None, wanted: np.ndarray
) -> np.ndarray:
    """Return the indices of a column's values among other labels."""
    if labels is None and values.dtype.kind not in "iub":
        raise ValueError(f"labels: column {name!r} has {values.dtype}; expected labels or integers")
    what = f"labels of column {name!r}"
    if labels is None:
        index = positions(what, values, wanted)
    else:
        index = positions(what, labels, wanted)[values]
    wrong = np.flatnonzero(index < 0)
    if wrong.size:
        first = values[wrong[0]] if labels is None else labels[values[wrong[0]]]
        raise ValueError(
            f"column {name!r}: {wrong.size} rows have a label that is not among the {len(wanted)} "
            f"given, the first is row {wrong[0]} (counted from 0) with {first.item()!r}. Leave these "
            "rows out, or give a label to each"
        )
    return index.astype(np.int32)


def _missing(name: str, is_missing: np.ndarray) -> ValueError:
    rows = np.flatnonzero(is_missing)
    return ValueError(
        f"column {name!r}: {len(rows)} rows have no value, the first is row {rows[0]} (counted from "
        "0). Leave these rows out or fill them before; a column that the model does not read is left "
        "out by columns="
    )


def _wrong_kind(name: str, kind: Any) -> ValueError:
    kinds = need("pyarrow", "tables").types
    cure = "leave it out by columns="
    if not isinstance(kind, str) and kinds.is_temporal(kind):
        cure = (
            f"make numbers of it before, such as days since the first, or a month as a label; or {cure}"
        )
    return ValueError(
        f"column {name!r}: expected numbers, booleans, strings or categories, got {kind}; {cure}"
    )
