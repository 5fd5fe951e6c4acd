"""The meaning of a function: its code, and the values that it reads apart from its arguments.

Functions of equal meaning trace to the same program. A meaning is read anew each time that it is
needed, because a remembered one may be out of date. The guide (``docs/sampling.md``) states how each
kind of value is compared, and which changes are not seen.
"""

import contextvars
import functools
import operator
import sys
import types
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping
from importlib.util import resolve_name
from typing import Any

import jax
import numpy as np

from gspmd_mcmc import values
from gspmd_mcmc.functions.names import OF_ANY, is_library, names_of, without_lines
from gspmd_mcmc.values import Same, attributes_of, hides_state, in_cell, is_value, part_of, plain, text

Place = tuple[Any, ...]  # keys from the root
Parts = list[tuple[Any, str, Any]]  # key, name for people, value
EMPTY: Mapping[Place, Any] = {}
MOST_OBJECTS = 20_000
_MAP = dict | types.MappingProxyType
_CONTAINERS = _MAP | list | tuple | deque | set | frozenset


class Meaning:
    """What stands at each place that a root reads; compares by these values."""

    def __init__(self, root: Any, written: Mapping[Place, Any] = EMPTY, *, with_methods: bool = False):
        walk = Walk(root, written, with_methods=with_methods)
        self.values, self.where, self.has_users_code = walk.values, walk.where, walk.has_users_code
        self._hash = hash(frozenset(self.values.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Meaning) and self._hash == other._hash and self.values == other.values

    def __hash__(self) -> int:
        return self._hash

    def changes(self, now: "Meaning", written: Mapping[Place, Any] = EMPTY) -> dict[Place, str]:
        """Return places whose values differ, with their names; not those that ``now`` leaves out."""
        places, names = dict.fromkeys((*self.values, *now.values)), now.where | self.where
        differ = [p for p in places if self.values.get(p, self) != now.values.get(p, self)]
        return {p: names[p] for p in differ if p in now.values or p not in written}


class Walk:
    """Goes from a root through everything that it reads, breadth first.

    Of objects, classes and modules of the user it follows the attributes that code on the way names.
    Places that still hold what a function itself has ``written`` there are left out.
    """

    def __init__(self, root: Any, written: Mapping = EMPTY, *, with_methods=False, where: str = ""):
        self.values: dict[Place, Any] = {}
        self.where: dict[Place, str] = {}
        self.objects: list[tuple[str, Any]] = []  # keeps them alive while they are compared by identity
        self.has_users_code, self._with_methods, self._is_any_read = False, with_methods, False
        self._first: dict[int, Place] = {}
        self._names: set[str] = set()
        self._named: list[tuple[Place, str, Any, set[str]]] = []  # objects whose named attributes count
        self._queue: deque[tuple[Place, str, Any]] = deque([((), where, root)])
        while self._queue or self._follow_names():
            place, where, node = self._queue.popleft()
            self.where[place] = where
            value = self._value(place, where, node)
            if place not in written or written[place] != value:
                self.values[place] = value

    def _value(self, place: Place, where: str, node: Any) -> Any:
        if (value := plain(node)) is not None:
            return value
        if id(node) in self._first:
            return ("again", self._first[id(node)])
        number, self._first[id(node)] = len(self._first), place
        self.objects.append((where, node))
        if number == MOST_OBJECTS:
            warnings.warn(f"{number} objects are read: changes in {where} are not seen", stacklevel=2)
        if number >= MOST_OBJECTS:
            return Same(node)
        value, parts = self._described(place, where, node)
        self._queue.extend(((*place, key), name, part) for key, name, part in parts)
        return value

    def _described(self, place: Place, where: str, node: Any) -> tuple[Any, Parts]:
        """Return what a node is without its parts, and its parts."""
        match node:
            case types.FunctionType():
                return self._function(place, where, node)
            case types.MethodType():
                return "method", [("function", where, node.__func__), ("self", where, node.__self__)]
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                self._is_any_read |= node.__name__ in OF_ANY
                is_bound = not isinstance(node.__self__, types.ModuleType | None)
                return node.__name__ if is_bound else Same(node), [("self", where, node.__self__)]
            case functools.partial():
                name = getattr(node.func, "__qualname__", type(node.func).__name__)
                given = {f"args[{i}]": x for i, x in enumerate(node.args)} | node.keywords
                parts = [(k, f"{k}, given to a partial of {name}", x) for k, x in given.items()]
                return Same(type(node)), [("function", where, node.func), *parts]
            case property():
                return property, [("function", where, node.fget)]
            case staticmethod() | classmethod():
                return type(node), [("function", where, node.__func__)]
            case np.ndarray() | np.generic() if not node.dtype.hasobject:
                own = [] if type(node) is np.ndarray else attributes_of(node)
                return values.of_numpy(node), [(n, part_of(where, f".{n}"), x) for n, x in own]
            case np.ndarray():
                items = enumerate(np.ravel(node))
                return node.shape, [(i, part_of(where, f".flat[{i}]"), x) for i, x in items]
            case jax.Array():
                return values.of_jax(node), []
            case weakref.ref():
                return weakref.ref, [("referent", where, node())]
            case contextvars.ContextVar():
                return Same(node), [("value", where, node.get(None))]
            case types.ModuleType():
                self._named += [] if is_library(node) else [(place, where, node, set())]
                return node.__name__, []
            case type():
                return (Same(node), []) if is_library(node) else self._class(place, where, node)
            case operator.attrgetter() | operator.methodcaller():
                self._is_any_read = True
        if isinstance(node, _CONTAINERS):
            return self._container(place, where, node)
        return self._object(place, where, node)

    def _function(self, place: Place, where: str, node: types.FunctionType) -> tuple[Any, Parts]:
        name, code, defaults = node.__qualname__, node.__code__, node.__defaults__ or ()
        cells = zip(code.co_freevars, map(in_cell, node.__closure__ or ()), strict=True)
        positional = code.co_varnames[: code.co_argcount][-len(defaults) or code.co_argcount :]
        # A decorator's function may show the defaults of the function that it wraps.
        given = dict(zip(positional, defaults, strict=False)) | (node.__kwdefaults__ or {})
        reads = {"closed over by {}": dict(cells), "a default of {}": given}
        if not is_library(node):
            self.has_users_code, self.where[place] = True, where or f"the code of {name}"
            names = names_of(code)
            self._names |= names.attributes
            self._is_any_read |= names.reads_any
            self._named.append((place, where or name, node, set()))
            known = sorted(names.globals & node.__globals__.keys())
            reads["a global that {} reads"] = {n: node.__globals__[n] for n in known}
            package = node.__globals__.get("__package__") or ""
            full = {n: resolve_name(n, package) if package else n for n in sorted(names.modules)}
            reads["imported by {}"] = {n: sys.modules.get(full[n]) for n in full}
        found = ((how, n, x) for how, held in reads.items() for n, x in held.items())
        parts = [((how, n), f"{n}, {how.format(name)}", x) for how, n, x in found]
        parts += [("wrapped", where, node.__wrapped__)] if hasattr(node, "__wrapped__") else []
        return without_lines(code), parts

    def _class(self, place: Place, where: str, node: type) -> tuple[Any, Parts]:
        self.has_users_code, where = True, where or node.__name__
        self._named.append((place, where, node, set()))
        bases = [(f"base {i}", where, x) for i, x in enumerate((*node.__bases__, type(node)))]
        # Code of a library may call every method of a class that is derived from one of its own.
        is_all = self._with_methods or any(map(is_library, node.__mro__[:-1]))
        called = [n for n in vars(node) if is_all or n[:2] == n[-2:] == "__"]
        methods = [(n, f"{where}.{n}", vars(node)[n]) for n in called if _is_method(vars(node)[n])]
        # A program returns the classes that it was traced with, apart from those of leaves.
        is_of_leaf = bool(place) and str(place[-1]).startswith(("class", "base "))
        return (node.__qualname__, None if is_of_leaf else Same(node)), bases + methods

    def _container(self, place: Place, where: str, node: Any) -> tuple[Any, Parts]:
        items = enumerate(sorted(node, key=text) if isinstance(node, set | frozenset) else node)
        pairs = list(node.items() if isinstance(node, _MAP) else items)
        parts: Parts = [(i, part_of(where, f"[{text(k)}]"), x) for i, (k, x) in enumerate(pairs)]
        parts.append(("keys", where, tuple(k for k, _ in pairs)))
        parts.append(
            ("factory", where, node.default_factory if isinstance(node, defaultdict) else None)
        )
        of_object = [] if is_library(type(node)) else self._object(place, where, node)[1]
        return (Same(type(node)), len(parts)), parts + of_object

    def _object(self, place: Place, where: str, node: Any) -> tuple[Any, Parts]:
        cls, name = type(node), where or type(node).__name__
        hidden = values.opaque(node) if hides_state(cls) and not isinstance(node, _CONTAINERS) else None
        if not is_library(cls):
            self._named.append((place, name, node, set()))
            kind = None if jax.tree_util.all_leaves([node]) else Same(cls)
            return (kind, hidden), [("class", where, cls)]
        held = dict(attributes_of(node))
        if hidden and "__wrapped__" in held:  # made by jax.jit or lru_cache
            return Same(cls), [("wrapped", where, held["__wrapped__"])]
        if is_value(node):
            return (Same(cls), node, values.shown(node)), []
        # Weak references are caches of libraries: NumPyro's transforms remember their inverses so.
        kept = [n for n, x in held.items() if not isinstance(x, weakref.ref) and n[:2] != "__"]
        kept = [n for n in kept if not values.is_lazy(cls, n)]
        kept += ["__wrapped__"] if "__wrapped__" in held else []
        return (Same(cls), hidden), [(n, part_of(name, f".{n}"), held[n]) for n in kept]

    def _follow_names(self) -> bool:
        """Queue the attributes that code met so far names, and all attributes of data."""
        for place, where, node, done in self._named:
            is_space = isinstance(node, types.ModuleType | types.FunctionType | type)
            found = list(vars(node).items()) if is_space else attributes_of(node)
            is_any_read = self._is_any_read and (isinstance(node, type) or not is_space)
            is_whole = is_any_read or (not is_space and _is_data(node))
            named = self._names | ({"__getattr__"} if isinstance(node, types.ModuleType) else set())
            read = {n: x for n, x in found if n in named or (is_whole and n[:2] != "__")}
            new = [(n, x) for n, x in read.items() if n not in done]
            done.update(read)
            self._queue.extend(((*place, (".", n)), part_of(where, f".{n}"), x) for n, x in new)
        return bool(self._queue)


def _is_method(thing: Any) -> bool:
    if isinstance(thing, type | types.GetSetDescriptorType | types.MemberDescriptorType):
        return False
    return callable(thing) or hasattr(type(thing), "__get__")


def _is_data(node: Any) -> bool:
    """Tell whether code that is not seen may read an object's attributes, such as a library's."""
    classes, lookups = type(node).__mro__[:-1], {"__getattr__", "__getattribute__"}
    is_derived = any(is_library(c) or lookups & {*vars(c)} for c in classes)
    is_pytree = not jax.tree_util.all_leaves([node])
    return is_pytree or is_derived or hasattr(type(node), "__dataclass_fields__")
