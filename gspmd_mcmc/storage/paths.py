"""Paths that a user writes: ``~`` is a home folder, and a URL is refused."""

import os
import re
from pathlib import Path

# `pathlib` makes ``gs:/bucket`` of ``gs://bucket``. A single letter is a drive of Windows.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(argument: str, path: str | os.PathLike) -> Path:
    """Return the absolute path of a file or folder, with ``~`` expanded.

    Parameters
    ----------
    argument
        What to call it in an error.
    path
        As the user wrote it.

    Raises
    ------
    ValueError
        If it is a URL, or names the home folder of a user who has none.
    """
    if _SCHEME.match(str(path)):
        raise ValueError(
            f"{argument}: expected a path on a file system, got the URL {str(path)!r}. A run locks its "
            "files and replaces them at once, which object stores cannot. Write to a disk and copy the "
            "folder afterwards. To read draws in a bucket, xarray.open_datatree(url, engine='zarr')"
        )
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{argument}: {str(path)!r}: {error}. Give the absolute path") from error
