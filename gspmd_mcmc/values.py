"""What stands for a value where values are compared: its content, or its identity."""

import datetime
import decimal
import functools
import marshal
import pickle
import sys
import types
import warnings
import weakref
from hashlib import blake2b
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.tree import is_traced

_ATOMS = {bool, int, float, complex, str, bytes, type(None), type(Ellipsis)}
_SHOWN = {range, datetime.datetime, datetime.time, decimal.Decimal}
_MOST_BYTES, _MOST_ITEMS = 1 << 20, 100  # a larger jax.Array is compared by identity
_VALUES = sys.stdlib_module_names | {"jax", "jaxlib"}  # what compares by value there does not change
_CONVERTED: dict[int, tuple[weakref.ref, Any]] = {}  # NumPy arrays that JAX converts, and their values


class Same:
    """Compares an object by identity. An object that has died equals nothing."""

    def __init__(self, thing: Any):
        self._hash = id(thing)
        try:
            self._get = weakref.ref(thing)
        except TypeError:
            self._get = lambda: thing

    def __eq__(self, other: object) -> bool:
        thing = self._get()
        return self is other or (
            isinstance(other, Same) and thing is not None and thing is other._get()
        )

    def __hash__(self) -> int:
        return self._hash


def plain(node: Any) -> bytes | None:
    """Return what stands for a number, a string or many of them; None for another object.

    A short list is another object, because a function may write one of its items and read another.
    """
    kind = type(node)
    if kind in (tuple, frozenset) or (kind in (list, set) and len(node) > _MOST_ITEMS):
        return digest(marshal.dumps(node, 2)) if {*map(type, node)} <= _ATOMS else None
    return digest(marshal.dumps(node, 2)) if kind in _ATOMS else None


def digest(data: bytes) -> bytes:
    """Return short data as they are, and a hash of long ones."""
    return data if len(data) < 64 else blake2b(data).digest()


def of_numpy(node: np.ndarray | np.generic) -> Any:
    """Describe a NumPy array by its numbers."""
    if isinstance(node, np.ndarray) and type(node) is not np.ndarray:  # a masked array
        return opaque(node)
    value = (type(node), node.dtype, node.shape, digest(node.tobytes()))
    if isinstance(node, np.ndarray) and jax.dtypes.canonicalize_dtype(node.dtype) != node.dtype:
        ref, earlier = _CONVERTED.get(id(node), (None, None))
        if ref is not None and ref() is node and earlier != value:
            jax.clear_caches()  # JAX keeps its conversion of an array, even if the array changes later
        forget = functools.partial(lambda number, _: _CONVERTED.pop(number, None), id(node))
        _CONVERTED[id(node)] = (weakref.ref(node, forget), value)
    return value


def of_jax(array: jax.Array) -> Any:
    """Describe a JAX array by its numbers; a large one, or one that is not all here, is itself."""
    if is_traced(array) or not array.is_fully_addressable or array.is_deleted():
        return Same(array)
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    with jax.ensure_compile_time_eval():
        numbers = jax.random.key_data(array) if is_key else array
    kind = (str(array.dtype), array.shape, getattr(array, "weak_type", False), array.sharding)
    is_small = numbers.nbytes <= _MOST_BYTES
    return (*kind, digest(np.asarray(jax.device_get(numbers)).tobytes())) if is_small else Same(array)


def opaque(node: Any) -> Any:
    """Describe an object that has state in C by its pickle; without one, it is itself."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return (Same(type(node)), digest(pickle.dumps(node)))
    except Exception:  # whatever an object of unknown make raises
        return Same(node)


def is_value(node: Any) -> bool:
    """Tell whether an object of the standard library or of JAX compares by value."""
    cls = type(node)
    if cls.__module__.split(".")[0] not in _VALUES or cls.__hash__ in (None, object.__hash__):
        return False
    try:
        return cls.__eq__ is not object.__eq__ and isinstance(hash(node), int)
    except Exception:  # of a part that cannot be hashed
        return False


def slots_of(cls: type) -> list[str]:
    """Return the names of the slots of a class."""
    declared = [vars(c).get("__slots__", ()) for c in cls.__mro__]
    return [n for s in declared for n in ((s,) if isinstance(s, str) else s) if n[:2] != "__"]


def hides_state(cls: type) -> bool:
    """Tell whether instances have state in C, apart from slots and a dictionary (as pickle does)."""
    num_pointers = len(slots_of(cls)) + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0)
    return bool(cls.__itemsize__) or cls.__basicsize__ > object.__basicsize__ + 8 * num_pointers


def attributes_of(node: Any) -> list[tuple[str, Any]]:
    """Return the attributes that an object keeps, in its slots and in its dictionary."""
    held = getattr(node, "__dict__", None)
    found = {n: getattr(node, n) for n in slots_of(type(node)) if hasattr(node, n)}
    found |= held if isinstance(held, dict) else {}
    return [(n, x) for n, x in found.items() if isinstance(n, str)]


def is_lazy(cls: type, name: str) -> bool:
    """Tell whether an attribute is one that a property of the class computes once and keeps."""
    found = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
    is_method = isinstance(found, types.FunctionType | staticmethod | classmethod)
    return hasattr(type(found), "__get__") and not hasattr(type(found), "__set__") and not is_method


def shown(node: Any) -> str | None:
    """Return the text of a value of a kind whose equal values may differ, as 1.0 and 1.00."""
    return repr(node) if type(node) in _SHOWN else None


def text(key: Any) -> str:
    """Return the text of a key, also where its own class fails to write it."""
    try:
        return repr(key)
    except Exception:  # of a class of the user
        return object.__repr__(key)


def in_cell(cell: types.CellType) -> Any:
    """Return the value of a variable that is closed over; None if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def part_of(where: str, part: str) -> str:
    """Write a part: of ``data, closed over by f`` it is ``data['x'], closed over by f``."""
    name, comma, how = where.partition(", ")
    return f"{name}{part}{comma}{how}"
