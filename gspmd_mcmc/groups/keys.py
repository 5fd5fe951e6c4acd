"""Keys of rows: the groups that they belong to, and which of the labels each key is."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.multihost.processes import to_host

# Coordinates of all draws.
TAKEN_NAMES = ("chain", "draw")


@dataclass(frozen=True, eq=False)
class Key:
    """A column that says which group each row belongs to; see `Table.key`.

    Attributes
    ----------
    name
        What groups are called: the column's name.
    index
        The number of each row's label, shape [rows].
    labels
        Integers or strings, shape [labels]; some may have no rows.
    """

    name: str
    index: np.ndarray
    labels: np.ndarray


def checked_name(keys: Any, name: str | None) -> str:
    """Return what groups are called: the name that is given, or else the keys' own."""
    if name is None:
        own = getattr(keys, "name", None)
        name = own if isinstance(own, str) else ""
    if not isinstance(name, str) or name in TAKEN_NAMES:
        raise ValueError(f"name: expected a name other than those of chain and draw, got {name!r}")
    return name


def labels_there(keys: np.ndarray | Key) -> np.ndarray:
    """Return the labels that have rows: sorted, or in the order of the key's labels."""
    return keys.labels[np.unique(keys.index)] if isinstance(keys, Key) else np.unique(keys)


def checked_keys(name: str, keys: Any) -> np.ndarray | Key:
    """Return keys as an array of integers or strings; raise where one is missing or something else."""
    if isinstance(keys, Key):  # `read_table` has looked
        return keys
    if isinstance(keys, np.ma.MaskedArray) and np.ma.count_masked(keys):
        raise _missing(name, np.flatnonzero(np.ma.getmaskarray(keys)))
    keys = to_host(keys) if isinstance(keys, jax.Array) else keys
    # NumPy would turn ["a", nan] into the strings "a" and "nan".
    array = np.asarray(keys, object if isinstance(keys, list | tuple) else None)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name}: expected one key for each row, shape [rows], got {array.shape}")
    if array.dtype.kind == "O":
        is_missing = np.array([x is None or x is np.ma.masked or not _is_itself(x) for x in array])
        if is_missing.any():
            raise _missing(name, np.flatnonzero(is_missing))
        is_text = {isinstance(x, str | bytes) for x in array}
        if len(is_text) > 1:
            raise ValueError(f"{name}: expected integers or strings, got both")
        array = np.array(array.tolist())
    if array.dtype.kind == "f":
        if np.isnan(array).any():
            raise _missing(name, np.flatnonzero(np.isnan(array)))
        raise ValueError(
            f"{name}: expected integers or strings, got {array.dtype}. Numbers that stand for groups "
            "are integers: keys.astype(int)"
        )
    if array.dtype.kind not in "iuUSb":
        raise ValueError(f"{name}: expected integers or strings, got {array.dtype}")
    return array


def shown(key: Any) -> str:
    """Show a key as the user wrote it: 3 and 'a', not NumPy's np.int64(3)."""
    return repr(key.item())


def _is_itself(x: Any) -> bool:
    """Tell what is there from NaN and NaT, which differ from themselves, and pandas' NA, which may."""
    try:
        return bool(x == x)
    except TypeError:
        return False


def _missing(name: str, rows: np.ndarray) -> ValueError:
    return ValueError(
        f"{name}: {len(rows)} rows have no key, the first is row {rows[0]}. Leave these rows out, or "
        "give them a group of their own"
    )


def checked_labels(labels: Any) -> np.ndarray:
    """Return labels as an array of integers or strings; raise where one is there twice."""
    labels = checked_keys("labels", labels)
    if isinstance(labels, Key):
        raise ValueError("labels: expected integers or strings, got a key; its labels are key.labels")
    values, counts = np.unique(labels, return_counts=True)
    if counts.max() > 1:
        raise ValueError(f"labels: {shown(values[np.argmax(counts)])} is there twice")
    return labels


def index_of(keys: np.ndarray | Key, labels: np.ndarray) -> np.ndarray:
    """Return the number of each key among the labels; raise where it is not one of them."""
    if isinstance(keys, Key):
        index = positions("keys", keys.labels, labels)[keys.index]
    else:
        index = positions("keys", keys, labels)
    wrong = np.flatnonzero(index < 0)
    if wrong.size:
        first = keys.labels[keys.index[wrong[0]]] if isinstance(keys, Key) else keys[wrong[0]]
        raise ValueError(
            f"keys: {wrong.size} rows have a key that is not among the {len(labels)} labels, the first "
            f"is row {wrong[0]} with {shown(first)}"
        )
    return index


def positions(name: str, values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return where each value is among the labels, -1 where it is not.

    Raises
    ------
    ValueError
        If values are strings and labels are not, or the other way round.
    """
    if (values.dtype.kind in "US") != (labels.dtype.kind in "US"):
        raise ValueError(
            f"{name}: expected labels of {_words(values)}, as values are, got {_words(labels)}"
        )
    by_value = np.argsort(labels, kind="stable")
    found = np.minimum(np.searchsorted(labels, values, sorter=by_value), len(labels) - 1)
    index = by_value[found]
    return np.where(labels[index] == values, index, -1)


def _words(values: np.ndarray) -> str:
    return "strings" if values.dtype.kind in "US" else str(values.dtype)
