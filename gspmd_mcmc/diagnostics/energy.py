"""E-BFMI, which tells whether momenta move a Hamiltonian sampler across energies fast enough."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.columns import as_float
from gspmd_mcmc.placement.explicit import on_any_mesh

# What a draw of several steps keeps of their energies, so that thinning leaves E-BFMI as it is: the
# first one; the mean, less the first; the sum of squares about the mean; that of squared changes.
OF_STEPS = ("energy_first", "energy_mean", "energy_squares", "energy_changes")


@on_any_mesh
def bfmi(energy: jax.Array | np.ndarray) -> jax.Array:
    """Energy Bayesian fraction of missing information of each chain.

    Σ (E_n - E_{n-1})² / Σ (E_n - Ē)². Below 0.3 the momenta of single steps change the energy too
    little to explore its range: chains then seldom visit the tails.

    Parameters
    ----------
    energy
        The Hamiltonian after each transition, [chains, draws]. Of thinned draws the changes are those
        over several steps, and the result is larger: `Draws.bfmi` is that of every step.

    Returns
    -------
    array
        Shape [chains]. NaN for chains that are constant or not finite, and for fewer than two draws.

    Raises
    ------
    ValueError
        If the shape is not [chains, draws].

    References
    ----------
    Betancourt, "Diagnosing suboptimal cotangent disintegrations in Hamiltonian Monte Carlo",
    arXiv:1604.00695 (2016).
    """
    if np.ndim(energy) != 2:
        raise ValueError(
            f"energy: expected the shape [chains, draws], got {list(np.shape(energy))}. Give the draws "
            "of a single chain a leading axis: energy[None]."
        )
    return _bfmi(jnp.asarray(energy))


@jax.jit
def _bfmi(energy: jax.Array) -> jax.Array:
    if energy.shape[1] < 2:
        return jnp.sum(as_float(energy), axis=1) * jnp.nan
    x = as_float(energy)
    # Relative to the first energy, as they may be near 1e6 and 1 apart; in a unit whose squares fit.
    x = x - x[:, :1]
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)
    steps = jnp.sum((x[:, 1:] - x[:, :-1]) ** 2, axis=1)
    return steps / jnp.sum((x - jnp.mean(x, axis=1, keepdims=True)) ** 2, axis=1)


def energies_over_steps(so_far: dict, energy: jax.Array, number: jax.Array) -> dict[str, jax.Array]:
    """Add the energies [chains] of a draw's step of that number to `OF_STEPS` of the steps before it.

    ``so_far`` has ``energy`` too, that of the step before.
    """
    is_first = number == 0
    first, mean, squares, changes = (
        jnp.where(is_first, energy if name == "energy_first" else 0, so_far[name]) for name in OF_STEPS
    )
    rise = energy - first
    new_mean = mean + (rise - mean) / (number + 1).astype(energy.dtype)
    change = jnp.where(is_first, 0, energy - so_far["energy"])
    sums = first, new_mean, squares + (rise - mean) * (rise - new_mean), changes + change**2
    return dict(zip(OF_STEPS, sums, strict=True))


def bfmi_of_steps(stats: Mapping[str, Any], thin: int) -> np.ndarray:
    """Return E-BFMI [chains] over every step of a run, from its stats [chains, draws].

    NaN where it is not known: without energies, or of thinned draws without `OF_STEPS`.
    """
    needed = ["energy", *(OF_STEPS if thin > 1 else ())]
    if any(name not in stats for name in needed):
        return np.full(len(stats["log_density"]), np.nan)
    if thin == 1:
        return np.asarray(bfmi(stats["energy"]))
    last, first, mean, squares, changes = (np.asarray(stats[name], np.float64) for name in needed)
    rise = first - first[:, :1] + mean
    with np.errstate(invalid="ignore", over="ignore"):
        total = changes.sum(axis=1) + ((first[:, 1:] - last[:, :-1]) ** 2).sum(axis=1)
        between = ((rise - rise.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) if rise.size else 0.0
        return total / (squares.sum(axis=1) + thin * between)
