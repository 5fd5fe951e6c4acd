"""What the processes of one run are given, in words that they can compare before they compute."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gspmd_mcmc import tree
from gspmd_mcmc.placement.agreement import require_agreement
from gspmd_mcmc.placement.processes import is_local
from gspmd_mcmc.tree import PyTree, path_str

PLAIN = (bool, int, float, str, tuple, type(None))


def require_same_run(
    call: str, mesh: Mesh, target: Any, given: dict[str, Any], settings: dict[str, Any]
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
    facts |= {name: _value(value) for name, value in settings.items()}
    for name, thing in ({"target": target} | given).items():
        facts |= _facts(name, thing)
    require_agreement(call, facts)


def _facts(name: str, thing: Any) -> dict[str, str]:
    facts = {name: _kind(thing)}
    if dataclasses.is_dataclass(thing):
        # What is not shown, as the meanings of functions, is of this process alone.
        settings = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.repr}
        facts |= {f"{name}.{k}": repr(v) for k, v in settings.items() if isinstance(v, PLAIN)}
        # A kernel holds the target, which has its own facts.
        thing = tree.replace(thing, target=None) if "target" in settings else thing
        thing = getattr(thing, "position", thing)
    leaves = jax.tree_util.tree_leaves_with_path(thing)
    return facts | {f"{name} {path_str(path)}": _value(leaf) for path, leaf in leaves}


def _kind(thing: Any) -> str:
    function = getattr(thing, "func", thing)  # of a Partial
    return getattr(function, "__qualname__", type(thing).__name__)


def _value(leaf: PyTree) -> str:
    """Describe a leaf: with a digest of its values, where every process should hold the same."""
    if not hasattr(leaf, "dtype"):
        return repr(leaf) if isinstance(leaf, PLAIN) else _kind(leaf)
    described = f"{leaf.dtype}{list(leaf.shape)}"
    sharding = getattr(leaf, "sharding", None)
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
