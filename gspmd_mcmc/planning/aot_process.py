"""Compile an exported program for devices that are not there; run as a process of its own.

``python aot_process.py FOLDER`` reads ``program.bin`` and ``options.json`` there and writes
``compiled.json``. It imports nothing of the package: the number of devices is set before JAX starts.

The devices are virtual ones of the CPU, or those of a topology: of chips whose compiler is installed
here. A GPU's compiler leaves its kernels' assembly in the folder ``dump``, a TPU's in ``schedules`` how
many cycles it takes for each: of kernels that are no programs of XLA's the text of the program would
not say.
"""

import json
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding

# A TPU's kernel in the text of a program, as far as its name and where its settings begin.
KERNEL = re.compile(r'%?(\S+) = [^\n]*custom_call_target="tpu_custom_call"[^\n]*?backend_config=\{')
SCHEDULE = "packed-bundles-post-ra"  # with all registers found: what is left is where to wait
# A bundle of instructions: whether a loop begins with it, a mark for each loop that it is in, the rest.
BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(LB|) *\w* *:([> ]*)\{(.*)", re.M)
ROUNDS = re.compile(r", (\d+) /\* loop exit test \*/")
# A loop over a kernel's grid goes on for as many steps, in which it only fetches or writes back.
OF_A_GRID, STEPS_AROUND = "iteration index, stage", 2


def main(folder: Path) -> None:
    """Compile the program in a folder and write what the report needs."""
    options = json.loads((folder / "options.json").read_text())
    if options["topology"] is None:
        jax.config.update("jax_num_cpu_devices", math.prod(options["axes"].values()))
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    found: dict[str, Any]
    try:
        found = _compile(program, _mesh(**options), options["donated"])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = {"refusal": str(error)}  # The chip does not have the memory.
    if "text" in found:
        found["text"] = _with_cycles(found["text"], folder / "schedules")
    found["assembly"] = [path.read_text() for path in sorted(folder.glob("dump/*.ptx"))]
    (folder / "compiled.json").write_text(json.dumps(found))


def _mesh(axes: dict[str, int], topology: dict[str, Any] | None, **_: Any) -> Mesh:
    """Make the mesh: neighbors on an axis of it are neighbors on the chips."""
    shape, names = tuple(axes.values()), tuple(axes)
    types = (AxisType.Auto,) * len(axes)
    if topology is None:
        return jax.make_mesh(shape, names, axis_types=types)
    devices = topologies.get_topology_desc(**topology).devices[: math.prod(shape)]
    try:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):  # They are no box of chips.
        grid = np.asarray(devices, object).reshape(shape)
    return Mesh(grid, names, axis_types=types)


def _compile(program: export.Exported, mesh: Mesh, donated: list[int]) -> dict[str, Any]:
    """Compile a program of the arguments that are used; describe how it takes each, None if not."""
    used = program.module_kept_var_idx
    avals, shardings = program.in_avals, program.in_shardings_jax(mesh)
    shapes = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i]) for i in used]

    def call(*arrays):
        given = dict(zip(used, arrays, strict=True))
        unused = {i: jnp.zeros(a.shape, a.dtype) for i, a in enumerate(avals) if i not in given}
        return program.call(*((given | unused)[i] for i in range(len(avals))))

    numbers = tuple(n for n, i in enumerate(used) if i in donated)
    began = time.perf_counter()
    # The mesh is set for programs of whose arguments none lies on it.
    with jax.set_mesh(mesh):
        traced = jax.jit(call, donate_argnums=numbers, keep_unused=True).trace(*shapes)
        lowered = traced.lower(lowering_platforms=program.platforms)
        # A program for the CPU is never run: skip optimizing machine code. Its HLO is the same.
        quick: Any = {"xla_backend_optimization_level": "0"} if program.platforms == ("cpu",) else {}
        compiled = lowered.compile(compiler_options=quick)
    seconds = time.perf_counter() - began
    taken = dict(zip(used, compiled.input_shardings[0], strict=True))
    memory: Any = compiled.memory_analysis()
    return {
        "text": compiled.as_text(),
        "seconds": seconds,
        "inputs": [_describe(taken[i], a.shape) if i in taken else None for i, a in enumerate(avals)],
        "memory": {
            "argument": memory.argument_size_in_bytes,
            "output": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
        },
    }


def _with_cycles(text: str, schedules: Path) -> str:
    """Write into the settings of a TPU's kernels how many cycles the compiler scheduled."""

    def written(match: re.Match) -> str:
        cycles = _scheduled_cycles(schedules, match[1])
        return match[0] if cycles is None else f'{match[0]}"estimated_cycles":"{cycles}",'

    return KERNEL.sub(written, text)


def _scheduled_cycles(schedules: Path, name: str) -> int | None:
    """Return a kernel's cycles, one a bundle of instructions, of all steps; None if not known."""
    programs = list(schedules.glob(f"*-{name}-[0-9]*-{SCHEDULE}.txt"))
    return _cycles(programs[0].read_text()) if len(programs) == 1 else None


def _cycles(schedule: str) -> int | None:
    """Count bundles, those of a loop as often as it goes round.

    None if a loop does not say how often, or where it begins, and if there are no bundles.
    """
    opened = [Loop(rounds=1)]  # the kernel, and the loops that a bundle is in
    for begins, marks, instructions in BUNDLE.findall(schedule):
        # A bundle without instructions, which waits, has no marks: it is where the one before is.
        if not instructions.lstrip().startswith("}"):
            _close(opened, marks.count(">") + (not begins))
        opened += [Loop()] if begins else []
        opened[-1].read(instructions)
    _close(opened, 1)
    (kernel,) = opened
    is_known = kernel.cycles > 0 and kernel.rounds == 1  # NaN is not
    return int(kernel.cycles) if is_known else None


def _close(opened: list["Loop"], num: int) -> None:
    """Leave so many loops open, and count the others' bundles in those around them."""
    while len(opened) > max(num, 1):
        loop = opened.pop()
        opened[-1].cycles += loop.cycles * max(loop.rounds - loop.around, 1)


@dataclass
class Loop:
    """What is known of a loop after some of its bundles."""

    rounds: float = math.nan
    around: int = 0
    cycles: float = 0

    def read(self, instructions: str) -> None:
        """Take in one more bundle."""
        self.cycles += 1
        found = ROUNDS.search(instructions)
        self.rounds = int(found[1]) if found else self.rounds
        if OF_A_GRID in instructions:
            self.around = STEPS_AROUND


def _describe(sharding: Any, shape: tuple[int, ...]) -> dict:
    """Write a sharding that was given or chosen: its spec, and in how many parts the array lies."""
    parts = math.prod(shape) // max(math.prod(sharding.shard_shape(shape)), 1)
    if not isinstance(sharding, NamedSharding):
        return {"spec": [] if sharding.is_fully_replicated else None, "parts": parts}
    return {"spec": [list(a) if isinstance(a, tuple) else a for a in sharding.spec], "parts": parts}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
