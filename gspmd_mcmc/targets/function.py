"""Functions that users write: pytrees whose programs are those of what the functions mean."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial, register_pytree_node

from gspmd_mcmc import tree
from gspmd_mcmc.functions.meaning import Meaning, Place
from gspmd_mcmc.functions.names import is_library
from gspmd_mcmc.placement.modules import call_module, call_of, is_module, without_arrays
from gspmd_mcmc.placement.numbers import as_arrays
from gspmd_mcmc.tree import PyTree

MOST_NAMED = 3
_BOX = type(Partial(functools.partial(len)).func)  # JAX puts a functools.partial that is bound in one
# A part of the keys under which JAX keeps traces, also of functions inside a user's function, such as
# the body of a scan. JAX identifies those by object, whatever they read.
_TRACED_WITH = jax.make_user_context(None)


class Function(Partial):
    """A `Partial` whose programs are those of its meaning.

    For JAX the function of a `Partial` is a constant. Here, every value that it reads apart from its
    arguments counts. A program is traced again once one of them has changed, and equal functions share
    programs.
    """

    reading: "Reading"

    def __new__(cls, func: Any, *args: Any, **keywords: Any) -> "Function":
        """Bind arrays to a function, or to the reading of another `Function`."""
        reading = func if isinstance(func, Reading) else Reading(func)
        self = super().__new__(cls, reading.function, *args, **keywords)
        self.reading = reading
        return self

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        """Call the function with the bound arguments and these."""
        return self.reading.call(self.args + args, self.keywords | keywords)

    def __reduce__(self):
        return _rebuilt, (self.reading, self.args, self.keywords)


def _rebuilt(reading: "Reading", args: tuple, keywords: dict) -> Function:
    return Function(reading, *args, **keywords)


class Reading:
    """A function whose meaning is read, and what it has written itself; shared by copies of `Function`.

    ``door`` is the public function that read a model, which may not change afterwards.
    """

    def __init__(
        self, function: Any, door: str | None = None, about: Any = None, is_called: bool = True
    ):
        self.function, self.door, self._is_called = function, door, is_called
        self._root = function if about is None else (function, about)
        self.written: dict[Place, Any] = {}  # by itself: the value that it has left
        self._first = None if door is None else self.now()

    def __reduce__(self):
        return Reading, (self.function, self.door)  # it is read anew where it is loaded

    def now(self) -> "Static":
        """Return the meaning as it is now."""
        return Static(self)

    def call(self, args: tuple, keywords: dict) -> Any:
        """Call the function; what it writes itself (a count, a cache) is no part of its meaning."""
        before = self.now()
        if self._first is not None and (found := self._first.changes(before, self.written)):
            what = "; ".join(list(dict.fromkeys(found.values()))[:MOST_NAMED])
            raise ValueError(
                f"{self.door}: the model has changed since ({what}), and its latents and their "
                f"supports were read then: call {self.door} again"
            )
        is_traced = any(map(tree.is_traced, jax.tree.leaves((args, keywords))))
        with _TRACED_WITH(before) if is_traced else contextlib.nullcontext():
            out = self.function(*args, **keywords)
        now = self.now()
        self.written |= {place: now.values.get(place) for place in before.changes(now)}
        return out


class Static(Meaning):
    """The static part of a `Function`; it compares by meaning."""

    def __init__(self, reading: Reading):
        self.reading = reading
        super().__init__(reading._root, reading.written, with_methods=not reading._is_called)

    def __reduce__(self):
        return Reading.now, (self.reading,)

    def __repr__(self) -> str:
        return repr(self.reading.function)


register_pytree_node(
    Function,
    lambda f: ((f.args, f.keywords), f.reading.now()),
    lambda static, children: Function(static.reading, *children[0], **children[1]),
)


def meanings(tree: PyTree) -> tuple[Static, ...]:
    """Return what the functions of a tree, and the classes of a user in it, mean now."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_function)
    return (*(x.reading.now() for x in nodes if _is_function(x)), _users_code(tree))


def changes(before: tuple[Static, ...]) -> str:
    """Name the values that functions read and that have changed; empty if there are none."""
    found = [m.changes(m.reading.now(), m.reading.written).values() for m in before]
    return "; ".join(list(dict.fromkeys(name for names in found for name in names))[:MOST_NAMED])


def traced_with(*trees: PyTree) -> contextlib.AbstractContextManager:
    """Trace the code of a user's own target, sampler or warm-up anew where it means something else."""
    meaning = _users_code(trees)
    return _TRACED_WITH(meaning if meaning.has_users_code else None)


def _users_code(tree: PyTree) -> Static:
    """Return the meaning of the classes of a user's own nodes in a tree, with all methods."""
    classes: dict[type, None] = {}

    def is_leaf(node: Any) -> bool:  # of every node, before the nodes inside it
        classes.update({} if is_library(type(node)) else {type(node): None})
        return _is_function(node)

    jax.tree.leaves(tree, is_leaf=is_leaf)
    return Reading(tuple(classes), is_called=False).now()


def _is_function(node: Any) -> bool:
    return isinstance(node, Function)


def as_partial(function: Callable) -> Function:
    """Wrap a function as a pytree, so that arrays that a `Partial` binds are arguments of programs."""
    if isinstance(function, Function):
        return function
    if not callable(function):
        raise TypeError(f"expected a function, got {type(function).__name__}")
    about = without_arrays(function) if is_module(function) else None
    bound = call_of(function) if is_module(function) else function
    if not isinstance(bound, Partial):
        return Function(bound)
    bound = as_arrays(f"bound by {name_of_function(bound)}: ", bound)
    args, keywords = with_functions((bound.args, bound.keywords))
    return Function(Reading(unboxed(bound.func), about=about), *args, **keywords)


def unboxed(function: Callable) -> Callable:
    """Return the function that a `Partial` was made from."""
    inside = vars(function).values() if type(function) is _BOX else ()
    return next((x for x in inside if isinstance(x, functools.partial)), function)


def of_model(door: str, function: Callable, *args: PyTree) -> Function:
    """Wrap a function that runs a model, of which other things were read before.

    It raises if the model has changed since, and asks to call ``door`` again.
    """
    return Function(Reading(function, door), *with_functions(args))


def with_functions(tree: PyTree) -> PyTree:
    """Turn the `Partial` nodes of a tree into `Function`."""
    is_partial = lambda x: isinstance(x, Partial)  # noqa: E731
    return jax.tree.map(lambda x: as_partial(x) if is_partial(x) else x, tree, is_leaf=is_partial)


@jax.jit
def run(function: Function, *args: PyTree) -> PyTree:
    """Call a function as one program, which functions of the same meaning share."""
    return function(*args)


def name_of_function(function: Callable) -> str:
    """Return the name of a function, of the one that a `Partial` binds, or of a module's class."""
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
