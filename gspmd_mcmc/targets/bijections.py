"""Constrained latents: bijections from the whole of real space, and their Jacobians.

A bijection is anything with the interface of NumPyro's ``Transform``: called on an unconstrained
value it returns the constrained one, ``log_abs_det_jacobian(x, y)`` has one number for each event, and
``inv`` goes back. `numpyro.distributions.biject_to` makes one for a support.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from gspmd_mcmc.tree import PyTree, is_traced, path_str


def is_bijection(node: Any) -> bool:
    """Tell whether a node of a tree is a bijection (for ``is_leaf=``)."""
    return hasattr(node, "log_abs_det_jacobian")


def bijection_onto(what: str, support: Any) -> Any:
    """Return NumPyro's bijection onto a support.

    Raises
    ------
    ValueError
        If the support depends on values that are not known yet; the message begins with ``what``.
    """
    if any(is_traced(x) for x in jax.tree.leaves(support)):
        raise ValueError(
            f"{what}: its support {support} depends on another latent or on data. Sample it on a fixed "
            "support, and scale it in the model"
        )
    return importlib.import_module("numpyro.distributions").biject_to(support)


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
