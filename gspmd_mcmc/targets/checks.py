"""What a kernel asks before it starts: is the position one, are data arguments, is the start finite."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import GetAttrKey, KeyPath, SequenceKey

from gspmd_mcmc import tree
from gspmd_mcmc.functions.user_functions import name_of_function
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.mesh import auto_mesh
from gspmd_mcmc.placement.padding import Padded, is_padded, refuse_padded
from gspmd_mcmc.targets.local import lay_out, rows_of
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.streaming.tiling import is_live
from gspmd_mcmc.tree import PyTree, is_staging, is_traced, path_str

CONSTANT_BYTES = 1 << 20
# What there is instead of calls that cannot be traced.
IN_PROGRAMS = {
    "sample": "num_chains= makes chains, a loop goes over data sets; a program of your own has "
    "type(kernel).step",
    "find_mode": "A loop goes over starts",
}


class NonFiniteStart(ValueError):
    """The log density at a starting position is not finite."""


def admit(target: PyTree, position: PyTree) -> PyTree:
    """Return a position as the kernels hold it: checked, arrays, local leaves padded and laid out."""
    check_position(target, position)
    _refuse_shapes(target, position)
    position = lay_out(target, position)
    _check_is_read(target, position)
    return position


def _check_is_read(target: PyTree, position: PyTree) -> None:
    """Raise where nothing reads a leaf: without a density, chains wander off in it for ever."""
    is_posterior = isinstance(target, Posterior)

    def terms(x):
        found = target.terms(x)
        # A Jacobian reads what it is of, and gives it no density.
        return (found["prior"], found["plates"]) if is_posterior else found

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), position)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    for path, is_read in zip(paths, is_live(jax.make_jaxpr(terms)(shapes).jaxpr), strict=True):
        if not is_read:
            what = "neither log_prior nor a plate reads it" if is_posterior else "nothing reads it"
            raise ValueError(
                f"position {path_str(path)}: {what}, so that every value is as likely as any other and "
                "chains wander off for ever. Give it a prior, or leave it out of the position"
            )


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
        raise ValueError(
            "position: expected a tree with at least one array, got no leaf (None is no leaf)"
        )
    for (path, leaf), rows in zip(leaves, rows_of(target, position), strict=True):
        if isinstance(leaf, Padded):
            if rows is None:
                refuse_padded(
                    position, "position", "choose a mesh that divides it, or lay it out whole"
                )
            leaf = leaf.values
        if not jnp.issubdtype(_dtype_of(path, leaf), jnp.floating):
            raise TypeError(
                f"position {path_str(path)}: expected a floating dtype, got {jnp.result_type(leaf)}. "
                "HMC moves through continuous space; convert it, or sum a discrete latent out"
            )
        if jnp.finfo(jnp.result_type(leaf)).bits < 32:
            raise TypeError(
                f"position {path_str(path)}: expected float32 or float64, got {jnp.result_type(leaf)}: "
                "moves smaller than its rounding would be lost, and the draws too wide. Convert it, "
                "x.astype(jnp.float32), and round inside the log density where that is wanted"
            )
        shared = _mesh_axes(leaf) & _row_axes(target) if rows is None else ()
        if shared:
            raise ValueError(
                f"position {path_str(path)} lies over mesh axis {sorted(shared)[0]!r}, which the rows "
                "of a plate lie over too. If its rows are the plate's, say so: Plate(..., local=...); "
                "else lay it over another axis, or whole on every device: P()"
            )


def _dtype_of(path: KeyPath, leaf: Any) -> Any:
    try:
        return jnp.result_type(leaf)
    except TypeError as error:
        raise TypeError(
            f"position {path_str(path)}: expected an array of floats, got {type(leaf).__name__}. Of a "
            "module sample the arrays: equinox.partition(module, equinox.is_inexact_array)[0]"
        ) from error


def _mesh_axes(leaf) -> set[str]:
    """Name the mesh axes that an array lies over."""
    sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
    return set(jax.tree.leaves(tuple(sharding.spec))) if isinstance(sharding, NamedSharding) else set()


def _row_axes(target: PyTree) -> set[str]:
    return {axis for plate in target.plates for axis in plate.rows.axes}


def require_instance(name: str, value: Any, methods: tuple[str, ...], example: str) -> None:
    """Raise unless an object answers what is asked of it, and is no class of such objects."""
    if isinstance(value, type):
        raise TypeError(
            f"{name}: expected an object such as {example}, got the class {value.__name__} itself; "
            "call it with its settings"
        )
    if not all(hasattr(value, method) for method in methods):
        raise TypeError(f"{name}: expected an object such as {example}, got {type(value).__name__}")


def require_kind(name: str, value: Any, kind: type, example: str) -> None:
    """Raise unless an argument is an object of a class of ours, or of one made from it."""
    require_instance(name, value, (), example)
    if not isinstance(value, kind):
        raise TypeError(
            f"{name}: expected an object such as {example}, got {type(value).__name__}. A class of "
            f"your own is a gspmd_mcmc.{kind.__name__}"
        )


def check_key(rng_key: PyTree) -> None:
    """Raise unless this is one typed key."""
    dtype = getattr(rng_key, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or rng_key.shape:
        seed = rng_key if isinstance(rng_key, int) else "seed"
        raise TypeError(
            f"rng_key: expected one typed key, jax.random.key({seed}), got {type(rng_key).__name__} "
            f"of dtype {dtype} and shape {np.shape(rng_key)}"
        )


def check_outside_programs(call: str, given: PyTree) -> None:
    """Raise where a call that runs programs of its own is traced into another one."""
    if is_staging() or any(is_traced(x) for x in jax.tree.leaves(given)):
        raise TypeError(
            f"{call}: it compiles and runs programs of its own, so jax.jit, vmap, grad and shard_map "
            f"cannot trace it: call it outside. {IN_PROGRAMS[call]}"
        )


def check_not_baked(target: PyTree) -> None:
    """Raise if the target's arrays are being written into a program as constants, or it is Manual.

    Staging a program shows in a fresh array being a tracer; data that are concrete at that moment
    become full-size constants on every device, and their sharding is lost. An inner ``jit`` hides
    this from us: there the data are tracers.
    """
    if not is_staging():
        return
    for plate in target.plates:
        if plate.rows.mesh is not None:
            auto_mesh(f"{plate}", jax.sharding.get_abstract_mesh())
    concrete = [x for x in jax.tree.leaves(target) if isinstance(x, jax.Array | np.ndarray)]
    num_bytes = sum(x.nbytes for x in concrete if not is_traced(x))
    if num_bytes > CONSTANT_BYTES:
        raise ValueError(
            f"{num_bytes / 1e6:.1f} MB of the target's data would become constants of this program, "
            "whole on every device, because the function closes over the kernel. Make the kernel an "
            "argument: step = jax.jit(type(kernel).step); step(kernel, rng_key, state). In a function "
            "of your own, pass the kernel in: def train(kernel, rng_key, state): ..."
        )


def check_finite_start(
    target: PyTree, position: PyTree, log_density: jax.Array, log_density_grad: PyTree
) -> None:
    """Raise where a concrete log density or its gradient is not finite, naming what is at fault."""
    if is_traced(log_density):
        return
    if not np.all(np.isfinite(to_host(log_density))):
        raise NonFiniteStart(
            f"the log density at the start is {log_density}, not finite: {blame(target, position)}"
        )
    if not to_host(_are_all_finite(log_density_grad)):
        raise NonFiniteStart(f"at the start {blame(target, position)}")


def blame(target: PyTree, position: PyTree) -> str:
    """Say in words what makes the log density at a position, or its gradient, not finite."""
    for path, count in _nonfinite(position):
        return f"position {path_str(path)} has {count} values that are NaN or infinite"
    terms = target.terms(position)
    for path, count in _nonfinite(terms):
        if isinstance(target, Posterior) and path[0].key == "plates":
            return _blame_rows(target, position, path[1].idx)
        return _blame_summand(target, path, count)
    if not np.isfinite(to_host(tree.total(terms))):
        return "the terms are finite but their sum overflows; scale the log density"
    for path, count in _nonfinite(target.grad(position)):
        return (
            f"the log density is finite, but its gradient at {path_str(path)} has {count} values that "
            "are NaN or infinite. Where a function has no derivative (sqrt or a norm at 0, a where() "
            "whose other branch is not finite), write it so that it has one, or start elsewhere"
        )
    return "the log density and its gradient are finite when they are evaluated alone"


def _blame_summand(target: PyTree, path: KeyPath, count: int) -> str:
    """Name a summand of a log density or a prior, and what is not finite of the data it may read."""
    found = f"its summand {path_str(path)} has {count} values that are NaN or infinite there"
    own = target
    if isinstance(target, Posterior):
        own = tree.replace(target, plates=())
        if path[0].key == "prior":
            found = f"log_prior ({name_of_function(target.log_prior)}): {found}"
    for data_path, data_count in _nonfinite(own):
        return f"{found}; {_data(data_path, data_count)}"
    return found


def _blame_rows(target: Posterior, position: PyTree, index: int) -> str:
    """Name the first row of a plate whose term is not finite, and its data if those are not."""
    plate, params = target.plates[index], target.params(position)
    hidden = target.hidden_from(plate, params)
    rows = np.asarray(to_host(plate.log_likelihood_rows(params, hidden)))
    bad = np.flatnonzero(~np.isfinite(rows))
    if not bad.size:
        return f"{plate}: the terms of all rows are finite, but not their sum or a Jacobian"
    found = f"{plate}: {bad.size} rows have a term that is NaN or infinite, the first is row {bad[0]}"
    leaves, treedef = jax.tree_util.tree_flatten_with_path(plate.data)

    def terms(*leaves):
        data = treedef.unflatten(leaves)
        return tree.replace(plate, data=data).log_likelihood_rows(params, hidden)

    are_read = is_live(jax.make_jaxpr(terms)(*(leaf for _, leaf in leaves)).jaxpr)
    for (path, leaf), is_read in zip(leaves, are_read, strict=True):
        if is_read and num_nonfinite(leaf[bad[0]]):
            where = (GetAttrKey("plates"), SequenceKey(index), GetAttrKey("data"), *path)
            return f"{found}; {_data(where, num_nonfinite(leaf))}"
    return found


def _data(path: KeyPath, count: int) -> str:
    return f"the target's data {path_str(path)} has {count} values that are NaN or infinite"


def _nonfinite(of: PyTree) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path of each leaf that has values that are not finite, and how many."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(of):
        count = num_nonfinite(leaf)
        if count:
            yield path, count


def num_nonfinite(leaf: Any) -> int:
    """Count the values of an array that are NaN or infinite."""
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
        return 0
    return int(to_host(jnp.sum(~jnp.isfinite(leaf))))


@jax.jit
def _are_all_finite(of: PyTree) -> jax.Array:
    return functools.reduce(
        jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(of)], jnp.asarray(True)
    )
