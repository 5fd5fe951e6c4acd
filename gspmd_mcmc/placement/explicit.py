"""The door for meshes of others: axes that are not Auto, and a mesh in context.

`jax.make_mesh` makes Explicit axes, and training loops stand in the context of such a mesh. Our
programs let the compiler place collectives, so inside all axes are Auto. `on_any_mesh` is where a call
crosses: arrays on other axes are relabelled, which moves no data, no mesh is in context, and results
come back on the mesh that was given.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import tree
from gspmd_mcmc.placement.mesh import auto_mesh, is_auto
from gspmd_mcmc.tree import PyTree, is_staging, is_traced

F = TypeVar("F", bound=Callable)
AnyMesh = Mesh | AbstractMesh
NO_MESH = Mesh(np.empty((), object), ())  # what is in context where nobody has set a mesh
WHOLE = object()
_INSIDE: WeakKeyDictionary[Any, tuple[list, Any, Any]] = WeakKeyDictionary()
SIGNS_OF_TWO_MESHES = ("Mesh for all inputs should be equal", "should match the aval mesh")
OF_TWO_MESHES = (
    "A function reads an array that lies on a mesh whose axes are not Auto, as all that are made under "
    "jax.set_mesh of one do. Bind it, jax.tree_util.Partial(function, array), or make it with NumPy: "
    "functions run on Auto axes, and what they are given is taken there"
)


def on_any_mesh(function: F, like: Callable | None = None) -> F:
    """Let a function that knows Auto meshes alone be called with others, and in the context of any.

    Parameters
    ----------
    function
        Any function or method.
    like
        Inside a program a result has to say how it lies. ``like(out, *args)`` has its structure, with
        an array in the place of each leaf that lies as that array does, a `PartitionSpec`, or `WHOLE`
        for what is whole on every device, as all is if there is no ``like``.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        if not _is_needed(given):
            return function(*args, **kwargs)
        if is_staging() or _traced(given):
            with _explained():
                return _in_program(function, given, like or _all_whole)
        crossing = Crossing.of(given)
        with no_context_mesh(), _explained():
            args, kwargs = crossing.inward(given)
            return crossing.outward(function(*args, **kwargs))

    return call  # pyright: ignore[reportReturnType]


def whole(out: PyTree) -> PyTree:
    """Say of every leaf of a result that it is whole on every device."""
    return jax.tree.map(lambda _: WHOLE, out)


def _all_whole(out: PyTree, *args: Any, **kwargs: Any) -> PyTree:
    return whole(out)


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


def _context_mesh() -> Mesh:
    try:
        return jax.sharding.get_mesh()
    except ValueError:  # inside vmap JAX does not tell
        return NO_MESH


@contextmanager
def _explained() -> Iterator[None]:
    """Say what two meshes in one program mean: what a function reads by itself is on another one."""
    try:
        yield
    except ValueError as error:
        has_note = OF_TWO_MESHES in getattr(error, "__notes__", ())
        if not has_note and any(sign in str(error) for sign in SIGNS_OF_TWO_MESHES):
            error.add_note(OF_TWO_MESHES)
        raise


class Crossing:
    """One call's way in and out.

    What does not change stays the same object, and a target comes out as the one that went in.

    Attributes
    ----------
    mesh
        The first mesh whose axes are not all Auto, if there is one.
    """

    def __init__(self, mesh: AnyMesh | None):
        self.mesh = mesh
        self.auto = None if mesh is None else auto_mesh("mesh", mesh)
        self.inside: dict[int, tuple[Any, Any]] = {}  # targets by id: as given, and inside
        self.outside: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def of(cls, given: PyTree) -> "Crossing":
        """Read the mesh off what is given, meshes before arrays; else it is the context's."""
        found = [mesh for mesh, _ in sorted(_meshes(given), key=lambda pair: not pair[1])]
        others = [mesh for mesh in (*found, _context_mesh()) if not is_auto(mesh)]
        return cls(others[0] if others else None)

    def inward(self, given: PyTree) -> PyTree:
        """Relabel everything with Auto axes."""

        def target(one: Any) -> Any:
            if id(one) not in self.inside:
                found = _kept_inside(one, lambda: _mapped_target(one, _to_auto, target))
                self.inside[id(one)] = self.outside[id(found)] = (one, found)
            return self.inside[id(one)][1]

        return _mapped(given, _to_auto, target)

    def outward(self, result: PyTree) -> PyTree:
        """Relabel what lies on the Auto form of the mesh given with that mesh."""
        if self.mesh is None:
            return result

        def target(one: Any) -> Any:
            if id(one) in self.outside:
                return self.outside[id(one)][0]
            return _mapped_target(one, self._back, target)

        return _mapped(result, self._back, target)

    def _back(self, x: Any) -> Any:
        assert self.mesh is not None
        if isinstance(x, AnyMesh):
            return self.mesh if x == self.auto else x
        mesh = getattr(getattr(x, "sharding", None), "mesh", None)
        return _relabelled(x, self.mesh) if mesh is not None and mesh == self.auto else x


def _to_auto(x: Any) -> Any:
    if isinstance(x, AnyMesh):
        return auto_mesh("mesh", x)
    if isinstance(x, NamedSharding):
        mesh = auto_mesh("sharding", x.mesh)
        return x if mesh == x.mesh else NamedSharding(mesh, x.spec, memory_kind=x.memory_kind)
    sharding = _sharding(x)
    return _relabelled(x, auto_mesh("an array", sharding.mesh)) if sharding is not None else x


def _relabelled(x: Any, mesh: AnyMesh) -> Any:
    """Return an array, or a shape, of the same parts on the same devices under another mesh."""
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


def _sharding(x: Any) -> NamedSharding | None:
    """Return the named sharding of an array or a shape that is there, not traced."""
    found = getattr(x, "sharding", None) if isinstance(x, jax.Array | jax.ShapeDtypeStruct) else None
    return found if isinstance(found, NamedSharding) and not is_traced(x) else None


# Walking over what is given: pytrees, and dataclasses that are none (draws, modes).


def _mapped(node: Any, leaf: Callable, target: Callable, *, is_root: bool = False) -> Any:
    """Map arrays, meshes and shardings; ``target`` maps what has a log density, as one thing."""

    def stops(x: Any) -> bool:
        return (not is_root or x is not node) and (_is_target(x) or _holds_mesh(x))

    leaves, treedef = jax.tree.flatten(node, is_leaf=stops)
    new = [_mapped_one(x, leaf, target, is_root and x is node) for x in leaves]
    is_same = all(a is b for a, b in zip(new, leaves, strict=True))
    return node if is_same else jax.tree.unflatten(treedef, new)


def _mapped_target(one: Any, leaf: Callable, target: Callable) -> Any:
    """Map a target, and what it remembers beside its fields (how to draw from the prior)."""
    found = _mapped(one, leaf, target, is_root=True)
    rest = {} if found is one else {n: x for n, x in vars(one).items() if not hasattr(found, n)}
    tree.set_fields(found, **_mapped(rest, leaf, target))
    return found


def _kept_inside(one: Any, convert: Callable) -> Any:
    """Return the target that one is inside, the same in every call as long as it has these arrays."""
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


def _mapped_one(x: Any, leaf: Callable, target: Callable, is_root: bool) -> Any:
    if _is_target(x) and not is_root:
        return target(x)
    if _holds_mesh(x):
        mesh = leaf(x.mesh)
        x = x if mesh is x.mesh else tree.replace(x, mesh=mesh)
        return _mapped(x, leaf, target, is_root=True)
    if not dataclasses.is_dataclass(x) or isinstance(x, type | jax.ShapeDtypeStruct):
        return leaf(x)
    old = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    new = {name: _mapped(value, leaf, target) for name, value in old.items()}
    is_same = all(new[name] is value for name, value in old.items())
    return x if is_same else tree.replace(x, **new)


def _is_target(x: Any) -> bool:
    return hasattr(x, "terms_and_grad") and not isinstance(x, type)


def _holds_mesh(x: Any) -> bool:
    """Tell whether this is a node of a tree whose mesh is metadata, such as `Sharded`."""
    return dataclasses.is_dataclass(x) and isinstance(getattr(x, "mesh", None), AnyMesh)


def _meshes(given: PyTree) -> Iterator[tuple[AnyMesh, bool]]:
    """Yield every mesh, and whether it was given as such."""
    found: list[tuple[AnyMesh, bool]] = []

    def see(x: Any) -> Any:
        if isinstance(x, AnyMesh):
            found.append((x, True))
        sharding = x if isinstance(x, NamedSharding) else _sharding(x)
        if sharding is not None:
            found.append((sharding.mesh, False))
        return x

    def target(x: Any) -> Any:
        return _mapped(x, see, target, is_root=True)

    _mapped(given, see, target)
    return iter(found)


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
    """Call a function inside a program that is being traced, all axes Auto for as long."""
    args, kwargs = given
    outer = _mesh_in_program(given)
    if outer is None:
        return function(*args, **kwargs)
    auto = auto_mesh("mesh", outer)
    with jax.sharding.use_abstract_mesh(auto):
        inside, by_name = jax.tree.map(lambda x: _cast(x, auto), given)
        out = function(*inside, **by_name)
    leaves, treedef = jax.tree.flatten(out)
    types = treedef.flatten_up_to(like(out, *args, **kwargs))
    laid = [_typed(x, t, outer) for x, t in zip(leaves, types, strict=True)]
    return jax.tree.unflatten(treedef, laid)


def _mesh_in_program(given: PyTree) -> AbstractMesh | None:
    """Return the mesh that is to be Auto inside: an array's, else the context's.

    None inside `shard_map`, where there is none for the compiler.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in _traced(given)]
    meshes += [mesh.abstract_mesh for mesh, _ in _meshes(given)]
    context = jax.sharding.get_abstract_mesh()
    found = next((m for m in (*meshes, context) if not is_auto(m)), None)
    is_manual = found is not None and AxisType.Manual in found.axis_types
    return None if is_manual else found


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
    if not isinstance(like, jax.Array):
        return jax.sharding.reshard(x, NamedSharding(outer, like if isinstance(like, P) else P()))
    sharding = jax.typeof(like).sharding
    if sharding.mesh.empty:
        return jax.sharding.reshard(x, NamedSharding(outer, P()))
    return x if is_auto(sharding.mesh) else jax.sharding.reshard(x, sharding)
