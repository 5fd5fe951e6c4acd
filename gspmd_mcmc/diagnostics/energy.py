"""E-BFMI, which tells whether momenta move a Hamiltonian sampler across energies fast enough."""

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.columns import as_float
from gspmd_mcmc.placement.explicit import on_any_mesh


@on_any_mesh
def bfmi(energy: jax.Array | np.ndarray) -> jax.Array:
    """Energy Bayesian fraction of missing information of each chain.

    Σ (E_n - E_{n-1})² / Σ (E_n - Ē)². Below 0.3 the momenta of single steps change the energy too
    little to explore its range: chains then seldom visit the tails.

    Parameters
    ----------
    energy
        The Hamiltonian after each transition, [chains, draws].

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
