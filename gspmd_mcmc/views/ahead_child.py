"""Compile an exported program for devices that are not there; run as a process of its own.

``python ahead_child.py FOLDER`` reads ``program.bin`` and ``mesh.json`` there and writes
``compiled.json``. It imports nothing of the package: the number of devices is set before JAX starts.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import AxisType, NamedSharding


def main(folder: Path) -> None:
    """Compile the program in a folder and write what the report needs."""
    axes = json.loads((folder / "mesh.json").read_text())
    num_devices = math.prod(axes.values())
    jax.config.update("jax_num_cpu_devices", num_devices)
    program = export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    shardings = program.in_shardings_jax(mesh)
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.in_avals, shardings, strict=True)
    ]
    compiled = jax.jit(program.call, keep_unused=True).lower(*shapes).compile()
    memory: Any = compiled.memory_analysis()
    inputs = [_describe(s, a.shape) for s, a in zip(compiled.input_shardings[0], shapes, strict=True)]
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


def _describe(sharding, shape: tuple[int, ...]) -> dict:
    """Write a sharding that the compiler chose or was given: its spec and the shape of a block."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    names = [list(axes) if isinstance(axes, tuple) else axes for axes in spec]
    return {"spec": names, "block": sharding.shard_shape(shape)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
