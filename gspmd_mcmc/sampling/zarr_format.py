"""Draws as a Zarr v3 group: names, documents, chunks, and one file that says how many draws there are.

A folder of draws has the arrays ``posterior/NAME`` [chain, draw, ...] and ``sample_stats/NAME``
[chain, draw]. ``zarr.json`` at its root holds the attributes and, as consolidated metadata, the
documents of all arrays: replacing that one file is what makes draws count, in every array at once.
Chunks that it does not cover yet are on disk, and nobody sees them.
"""

import copy
import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.extras import need

POSTERIOR, STATS = "posterior", "sample_stats"
ROOT = "zarr.json"
VERSION = 1

# Parts of a chunk that are read and decompressed alone, and the least that a file should hold.
PIECE_BYTES = 2**20
COORDINATE_ROWS = 2**16

# Names of stats that ArviZ has a name for.
ARVIZ_NAMES = {"is_divergent": "diverging", "log_density": "lp"}

# What is not stored because it is all zero, by kind of dtype; 0.0 of floats.
FILL_VALUES = {"b": False, "i": 0, "u": 0, "c": [0.0, 0.0]}

Document = dict[str, Any]


class NotOurStore(ValueError):
    """A folder holds no draws that this library has written, or their document is damaged."""


def tree_names(names: list[str]) -> list[str]:
    """Return a name in a ``DataTree`` for each leaf: none is that of a coordinate, or taken twice.

    Coordinates are ``chain``, ``draw``, and ``w_dim_0`` beside a leaf ``w``.
    """
    return _free_names(names, str)


def disk_names(names: list[str]) -> list[str]:
    """Return a name on disk for each leaf: as `tree_names`, and no folder of its own.

    Names that differ in case alone are one name on some file systems.
    """
    plain = [name.replace("/", "_").lstrip("._") or "x" for name in names]
    return _free_names(plain, str.casefold)


def _free_names(names: list[str], key: Callable[[str], str]) -> list[str]:
    """Lengthen names that are a coordinate's, or another's by the key."""
    taken = {"chain", "draw", *(key(name) for name in names if _leaf_of_axis(name) in names)}
    found = []
    for name in names:
        while key(name) in taken:
            name += "_"
        taken.add(key(name))
        found.append(name)
    return found


def _leaf_of_axis(name: str) -> str:
    """Return the leaf whose axis has this name, ``w`` of ``w_dim_0``; empty if it is no axis' name."""
    leaf, _, number = name.rpartition("_dim_")
    return leaf if number.isdigit() else ""


def array_document(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    chunks: tuple[int, ...],
    compression: int,
) -> Document:
    """Return the document of an array [chain, draw, ...]; large chunks are read in pieces."""
    pieces = _pieces(chunks, dtype.itemsize)
    codecs = _codecs(dtype, compression)
    if pieces != chunks:
        inner = {"chunk_shape": list(pieces), "codecs": codecs, "index_codecs": _index_codecs()}
        codecs = [{"name": "sharding_indexed", "configuration": inner | {"index_location": "end"}}]
    dims = ["chain", "draw", *(f"{name}_dim_{i}" for i in range(len(shape) - 2))]
    return _document(shape, dtype, chunks, codecs, dims)


def coordinate_document(name: str, length: int) -> Document:
    """Return the document of a coordinate, 0, 1, 2, ..."""
    dtype = np.dtype(np.int64)
    return _document((length,), dtype, (COORDINATE_ROWS,), _codecs(dtype, 1), [name])


def chunk_shape(shard: tuple[int, ...], rows: int, num_rows: int, itemsize: int) -> tuple[int, ...]:
    """Return the shape of chunks that no two shards share.

    Parameters
    ----------
    shard
        Shape of one device's shard of a buffer, [chains, draws, ...].
    rows
        Draws of a buffer. A chunk has as many, so that a full buffer writes whole chunks, or a multiple
        where that would make a small file.
    num_rows
        Draws that are asked for.
    itemsize
        Bytes of a number on disk.
    """
    num_bytes = rows * itemsize * math.prod((shard[0], *shard[2:]))
    most = -(-max(num_rows, 1) // rows)
    times = max(1, min(most, PIECE_BYTES // max(num_bytes, 1)))
    return (max(shard[0], 1), rows * times, *(max(n, 1) for n in shard[2:]))


def _pieces(chunks: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Cut the longest latent axis of a chunk into even pieces of about `PIECE_BYTES`."""
    wanted = -(-math.prod(chunks) * itemsize // PIECE_BYTES)
    if len(chunks) == 2 or wanted == 1:
        return chunks
    axis = 2 + int(np.argmax(chunks[2:]))
    length = chunks[axis]
    wanted = min(wanted, length)
    even = (n for n in range(wanted, min(4 * wanted, length) + 1) if length % n == 0)
    return (*chunks[:axis], length // next(even, 1), *chunks[axis + 1 :])


def _document(shape, dtype: np.dtype, chunks, codecs: list, dims: list[str]) -> Document:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": FILL_VALUES.get(dtype.kind, 0.0),
        "codecs": codecs,
        "dimension_names": dims,
        "attributes": {},
    }


def _codecs(dtype: np.dtype, compression: int) -> list:
    codecs = [_little_endian()]
    if compression:
        shuffle = "shuffle" if dtype.itemsize > 1 else "noshuffle"
        how = {"cname": "zstd", "clevel": compression, "shuffle": shuffle, "blocksize": 0}
        codecs.append({"name": "blosc", "configuration": how | {"typesize": dtype.itemsize}})
    return [*codecs, {"name": "crc32c"}]


def _index_codecs() -> list:
    return [_little_endian(), {"name": "crc32c"}]


def _little_endian() -> Document:
    return {"name": "bytes", "configuration": {"endian": "little"}}


def group_document(attributes: Document) -> Document:
    """Return the document of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def cut(documents: dict[str, Document], num_draws: int) -> dict[str, Document]:
    """Return the documents of arrays, by path, with so many draws."""
    documents = copy.deepcopy(documents)
    for document in documents.values():
        for axis, name in enumerate(document.get("dimension_names", ())):
            if name == "draw":
                document["shape"][axis] = num_draws
    return documents


def publish(folder: Path, documents: dict[str, Document], attributes: Document, num_draws: int) -> None:
    """Make so many draws count, in every array at once, by replacing the root's document.

    The arrays' own documents go first, for readers that know no consolidated metadata: what they tell
    is on disk by then.
    """
    found = cut(documents, num_draws)
    for path, document in found.items():
        (folder / path).mkdir(parents=True, exist_ok=True)
        replace_file(folder / path / ROOT, document)
    root = group_document(attributes | {"num_draws": num_draws})
    # As zarr-python reads it: groups first, with nothing of their own, and the arrays of each together.
    inner = {
        path: document if document["node_type"] == "array" else document | _consolidated({})
        for path, document in sorted(found.items(), key=lambda item: (item[0].count("/"), item[0]))
    }
    replace_file(folder / ROOT, root | _consolidated(inner))


def _consolidated(metadata: dict[str, Document]) -> Document:
    inline = {"kind": "inline", "must_understand": False, "metadata": metadata}
    return {"consolidated_metadata": inline}


def replace_file(path: Path, document: Document) -> None:
    """Write a JSON file so that at any time, and after any end, the old or the new one is there."""
    draft = path.with_name(path.name + ".partial")
    try:
        with open(draft, "w") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_root(folder: Path) -> tuple[dict[str, Document], Document]:
    """Read the documents of all arrays and groups, by path, and the attributes.

    Raises
    ------
    NotOurStore
        With what was found instead.
    """
    try:
        root = json.loads((folder / ROOT).read_text())
    except FileNotFoundError:
        raise NotOurStore(f"{folder} holds no {ROOT}: no draws were written there") from None
    except (ValueError, OSError) as error:
        raise NotOurStore(f"{folder / ROOT} cannot be read, {error}") from error
    try:
        documents, attributes = root["consolidated_metadata"]["metadata"], root["attributes"]
        if attributes["draws_format"] != VERSION:
            raise NotOurStore(
                f"{folder} has draws in format {attributes['draws_format']}; this library reads format "
                f"{VERSION}"
            )
        _ = attributes["num_draws"], attributes["position"]
    except (KeyError, TypeError) as error:
        raise NotOurStore(
            f"{folder} is a store of another program: its {ROOT} has no {error}; xarray may open it"
        ) from error
    for document in documents.values():
        document.pop("consolidated_metadata", None)
    return documents, attributes


def difference(there: dict[str, Document], here: dict[str, Document]) -> str:
    """Tell what differs between the arrays of two stores but for their chunks; empty if nothing."""
    for path in sorted(there.keys() ^ here.keys()):
        return f"{path} is in {'the store' if path in there else 'this run'} alone"
    for path, document in cut(there, 0).items():
        other = cut({path: here[path]}, 0)[path]
        for key in ("shape", "data_type", "dimension_names"):
            if document.get(key) != other.get(key):
                return f"{path} has {key} {document.get(key)} there and {other.get(key)} in this run"
    return ""


def open_array(where: Path, document: Document, *, is_written: bool = False) -> Any:
    """Open an array by the document given, whatever its own says of its length."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{where}/"},
        "metadata": {key: document[key] for key in document if key not in ("zarr_format", "node_type")},
    }
    tensorstore = need("tensorstore", "storage")
    context = _few_threads() if is_written else None
    return tensorstore.open(spec, open=True, assume_metadata=True, context=context).result()


@functools.cache
def _few_threads() -> Any:
    """Return the context of all writes: a thread that packs and a thread that writes.

    Writes go beside the run, and have its time. Each further thread would keep memory of its own for
    good, as C's allocator gives it: about 20 MB, which grow in the first thousands of writes.
    """
    limits = {name: {"limit": 1} for name in ("data_copy_concurrency", "file_io_concurrency")}
    return need("tensorstore", "storage").Context(limits)


def steps_of(path: jax.tree_util.KeyPath) -> list[list]:
    """Write a leaf's path as JSON: ``["key", "w"]`` of a dict or class, ``["index", 0]`` of a list."""
    found = []
    for key in path:
        name = getattr(key, "key", getattr(key, "name", None))
        if name is None:
            found.append(["index", key.idx])
        else:
            found.append(["key", name if isinstance(name, int) else str(name)])
    return found
