"""What a measurement was made on."""

import ctypes
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def record() -> dict[str, object]:
    """Describe the machine, the interpreter and the state of the repository."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": _cores(),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD"),
        # Code alone: a benchmark writes its results into the repository.
        "modified": bool(_git("status", "--porcelain", "--", ":/*.py")),
    }


def save(path: Path | None, benchmark: str, **parts: Any) -> None:
    """Write a benchmark's results as JSON, with what they were measured on; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {"benchmark": benchmark, "machine": record()} | parts
        path.write_text(json.dumps(document, indent=1) + "\n")


def peak_rss_bytes() -> int:
    """Return the largest resident set that this process has had."""
    peak = _field("/proc/self/status", "VmHWM")
    if peak:
        return int(peak.split()[0]) * 1024
    import resource

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def rss_bytes() -> int | None:
    """Return the resident set of this process, where the system tells it."""
    size = _field("/proc/self/status", "VmRSS")
    return int(size.split()[0]) * 1024 if size else None


def heap_bytes() -> int | None:
    """Return how many bytes of C's allocator are in use, where it is one that tells (glibc 2.33).

    What has been given back to it, and it keeps for later, is resident too, but not counted here.
    """
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    mallinfo2.restype = _MallInfo2
    found = mallinfo2()
    return found.uordblks + found.hblkhd


class _MallInfo2(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns; ``uordblks`` are in use in heaps, ``hblkhd`` mapped alone."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *(
            (name, ctypes.c_size_t)
            for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
        ),
    ]


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode().strip()
