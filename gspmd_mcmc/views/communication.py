"""What a compiled program sends between devices, and what it holds on each.

The optimised program is read as text (`hlo`): the collectives with the loops around them, the
constants; and the compiler is asked for the memory. Nothing is run.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.stages import Compiled, Lowered

from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views.program.parts import Argument
from gspmd_mcmc.views.program.reading import argument, read_report, with_origins
from gspmd_mcmc.views.program.report import Communication


def communication(
    function: Callable | Lowered | Compiled, *args: Any, trips: Mapping[str, int] | None = None
) -> Communication:
    """Compile a function for its arguments and report what it sends and holds.

    Parameters
    ----------
    function
        A function, jitted or to be jitted, or what ``.lower(...)`` or ``.compile()`` of one returned.
    args
        Arrays, pytrees of them, or ``ShapeDtypeStruct`` with shardings. Nothing is run, and for shapes
        nothing is made: the mesh's devices are needed, memory for the arrays is not. For devices that
        are not there, see `plan`.
    trips
        How often loops run whose trip count the compiler does not know, by name: {"leapfrog": 100}.

    Returns
    -------
    Communication
        ``print`` shows it; ``check`` holds it to a budget.
    """
    compiled = _compiled(function, args)
    report = read_report(
        text=compiled.as_text() or "",
        memory=_memory(compiled),
        arguments=_arguments(compiled),
        mesh=_mesh(args, compiled),
    )
    report = with_origins(report, function, args)
    return report.with_trips(**trips) if trips else report


def _compiled(function: Callable | Lowered | Compiled, args: tuple) -> Compiled:
    if isinstance(function, Compiled):
        return function
    if isinstance(function, Lowered):
        return function.compile()
    if not callable(function):
        raise TypeError(
            "communication: expected a function, or what .lower(...) or .compile() of one returned, "
            f"got {type(function).__name__}"
        )
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    return jitted.lower(*args).compile()


def _memory(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    names = {"argument": "argument", "output": "output", "temporary": "temp", "alias": "alias"}
    return {name: int(getattr(memory, f"{theirs}_size_in_bytes", 0)) for name, theirs in names.items()}


def _arguments(compiled: Any) -> tuple[Argument, ...]:
    """Pair the arguments with the shardings that the program takes them in.

    Static ones are none, and one that the function does not use is not in the program: its sharding
    is None.
    """
    args, kwargs = compiled.args_info
    leaves = (jax.tree_util.tree_leaves_with_path(tree) for tree in (args, kwargs))
    taken = jax.tree.structure((args, kwargs)).flatten_up_to(compiled.input_shardings)
    pairs = zip(itertools.chain(*leaves), taken, strict=True)
    return tuple(
        argument(path_str(path), jax.ShapeDtypeStruct(info.shape, info.dtype), sharding)
        for (path, info), sharding in pairs
        if sharding is not None
    )


def _mesh(args: tuple, compiled: Any) -> dict[str, int]:
    """Return the axes of the largest mesh that an array of the program lies on."""
    leaves = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    leaves += jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    meshes = [s.mesh for s in leaves if isinstance(s, NamedSharding)]
    return dict(max(meshes, key=lambda mesh: mesh.size).shape) if meshes else {}
