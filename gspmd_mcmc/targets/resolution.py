"""Where floating-point numbers are too coarse for a log density, or for a bijection near its edge."""

import math
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, tree_leaves_with_path

from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.jax_private import open_program
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.targets.bijections import ByModel, bijection_at
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, path_str

# The spacing of floating-point numbers, in nats, from which a summand is too coarse for the Metropolis
# test. In float32 it is reached at 2^20.
COARSE = 0.1
MOST_ELEMENTS = 100_000  # a summand of more is apart already, and its elements are small beside it

# Draws are too near the edge of a support if the bijection is constant, by rounding, within so far of
# the unconstrained value. Of Beta(0.1, 0.1) in float32 3 % are, and a tenth of its mass lies beyond.
NEAR = 2.0
MOST_ROUNDED = 0.01  # share of draws
FEW = 5  # draws that may be there by chance
LAST_DRAWS = 2000  # of all chains together
MOST_NUMBERS = 5_000  # of a latent: a larger one has too many numbers to examine
FAR = 1e-4  # of an edge, relative to numbers beside it: float32 rounds 1,000 times finer


def warn_of_narrow_terms(name: str, terms: PyTree) -> None:
    """Warn where terms of bfloat16 or float16 are returned: each is rounded before it is added.

    ``terms`` are arrays or their shapes, those that ``name`` returns.
    """
    for leaf in jax.tree.leaves(terms):
        if jnp.finfo(leaf.dtype).bits < 32:
            warnings.warn(
                f"{name}: it returns terms of {leaf.dtype}, each of which is right to "
                f"{jnp.finfo(leaf.dtype).precision} digits at most. They are added up in float32, but "
                "what is sampled is the density of rounded terms. Convert what a term is computed of, "
                "such as logits.astype(jnp.float32); products before may stay narrow",
                SamplingWarning,
                stacklevel=2,
            )
            return


def on_coarse_terms(target: Target, states: Any) -> str:
    """Say which summand of a log density is so large that its differences are lost; empty if none is.

    Parameters
    ----------
    target
        It says by ``single_floats`` which of its terms are plain numbers; by default all are.
    states
        A kernel's states of all chains, leaves [chains, ...]. A summand that does not depend on the
        position cancels exactly, however large it is.
    """
    for i, (path, leaf) in enumerate(tree_leaves_with_path(target.single_floats(states.terms))):
        if leaf.size > MOST_ELEMENTS:
            continue
        values = np.asarray(to_host(leaf))
        size = np.max(np.abs(values), initial=0, where=np.isfinite(values))
        spacing = np.spacing(values.dtype.type(size))
        if spacing > COARSE and _depends(target, states.position)[i]:
            return (
                f"the log density's summand {path_str(path)} is about {size:.0e}, where {values.dtype} "
                f"numbers lie {spacing:.2g} apart: differences in log density smaller than that are "
                "lost, and draws may be wrong. Return summands that are not added up (a tuple, or an "
                "array of one per observation), use a Posterior with a Plate, leave constants out, or "
                "use float64."
            )
    return ""


def _depends(target: Target, positions: Any) -> list[bool]:
    """Return for each plain term whether it depends on the position."""
    position = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), positions)
    jaxpr = open_program(jax.make_jaxpr(lambda x: target.single_floats(target.terms(x)))(position))
    known = {id(v) for v in jaxpr.invars}
    for eqn in jaxpr.eqns:
        if any(id(v) in known for v in eqn.invars):
            known |= {id(v) for v in eqn.outvars}
    return [id(v) in known for v in jaxpr.outvars]


def on_rounded_bijections(target: Target, values: PyTree) -> str:
    """Say which latent's draws lie where the bijection of its support is rounded; empty if none do.

    Parameters
    ----------
    target
        It says by ``bijections`` which latents have one.
    values
        Draws of constrained values by the paths of the latents, leaves [chains, draws, ...]. The last
        ones are examined, and none of a latent of over 5,000 numbers.
    """
    near: dict[KeyPath, np.ndarray] = {}
    most = 0.0
    for path, leaf in tree_leaves_with_path(values) if target.bijections is not None else ():
        bijection = bijection_at(target.bijections, path)
        if bijection is None or isinstance(bijection, ByModel):
            continue
        if 0 < math.prod(leaf.shape[2:]) <= MOST_NUMBERS:
            last = np.asarray(to_host(leaf[:, -max(1, LAST_DRAWS // len(leaf)) :]))
            most = max(MOST_ROUNDED, FEW / math.prod(last.shape[:2]))
            if _may_be_near(bijection, last):
                near[path] = last
    if not near:
        return ""
    shares = to_host(_shares(target, tuple(near), list(near.values())))
    share, path = max(zip(map(float, shares), near, strict=True), key=lambda pair: pair[0])
    if share <= most:
        return ""
    return (
        f"{share:.0%} of the draws of {path_str(path)} lie at the edge of its support, "
        f"where {near[path].dtype} rounds what its bijection returns: what is nearer to the edge is "
        "missing, and draws may be wrong. Use float64 (jax.config.update('jax_enable_x64', True)), or "
        "a prior with less mass at the edge."
    )


def _may_be_near(bijection: Any, values: np.ndarray) -> bool:
    """Tell whether draws are near the bounds of a support; always, of one that has no bounds."""
    codomain = getattr(bijection, "codomain", None)
    bounds = [getattr(codomain, name, None) for name in ("lower_bound", "upper_bound")]
    bounds = [np.asarray(bound) for bound in bounds if bound is not None]
    return not bounds or any(
        np.any(np.abs(values - bound) <= FAR * np.maximum(np.abs(bound), FAR)) for bound in bounds
    )


@partial(jax.jit, static_argnames="paths")
def _shares(target: Target, paths: tuple[KeyPath, ...], values: list[jax.Array]) -> list[jax.Array]:
    """Return of each leaf the share of rounded draws of the unconstrained number that has most."""

    def largest(path: KeyPath, x: jax.Array) -> jax.Array:
        is_rounded = jax.vmap(partial(_is_rounded, bijection_at(target.bijections, path)))
        shares = jnp.mean(is_rounded(x.reshape(-1, *x.shape[2:])), axis=0)
        return jnp.max(shares, initial=0)  # a simplex of one component has no unconstrained number

    with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
        return [largest(path, x) for path, x in zip(paths, values, strict=True)]


def _is_rounded(bijection: Any, value: jax.Array) -> jax.Array:
    """Return for each unconstrained number whether the value, near there, does not depend on it."""
    x = bijection.inv(value)
    # Not all ones: the elements of a simplex have derivatives that add up to 0.
    weights = jnp.cos(1 + jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
    slopes = [jax.vjp(bijection, x + by)[1](weights)[0] for by in (-NEAR, 0.0, NEAR)]
    is_flat = (slopes[0] == 0) | (slopes[1] == 0) | (slopes[2] == 0)
    return is_flat | ~jnp.isfinite(x)
