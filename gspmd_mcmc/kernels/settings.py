"""The settings that kernels have in common: checked, and turned into leaves of a pytree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.kernels.metrics import metric as metrics
from gspmd_mcmc.kernels.metrics.leaves import check_positive, check_shapes
from gspmd_mcmc.targets import local
from gspmd_mcmc.targets.anywhere import no_context_mesh, on_any_mesh
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, is_traced


def require_target(kernel: str, target: Any) -> None:
    """Raise unless a target answers what kernels ask."""
    if isinstance(target, type):
        raise TypeError(
            f"{kernel}: expected a target (Posterior, LogDensity), got the class {target.__name__} "
            "itself; build one of your functions and data"
        )
    if not isinstance(target, Target):
        raise TypeError(
            f"{kernel}: expected a target (Posterior, LogDensity), got {type(target).__name__}; wrap a "
            "function as gspmd_mcmc.LogDensity(fn, *data), a NumPyro model by "
            "gspmd_mcmc.from_numpyro(model, data); a class of your own is a gspmd_mcmc.Target"
        )


def strong(value: Any, kind: type) -> jax.Array:
    """Turn a number into an uncommitted strong scalar, so that another number is no other program."""
    if is_traced(value):
        return value
    with no_context_mesh():
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


@on_any_mesh
def metric_of(kernel: str, target: Any, inverse_mass_matrix: Any) -> Any:
    """Check a metric, and lay it out as positions are."""
    what = f"{kernel}: inverse_mass_matrix"
    if inverse_mass_matrix is None:
        return None
    if metrics.is_metric(inverse_mass_matrix):
        return inverse_mass_matrix.laid_out(target, what)
    variances = local.lay_out(target, inverse_mass_matrix, what)
    check_positive(what, variances)
    return variances


def check_metric_fits(kernel: str, inverse_mass_matrix: Any, position: PyTree) -> None:
    """Raise unless the metric is for positions of these shapes."""
    if inverse_mass_matrix is None:
        return
    if metrics.is_metric(inverse_mass_matrix):
        inverse_mass_matrix.check_fits(kernel, position)
        return
    check_shapes(f"{kernel}: inverse_mass_matrix", inverse_mass_matrix, position)
