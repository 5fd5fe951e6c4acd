"""Latents that move no log density: read in part, or times zero, they are sampled as flat."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.targets.local import zero_pad
from gspmd_mcmc.tree import PyTree, path_str

# A wall (a box, a constraint) is as flat within; moves so long, either way, meet any.
REACHES = (0.0, 1e1, 1e2, 1e4, 1e6, 1e8)


def warn_of_flat_latents(target: Any, states: Any, layout: Layout) -> None:
    """Warn of elements of the position that nothing gives a density.

    Their gradient is exactly 0 where every chain starts, which costs nothing to see; and wherever they
    are moved the terms of the log density stay the same, to the bit. The first alone has other causes:
    a unit that is dead there, the middle of a box, a start at a mode.
    """
    flags, counts = _without_slope(target, states.log_density_grad, layout=layout)
    num_flat, num_real = np.asarray(to_host(counts))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(flags)
    for i in np.flatnonzero(num_flat):
        only = [x if j == i else jnp.zeros_like(x) for j, (_, x) in enumerate(leaves)]
        if to_host(_is_same_anywhere(target, states.position, treedef.unflatten(only), layout=layout)):
            warnings.warn(
                f"position {path_str(leaves[i][0])}: the log density is the same whatever "
                f"{num_flat[i]} of its {num_real[i]} numbers are, so that chains wander off in them "
                "for ever. Give them a prior, or leave them out of the position",
                SamplingWarning,
                stacklevel=4,
            )


@partial(jax.jit, static_argnames="layout")
def _without_slope(target: Any, grads: PyTree, *, layout: Layout) -> tuple[PyTree, jax.Array]:
    """Tell of each element whether its gradient is 0 in all chains.

    Of each leaf also how many there are, and how many elements; shape [2, leaves]. Pad is none.
    """
    real = layout.vmap(zero_pad, (None, 0))(target, jax.tree.map(jnp.ones_like, grads))
    real = jax.tree.map(lambda r: jnp.all(r != 0, axis=0), real)
    flags = jax.tree.map(lambda x, r: jnp.all(x == 0, axis=0) & r, grads, real)
    return flags, jnp.stack([jnp.stack(list(map(jnp.sum, jax.tree.leaves(x)))) for x in (flags, real)])


@partial(jax.jit, static_argnames="layout")
def _is_same_anywhere(target: Any, positions: PyTree, flags: PyTree, *, layout: Layout) -> jax.Array:
    """Tell whether all terms, in all chains, are the same to the bit where elements are moved."""

    def move(x: jax.Array, flag: jax.Array, reach: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(0), x.shape, x.dtype)
        return jnp.where(flag[None], x + reach.astype(x.dtype) * noise, x)

    def terms_at(reach: jax.Array) -> PyTree:
        moved = jax.tree.map(lambda x, flag: move(x, flag, reach), positions, flags)
        return layout.vmap(lambda target, x: target.terms(x), (None, 0))(target, moved)

    terms = jax.lax.map(terms_at, jnp.asarray(REACHES))
    return jnp.all(jnp.stack([jnp.all(x[1:] == x[:1]) for x in jax.tree.leaves(terms)]))
