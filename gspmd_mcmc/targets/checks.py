"""What a kernel asks before it starts: is the position one, are data arguments, is the start finite."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.jax_private import open_program
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.mesh import auto_mesh, named_sharding
from gspmd_mcmc.placement.numbers import nonfinite
from gspmd_mcmc.placement.padding import Padded, is_padded, refuse_padded
from gspmd_mcmc.targets.local import lay_out
from gspmd_mcmc.targets.resolution import warn_of_narrow_terms
from gspmd_mcmc.targets.streaming.tiling import is_live
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree, is_staging, is_traced, path_str

CONSTANT_BYTES = 1 << 20
# A logistic regression of 0.8 MB took as long on 2 virtual CPU devices as on one, 1.4 times on 8; of 8
# kB 10 and 50 times.
LEAST_BYTES = 1 << 20
# So many are worth several CPU devices, where there are more cores than one device uses well.
MANY_BYTES, FEW_CORES = 8 << 20, 2
# What there is instead of calls that cannot be traced.
IN_PROGRAMS = {
    "sample": "num_chains= makes chains, and a loop goes over data sets. A program of your own takes "
    "the kernel as an argument and loops over steps: jax.jit(lambda kernel, keys, state: "
    "jax.lax.scan(lambda state, key: kernel.step(key, state), state, keys))",
    "from_numpyro": "Other data of the same shapes compile nothing new. A program of your own takes "
    "the kernel as an argument: step = jax.jit(type(kernel).step); step(kernel, rng_key, state)",
    "find_mode": "A loop goes over starts",
}


class NonFiniteStart(ValueError):
    """The log density at a starting position is not finite."""


# The position.


def admit(target: Target, position: PyTree) -> PyTree:
    """Return a position as the kernels hold it: checked, arrays, local leaves padded and laid out."""
    check_position(target, position)
    for what, of in (("the target's data", target), ("position", position)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(of):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{what} {path_str(path)}: expected an array, got the shape {leaf.dtype}"
                    f"{list(leaf.shape)}. For the shapes of a state, to plan with, call "
                    "jax.eval_shape(gspmd_mcmc.HMC.init, kernel, position)"
                )
    position = lay_out(target, position)
    _check_is_read(target, position)
    return position


def check_position(target: Target, position: PyTree) -> None:
    """Raise unless a position is a tree of floating arrays that lie where the target can use them.

    A latent that all rows share may not lie over the mesh axis that the rows lie over: every tile would
    have to gather it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(position, is_leaf=is_padded)
    if not leaves:
        raise ValueError(
            "position: expected a tree with at least one array, got no leaf (None is no leaf)"
        )
    meshes = {plate.rows.mesh for plate in target.plates if plate.rows.mesh is not None}
    cut = {axis for mesh in meshes for axis, size in mesh.shape.items() if size > 1}
    of_rows = cut.intersection(axis for plate in target.plates for axis in plate.rows.axes)
    for (path, leaf), rows in zip(leaves, target.local_rows(position), strict=True):
        name = f"position {path_str(path)}"
        if isinstance(leaf, Padded):
            if rows is None:
                refuse_padded(
                    position, "position", "choose a mesh that divides it, or lay it out whole"
                )
            leaf = leaf.values
        try:
            dtype = jnp.result_type(leaf)
        except TypeError as error:
            raise TypeError(
                f"{name}: expected an array of floats, got {type(leaf).__name__}. Of a module sample "
                "the arrays: equinox.partition(module, equinox.is_inexact_array)[0]"
            ) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{name}: expected a floating dtype, got {dtype}. HMC moves through continuous space; "
                "convert it, or sum a discrete latent out"
            )
        if jnp.finfo(dtype).bits < 32:
            raise TypeError(
                f"{name}: expected float32 or float64, got {dtype}: moves smaller than its rounding "
                "would be lost, and the draws too wide. Convert it, x.astype(jnp.float32), and round "
                "inside the log density where that is wanted"
            )
        sharding = named_sharding(leaf) if rows is None else None
        shared = of_rows & set(jax.tree.leaves(tuple(sharding.spec))) if sharding is not None else ()
        if shared:
            raise ValueError(
                f"{name} lies over mesh axis {sorted(shared)[0]!r}, which the rows of a plate lie over "
                "too. If its rows are the plate's, say so: Plate(..., local=...); else lay it over "
                "another axis, or whole on every device: P()"
            )


def _check_is_read(target: Target, position: PyTree) -> None:
    """Raise where nothing reads a leaf: without a density, chains wander off in it forever."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), position)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]

    def densities(position: PyTree) -> PyTree:
        terms = target.densities(target.terms(position))
        warn_of_narrow_terms(repr(target), terms)
        return terms

    jaxpr = open_program(jax.make_jaxpr(densities)(shapes))
    for path, is_read in zip(paths, is_live(jaxpr), strict=True):
        if not is_read:
            raise ValueError(
                f"position {path_str(path)}: {target.readers} reads it, so that every value is as "
                "likely as any other and chains wander off forever. Give it a prior, or leave it out "
                "of the position"
            )


# Arguments.


def require_kind(name: str, value: Any, kind: type, example: str) -> None:
    """Raise unless an argument is an object of one of our classes, or of a class made from it."""
    if isinstance(value, type):
        raise TypeError(
            f"{name}: expected an object such as {example}, got the class {value.__name__} itself; "
            "call it with its settings"
        )
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


# Programs.


def check_outside_programs(call: str, given: PyTree) -> None:
    """Raise where a call that runs programs of its own is traced into another one."""
    if is_staging() or any(is_traced(x) for x in jax.tree.leaves(given)):
        raise TypeError(
            f"{call}: it compiles and runs programs of its own, so jax.jit, vmap, grad and shard_map "
            f"cannot trace it: call it outside. {IN_PROGRAMS[call]}"
        )


def constant_megabytes(held: PyTree) -> float:
    """Return the size of arrays that are being written into a program, 0 where that is small.

    Staging a program shows in a fresh array being a tracer. Data that are concrete at that moment
    become full-size constants on every device, and their sharding is lost. An inner ``jit`` hides
    this from us: there the data are tracers.
    """
    if not is_staging():
        return 0
    arrays = [x for x in jax.tree.leaves(held) if isinstance(x, jax.Array | np.ndarray)]
    num_bytes = sum(x.nbytes for x in arrays if not is_traced(x))
    return num_bytes / 1e6 if num_bytes > CONSTANT_BYTES else 0


def check_not_baked(target: Target) -> None:
    """Raise if the target's arrays are being written into a program as constants, or it is Manual."""
    for plate in target.plates if is_staging() else ():
        if plate.rows.mesh is not None:
            auto_mesh(f"{plate}", jax.sharding.get_abstract_mesh())
    if megabytes := constant_megabytes(target):
        raise ValueError(
            f"{megabytes:.1f} MB of the target's data would become constants of this program, "
            "whole on every device, because the function closes over the kernel. Make the kernel an "
            "argument: step = jax.jit(type(kernel).step); step(kernel, rng_key, state). In a function "
            "of your own, pass the kernel in: def train(kernel, rng_key, state): ..."
        )


def on_small_data(target: Target) -> str | None:
    """Say that one device would be faster than the many that a target's arrays are cut over, or None.

    Large arrays pay for small ones beside them.
    """
    distinct = {id(x): x for x in jax.tree.leaves(target)}  # a model's functions hold rows, too
    found = [(x, named_sharding(x)) for x in distinct.values()]
    cut = [(x, s.shard_shape(x.shape)) for x, s in found if s is not None and not s.is_fully_replicated]
    num_bytes = sum(x.size * x.dtype.itemsize for x, _ in cut)
    if not cut or num_bytes >= LEAST_BYTES:
        return None
    num_blocks = max(x.size // np.prod(shape, dtype=int) for x, shape in cut)
    where = " and ".join(map(str, target.plates)) or repr(target)
    return (
        f"small data on many devices: {where}, {num_bytes / 1e6:.2f} MB of rows on {num_blocks} "
        "devices. If their terms are as cheap as a regression's, each gradient waits for the devices "
        "longer than one of them takes for all rows. Put chains on the mesh, make_mesh(chains=N, "
        "data=1) on N devices, or take one device"
    )


def on_idle_cores(target: Target) -> str | None:
    """Say that the cores of a CPU would be faster as devices than as the one there is, or None."""
    cores, num_devices = os.cpu_count() or 1, jax.device_count()
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves([p.data for p in target.plates]))
    if target.platform != "cpu" or num_devices > 1 or cores <= FEW_CORES or num_bytes < MANY_BYTES:
        return None
    return (
        f"large data on one CPU device: {' and '.join(map(str, target.plates))}, "
        f"{num_bytes / 1e6:.0f} MB of rows, on a machine of {cores} cores. XLA uses them better as "
        f'devices: jax.config.update("jax_num_cpu_devices", {cores}) before JAX is first used, and '
        f"rows placed on make_mesh(data={cores})"
    )


# The start.


def check_finite_start(
    target: Target, position: PyTree, log_density: jax.Array, log_density_grad: PyTree
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


@jax.jit
def _are_all_finite(of: PyTree) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(of)], bool))


def blame(target: Target, position: PyTree) -> str:
    """Say in words what makes the log density at a position, or its gradient, not finite."""
    for path, count in nonfinite(position):
        return f"position {path_str(path)} has {count} values that are NaN or infinite"
    terms = target.terms(position)
    for path, count in nonfinite(terms):
        return target.blame(position, path, count)
    if not np.isfinite(to_host(tree.total(terms))):
        return "the terms are finite but their sum overflows; scale the log density"
    for path, count in nonfinite(target.grad(position)):
        return (
            f"the log density is finite, but its gradient at {path_str(path)} has {count} values that "
            "are NaN or infinite. Where a function has no derivative (sqrt or a norm at 0, a where() "
            "whose other branch is not finite), write it so that it has one, or start elsewhere"
        )
    return "the log density and its gradient are finite when they are evaluated alone"
