"""What stands for an object in a meaning: its content, as a hashable value, or its identity."""

import pickle
import sys
import types
import warnings
import weakref
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.tree import is_traced

_SMALL_BYTES = 1 << 12
_CONTENT_BYTES = 1 << 20  # of a jax array, which cannot change where it lies
_VALUES = sys.stdlib_module_names | {"jax", "jaxlib"}  # what compares by value there does not change
_HEAP_TYPE = 1 << 9  # a flag of classes that a class statement makes


class Same:
    """Something that is compared by identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


def digest_of(array: np.ndarray) -> tuple:
    """Describe an array by its numbers; a large one by a hash of 64 bits."""
    data: Any = array.tobytes()
    if array.nbytes > _SMALL_BYTES:
        data = hash(data)
    return (array.dtype, array.shape, data)


def of_jax_array(array: jax.Array) -> tuple:
    """Describe an array by its numbers; a large one, or one that is not all here, is itself."""
    if is_traced(array) or not array.is_fully_addressable or array.is_deleted():
        return (Same(array),)
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    with jax.ensure_compile_time_eval():
        numbers = jax.random.key_data(array) if is_key else array
    if numbers.nbytes > _CONTENT_BYTES:
        return (Same(array),)
    is_weak = getattr(array, "weak_type", False)  # a key has none
    kind = (str(array.dtype), array.shape, is_weak, array.sharding)
    return (*kind, np.asarray(jax.device_get(numbers)).tobytes())


def pickle_of(node: Any) -> bytes | None:
    """Return the pickle of an object, or None if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pickle.dumps(node)
    except Exception:  # whatever an object of unknown make raises
        return None


def is_code(thing: Any) -> bool:
    """Tell whether an attribute of a class is one of its methods."""
    is_wrapper = callable(thing) and hasattr(thing, "__wrapped__")  # as jax.jit makes them
    return is_wrapper or isinstance(thing, types.FunctionType | property | staticmethod | classmethod)


def is_leaf(node: Any) -> bool:
    """Tell whether an object is a leaf of pytrees."""
    return jax.tree_util.all_leaves([node])


def is_data(node: Any) -> bool:
    """Tell whether all fields of a user's object count: JAX reads those of a pytree without code."""
    cls = type(node)
    looks_up = any("__getattr__" in vars(c) or "__getattribute__" in vars(c) for c in cls.__mro__[:-1])
    return hasattr(cls, "__dataclass_fields__") or looks_up or not is_leaf(node)


def unboxed(function: Any) -> Any:
    """Return the function of a ``Partial``, out of the box that JAX puts a ``functools.partial`` in."""
    return function.fun if type(function).__name__ == "_HashableCallableShim" else function


def is_of_python(cls: type) -> bool:
    """Tell whether instances show all that they keep: no class of theirs is written in C."""
    return all(c.__flags__ & _HEAP_TYPE for c in cls.__mro__[:-1])


def is_value(node: Any) -> bool:
    """Tell whether an object of the standard library or of JAX compares by value."""
    cls = type(node)
    if cls.__module__.split(".")[0] not in _VALUES or isinstance(node, weakref.ref):
        return False
    if cls.__hash__ in (None, object.__hash__) or cls.__eq__ is object.__eq__:
        return False
    try:
        hash(node)
    except Exception:  # of something that it holds
        return False
    return True
