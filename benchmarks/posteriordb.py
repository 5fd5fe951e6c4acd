"""Data and reference draws of posteriordb: from a folder, a cache, or the official repository.

https://github.com/stan-dev/posteriordb, BSD-3-Clause. Every posterior has two small zip files with one
JSON file in each; what they hold is checked before it is used or kept.
"""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np

from demos.datasets import DATA_ENV, TIMEOUT_SECONDS, DownloadError, announce, cache_folder

REPOSITORY = "https://raw.githubusercontent.com/stan-dev/posteriordb/master/posterior_database"
FOLDER = "posteriordb"


@dataclass(frozen=True, eq=False)
class Recorded:
    """A posterior as posteriordb has it.

    Attributes
    ----------
    name
        ``DATA-MODEL``.
    data
        What the Stan program reads, by name: numbers, lists, lists of lists.
    draws
        Parameter name to reference draws [chains, draws] in float64.
    source
        Where both came from, in words.
    """

    name: str
    data: dict[str, Any]
    draws: dict[str, np.ndarray]
    source: str


@dataclass(frozen=True)
class Part:
    """One of a posterior's two files: its ending, its place in the database, what reads it."""

    ending: str
    address: Callable[[str], str]
    read: Callable[[Path], Any]

    def file_name(self, name: str) -> str:
        """Return the file's name in a folder of ours."""
        return f"{name}.{self.ending}.json.zip"


def load(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, repository: str = REPOSITORY
) -> Recorded:
    """Load a posterior's data and reference draws.

    Parameters
    ----------
    name
        Its name in posteriordb, ``DATA-MODEL``.
    data_dir
        Folder with ``NAME.data.json.zip`` and ``NAME.draws.json.zip``, directly or in a subfolder
        ``posteriordb``; by default the folder that the environment variable ``GSPMD_MCMC_DATA`` names.
        A folder that was asked for is the only place looked at. With neither, the cache, and then
        the official repository.
    repository
        Address of the database.

    Raises
    ------
    OSError
        If a file is missing, or can be had from nowhere.
    ValueError
        If a file is not what it should be.
    """
    asked, origin = (
        (data_dir, "data_dir") if data_dir is not None else (os.environ.get(DATA_ENV), DATA_ENV)
    )
    if asked:
        folder = _given(Path(asked).expanduser(), name, origin)
        source = f"the folder {folder} ({origin})"
    else:
        folder = cache_folder(FOLDER)
        source = _complete_cache(folder, name, repository)
    data, draws = (part.read(folder / part.file_name(name)) for part in PARTS)
    return Recorded(name, data, draws, source)


def has(name: str, data_dir: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds a posterior's two files."""
    return _missing(Path(data_dir) / FOLDER, name) == [] or _missing(Path(data_dir), name) == []


def _missing(folder: Path, name: str) -> list[str]:
    files = [part.file_name(name) for part in PARTS]
    return [file for file in files if not (folder / file).is_file()]


def _given(root: Path, name: str, origin: str) -> Path:
    if not root.is_dir():
        raise FileNotFoundError(f"{origin}: expected a folder, {root} is none")
    folder = min(root / FOLDER, root, key=lambda place: len(_missing(place, name)))
    if missing := _missing(folder, name):
        raise FileNotFoundError(
            f"{root}: expected the files of {name}, here or in a subfolder {FOLDER}; "
            f"missing: {', '.join(missing)}"
        )
    return folder


def _complete_cache(folder: Path, name: str, repository: str) -> str:
    used = False
    for part in PARTS:
        path = folder / part.file_name(name)
        if not _is_whole(part, path):
            announce(f"Asking posteriordb for {path.name}, to keep it in {folder}")
            _download(f"{repository.rstrip('/')}/{part.address(name)}", part, path)
            used = True
    return f"the cache {folder}" + (f", downloaded from {repository}" if used else "")


def _is_whole(part: Part, path: Path) -> bool:
    try:
        part.read(path)
    except FileNotFoundError:
        return False
    except ValueError as error:
        announce(f"Set aside a damaged file in the cache: {error}")
        return False
    return True


def _download(url: str, part: Part, path: Path) -> None:
    """Download a file; it appears complete and read once, or not at all."""
    try:
        with urlopen(url, timeout=TIMEOUT_SECONDS) as response:
            content = response.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as scratch:
            partial = Path(scratch, path.name)
            partial.write_bytes(content)
            part.read(partial)
            partial.replace(path)
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise DownloadError(f"{url}: {error or type(error).__name__}") from error


def _read_json(path: Path) -> Any:
    """Return what the only JSON file in a zip file holds."""
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            members = [m for m in archive.namelist() if m.endswith(".json") and "/" not in m]
            if len(members) != 1:
                raise ValueError(f"{path}: expected one JSON file in it, got {archive.namelist()}")
            return json.loads(archive.read(members[0]))
    except (zipfile.BadZipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a zip file of JSON, got: {error}") from error


def _read_data(path: Path) -> dict[str, Any]:
    """Read a dict of numbers and lists."""
    data = _read_json(path)
    if not isinstance(data, dict) or not data:
        raise ValueError(f"{path}: expected names with values, got {type(data).__name__}")
    return data


def _read_draws(path: Path) -> dict[str, np.ndarray]:
    """Read a list of chains, each parameter -> draws; return parameter -> draws [chains, draws]."""
    chains = _read_json(path)
    if not isinstance(chains, list) or not all(isinstance(c, dict) and c for c in chains):
        raise ValueError(f"{path}: expected a list of chains, each of names with draws")
    if len(chains) < 2 or any(chain.keys() != chains[0].keys() for chain in chains):
        raise ValueError(f"{path}: expected two chains or more of the same parameters")
    draws = {}
    for name in chains[0]:
        if len({len(chain[name]) for chain in chains}) != 1:
            raise ValueError(f"{path}: {name}: expected equally many draws of every chain")
        draws[name] = np.asarray([chain[name] for chain in chains], np.float64)
        if not np.isfinite(draws[name]).all():
            raise ValueError(f"{path}: {name}: expected finite draws")
    return draws


def _data_address(name: str) -> str:
    return f"data/data/{name.partition('-')[0]}.json.zip"


def _draws_address(name: str) -> str:
    return f"reference_posteriors/draws/draws/{name}.json.zip"


PARTS = (Part("data", _data_address, _read_data), Part("draws", _draws_address, _read_draws))
