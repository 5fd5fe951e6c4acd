"""Arrays that a function closes over, with names that its author knows."""

from typing import Any

import jax
import numpy as np

from gspmd_mcmc.functions.meaning import Walk


def closed_over(function: Any, args: tuple = ()) -> list[tuple[str, Any]]:
    """Find arrays that a function reads from outside: (where, array), each array once.

    The search goes through closures, globals that the code names, bound methods, partials, defaults,
    and the attributes and items of objects that it meets, also of functions that are in the arguments.
    The arguments' own arrays are not closed over.
    """
    leaves = {id(leaf) for leaf in jax.tree.leaves(args)}
    found = [*Walk(function).objects, *Walk(args, where="args").objects]
    arrays = {id(x): (where, x) for where, x in reversed(found) if _is_array(x) and id(x) not in leaves}
    return list(reversed(arrays.values()))


def _is_array(node: Any) -> bool:
    is_numpy = isinstance(node, np.ndarray) and node.dtype.names is None
    return isinstance(node, jax.Array) or (is_numpy and node.dtype.kind in "biufcV")
