"""Rows of groups as peers have them: placed rows, and log likelihoods of all rows in two forms.

- `best`: rows are sorted by user, so the gradient of users is a sum over sorted segments; films, which
  cannot be sorted too, are a sum over segments as well.
- `textbook`: plain indexing, as one writes it first, on the same rows.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.sharding import Mesh, PartitionSpec

from benchmarks import groups_data
from benchmarks.contenders.placing import place, replicate

Params = dict[str, jax.Array]
COLUMNS = {"effect": ("user", "stars", "mean_of_film"), "ratings": ("user", "film", "stars")}
STARTS = {"effect": groups_data.effect_start, "ratings": groups_data.ratings_start}


def load(task, model: str, mesh: Mesh) -> tuple[Params, Params]:
    """Return the rows of a model, laid over the devices, and the start, whole on each."""
    rated = groups_data.load(task.data_dir)
    columns = {name: getattr(rated, name) for name in COLUMNS[model]}
    rows = {
        name: place(mesh, PartitionSpec("data"), x.shape, lambda index, x=x: x[index])
        for name, x in columns.items()
    }
    return rows, replicate(mesh, STARTS[model](rated, task.chains))


def log_likelihood(task, model: str) -> Callable[[Params, Params], jax.Array]:
    """Return ``log_likelihood(params, rows)``, in the task's form."""
    return partial(LIKELIHOODS[model], _index if task.form == "textbook" else _segments)


def effect(take: Callable, params: Params, rows: Params) -> jax.Array:
    """A random effect of users and a slope."""
    location = take(params["effect"], rows["user"], True) + params["slope"] * rows["mean_of_film"]
    return norm.logpdf(rows["stars"], location, groups_data.NOISE).sum()


def ratings(take: Callable, params: Params, rows: Params) -> jax.Array:
    """Biases and factors of users and films."""
    user, user_bias = (take(params[n], rows["user"], True) for n in ("user", "user_bias"))
    film, film_bias = (take(params[n], rows["film"], False) for n in ("film", "film_bias"))
    is_textbook = take is _index
    products = partial(jnp.einsum, "rk,rk->r") if is_textbook else groups_data.products
    location = user_bias + film_bias + products(user, film)
    return norm.logpdf(rows["stars"], location, groups_data.NOISE).sum()


LIKELIHOODS = {"effect": effect, "ratings": ratings}


def _index(table: jax.Array, index: jax.Array, is_sorted: bool) -> jax.Array:
    return table[index]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _segments(table: jax.Array, index: jax.Array, is_sorted: bool) -> jax.Array:
    """Rows of a table, whose gradient is a sum over segments."""
    return table.at[index].get(mode="promise_in_bounds", indices_are_sorted=is_sorted)


def _forward(table, index, is_sorted):
    return _segments(table, index, is_sorted), (index, table)


def _backward(is_sorted, residuals, grad):
    index, table = residuals
    sums = jax.ops.segment_sum(grad, index, len(table), is_sorted, mode="promise_in_bounds")
    return sums, None


_segments.defvjp(_forward, _backward)
