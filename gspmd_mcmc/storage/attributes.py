"""What a store of draws says of the run that made it."""

import datetime
import importlib.metadata
import platform
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import Partial

from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.kernels.kernel import Kernel

LIBRARIES = ("gspmd_mcmc", "jax", "jaxlib", "numpy", "tensorstore")


def attributes_of(
    rng_key: jax.Array,
    mesh: Mesh | None,
    kernel: Kernel,
    warmup: Adaptation,
    collect: Partial,
    **counts: int,
) -> dict[str, Any]:
    """Return names to strings, numbers and lists: no more, so that the tree can become netCDF too.

    Parameters
    ----------
    rng_key, mesh
        What `sample` was given; attributes of the mesh are left out where there is none.
    kernel, warmup, collect
        What ran; their classes and names are kept.
    counts
        Numbers of chains, warm-up steps and draws, and ``thin``.
    """
    found = {
        "creation_library": "gspmd_mcmc",
        "creation_library_language": "Python",
        "creation_library_version": version_of("gspmd_mcmc"),
        "inference_library": "gspmd_mcmc",
        "inference_library_version": version_of("gspmd_mcmc"),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": [f"Python {platform.python_version()}"]
        + [f"{name} {version_of(name)}" for name in LIBRARIES],
        "platform": jax.default_backend(),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "rng_key_data": np.asarray(jax.random.key_data(rng_key)).ravel().tolist(),
        "rng_key_impl": str(jax.random.key_impl(rng_key)),
        "kernel": type(kernel).__name__,
        "note": kernel.note,
        "draws_momenta": int(kernel.draws_momenta),  # netCDF knows no bool
        "warmup": type(warmup).__name__,
        "collect": getattr(collect.func, "__qualname__", repr(collect.func)),
        **counts,
    }
    if kernel.max_tree_depth is not None:
        found["max_tree_depth"] = kernel.max_tree_depth
    if mesh is not None:
        found |= {"mesh_axes": list(mesh.axis_names), "mesh_shape": list(mesh.devices.shape)}
    return found


def version_of(name: str) -> str:
    """Return the version of an installed library."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
