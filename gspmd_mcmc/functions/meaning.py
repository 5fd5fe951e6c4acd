"""The meaning of a function: its code and all that it reads apart from its arguments, as one value.

Two functions of equal meaning trace to the same program, whichever objects they are; one function has
another meaning once a global, a closure, a field or an entry that it reads has changed.
"""

import enum
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gspmd_mcmc.functions.contents import (
    Same,
    digest_of,
    is_code,
    is_data,
    is_leaf,
    is_of_python,
    is_value,
    of_jax_array,
    pickle_of,
    unboxed,
)
from gspmd_mcmc.functions.reads import (
    MISSING,
    Read,
    attributes_of,
    is_constant,
    is_library,
    key_of,
    names_of,
    part_of,
    reads_of,
)

MOST_OBJECTS = 20_000  # what is beyond is compared by identity
_PLAIN = (bool, int, str, bytes, type(None), type(Ellipsis), type(NotImplemented))
_WRAPPERS = (property, staticmethod, classmethod)


class Meaning:
    """The meaning of a function; equal ones are one object."""

    __slots__ = ("__weakref__", "entries", "has_users_code")

    def __init__(self, entries: tuple, has_users_code: bool):
        self.entries, self.has_users_code = entries, has_users_code


_KNOWN: weakref.WeakValueDictionary[tuple, Meaning] = weakref.WeakValueDictionary()


class Place(NamedTuple):
    """A place that was read: what a quick look at it saw then, to compare with what it sees now."""

    look: Callable[[], Any]
    seen: Any
    where: str
    key: tuple[int, Any]  # id of what holds it, and key there


class Look:
    """What a function means now, and what to look at to see whether it still does.

    Parameters
    ----------
    root
        A function, or any object.
    ignored
        Places (`Place.key`) that are no part of the meaning.
    with_methods
        Whether all methods of users' classes count: this library calls them, so no user's code has to
        name them.
    """

    __slots__ = ("_alive", "_looks", "meaning", "places")

    def __init__(
        self, root: Any, ignored: Set[tuple[int, Any]] = frozenset(), *, with_methods: bool = False
    ):
        walk = _Walk(root, ignored, with_methods)
        entries = tuple(walk.entries)
        self.meaning = _KNOWN.setdefault(entries, Meaning(entries, walk.has_users_code))
        self._alive = walk.alive  # so that identities stay theirs
        self._looks = [(place.look, place.seen) for place in walk.places]
        self.places = {place.key: (place.where, place.seen) for place in walk.places}

    def is_current(self) -> bool:
        """Tell whether nothing that was read has been replaced: microseconds."""
        return all(look() == seen for look, seen in self._looks)


class _Walk:
    """Goes through all that a root reads, breadth first; of objects only attributes that code names."""

    def __init__(self, root: Any, ignored: Set[tuple[int, Any]], with_methods: bool):
        self.entries: list[Any] = []
        self.places: list[Place] = []
        self.alive: list[Any] = []
        self.has_users_code = False
        self._ignored, self._with_methods = ignored, with_methods
        self._numbers: dict[int, int] = {}
        self._queue: deque[tuple[str, Any, int]] = deque()
        self._names: set[str] = set()
        self._is_dynamic = False
        self._constant: set[int] = set()  # of dicts that need no look
        self._of_leaves: set[type] = set()  # classes of objects that are leaves of pytrees
        self._by_name: list[tuple[str, Any, int, set[str]]] = []  # where, object, number, names done
        self.entries.append(self._ref("", root))
        while self._queue or self._follow_names():
            where, node, number = self._queue.popleft()
            self.entries.append((number, *self._describe(where, node, number)))

    def _ref(self, where: str, node: Any) -> Any:
        """Return what stands for a value: itself if it is plain, else its number in this walk."""
        if type(node) in _PLAIN:
            return (type(node), node)
        if type(node) in (float, complex):
            return (type(node), repr(node))  # zeros of either sign, and NaN
        number = self._numbers.get(id(node))
        if number is None:
            number = self._numbers[id(node)] = len(self._numbers)
            if number > MOST_OBJECTS:
                return Same(node)
            self.alive.append(node)
            self._queue.append((where, node, number))
        return number

    def _read(self, read: Read, *, watch: bool = True) -> Any:
        """Return what stands for the value at a place, and watch the place."""
        if (id(read.holder), read.key) in self._ignored:
            return "ignored"
        value = read.value
        if watch:
            self.alive += [read.holder, value]
            self._watch(read.look, read.where, read.holder, read.key)
        return None if value is MISSING else self._ref(read.where, value)

    def _watch(self, look: Callable[[], Any], where: str, node: Any, key: Any = None) -> Any:
        seen, place = look(), (id(node), key)
        if place not in self._ignored:
            self.places.append(Place(look, seen, where, place))
        return seen

    def _describe(self, where: str, node: Any, number: int) -> tuple:
        """Return what a node is, its parts by what stands for them."""
        if isinstance(node, types.FunctionType):
            return self._function(node, number)
        if isinstance(node, types.MethodType):
            return ("method", self._ref(where, node.__func__), self._ref(where, node.__self__))
        if isinstance(node, types.BuiltinFunctionType):
            owner = node.__self__
            is_plain = owner is None or isinstance(owner, types.ModuleType)
            return (Same(node),) if is_plain else (node.__name__, self._ref(where, owner))
        if isinstance(node, partial):
            parts = (unboxed(node.func), node.args, node.keywords)
            self._constant.add(id(node.keywords))
            return ("partial", *(self._ref(where, part) for part in parts))
        if isinstance(node, _WRAPPERS):
            inner = node.fget if isinstance(node, property) else node.__func__
            return (type(node), self._ref(where, inner))
        if isinstance(node, np.ndarray | np.generic):
            return self._array(where, node)
        if isinstance(node, jax.Array):
            return of_jax_array(node)
        if isinstance(node, types.ModuleType):
            self._by_name += [] if is_constant(node.__name__) else [(where, node, number, set())]
            return ("module", node.__name__)
        if isinstance(node, type):
            return self._class(where, node, number)
        if isinstance(node, enum.Enum):
            return (Same(type(node)), node.name, self._ref(where, node.value))
        if isinstance(node, dict | types.MappingProxyType):
            return self._items(where, node) + self._object(where, node, number, is_opaque=False)
        if isinstance(node, list | tuple | deque | set | frozenset):
            return self._elements(where, node) + self._object(where, node, number, is_opaque=False)
        return self._object(where, node, number)

    def _function(self, function: types.FunctionType, number: int) -> tuple:
        if is_library(function):
            what = ("function", function.__code__)
        else:
            what = ("function", key_of(function.__code__))
            names = names_of(function.__code__)
            self.has_users_code = True
            self._names |= names.attributes
            self._is_dynamic |= names.is_dynamic
            for part in ("__code__", "__defaults__"):
                read = Read("", function, partial(getattr, function), part)
                self.alive.append(read.value)
                self._watch(read.look, f"{part} of {function.__qualname__}", function, part)
            self._by_name += [("", function, number, set())] if vars(function) else []
        refs = [(r.key, self._read(r, watch=r.holder is not function)) for r in reads_of(function)]
        return (*what, *refs)

    def _array(self, where: str, node: Any) -> tuple:
        if type(node) is not np.ndarray and not isinstance(node, np.generic):
            return (Same(type(node)), self._opaque(where, node))
        if node.dtype.hasobject:
            return (node.shape, *(self._ref(where, x) for x in node.flat))
        if isinstance(node, np.generic):
            return (type(node), node.tobytes())
        digest = self._watch(partial(digest_of, node), where, node)
        return ("ignored",) if (id(node), None) in self._ignored else digest

    def _class(self, where: str, node: type, number: int) -> tuple:
        if is_library(node):
            return (Same(node),)
        self.has_users_code = True
        self._by_name.append((where, node, number, set()))
        is_all = self._with_methods
        called = [
            n for n, x in vars(node).items() if (is_all or n[:2] == n[-2:] == "__") and is_code(x)
        ]
        methods = [self._read(Read(f"{where}.{n}", node, vars(node).get, n)) for n in called]
        if node in self._of_leaves:
            self._of_leaves.update(node.__bases__)
        bases = [self._ref(where, base) for base in node.__bases__]
        # A program returns the classes that it was traced with; those of leaves it cannot return.
        identity = None if node in self._of_leaves else Same(node)
        return ("class", node.__qualname__, identity, *bases, *called, *methods)

    def _items(self, where: str, node: Any) -> tuple:
        if id(node) not in self._constant:
            self._watch(lambda: ([*map(id, node.values())], [*map(id, node)]), where, node)
        if (id(node), None) in self._ignored:
            return ("ignored",)
        return tuple(
            (self._ref(where, k), self._ref(part_of(where, f"[{k!r}]"), v)) for k, v in node.items()
        )

    def _elements(self, where: str, node: Iterable) -> tuple:
        if not isinstance(node, tuple | frozenset):
            self._watch(lambda: [*map(id, node)], where, node)
        if (id(node), None) in self._ignored:
            return ("ignored",)
        ordered = sorted(node, key=repr) if isinstance(node, set | frozenset) else node
        return tuple(self._ref(part_of(where, f"[{i}]"), x) for i, x in enumerate(ordered))

    def _object(self, where: str, node: Any, number: int, *, is_opaque: bool = True) -> tuple:
        cls = type(node)
        kept = attributes_of(node)
        owner = where or cls.__name__
        if not is_library(cls):
            self._of_leaves.update([cls] if is_leaf(node) else [])
            held = getattr(node, "__dict__", None)
            if isinstance(held, dict):
                self._watch(partial(len, held), f"the attributes of {owner}", held, len)
            self._by_name.append((owner, node, number, set()))
            return ("object", self._ref("", cls))
        if cls.__module__.startswith("jaxlib") and "__wrapped__" in getattr(node, "__dict__", ()):
            return (Same(cls), self._ref(where, node.__wrapped__))  # a jitted function
        if is_opaque and is_value(node):
            return (cls, node)
        if is_opaque and not kept and not is_of_python(cls):
            return (Same(cls), self._opaque(where, node))
        package = cls.__module__.split(".")[0]
        if package == "gspmd_mcmc":  # nobody writes to the dicts of ours
            self._constant.update(id(r.value) for r in kept)
        is_frozen = getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)
        watch = not (is_frozen or package in ("gspmd_mcmc", "jax", "jaxlib"))
        return (Same(cls), *((r.key, self._attribute(owner, r, watch)) for r in kept))

    def _attribute(self, owner: str, read: Read, watch: bool = True) -> Any:
        return self._read(read._replace(where=part_of(owner, read.where)), watch=watch)

    def _follow_names(self) -> bool:
        """Read what the names met since lead to, and all attributes of objects that are data."""
        for where, node, number, done in list(self._by_name):
            if isinstance(node, types.ModuleType | type):
                held: Any = vars(node)
                names = (self._names & held.keys()) - done
                reads = [Read(f".{n}", node, held.get, n) for n in sorted(names)]
            else:
                is_whole = self._is_dynamic or is_data(node)
                kept = [r for r in attributes_of(node) if r.key not in done]
                reads = [r for r in kept if is_whole or r.key in self._names]
            done.update(r.key for r in reads)
            self.entries += [(number, r.key, self._attribute(where, r)) for r in reads]
        return bool(self._queue)

    def _opaque(self, where: str, node: Any) -> Any:
        """Return what stands for an object that shows no attributes: its pickle, or its identity."""
        if pickle_of(node) is None:
            return Same(node)
        found = self._watch(partial(pickle_of, node), where, node)
        return "ignored" if (id(node), None) in self._ignored else found
