"""The names that code looks up, and whose code it is."""

import builtins
import dis
import functools
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

# Nothing in these modules is a user's to set.
_CONSTANT = sys.stdlib_module_names | {"jax", "jaxlib", "numpy", "scipy", "numpyro", "gspmd_mcmc"}
# Code that names one of these may read any attribute, or the globals that its strings name.
_OF_GLOBALS = {"eval", "exec", "globals", "__globals__"}
OF_ANY = _OF_GLOBALS | {"getattr", "vars", "asdict", "astuple", "__dict__", "__getattribute__"}
OF_ANY |= {"attrgetter", "methodcaller", "dir", "getmembers", "getattr_static"}
_OF_HEAP = 1 << 9  # CPython's flag of classes that a class statement makes
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_CLASSDEREF")


class Names(NamedTuple):
    """Names that code looks up, with the code of functions that are defined in it."""

    globals: frozenset[str]
    attributes: frozenset[str]  # words of its strings too: for attrgetter and eval
    modules: frozenset[str]  # imported when the code runs
    reads_any: bool  # attribute


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    """Return the names that code looks up."""
    steps = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    reads = [x for x in steps if isinstance(x[1], str) and not x[0].startswith(("STORE", "DELETE"))]
    names = {x for op, x in reads if not op.endswith("_CONST")}
    texts = [str(x) for op, x in steps if op.endswith("_CONST") and isinstance(x, str | tuple)]
    words = set(re.findall(r"[^\W\d]\w*", " ".join(texts)))
    found = {x for op, x in reads if op in _GLOBAL} | (words if names & _OF_GLOBALS else set())
    before = zip(steps, steps[2:], strict=False)  # an import follows its level and its names
    modules = {"." * level + x for (_, level), (op, x) in before if op == "IMPORT_NAME"}
    inner = [names_of(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    is_any_read = bool(names & OF_ANY) or ("MATCH_CLASS" in dict(steps))
    is_any_read = is_any_read or any(n.reads_any for n in inner)
    sets = zip((found, names | words, modules), *(n[:3] for n in inner), strict=True)
    return Names(*(frozenset().union(*s) for s in sets), is_any_read)  # pyright: ignore[reportCallIssue]


@functools.lru_cache(maxsize=4096)
def without_lines(code: types.CodeType) -> types.CodeType:
    """Return code that equals the same code at another place or in another file."""
    consts = tuple(without_lines(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(
        co_consts=consts, co_qualname="", co_filename="", co_firstlineno=1, co_linetable=b""
    )


def is_library(thing: type | types.FunctionType | types.ModuleType) -> bool:
    """Tell whether a class, function or module is a library's, whose code and globals do not change."""
    name = thing.__module__ if isinstance(thing, type) else vars(thing).get("__name__")
    name = thing.__globals__.get("__name__") if isinstance(thing, types.FunctionType) else name
    package = name.split(".")[0] if isinstance(name, str) else "__main__"
    if package == "builtins" and isinstance(thing, type) and thing.__flags__ & _OF_HEAP:
        return vars(builtins).get(thing.__name__) is thing  # others were made where no name is set
    return package in _CONSTANT or (package != "__main__" and _is_installed(package))


@functools.lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    origin = getattr(getattr(sys.modules.get(package), "__spec__", None), "origin", None) or ""
    return package == "builtins" or bool({"site-packages", "dist-packages"} & {*Path(origin).parts})
