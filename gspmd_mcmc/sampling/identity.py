"""What a run was given, in words that processes, and a script that is run again, can compare."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.agreement import require_agreement
from gspmd_mcmc.multihost.processes import is_local
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.targets.streaming.rows import Rows
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import path_str

PLAIN = (bool, int, float, str, tuple, type(None))
MOST_LINES = 20
Facts = dict[str, str]


def require_same_on_processes(
    call: str, mesh: Mesh, target: Target, given: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Raise, on every process, unless all of them were given the same run.

    Arrays that every process holds whole are compared by value, those laid over processes by shape,
    dtype and spec; functions by name.

    Parameters
    ----------
    call
        The function that was called.
    mesh, target
        As given to it.
    given
        Name of an argument to a position, kernel, adaptation or function.
    settings
        Name of an argument to a number, text or key.

    Raises
    ------
    ProcessesDisagree
        With each thing that differs, and where.
    """
    facts = {"jax": jax.__version__, "mesh": str(dict(mesh.shape))}
    facts |= {name: value_text(value) for name, value in settings.items()}
    for name, thing in ({"target": target} | given).items():
        facts |= facts_of(name, thing)
    require_agreement(call, facts)


def facts_of_run(
    rng_key: jax.Array,
    kernel: Kernel,
    adaptation: Adaptation,
    collect: Partial,
    layout: Layout,
    counts: dict[str, int],
) -> Facts:
    """Describe a run: what has to be the same for it to be continued, on this mesh or another.

    How many draws are asked for may grow, and where the chains start is in the run already.
    """
    facts = {"rng_key": value_text(rng_key)}
    facts |= {name: str(count) for name, count in counts.items() if name != "num_samples"}
    for name, thing in (("kernel", kernel), ("warmup", adaptation), ("collect", collect)):
        facts |= facts_of(name, thing, on_any_mesh=True)
    return facts | model_facts(kernel.target, layout)


def facts_of(name: str, thing: Any, *, on_any_mesh: bool = False) -> Facts:
    """Describe a position, kernel, adaptation or function: its settings, and its arrays.

    Parameters
    ----------
    name
        The name of the argument.
    thing
        The thing. A kernel's target has facts of its own.
    on_any_mesh
        Whether what depends on the mesh is left out: the values of arrays that lie over devices.
    """
    facts = {name: _kind(thing)}
    if dataclasses.is_dataclass(thing):
        # What is not shown, as the meanings of functions, is of this process alone.
        fields = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.repr}
        settings = {k: v for k, v in fields.items() if k != "target" and not _has_arrays(v)}
        facts |= {
            f"{name}.{k}": repr(v) if isinstance(v, PLAIN) else _kind(v) for k, v in settings.items()
        }
        thing = tree.replace(thing, target=None) if "target" in fields else thing
        thing = fields.get("position", thing)
    for path, leaf in jax.tree_util.tree_leaves_with_path(thing):
        facts[f"{name} {path_str(path)}"] = value_text(leaf, on_any_mesh=on_any_mesh)
    return facts


def _has_arrays(value: Any) -> bool:
    return any(hasattr(x, "dtype") for x in jax.tree.leaves(value))


def value_text(leaf: Any, *, on_any_mesh: bool = False) -> str:
    """Describe a leaf: with a digest of its values, where every process should hold the same."""
    if not hasattr(leaf, "dtype"):
        return repr(leaf) if isinstance(leaf, PLAIN) else _kind(leaf)
    described = f"{leaf.dtype}{list(leaf.shape)}"
    sharding = getattr(leaf, "sharding", None)
    if on_any_mesh and isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
        return f"{leaf.dtype} of {leaf.ndim} axes"
    if not is_local(leaf):
        return f"{described} under {sharding.spec if isinstance(sharding, NamedSharding) else sharding}"
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return described
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return f"{jax.random.key_impl(leaf)} key {np.asarray(jax.random.key_data(leaf)).tolist()}"
    array = np.asarray(leaf)
    if array.size <= 4:
        return f"{described} {array.tolist()}"
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
    return f"{described} with digest {digest}"


def model_facts(target: Target, layout: Layout) -> Facts:
    """Describe a model: name of a part of the target to its shape, function or class, and the position.

    Shapes are those of real rows, as pads depend on the mesh. Values are not looked at.
    """
    found = {f"target{path}": what for path, what in _parts(target, "", None)}
    one = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    for path, i in jax.tree_util.tree_leaves_with_path(one):
        (shape, dtype), rows = layout.shapes[i], layout.rows[i]
        real = list(shape) if rows is None else [rows.num_rows, *shape[1:]]
        found[f"position{path_str(path)}"] = f"{dtype}{real}{'' if rows is None else ' local'}"
    return found


def require_same(saved: Facts, given: Facts, path: Any) -> None:
    """Raise, with each thing that differs, where a folder holds another run.

    Raises
    ------
    ValueError
        If any part differs, is missing, or is new.
    """
    names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
    if not names:
        return
    lines = [f"  {n}: saved {saved.get(n, 'nothing')}, given {given.get(n, 'nothing')}" for n in names]
    more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    raise ValueError(
        f"checkpoint: {path} holds another run. What differs:\n"
        + "\n".join(lines[:MOST_LINES] + more)
        + "\nCall sample as that run was begun, or give another folder"
    )


def row_cuts(target: Target) -> dict[str, list]:
    """Return how the rows of each plate are cut: [rows, padded rows, mesh axes, rows of a tile]."""
    return {
        f"plate {i}": [p.rows.num_rows, p.rows.num_padded, list(p.rows.axes), p.tile_rows]
        for i, p in enumerate(target.plates)
    }


def _parts(node: Any, path: str, rows: Rows | None) -> Iterator[tuple[str, str]]:
    if isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        yield path, _shape(node, rows)
    elif isinstance(node, Partial):
        yield path, _kind(node)
        yield from _parts(node.args, path, rows)
        yield from _parts(node.keywords, path, rows)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type | Rows):
        yield path, _kind(node)
        own = getattr(node, "rows", None)
        for field in dataclasses.fields(node):
            rows_of_field = own if isinstance(own, Rows) else rows
            yield from _parts(getattr(node, field.name), f"{path}.{field.name}", rows_of_field)
    elif isinstance(node, dict):
        for key, child in node.items():
            yield from _parts(child, f"{path}[{key!r}]", rows)
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _parts(child, f"{path}[{i}]", rows)


def _shape(leaf: Any, rows: Rows | None) -> str:
    shape = list(leaf.shape)
    if rows is not None and shape and shape[0] == rows.num_padded:
        shape[0] = rows.num_rows
    return f"{leaf.dtype}{shape}"


def _kind(thing: Any) -> str:
    """Name a function or a class; without its module, as a notebook's code may move to a file."""
    inner = getattr(thing, "func", thing)  # of a Partial
    return getattr(inner, "__qualname__", type(inner).__qualname__)
