"""Real data for the demos, from a folder, from a cache, or downloaded and checked.

Every file is compared with its published checksum before it is used, so that a damaged or wrong
file gives an error and never a wrong array.
"""

import gzip
import hashlib
import math
import os
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np

DATA_ENV = "GSPMD_MCMC_DATA"
TIMEOUT_SECONDS = 10.0

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# Of the unpacked files: gzip output differs between compressors, the content does not.
MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}

_GZIP_MAGIC = b"\x1f\x8b"
_IDX_UINT8 = 0x08
_DIGITS_SEED = 0


class DownloadError(OSError):
    """No mirror gave the file that was asked for."""


class Unavailable(Exception):
    """A data set is neither in the cache nor at a mirror."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled images, split into a training and a test part.

    Attributes
    ----------
    name : str
        ``"mnist"`` or ``"digits"``.
    train_images, test_images : numpy.ndarray
        Pixels as uint8, shape [rows, pixels].
    train_labels, test_labels : numpy.ndarray
        Classes as int32, shape [rows].
    scale : int
        The largest value a pixel can take: 255 for MNIST, 16 for the digits.
    num_classes : int
        Number of classes.
    shape : tuple of int
        Height and width of one image.
    source : str
        Where the data came from, in words.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    scale: int
    num_classes: int
    shape: tuple[int, int]
    source: str


def load_mnist(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MNIST_MIRRORS,
    checksums: Mapping[str, str] | None = MNIST_MD5,
) -> Dataset:
    """Load MNIST, or scikit-learn's small digits with a message that says so.

    A folder that was asked for, by `data_dir` or else by the environment variable
    ``GSPMD_MCMC_DATA`` (empty counts as unset), is the only place to look. With neither, the
    cache folder comes first, then the mirrors (what they send is checked and cached), then
    scikit-learn's 8x8 digits.

    Parameters
    ----------
    data_dir : str or path, optional
        Folder with the four MNIST files, gzipped or not, directly or in a subfolder ``mnist``.
    mirrors : sequence of str, optional
        Addresses that hold the files, tried in order.
    checksums : mapping of str to str, optional
        md5 of each unpacked file, by its official name. None takes files of any content.

    Returns
    -------
    Dataset
        The images; `Dataset.name` and `Dataset.source` say which ones.

    Raises
    ------
    OSError
        If a folder that was asked for, or a file in it, is missing.
    ValueError
        If a file in that folder is damaged or is not the official one.
    ImportError
        If MNIST is not available and scikit-learn is not installed.
    """
    try:
        return load_real_mnist(data_dir, mirrors=mirrors, checksums=checksums)
    except Unavailable as error:
        return _load_digits(str(error))


def load_real_mnist(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    mirrors: Sequence[str] = MNIST_MIRRORS,
    checksums: Mapping[str, str] | None = MNIST_MD5,
) -> Dataset:
    """Load MNIST, or raise `Unavailable`; arguments and other errors are those of `load_mnist`."""
    if data_dir is not None:
        return _load_given(Path(data_dir).expanduser(), "data_dir", checksums)
    if from_env := os.environ.get(DATA_ENV):
        return _load_given(Path(from_env).expanduser(), DATA_ENV, checksums)
    try:
        return _load_cached(cache_folder("mnist"), mirrors, checksums or MNIST_MD5)
    except OSError as error:
        raise Unavailable(str(error)) from error


def read_idx(path: str | os.PathLike[str], rank: int | None = None) -> np.ndarray:
    """Read an IDX file of unsigned bytes, gzipped or not.

    Parameters
    ----------
    path : str or path
        The file.
    rank : int, optional
        Number of dimensions the array must have; any number from 1 if left out.

    Returns
    -------
    numpy.ndarray
        A uint8 array of the shape that the file's header gives.

    Raises
    ------
    ValueError
        If the gzip stream is broken, the header is not that of an IDX file of unsigned bytes with
        `rank` dimensions, or the data is shorter or longer than the header says.
    """
    return _parse_idx(_read_content(Path(path)), Path(path), rank)


def cache_folder(name: str) -> Path:
    """Give the folder where the demos keep the data set `name` (it may not exist yet).

    Parameters
    ----------
    name : str
        Name of the data set.

    Returns
    -------
    pathlib.Path
        ``$XDG_CACHE_HOME/gspmd_mcmc/NAME``, or ``~/.cache/gspmd_mcmc/NAME``.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path, which an unset variable is here too.
    return (base if base.is_absolute() else Path.home() / ".cache") / "gspmd_mcmc" / name


def fetch(
    file_name: str,
    folder: Path,
    mirrors: Sequence[str],
    md5: str,
    timeout: float = TIMEOUT_SECONDS,
) -> str:
    """Download a file into a folder from the first mirror that has the right one.

    The file appears in the folder complete and checked, or not at all.

    Parameters
    ----------
    file_name : str
        Name of the file, at the mirrors and in the folder.
    folder : pathlib.Path
        Where to keep the file; made if need be.
    mirrors : sequence of str
        Addresses that hold the file, tried in order.
    md5 : str
        Checksum of the content: of the unpacked file if it is gzipped.
    timeout : float, optional
        Seconds to wait for a mirror that does not answer.

    Returns
    -------
    str
        The mirror that the file came from.

    Raises
    ------
    DownloadError
        If no mirror gives a file with that checksum; it says what each one did instead.
    """
    failures = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{file_name}"
        try:
            _download(url, folder / file_name, md5, timeout)
            return mirror
        except (OSError, ValueError, HTTPException) as error:
            failures.append(f"{url}: {_reason(error)}")
    raise DownloadError(f"no mirror gave {file_name}: {'; '.join(failures) or 'none to ask'}")


def announce(message: str) -> None:
    """Tell the user something about the data, on the standard error stream.

    Parameters
    ----------
    message : str
        The line to show.
    """
    print(message, file=sys.stderr, flush=True)


def _load_given(root: Path, origin: str, checksums: Mapping[str, str] | None) -> Dataset:
    if not root.is_dir():
        error = NotADirectoryError if root.exists() else FileNotFoundError
        raise error(f"{origin}: expected a folder with the MNIST files, {root} is none")
    folder = max(root, root / "mnist", key=lambda place: len(_locate(place)))
    return _read_folder(folder, checksums, f"MNIST from the folder {folder} ({origin})")


def _load_cached(folder: Path, mirrors: Sequence[str], checksums: Mapping[str, str]) -> Dataset:
    source = f"MNIST from the cache {folder}"
    try:
        return _read_folder(folder, checksums, source)
    except (FileNotFoundError, ValueError):
        used = _complete_cache(folder, mirrors, checksums)
    if used:
        source += f", downloaded from {' and '.join(used)}"
    return _read_folder(folder, checksums, source)


def _complete_cache(folder: Path, mirrors: Sequence[str], checksums: Mapping[str, str]) -> list[str]:
    announce(f"Asking the mirrors for MNIST (11 MB), to keep it in {folder}")
    used = []
    for name in MNIST_MD5:
        if not _is_cached(folder, name, checksums[name]):
            used.append(fetch(f"{name}.gz", folder, mirrors, checksums[name]))
    return list(dict.fromkeys(used))


def _is_cached(folder: Path, name: str, md5: str) -> bool:
    path = _locate(folder).get(name)
    if path is None:
        return False
    try:
        _check_md5(path, _read_content(path), md5)
    except ValueError as error:
        announce(f"Set aside a damaged file in the cache: {error}")
        return False
    return True


def _locate(folder: Path) -> dict[str, Path]:
    """Map official names to the files in `folder`, in any of their spellings."""
    found = {}
    for name in MNIST_MD5:
        # The gzipped official name comes first: it is the file that a download replaces.
        spellings = (name, name.replace("-idx", ".idx"))
        candidates = [folder / f"{stem}{end}" for stem in spellings for end in (".gz", "")]
        if path := next(filter(Path.is_file, candidates), None):
            found[name] = path
    return found


def _read_folder(folder: Path, checksums: Mapping[str, str] | None, source: str) -> Dataset:
    paths = _locate(folder)
    if missing := [name for name in MNIST_MD5 if name not in paths]:
        raise FileNotFoundError(
            f"{folder}: expected the four MNIST files, gzipped or not, here or in a subfolder "
            f"mnist; missing: {', '.join(missing)}"
        )
    train_images, train_labels = _read_split("train", paths, checksums)
    test_images, test_labels = _read_split("t10k", paths, checksums)
    return Dataset(
        name="mnist",
        train_images=train_images.reshape(len(train_images), -1),
        train_labels=train_labels.astype(np.int32),
        test_images=test_images.reshape(len(test_images), -1),
        test_labels=test_labels.astype(np.int32),
        scale=255,
        num_classes=10,
        shape=train_images.shape[1:],
        source=source,
    )


def _read_split(
    part: str, paths: Mapping[str, Path], checksums: Mapping[str, str] | None
) -> tuple[np.ndarray, np.ndarray]:
    images_name, labels_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    md5 = checksums or {}
    images = _read_checked(paths[images_name], md5.get(images_name), rank=3)
    labels = _read_checked(paths[labels_name], md5.get(labels_name), rank=1)
    if len(images) != len(labels):
        where = paths[labels_name]
        raise ValueError(f"{where}: expected {len(images)} labels, got {len(labels)}")
    return images, labels


def _read_checked(path: Path, md5: str | None, rank: int) -> np.ndarray:
    content = _read_content(path)
    # Parsed before it is compared: "too short" helps more than "another checksum".
    array = _parse_idx(content, path, rank)
    if md5 is not None:
        _check_md5(path, content, md5)
    return array


def _read_content(path: Path) -> bytes:
    raw = path.read_bytes()
    # Browsers and some servers unpack a file and leave its name, so the name does not decide.
    if not raw.startswith(_GZIP_MAGIC):
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: expected a whole gzip stream, got: {error}") from error


def _check_md5(path: Path, content: bytes, md5: str) -> None:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(f"{path}: expected content with md5 {md5}, got {found}")


def _parse_idx(content: bytes, path: Path, rank: int | None) -> np.ndarray:
    dims = _parse_header(content, path, rank)
    start = 4 + 4 * len(dims)
    if len(content) - start != math.prod(dims):
        raise ValueError(
            f"{path}: expected {math.prod(dims)} bytes of data for shape {dims}, "
            f"got {len(content) - start}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(dims).copy()


def _parse_header(content: bytes, path: Path, rank: int | None) -> tuple[int, ...]:
    if len(content) < 4 or content[:2] != b"\x00\x00":
        raise ValueError(f"{path}: expected an IDX file (00 00 TYPE RANK), got {_hex(content)}")
    if content[2] != _IDX_UINT8:
        raise ValueError(f"{path}: expected type 0x08 (uint8), got {content[2]:#04x}")
    if content[3] == 0 or rank not in (None, content[3]):
        raise ValueError(f"{path}: expected rank {rank or '1 or more'}, got {content[3]}")
    end = 4 + 4 * content[3]
    if len(content) < end:
        raise ValueError(f"{path}: expected a header of {end} bytes, got {len(content)}")
    return struct.unpack(f">{content[3]}I", content[4:end])


def _hex(content: bytes) -> str:
    return content[:4].hex(" ") or "an empty file"


def _download(url: str, target: Path, md5: str, timeout: float) -> None:
    with urlopen(url, timeout=timeout) as response:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Inside the cache folder: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as scratch:
            partial = Path(scratch, target.name)
            with partial.open("wb") as stream:
                shutil.copyfileobj(response, stream)
            _check_md5(partial, _read_content(partial), md5)
            partial.replace(target)


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        # It holds the open answer of the server.
        error.close()
    return str(error) or type(error).__name__


def _load_digits(reason: str) -> Dataset:
    images, labels = _read_digits(reason)
    announce(f"MNIST is not available ({reason}).")
    announce(
        "Using scikit-learn's 8x8 digits instead, so the results are not MNIST's. "
        f"{DATA_ENV} can name a folder that holds MNIST."
    )
    order = np.random.default_rng(_DIGITS_SEED).permutation(len(labels))
    train, test = np.split(order, [len(order) * 4 // 5])
    return Dataset(
        name="digits",
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        scale=16,
        num_classes=10,
        shape=(8, 8),
        source=f"scikit-learn's 8x8 digits in place of MNIST ({reason})",
    )


def _read_digits(reason: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ImportError(
            f"MNIST is not available ({reason}), and the digits that replace it need scikit-learn: "
            'pip install "gspmd_mcmc[demos]"'
        ) from error
    images, labels = load_digits(return_X_y=True)
    return np.asarray(images, np.uint8), np.asarray(labels, np.int32)
