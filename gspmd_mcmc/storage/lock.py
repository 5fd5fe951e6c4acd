"""One run to a folder: a lock file that its writer holds, and that names the writer."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: the package is imported there, folders are not locked.
    fcntl = None

NAME = ".lock"


class Locked(RuntimeError):
    """Another run writes to the folder, or may."""


class FolderLock:
    """The lock file of a folder, held from `take` to `free`.

    The system lets go of it when its process ends, however it ends. The file names the writer too: on a
    file system whose locks other hosts do not see, the file of another host's writer still refuses.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock, even one that a dead process of this host left behind; else raise `Locked`."""
        if fcntl is None:
            raise OSError(
                "a folder is locked by flock, which this system lacks; run on Linux, macOS or WSL"
            )
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        owner, is_gone = _read(self.path), False
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = owner.get("host", me["host"]) != me["host"]
            is_gone = os.stat(self.path).st_ino != os.fstat(file).st_ino
        except BlockingIOError:
            is_held = True
        except FileNotFoundError:
            is_gone = True
        if is_gone:  # The writer before has just removed it.
            os.close(file)
            return self.take()
        if is_held:
            os.close(file)
            who = f"process {owner.get('pid')} on host {owner.get('host')}"
            # A writer that has just begun has not written its name yet.
            raise Locked(
                f"{self.path.parent}: {who if owner else 'another run'} writes here. Give another "
                "path, or wait until it has ended; if it has, and ran on another host, remove "
                f"{self.path.name}"
            )
        os.ftruncate(file, 0)
        os.write(file, json.dumps(me).encode())
        self._file = file
        return None

    def free(self) -> None:
        """Remove the lock file, if this object holds it."""
        if self._file is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


def _read(path: Path) -> dict[str, Any]:
    """Read a lock file; empty where it is not one of ours, or its writer was killed as it wrote."""
    with contextlib.suppress(OSError, ValueError):
        owner = json.loads(path.read_text())
        return owner if isinstance(owner, dict) else {}
    return {}
