"""Joint distributions of several parts, some of them `Sharded`, in the three forms that TFP has.

Each form goes through its parts, a name and a distribution at a time, and receives their values: those
drawn when it is sampled, those given when it is evaluated, the rows of a block in a posterior.
"""

import inspect
from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from gspmd_mcmc.errors import answers
from gspmd_mcmc.models import sharded
from gspmd_mcmc.models.conditioning import condition
from gspmd_mcmc.models.joint_parts import (
    check_name,
    check_part,
    checked_mesh,
    held_part,
    in_order,
    name_of_part,
    num_taken,
    required,
    run,
    taken_by,
    trace,
)
from gspmd_mcmc.models.sharded import Sharded, check_value, is_distribution, shape_of, shown
from gspmd_mcmc.models.tfp import AnswersTFP, without_root
from gspmd_mcmc.placement.explicit import OnMesh, on_any_mesh
from gspmd_mcmc.placement.padding import is_padded, real_rows, refuse_padded
from gspmd_mcmc.targets.checks import check_key, constant_megabytes
from gspmd_mcmc.targets.function import Function, as_partial, name_of_function
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.tree import is_staging, pytree, set_fields, static

Visit = Callable[[str, Any], Any]  # gives a part's value, of its name and distribution
ONE_VALUE = "Call it with one value of all parts, as sample returns it: {}([a, b])"
ONE_SAMPLE = "A joint takes parts and mesh=; values are always checked, and jax.vmap makes many samples"


class _Joint(AnswersTFP, OnMesh, ABC):
    """What the three forms have in common."""

    @abstractmethod
    def visit_parts(self, visit: Visit) -> None:
        """Go through the parts in the order they are drawn; later ones see what ``visit`` returns."""

    @abstractmethod
    def _pack(self, by_name: dict[str, Any]) -> Any:
        """Give results, in the order drawn, the structure of a value."""

    def _given(self, value: Any) -> dict[Any, Any]:
        """Return the entries of a value by name, or by place where they have none."""
        if not isinstance(value, list | tuple):
            raise TypeError(f"value: expected a list or tuple of one value a part, got {shown(value)}")
        return value._asdict() if hasattr(value, "_fields") else dict(enumerate(value))  # pyright: ignore

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in the order they are drawn."""
        return tuple(trace(self, {}, lambda name, part, value: None))

    @answers("Call it as sample(rng_key, sample_shape, value=value)", seed="the key comes first here")
    @on_any_mesh
    def sample(
        self, rng_key: jax.Array, sample_shape: float | tuple[int, ...] = (), *, value: Any = None
    ) -> Any:
        """Draw all parts, or those that are not given.

        The i-th part drawn uses the key ``fold_in(rng_key, i)``. With a ``sample_shape``, the j-th
        sample uses ``fold_in(rng_key, j)`` in place of ``rng_key``.

        Parameters
        ----------
        rng_key
            A typed key, ``jax.random.key(seed)``.
        sample_shape
            Independent samples, in front of every part.
        value
            A value, as `log_prob` takes it, with None for the parts to draw: ``(w, b, None)`` draws the
            third from its distribution given the first two, which are returned as they are. Parts
            before a given one do not depend on it: that is what `condition` does.

        Returns
        -------
        list, dict or namedtuple
            A value for each part. Those of `Sharded` parts lie over the mesh, and are `Padded` where it
            does not divide their rows; the values are the same on every mesh (`Sharded.sample`).

        Raises
        ------
        TypeError, ValueError
            If the key is not a typed key, a `Sharded` part has no mesh, a part is not a distribution,
            there is a ``sample_shape`` and the mesh does not divide the rows, or a given part has
            another shape than one sample.
        """
        check_key(rng_key)
        shape = shape_of(sample_shape)
        given = None if value is None else self._given(value)
        if not shape:
            return self._sample(given, rng_key)
        keys = jax.vmap(partial(jax.random.fold_in, rng_key))(jnp.arange(prod(shape))).reshape(shape)
        one = partial(self._sample, given)
        for _ in shape:
            one = jax.vmap(one)
        values = one(keys)
        refuse_padded(values, "sample", "draw samples one by one, or choose a mesh that divides them")
        return values

    @answers(ONE_VALUE.format("log_prob"))
    @on_any_mesh
    def log_prob(self, value: Any) -> jax.Array:
        """Sum the log probabilities of all parts, over all rows: one scalar.

        Parameters
        ----------
        value
            What `sample` returns without a ``sample_shape`` (use vmap for many samples). A list or
            tuple may stand for a namedtuple. Rows may be `Padded`, placed or not.

        Raises
        ------
        TypeError, ValueError
            If the value has another structure, number of parts or shape.

        Notes
        -----
        In a program of your own pass the joint in, ``jax.jit(type(joint).log_prob)(joint, value)``:
        closed over, arrays that it holds would be constants of the program, whole on every device.
        """
        function = _log_prob if is_staging() else _jit_log_prob
        return function(self, self._arrays(value))

    @answers(ONE_VALUE.format("log_prob_parts"))
    @on_any_mesh
    def log_prob_parts(self, value: Any) -> Any:
        """Log probability of each part, summed over its rows, in the structure of the value."""
        function = _log_prob_parts if is_staging() else _jit_log_prob_parts
        return function(self, self._arrays(value))

    @answers("Name the parts that are observed: condition(y=y)")
    @on_any_mesh
    def condition(self, /, **observed: Any) -> Posterior:
        """Observe some parts, and return the posterior of the others.

        Rows are streamed: `Sharded` parts with equally many rows over the same axis form one `Plate`,
        whose local latents are the latents among them. The model is run again on each block of rows,
        so a row may depend on parts without rows and on its own row of other parts. Arrays of rows that
        the model reads must be its arguments (``JointDistributionCoroutine(model, x)``, or
        ``jax.tree_util.Partial(function, x)`` as a part), placed over the same axis by `place`.

        Parameters
        ----------
        observed
            Values of parts by name: arrays, placed or not, or `Padded`.

        Returns
        -------
        Posterior
            Its position is a dict of the other parts by name; ``origin()`` is a position to start
            around. NumPyro's and TFP's distributions are sampled on the whole real line, through the
            bijection of their support.

        Raises
        ------
        ValueError
            If no part has that name, a value does not fit its part, no part is left to sample, one of
            those left is discrete, or blocks of rows cannot be evaluated apart (``CannotStream``).
        """
        return condition(self, observed)

    def _arrays(self, value: Any) -> dict[Any, Any]:
        if megabytes := constant_megabytes(self):
            raise ValueError(
                f"{megabytes:.1f} MB of the joint distribution's arrays would become constants of "
                "this program, because it closes over them. Make the joint an argument: "
                "jax.jit(type(joint).log_prob)(joint, value)"
            )
        return {k: x if is_padded(x) else jnp.asarray(x) for k, x in self._given(value).items()}

    def _sample(self, given: dict[Any, Any] | None, rng_key: jax.Array) -> Any:
        def visit(index: int, name: str, part: Any) -> Any:
            out[name] = values.of(index, name)
            if out[name] is not None:
                check_value(f"part {name!r}", part, out[name])
                return real_rows(out[name])
            key = jax.random.fold_in(rng_key, index)
            out[name] = part.sample(key) if isinstance(part, Sharded) else sharded.draw_part(part, key)
            return real_rows(out[name])

        values = _Values(given)
        out: dict[str, Any] = {}
        run(self, visit)
        values.check_all_read(list(out))
        return self._pack(out)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.names)})"


@pytree
@dataclass(frozen=True, eq=False, init=False, repr=False)
class JointDistributionSequential(_Joint):
    """Parts in a list; a part may be a function of the values before it, the most recent first.

    Parameters
    ----------
    parts
        Distributions (`Sharded` or not), and functions that return one. Arrays that a function needs go
        through ``jax.tree_util.Partial``.
    mesh
        The mesh of `Sharded` parts that have none of their own.

    Raises
    ------
    TypeError, ValueError
        If a part is neither a distribution nor a function, or a function takes more values than there
        are before it.
    """

    parts: tuple[Any, ...]
    mesh: Mesh | None = static()

    @answers(ONE_SAMPLE)
    def __init__(self, parts: Any, *, mesh: Mesh | None = None):
        if not isinstance(parts, list | tuple):
            raise TypeError(
                f"JointDistributionSequential: expected a list of parts, got {shown(parts)}"
            )
        for i, part in enumerate(parts):
            check_part(f"part {i}", part)
            if not is_distribution(part) and len(required(part)) > i:
                raise ValueError(
                    f"part {i} takes {required(part)}, but there are only {i} parts before it"
                )
        set_fields(self, parts=tuple(map(held_part, parts)), mesh=checked_mesh(mesh))

    def visit_parts(self, visit: Visit) -> None:
        """Go through the list."""
        values: list[Any] = []
        for i, part in enumerate(self.parts):
            taken = () if is_distribution(part) else values[: num_taken(part, i)]
            distribution = part if is_distribution(part) else part(*taken)
            values.insert(0, visit(name_of_part(distribution, i), distribution))

    def _pack(self, by_name: dict[str, Any]) -> list[Any]:
        return list(by_name.values())


@pytree
@dataclass(frozen=True, eq=False, init=False, repr=False)
class JointDistributionNamed(_Joint):
    """Parts in a dict; a part may be a function whose arguments are named after other parts.

    Parts are drawn in the order of the dict, but a part after those that it takes.

    Parameters
    ----------
    parts
        Name to distribution (`Sharded` or not), or to a function that returns one. Arrays that a
        function also needs go through ``jax.tree_util.Partial``.
    mesh
        The mesh of `Sharded` parts that have none of their own.

    Raises
    ------
    TypeError, ValueError
        If a part is neither a distribution nor a function, takes a part that is not there, or parts
        take each other in a circle.
    """

    parts: tuple[Any, ...]
    order: tuple[str, ...] = static()  # as drawn; the parts are in this order
    written: tuple[str, ...] = static()  # as in the dict
    mesh: Mesh | None = static()

    @answers(ONE_SAMPLE)
    def __init__(self, parts: dict[str, Any], *, mesh: Mesh | None = None):
        if not isinstance(parts, dict):
            raise TypeError(f"JointDistributionNamed: expected a dict of parts, got {shown(parts)}")
        for name, part in parts.items():
            check_name(name)
            check_part(repr(name), part)
        order = in_order({name: taken_by(part, parts) for name, part in parts.items()})
        set_fields(
            self,
            parts=tuple(held_part(parts[name]) for name in order),
            order=order,
            written=tuple(parts),
            mesh=checked_mesh(mesh),
        )

    def visit_parts(self, visit: Visit) -> None:
        """Go through the dict, each part after those that it takes."""
        values: dict[str, Any] = {}
        for name, part in zip(self.order, self.parts, strict=True):
            taken = {other: values[other] for other in taken_by(part, self.order)}
            values[name] = visit(name, part if is_distribution(part) else part(**taken))

    def _pack(self, by_name: dict[str, Any]) -> dict[str, Any]:
        return {name: by_name[name] for name in self.written}

    def _given(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict) or set(value) != set(self.order):
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"value: expected a dict of {sorted(self.order)}, got {found}")
        return value


@dataclass(frozen=True, eq=False)
class Root:
    """A part that depends on no other one, as TFP marks them; ``name`` is what it is called."""

    distribution: Any
    name: str | None = None


@pytree
@dataclass(frozen=True, eq=False, init=False, repr=False)
class JointDistributionCoroutine(_Joint):
    """A generator function that yields distributions and is sent their values.

    ::

        def model(x):
            w = yield Root(dist.Normal(0, 1), name="w")
            y = yield Sharded(dist.Normal(x * w, 1), name="y")

        joint = JointDistributionCoroutine(model, gm.place(x, mesh, P("data")), mesh=mesh)

    Values are namedtuples, of the names given or var0, var1, ...

    Parameters
    ----------
    model
        The generator function. It yields ``Root(distribution)``, `Sharded` or a distribution.
    args
        What it is called with. Arrays with rows go in here, placed by `place`; it sees the real ones.
    mesh
        The mesh of `Sharded` parts that have none of their own.

    Raises
    ------
    TypeError
        If ``model`` is no generator function, or yields something else.
    """

    model: Function
    mesh: Mesh | None = static()
    Root = Root

    @answers(ONE_SAMPLE)
    def __init__(self, model: Callable, *args: Any, mesh: Mesh | None = None):
        bound = as_partial(model)
        bound = Function(bound.reading, *bound.args, *args, **bound.keywords)
        set_fields(self, model=held_part(bound), mesh=checked_mesh(mesh))

    def visit_parts(self, visit: Visit) -> None:
        """Run the generator, and send it the value of each part that it yields."""
        generator = self.model()
        if not inspect.isgenerator(generator):
            raise TypeError(
                f"{name_of_function(self.model)}: expected a generator function, which yields its "
                f"parts; it returned {shown(generator)}"
            )
        value, index = None, 0
        while True:
            try:
                part = generator.send(value)  # pyright: ignore[reportArgumentType]
            except StopIteration:
                return
            root = part if isinstance(part, Root) else Root(without_root(part))
            name = name_of_part(root.distribution, index) if root.name is None else root.name
            value, index = visit(name, root.distribution), index + 1

    def _pack(self, by_name: dict[str, Any]) -> Any:
        return _value_class(tuple(by_name))(*by_name.values())


class _Values:
    """The entries of a value, each to be read by its part; of no value all are None."""

    def __init__(self, given: dict[Any, Any] | None):
        self.given, self.unread = given, set(given or ())

    def of(self, index: int, name: str) -> Any:
        """Return the entry of a part, by its name or its place."""
        if self.given is None:
            return None
        key = name if name in self.given else index
        if key not in self.given:
            raise ValueError(f"value: expected one of part {name!r} too, got {self}")
        self.unread.discard(key)
        return self.given[key]

    def check_all_read(self, names: list[str]) -> None:
        """Raise where an entry is of no part."""
        if self.unread:
            raise ValueError(f"value: expected the parts {names}, got {self}")

    def __str__(self) -> str:
        given = self.given or ()
        names = [name for name in given if isinstance(name, str)]
        return f"those of {names}" if names else f"{len(given)} values"


def _log_prob_each(joint: _Joint, given: dict[Any, Any]) -> dict[str, jax.Array]:
    def visit(index: int, name: str, part: Any) -> Any:
        value = values.of(index, name)
        check_value(f"part {name!r}", part, value)
        is_sharded = isinstance(part, Sharded)
        out[name] = part.log_prob(value) if is_sharded else jnp.sum(sharded.log_prob(part, value))
        return real_rows(value)

    values = _Values(given)
    out: dict[str, jax.Array] = {}
    run(joint, visit)
    values.check_all_read(list(out))
    return out


def _log_prob(joint: _Joint, given: dict[Any, Any]) -> jax.Array:
    return sum(_log_prob_each(joint, given).values(), start=jnp.zeros(()))


def _log_prob_parts(joint: _Joint, given: dict[Any, Any]) -> Any:
    return joint._pack(_log_prob_each(joint, given))


_jit_log_prob = jax.jit(_log_prob)
_jit_log_prob_parts = jax.jit(_log_prob_parts)


@cache
def _value_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Values", names)  # pyright: ignore[reportUntypedNamedTuple]
