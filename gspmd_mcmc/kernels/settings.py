"""The settings that kernels have in common: checked, and turned into leaves of a pytree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.targets import local
from gspmd_mcmc.tree import PyTree, is_staging, is_traced


def require_target(kernel: str, target: Any) -> None:
    """Raise unless a target answers what kernels ask."""
    missing = [m for m in ("terms", "grad", "terms_and_grad") if not hasattr(target, m)]
    if missing:
        raise TypeError(
            f"{kernel}: expected a target (Posterior, LogDensity), got {type(target).__name__} without "
            f"{missing}; wrap a function as gspmd_mcmc.LogDensity(fn, *data)"
        )


def strong(value: Any, kind: type) -> jax.Array:
    """Turn a number into an uncommitted strong scalar, so that another number is no other program."""
    if is_traced(value):
        return value
    return jnp.asarray(np.asarray(value), dtype=jnp.result_type(kind))


def require(kernel: str, name: str, value: Any, holds: Callable, expected: str) -> None:
    """Raise unless a number that is known now is as expected."""
    if is_traced(value):
        return
    is_number = isinstance(value, int | float | np.number | np.ndarray | jax.Array)
    # On the host: in a program that is being staged jnp would trace the comparison.
    if not is_number or np.shape(value) or not holds(np.asarray(value)):
        raise ValueError(f"{kernel}: {name}: expected {expected}, got {value!r}")


def step_size_of(kernel: str, step_size: float | jax.Array) -> jax.Array:
    """Return a step size as a leaf; raise unless it is a positive number."""
    require(kernel, "step_size", step_size, lambda x: 0 < x < np.inf, "a positive number")
    return strong(step_size, float)


def metric_of(kernel: str, target: Any, inverse_mass_matrix: PyTree | None) -> PyTree | None:
    """Check the variances, and lay them out as positions are."""
    if inverse_mass_matrix is None:
        return None
    metric = local.lay_out(target, inverse_mass_matrix, f"{kernel}: inverse_mass_matrix")
    for path, leaf in jax.tree_util.tree_leaves_with_path(metric):
        if is_staging() or is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            continue
        if not jnp.all(leaf > 0):
            raise ValueError(
                f"{kernel}: inverse_mass_matrix {tree.path_str(path)}: expected positive variances"
            )
    return metric


def check_metric_fits(kernel: str, inverse_mass_matrix: PyTree | None, position: PyTree) -> None:
    """Raise unless the metric is a tree of shapes like the position's."""
    if inverse_mass_matrix is None:
        return
    metric, like = (jax.tree.map(np.shape, t) for t in (inverse_mass_matrix, position))
    if metric != like:
        raise ValueError(
            f"{kernel}: inverse_mass_matrix: expected a tree of shapes like the position's, "
            f"{like}, got {metric}"
        )
