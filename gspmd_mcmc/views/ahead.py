"""Compiling a program for a mesh that is not there.

It is traced and exported here, on an abstract mesh, and compiled in a process of its own, which starts
JAX with as many virtual devices as the mesh has.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views import ahead_child
from gspmd_mcmc.views.communication import read_report, with_origins
from gspmd_mcmc.views.report import Argument, Communication

MOST_DEVICES = 2048  # with more, the CPU backend refuses to compile


def compile_ahead(function: Callable, args: tuple, mesh: AbstractMesh) -> Communication:
    """Compile a function for shapes that lie on an abstract mesh, and report what it sends and holds.

    Raises
    ------
    ImportError
        If flatbuffers, which writes the exported program, is missing.
    ValueError
        If the mesh has more than 2,048 devices, or an argument lies on another mesh.
    RuntimeError
        If the compiler fails; its message is in the error.
    """
    if mesh.size > MOST_DEVICES:
        raise ValueError(f"a mesh of {mesh.size} devices; at most {MOST_DEVICES} can be compiled for")
    shapes = shapes_of(args, mesh)
    flat = _on_leaves(function, args)
    exported = export.export(jax.jit(flat, keep_unused=True), platforms=["cpu"])(*shapes)
    found = _compile(_serialized(exported), dict(mesh.shape))
    arguments = tuple(
        _argument(path_str(path), shape, taken)
        for (path, _), shape, taken in zip(
            jax.tree_util.tree_leaves_with_path(args), shapes, found["inputs"], strict=True
        )
    )
    report = read_report(found["text"], found["memory"], arguments, dict(mesh.shape))
    return with_origins(report, function, args)


def shapes_of(args: tuple, mesh: AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    """Return the shape of each argument, with its sharding if it lies on the mesh; of a key, its data.

    Raises
    ------
    ValueError
        If an argument lies on another mesh.
    """
    leaves = jax.tree_util.tree_leaves_with_path(args)
    return [_shape(path_str(path), leaf, mesh) for path, leaf in leaves]


def _shape(name: str, leaf: Any, mesh: AbstractMesh) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    on_mesh = sharding if isinstance(sharding, NamedSharding) else None
    if on_mesh is not None and on_mesh.mesh != mesh:
        raise ValueError(
            f"argument {name} lies on {on_mesh.mesh}, not on the mesh that is planned, {mesh}. "
            "Place it on the mesh that the function gets: gspmd_mcmc.place(tree, mesh, spec)"
        )
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return jax.ShapeDtypeStruct(data.shape, data.dtype)
    return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf), sharding=on_mesh)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_leaves(function: Callable, args: tuple) -> Callable:
    """Make a function of the leaves: what is exported holds neither pytree classes nor typed keys."""
    leaves, treedef = jax.tree.flatten(args)
    impls = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]

    def flat(*leaves):
        typed = [
            leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, impls, strict=True)
        ]
        out = jax.tree.leaves(function(*jax.tree.unflatten(treedef, typed)))
        return [jax.random.key_data(x) if _is_key(x) else x for x in out]

    flat.__name__ = getattr(function, "__name__", "planned")
    return flat


def _serialized(exported: export.Exported) -> bytes:
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ImportError("flatbuffers is missing: pip install 'gspmd_mcmc[plan]' brings it") from error


def _compile(program: bytes, axes: dict[str, int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.bin").write_bytes(program)
        (folder / "mesh.json").write_text(json.dumps(axes))
        # -P: what stands beside the script is not for import.
        command = [sys.executable, "-P", str(Path(ahead_child.__file__)), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        if done.returncode:
            raise RuntimeError(
                f"compiling for {math.prod(axes.values())} devices failed:\n{done.stderr[-4000:]}"
            )
        return json.loads((folder / "compiled.json").read_text())


def _environment() -> dict[str, str]:
    """Return this process's environment, JAX on the CPU with nothing said of its devices."""
    dropped = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORM_NAME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64))}  # pyright: ignore[reportAttributeAccessIssue]


def _argument(path: str, shape: jax.ShapeDtypeStruct, taken: dict[str, Any]) -> Argument:
    itemsize = shape.dtype.itemsize
    spec = [tuple(axes) if isinstance(axes, list) else axes for axes in taken["spec"]]
    return Argument(
        path=path,
        shape=tuple(shape.shape),
        dtype=str(shape.dtype),
        spec=P(*spec),
        num_bytes=math.prod(shape.shape) * itemsize,
        bytes_per_device=math.prod(taken["block"]) * itemsize,
    )
