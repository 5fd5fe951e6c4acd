"""What `sample` does when it is not told: the kernel, how it is tuned, the kind of its metric."""

import math
from typing import Any

import jax

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.adaptation.dense import Dense
from gspmd_mcmc.adaptation.mams import MAMSAdaptation
from gspmd_mcmc.adaptation.mclmc import MCLMCAdaptation
from gspmd_mcmc.adaptation.metrics import Diagonal
from gspmd_mcmc.adaptation.per_chain import PerChainAdaptation
from gspmd_mcmc.adaptation.snaper import SNAPERAdaptation
from gspmd_mcmc.adaptation.window import WindowAdaptation
from gspmd_mcmc.kernels.hmc import HMC
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.mams import MAMS
from gspmd_mcmc.kernels.mclmc import MCLMC
from gspmd_mcmc.kernels.nuts import NUTS
from gspmd_mcmc.sampling.layout import Layout
from gspmd_mcmc.targets.local import rows_of
from gspmd_mcmc.tree import PyTree

# From so many chains on a trajectory length that they tune together beats a tree for each: in lock-step
# every chain waits for the deepest tree.
MANY_CHAINS = 32
DENSE_SIZE = 100
WARMUPS: dict[type, Any] = {
    HMC: WindowAdaptation(),
    NUTS: WindowAdaptation(),
    JitteredHMC: SNAPERAdaptation(),
    MAMS: MAMSAdaptation(),
    MCLMC: MCLMCAdaptation(),
}


def kernel_for(target: Any, num_chains: int) -> Any:
    """Return the kernel for a target and a number of chains, its settings still to be tuned."""
    return NUTS(target, 0.1) if num_chains < MANY_CHAINS else JitteredHMC(target, 0.1, 1.0)


def warmup_for(kernel: Any) -> Adaptation:
    """Return the warm-up that suits a kernel.

    Raises
    ------
    TypeError
        If none is known for it.
    """
    for kind, warmup in WARMUPS.items():
        if isinstance(kernel, kind):
            return warmup
    raise TypeError(
        f"warmup: no warm-up is known for {type(kernel).__name__}; give sample one as warmup=..."
    )


def with_metric(warmup: Any, kernel: Any, layout: Layout, positions: PyTree) -> Any:
    """Return the warm-up with a kind of metric, if it names none.

    A metric that the kernel has already is learned on if it is diagonal, and kept as it is if not.
    """
    if isinstance(warmup, PerChainAdaptation):
        inner = with_metric(warmup.adaptation, kernel, layout, positions)
        return tree.replace(warmup, adaptation=inner)
    if getattr(warmup, "metric", ()) is not None:
        return warmup
    return tree.replace(warmup, metric=_metric_for(kernel, layout, positions))


def _metric_for(kernel: Any, layout: Layout, positions: PyTree) -> Any:
    own = kernel.inverse_mass_matrix
    if own is not None:
        return Diagonal() if jax.tree.structure(own) == jax.tree.structure(positions) else None
    size = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(positions))
    are_local = any(rows is not None for rows in rows_of(kernel.target, positions))
    is_whole = not are_local and not any(axis for spec in layout.specs for axis in spec)
    return Dense() if is_whole and size <= DENSE_SIZE else Diagonal()
