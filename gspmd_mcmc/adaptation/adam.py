"""Adam without momentum, of one number: steps of a gradient in units of its own recent size.

References
----------
Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR (2015); with beta1 = 0 and
beta2 = 0.95 as Hoffman, Radul and Sountsov (AISTATS 2021) use it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from gspmd_mcmc.tree import pytree

DECAY = 0.95
# A gradient is clipped to this many times its recent size: a single outlier, from chains that have not
# found the posterior yet, would otherwise make hundreds of later steps tiny.
MOST = 10.0
# Steps are rounded to multiples of 1/64, as acceptance rates are for the step size: a mesh sums in
# another order than one device, and rounding errors would enter the lengths of all later trajectories.
RESOLUTION = 64


@pytree
@dataclass(frozen=True, eq=False)
class AdamState:
    """The number of gradients, and the decaying average of their squares; scalars."""

    num_updates: jax.Array
    square_average: jax.Array


def init(like: jax.Array) -> AdamState:
    """Return the state before any gradient, in the dtype of a scalar."""
    return AdamState(num_updates=jnp.zeros_like(like), square_average=jnp.zeros_like(like))


def update(state: AdamState, gradient: jax.Array) -> tuple[AdamState, jax.Array]:
    """Return the state, and the step uphill, to be multiplied by a learning rate."""
    size = _size(state)
    largest = float(jnp.finfo(gradient.dtype).max) ** 0.49  # its square is finite
    most = jnp.where(size > 0, MOST * size, largest)
    gradient = jnp.clip(gradient, -most, most)
    average = DECAY * state.square_average + (1 - DECAY) * gradient**2
    state = AdamState(num_updates=state.num_updates + 1, square_average=average)
    size = _size(state)
    step = jnp.where(size > 0, gradient / jnp.where(size > 0, size, 1), 0)
    return state, jnp.round(step * RESOLUTION) / RESOLUTION


def _size(state: AdamState) -> jax.Array:
    """Return the recent size of gradients, corrected for the start of the average at zero."""
    return jnp.sqrt(state.square_average / (1 - DECAY ** jnp.maximum(state.num_updates, 1)))
