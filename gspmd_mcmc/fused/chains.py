"""Kernels that read the data once for several chains."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def of_chains_together(of_chains: Callable, most: int) -> Callable[[Any, Any, tuple, jax.Array], tuple]:
    """Return the gradients of one chain, which under ``vmap`` are computed for several at a time.

    Parameters
    ----------
    of_chains
        ``of_chains(x, labels, parameters, cotangent)``, where parameters and cotangents begin with an
        axis of chains, as its results do. Data are arrays, or trees of them.
    most
        Of how many chains it is called at most: of equal parts of all.
    """

    def of_one(x, labels, *chain):
        each = jax.tree.map(lambda a: a[None], chain)
        return jax.tree.map(lambda a: a[0], of_chains(x, labels, *each))

    def of_many(chains, is_batched, x, labels, *each):
        of_data, of_each = is_batched[:2], tuple(is_batched[2:])
        each = jax.tree.map(
            lambda a, is_batched: a if is_batched else jnp.broadcast_to(a, (chains, *a.shape)),
            *(each, of_each),
        )
        if any(jax.tree.leaves(of_data)):  # chains that have rows of their own
            axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, of_data)
            return batched(jax.vmap(of_one, (*axes, 0, 0))(x, labels, *each))
        together = next(n for n in range(max(1, min(most, chains)), 0, -1) if chains % n == 0)
        parts = jax.tree.map(lambda a: a.reshape(-1, together, *a.shape[1:]), each)
        found = jax.vmap(of_chains, (None, None, 0, 0))(x, labels, *parts)
        return batched(jax.tree.map(lambda a: a.reshape(chains, *a.shape[2:]), found))

    def batched(found):
        return found, jax.tree.map(lambda _: True, found)

    of_chain = jax.custom_batching.custom_vmap(of_one)
    of_chain.def_vmap(of_many)
    return of_chain
