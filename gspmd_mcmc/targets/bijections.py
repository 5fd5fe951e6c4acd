"""Constrained latents: bijections from the whole of real space, and their Jacobians.

A bijection is anything with the interface of NumPyro's ``Transform``: called on an unconstrained
value it returns the constrained one, ``log_abs_det_jacobian(x, y)`` has one number for each event, and
``inv`` goes back. `numpyro.distributions.biject_to` makes one for a support.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from gspmd_mcmc.tree import PyTree, is_traced, path_str, pytree, static


def is_bijection(node: Any) -> bool:
    """Tell whether a node of a tree is a bijection (for ``is_leaf=``)."""
    return hasattr(node, "log_abs_det_jacobian")


@pytree
@dataclass(frozen=True)
class ByModel:
    """Stands for the bijection of a latent that the model constrains itself, each time it is run.

    Its support depends on other values of the model, such as ``Uniform(0, high)`` on ``high``: the
    model turns the position's unconstrained value into the constrained one, and adds the Jacobian.
    """

    name: str = static()

    def __call__(self, x: Any) -> Any:
        """Return the value as it is."""
        return x

    def log_abs_det_jacobian(self, x: Any, y: Any) -> jax.Array:
        """Return zeros: the model adds the Jacobian."""
        return jnp.zeros_like(x)

    def inv(self, y: Any) -> Any:
        """Refuse: what the support is, the model alone knows."""
        raise ValueError(
            f"{self.name!r}: its support depends on other values of the model, so its unconstrained "
            "value is not known from its own. Start at target.origin(), or at prior_start(target)"
        )


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


def bijection_of(what: str, distribution: Any) -> Any:
    """Return the bijection onto a distribution's support, as NumPyro or TFP know it; None if neither.

    Raises
    ------
    ValueError
        If it is TFP's and has none; the message begins with ``what``.
    """
    if hasattr(distribution, "experimental_default_event_space_bijector"):
        with jax.numpy_rank_promotion("allow"):
            bijector = distribution.experimental_default_event_space_bijector()
        if bijector is None:
            raise ValueError(
                f"{what}: {type(distribution).__name__} has no default event space bijector, so its "
                "support is not known. Sample a latent on the whole real line, and transform it in the "
                "model, or observe it"
            )
        return _OfTFP(bijector, len(tuple(distribution.event_shape)))
    if not type(distribution).__module__.startswith("numpyro."):
        return None
    with jax.numpy_rank_promotion("allow"):
        return importlib.import_module("numpyro.distributions").biject_to(distribution.support)


def bijection_for(
    name: str, what: str, distribution: Any, shape: tuple[int, ...]
) -> tuple[Any, tuple[int, ...]]:
    """Return the bijection that a posterior keeps for a latent, and its unconstrained shape.

    That is `ByModel` where the support depends on what a program computes; TFP's objects too are asked
    each time, as they need not be pytrees.
    """
    support = getattr(distribution, "support", None)
    is_tfp = hasattr(distribution, "experimental_default_event_space_bijector")
    if not is_tfp and not any(is_traced(x) for x in jax.tree.leaves(support)):
        with jax.ensure_compile_time_eval():  # arrays, where a model is being traced
            bijection = bijection_of(what, distribution)
        return bijection, shape if bijection is None else tuple(bijection.inverse_shape(shape))
    inner = bijection_of(what, distribution)
    return ByModel(name), tuple(inner.inverse_shape(shape))


def log_jacobian_of(bijection: Any, x: jax.Array, y: jax.Array, ndim: int) -> jax.Array:
    """Log Jacobian as an array of ``ndim`` axes, those of the log probability of ``y``."""
    with jax.numpy_rank_promotion("allow"):
        out = jnp.asarray(bijection.log_abs_det_jacobian(x, y))
    return jnp.sum(out, axis=tuple(range(ndim, out.ndim)))


def bijection_at(bijections: PyTree, path: KeyPath) -> Any:
    """Return the bijection of the leaf at a path, or None: what is not mentioned is unconstrained."""
    node = bijections
    for key in path:
        if node is None or is_bijection(node):
            return node
        children = dict(_children(node))
        node = children.get(str(key))
    if node is not None and not is_bijection(node):
        raise TypeError(
            f"bijections{path_str(path)}: expected a NumPyro transform (of a constraint it is "
            f"numpyro.distributions.biject_to(constraint)), got {type(node).__name__}"
        )
    return node


def _children(node: PyTree) -> list[tuple[str, Any]]:
    """Return the entries one level under a node of a tree, by their keys."""
    flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(str(path[0]), child) for path, child in flat]


def check(bijections: PyTree, position: PyTree) -> None:
    """Raise unless each bijection belongs to a leaf of the position.

    Raises
    ------
    TypeError, ValueError
        If a node is no bijection, or stands where the position has no leaf.
    """
    heads = [str(p) for p in _paths(position)]
    for path, node in jax.tree_util.tree_leaves_with_path(bijections, is_leaf=is_bijection):
        if not is_bijection(node):
            raise TypeError(
                f"bijections{path_str(path)}: expected a NumPyro transform (or "
                f"numpyro.distributions.biject_to(support)), got {type(node).__name__}"
            )
        if not any(head.startswith(str(jax.tree_util.keystr(path))) for head in heads):
            raise ValueError(
                f"bijections{path_str(path)}: the position has no such leaf, it has {heads}"
            )


def _paths(position: PyTree) -> list[str]:
    return [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(position)]


def constrain(bijections: PyTree, position: PyTree, where: list[bool]) -> tuple[PyTree, list]:
    """Apply the bijections of some leaves.

    Returns
    -------
    params, log_jacobians
        The tree with constrained values, and for each leaf that has a bijection the logarithm of its
        Jacobian, one number for each event: summands of the log density.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(position)
    leaves, log_jacobians = [], []
    for (path, x), is_wanted in zip(paths, where, strict=True):
        bijection = bijection_at(bijections, path) if is_wanted else None
        if bijection is None:
            leaves.append(x)
            continue
        with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
            y = bijection(x)
            log_jacobian = bijection.log_abs_det_jacobian(x, y)
        leaves.append(y)
        log_jacobians.append(jnp.asarray(log_jacobian))
    return jax.tree.unflatten(treedef, leaves), log_jacobians


def unconstrain(bijections: PyTree, params: PyTree) -> PyTree:
    """Undo `constrain` of all leaves."""

    def back(path, y):
        bijection = bijection_at(bijections, path)
        with jax.numpy_rank_promotion("allow"):
            return y if bijection is None else bijection.inv(y)

    return jax.tree_util.tree_map_with_path(back, params)
