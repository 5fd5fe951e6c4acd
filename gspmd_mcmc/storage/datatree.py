"""Draws as an xarray ``DataTree``: the names of its arrays, and the part that one process holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.extras import need
from gspmd_mcmc.multihost.processes import is_local, local_part
from gspmd_mcmc.tree import PyTree

POSTERIOR, STATS = "posterior", "sample_stats"
# Names of stats that ArviZ has a name for.
ARVIZ_NAMES = {"is_divergent": "diverging", "log_density": "lp"}


def to_datatree(position: PyTree, stats: dict[str, Any], padded_rows: dict[str, int]) -> Any:
    """Return a ``DataTree`` of draws in memory; on several processes, of the part that is here."""
    arviz_base = need("arviz_base", "arviz")
    stats = {ARVIZ_NAMES.get(name, name): np.asarray(x) for name, x in stats.items()}
    named = named_leaves(position)
    names = dict(zip(named, free_names(list(named)), strict=True))
    posterior, coords = {names[name]: leaf for name, leaf in named.items()}, None
    if not all(is_local(leaf) for leaf in named.values()):
        padded_rows = {names[name]: count for name, count in padded_rows.items()}
        posterior, stats, coords = process_part(posterior, stats, padded_rows)
    groups = {POSTERIOR: {name: _on_host(x) for name, x in posterior.items()}, STATS: stats}
    return arviz_base.from_dict(groups, coords=coords)


def _on_host(leaf: Any) -> np.ndarray:
    """Return a NumPy array of a dtype that NumPy itself knows."""
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array


def process_part(
    named: dict[str, jax.Array], stats: dict[str, np.ndarray], padded_rows: dict[str, int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return posterior, stats and coordinates, the place in the whole, of the draws of this process."""
    parts = {name: local_part(leaf) for name, leaf in named.items()}
    first = max(starts[0] for _, starts in parts.values())
    last = min(starts[0] + len(values) for values, starts in parts.values())
    coords, posterior = {"chain": np.arange(first, last)}, {}
    for name, (values, starts) in parts.items():
        values = values[first - starts[0] : last - starts[0]]
        if name in padded_rows:
            values = values[:, :, : max(padded_rows[name] - starts[2], 0)]
        posterior[name] = values
        for i, (size, start) in enumerate(zip(values.shape[2:], starts[2:], strict=True)):
            coords[f"{name}_dim_{i}"] = np.arange(start, start + size)
    return posterior, {name: x[first:last] for name, x in stats.items()}, coords


def disk_names(names: list[str]) -> list[str]:
    """Return a name on disk for each leaf; some file systems do not tell upper from lower case."""
    plain = [name.replace("/", "_").lstrip("._") or "x" for name in names]
    return free_names(plain, str.casefold)


def free_names(names: list[str], key: Callable[[str], str] = str) -> list[str]:
    """Lengthen names that a coordinate of a ``DataTree`` has, or another leaf by the same key."""
    # Beside a leaf ``w``, ``w_dim_0`` is the coordinate of its axis.
    split = [(name, *name.rpartition("_dim_")) for name in names]
    of_axes = [key(name) for name, leaf, _, number in split if number.isdigit() and leaf in names]
    taken = {"chain", "draw", *of_axes}
    found = []
    for name in names:
        while key(name) in taken:
            name += "_"
        taken.add(key(name))
        found.append(name)
    return found
