"""Where floating-point numbers are too coarse for the log density that is asked of them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.placement.processes import to_host
from gspmd_mcmc.tree import path_str

# The spacing of floating-point numbers, in nats, from which a summand is too coarse for the Metropolis
# test. In float32 it is reached at 2^20.
COARSE = 0.1
MOST_ELEMENTS = 100_000  # a summand of more is apart already, and its elements are small beside it


def on_coarse_terms(target: Any, states: Any) -> str:
    """Say which summand of a log density is so large that its differences are lost; empty if none is.

    Parameters
    ----------
    target
        It says by ``single_floats`` which of its terms are plain numbers; by default all are.
    states
        A kernel's states of all chains, leaves [chains, ...]. A summand that does not depend on the
        position cancels exactly, however large it is.
    """
    plain = getattr(target, "single_floats", _all)
    for i, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(plain(states.terms))):
        if leaf.size > MOST_ELEMENTS:
            continue
        values = np.asarray(to_host(leaf))
        size = np.max(np.abs(values), initial=0, where=np.isfinite(values))
        spacing = np.spacing(values.dtype.type(size))
        if spacing > COARSE and _depends(target, plain, states.position)[i]:
            return (
                f"the log density's summand {path_str(path)} is about {size:.0e}, where {values.dtype} "
                f"numbers lie {spacing:.2g} apart: differences in log density smaller than that are "
                "lost, and draws may be wrong. Return summands that are not added up (a tuple, or an "
                "array of one per observation), use a Posterior with a Plate, leave constants out, or "
                "use float64."
            )
    return ""


def _all(terms: Any) -> Any:
    return terms


def _depends(target: Any, plain: Callable, positions: Any) -> list[bool]:
    """Tell of each plain term whether it depends on the position."""
    position = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
    jaxpr = jax.make_jaxpr(lambda position: plain(target.terms(position)))(position).jaxpr
    known = {id(v) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        if any(id(v) in known for v in eqn.invars):
            known |= {id(v) for v in eqn.outvars}
    return [id(v) in known for v in jaxpr.outvars]
