"""Ratings in groups of unlike size for the benchmark: rows, starts, references (NumPy alone)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.data import movielens_data

DIMENSIONS = 8
START_SCALE = 0.1
NOISE = 0.9
DIVISOR = 8  # of the rows: the peers' rows must divide 8 devices


@dataclass(frozen=True)
class Rated:
    """MovieLens' ratings, sorted by user and film.

    Attributes
    ----------
    user, film
        Numbers from 0, int32, shape [rows].
    stars
        Stars less their mean, float32, shape [rows].
    mean_of_film
        Mean of the stars of the row's film, a covariate, float32, shape [rows].
    """

    user: np.ndarray
    film: np.ndarray
    stars: np.ndarray
    mean_of_film: np.ndarray

    @property
    def users(self) -> int:
        return int(self.user.max()) + 1

    @property
    def films(self) -> int:
        return int(self.film.max()) + 1


def load(data_dir: str | Path) -> Rated:
    """Read the ratings of a folder, less up to seven rows that 8 devices would not divide."""
    rated = movielens_data.load_ratings(data_dir, sizes=None)
    num_rows = len(rated.stars) // DIVISOR * DIVISOR
    columns = (rated.user[:num_rows], rated.film[:num_rows])
    user, film = (np.unique(x, return_inverse=True)[1].astype(np.int32) for x in columns)
    order = np.lexsort((film, user))
    user, film, stars = user[order], film[order], rated.stars[order].astype(np.float64)
    stars -= stars.mean()
    mean_of_film = (np.bincount(film, stars) / np.bincount(film))[film]
    return Rated(user, film, stars.astype(np.float32), mean_of_film.astype(np.float32))


def products(user, film):
    """Inner products of the factors of rows, [rows]; XLA's sums along short rows are slow on CPUs."""
    return (user * film) @ np.ones(DIMENSIONS, np.float32)


def ratings_start(rated: Rated, chains: int) -> dict[str, np.ndarray]:
    """Return the start of all contenders; leaves have an axis of chains if there are several."""
    return _start(ratings_shapes(rated.users, rated.films), chains)


def ratings_shapes(users: int, films: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of factors and biases."""
    factors = {"user": (users, DIMENSIONS), "film": (films, DIMENSIONS)}
    return factors | {"user_bias": (users,), "film_bias": (films,)}


def effect_start(rated: Rated, chains: int) -> dict[str, np.ndarray]:
    """Return the start of all contenders; leaves have an axis of chains if there are several."""
    return _start({"effect": (rated.users,), "slope": (1,)}, chains)


def _start(shapes: dict[str, tuple], chains: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    lead = (chains,) if chains > 1 else ()
    drawn = {name: rng.standard_normal((*lead, *shape)) for name, shape in shapes.items()}
    return {name: (START_SCALE * x).astype(np.float32) for name, x in drawn.items()}


def ratings_reference(rated: Rated, at: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """Return the log density at one position and its gradients, in float64."""
    at = {name: leaf.astype(np.float64) for name, leaf in at.items()}
    user, film = at["user"][rated.user], at["film"][rated.film]
    biases = at["user_bias"][rated.user] + at["film_bias"][rated.film]
    residual = rated.stars - biases - np.einsum("rk,rk->r", user, film)
    tells = residual[:, None] / NOISE**2
    of_rows = {
        "user": _summed(tells * film, rated.user, rated.users),
        "film": _summed(tells * user, rated.film, rated.films),
        "user_bias": _summed(tells, rated.user, rated.users)[:, 0],
        "film_bias": _summed(tells, rated.film, rated.films)[:, 0],
    }
    log_prior = sum(_log_normal(leaf, 1) for leaf in at.values())
    return log_prior + _log_normal(residual, NOISE), {n: of_rows[n] - x for n, x in at.items()}


def effect_reference(rated: Rated, at: dict[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
    """Return the log density at one position and its gradients, in float64."""
    effect, slope = (at[name].astype(np.float64) for name in ("effect", "slope"))
    x = rated.mean_of_film.astype(np.float64)
    residual = rated.stars - effect[rated.user] - slope * x
    grads = {
        "effect": np.bincount(rated.user, residual, minlength=rated.users) / NOISE**2 - effect,
        "slope": (residual @ x) / NOISE**2 - slope,
    }
    return _log_normal(effect, 1) + _log_normal(slope, 1) + _log_normal(residual, NOISE), grads


def _summed(rows: np.ndarray, number: np.ndarray, size: int) -> np.ndarray:
    return np.stack([np.bincount(number, column, minlength=size) for column in rows.T], axis=1)


def _log_normal(x: np.ndarray, sd: float) -> float:
    return float(-0.5 * np.sum((x / sd) ** 2) - x.size * (np.log(sd) + 0.5 * np.log(2 * np.pi)))
