"""Whether a target is the one that chains came from: the log density where they stand tells."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.placement.processes import to_host
from gspmd_mcmc.sampling.layout import Layout
from gspmd_mcmc.sampling.start import init_chains
from gspmd_mcmc.tree import PyTree, path_str

# What a mesh, or a compiler, may change of a sum of terms: this share of their absolute values, and so
# many nats. Other data change it by about one part in the square root of their rows.
MOST_CHANGE, MOST_NATS = 1e-4, 1e-3


def evaluated_anew(kernel: Any, states: Any, layout: Layout) -> Any:
    """Return the states that the kernel begins with where chains stand."""
    # What a chain begins with does not depend on the metric, which each may have one of its own.
    kernel = tree.replace(kernel, inverse_mass_matrix=None)
    return init_chains(kernel, states.position, layout=layout)


def require_same_density(argument: str, earlier: Any, anew: Any) -> None:
    """Raise where states and those `evaluated_anew` have other log densities, by leaves of the terms.

    Raises
    ------
    ValueError
        If the sums of a leaf's terms differ by more than rounding, or are not finite any more.
    """
    olds, news = (to_host(_sums(states.terms)) for states in (earlier, anew))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(anew.terms)]
    for path, (old, size), (new, _) in zip(paths, olds, news, strict=True):
        bad = np.flatnonzero(~(np.abs(new - old) <= MOST_CHANGE * size + MOST_NATS))
        if bad.size:
            raise ValueError(
                f"{argument}: the target is another one than the chains were drawn from. Where "
                f"chain {bad[0]} stands, the terms {path_str(path)} of its log density add up to "
                f"{new[bad[0]]:.7g}, and did to {old[bad[0]]:.7g}: its data, or what its functions "
                "read, have changed. Give the target that the run was begun with; to sample this one, "
                "begin a new run, at gspmd_mcmc.per_chain(position) of the last draws if you like"
            )


@jax.jit
def _sums(terms: PyTree) -> list[tuple[jax.Array, jax.Array]]:
    """Return of each leaf [chains, ...] the sums of its terms and of their sizes, each [chains]."""
    flat = [x.reshape(len(x), -1) for x in jax.tree.leaves(terms)]
    return [(jnp.sum(x, axis=1), jnp.sum(jnp.abs(x), axis=1)) for x in flat]
