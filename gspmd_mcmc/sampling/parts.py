"""The part of a run's draws that one process holds, with its place in the whole."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gspmd_mcmc.placement.processes import local_part


@dataclass(frozen=True, eq=False)
class Part:
    """What one process holds of the draws.

    Attributes
    ----------
    posterior, stats
        Name to array [chains, draws, ...].
    coords
        Name of a dimension to the places of its entries in the whole; of leaves' axes ``NAME_dim_i``.
    """

    posterior: dict[str, np.ndarray]
    stats: dict[str, np.ndarray]
    coords: dict[str, np.ndarray]


def part_of_process(
    named: dict[str, Any], stats: dict[str, np.ndarray], padded_rows: dict[str, int]
) -> Part:
    """Cut this process' part out of draws that lie over several processes.

    Parameters
    ----------
    named
        Name to draws [chains, draws, ...].
    stats
        Name to array [chains, draws], whole.
    padded_rows
        Of leaves with pad at the end of axis 2, the number of their real rows.
    """
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
    return Part(posterior, {name: x[first:last] for name, x in stats.items()}, coords)
