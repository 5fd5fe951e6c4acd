"""The worker's side: one contender in a process of its own, a JSON line for each request.

``python -m benchmarks.worker '{"benchmark": "mnist", "contender": "tfp", ...}'`` loads its library
and data, says so, then answers the requests ``build``, ``run`` and ``check`` until its stdin ends.
A contender is ``benchmarks.contenders.<contender>.<benchmark>(task)``: an object of these methods.
"""

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from types import SimpleNamespace
from typing import Any, TextIO

from benchmarks import environment

DISTRIBUTIONS = ("jax", "jaxlib", "numpy")


def main() -> None:
    """Serve one contender over stdin and stdout."""
    replies = _private_stdout()
    contender = _answer(replies, lambda: _load(json.loads(sys.argv[1])), _describe)
    if contender is None:
        return
    for line in sys.stdin:
        request = json.loads(line)
        method = getattr(contender, request.pop("do"))
        _answer(replies, lambda method=method, request=request: method(**request))


def _private_stdout() -> TextIO:
    """Keep the real stdout for replies: what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _load(task: dict) -> Any:
    import jax

    jax.config.update("jax_num_cpu_devices", task["devices"])
    module = importlib.import_module(f"benchmarks.contenders.{task['contender']}")
    contender = getattr(module, task["benchmark"])(SimpleNamespace(**task))
    contender.distributions = getattr(module, "DISTRIBUTIONS", ())
    return contender


def _describe(contender: Any) -> dict:
    import jax

    names = (*DISTRIBUTIONS, *contender.distributions)
    return {
        "versions": {name: importlib.metadata.version(name) for name in names},
        "device": jax.devices()[0].device_kind,
        "rss_bytes": environment.rss_bytes(),
    }


def _peaks() -> dict[str, int]:
    """Return the peak resident set, and the device's peak where it has memory of its own."""
    import jax

    on_device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    peaks = {"peak_rss_bytes": environment.peak_rss_bytes()}
    return peaks if on_device is None else peaks | {"peak_device_bytes": on_device}


def _answer(replies: TextIO, work, describe=lambda result: result) -> Any:
    """Do the work and send what came of it; return None if it failed."""
    try:
        result = work()
        reply = {"ok": True, **describe(result), **_peaks()}
    except Exception as error:
        traceback.print_exc()
        result, reply = None, {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(reply), file=replies, flush=True)
    return result


if __name__ == "__main__":
    main()
