"""MovieLens 1M for the benchmark: who watched what, the common start, and a float64 reference."""

from pathlib import Path

import numpy as np

from benchmarks.data import movielens_data

DIMENSIONS = 20
START_SCALE = 0.1
BLOCK_ROWS = 604


def load(data_dir: str | Path) -> np.ndarray:
    """Return who watched what, uint8 [users, movies]: 1 where a user rated one of the rated movies.

    The folder is one of `benchmarks.data.folder_of`, simulated or real. Users and movies go by
    their numbers.
    """
    return movielens_data.load_movielens(data_dir, sizes=None).watched


def start_position(watched: np.ndarray, chains: int) -> dict[str, np.ndarray]:
    """Return the start that all contenders share, every leaf with a leading axis of chains.

    Embeddings are a tenth of their prior. A movie's bias is the log odds that a user watched it, a
    user's is the log odds that they watched a movie, less those of the whole matrix: with small
    embeddings that is near the biases' mode.
    """
    rng = np.random.default_rng(0)
    users, movies = watched.shape
    biases = {
        "u": _log_odds(watched.sum(1), movies) - _log_odds(watched.sum(), watched.size),
        "v": _log_odds(watched.sum(0), users),
    }
    shapes = {"U": (chains, users, DIMENSIONS), "V": (chains, movies, DIMENSIONS)}
    start = {name: START_SCALE * rng.standard_normal(shape) for name, shape in shapes.items()}
    start |= {name: np.tile(bias, (chains, 1)) for name, bias in biases.items()}
    return {name: leaf.astype(np.float32) for name, leaf in start.items()}


def reference(
    watched: np.ndarray, position: dict[str, np.ndarray]
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the log density at one position and its gradients, in float64."""
    at = {name: leaf.astype(np.float64) for name, leaf in position.items()}
    size = sum(leaf.size for leaf in at.values())
    total = -0.5 * sum((leaf**2).sum() for leaf in at.values()) - 0.5 * size * np.log(2 * np.pi)
    grads = {name: -leaf for name, leaf in at.items()}
    for first in range(0, len(watched), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        logits = at["U"][rows] @ at["V"].T + at["u"][rows, None] + at["v"]
        total += (watched[rows] * logits - np.logaddexp(0, logits)).sum()
        residuals = watched[rows] - 1 / (1 + np.exp(-logits))
        grads["U"][rows] += residuals @ at["V"]
        grads["u"][rows] += residuals.sum(1)
        grads["V"] += residuals.T @ at["U"][rows]
        grads["v"] += residuals.sum(0)
    return float(total), grads


def _log_odds(count: np.ndarray, of: int) -> np.ndarray:
    # Half a count more of each, so that what everybody, or nobody, watched has finite odds.
    return np.log((count + 0.5) / (of - count + 0.5))
