"""Matrix factorisation with Bernoulli entries: how it lies on a mesh, and the peers' log likelihoods.

Three forms, from what one writes down first to what one can do by hand:

- `textbook`: one expression.
- `whole`, which the peers have unless another is asked for: the biases are two more columns of the
  product, and softplus has its derivative written down; half of the time of the first.
- `streamed`: this package's own way, written by hand into a peer's log density: tiles of rows that
  stay in cache, made anew for the gradient, the movies repeated for each block (without which every
  tile would end in an all-reduce).

Momenta and metric as one vector, as is the peers' default, cost gathers: theirs are by leaves here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import movielens_data
from benchmarks.contenders.placing import place

Params = dict[str, jax.Array]

BY_ROWS = PartitionSpec("data")
# Each leaf of a position has a leading axis of chains; a user's latents lie with the user's row.
LAYOUT = {name: PartitionSpec(None, "data") if name in "Uu" else PartitionSpec() for name in "UVuv"}
TILE_ROWS = 151  # divides the rows of a device, of 1, 2 and 8 devices


def load(task, mesh: Mesh) -> tuple[jax.Array, Params]:
    """Return who watched what and the start, placed."""
    watched = movielens_data.load(task.data_dir)
    start = movielens_data.start_position(watched, task.chains)
    position = {
        name: jax.device_put(leaf, NamedSharding(mesh, LAYOUT[name])) for name, leaf in start.items()
    }
    return place(mesh, BY_ROWS, watched.shape, lambda index: watched[index]), position


def lay_out(mesh: Mesh, users: int, state: Any) -> Any:
    """Lay what has values for each user, after the axis of chains, with the users; the rest whole."""

    def lay(leaf):
        is_local = leaf.ndim > 1 and leaf.shape[1] % users == 0
        return jax.device_put(leaf, NamedSharding(mesh, LAYOUT["U" if is_local else "V"]))

    return jax.tree.map(lay, state)


def log_likelihood(task, blocks: int) -> Callable[[Params, jax.Array], jax.Array]:
    """Return ``log_likelihood(params, watched)`` of one chain, in the task's form, or `whole`."""
    if task.form == "textbook":
        return textbook
    return functools.partial(streamed, blocks) if task.form == "streamed" else whole


def textbook(params: Params, watched: jax.Array) -> jax.Array:
    """As one would write it down."""
    return jnp.sum(textbook_rows(params, watched))


def textbook_rows(params: Params, watched: jax.Array) -> jax.Array:
    """Return the terms of each row."""
    logits = params["U"] @ params["V"].T + params["u"][:, None] + params["v"]
    return jnp.sum(watched * logits - jax.nn.softplus(logits), axis=1)


def whole(params: Params, watched: jax.Array) -> jax.Array:
    """One expression, rearranged."""
    return _term(*with_biases(params), watched)


def streamed(blocks: int, params: Params, watched: jax.Array) -> jax.Array:
    """Tile by tile, each block of rows on its device; the backward pass makes a tile anew."""
    users, movies = with_biases(params)
    users, watched = (x.reshape(blocks, -1, TILE_ROWS, x.shape[-1]) for x in (users, watched))
    movies = jnp.broadcast_to(movies, (blocks, *movies.shape))

    @jax.checkpoint
    def tile(index, users, movies, watched):
        users, watched = (jax.lax.dynamic_index_in_dim(x, index, 1, False) for x in (users, watched))
        return jax.vmap(_term)(users, movies, watched)

    def add(total, index):
        return total + tile(index, users, movies, watched), None

    total, _ = jax.lax.scan(add, jnp.zeros(blocks), jnp.arange(users.shape[1]))
    return total.sum()


def with_biases(params: Params) -> tuple[jax.Array, jax.Array]:
    """Return users and movies with two more columns each, so that their product has the biases in."""
    u, v = params["u"][..., None], params["v"][..., None]
    users = jnp.concatenate([params["U"], u, jnp.ones_like(u)], axis=-1)
    return users, jnp.concatenate([params["V"], jnp.ones_like(v), v], axis=-1)


@jax.custom_jvp
def softplus(x: jax.Array) -> jax.Array:
    """Return log(1 + exp(x)), whose derivative does without it."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


softplus.defjvps(lambda tangent, _, x: jax.nn.sigmoid(x) * tangent)


def _term(users: jax.Array, movies: jax.Array, watched: jax.Array) -> jax.Array:
    logits = users @ movies.T
    return jnp.sum(watched * logits - softplus(logits))
