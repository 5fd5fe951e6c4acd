"""One run to a folder: a lock file that names the process which writes there."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

NAME = ".lock"


class Locked(RuntimeError):
    """A process that lives, or may live, writes to the folder."""


class FolderLock:
    """The lock file of a folder, held from `take` to `free`.

    It holds the writer's host, process number, and when host and process began, so that neither a
    number that is used again nor a host of the same name passes for a writer that has died.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.is_held = False

    def take(self) -> None:
        """Take the lock; one left behind by a process that has died is taken over.

        Raises
        ------
        Locked
            If its process lives, or is of another host, where nobody here can tell.
        """
        while not self._create():
            owner = _read(self.path)
            if owner is not None and may_live(owner):
                raise Locked(_refusal(self.path, owner))
            self._put_aside(owner)
        self.is_held = True

    def free(self) -> None:
        """Remove the lock file, if this object holds it."""
        if self.is_held:
            self.path.unlink(missing_ok=True)
            self.is_held = False

    def _create(self) -> bool:
        """Write the file if there is none; it appears with its content, by a link."""
        own = self.path.with_name(f"{NAME}.{os.getpid()}")
        own.write_text(json.dumps(this_process()))
        try:
            os.link(own, self.path)
        except FileExistsError:
            return False
        finally:
            own.unlink()
        return True

    def _put_aside(self, dead: dict[str, Any] | None) -> None:
        """Remove the file of a dead process; give it back where another has taken it meanwhile."""
        aside = self.path.with_name(f"{NAME}.{os.getpid()}.dead")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if _read(aside) != dead:
                os.rename(aside, self.path)
            aside.unlink(missing_ok=True)


def this_process() -> dict[str, Any]:
    """Return what a lock file says of the process that writes it."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "began": _began(pid)}


def may_live(owner: dict[str, Any]) -> bool:
    """Tell whether the process of a lock file lives, as far as this host can know."""
    if owner["host"] != socket.gethostname():
        return True
    if owner["boot"] != _boot():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return owner["began"] == _began(owner["pid"])


def _read(path: Path) -> dict[str, Any] | None:
    """Read a lock file; None where there is none, or it is not one of ours."""
    try:
        owner = json.loads(path.read_text())
        return owner if {"host", "boot", "pid", "began"} <= set(owner) else None
    except (OSError, ValueError, TypeError):
        return None


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    return (
        f"{path.parent}: process {owner['pid']} on host {owner['host']} writes here. Give another "
        f"path, or wait until it has ended; if it has, and ran on another host, remove {path.name}"
    )


def _boot() -> str:
    """Name this boot of the machine, where the system tells it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _began(pid: int) -> str:
    """Tell when a process began, in ticks of its machine, where the system tells it."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
