"""The worst numbers of each leaf's statistics, found where the statistics lie: scalars are sent."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# What is judged, and the sign that makes the worst the largest. A mean is bad if it is not finite.
SIGNS = {
    **{"nested_rhat": 1.0, "rhat": 1.0, "rhat_beyond_noise": 1.0},
    **{"ess_bulk": -1.0, "ess_tail": -1.0, "spacings": -1.0, "mean": 1.0},
}


class Extreme(NamedTuple):
    """The worst number of a leaf by one statistic.

    Attributes
    ----------
    index
        Where it is in the leaf.
    value
        The statistic there.
    count
        How many numbers of the leaf are beyond the statistic's limit.
    found
        All statistics of the number, by name.
    """

    index: tuple[int, ...]
    value: float
    count: int
    found: dict[str, float]


def extreme(found: dict[str, Any], name: str, limit: float) -> Extreme:
    """Find the worst number of a leaf.

    Parameters
    ----------
    found
        Name of a statistic to array [...], of one leaf with one number or more.
    name
        The statistic to judge by, one of `SIGNS`.
    limit
        Beyond it a number is counted; NaN is not.
    """
    place, count, of_worst = _extreme(found, name, limit)
    values = {key: float(x) for key, x in of_worst.items()}
    index = np.unravel_index(int(place), np.shape(found[name]))
    return Extreme(tuple(map(int, index)), values[name], int(count), values)


@functools.partial(jax.jit, static_argnames="name")
def _extreme(found: dict[str, jax.Array], name: str, limit: jax.Array):
    badness = _badness(found, name)
    num_beyond = jnp.sum(is_beyond(found[name], name, limit))
    place = _places(badness.shape)
    worst = jnp.min(jnp.where(badness == badness.max(), place, badness.size))
    # A sum over all but one, not an index: nothing but a scalar leaves the device that holds it.
    of_worst = {key: jnp.sum(jnp.where(place == worst, x, 0)) for key, x in found.items()}
    return worst, num_beyond, of_worst


def is_beyond(value: Any, name: str, limit: Any) -> Any:
    """Tell whether a statistic's value, a number or an array, is beyond its limit."""
    if name == "mean":
        return (abs(value) < float("inf")) ^ True  # NaN is not finite either
    return SIGNS[name] * value > SIGNS[name] * limit


def _badness(found: dict[str, jax.Array], name: str) -> jax.Array:
    """Return a statistic such that the worst is largest: NaN, but of draws that are all equal."""
    if name == "mean":
        return jnp.where(is_beyond(found[name], name, 0), jnp.inf, -jnp.inf)
    without = jnp.where(found["sd"] == 0, -jnp.inf, jnp.inf)
    value = SIGNS[name] * jnp.asarray(found[name])
    return jnp.where(jnp.isnan(value), without, value)


def _places(shape: tuple[int, ...]) -> jax.Array:
    """Place of each element in the order of rows."""
    place = jnp.zeros(shape, int)
    for axis, length in enumerate(shape):
        place = place * length + jax.lax.broadcasted_iota(place.dtype, shape, axis)
    return place
