"""The model's own program: HMC in plain JAX, its gradient written by hand, for this model alone.

Each device takes its rows in tiles, each chain by itself, and computes sigmoids only; one sum over
devices of the movies' gradient ends it. All chains of a tile in one batched product are a tenth slower
than one after the other, and residuals as the left factor of the movies' gradient a fifth. The value is
computed at a trajectory's ends, row by row, and compared by rows.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.sharding import Mesh, PartitionSpec

from benchmarks.contenders import factorisation
from benchmarks.contenders.factorisation import BY_ROWS, LAYOUT, Params, with_biases
from benchmarks.contenders.hmc_program import HmcProgram
from benchmarks.contenders.placing import replicate, row_mesh

TILES = (151, 302, 604, 755)
TRIALS = 3


def movielens(task) -> "Handwritten":
    """Matrix factorisation."""
    mesh = row_mesh(task.devices)
    return Handwritten(*factorisation.load(task, mesh), mesh, task)


class Handwritten:
    """An `HmcProgram` of the fastest of several tile sizes, found when it is built."""

    def __init__(self, watched: jax.Array, position: Params, mesh: Mesh, task):
        self.watched, self.position, self.mesh, self.task = watched, position, mesh, task

    def build(self) -> dict:
        """Find the tile size and compile the transition."""
        rows = self.watched.shape[0] // self.mesh.size
        tile = min(tiles_of(rows), key=self._gradient_s)
        self.program = self._program(tile)
        return self.program.build() | {"forms": {"tile": f"{tile} rows"}}

    def run(self, calls: int) -> dict:
        """Make ``calls`` transitions."""
        return self.program.run(calls)

    def check(self) -> dict:
        """Return the log density and its gradient at the start."""
        return self._program(TILES[0]).check()

    def _gradient_s(self, tile: int) -> float:
        compiled = self._gradient(tile).lower(self.position, self.watched).compile()
        return fastest_s(lambda: compiled(self.position, self.watched))

    def _gradient(self, tile: int) -> Callable:
        return self._over_rows(functools.partial(gradient, tile), (LAYOUT, BY_ROWS), LAYOUT)

    def _over_rows(self, function: Callable, in_specs: tuple, out_specs) -> Callable:
        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.jit(jax.shard_map(function, mesh=self.mesh, **specs, check_vma=False))

    def _program(self, tile: int) -> HmcProgram:
        whole, by_users = PartitionSpec(), LAYOUT["U"]
        evaluate = functools.partial(row_terms, tile)
        terms = self._over_rows(evaluate, (LAYOUT, BY_ROWS), by_users)(self.position, self.watched)
        grad = self._gradient(tile)(self.position, self.watched)
        rest = replicate(self.mesh, (jax.random.key(1), jnp.zeros(self.task.chains)))
        carry = (rest[0], self.position, grad, terms, rest[1])
        layout = (whole, LAYOUT, LAYOUT, by_users, whole)
        step = functools.partial(transition, tile, self.task.leapfrogs, self.task.step_size)
        return HmcProgram(
            transition=self._over_rows(step, (layout, BY_ROWS), layout),
            carry=carry,
            data=(self.watched,),
            units=self.task.units,
            acceptance=lambda carry: carry[-1],
            evaluate=lambda: (_log_density(self.position, terms), grad),
            devices=self.task.devices,
        )


def transition(tile: int, leapfrogs: int, step_size: float, carry: tuple, watched: jax.Array) -> tuple:
    """One HMC step of all chains, as each device runs it on its rows."""
    rng_key, position, grad, terms, _ = carry
    rng_key, momentum_key, accept_key = jax.random.split(rng_key, 3)
    momentum = _momentum(momentum_key, position)

    def leapfrog(_, point):
        position, momentum, grad = point
        momentum = _axpy(step_size / 2, grad, momentum)
        position = _axpy(step_size, momentum, position)
        grad = gradient(tile, position, watched)
        return position, _axpy(step_size / 2, grad, momentum), grad

    new_position, new_momentum, new_grad = jax.lax.fori_loop(
        0, leapfrogs, leapfrog, (position, momentum, grad)
    )
    new_terms = row_terms(tile, new_position, watched)
    # Half the difference of squares of the momenta, and of the movies' latents, that of a normal.
    kinetic = {name: _half_squares(new_momentum[name], momentum[name]) for name in position}
    prior = {name: _half_squares(new_position[name], position[name]) for name in "Vv"}
    local = kinetic["U"] + kinetic["u"] - jnp.sum(new_terms - terms, axis=1)
    energy_error = jax.lax.psum(local, "data") + sum(kinetic[name] + prior[name] for name in "Vv")
    is_accepted = jnp.log(jax.random.uniform(accept_key, energy_error.shape)) < -energy_error

    def choose(new, old):
        return jnp.where(is_accepted.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    new, old = (new_position, new_grad, new_terms), (position, grad, terms)
    return rng_key, *jax.tree.map(choose, new, old), jnp.exp(jnp.minimum(0, -energy_error))


def gradient(tile: int, position: Params, watched: jax.Array) -> Params:
    """Gradient of the log density; a device's rows, and the sum over devices for the movies."""

    def residuals(logits, first):
        return jax.lax.dynamic_slice_in_dim(watched, first, tile) - jax.nn.sigmoid(logits)

    by_user, by_movie = sweep(tile, *with_biases(position), residuals)
    by_movie = jax.lax.psum(by_movie, "data").swapaxes(1, 2)
    likelihood = {
        "U": by_user[..., :-2],
        "V": by_movie[..., :-2],
        "u": by_user[..., -2],
        "v": by_movie[..., -1],
    }
    return jax.tree.map(jnp.subtract, likelihood, position)


def sweep(
    tile: int, users: jax.Array, movies: jax.Array, residuals: Callable
) -> tuple[jax.Array, jax.Array]:
    """Take the rows in tiles: products, what ``residuals(logits, first_row)`` makes of them, products.

    Users and movies are [chains, rows, columns]; the sums by user come back so, those by movie
    [chains, columns, rows].
    """
    chains, rows, columns = users.shape

    def body(total, first):
        tile_users = jax.lax.dynamic_slice_in_dim(users, first, tile, axis=1)
        pairs = list(zip(tile_users, movies, strict=True))
        residual = [residuals(user @ movie.T, first) for user, movie in pairs]
        by_user = [r @ movie for r, (_, movie) in zip(residual, pairs, strict=True)]
        by_movie = [user.T @ r for r, (user, _) in zip(residual, pairs, strict=True)]
        return total + jnp.stack(by_movie), jnp.stack(by_user)

    zero = jnp.zeros((chains, columns, movies.shape[1]))
    by_movie, by_user = jax.lax.scan(body, zero, jnp.arange(0, rows, tile))
    return by_user.swapaxes(0, 1).reshape(users.shape), by_movie


def row_terms(tile: int, position: Params, watched: jax.Array) -> jax.Array:
    """Return each user's terms of the log density, up to a constant, [chains, rows]."""
    users, movies = with_biases(position)

    def body(_, first):
        logits = jax.lax.dynamic_slice_in_dim(users, first, tile, axis=1) @ movies.swapaxes(1, 2)
        rows = jax.lax.dynamic_slice_in_dim(watched, first, tile)
        return None, jnp.sum(rows * logits - factorisation.softplus(logits), axis=2)

    _, terms = jax.lax.scan(body, None, jnp.arange(0, watched.shape[0], tile))
    prior = -0.5 * (jnp.sum(position["U"] ** 2, axis=2) + position["u"] ** 2)
    return terms.swapaxes(0, 1).reshape(prior.shape) + prior


def tiles_of(rows: int) -> list[int]:
    """Return the tile sizes that divide a device's rows."""
    return [tile for tile in TILES if rows % tile == 0]


def fastest_s(work: Callable) -> float:
    """Return the least seconds that a piece of work takes, after a first time."""

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(work())
        return time.perf_counter() - start

    seconds()
    return min(seconds() for _ in range(TRIALS))


def _momentum(rng_key: jax.Array, position: Params) -> Params:
    """Draw standard normals: the devices' own for users, the same on all devices for movies."""
    keys = dict(zip(position, jax.random.split(rng_key, len(position)), strict=True))
    device = jax.lax.axis_index("data")
    keys |= {name: jax.random.fold_in(keys[name], device) for name in "Uu"}
    return {name: jax.random.normal(keys[name], leaf.shape) for name, leaf in position.items()}


def _axpy(a: float, x: Params, y: Params) -> Params:
    return jax.tree.map(lambda xi, yi: a * xi + yi, x, y)


def _half_squares(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return half of the sum of new squared less old squared, [chains]."""
    return 0.5 * jnp.sum((new - old) * (new + old), axis=range(1, new.ndim))


def _log_density(position: Params, terms: jax.Array) -> jax.Array:
    """Add what the rows' terms leave out: the movies' prior and the constant of the users'."""
    movies = sum(norm.logpdf(position[name]).reshape(len(terms), -1).sum(1) for name in "Vv")
    per_user = norm.logpdf(0.0) * (position["U"].shape[-1] + 1)
    return movies + jnp.sum(terms + per_user, axis=1)
