"""What a kernel asks before it starts: is the position one, are data arguments, is the start finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gspmd_mcmc.placement.padding import Padded, is_padded, refuse_padded
from gspmd_mcmc.placement.processes import to_host
from gspmd_mcmc.targets.local import lay_out, rows_of
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.tree import PyTree, is_staging, is_traced, path_str

CONSTANT_BYTES = 1 << 20


class NonFiniteStart(ValueError):
    """The log density at a starting position is not finite."""


def admit(target: PyTree, position: PyTree) -> PyTree:
    """Return a position as the kernels hold it: checked, arrays, local leaves padded and laid out."""
    check_position(target, position)
    _refuse_shapes(target, position)
    return lay_out(target, position)


def _refuse_shapes(target: PyTree, position: PyTree) -> None:
    """Raise where there are shapes in the place of arrays: of those only shapes can follow."""
    for what, of in (("the target's data", target), ("position", position)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(of):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{what} {path_str(path)}: expected an array, got the shape {leaf.dtype}"
                    f"{list(leaf.shape)}. For the shapes of a state, to plan with, call "
                    "jax.eval_shape(gspmd_mcmc.HMC.init, kernel, position)"
                )


def check_position(target: PyTree, position: PyTree) -> None:
    """Raise unless a position is a tree of floating arrays that lie where the target can use them.

    A latent that all rows share may not lie over the mesh axis that the rows lie over: every tile would
    have to gather it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(position, is_leaf=is_padded)
    if not leaves:
        raise ValueError("position: expected a tree with at least one array, got no leaf")
    for (path, leaf), rows in zip(leaves, rows_of(target, position), strict=True):
        if isinstance(leaf, Padded):
            if rows is None:
                refuse_padded(
                    position, "position", "choose a mesh that divides it, or lay it out whole"
                )
            leaf = leaf.values
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"position {path_str(path)}: expected a floating dtype, got {jnp.result_type(leaf)}. "
                "HMC moves through continuous space; convert it, or sum a discrete latent out"
            )
        shared = _mesh_axes(leaf) & _row_axes(target) if rows is None else ()
        if shared:
            raise ValueError(
                f"position {path_str(path)} lies over mesh axis {sorted(shared)[0]!r}, which the rows "
                "of a plate lie over too. If its rows are the plate's, say so: Plate(..., local=...); "
                "else lay it over another axis, or whole on every device: P()"
            )


def _mesh_axes(leaf) -> set[str]:
    """Name the mesh axes that an array lies over."""
    sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
    return set(jax.tree.leaves(tuple(sharding.spec))) if isinstance(sharding, NamedSharding) else set()


def _row_axes(target: PyTree) -> set[str]:
    return {axis for plate in getattr(target, "plates", ()) for axis in plate.rows.axes}


def require_instance(name: str, value: Any, methods: tuple[str, ...], example: str) -> None:
    """Raise unless an object answers what is asked of it, and is no class of such objects."""
    if isinstance(value, type):
        raise TypeError(
            f"{name}: expected an object such as {example}, got the class {value.__name__} itself; "
            "call it with its settings"
        )
    if not all(hasattr(value, method) for method in methods):
        raise TypeError(f"{name}: expected an object such as {example}, got {type(value).__name__}")


def check_key(rng_key: PyTree) -> None:
    """Raise unless this is one typed key."""
    dtype = getattr(rng_key, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or rng_key.shape:
        raise TypeError(
            f"rng_key: expected one typed key, jax.random.key(seed), got {type(rng_key).__name__} "
            f"of dtype {dtype} and shape {np.shape(rng_key)}"
        )


def check_not_baked(target: PyTree) -> None:
    """Raise if the target's arrays are being written into a program as constants.

    Staging a program shows in a fresh array being a tracer; data that are concrete at that moment
    become full-size constants on every device, and their sharding is lost. An inner ``jit`` hides
    this from us: there the data are tracers.
    """
    if not is_staging():
        return
    concrete = [x for x in jax.tree.leaves(target) if isinstance(x, jax.Array | np.ndarray)]
    num_bytes = sum(x.nbytes for x in concrete if not is_traced(x))
    if num_bytes > CONSTANT_BYTES:
        raise ValueError(
            f"{num_bytes / 1e6:.1f} MB of the target's data would become constants of this program, "
            "whole on every device, because the function closes over the kernel. Make the kernel an "
            "argument: step = jax.jit(type(kernel).step); step(kernel, rng_key, state). In a function "
            "of your own, pass the kernel in: def train(kernel, rng_key, state): ..."
        )


def check_finite_start(target: PyTree, position: PyTree, log_density: jax.Array) -> None:
    """Raise where a concrete log density is not finite, naming the leaf or term at fault."""
    if is_traced(log_density) or np.all(np.isfinite(to_host(log_density))):
        return
    raise NonFiniteStart(
        f"the log density at the start is {log_density}, not finite: {blame(target, position)}"
    )


def blame(target: PyTree, position: PyTree) -> str:
    """Say in words what makes the log density at a position not finite."""
    for what, tree in (("position", position), ("the target's data", target)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            count = _num_nonfinite(leaf)
            if count:
                return f"{what} {path_str(path)} has {count} values that are NaN or infinite"
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.terms(position)):
        count = _num_nonfinite(leaf)
        if count:
            return _blame_term(target, position, path, count)
    return "the terms are finite but their sum overflows; scale the log density"


def _blame_term(target: PyTree, position: PyTree, path, count: int) -> str:
    if not (isinstance(target, Posterior) and path[0].key == "plates"):
        return f"its summand {path_str(path)} has {count} values that are NaN or infinite there"
    plate = target.plates[path[1].idx]
    params = target.params(position)
    rows = np.asarray(to_host(plate.log_likelihood_rows(params, target.hidden_from(plate, params))))
    bad = np.flatnonzero(~np.isfinite(rows))
    return f"{plate}: {bad.size} rows have a term that is NaN or infinite, the first is row {bad[0]}"


def _num_nonfinite(leaf) -> int:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return 0
    return int(jnp.sum(~jnp.isfinite(leaf)))
