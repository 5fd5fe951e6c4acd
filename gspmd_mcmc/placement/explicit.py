"""Meshes whose axes are not Auto, and a mesh in context: how calls of ours are made from there.

`jax.make_mesh` makes Explicit axes, and training loops run in the context of such a mesh. Our programs
let the compiler place collectives, so inside all axes are Auto. `on_any_mesh` is where a call crosses:
arrays on other axes are relabelled, which moves no data, no mesh is in context, and results come back
on the mesh that was given.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import tree
from gspmd_mcmc.placement.mesh import auto_mesh, is_auto, named_sharding
from gspmd_mcmc.tree import PyTree, is_staging, is_traced

F = TypeVar("F", bound=Callable)
AnyMesh = Mesh | AbstractMesh
NO_MESH = Mesh(np.empty((), object), ())  # what is in context where nobody has set a mesh
WHOLE = object()
SIGNS_OF_TWO_MESHES = (
    "Mesh for all inputs should be equal",
    "should match the aval mesh",
    "Context mesh ",
)
OF_TWO_MESHES = (
    "A function reads an array on a mesh that it is not given: it closes over one that was placed, or "
    "made under jax.set_mesh. Bind it, jax.tree_util.Partial(function, array), or make it with NumPy"
)


class SameObject:
    """What keeps its identity when calls cross: one object in, the same object out.

    A kernel is checked against its target by identity, and programs are known by it.
    """


class OnMesh:
    """A dataclass whose field ``mesh`` is metadata: it is relabelled with the arrays."""

    mesh: Mesh | None


# An object to its arrays and its form inside, the same in every call that has these arrays.
_INSIDE: WeakKeyDictionary[SameObject, tuple[list, Any, Any]] = WeakKeyDictionary()


def on_any_mesh(function: F, like: Callable | None = None) -> F:
    """Let a function that knows Auto meshes alone be called with others, and in the context of any.

    Parameters
    ----------
    function
        Any function or method.
    like
        How a result lies, which has to be stated inside a program. ``like(out, *args)`` has the
        structure of the result; for each leaf it has an array that lies alike, a `PartitionSpec`, or
        `WHOLE` if the leaf is whole on every device. None: every leaf is.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if not _is_needed(given):
            return function(*args, **kwargs)
        if is_staging() or _traced(given):
            with explained():
                return _in_program(function, given, like or (lambda out, *args, **kwargs: whole(out)))
        crossing = Crossing.of(given)
        with no_context_mesh(), explained():
            args, kwargs = crossing.inward(given)
            return crossing.outward(function(*args, **kwargs))

    return call  # pyright: ignore[reportReturnType]


def whole(out: PyTree) -> PyTree:
    """Say of every leaf of a result that it is whole on every device."""
    return jax.tree.map(lambda _: WHOLE, out)


@contextmanager
def no_context_mesh() -> Iterator[None]:
    """Take the mesh out of the context, where there is one and no program is being traced."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    try:
        outside = jax.set_mesh(NO_MESH)
    except ValueError:  # in a trace JAX leaves the context alone, and so do we
        outside = nullcontext()
    with outside:
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Say what two meshes in one program mean: what a function reads by itself is on another one."""
    try:
        yield
    except ValueError as error:
        has_note = OF_TWO_MESHES in getattr(error, "__notes__", ())
        if not has_note and any(sign in str(error) for sign in SIGNS_OF_TWO_MESHES):
            error.add_note(OF_TWO_MESHES)
        raise


class Crossing:
    """One call's way in and out. What does not change stays the same object, and so does `SameObject`.

    Attributes
    ----------
    mesh, auto
        The first mesh whose axes are not all Auto, if there is one, and its form with Auto axes.
    """

    def __init__(self, mesh: AnyMesh | None):
        self.mesh = mesh
        self.auto = None if mesh is None else auto_mesh("mesh", mesh)
        self._inside: dict[int, tuple[Any, Any]] = {}  # by id: as given, and inside
        self._outside: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def of(cls, given: PyTree) -> "Crossing":
        """Read the mesh off what is given, meshes before arrays; else it is the context's."""
        found = [mesh for mesh, _ in sorted(_meshes(given), key=lambda pair: not pair[1])]
        with suppress(ValueError):  # inside vmap JAX does not tell
            found.append(jax.sharding.get_mesh())
        return cls(next((mesh for mesh in found if not is_auto(mesh)), None))

    def inward(self, given: PyTree) -> PyTree:
        """Relabel everything with Auto axes."""

        def same(one: Any) -> Any:
            if id(one) not in self._inside:
                found = _inside_of(one, lambda: _mapped(one, _to_auto, same, is_root=True))
                self._inside[id(one)] = self._outside[id(found)] = (one, found)
            return self._inside[id(one)][1]

        return _mapped(given, _to_auto, same)

    def outward(self, result: PyTree) -> PyTree:
        """Relabel what lies on the Auto form of the mesh given with that mesh."""
        if self.mesh is None:
            return result

        def same(one: Any) -> Any:
            known = self._outside.get(id(one))
            return _mapped(one, self._back, same, is_root=True) if known is None else known[0]

        return _mapped(result, self._back, same)

    def _back(self, x: Any) -> Any:
        assert self.mesh is not None
        if isinstance(x, AnyMesh):
            return self.mesh if x == self.auto else x
        sharding = x if isinstance(x, NamedSharding) else named_sharding(x)
        return _relabelled(x, self.mesh) if sharding is not None and sharding.mesh == self.auto else x


def _inside_of(one: SameObject, convert: Callable) -> Any:
    """Return an object's form inside, the one of earlier calls where the arrays are the same."""
    leaves, treedef = jax.tree.flatten(one)
    try:
        kept = _INSIDE.get(one)
    except TypeError:  # one of a user's own that cannot be referred to weakly, or hashed
        return convert()
    if kept and kept[1] == treedef and all(a is b for a, b in zip(kept[0], leaves, strict=True)):
        return kept[2]
    found = convert()
    if found is not one:
        _INSIDE[one] = (leaves, treedef, found)
    return found


def _to_auto(x: Any) -> Any:
    if isinstance(x, AnyMesh):
        return auto_mesh("mesh", x)
    sharding = x if isinstance(x, NamedSharding) else named_sharding(x)
    return x if sharding is None else _relabelled(x, auto_mesh("an array", sharding.mesh))


def _relabelled(x: Any, mesh: AnyMesh) -> Any:
    """Return an array, a shape or a sharding of the same parts on the same devices of another mesh."""
    if isinstance(x, NamedSharding):
        return x if x.mesh == mesh else NamedSharding(mesh, x.spec, memory_kind=x.memory_kind)
    if x.sharding.mesh == mesh:
        return x
    # As programs write them, so that what they return is not another type: on Auto axes P("data"), on
    # others P("data", None).
    parts = tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))
    while is_auto(mesh) and parts and parts[-1] is None:
        parts = parts[:-1]
    sharding = NamedSharding(mesh, P(*parts), memory_kind=x.sharding.memory_kind)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.device_put(x, sharding)


# Walking over what is given: pytrees, and dataclasses that are none (draws, modes).


def _mapped(node: Any, leaf: Callable, same: Callable, *, is_root: bool = False) -> Any:
    """Map arrays, meshes and shardings by ``leaf``; ``same`` maps a `SameObject` below the root."""

    def stops(x: Any) -> bool:
        return not (is_root and x is node) and isinstance(x, SameObject | OnMesh)

    def one(x: Any) -> Any:
        if isinstance(x, SameObject) and not (is_root and x is node):
            return same(x)
        if isinstance(x, OnMesh):
            mesh = leaf(x.mesh)
            x = x if mesh is x.mesh else tree.replace(x, mesh=mesh)
            return _mapped(x, leaf, same, is_root=True)
        if not dataclasses.is_dataclass(x) or isinstance(x, type | jax.ShapeDtypeStruct):
            return leaf(x)
        old = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        new = {name: _mapped(value, leaf, same) for name, value in old.items()}
        is_same = all(new[name] is value for name, value in old.items())
        return x if is_same else tree.replace(x, **new)

    leaves, treedef = jax.tree.flatten(node, is_leaf=stops)
    new = [one(x) for x in leaves]
    is_same = all(a is b for a, b in zip(new, leaves, strict=True))
    return node if is_same else jax.tree.unflatten(treedef, new)


def _meshes(given: PyTree) -> list[tuple[AnyMesh, bool]]:
    """Return every mesh, and whether it was given as such."""
    found: list[tuple[AnyMesh, bool]] = []

    def see(x: Any) -> Any:
        sharding = x if isinstance(x, NamedSharding) else named_sharding(x)
        mesh = x if isinstance(x, AnyMesh) else None if sharding is None else sharding.mesh
        found.extend([] if mesh is None else [(mesh, mesh is x)])
        return x

    def same(x: Any) -> Any:
        return _mapped(x, see, same, is_root=True)

    _mapped(given, see, same)
    return found


# Inside a program that is being traced an array's type has the mesh, and the parts over Explicit axes.


def _is_needed(given: PyTree) -> bool:
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and not (is_staging() and is_auto(context)):
        return True
    return any(not is_auto(mesh) for mesh, _ in _meshes(given)) or any(
        not is_auto(jax.typeof(x).sharding.mesh) for x in _traced(given)
    )


def _traced(given: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(given) if is_traced(x)]


def _in_program(function: Callable, given: PyTree, like: Callable) -> Any:
    """Call a function inside a program that is being traced, all axes Auto for as long.

    The mesh is an array's, else the context's. Inside `shard_map` there is none for the compiler.
    """
    args, kwargs = given
    meshes = [jax.typeof(x).sharding.mesh for x in _traced(given)]
    meshes += [mesh.abstract_mesh for mesh, _ in _meshes(given)]
    meshes.append(jax.sharding.get_abstract_mesh())
    outer = next((mesh for mesh in meshes if not is_auto(mesh)), None)
    if outer is None or AxisType.Manual in outer.axis_types:
        return function(*args, **kwargs)
    auto = auto_mesh("mesh", outer)
    with jax.sharding.use_abstract_mesh(auto):
        inside, by_name = jax.tree.map(lambda x: _cast(x, auto), given)
        out = function(*inside, **by_name)
    leaves, treedef = jax.tree.flatten(out)
    types = treedef.flatten_up_to(like(out, *args, **kwargs))
    laid = [_typed(x, t, outer) for x, t in zip(leaves, types, strict=True)]
    return jax.tree.unflatten(treedef, laid)


def _cast(x: Any, auto: AbstractMesh) -> Any:
    """Return an array with Auto axes; what is known now stays known, so that constants are seen."""
    if not is_traced(x):
        with jax.ensure_compile_time_eval():
            return _to_auto(x)
    if is_auto(jax.typeof(x).sharding.mesh):
        return x
    return jax.sharding.reshard(x, NamedSharding(auto, P()))


def _typed(x: Any, like: Any, outer: AbstractMesh) -> Any:
    """Lay a result out over the mesh outside: as an array is, by a spec, or whole."""
    if isinstance(like, jax.Array) and not jax.typeof(like).sharding.mesh.empty:
        sharding = jax.typeof(like).sharding
        return x if is_auto(sharding.mesh) else jax.sharding.reshard(x, sharding)
    return jax.sharding.reshard(x, NamedSharding(outer, like if isinstance(like, P) else P()))
