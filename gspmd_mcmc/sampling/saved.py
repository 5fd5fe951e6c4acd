"""Draws that are on disk: read when they are asked for, and only what is asked for."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_mcmc.adaptation.stuck_chains import Move
from gspmd_mcmc.extras import need
from gspmd_mcmc.sampling import zarr_format
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.zarr_format import ARVIZ_NAMES, POSTERIOR, STATS, Document
from gspmd_mcmc.tree import PyTree


class SavedArray:
    """An array on disk: ``array[index]`` reads the part, ``np.asarray(array)`` the whole.

    Attributes
    ----------
    shape, dtype
        As of a NumPy array.
    """

    def __init__(self, folder: Path, path: str, document: Document):
        self.shape = tuple(document["shape"])
        self.dtype = np.dtype(document["data_type"])
        self._where, self._document, self._store = folder / path, document, None

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers, in memory."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if copy is False:
            raise ValueError("these draws are on disk: an array of them is always a copy")
        return np.asarray(self[...], dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a part, by an index that NumPy takes; no more is read than the chunks it touches."""
        shape = np.broadcast_to(np.zeros((), np.int8), self.shape)[index].shape  # NumPy's own errors.
        if 0 in shape:
            return np.zeros(shape, self.dtype)
        if self._store is None:
            self._store = zarr_format.open_array(self._where, self._document)
        return self._store[_from_zero(index, self.shape)].read().result()

    def __repr__(self) -> str:
        return f"SavedArray({self.dtype}{list(self.shape)}, {self._where})"


def _from_zero(index: Any, shape: tuple[int, ...]) -> tuple:
    """Write a NumPy index with an item for each axis, and all of its numbers counted from zero.

    TensorStore takes negative numbers as they are, and cuts no slice to the axis.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    missing = len(shape) - sum(item is not None and item is not Ellipsis for item in items)
    items[at : at + 1] = [slice(None)] * missing
    lengths = iter(shape)
    found = [None if item is None else _of_axis(item, next(lengths)) for item in items]
    if any(isinstance(item, np.ndarray) for item in found):
        # Beside arrays NumPy takes an integer as an array too.
        found = [np.asarray(item) if isinstance(item, np.integer) else item for item in found]
    return tuple(found)


def _of_axis(item: Any, length: int) -> Any:
    if not isinstance(item, slice):
        return np.arange(length)[item]
    reached = range(length)[item]
    end = reached[-1] + np.sign(reached.step)
    return slice(reached[0], None if end < 0 else int(end), reached.step)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SavedDraws(Draws):
    """Draws in a Zarr store: leaves of ``position`` and ``stats`` are read when they are asked for.

    ``draws.position["w"][:, -100:]`` reads the last hundred draws, ``np.asarray(...)`` all of them.

    Attributes
    ----------
    path
        The folder of the store.
    attributes
        What the run was: versions, key, mesh, kernel, counts.
    """

    path: Path
    attributes: dict[str, Any]

    def to_datatree(self):
        """Open the store as an xarray ``DataTree``, whose values are read when they are asked for.

        Needs the extra ``storage``.
        """
        need("zarr", "storage")
        return need("xarray", "storage").open_datatree(self.path, engine="zarr")

    @property
    def _max_tree_depth(self) -> int | None:
        return self.attributes.get("max_tree_depth")

    @property
    def _judges_energy(self) -> bool:
        return self.attributes["draws_momenta"]

    @property
    def _note(self) -> str:
        return self.attributes.get("note", "")


def open_draws(path: str | Path) -> SavedDraws:
    """Open the draws that `ZarrSink` has written, of a run that has ended or goes on.

    Parameters
    ----------
    path
        The folder.

    Returns
    -------
    SavedDraws
        Of the draws that were whole on disk at this moment; open again to see more. Tuples and classes
        of the position are lists and dicts, ``kernel`` and ``state`` are None.

    Raises
    ------
    ValueError
        If there is no such folder, or what it holds is no store of draws.
    ImportError
        Without the extra ``storage``, when draws are read.
    """
    folder = Path(path).absolute()
    try:
        documents, attributes = zarr_format.read_root(folder)
    except zarr_format.NotOurStore as error:
        raise ValueError(f"path: {error}") from error
    leaves = json.loads(attributes["position"])
    arrays = saved_arrays(folder, documents)
    position = _grow([(entry["path"], arrays[f"{POSTERIOR}/{entry['array']}"]) for entry in leaves])
    return SavedDraws(
        position=position,
        stats=saved_stats(arrays),
        warmup={"moves": [Move(*move) for move in json.loads(attributes.get("moves", "[]"))]},
        kernel=None,
        state=None,
        num_steps=0,
        path=folder,
        attributes=attributes,
    )


def saved_arrays(folder: Path, documents: dict[str, Document]) -> dict[str, SavedArray]:
    """Return the arrays of a store by path."""
    arrays = {path: x for path, x in documents.items() if x["node_type"] == "array"}
    return {path: SavedArray(folder, path, document) for path, document in arrays.items()}


def saved_stats(arrays: dict[str, SavedArray]) -> dict[str, SavedArray]:
    """Return the stats by the names that `Draws` has for them."""
    ours = {theirs: name for name, theirs in ARVIZ_NAMES.items()}
    names = {path: path.removeprefix(f"{STATS}/") for path in arrays if path.startswith(f"{STATS}/")}
    return {
        ours.get(name, name): arrays[path]
        for path, name in names.items()
        if name not in ("chain", "draw")
    }


def _grow(items: list[tuple[list, Any]]) -> PyTree:
    """Build a tree of dicts and lists from its leaves with their paths."""
    if not items:
        return {}
    if not items[0][0]:
        return items[0][1]
    branches: dict[Any, list] = {}
    for (first, *rest), leaf in items:
        branches.setdefault(tuple(first), []).append((rest, leaf))
    grown = {name: _grow(branch) for (_, name), branch in branches.items()}
    if all(kind == "index" for kind, _ in branches):
        return [grown.get(i) for i in range(max(grown) + 1)]
    return grown
