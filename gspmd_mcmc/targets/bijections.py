"""Constrained latents: bijections from the whole of real space, and their Jacobians.

A bijection is anything with the interface of NumPyro's ``Transform``: called on an unconstrained
value it returns the constrained one, ``log_abs_det_jacobian(x, y)`` has one number for each event, and
``inv`` goes back. `numpyro.distributions.biject_to` makes one for a support.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr

from gspmd_mcmc.placement.padding import is_padded, values_of, with_values
from gspmd_mcmc.tree import PyTree, path_str, pytree, static


def is_bijection(node: Any) -> bool:
    """Tell whether a node of a tree is a bijection (for ``is_leaf=``)."""
    return hasattr(node, "log_abs_det_jacobian")  # NumPyro's need not be installed


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


def bijection_at(bijections: PyTree, path: KeyPath) -> Any:
    """Return the bijection of the leaf at a path, or None: what is not mentioned is unconstrained."""
    node = bijections
    for key in path:
        if node is None or is_bijection(node):
            return node
        flat, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x, node=node: x is not node)
        node = {str(below[0]): child for below, child in flat}.get(str(key))
    if node is not None and not is_bijection(node):
        raise _no_bijection(path, node)
    return node


def check(bijections: PyTree, position: PyTree) -> None:
    """Raise unless each bijection belongs to a leaf of the position.

    Raises
    ------
    TypeError, ValueError
        If a node is no bijection, or stands where the position has no leaf.
    """
    heads = [keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(position)]
    for path, node in jax.tree_util.tree_leaves_with_path(bijections, is_leaf=is_bijection):
        if not is_bijection(node):
            raise _no_bijection(path, node)
        if not any(head.startswith(keystr(path)) for head in heads):
            raise ValueError(
                f"bijections{path_str(path)}: the position has no such leaf, it has {heads}. It is a "
                "tree with the names of the latents: of a model, a dict such as target.origin()"
            )


def _no_bijection(path: KeyPath, node: Any) -> TypeError:
    return TypeError(
        f"bijections{path_str(path)}: expected a NumPyro transform (of a constraint it is "
        f"numpyro.distributions.biject_to(constraint)), got {type(node).__name__}. TFP's are those "
        "of the parts of a joint distribution"
    )


def constrain(
    bijections: PyTree, position: PyTree, where: list[bool], counted: list[bool] | None = None
) -> tuple[PyTree, list]:
    """Apply the bijections of some leaves, and give the Jacobians of those that are counted (all).

    Returns
    -------
    params, log_jacobians
        The tree with constrained values, and for each counted leaf that has a bijection the logarithm
        of its Jacobian, one number for each event: summands of the log density.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(position, is_leaf=is_padded)
    leaves, log_jacobians = [], []
    for (path, leaf), is_wanted, is_counted in zip(paths, where, counted or where, strict=True):
        bijection = bijection_at(bijections, path) if is_wanted else None
        if bijection is None:
            leaves.append(leaf)
            continue
        x = values_of(leaf)
        with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
            y = bijection(x)
            leaves.append(with_values(leaf, y))
            if is_counted:
                log_jacobians.append(jnp.asarray(bijection.log_abs_det_jacobian(x, y)))
    return jax.tree.unflatten(treedef, leaves), log_jacobians


def unconstrain(bijections: PyTree, params: PyTree) -> PyTree:
    """Undo `constrain` of all leaves."""

    def back(path, y):
        bijection = bijection_at(bijections, path)
        with jax.numpy_rank_promotion("allow"):
            return y if bijection is None else with_values(y, bijection.inv(values_of(y)))

    return jax.tree_util.tree_map_with_path(back, params, is_leaf=is_padded)
