"""The mesh axes that maps over chains lie over, told to the functions that are traced inside them."""

from collections.abc import Callable
from contextvars import ContextVar

import jax

from gspmd_mcmc import jax_private

# JAX 0.9 reuses, inside a map, the trace that a jitted function has from outside. 0.10.2 does not; the
# versions between were not tried.
TRACES_ARE_APART = jax.__version_info__ >= (0, 10, 2)
_even: ContextVar[frozenset[str]] = ContextVar("even", default=frozenset())


def vmap_over(axis: str | None, function: Callable, in_axes: tuple) -> Callable:
    """Map a function over chains that lie over a mesh axis, equally many on each device."""
    if axis is None:
        return jax.vmap(function, in_axes)

    def of_one(*args):
        token = _even.set(_even.get() | {axis})
        try:
            return function(*args)
        finally:
            _even.reset(token)

    return jax.vmap(of_one, in_axes, spmd_axis_name=axis)


def mapped_axes() -> frozenset[str] | None:
    """Return the mesh axes of all maps around the function that is being traced.

    None if that is of no use: an axis of a user's own map may have uneven chains, the caller may be
    inside `jax.shard_map`, and some versions of JAX, whose internals have the axes, do not tell them.
    """
    get_axis_env = jax_private.found("get_axis_env") if TRACES_ARE_APART else None
    axes = getattr(get_axis_env(), "spmd_axis_names", None) if get_axis_env else None
    if axes is None:
        return None
    is_cut = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return None if is_cut or not axes <= _even.get() else axes
