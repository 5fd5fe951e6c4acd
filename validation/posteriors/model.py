"""What a validation model is, and the density terms that several of them share."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.tree import PyTree

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Model:
    """A posterior of posteriordb as a target of ours.

    Attributes
    ----------
    name
        Its name in posteriordb.
    columns
        ``columns(data)`` -> the arrays that the target reads, a dict of NumPy arrays in float64.
    build
        ``build(columns, mesh)`` -> the target; ``mesh`` is None or has an axis ``"data"``.
    shapes
        ``shapes(columns)`` -> name of each latent to its shape.
    derive
        ``derive(draws)`` -> the reference's parameters by name, of draws of the position: leaves
        [chains, draws, ...] both. Vectors become ``name[1]``, ``name[2]``, ....
    """

    name: str
    columns: Callable[[Mapping[str, Any]], dict[str, np.ndarray]]
    build: Callable[[PyTree, Mesh | None], Any]
    shapes: Callable[[Mapping[str, np.ndarray]], dict[str, tuple[int, ...]]]
    derive: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]

    def target(self, data: Mapping[str, Any], mesh: Mesh | None = None, dtype: Any = np.float32) -> Any:
        """Return the target of a data set, its numbers in ``dtype``, on a mesh if there is one."""
        columns = {name: np.asarray(x, dtype) for name, x in self.columns(data).items()}
        return self.build(columns, mesh)

    def initial_position(self, data: Mapping[str, Any], dtype: Any = np.float32) -> dict:
        """Return the origin of the unconstrained space."""
        shapes = self.shapes(self.columns(data))
        return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}

    def parameters(self, draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return draws [chains, draws] in float64 by the reference's names of parameters."""
        return named(self.derive({n: np.asarray(x, np.float64) for n, x in draws.items()}))


def named(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split vectors [chains, draws, k] into ``name[1]`` to ``name[k]``."""
    out = {}
    for name, x in arrays.items():
        if x.ndim == 2:
            out[name] = x
        else:
            out |= {f"{name}[{i + 1}]": x[..., i] for i in range(x.shape[-1])}
    return out


def rows_target(
    log_prior: Callable,
    log_likelihood: Callable,
    columns: PyTree,
    mesh: Mesh | None,
    bijections: PyTree,
    local: Any = (),
) -> gm.Posterior:
    """Return a posterior with one plate of rows, laid over the mesh's axis ``"data"``."""
    data = columns if mesh is None else gm.place(columns, mesh, P("data"))
    plate = gm.Plate(log_likelihood, data, local=local)
    return gm.Posterior(log_prior, plate, bijections=bijections)


def whole_target(log_density: Callable, columns: PyTree, mesh: Mesh | None) -> gm.LogDensity:
    """Return a log density whose data are whole on every device of the mesh."""
    return gm.LogDensity(log_density, columns if mesh is None else gm.place(columns, mesh))


def normal(x: jax.Array, mean: Any, sd: Any) -> jax.Array:
    """Log density of a normal distribution."""
    return -0.5 * ((x - mean) / sd) ** 2 - jnp.log(sd) - HALF_LOG_TWO_PI


def half_normal(x: jax.Array, sd: float) -> jax.Array:
    """Log density of the absolute value of a centred normal variable, at x > 0."""
    return normal(x, 0.0, sd) + math.log(2)


def half_cauchy(x: jax.Array, scale: float) -> jax.Array:
    """Log density of the absolute value of a centred Cauchy variable, at x > 0."""
    return math.log(2 / (math.pi * scale)) - jnp.log1p((x / scale) ** 2)


def student(x: jax.Array, freedom: float, mean: float, scale: float) -> jax.Array:
    """Log density of Student's t distribution."""
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    constant -= 0.5 * math.log(freedom * math.pi) + math.log(scale)
    return constant - 0.5 * (freedom + 1) * jnp.log1p(((x - mean) / scale) ** 2 / freedom)
