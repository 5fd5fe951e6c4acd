"""Functions that users write: pytrees whose programs are those of what they mean."""

import contextlib
from collections.abc import Callable, Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial, register_pytree_node

from gspmd_mcmc import tree
from gspmd_mcmc.functions.contents import unboxed
from gspmd_mcmc.functions.meaning import Look
from gspmd_mcmc.functions.modules import call_module, call_of, is_module, without_arrays
from gspmd_mcmc.placement.numbers import as_arrays
from gspmd_mcmc.tree import PyTree

MOST_NAMED = 3
# Part of the keys by which JAX remembers traces, those of functions inside a user's too: the body of a
# scan, a jitted helper. It knows those by identity alone, whatever they read.
_TRACED_WITH = jax.make_user_context(None)


class Function(Partial):
    """A `Partial` whose programs are those of its meaning.

    JAX takes the function of a `Partial` for a constant. Here, everything that it reads apart from its
    arguments counts: a program is traced again once any of that has changed, and equal functions share
    programs.
    """

    reading: "_Reading"

    def __new__(cls, func: Any, *args: Any, **keywords: Any) -> "Function":
        """Bind arrays to a function, or to the reading that another one has of it."""
        reading = func if isinstance(func, _Reading) else _Reading(func)
        self = super().__new__(cls, reading.function, *args, **keywords)
        self.reading = reading
        return self

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        """Call the function with what is bound, and these."""
        return self.reading.call(self.args + args, self.keywords | keywords)

    def __reduce__(self):
        return _rebuilt, (self.reading, self.args, self.keywords)


def _rebuilt(reading: "_Reading", args: tuple, keywords: dict) -> Function:
    return Function(reading, *args, **keywords)


class _Reading:
    """A function, and what it was last seen to mean; shared by all copies of a `Function`."""

    def __init__(self, function: Callable, of_model: str | None = None, about: Any = None):
        self.function, self.of_model = function, of_model
        self._root = function if about is None else (function, about)
        self.written: set = set()
        self._latest = self._first = _Static(self, Look(self._root))

    def __reduce__(self):
        return _Reading, (self.function, self.of_model)  # it is read anew, where it is loaded

    def now(self) -> "_Static":
        """Return the static part of the pytree."""
        if not self._latest.look.is_current():
            self._latest = _Static(self, Look(self._root, self.written))
        return self._latest

    def call(self, args: tuple, keywords: dict) -> Any:
        """Call the function; what it writes itself (a cache, a count) is no part of its meaning."""
        before = self.now()
        if self.of_model is not None and before.meaning is not self._first.meaning:
            what = "; ".join(changed(self._first.look, before.look).values())
            raise ValueError(
                f"{self.of_model}: the model has changed since ({what}), and its latents and their "
                f"supports were read then: call {self.of_model} again"
            )
        is_traced = any(map(tree.is_traced, jax.tree.leaves((args, keywords))))
        with _TRACED_WITH(before.meaning) if is_traced else contextlib.nullcontext():
            out = self.function(*args, **keywords)
        if self.now().meaning is not before.meaning:
            self.written |= changed(before.look, self._latest.look).keys()
            self._latest = _Static(self, Look(self._root, self.written))
            self._first = self._latest if self._first is before else self._first
        return out


class _Static:
    """The static part of a `Function`; it compares by meaning."""

    __slots__ = ("look", "meaning", "reading")

    def __init__(self, reading: _Reading, look: Look):
        self.reading, self.look, self.meaning = reading, look, look.meaning

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and other.meaning is self.meaning

    def __hash__(self) -> int:
        return id(self.meaning)

    def __reduce__(self):
        return _Reading.now, (self.reading,)

    def __repr__(self) -> str:
        return repr(self.reading.function)


register_pytree_node(
    Function,
    lambda f: ((f.args, f.keywords), f.reading.now()),
    lambda static, children: Function(static.reading, *children[0], **children[1]),
)


def meanings(tree: PyTree) -> tuple["_Static", ...]:
    """Return what the functions of a tree mean now, for `changes`."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Function))
    return tuple(x.reading.now() for x in nodes if isinstance(x, Function))


def changes(before: tuple["_Static", ...]) -> str:
    """Name what functions read that is something else than it was; empty if they mean the same."""
    found: dict[str, None] = {}
    for static in before:
        now = static.reading.now()
        if now.meaning is not static.meaning:
            found |= dict.fromkeys(changed(static.look, now.look, static.reading.written).values())
    return "; ".join(list(found)[:MOST_NAMED])


def traced_with(kernel: Any, adaptation: Any) -> contextlib.AbstractContextManager:
    """Trace what a user's own kernel or warm-up does anew where its code means something else."""
    bare = jax.tree.map(lambda _: None, (kernel, adaptation), is_leaf=lambda x: x is kernel.target)
    meaning = Look(bare, with_methods=True).meaning
    return _TRACED_WITH(meaning if meaning.has_users_code else None)


def changed(before: Look, after: Look, written: Set = frozenset()) -> dict[tuple[int, Any], str]:
    """Return the places whose values differ, with their names."""
    both = {p: x for p, x in (before.places | after.places).items() if p not in written}
    return {p: where for p, (where, _) in both.items() if before.places.get(p) != after.places.get(p)}


def as_partial(function: Callable) -> Function:
    """Wrap a function as a pytree, so that what a `Partial` binds enters programs as arguments."""
    if isinstance(function, Function):
        return function
    if not callable(function):
        raise TypeError(f"expected a function, got {type(function).__name__}")
    about = without_arrays(function) if is_module(function) else None
    bound = call_of(function) if is_module(function) else function
    if not isinstance(bound, Partial):
        return Function(_Reading(bound))
    bound = as_arrays(f"bound by {name_of_function(bound)}: ", bound)
    args, keywords = with_functions((bound.args, bound.keywords))
    return Function(_Reading(unboxed(bound.func), about=about), *args, **keywords)


def of_model(door: str, function: Callable, *args: PyTree) -> Function:
    """Wrap a function that runs a model, of which other things were read before.

    It raises where the model has changed since, and says to call ``door`` again.
    """
    return Function(_Reading(function, door), *with_functions(args))


def with_functions(tree: PyTree) -> PyTree:
    """Turn the `Partial` nodes of a tree into `Function`."""
    return jax.tree.map(
        lambda x: as_partial(x) if isinstance(x, Partial) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Partial),
    )


@jax.jit
def run(function: Function, *args: PyTree) -> PyTree:
    """Call a function as one program, which functions of the same meaning share."""
    return function(*args)


def name_of_function(function: Callable) -> str:
    """Return what a function, or the one that a `Partial` binds, is called; of a module its class."""
    inner = getattr(function, "func", function)
    inner = type(function.args[0]) if inner is call_module else inner
    return getattr(inner, "__name__", repr(inner))


def summands(function: Callable, value: PyTree) -> PyTree:
    """Check that a log density's summands are floating arrays."""
    name = name_of_function(function)
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if not leaves:
        raise TypeError(f"{name}: expected a scalar or a tree of summands, got {value!r}")
    for path, leaf in leaves:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name}: expected floating summands, got dtype {jnp.result_type(leaf)} at "
                f"{tree.path_str(path)}"
            )
    return jax.tree.map(jnp.asarray, value)


@contextlib.contextmanager
def noting_shapes(function: Callable, **given: PyTree) -> Iterator[None]:
    """Add to an error that a user's function raises what it was called with."""
    try:
        yield
    except Exception as error:
        shapes = {
            name: jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", x)
            for name, x in given.items()
        }
        told = ", ".join(f"{name} {x}" for name, x in shapes.items())
        error.add_note(f"{name_of_function(function)} was called with {told}")
        raise
