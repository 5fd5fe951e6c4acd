"""Statistics of leaves by name: small leaves side by side in one program, large ones where they lie.

A program of statistics takes seconds to compile. Of small leaves the draws are brought to one device.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.table import SMALL_LEAF
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.tree import PyTree


def by_name(
    compute: Callable[[PyTree], dict[str, PyTree]], named: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Compute statistics of leaves.

    Parameters
    ----------
    compute
        Function of a tree of draws; returns name of a statistic to a tree like it, leaves [...].
    named
        Name of a leaf to draws [chains, draws, ...].

    Returns
    -------
    dict
        Name of a leaf to name of a statistic to array [...]: NumPy arrays of small leaves.
    """
    small = {name: x for name, x in named.items() if math.prod(x.shape[2:]) <= SMALL_LEAF}
    found = _apart(compute(_beside(small)), small) if small else {}
    for name, leaf in named.items():
        if name not in small:
            found[name] = compute(leaf)
    return found


def _beside(named: dict[str, Any]) -> np.ndarray:
    """Lay the columns of leaves side by side, [chains, draws, columns], on the host."""
    dtype = jnp.result_type(*(jax.dtypes.canonicalize_dtype(x.dtype) for x in named.values()))
    leaves = to_host(list(named.values()))
    flat = [x.reshape(*x.shape[:2], math.prod(x.shape[2:])).astype(dtype) for x in leaves]
    return np.concatenate(flat, axis=2)


def _apart(found: dict[str, Any], named: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Undo `_beside` of what was computed."""
    shapes = {name: x.shape[2:] for name, x in named.items()}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1]
    pieces = {key: np.split(x, ends) for key, x in found.items()}
    return {
        name: {key: pieces[key][i].reshape(shape) for key in pieces}
        for i, (name, shape) in enumerate(shapes.items())
    }
