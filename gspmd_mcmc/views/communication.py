"""What a compiled program sends between devices, and what it holds on each.

The optimized program is read as text (`gspmd_mcmc.views.program.hlo`): the collectives with the loops
around them, and the constants; the compiler is asked for the memory. Nothing is run.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Compiled, Lowered

from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views.program import device_groups, hlo
from gspmd_mcmc.views.program.closures import closed_over
from gspmd_mcmc.views.program.hlo import hlo_dtype, num_bytes_of, shapes_of
from gspmd_mcmc.views.program.report import Argument, Collective, Communication, Constant

MOST_CONSTANTS = 20
NAMED_BYTES = 1000  # smaller constants are given no origin
_CALLERS = tuple(f"{Path(__file__).parents[1] / room}/" for room in ("views", "planning"))
_PLANNED = ("argument_bytes", "output_bytes", "temporary_bytes", "alias_bytes")


def communication(
    function: Callable | Lowered | Compiled, *args: Any, trips: Mapping[str, int] | None = None
) -> Communication:
    """Compile a function for its arguments and report what it sends and holds.

    Parameters
    ----------
    function
        A function, jitted or not, or what its ``.lower(...)`` or ``.compile()`` returned.
    args
        Arrays, pytrees of them, or ``ShapeDtypeStruct`` with shardings. Nothing is run, and shapes need
        no memory for arrays, but the mesh's devices must exist; for those that do not, see `plan`.
    trips
        How often loops run whose trip count the compiler does not know, by name: {"leapfrog": 100}.

    Returns
    -------
    Communication
        ``print`` shows it; ``check`` holds it to a budget.
    """
    compiled: Any = function
    if not isinstance(function, Lowered | Compiled):
        if not callable(function):
            raise TypeError(
                "communication: expected a function, or what .lower(...) or .compile() of one "
                f"returned, got {type(function).__name__}"
            )
        jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
        compiled = jitted.lower(*args)
    if isinstance(compiled, Lowered):
        compiled = compiled.compile()
    # The largest mesh that an array of the program lies on.
    leaves = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    leaves += jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [s.mesh for s in leaves if isinstance(s, NamedSharding)]
    mesh = dict(max(meshes, key=lambda mesh: mesh.size).shape) if meshes else {}
    memory, arguments = memory_of(compiled), _arguments(compiled)
    report = read_report(compiled.as_text() or "", memory, arguments, mesh)
    report = with_origins(report, function, args)
    return report.with_trips(**trips) if trips else report


def memory_of(compiled: Any) -> dict[str, int]:
    """Return the bytes on a device that the compiler plans, by what they hold."""
    memory = compiled.memory_analysis()
    names = {"argument": "argument", "output": "output", "temporary": "temp", "alias": "alias"}
    return {name: int(getattr(memory, f"{theirs}_size_in_bytes", 0)) for name, theirs in names.items()}


def _arguments(compiled: Any) -> tuple[Argument, ...]:
    """Describe the arguments under the shardings that the program takes them in.

    Static ones are left out, and so are those that the function does not use: their sharding is None.
    """
    args, kwargs = compiled.args_info
    leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (args, kwargs))
    taken = jax.tree.structure((args, kwargs)).flatten_up_to(compiled.input_shardings)
    pairs = zip(itertools.chain(*leaves), taken, strict=True)
    return tuple(
        describe_argument(path_str(path), jax.ShapeDtypeStruct(info.shape, info.dtype), sharding)
        for (path, info), sharding in pairs
        if sharding is not None
    )


def read_report(
    text: str, memory: Mapping[str, int], arguments: tuple[Argument, ...], mesh: dict[str, int]
) -> Communication:
    """Make the report of what ``compiled.as_text()`` returned; ``memory`` is that of `memory_of`."""
    program = hlo.read_program(text)
    walk = list(program.walk())
    numbers = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    num_devices = next((int(n) for n in numbers if int(n) > 1), math.prod(mesh.values()))
    operations = itertools.chain.from_iterable(program.computations.values())
    found = [(num_bytes_of(o.shape), _bare(o.shape)) for o in operations if o.opcode == "constant"]
    largest = sorted(found, key=lambda pair: -pair[0])
    return Communication(
        num_devices=num_devices,
        mesh=mesh,
        collectives=_collectives(program, walk, mesh, num_devices),
        unknown=_unknown(program, walk),
        constants=tuple(Constant(shape, size) for size, shape in largest[:MOST_CONSTANTS]),
        arguments=arguments,
        constant_bytes=sum(size for size, _ in found),
        loop_nests=program.loop_nests(),
        **dict.fromkeys(_PLANNED, 0) | {f"{name}_bytes": size for name, size in memory.items()},
    )


def with_origins(report: Communication, function: Any, args: tuple) -> Communication:
    """Name the closed-over arrays that constants are."""
    if report.largest_constant_bytes < NAMED_BYTES:
        return report
    arrays = closed_over(function, args)
    constants = tuple(replace(c, origin=_origin(c, arrays)) for c in report.constants)
    return replace(report, constants=constants)


def _origin(constant: Constant, arrays: list[tuple[str, Any]]) -> str:
    """Find the array of a constant's shape; or else of its size, as the compiler may reshape it."""
    if constant.num_bytes < NAMED_BYTES:
        return ""
    ((dtype, dims),) = shapes_of(constant.shape)
    alike = [(name, array) for name, array in arrays if math.prod(array.shape) == math.prod(dims)]
    same = [(name, array) for name, array in alike if tuple(array.shape) == dims]
    # The compiler may have converted it, or given it another shape.
    exact = [(name, array) for name, array in same if hlo_dtype(_dtype_in_program(array)) == dtype]
    return " or ".join(name for name, _ in exact or same or alike)


def _collectives(
    program: hlo.Program, walk: list[hlo.Step], mesh: dict[str, int], num_devices: int
) -> tuple[Collective, ...]:
    def is_outside(frame: hlo.Frame) -> bool:
        return not frame.file.startswith(_CALLERS)

    computations = program.computations.values()
    fusions = [o for o in itertools.chain.from_iterable(computations) if o.opcode == "fusion"]
    fusion_of = {name: o for o in fusions for name in hlo.called_computations(o)}
    found = []
    for operation, computation, loops in walk:
        if hlo.collective_kind(operation) and hlo.is_start(operation):
            siblings = {o.name: o for o in program.computations[computation]}
            axes, group_size = _devices(operation, mesh, num_devices)
            operands = _bare(", ".join(siblings[o].shape for o in operation.operands if o in siblings))
            fusion = fusion_of.get(computation)
            kind, shape = hlo.kind_and_result(operation, siblings, is_fused=fusion is not None)
            # What is fused may have lost its name and its lines; the fusion has them.
            named = operation if operation.op_name or fusion is None else fusion
            found.append(
                Collective(
                    kind=kind,
                    shape=_bare(shape),
                    num_bytes=num_bytes_of(shape),
                    operand_shape=operands,
                    operand_bytes=num_bytes_of(operands),
                    axes=axes,
                    group_size=group_size,
                    loops=loops,
                    op_name=named.op_name,
                    # The call of `communication` itself and what led to it caused nothing.
                    stack=tuple(itertools.takewhile(is_outside, program.stack(named))),
                )
            )
    return tuple(found)


def _devices(
    operation: hlo.Operation, mesh: dict[str, int], num_devices: int
) -> tuple[tuple[str, ...], int]:
    """Return the mesh axes that a collective runs over, and the size of its groups."""
    pairs = device_groups.read_pairs(operation.attributes)
    if pairs is not None:
        axes = device_groups.axes_of_pairs(pairs, mesh) if mesh else ()
        return axes, math.prod(mesh[a] for a in axes) if axes else len(np.unique(pairs))
    groups = device_groups.read_groups(operation.attributes, num_devices)
    return ((), 0) if groups is None else (device_groups.axes_of_groups(groups, mesh), groups.shape[1])


def _unknown(program: hlo.Program, walk: list[hlo.Step]) -> tuple[str, ...]:
    """Find what has no known form, and collectives of which it is not known from where they run."""
    reached = {name for _, name, _ in walk}
    operations = [(o, name in reached) for name, c in program.computations.items() for o in c]
    lost = (o.line for o, runs in operations if not runs and hlo.collective_kind(o) and hlo.is_start(o))
    return (*program.unread, *(o.line for o, _ in operations if hlo.is_unknown(o)), *lost)


def _bare(shape: str) -> str:
    """Write a shape without its layout: f32[8,16], and several of them one after the other."""
    return ", ".join(f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in shapes_of(shape))


def describe_argument(path: str, leaf: Any, sharding: Any) -> Argument:
    """Describe an array that goes into a program under a sharding."""
    shape = tuple(np.shape(leaf))
    dtype = _dtype_in_program(leaf)
    block = sharding.shard_shape(shape) if sharding is not None else shape
    return Argument(
        path=path,
        shape=shape,
        dtype=str(dtype),
        spec=sharding.spec if isinstance(sharding, NamedSharding) else None,
        num_bytes=math.prod(shape) * dtype.itemsize,
        bytes_per_device=math.prod(block) * dtype.itemsize,
    )


def _dtype_in_program(leaf: Any) -> Any:
    """Return the dtype that an array has as an argument or a constant: a double may become single."""
    return jax.dtypes.canonicalize_dtype(jax.numpy.result_type(leaf), allow_extended_dtype=True)
