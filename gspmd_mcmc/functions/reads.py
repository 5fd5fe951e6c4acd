"""What the code of a function names: the globals, attributes and modules that it looks up."""

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MISSING: Any = object()
# Nothing in these modules is a user's constant.
_CONSTANT = sys.stdlib_module_names | {"jax", "jaxlib", "numpy", "scipy", "numpyro", "gspmd_mcmc"}
_INSTALLED = ("site-packages", "dist-packages")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF")
# With these, code may look any attribute up.
_DYNAMIC = frozenset({"getattr", "vars", "__dict__", "asdict", "astuple", "attrgetter"})


class Names(NamedTuple):
    """What code and the functions defined in it look up."""

    globals: tuple[str, ...]
    attributes: frozenset[str]
    modules: tuple[str, ...]  # imported when it runs
    is_dynamic: bool


class Read(NamedTuple):
    """A place that a function reads: ``get(key, MISSING)`` is what stands there now."""

    where: str
    holder: Any
    get: Callable[[Any, Any], Any]
    key: Any

    @property
    def value(self) -> Any:
        """What stands there, or `MISSING`."""
        return self.get(self.key, MISSING)

    def look(self) -> int:
        """Return which object stands there: as long as it lives, no other has its number."""
        return id(self.value)


def is_library(thing: type | types.FunctionType) -> bool:
    """Tell whether a class or function is a library's: its code is taken to be what it is."""
    of_function = isinstance(thing, types.FunctionType)
    name = thing.__globals__.get("__name__") if of_function else thing.__module__
    return isinstance(name, str) and (is_constant(name) or _is_installed(name.split(".")[0]))


def is_constant(module: str) -> bool:
    """Tell whether nothing in a module, by its name, is a user's to set."""
    return module.split(".")[0] in _CONSTANT


@functools.lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    if package == "__main__":  # the user's, whichever tool of an installed package runs it
        return False
    origin = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None) or ""
    return package == "builtins" or any(folder in Path(origin).parts for folder in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """Return the names that code looks up, and the functions defined in it."""
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    found = [(i.opname, i.argval) for i in dis.get_instructions(code) if i.argval in code.co_names]
    loaded = {name for op, name in found if op in _LOADS}
    imported = {name for op, name in found if op == "IMPORT_NAME"}
    names = {name for op, name in found if not op.startswith(("STORE", "DELETE"))}
    words = {c for c in code.co_consts if isinstance(c, str) and c.isidentifier()}  # for getattr
    return Names(
        tuple(sorted(loaded.union(*(n.globals for n in inner)))),
        frozenset(names | words).union(*(n.attributes for n in inner)),
        tuple(sorted(imported.union(*(n.modules for n in inner)))),
        bool(names & _DYNAMIC) or any(n.is_dynamic for n in inner),
    )


@functools.lru_cache(maxsize=4096)
def key_of(code: types.CodeType) -> tuple:
    """Return what code does, as a hashable value: not where it is written."""
    return (
        code.co_name,
        code.co_code,
        code.co_exceptiontable,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        tuple(map(_key_of_constant, code.co_consts)),
    )


def _key_of_constant(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return key_of(constant)
    if isinstance(constant, tuple | frozenset):
        return (type(constant), type(constant)(map(_key_of_constant, constant)))
    return (type(constant), repr(constant))  # zeros of either sign, and NaN


def reads_of(function: types.FunctionType) -> Iterator[Read]:
    """Give the places that a function reads from: closure, globals, modules, defaults."""
    name, code = function.__qualname__, function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Read(f"{variable}, closed over by {name}", cell, functools.partial(_in_cell, cell), "")
    if not is_library(function):
        names, held = names_of(code), function.__globals__
        for variable in names.globals:
            yield Read(f"{variable}, a global that {name} reads", held, held.get, variable)
        for module in names.modules:
            yield Read(f"{module}, imported by {name}", sys.modules, sys.modules.get, module)
    defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
    positional = code.co_varnames[: code.co_argcount][-len(defaults) or code.co_argcount :]
    # A decorator's function may show the defaults of the one that it wraps, which is read below.
    given = dict(zip(positional, defaults, strict=False))
    for variable in given:
        yield Read(f"{variable}, a default of {name}", function, given.get, variable)
    for variable in keywords:
        yield Read(f"{variable}, a default of {name}", keywords, keywords.get, variable)
    if "__wrapped__" in vars(function):
        yield Read("", vars(function), vars(function).get, "__wrapped__")


def _in_cell(cell: types.CellType, _: Any, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not bound yet
        return default


def attributes_of(node: Any) -> list[Read]:
    """Return the attributes that an object keeps, in its slots and in its dictionary.

    Weak references of a library's objects are caches: NumPyro's transforms remember their inverses so.
    """
    declared = [vars(c).get("__slots__", ()) for c in type(node).__mro__]
    slots = [name for s in declared for name in ((s,) if isinstance(s, str) else s)]
    found = [
        Read(f".{name}", node, functools.partial(_in_slot, node), name)
        for name in slots
        if not name.startswith("__")
    ]
    held = getattr(node, "__dict__", None)
    if isinstance(held, dict):
        told = [n for n in held if not n.startswith("__") or n == "__wrapped__"]
        if is_library(type(node)):
            told = [n for n in told if not isinstance(held[n], weakref.ref)]
        found += [Read(f".{name}", held, held.get, name) for name in told]
    return found


def _in_slot(node: Any, name: str, default: Any) -> Any:
    try:
        return getattr(node, name, default)
    except Exception:  # computed when asked
        return default


def part_of(where: str, part: str) -> str:
    """Write a part: of ``data, closed over by f`` it is ``data['x'], closed over by f``."""
    name, comma, how = where.partition(", ")
    return f"{name}{part}{comma}{how}"
