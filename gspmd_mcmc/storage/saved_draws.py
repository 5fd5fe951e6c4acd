"""Draws on disk, of which only what is asked for is read."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_mcmc.adaptation.stuck_chains import Move
from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.extras import need
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.storage.datatree import ARVIZ_NAMES, CONSTANT, POSTERIOR, STATS, rows_of
from gspmd_mcmc.storage.draws import Draws
from gspmd_mcmc.storage.paths import local_path
from gspmd_mcmc.tree import PyTree

ROOT = "zarr.json"
VERSION = 2
LOSSES = "losses"  # of attributes: what draws have lost in the dtypes on disk, in words

Document = dict[str, Any]


class NotOurStore(ValueError):
    """A folder holds no draws that this library wrote, or their document is damaged."""


def read_root(folder: Path) -> Document:
    """Read the document of a store: its attributes, and those of all arrays and groups."""
    try:
        root = json.loads((folder / ROOT).read_text())
    except FileNotFoundError:
        raise NotOurStore(f"{folder} holds no {ROOT}: no draws were written there") from None
    except (ValueError, OSError) as error:
        raise NotOurStore(f"{folder / ROOT} cannot be read, {error}") from error
    try:
        _, attributes = nodes_of(root), root["attributes"]
        if attributes["draws_format"] != VERSION:
            raise NotOurStore(
                f"{folder} has draws in format {attributes['draws_format']}; this version reads format "
                f"{VERSION}. Open it with xarray, or with the version that wrote it"
            )
        _ = attributes["num_draws"], attributes["position"]
    except (KeyError, TypeError) as error:
        raise NotOurStore(
            f"{folder} is a store of another program: its {ROOT} has no {error}; xarray may open it"
        ) from error
    return root


def nodes_of(root: Document) -> dict[str, Document]:
    """Return the documents of the arrays and groups of a store, by path."""
    return root["consolidated_metadata"]["metadata"]


def open_array(where: Path, document: Document, context: Any = None) -> Any:
    """Open an array in TensorStore by the document given, whatever length its own has."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{where}/"},
        "metadata": {key: document[key] for key in document if key not in ("zarr_format", "node_type")},
    }
    tensorstore = need("tensorstore", "storage")
    return tensorstore.open(spec, open=True, assume_metadata=True, context=context).result()


class SavedArray:
    """An array on disk: ``array[index]`` reads the part, ``np.asarray(array)`` the whole."""

    def __init__(self, where: Path, document: Document):
        self.shape = tuple(document["shape"])
        self.dtype = np.dtype(document["data_type"])
        self.dims = tuple(document["dimension_names"])
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self._where, self._document, self._store = where, document, None

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if copy is False:
            raise ValueError("these draws are on disk: an array of them is always a copy")
        return np.asarray(self[...], dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read a part, by any index that NumPy takes; only the chunks that it touches are read."""
        shape = np.broadcast_to(np.zeros((), np.int8), self.shape)[index].shape  # raises NumPy's errors
        if 0 in shape:
            return np.zeros(shape, self.dtype)
        if self._store is None:
            self._store = open_array(self._where, self._document)
        return self._store[_from_zero(index, self.shape)].read().result()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_store": None}  # opened again when it is read

    def __repr__(self) -> str:
        return f"SavedArray({self.dtype}{list(self.shape)}, {self._where})"


def _from_zero(index: Any, shape: tuple[int, ...]) -> tuple:
    """Write a NumPy index with an item for each axis, all of its numbers counted from zero.

    TensorStore does not count negative numbers from the end, nor cut slices to the axis.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    missing = len(shape) - sum(item is not None and item is not Ellipsis for item in items)
    items[at : at + 1] = [slice(None)] * missing
    lengths = iter(shape)
    found = [None if item is None else _of_axis(item, next(lengths)) for item in items]
    if any(isinstance(item, np.ndarray) for item in found):
        # Beside arrays, NumPy treats an integer as an array too.
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
    """Draws in a Zarr store; the leaves of ``position`` and ``stats`` are read when asked for.

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
        """Open the store as an xarray ``DataTree``, whose values are read when asked for.

        Needs the extra ``storage``.
        """
        need("zarr", "storage")
        return need("xarray", "storage").open_datatree(self.path, engine="zarr")

    def _of_kernel(self) -> dict[str, Any]:
        recorded = self.attributes.get
        momenta, depth = bool(recorded("draws_momenta")), recorded("max_tree_depth")
        found = {"judges_energy": momenta, "max_tree_depth": depth, "note": recorded("note", "")}
        return found | {"losses": recorded(LOSSES, ())}


def open_draws(path: str | Path) -> SavedDraws:
    """Open the draws that `ZarrSink` has written, of a run that has ended or is under way.

    Parameters
    ----------
    path
        The folder.

    Returns
    -------
    SavedDraws
        The draws that are whole on disk at this moment; open again to see more. Tuples and classes of
        the position become lists and dicts; ``kernel`` and ``state`` are None.

    Raises
    ------
    ValueError
        If there is no such folder, or what it holds is no store of draws.
    ImportError
        Without the extra ``storage``, when draws are read.
    """
    folder = local_path("path", path)
    try:
        root = read_root(folder)
    except NotOurStore as error:
        raise ValueError(f"path: {error}") from error
    arrays, attributes = saved_arrays(folder, root), root["attributes"]
    leaves = json.loads(attributes["position"])
    position = _grow([(leaf["path"], arrays[f"{POSTERIOR}/{leaf['array']}"]) for leaf in leaves])
    axes = {id(arrays[f"{POSTERIOR}/{leaf['array']}"]): leaf.get("groups") for leaf in leaves}
    groups = {x["axis"]: _read_groups(folder, **x) for x in axes.values() if x is not None}
    return SavedDraws(
        position=position,
        stats=saved_stats(arrays),
        warmup={"moves": [Move(*move) for move in json.loads(attributes.get("moves", "[]"))]},
        kernel=None,  # pyright: ignore[reportArgumentType]
        state=None,
        num_steps=0,
        thin=attributes.get("thin", 1),
        groups={
            name: replace(groups[x["axis"]], axis=leaf.dims.index(x["axis"]) - 2)
            for name, leaf in named_leaves(position).items()
            if (x := axes[id(leaf)]) is not None
        },
        path=folder,
        attributes=attributes,
    )


def _read_groups(folder: Path, axis: str, name: str) -> GroupLabels:
    """Read what the groups are called that an axis has."""
    zarr = need("zarr", "storage")
    labels, sizes = (
        zarr.open_array(folder / CONSTANT / array, mode="r")[:] for array in (axis, rows_of(axis))
    )
    # Text comes as NumPy's new strings, which arrays of labels are not.
    return GroupLabels(name, np.array(labels.tolist()), sizes, "")


def saved_arrays(folder: Path, root: Document) -> dict[str, SavedArray]:
    """Return the arrays of draws of a store by path."""
    arrays = {
        path: node
        for path, node in nodes_of(root).items()
        if node["node_type"] == "array" and node.get("dimension_names", ())[:2] == ["chain", "draw"]
    }
    return {path: SavedArray(folder / path, document) for path, document in arrays.items()}


def saved_stats(arrays: dict[str, SavedArray]) -> dict[str, SavedArray]:
    """Return the stats by the names that `Draws` has for them."""
    ours = {theirs: name for name, theirs in ARVIZ_NAMES.items()}
    split = [(*path.split("/"), array) for path, array in arrays.items()]
    return {ours.get(name, name): array for group, name, array in split if group == STATS}


def _grow(items: list[tuple[list, Any]]) -> PyTree:
    """Build a tree of dicts and lists from its leaves with their paths."""
    if not items:
        return {}
    if not items[0][0]:
        return items[0][1]
    branches: dict[Any, list] = {}
    for (step, *rest), leaf in items:
        branches.setdefault(tuple(step) if isinstance(step, list) else step, []).append((rest, leaf))
    grown = {step: _grow(branch) for step, branch in branches.items()}
    if all(isinstance(step, tuple) for step in grown):
        return [grown.get((i,)) for i in range(max(grown)[0] + 1)]
    return grown
