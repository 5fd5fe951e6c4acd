"""The bijections that belong to the supports of NumPyro's and TFP's distributions."""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc.targets.bijections import ByModel
from gspmd_mcmc.tree import is_traced


@dataclass(frozen=True)
class _OfTFP:
    """A bijector of TFP in NumPyro's terms; ``event_ndims`` axes are of a value's event."""

    bijector: Any
    event_ndims: int

    def __call__(self, x: Any) -> Any:
        return self.bijector.forward(x)

    def log_abs_det_jacobian(self, x: Any, y: Any) -> Any:
        return self.bijector.forward_log_det_jacobian(
            x, event_ndims=self.bijector.inverse_event_ndims(self.event_ndims)
        )

    def inv(self, y: Any) -> Any:
        return self.bijector.inverse(y)

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.bijector.inverse_event_shape(shape))


def is_of_tfp(distribution: Any) -> bool:
    """Tell whether a distribution tells its support as TFP's do."""
    return hasattr(distribution, "experimental_default_event_space_bijector")


def is_of_numpyro(distribution: Any) -> bool:
    """Tell whether a distribution is NumPyro's, or a user's that derives from one."""
    return any(cls.__module__.startswith("numpyro.") for cls in type(distribution).__mro__)


def bijection_of(what: str, distribution: Any) -> Any:
    """Return the bijection onto a distribution's support, as NumPyro or TFP know it; None if neither.

    Raises
    ------
    ValueError
        If it is TFP's and has none; the message begins with ``what``.
    """
    if not is_of_tfp(distribution) and not is_of_numpyro(distribution):
        return None
    with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
        if not is_of_tfp(distribution):
            return importlib.import_module("numpyro.distributions").biject_to(distribution.support)
        bijector = distribution.experimental_default_event_space_bijector()
    if bijector is None:
        raise ValueError(
            f"{what}: {type(distribution).__name__} has no default event space bijector, so its "
            "support is not known. Sample a latent on the whole real line, and transform it in the "
            "model, or observe it; if the support is the whole real line, a class of your own with its "
            "sample and log_prob says so"
        )
    return _OfTFP(bijector, len(tuple(distribution.event_shape)))


def is_tree(thing: Any) -> bool:
    """Tell whether a support or a bijection is a pytree; those that NumPyro makes of TFP's are none."""
    try:
        jax.tree.leaves(thing)
    except (TypeError, ValueError):
        return False
    return True


def bijection_for(
    name: str, what: str, distribution: Any, shape: tuple[int, ...]
) -> tuple[Any, tuple[int, ...]]:
    """Return the bijection that a posterior keeps for a latent, and its unconstrained shape.

    That is `ByModel` where the support depends on what a program computes; TFP's objects too are asked
    each time, as they need not be pytrees.
    """
    support = distribution.support if is_of_numpyro(distribution) else None
    is_known = is_tree(support) and not any(map(is_traced, jax.tree.leaves(support)))
    is_known = is_known and support is not None
    if is_known:
        with jax.ensure_compile_time_eval():  # arrays, where a model is being traced
            bijection = bijection_of(what, distribution)
        return bijection, tuple(bijection.inverse_shape(shape))
    bijection = bijection_of(what, distribution)
    if bijection is None:
        return None, shape
    return ByModel(name), tuple(bijection.inverse_shape(shape))


def constrained(bijection: Any, x: jax.Array) -> jax.Array:
    """Return the constrained value; the value itself where there is no bijection."""
    with jax.numpy_rank_promotion("allow"):
        return x if bijection is None else jnp.asarray(bijection(x))


def unconstrained(what: str, distribution: Any, y: jax.Array) -> jax.Array:
    """Return the unconstrained value of a draw."""
    bijection = bijection_of(what, distribution)
    with jax.numpy_rank_promotion("allow"):
        return y if bijection is None else jnp.asarray(bijection.inv(y))


def log_jacobian_of(bijection: Any, x: jax.Array, y: jax.Array, ndim: int) -> jax.Array:
    """Log Jacobian as an array of ``ndim`` axes, those of the log probability of ``y``."""
    with jax.numpy_rank_promotion("allow"):
        out = jnp.asarray(bijection.log_abs_det_jacobian(x, y))
    return jnp.sum(out, axis=tuple(range(ndim, out.ndim)))
