"""What a NumPyro model is called with: arrays, which programs take, apart from what is constant.

Arrays that a ``functools.partial`` or a handler (``condition(model, data=...)``) holds are arguments
too, and so are numbers such as the scale of a prior: other values are no other program.
"""

import copy
import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.numbers import as_array, check_leaves
from gspmd_mcmc.placement.padding import is_padded, real_rows, unpadded
from gspmd_mcmc.targets.checks import CONSTANT_BYTES
from gspmd_mcmc.targets.function import unboxed

# What JAX raises where code asks for a value that only the running program has.
LOOKS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

# NumPyro's handlers and its validation are those of the process: one thread runs them at a time.
HANDLERS = threading.RLock()


def module(name: str) -> Any:
    """Import a module of NumPyro's, which need not be installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("numpyro is missing: pip install 'gspmd_mcmc[models]' brings it") from error


def without_validation() -> AbstractContextManager:
    """Return a context in which NumPyro does not validate parameters: the first run has done so.

    Parameters that are numbers are the same in each run, and of a tracer there is nothing to tell.
    NumPyro tries all the same, and compiles what its constraints compute apart from the parameter: some
    ten programs for each Cholesky factor in each trace.
    """
    return module("numpyro").validation_enabled(False)


@dataclass(frozen=True, eq=False)
class Bound:
    """A model and its arguments by name, the arrays among them apart from the rest.

    Attributes
    ----------
    model
        The innermost function, without what wraps it.
    handlers
        Handlers around it, the innermost first, without the values that they hold.
    given
        Path of an argument's leaf to the leaf.
    arrays
        Those that are arrays, or numbers that stand for arrays.
    looked_at
        Arrays that the model needs to know while it is traced, on the host.
    lists
        Names of the arguments that are Python lists.
    """

    model: Callable
    handlers: tuple
    signature: inspect.Signature
    treedef: Any
    paths: tuple[str, ...]
    given: dict[str, Any]
    arrays: dict[str, Any]
    looked_at: dict[str, np.ndarray]
    lists: tuple[str, ...]

    @classmethod
    def of(cls, model: Callable, args: tuple, kwargs: dict) -> "Bound":
        """Bind a model's arguments."""
        model, handlers, args, kwargs = _unwrapped(model, args, kwargs)
        signature = inspect.signature(model)
        named = dict(signature.bind(*args, **kwargs).arguments)
        held = [_held(handler) for handler in handlers]
        flat, treedef = jax.tree_util.tree_flatten_with_path([named, *held], is_leaf=is_padded)
        given = {_name(path, handlers): leaf for path, leaf in flat}
        arrays = {
            _name(path, handlers): _array(_name(path, handlers), leaf)
            for path, leaf in flat
            if _may_be_array(leaf, is_alone=path[0].idx > 0 or len(path) == 2)
        }
        check_leaves("argument ", {k: x for k, x in given.items() if k not in arrays})
        lists = tuple(name for name, x in named.items() if isinstance(x, list))
        handlers = tuple(_emptied(handler) for handler in handlers)
        return cls(model, handlers, signature, treedef, tuple(given), given, arrays, {}, lists)

    @property
    def name(self) -> str:
        """What the model is called."""
        return getattr(self.model, "__name__", type(self.model).__name__)

    def without_arrays(self) -> "Bound":
        """Return what functions of a target hold: they take the arrays as arguments."""
        constants = {k: x for k, x in self.given.items() if k not in self.arrays | self.looked_at}
        return replace(self, given=constants, arrays={})

    def opened(self, arrays: dict[str, Any]) -> tuple[Callable, inspect.BoundArguments]:
        """Return the model, and its arguments with other arrays."""
        leaves = self.given | self.looked_at | arrays
        named, *held = self.treedef.unflatten([leaves[path] for path in self.paths])
        model = self.model
        for emptied, fields in zip(self.handlers, held, strict=True):
            handler = copy.copy(emptied)
            vars(handler).update(fields, fn=model)
            model = handler
        return model, inspect.BoundArguments(self.signature, named)

    def call(self, arrays: dict[str, Any], substitute: Callable, rng_key: Any = 0) -> dict[str, dict]:
        """Run the model with other arrays under a substitution; return its trace.

        What is neither substituted nor observed is drawn.
        """
        with HANDLERS, without_validation():
            return self._run(arrays, substitute, rng_key)

    def _run(self, arrays: dict[str, Any], substitute: Callable, rng_key: Any = 0) -> dict[str, dict]:
        handlers, (model, given) = module("numpyro.handlers"), self.opened(arrays)
        model = handlers.substitute(handlers.seed(model, rng_key), substitute_fn=substitute)
        # NumPyro's own code relies on promotion.
        with HANDLERS, jax.numpy_rank_promotion("allow"):
            return handlers.trace(model).get_trace(*given.args, **given.kwargs)

    def traced(self, look: Callable[[dict], Any]) -> tuple["Bound", dict[str, dict]]:
        """Run the model in the abstract, from NumPyro's own start; return its sites.

        An argument whose values the model looks at, as ``np.unique(x)`` and ``int(x.max())`` do,
        becomes a constant of the `Bound` that is returned.
        """
        try:
            return self, self._sites(look)
        except Exception as error:  # whatever a model does with a tracer, and not with a number
            bound = self._with_constants(look, error)
            return bound, bound._sites(look)

    def _sites(self, look: Callable[[dict], Any]) -> dict[str, dict]:
        def run(arrays: dict[str, Any]) -> None:
            found.update(self._run(arrays, start))
            for site in found.values():
                site |= look(site)

        found: dict[str, dict] = {}
        jax.eval_shape(run, unpadded(self.arrays))
        return found

    def _with_constants(self, look: Callable[[dict], Any], error: Exception) -> "Bound":
        """Find the arguments that the model must know; raise if it fails where it knows all of them."""
        known = [k for k, x in self.given.items() if k in self.arrays and not _is_abstract(x)]

        def runs(names: list[str]) -> bool:
            try:
                self._known(names)._sites(look)
            except Exception:  # as above
                return False
            return True

        if not runs(known):
            raise self._explained(error)
        for name in list(known):
            fewer = [k for k in known if k != name]
            known = fewer if runs(fewer) else known
        for name in known:
            if (size := np.asarray(self._known([name]).looked_at[name]).nbytes) > CONSTANT_BYTES:
                raise ValueError(
                    f"argument {name}: the model looks at its values while it is traced "
                    f"(np.unique(x), int(x.max())), so that {size / 1e6:.1f} MB would become constants "
                    "of the program. Compute what it needs of them before, and pass that as an argument"
                ) from error
        return self._known(known)

    def _known(self, names: list[str]) -> "Bound":
        arrays = {k: x for k, x in self.arrays.items() if k not in names}
        return replace(self, arrays=arrays, looked_at={k: self._on_host(k) for k in names})

    def _on_host(self, name: str) -> Any:
        """Return an argument as given, or as NumPy's array: JAX stages what it computes of others."""
        leaf = self.given[name]
        is_there = isinstance(leaf, float | np.ndarray | np.generic)
        return leaf if is_there else np.asarray(to_host(real_rows(self.arrays[name])))

    def _explained(self, error: Exception) -> Exception:
        """Return the error to raise where a model fails."""
        explained = error
        if isinstance(error, LOOKS):
            first = str(error).strip().splitlines()[0]
            explained = ValueError(
                f"{self.name}: it asks for a value that only the running program has, by int(), if, "
                f"np.asarray and the like ({first}). A number of the data (how many kinds there are): "
                "compute it by NumPy, int(np.max(x)), or before, and pass it as an argument. A choice "
                "by a latent's value: jnp.where(condition, a, b)"
            )
        elif self.lists and isinstance(error, TypeError | AttributeError):
            explained = TypeError(
                f"the model fails: {error}. Its arguments {list(self.lists)} are Python lists, which "
                "do not compute as arrays do: pass numpy.asarray(...) of them"
            )
        if explained is not error:
            explained.__cause__ = error
        return explained


def _unwrapped(model: Callable, args: tuple, kwargs: dict) -> tuple[Callable, tuple, tuple, dict]:
    """Return the innermost function, the handlers around it, and all that it is called with.

    A ``seed`` is left out: the key is given anew for each run, or all draws would be one.
    """
    messenger = module("numpyro.primitives").Messenger
    seed, handlers = module("numpyro.handlers").seed, []
    while True:
        if isinstance(model, functools.partial):
            args, kwargs = (*model.args, *args), model.keywords | kwargs
            model = unboxed(model.func)
        elif isinstance(model, messenger) and model.fn is not None:
            handlers += [] if isinstance(model, seed) else [model]
            model = model.fn
        else:
            return model, tuple(reversed(handlers)), args, kwargs


def start(msg: dict) -> Any:
    """Return NumPyro's own start of a site; one that ``handlers.substitute`` has set is marked."""
    if msg["type"] == "sample" and not msg["is_observed"] and msg["value"] is not None:
        msg["is_substituted"] = True
        return None
    return module("numpyro.infer").init_to_uniform(msg)


def _held(handler: Any) -> dict[str, Any]:
    """Return the values that a handler holds."""
    return {k: x for k, x in vars(handler).items() if k != "fn" and not k.startswith("__")}


def _emptied(handler: Any) -> Any:
    empty = copy.copy(handler)
    for name in list(vars(handler)):
        delattr(empty, name)
    return empty


def _name(path: Any, handlers: tuple) -> str:
    """Name a leaf: of an argument by its name, of a handler by its kind and number."""
    which = path[0].idx
    kind = f"{type(handlers[which - 1]).__name__} {which}: " if which else ""
    return kind + jax.tree_util.keystr(path[1:])


def _may_be_array(leaf: Any, is_alone: bool) -> bool:
    """Tell arrays, and numbers that are data, from what else shapes may depend on.

    An integer may be the size of a plate. A number among others, in a list, is left as it is: each
    would be an array.
    """
    if isinstance(leaf, float | np.floating):
        return is_alone
    return is_padded(leaf) or (hasattr(leaf, "dtype") and not isinstance(leaf, np.generic))


def _array(name: str, leaf: Any) -> Any:
    if isinstance(leaf, float):  # keeps it weak: it takes the type of what it meets
        return jax.numpy.asarray(float(leaf))
    return leaf if is_padded(leaf) else as_array(f"argument {name}", leaf)


def _is_abstract(leaf: Any) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(leaf))
