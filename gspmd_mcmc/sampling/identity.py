"""What a run was given, in words that processes, a later call and a reader of its draws can compare."""

import dataclasses
import datetime
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.agreement import require_agreement
from gspmd_mcmc.multihost.processes import is_local, to_host
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.sampling.run import Plan
from gspmd_mcmc.targets.streaming.rows import Rows
from gspmd_mcmc.targets.streaming.slots import Slots
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Role, path_str, roles

PLAIN = (bool, int, float, str, tuple, type(None))
MOST_LINES = 20
LIBRARIES = ("gspmd_mcmc", "jax", "jaxlib", "numpy", "tensorstore", "orbax-checkpoint")
Facts = dict[str, str]


class Text(str):
    """A leaf that is described already."""


def require_same_on_processes(
    call: str, mesh: Mesh, target: Target, given: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Raise `ProcessesDisagree`, on every process, unless all of them were given the same run.

    Arrays that every process holds whole are compared by value, arrays that lie over processes by
    shape, dtype and spec, functions by name.
    """
    facts = {"jax": jax.__version__, "mesh": str(dict(mesh.shape))}
    facts |= {name: _value(value) for name, value in settings.items()}
    for name, thing in ({"target": target} | given).items():
        # Of a mode or of earlier draws, the position.
        facts |= _walk(getattr(thing, "position", thing), name, _value)
    require_agreement(call, facts)


def facts_of_run(plan: Plan, kernel: Kernel, layout: Layout) -> Facts:
    """Describe what has to stay the same for a run to be continued, on this mesh or another.

    More draws may be asked for, so ``num_samples`` is left out. Where the chains started is in the
    run's state. Of the target's arrays only the shapes are described, without pad.
    """
    facts = {"rng_key": _value(plan.rng_key)}
    facts |= {name: str(count) for name, count in plan.counts.items() if name != "num_samples"}
    given = {"kernel": tree.replace(kernel, target=None)}
    given |= {"warmup": plan.adaptation, "collect": plan.collect}
    for name, thing in given.items():
        of_leaves = roles(thing, layout.treedef)
        described = jax.tree.map(partial(_value_on_any_mesh, layout), thing, of_leaves)
        facts |= _walk(described, name, _value)
    of_plates = {id(x): p.rows for p in kernel.target.plates for x in jax.tree.leaves(p.data)}

    def real_shape(leaf: Any) -> str:
        rows = of_plates.get(id(leaf))
        return f"{leaf.dtype}{list(leaf.shape) if rows is None else [rows.num_rows, *leaf.shape[1:]]}"

    facts |= _walk(kernel.target, "target", real_shape, has_values=False)
    one = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    for path, i in jax.tree_util.tree_leaves_with_path(one):
        (shape, dtype), rows = layout.shapes[i], layout.rows[i]
        real = list(shape) if rows is None else [rows.num_rows, *shape[1:]]
        facts[f"position{path_str(path)}"] = f"{dtype}{real}{'' if rows is None else ' local'}"
    return facts


def require_same(saved: Facts, given: Facts, path: Any) -> None:
    """Raise a ValueError that names what differs, unless a folder holds the run that was given."""
    names = [name for name in saved | given if saved.get(name) != given.get(name)]
    if not names:
        return
    lines = [f"  {n}: saved {saved.get(n, 'nothing')}, given {given.get(n, 'nothing')}" for n in names]
    more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    raise ValueError(
        f"checkpoint: {path} holds another run. What differs:\n"
        + "\n".join(lines[:MOST_LINES] + more)
        + "\nCall sample with the arguments that began that run, or give another folder"
    )


def attributes_of(plan: Plan, kernel: Kernel, mesh: Mesh | None) -> dict[str, Any]:
    """Return what a store of draws records about its run.

    Names go to strings, numbers and lists of them, so that the store can become netCDF too.
    """
    versions = versions_of_libraries()
    found = {
        "creation_library": "gspmd_mcmc",
        "creation_library_language": "Python",
        "creation_library_version": versions["gspmd_mcmc"],
        "inference_library": "gspmd_mcmc",
        "inference_library_version": versions["gspmd_mcmc"],
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": [
            f"Python {platform.python_version()}",
            *(f"{name} {version}" for name, version in versions.items()),
        ],
        "platform": jax.default_backend(),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "rng_key_data": np.asarray(jax.random.key_data(plan.rng_key)).ravel().tolist(),
        "rng_key_impl": str(jax.random.key_impl(plan.rng_key)),
        "kernel": type(kernel).__name__,
        "note": kernel.note,
        "draws_momenta": int(kernel.draws_momenta),  # netCDF knows no bool
        "warmup": type(plan.adaptation).__name__,
        "collect": _kind(plan.collect),
        **plan.counts,
    }
    if kernel.max_tree_depth is not None:
        found["max_tree_depth"] = kernel.max_tree_depth
    if mesh is not None:
        found |= {"mesh_axes": list(mesh.axis_names), "mesh_shape": list(mesh.devices.shape)}
    return found


def versions_of_libraries() -> dict[str, str]:
    """Return the versions of the libraries that a run depends on, of those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def _walk(node: Any, path: str, array: Callable[[Any], str], *, has_values: bool = True) -> Facts:
    """Describe every part of a tree: functions and classes by name, arrays by ``array(leaf)``.

    Values that are neither may be left out.
    """
    facts, children = {}, {}
    if isinstance(node, Text):
        facts[path] = str(node)
    elif isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        facts[path] = array(node)
    elif isinstance(node, Partial):
        facts[path] = _kind(node)
        children = {f"{path}.args": node.args, f"{path}.keywords": node.keywords}
    elif isinstance(node, Rows):
        pass  # How they are cut depends on the mesh.
    elif is_padded(node):
        children = {path: node.values}  # whether there is pad depends on it too
    elif isinstance(node, Slots):
        facts[path] = "" if node.order is None else node.order.digest
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        facts[path] = _kind(node)
        # Fields that are not shown, such as the meanings of functions, belong to this process alone.
        shown = [f.name for f in dataclasses.fields(node) if f.repr]
        children = {f"{path}.{name}": getattr(node, name) for name in shown}
    elif isinstance(node, dict):
        children = {f"{path}[{key!r}]": x for key, x in node.items()}
    elif isinstance(node, list | tuple):
        children = {f"{path}[{i}]": x for i, x in enumerate(node)}
    elif has_values or callable(node):
        facts[path] = repr(node) if isinstance(node, PLAIN) else _kind(node)
    for name, child in children.items():
        facts |= _walk(child, name, array, has_values=has_values)
    return facts


def _value_on_any_mesh(layout: Layout, leaf: Any, role: Role) -> Text:
    """Describe an array by what no mesh changes: of a leaf like the position, its real rows."""
    if role.leaf is not None and hasattr(leaf, "dtype"):
        rows, axis = layout.rows[role.leaf], role.has_chains + role.num_axes
        leaf = to_host(leaf)
        if rows is not None:
            leaf = leaf[(slice(None),) * axis + (slice(rows.num_rows),)]
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
        return Text(f"{leaf.dtype} of {leaf.ndim} axes")
    return Text(_value(leaf))


def _value(leaf: Any) -> str:
    """Describe a value; of an array that this process can read, with its numbers or their digest."""
    if not hasattr(leaf, "dtype"):
        return repr(leaf) if isinstance(leaf, PLAIN) else _kind(leaf)
    described = f"{leaf.dtype}{list(leaf.shape)}"
    if not is_local(leaf):
        sharding = leaf.sharding
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


def _kind(thing: Any) -> str:
    """Name a function or a class, without its module: a notebook's code may move to a file."""
    inner = getattr(thing, "func", thing)  # of a Partial
    return getattr(inner, "__qualname__", type(inner).__qualname__)
