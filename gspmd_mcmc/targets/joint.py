"""Joint distributions of several parts, some of them `Sharded`, in the three forms that TFP has.

Each form is read as a generator that yields its parts, a name and a distribution at a time, and is sent
their values: to sample sends what it draws, to evaluate what is given, and a posterior the rows of a
block.
"""

import importlib
import inspect
import keyword
from collections import namedtuple
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.placement.mesh import require_auto
from gspmd_mcmc.placement.padding import is_padded, refuse_padded
from gspmd_mcmc.placement.place import place
from gspmd_mcmc.targets import numpyro, sharded
from gspmd_mcmc.targets.bijections import constrain
from gspmd_mcmc.targets.blocks import Blocks, CannotStream, Site, rows_of_plates
from gspmd_mcmc.targets.checks import CONSTANT_BYTES
from gspmd_mcmc.targets.functions import as_partial, name_of_function
from gspmd_mcmc.targets.plate import Plate
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.rows import row_axes
from gspmd_mcmc.targets.sharded import Sharded, check_key, check_value, is_distribution, shown, unpad
from gspmd_mcmc.tree import is_staging, pytree, set_fields, static

Parts = Generator[tuple[str, Any], Any, None]


class _Joint:
    """What the three forms have in common; each yields its parts in the order they are drawn."""

    mesh: Mesh | None

    def _parts(self) -> Parts:
        raise NotImplementedError

    def _pack(self, by_name: dict[str, Any]) -> Any:
        """Give results, in the order drawn, the structure of a value."""
        raise NotImplementedError

    def _given(self, value: Any) -> dict[Any, Any]:
        """Return the entries of a value by name, or by place where they have none."""
        if not isinstance(value, list | tuple):
            raise TypeError(f"value: expected a list or tuple of one value a part, got {shown(value)}")
        return value._asdict() if hasattr(value, "_fields") else dict(enumerate(value))  # pyright: ignore

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in the order they are drawn."""
        return tuple(_trace(self, {}, lambda name, part, value: None))

    def sample(self, rng_key: jax.Array, sample_shape: int | tuple[int, ...] = ()) -> Any:
        """Draw all parts.

        Part i, in the order they are drawn, draws from ``fold_in(rng_key, i)``, and of many samples the
        j-th from ``fold_in(rng_key, j)`` as its key.

        Parameters
        ----------
        rng_key
            A typed key, ``jax.random.key(seed)``.
        sample_shape
            Independent samples, in front of every part.

        Returns
        -------
        list, dict or namedtuple
            A value for each part. Those of `Sharded` parts lie over the mesh, and are `Padded` where it
            does not divide their rows; the values are the same on every mesh (`Sharded.sample`).

        Raises
        ------
        TypeError, ValueError
            If the key is none, a `Sharded` part has no mesh, a part is no distribution, or there is a
            ``sample_shape`` and the mesh does not divide the rows.
        """
        check_key(rng_key)
        shape = (sample_shape,) if isinstance(sample_shape, int) else tuple(sample_shape)
        if not shape:
            return self._sample(rng_key)
        keys = jax.vmap(partial(jax.random.fold_in, rng_key))(jnp.arange(prod(shape))).reshape(shape)
        one = self._sample
        for _ in shape:
            one = jax.vmap(one)
        values = one(keys)
        refuse_padded(values, "sample", "draw samples one by one, or choose a mesh that divides them")
        return values

    def log_prob(self, value: Any) -> jax.Array:
        """Sum the log probabilities of all parts, over all rows: one scalar.

        Parameters
        ----------
        value
            What `sample` returns without a ``sample_shape`` (vmap over those); a list or tuple serves
            for a namedtuple. Rows may be `Padded`, placed or not.

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

    def log_prob_parts(self, value: Any) -> Any:
        """Log probability of each part, summed over its rows, in the structure of the value."""
        function = _log_prob_parts if is_staging() else _jit_log_prob_parts
        return function(self, self._arrays(value))

    def condition(self, /, **observed: Any) -> Posterior:
        """Observe some parts, and return the posterior of the others.

        Rows are streamed: `Sharded` parts with as many rows over the same axis form one `Plate`, the
        latents among them local to it, and the model is run again on any block of its rows. So a row
        may depend on parts without rows, and on its own row of the others. Arrays with rows that the
        model reads are passed to it (``JointDistributionCoroutine(model, x)``, or
        ``jax.tree_util.Partial(function, x)`` as a part), placed over the same axis by `place`.

        Parameters
        ----------
        observed
            Values of parts by name: arrays, placed or not, or `Padded`.

        Returns
        -------
        Posterior
            Of a dict of the other parts by name; ``origin()`` is a position to start around. Parts that
            are NumPyro's are sampled on the whole real line, by the bijection of their support.

        Raises
        ------
        ValueError
            If no part has that name, a value does not fit it, no part is left, one left is discrete, or
            blocks of rows cannot be evaluated apart (``CannotStream``).
        """
        return _condition(self, observed)

    def _arrays(self, value: Any) -> dict[Any, Any]:
        _check_not_constant(self)
        return {k: x if is_padded(x) else jnp.asarray(x) for k, x in self._given(value).items()}

    def _sample(self, rng_key: jax.Array) -> Any:
        def visit(index: int, name: str, part: Any) -> Any:
            key = jax.random.fold_in(rng_key, index)
            out[name] = part.sample(key) if isinstance(part, Sharded) else sharded.draw(part, key, ())
            return unpad(out[name])

        out: dict[str, Any] = {}
        _run(self, visit)
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

    def __init__(self, parts: Any, *, mesh: Mesh | None = None):
        if not isinstance(parts, list | tuple):
            raise TypeError(
                f"JointDistributionSequential: expected a list of parts, got {shown(parts)}"
            )
        for i, part in enumerate(parts):
            _check_part(f"part {i}", part)
            if not is_distribution(part) and len(_required(part)) > i:
                raise ValueError(
                    f"part {i} takes {_required(part)}, but there are only {i} parts before it"
                )
        set_fields(self, parts=tuple(map(_hold, parts)), mesh=_checked(mesh))

    def _parts(self) -> Parts:
        values: list[Any] = []
        for i, part in enumerate(self.parts):
            taken = () if is_distribution(part) else values[: _num_taken(part, i)]
            distribution = part if is_distribution(part) else part(*taken)
            values.insert(0, (yield _name(distribution, i), distribution))

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
        function needs besides go through ``jax.tree_util.Partial``.
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

    def __init__(self, parts: dict[str, Any], *, mesh: Mesh | None = None):
        if not isinstance(parts, dict):
            raise TypeError(f"JointDistributionNamed: expected a dict of parts, got {shown(parts)}")
        for name, part in parts.items():
            _check_name(name)
            _check_part(repr(name), part)
        order = _in_order({name: _taken(part, parts) for name, part in parts.items()})
        set_fields(
            self,
            parts=tuple(_hold(parts[name]) for name in order),
            order=order,
            written=tuple(parts),
            mesh=_checked(mesh),
        )

    def _parts(self) -> Parts:
        values: dict[str, Any] = {}
        for name, part in zip(self.order, self.parts, strict=True):
            taken = {other: values[other] for other in _taken(part, self.order)}
            values[name] = yield name, part if is_distribution(part) else part(**taken)

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

    model: Partial
    mesh: Mesh | None = static()
    Root = Root

    def __init__(self, model: Callable, *args: Any, mesh: Mesh | None = None):
        bound = as_partial(model)
        model = Partial(bound.func, *bound.args, *args, **bound.keywords)
        set_fields(self, model=_hold(model), mesh=_checked(mesh))

    def _parts(self) -> Parts:
        generator = self.model()
        if not inspect.isgenerator(generator):
            raise TypeError(
                f"{name_of_function(self.model)}: expected a generator function, which yields its "
                f"parts; it returned {shown(generator)}"
            )
        part, index = next(generator, _END), 0
        while part is not _END:
            name = part.name if isinstance(part, Root) else None
            distribution = part.distribution if isinstance(part, Root) else part
            name = _name(distribution, index) if name is None else name
            part, index = _send(generator, (yield name, distribution)), index + 1

    def _pack(self, by_name: dict[str, Any]) -> Any:
        return _value_class(tuple(by_name))(*by_name.values())


_END: Any = object()


def _send(generator: Any, value: Any) -> Any:
    try:
        return generator.send(value)
    except StopIteration:
        return _END


def _run(joint: _Joint, visit: Callable[[int, str, Any], Any]) -> None:
    """Go through the parts: ``visit(index, name, part)`` returns the value that later ones see."""
    seen: list[str] = []
    parts = jax.tree.map(_released, joint, is_leaf=_is_held)._parts()
    found = next(parts, _END)
    while found is not _END:
        name, part = found
        _check_found(name, part, seen)
        if isinstance(part, Sharded) and part.mesh is None:
            part = tree.replace(part, mesh=joint.mesh)
        seen.append(name)
        found = _send(parts, visit(len(seen) - 1, name, part))
    if not seen:
        raise ValueError("the joint distribution has no parts")


def _log_prob_each(joint: _Joint, given: dict[Any, Any]) -> dict[str, jax.Array]:
    def visit(index: int, name: str, part: Any) -> Any:
        key = name if name in given else index
        if key not in given:
            raise ValueError(f"value: expected one of part {name!r} too, got {_counted(given)}")
        rest.discard(key)
        out[name] = _log_prob_of(name, part, given[key])
        return unpad(given[key])

    out: dict[str, jax.Array] = {}
    rest = set(given)
    _run(joint, visit)
    if rest:
        raise ValueError(f"value: expected the parts {list(out)}, got {_counted(given)}")
    return out


def _counted(given: dict[Any, Any]) -> str:
    names = [name for name in given if isinstance(name, str)]
    return f"those of {names}" if names else f"{len(given)} values"


def _log_prob_of(name: str, part: Any, value: Any) -> jax.Array:
    check_value(f"part {name!r}", part, value)
    if isinstance(part, Sharded):
        return part.log_prob(value)
    return jnp.sum(sharded.log_prob(part, value))


def _log_prob(joint: _Joint, given: dict[Any, Any]) -> jax.Array:
    return sum(_log_prob_each(joint, given).values(), start=jnp.zeros(()))


def _log_prob_parts(joint: _Joint, given: dict[Any, Any]) -> Any:
    return joint._pack(_log_prob_each(joint, given))


_jit_log_prob = jax.jit(_log_prob)
_jit_log_prob_parts = jax.jit(_log_prob_parts)


# What a joint distribution holds: arrays are leaves, all else is metadata of the pytree.


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Constant:
    """Something that is no array, such as a number that shapes depend on, kept out of the leaves."""

    value: Any

    def _key(self) -> Any:
        is_plain = isinstance(self.value, bool | int | float | complex | str)
        return (type(self.value), self.value) if is_plain else id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _hold(part: Any) -> Any:
    part = part if is_distribution(part) else as_partial(part)
    return jax.tree.map(_held, part, is_leaf=is_padded)


def _held(x: Any) -> Any:
    return x if is_padded(x) or hasattr(x, "dtype") else _Constant(x)


def _is_held(x: Any) -> bool:
    return is_padded(x) or isinstance(x, _Constant)


def _released(x: Any) -> Any:
    return x.value if isinstance(x, _Constant) else unpad(x)


def _check_not_constant(joint: _Joint) -> None:
    """Raise if the joint's arrays are being written into a program, whole on every device."""
    held = [x for x in jax.tree.leaves(joint) if not tree.is_traced(x)] if is_staging() else []
    num_bytes = sum(x.nbytes for x in held)
    if num_bytes > CONSTANT_BYTES:
        raise ValueError(
            f"{num_bytes / 1e6:.1f} MB of the joint distribution's arrays would become constants of "
            "this program, because it closes over them. Make the joint an argument: "
            "jax.jit(type(joint).log_prob)(joint, value)"
        )


# The parts as they are written: checks, names, and what functions take.


def _checked(mesh: Mesh | None) -> Mesh | None:
    if mesh is not None:
        require_auto(mesh)
    return mesh


def _check_part(what: str, part: Any) -> None:
    if not is_distribution(part) and (isinstance(part, type) or not callable(part)):
        raise TypeError(
            f"{what}: expected a distribution, or a function that returns one, got {shown(part)}"
        )


def _check_name(name: Any) -> None:
    is_word = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    if not is_word or name.startswith("_"):
        raise ValueError(f"expected the name of a part to be an identifier, got {name!r}")


def _check_found(name: str, part: Any, seen: list[str]) -> None:
    _check_name(name)
    if not is_distribution(part):
        raise TypeError(
            f"part {name!r}: expected a distribution, Sharded(distribution) or (of a coroutine) "
            f"Root(distribution), got {shown(part)}"
        )
    if name in seen:
        raise ValueError(f"two parts are called {name!r}; give them names: Sharded(..., name=...)")


def _name(distribution: Any, index: int) -> str:
    name = distribution.name if isinstance(distribution, Sharded) else None
    return f"var{index}" if name is None else name


def _parameters(part: Any) -> list[inspect.Parameter]:
    return [] if is_distribution(part) else list(inspect.signature(part).parameters.values())


def _required(part: Any) -> list[str]:
    """Names of the values that a function takes by place."""
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(part) if p.kind in by_place and p.default is p.empty]


def _num_taken(part: Any, most: int) -> int:
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in _parameters(part))
    return most if takes_all else len(_required(part))


def _taken(part: Any, names: Iterable[str]) -> list[str]:
    """Names of the parts that a function takes; of arguments with a default, those that are parts."""
    return [p.name for p in _parameters(part) if p.name in names or p.default is p.empty]


def _in_order(takes: dict[str, list[str]]) -> tuple[str, ...]:
    """Order parts as they are written, but each after those that it takes."""
    for name, others in takes.items():
        unknown = [other for other in others if other not in takes]
        if unknown:
            raise ValueError(f"{name!r} takes {unknown[0]!r}, which is none of {list(takes)}")
    order: list[str] = []
    while len(order) < len(takes):
        ready = [n for n in takes if n not in order and set(takes[n]) <= set(order)]
        if not ready:
            circle = {n: takes[n] for n in takes if n not in order}
            raise ValueError(f"parts take each other in a circle: {circle}")
        order.append(ready[0])
    return tuple(order)


@cache
def _value_class(names: tuple[str, ...]) -> Any:
    return namedtuple("Values", names)  # pyright: ignore[reportUntypedNamedTuple]


# The posterior of some parts, given the others.


@dataclass(frozen=True)
class _Fact:
    """What conditioning knows of a part.

    Attributes
    ----------
    value
        Shape and dtype of its value.
    rows
        Number of rows, mesh axes and mesh, if it is `Sharded`.
    bijection
        Of a latent's support; None where that is all of real space, or unknown.
    """

    value: jax.ShapeDtypeStruct
    rows: tuple[int, tuple[str, ...], Mesh | None] | None
    bijection: Any = None

    @property
    def plate(self) -> str | None:
        """Name of the plate that the part's rows form."""
        return None if self.rows is None else f"{'x'.join(self.rows[1])}[{self.rows[0]}]"

    @property
    def latent(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the unconstrained value."""
        shape = self.value.shape
        shape = shape if self.bijection is None else self.bijection.inverse_shape(shape)
        return jax.ShapeDtypeStruct(tuple(shape), self.value.dtype)


def _trace(joint: _Joint, observed: dict[str, Any], fact: Callable) -> dict[str, Any]:
    """Run the model in the abstract, on what is observed; give ``fact(name, part, value)`` by name."""

    def model(key: jax.Array, observed: dict[str, Any]) -> None:
        def visit(index: int, name: str, part: Any) -> Any:
            if name in observed:
                check_value(f"observed {name!r}", part, observed[name])
            value = unpad(observed[name]) if name in observed else _draw(part, key)
            found[name] = fact(name, part, value)
            return value

        _run(joint, visit)

    found: dict[str, Any] = {}
    jax.eval_shape(model, jax.random.key(0), observed)
    return found


def _draw(part: Any, rng_key: jax.Array) -> jax.Array:
    return part.draw(rng_key) if isinstance(part, Sharded) else sharded.draw(part, rng_key, ())


def _condition(joint: _Joint, observed: dict[str, Any]) -> Posterior:
    observed = {
        n: x if is_padded(x) or hasattr(x, "dtype") else np.asarray(x) for n, x in observed.items()
    }
    facts = _trace(joint, observed, partial(_fact, observed))
    latent = [name for name in facts if name not in observed]
    unknown = [name for name in observed if name not in facts]
    if unknown or not latent:
        what = f"there is no part {unknown[0]!r}" if unknown else "no part is left to sample"
        raise ValueError(f"condition: {what}; the parts are {list(facts)}")
    blocks = _blocks(joint, observed, facts)
    sites = tuple((name, facts[name].latent) for name in latent)
    target = tree.replace(blocks.posterior(), latents=sites)
    for plate, name in zip(target.plates, blocks.num_rows, strict=True):
        _check_rows_apart(target, plate, name)
    return target


def _fact(observed: dict[str, Any], name: str, part: Any, value: jax.Array) -> _Fact:
    is_sharded = isinstance(part, Sharded)
    if is_sharded and not value.ndim:
        raise ValueError(f"part {name!r} is Sharded and not observed: give it num_rows=")
    rows = (value.shape[0], part.axes, part.mesh) if is_sharded else None
    shape = jax.ShapeDtypeStruct(value.shape, value.dtype)
    if name in observed:
        return _Fact(shape, rows)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"part {name!r} is discrete and not observed: HMC moves through continuous space. Sum it "
            "out of the log density, or observe it"
        )
    return _Fact(shape, rows, _bijection(name, part.distribution if is_sharded else part))


def _bijection(name: str, distribution: Any) -> Any:
    """Return the bijection onto the support of a NumPyro distribution."""
    if not _is_numpyro(distribution):
        return None
    dist = importlib.import_module("numpyro.distributions")
    support = distribution.support
    if any(tree.is_traced(x) for x in jax.tree.leaves(support)):
        raise ValueError(
            f"part {name!r}: its support {support} depends on another part or on data. Sample it on a "
            "fixed support, and scale it in the model"
        )
    bijection = dist.biject_to(support)
    return None if type(bijection) is dist.transforms.IdentityTransform else bijection


def _is_numpyro(distribution: Any) -> bool:
    return type(distribution).__module__.startswith("numpyro.")


def _blocks(joint: _Joint, observed: dict[str, Any], facts: dict[str, _Fact]) -> Blocks:
    plates = {f.plate: f.rows for f in facts.values() if f.rows is not None and f.plate is not None}
    num_rows = {plate: rows for plate, (rows, _, _) in plates.items()}
    observed = {name: _placed(x, facts[name].rows) for name, x in sorted(observed.items())}
    of_joint = _owners(joint, plates)
    joint = _with_placed_rows(joint, [None if p is None else plates[p] for p in of_joint])
    owners = [*of_joint, *(facts[name].plate for name in observed)]
    bare = {
        p: _placed(np.arange(r[0], dtype=np.int32), r) for p, r in plates.items() if p not in owners
    }
    return Blocks(
        name=type(joint).__name__,
        evaluate=_evaluate,
        sites=tuple(
            Site(name, fact.plate, None if name in observed else fact.latent)
            for name, fact in facts.items()
        ),
        args={"joint": joint, "observed": observed, "rows": bare},
        plate_of_leaf=(*owners, *sorted(bare)),
        num_rows=num_rows,
        bijections={n: f.bijection for n, f in facts.items() if f.bijection is not None},
    )


def _placed(value: Any, rows: tuple | None) -> Any:
    """Place an array on the mesh of its rows, if there is one and none has it yet."""
    if rows is None or rows[2] is None or is_padded(value) or row_axes(value) is not None:
        return value if is_padded(value) else jnp.asarray(value)
    return place(value, rows[2], P(rows[1]))


def _with_placed_rows(joint: _Joint, rows: list[tuple | None]) -> _Joint:
    leaves, treedef = jax.tree.flatten(joint, is_leaf=is_padded)
    placed = [x if r is None else _placed(x, r) for x, r in zip(leaves, rows, strict=True)]
    return jax.tree.unflatten(treedef, placed)


def _owners(joint: _Joint, plates: dict[str, tuple]) -> list[str | None]:
    """Find for each array that a joint holds the plate whose rows it has: arguments of functions only.

    A distribution cannot be cut to a block of rows from outside.
    """
    num_rows = {name: rows for name, (rows, _, _) in plates.items()}
    axes = {name: over for name, (_, over, _) in plates.items()}
    owners: list[str | None] = []
    for x in jax.tree.leaves(joint, is_leaf=lambda x: is_padded(x) or isinstance(x, Partial)):
        owners += rows_of_plates(x, num_rows, axes) if isinstance(x, Partial) else [None]
    return owners


def _evaluate(values: dict, args: dict, sizes: dict, wanted: tuple) -> dict[str, jax.Array]:
    """Log probabilities of the wanted parts, by row of `Sharded` ones, on any block of rows."""

    def visit(index: int, name: str, part: Any) -> Any:
        if name in wanted:
            out[name] = _terms(part, given[name])
        return given[name]

    given = args["observed"] | values
    out: dict[str, jax.Array] = {}
    _run(args["joint"], visit)
    return out


def _terms(part: Any, value: jax.Array) -> jax.Array:
    distribution = part.distribution if isinstance(part, Sharded) else part
    with jax.numpy_rank_promotion("allow"):
        cheap = numpyro.log_prob(distribution, value) if _is_numpyro(distribution) else None
    terms = sharded.log_prob(distribution, value) if cheap is None else cheap
    if isinstance(part, Sharded) and terms.shape[:1] != value.shape[:1]:
        raise ValueError(
            f"{shown(distribution)}: expected a log probability for each of {value.shape[0]} rows, got "
            f"shape {terms.shape}; its event may span the rows"
        )
    return terms


def _check_rows_apart(target: Posterior, plate: Plate, name: str) -> None:
    """Raise where a row's term depends on the other rows of its block: on how many there are, say."""
    num = min(4, plate.rows.num_rows)
    if num < 2:
        return
    block = [jnp.asarray(np.asarray(x[:num])) for x in plate.data]
    local = {n for n, _ in target.latents if n in plate.local.names}
    hidden = {n for p in target.plates for n in p.local.names} - local
    shapes = {
        n: jax.ShapeDtypeStruct((num, *x.shape[1:]) if n in local else x.shape, x.dtype)
        for n, x in target.latents
        if n not in hidden
    }
    noise = tree.normal_like(jax.random.key(0), shapes)
    params = constrain(target.bijections, noise, [True] * len(noise))[0]
    whole = plate.log_likelihood(params, block)[1:]
    rest = {n: x[1:] if n in local else x for n, x in params.items()}
    part = plate.log_likelihood(rest, [x[1:] for x in block])
    if not np.allclose(whole, part, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise CannotStream(name, "the term of a row depends on the other rows of its block")
