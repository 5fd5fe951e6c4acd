"""Compile an exported program for devices that are not there; run as a process of its own.

``python aot_process.py FOLDER`` reads ``program.bin`` and ``options.json`` there and writes
``compiled.json``. It imports nothing of the package: the number of devices is set before JAX starts.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import AxisType, NamedSharding


def main(folder: Path) -> None:
    """Compile the program in a folder and write what the report needs."""
    options = json.loads((folder / "options.json").read_text())
    axes = options["axes"]
    jax.config.update("jax_num_cpu_devices", math.prod(axes.values()))
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    # The mesh is set for programs of whose arguments none lies on it.
    with jax.set_mesh(mesh):
        inputs, compiled = _compile(program, mesh, options["donated"])
    memory: Any = compiled.memory_analysis()
    found = {
        "text": compiled.as_text(),
        "inputs": inputs,
        "memory": {
            "argument": memory.argument_size_in_bytes,
            "output": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
        },
    }
    (folder / "compiled.json").write_text(json.dumps(found))


def _compile(program: export.Exported, mesh: Any, donated: list[int]) -> tuple[list, Any]:
    """Compile a program of the arguments that are used; describe how it takes each, None if not."""
    used = program.module_kept_var_idx
    avals, shardings = program.in_avals, program.in_shardings_jax(mesh)
    shapes = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i]) for i in used]

    def call(*arrays):
        given = dict(zip(used, arrays, strict=True))
        unused = {i: jnp.zeros(a.shape, a.dtype) for i, a in enumerate(avals) if i not in given}
        return program.call(*((given | unused)[i] for i in range(len(avals))))

    numbers = tuple(n for n, i in enumerate(used) if i in donated)
    lowered = jax.jit(call, donate_argnums=numbers, keep_unused=True).lower(*shapes)
    # The program is never run: skip optimizing machine code. Its HLO is the same.
    compiled = lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})
    taken = dict(zip(used, compiled.input_shardings[0], strict=True))
    return [_describe(taken[i], a.shape) if i in taken else None for i, a in enumerate(avals)], compiled


def _describe(sharding: Any, shape: tuple[int, ...]) -> dict:
    """Write a sharding that was given or chosen: its spec, and in how many parts the array lies."""
    parts = math.prod(shape) // max(math.prod(sharding.shard_shape(shape)), 1)
    if not isinstance(sharding, NamedSharding):
        return {"spec": [] if sharding.is_fully_replicated else None, "parts": parts}
    return {"spec": [list(a) if isinstance(a, tuple) else a for a in sharding.spec], "parts": parts}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
