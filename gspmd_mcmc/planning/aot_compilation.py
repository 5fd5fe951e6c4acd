"""Compile a program for a mesh that is not there.

The program is traced and exported here, on an abstract mesh. A process of its own compiles it: for as
many virtual devices of the CPU as the mesh has, or by the compiler of a chip, for its own devices.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.planning import aot_process
from gspmd_mcmc.planning.topologies import Chip
from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views.communication import describe_argument, read_report, with_origins
from gspmd_mcmc.views.program.report import Argument, Communication

MOST_DEVICES = 2048  # with more, the CPU backend refuses to compile
_BIND = "Bind what is static before: functools.partial(function, name=value)"
_NO_VALUE = (
    "A shape has no value. What the function reads is an argument: build(mesh) returns (function, "
    "*arguments). The shape of a result is jax.eval_shape(function, *shapes): of a kernel's state, "
    "jax.eval_shape(gspmd_mcmc.HMC.init, kernel, position)."
)
# Kernels in likelihoods. They are compiled by the very version that wrote them, a process away.
_OURS = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
_HINTS = {
    "ShapeDtypeStruct": _NO_VALUE,
    "not implemented for `jax.sharding.AbstractMesh`": _NO_VALUE,
    "device assignment": "The function holds a sharding or an array on another mesh than the one that "
    "build(mesh) gets. Make shardings from that mesh, and arrays arguments.",
    "host_callbacks": "The function calls back to Python (jax.debug.print, jax.pure_callback), which "
    "no other process can do. Plan it without that.",
}


class Refused(RuntimeError):
    """A chip's compiler refuses a program that needs more memory than the chip has."""


@dataclass(frozen=True)
class Compiled:
    """A program compiled for a mesh that is not there."""

    report: Communication
    text: str  # the optimized program
    assembly: tuple[str, ...]  # of a GPU's kernels (PTX)
    seconds: float  # that lowering and compiling took


def compile_aot(
    function: Callable, args: tuple, mesh: AbstractMesh, chip: Chip | None = None
) -> Compiled:
    """Compile a function for shapes on an abstract mesh, of a chip's devices or of virtual ones.

    Raises
    ------
    Refused
        If the chip's compiler says that the program does not fit the chip's memory.
    """
    if chip is None and mesh.size > MOST_DEVICES:
        raise ValueError(f"a mesh of {mesh.size} devices; at most {MOST_DEVICES} can be compiled for")
    shapes = shapes_of(args, mesh)
    donated = _hinted(lambda: _donated(function, args))
    flat = jax.jit(_on_leaves(function, args))
    platforms = ["cpu" if chip is None else chip.lowered_for]
    # The mesh says to kernels for which chip they are.
    with jax.sharding.use_abstract_mesh(mesh):
        exported = _hinted(
            lambda: export.export(flat, platforms=platforms, disabled_checks=_OURS)(*shapes)
        )
    try:
        program = bytes(exported.serialize())
    except ImportError as error:
        raise ImportError("flatbuffers is missing: pip install 'gspmd_mcmc[plan]' brings it") from error
    topology = None if chip is None else chip.topology(mesh.size)
    found = _compile(program, {"axes": dict(mesh.shape), "donated": donated, "topology": topology})
    leaves = jax.tree_util.tree_leaves_with_path(args)
    arguments = tuple(
        _argument(path_str(path), leaf, taken, mesh)
        for (path, leaf), taken in zip(leaves, found["inputs"], strict=True)
        if taken is not None
    )
    report = read_report(found["text"], found["memory"], arguments, dict(mesh.shape))
    report = with_origins(report, function, args)
    return Compiled(report, found["text"], tuple(found["assembly"]), found["seconds"])


def build_program(build: Callable, mesh: AbstractMesh) -> tuple[Callable, tuple]:
    """Call ``build(mesh)``, and return the function and the arguments that it gives."""
    if not callable(build):
        raise TypeError(f"build: expected a function of a mesh, got {type(build).__name__}")
    program = _hinted(lambda: build(mesh))
    is_tuple = isinstance(program, tuple | list)
    if not is_tuple or not program or not callable(program[0]):
        of = f" of {', '.join(type(x).__name__ for x in program) or 'nothing'}" if is_tuple else ""
        raise TypeError(
            "build(mesh): expected a function and its arguments, (function, *arguments), got a "
            f"{type(program).__name__}{of}"
        )
    return program[0], tuple(program[1:])


def shapes_of(args: tuple, mesh: AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    """Return the shape of each argument, or of a key's data, with its sharding on the mesh."""
    shapes = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        name, is_number = path_str(path), isinstance(leaf, int | float | complex)
        if not is_number and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"argument {name}: expected an array, a ShapeDtypeStruct or a number, got a "
                f"{type(leaf).__name__}. {_BIND}"
            )
        sharding = _on_mesh(name, leaf, mesh)
        x = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        # A Python number takes the dtype of what it meets.
        is_weak = getattr(x, "weak_type", is_number)
        shape = np.shape(x), jnp.result_type(x)
        shapes.append(jax.ShapeDtypeStruct(*shape, sharding=sharding, weak_type=is_weak))
    return shapes


def _on_mesh(name: str, leaf: Any, mesh: AbstractMesh) -> NamedSharding | None:
    """Return the sharding of an argument that lies on the mesh; None of one on a single device."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or (not isinstance(sharding, NamedSharding) and sharding.num_devices == 1):
        return None
    where = getattr(sharding, "mesh", sharding)
    if where != mesh:
        raise ValueError(
            f"argument {name} lies on {where}, not on the mesh that is planned, {mesh}. "
            "Place it on the mesh that the function gets: gspmd_mcmc.place(tree, mesh, spec)"
        )
    try:
        sharding.shard_shape(np.shape(leaf))
    except ValueError as error:
        raise ValueError(
            f"argument {name} of shape {np.shape(leaf)} does not cut into equal parts under "
            f"{sharding.spec} on {mesh}. gspmd_mcmc.place pads its rows"
        ) from error
    return sharding


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _donated(function: Any, args: tuple) -> list[int]:
    """Return which leaves of the arguments a jitted function takes the memory of."""
    if not hasattr(function, "trace"):
        return []
    infos = jax.tree.leaves(function.trace(*args).args_info)
    if len(infos) != len(jax.tree.leaves(args)):
        raise ValueError(f"the function takes some of its arguments as static. {_BIND}")
    return [i for i, info in enumerate(infos) if info.donated]


def _on_leaves(function: Callable, args: tuple) -> Callable:
    """Make a function of the leaves: what is exported holds neither pytree classes nor typed keys."""
    leaves, treedef = jax.tree.flatten(args)
    impls: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if _is_key(leaf):  # an array, or the shape of one
            jax.eval_shape(lambda key, i=i: impls.update({i: jax.random.key_impl(key)}), leaf)

    def flat(*leaves):
        typed = [
            jax.random.wrap_key_data(leaf, impl=impls[i]) if i in impls else leaf
            for i, leaf in enumerate(leaves)
        ]
        out = jax.tree.leaves(function(*jax.tree.unflatten(treedef, typed)))
        return [jax.random.key_data(x) if _is_key(x) else x for x in out]

    flat.__name__ = getattr(function, "__name__", "planned")
    return flat


def _hinted(call: Callable) -> Any:
    """Call a function; to errors of JAX that shapes without arrays make likely, add what to do."""
    try:
        return call()
    except (TypeError, ValueError, NotImplementedError) as error:
        for sign, hint in _HINTS.items():
            if sign in str(error):
                error.add_note(hint)
        raise


def _compile(program: bytes, options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.bin").write_bytes(program)
        (folder / "options.json").write_text(json.dumps(options))
        # -P: what stands beside the script is not for import.
        command = [sys.executable, "-P", str(Path(aot_process.__file__)), str(folder)]
        environment = _environment() | ({} if options["topology"] is None else _for_chips(folder))
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(
                f"compiling for {math.prod(options['axes'].values())} devices failed, exit status "
                f"{done.returncode}:\n{done.stderr[-4000:]}"
            )
        found = json.loads((folder / "compiled.json").read_text())
    if "refusal" in found:
        # What follows lists the program's allocations, of a kernel thousands.
        raise Refused(found["refusal"].removeprefix("RESOURCE_EXHAUSTED: ").split("\n\n")[0])
    if (options["topology"] or {}).get("platform") == "cuda" and not found["assembly"]:
        raise RuntimeError(
            "the GPU's compiler left no assembly, without which no atomic operation would be seen. JAX "
            f"{jax.__version__} may not know --xla_dump_emitter_re: install another version"
        )
    return found


def _environment() -> dict[str, str]:
    """Return this process's environment, JAX on the CPU with nothing said of its devices."""
    dropped = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORM_NAME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(int(jax.config.jax_enable_x64))}  # pyright: ignore[reportAttributeAccessIssue]


def _for_chips(folder: Path) -> dict[str, str]:
    """Return variables for compilers of chips that are not there.

    libtpu does not look for its chips, and leaves its schedules; a GPU's compiler measures nothing, and
    leaves its assembly.
    """
    schedules = (
        f"--xla_jf_dump_to={folder / 'schedules'} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={aot_process.SCHEDULE}"
    )
    return {
        "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {schedules}".strip(),
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # This process may have loaded it, looking for a TPU.
        # Before JAX 0.11 assembly was left unasked.
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_dump_emitter_re=ptx "
        f"--xla_dump_to={folder / 'dump'}",
        "JAX_ENABLE_COMPILATION_CACHE": "0",  # What comes from a cache leaves no assembly.
    }


def _argument(path: str, leaf: Any, taken: dict[str, Any], mesh: AbstractMesh) -> Argument:
    """Describe an argument by the spec that the program takes it in, and by its number of parts."""
    spec = taken["spec"]
    if spec is not None:
        axes = [tuple(entry) if isinstance(entry, list) else entry for entry in spec]
        return describe_argument(path, leaf, NamedSharding(mesh, P(*axes[: np.ndim(leaf)])))
    found = describe_argument(path, leaf, None)
    return replace(found, bytes_per_device=found.num_bytes // taken["parts"])
