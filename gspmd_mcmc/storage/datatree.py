"""Draws as an xarray ``DataTree``: the names of its arrays, and the part that one process holds."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.table import named_leaves
from gspmd_mcmc.extras import need
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.multihost.processes import is_local, local_part
from gspmd_mcmc.tree import PyTree

POSTERIOR, STATS, CONSTANT = "posterior", "sample_stats", "constant_data"
# Names of stats that ArviZ has a name for.
ARVIZ_NAMES = {"is_divergent": "diverging", "log_density": "lp"}


def to_datatree(
    position: PyTree,
    stats: dict[str, Any],
    padded_rows: dict[str, tuple[int, int]],
    groups: Mapping[str, GroupLabels],
) -> Any:
    """Return a ``DataTree`` of draws in memory; on several processes, of the part that is here."""
    arviz_base = need("arviz_base", "arviz")
    stats = {ARVIZ_NAMES.get(name, name): np.asarray(x) for name, x in stats.items()}
    named = named_leaves(position)
    taken = {x.name for x in groups.values() if x.name}
    names = dict(zip(named, free_names(list(named), taken=taken), strict=True))
    posterior, coords = {names[name]: leaf for name, leaf in named.items()}, {}
    if not all(is_local(leaf) for leaf in named.values()):
        padded_rows = {names[name]: rows for name, rows in padded_rows.items()}
        posterior, stats, coords = process_part(posterior, stats, padded_rows)
    found = {POSTERIOR: {name: _on_host(x) for name, x in posterior.items()}, STATS: stats}
    dims: dict[str, list[str]] = {}
    for name, labels in groups.items():
        dim = dim_of(names[name], labels)
        axes = [f"{names[name]}_dim_{i}" for i in range(named[name].ndim - 2)]
        # On several processes, the groups that are here.
        here = coords.pop(axes[labels.axis], slice(None))
        axes[labels.axis] = dim
        dims[names[name]], dims[rows_of(dim)] = axes, [dim]
        coords[dim] = labels.labels[here]
        found.setdefault(CONSTANT, {})[rows_of(dim)] = labels.sizes[here]
    return arviz_base.from_dict(found, coords=coords, dims=dims)


def dim_of(leaf: str, groups: GroupLabels) -> str:
    """Return the name of the axis of groups of a leaf."""
    return groups.name or f"{leaf}_dim_{groups.axis}"


def rows_of(dim: str) -> str:
    """Return the name of what says how many rows each group has."""
    return f"{dim}_rows"


def _on_host(leaf: Any) -> np.ndarray:
    """Return a NumPy array of a dtype that NumPy itself knows."""
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array


def process_part(
    named: dict[str, jax.Array], stats: dict[str, np.ndarray], padded_rows: dict[str, tuple[int, int]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return posterior, stats and coordinates, the place in the whole, of the draws of this process."""
    parts = {name: local_part(leaf) for name, leaf in named.items()}
    first = max(starts[0] for _, starts in parts.values())
    last = min(starts[0] + len(values) for values, starts in parts.values())
    coords, posterior = {"chain": np.arange(first, last)}, {}
    for name, (values, starts) in parts.items():
        values = values[first - starts[0] : last - starts[0]]
        if name in padded_rows:
            axis, num_rows = padded_rows[name]
            values = values[(*(slice(None),) * axis, slice(max(num_rows - starts[axis], 0)))]
        posterior[name] = values
        for i, (size, start) in enumerate(zip(values.shape[2:], starts[2:], strict=True)):
            coords[f"{name}_dim_{i}"] = np.arange(start, start + size)
    return posterior, {name: x[first:last] for name, x in stats.items()}, coords


def disk_names(names: list[str], taken: Iterable[str] = ()) -> list[str]:
    """Return a name on disk for each leaf; some file systems do not tell upper from lower case."""
    plain = [name.replace("/", "_").lstrip("._") or "x" for name in names]
    return free_names(plain, str.casefold, taken)


def free_names(
    names: list[str], key: Callable[[str], str] = str, taken: Iterable[str] = ()
) -> list[str]:
    """Lengthen names that a coordinate of a ``DataTree`` has, or another leaf by the same key."""
    # Beside a leaf ``w``, ``w_dim_0`` is the coordinate of its axis.
    split = [(name, *name.rpartition("_dim_")) for name in names]
    of_axes = [key(name) for name, leaf, _, number in split if number.isdigit() and leaf in names]
    taken = {"chain", "draw", *of_axes, *map(key, taken)}
    found = []
    for name in names:
        while key(name) in taken:
            name += "_"
        taken.add(key(name))
        found.append(name)
    return found
