"""Arguments of `sample` that are of no kind that they could be."""

import os
import warnings
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.placement.mesh import auto_mesh
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import path_str


def check_counts(least: dict[str, int], given: dict[str, Any]) -> None:
    """Raise unless each argument is an integer that is at least so large."""
    for name, value in given.items():
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_integer or value < least[name]:
            raise ValueError(f"{name}: expected an integer of at least {least[name]}, got {value!r}")


def check_number(name: str, value: Any, what: str) -> None:
    """Raise unless an argument is a number, and not below zero."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ValueError(f"{name}: expected a number {what}, got {value!r}")


def check_path(name: str, value: Any) -> None:
    """Raise unless an argument is a path."""
    if not isinstance(value, str | os.PathLike):
        kind = type(value).__name__
        raise TypeError(f"{name}: expected the path of a folder, got {value!r}, a {kind}")


def check_observers(progress: Any, callback: Any) -> None:
    """Raise unless these say whether to show progress, and what to call; a text would be true."""
    if not isinstance(progress, bool):
        raise TypeError(f"progress: expected True or False, got {progress!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback: expected a function, got {type(callback).__name__}")


def check_precision(kernel: Kernel) -> None:
    """Raise where a kernel was made in another precision than this program computes in."""
    made, now = jnp.result_type(kernel.step_size), jnp.zeros(()).dtype
    if made != now:
        raise ValueError(
            f"kernel: its numbers are {made}, and JAX now computes in {now}: jax_enable_x64 was "
            "switched since it was made. Make kernel and target after that"
        )


def common_mesh(mesh: Mesh | None, target: Target) -> Mesh | None:
    """Return the mesh given, or the one that the target's data lie on; raise if those differ."""
    mesh = None if mesh is None else auto_mesh("mesh", mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(target):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if mesh is not None and sharding.mesh != mesh:
                raise ValueError(
                    f"mesh: the target's data {path_str(path)} lie on {sharding.mesh}, got {mesh}; "
                    "place the data on the mesh that chains are to be sampled on"
                )
            return sharding.mesh
    return mesh


def check_key(rng_key: jax.Array) -> None:
    """Raise unless this is one typed key; warn of one whose draws depend on the mesh."""
    checks.check_key(rng_key)
    if "fry" not in str(jax.random.key_impl(rng_key)):
        warnings.warn(
            f"rng_key is of kind {jax.random.key_impl(rng_key)}: only threefry keys give the same "
            "chain on every mesh",
            SamplingWarning,
            stacklevel=4,
        )
