"""Several processes, one mesh: how they join, and how arrays that lie on all of them are read.

Every process runs the same program on the same values. `to_host` reads what spans processes; all of
them must call it.
"""

import os
import sys
import threading
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gspmd_mcmc.tree import PyTree, is_traced

HEARTBEAT_SECONDS = 60


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    exit_on_error: bool = False,
) -> None:
    """Join the processes of a run, so that ``jax.devices()`` are the devices of all of them.

    It calls ``jax.distributed.initialize``. Call it first, in every process. Under Slurm, on TPU pods,
    in Kubernetes (with JAX's extra ``k8s``) and under Open MPI, JAX finds the arguments itself. Where
    nothing is given and nothing found, the process stays alone, so the same script runs on a laptop.

    Parameters
    ----------
    coordinator_address
        ``"host:port"`` of process 0; the port must be free, and open to the others.
    num_processes, process_id
        How many there are, and which one this is, from 0.
    heartbeat_seconds
        A process that is silent for this long counts as dead, and all others end with a message that
        names it.
    exit_on_error
        Whether an error that nobody catches ends this process after ``heartbeat_seconds``, by
        ``os._exit(1)``. Without it the process waits for the others, which wait for it, for minutes.
        It replaces ``sys.excepthook``, so use it in scripts and not in notebooks.

    Raises
    ------
    RuntimeError
        If it is called twice, or after JAX has started its devices.
    ValueError
        If some of the arguments are missing, or contradict each other.
    """
    if jax.distributed.is_initialized():
        raise RuntimeError(
            f"initialize: called twice; this is process {jax.process_index()} of {jax.process_count()} "
            "already. Call it once, at the start"
        )
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    _check_arguments(given, heartbeat_seconds)
    if hasattr(jax.config, "jax_enable_preemption_service"):
        # It takes SIGTERM for itself; processes would no longer end by it.
        jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=int(heartbeat_seconds))
    except (RuntimeError, ValueError) as error:
        is_asking = isinstance(error, ValueError) and "coordinator_address" in str(error)
        if is_asking and all(value is None for value in given.values()):
            return  # Nothing was given, and JAX found nothing: the process is alone.
        raise _explained(given, error) from error
    if exit_on_error:
        _end_soon_after_errors(heartbeat_seconds)


def _check_arguments(given: dict[str, Any], heartbeat_seconds: Any) -> None:
    if not isinstance(heartbeat_seconds, int | float) or not heartbeat_seconds >= 1:
        raise ValueError(
            f"initialize: heartbeat_seconds: expected 1 or more, got {heartbeat_seconds!r}"
        )
    for name, least in (("num_processes", 1), ("process_id", 0)):
        value = given[name]
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(
                f"initialize: {name}: expected an integer of at least {least}, got {value!r}"
            )
    address = given["coordinator_address"]
    if address is not None and not address.rpartition(":")[2].isdigit():
        raise ValueError(f'initialize: coordinator_address: expected "host:port", got {address!r}')
    count, index = given["num_processes"], given["process_id"]
    if count is not None and index is not None and index >= count:
        raise ValueError(f"initialize: process_id={index} of num_processes={count}: they count from 0")


def _explained(given: dict[str, Any], error: Exception) -> Exception:
    shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
    if isinstance(error, ValueError):
        return ValueError(
            f"initialize({shown}): JAX found no cluster that supplies what is missing ({error}). Give "
            "coordinator_address, num_processes and process_id"
        )
    if "must be called before" in str(error):
        return RuntimeError(
            "initialize: JAX has started its devices already. Call gspmd_mcmc.initialize() before "
            "anything makes an array or asks for devices"
        )
    return RuntimeError(f"initialize({shown}): {error}")


def _end_soon_after_errors(seconds: float) -> None:
    """End this process soon after an error: others may wait for it, and JAX minutes for them."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        timer = threading.Timer(seconds, _end, (f"{kind.__name__}: {error}",))
        timer.daemon = True
        timer.start()

    sys.excepthook = hook


def _end(error: str) -> None:
    which = f"process {jax.process_index()} of {jax.process_count()}"
    print(f"gspmd_mcmc: {which} ends by its error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def spans_processes(mesh: Mesh | AbstractMesh | None) -> bool:
    """Tell whether a mesh has devices of several processes; raise if of some, but not of all."""
    if not isinstance(mesh, Mesh) or jax.process_count() == 1:
        return False
    found = {device.process_index for device in mesh.devices.flat}
    if len(found) == 1:
        return False
    if len(found) < jax.process_count():
        raise ValueError(
            f"mesh: it lies on processes {sorted(found)} of {jax.process_count()}; expected devices of "
            "one process (make_mesh(devices=jax.local_devices())) or of all (make_mesh(...))"
        )
    return True


def is_local(array: Any) -> bool:
    """Tell whether this process can read an array by itself."""
    return not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated


def to_host(tree: PyTree) -> PyTree:
    """Return the leaves, whole, as NumPy arrays.

    Those that span processes are gathered: every process must call this, and each then holds all of
    them. It is meant for what is small.
    """
    gathered = jax.tree.map(
        lambda x: x if is_local(x) else multihost_utils.process_allgather(x, tiled=True), tree
    )
    return jax.device_get(gathered)


def put(array: Any, sharding: NamedSharding) -> jax.Array:
    """Lay an array out; each process cuts one that it holds whole, and nothing is sent."""
    if is_traced(array) or sharding.is_fully_addressable or not is_local(array):
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def local_part(array: Any) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the part of an array that lies on this process' devices, a box, and where it begins."""
    if is_local(array):
        return np.asarray(array), (0,) * np.ndim(array)
    shards = {
        tuple(s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)): shard
        for shard in array.addressable_shards
    }
    starts = tuple(min(index[axis][0] for index in shards) for axis in range(array.ndim))
    stops = tuple(max(index[axis][1] for index in shards) for axis in range(array.ndim))
    part = np.empty([b - a for a, b in zip(starts, stops, strict=True)], array.dtype)
    if sum(shard.data.size for shard in shards.values()) != part.size:
        raise ValueError(
            f"process {jax.process_index()} holds parts of {array.dtype}{list(array.shape)} that do "
            "not lie side by side; make the mesh of jax.devices() in their order"
        )
    for index, shard in shards.items():
        box = tuple(slice(a - s, b - s) for (a, b), s in zip(index, starts, strict=True))
        part[box] = np.asarray(shard.data)
    return part, starts
