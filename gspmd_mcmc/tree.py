"""Arithmetic on pytrees, leaf by leaf, and the registration of our own pytree classes.

Nothing here ravels: every result has the structure, the shapes and so the layout of its operands.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import (
    DictKey,
    GetAttrKey,
    KeyPath,
    keystr,
    register_pytree_with_keys,
    treedef_is_leaf,
)

PyTree = Any


def is_traced(x: Any) -> bool:
    """Tell whether a value is known only inside a program that JAX is tracing."""
    return isinstance(x, Tracer)


def is_staging() -> bool:
    """Tell whether a program is being staged: a fresh array is then a tracer (not so under vmap)."""
    return is_traced(jnp.zeros(()))


@dataclasses.dataclass(frozen=True)
class Within:
    """The key of the one array that a node of a tree holds: paths as text leave it out."""

    def __str__(self) -> str:
        return ""


class Pad(Enum):
    """What the pad rows of a leaf like the position hold.

    Another mesh may need more pad rows than the one that the leaf comes from. Pad rows never move:
    their mask is on terms, gradients and momenta.
    """

    COPY = "the last real row"
    STAYS = "the pad row of the position, in every draw"
    ZERO = "zeros"


@dataclasses.dataclass(frozen=True)
class Role:
    """What an array of a run is; see `like_position`, `each_chain`, `derived`, `shared`.

    Attributes
    ----------
    is_like_position
        Whether it belongs to a tree like the position; other arrays are whole on every device.
    has_chains
        Whether its first axis is that of the chains. In a state that is mapped over chains all have it.
    num_axes
        Further axes before those of the position.
    pad
        What its pad rows hold.
    is_derived
        Whether it follows from the position, and is computed anew on another mesh.
    leaf
        The number of the position's leaf that it is like; None for other arrays.
    """

    is_like_position: bool = False
    has_chains: bool = False
    num_axes: int = 0
    pad: Pad = Pad.COPY
    is_derived: bool = False
    leaf: int | None = None


def _declare(**metadata: Any) -> Any:
    return dataclasses.field(metadata=metadata)


def static(**kwargs) -> Any:
    """Return a dataclass field that is metadata of the pytree: hashable, compared by value."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def like_position(
    *, pad: Pad = Pad.COPY, has_chains: bool = False, num_axes: int = 0, is_derived: bool = False
) -> Any:
    """Return a dataclass field that is a tree like the position, leaves [(chains,) (axes,) ...].

    The field may also hold an object, such as a metric, whose own fields say what they are.

    Parameters
    ----------
    pad
        What the pad rows of its leaves hold.
    has_chains
        Whether the leaves have a first axis of chains, in a class that is not mapped over chains.
    num_axes
        Further axes of the leaves before those of the position.
    is_derived
        Whether the field follows from the position, and is computed anew on another mesh.
    """
    return _declare(role=Role(True, has_chains, num_axes, pad, is_derived))


def each_chain() -> Any:
    """Return a dataclass field whose arrays have a first axis of chains, [chains, ...]."""
    return _declare(role=Role(has_chains=True))


def derived() -> Any:
    """Return a dataclass field that follows from the position: computed anew on another mesh."""
    return _declare(role=Role(is_derived=True))


def shared() -> Any:
    """Return a dataclass field whose arrays all chains share, as they do where nothing is declared."""
    return _declare(role=Role())


def over_steps(combine: Callable[[jax.Array, jax.Array], jax.Array], *, is_mean: bool = False) -> Any:
    """Return a field of a kernel's info that says how several steps make the value of one draw.

    A field that declares nothing has the value of the last step.

    Parameters
    ----------
    combine
        ``combine(value so far, value of one more step)``.
    is_mean
        Whether the result is divided by the number of steps.
    """
    return _declare(over_steps=(combine, is_mean))


T = TypeVar("T")
# What the fields of each class that `pytree` has registered declare.
_DECLARED: dict[type, tuple[Role, ...]] = {}


@dataclass_transform(
    eq_default=False,
    frozen_default=True,
    field_specifiers=(
        dataclasses.field,
        static,
        like_position,
        each_chain,
        derived,
        shared,
        over_steps,
    ),
)
def pytree(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a pytree; fields marked by `static` are metadata.

    Unflattening fills the fields without calling ``__init__``, so constructors may convert and
    check while JAX is free to put tracers, None or ``object()`` in the leaves.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    meta = tuple(f.name for f in fields if f.metadata.get("static"))
    data = tuple(f.name for f in fields if not f.metadata.get("static"))

    def flatten_with_keys(obj):
        children = tuple((GetAttrKey(name), getattr(obj, name)) for name in data)
        return children, tuple(getattr(obj, name) for name in meta)

    def flatten(obj):
        return tuple(getattr(obj, n) for n in data), tuple(getattr(obj, n) for n in meta)

    def unflatten(aux, children):
        return fill(cls, dict(zip(data, children, strict=True)) | dict(zip(meta, aux, strict=True)))

    register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    _DECLARED[cls] = tuple(_role_of(f) for f in fields if f.name in data)
    return cls


def fields_like_position(cls: type) -> list[str]:
    """Name the fields of a class that are trees like the position."""
    return [f.name for f in dataclasses.fields(cls) if _role_of(f).is_like_position]


def _role_of(field: dataclasses.Field) -> Role:
    return field.metadata.get("role", Role())


def roles(value: PyTree, position: Any, role: Role = Role(), *, of_each_chain: bool = False) -> PyTree:
    """Return the role of each leaf of a tree of states, as the fields of their classes declare it.

    Parameters
    ----------
    value
        The tree. Dicts, lists and tuples pass their own role on to what they hold.
    position
        The structure of a position.
    role
        What the tree is, if its class declares nothing.
    of_each_chain
        Whether every leaf has one more first axis, of chains, as states that are mapped over them.
    """
    children, treedef = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
    is_like_position = role.is_like_position and jax.tree.structure(value) == position
    if is_like_position or treedef_is_leaf(treedef):
        if of_each_chain:
            num_axes = role.num_axes + role.has_chains
            role = dataclasses.replace(role, has_chains=True, num_axes=num_axes)
        leaves, treedef = jax.tree.flatten(value)
        numbers = range(len(leaves)) if is_like_position else [None] * len(leaves)
        own = [dataclasses.replace(role, is_like_position=is_like_position, leaf=i) for i in numbers]
        return jax.tree.unflatten(treedef, own)
    of_children = _DECLARED.get(type(value), (role,) * len(children))
    found = [
        roles(child, position, r, of_each_chain=of_each_chain)
        for child, r in zip(children, of_children, strict=True)
    ]
    return jax.tree.unflatten(treedef, found)


def replace(obj: T, **changes) -> T:
    """Copy of a frozen dataclass with some fields changed, without running its constructor."""
    fields = dataclasses.fields(obj)  # pyright: ignore[reportArgumentType]
    return fill(type(obj), {f.name: getattr(obj, f.name) for f in fields} | changes)


def set_fields(obj, **values) -> None:
    """Set fields of a frozen dataclass from inside its constructor."""
    for name, value in values.items():
        object.__setattr__(obj, name, value)


def fill(cls: type[T], values: dict[str, Any]) -> T:
    """Make a frozen dataclass of its fields, without running its constructor."""
    obj = object.__new__(cls)
    set_fields(obj, **values)
    return obj


def classes_of(treedef: Any) -> tuple[type, ...]:
    """Return the classes of a structure's nodes, the outer ones first.

    JAX leaves them out where it compares structures: two dataclasses with as many fields, such as a
    class and the one that a notebook's cell defines when it is run again, are equal to it. Metadata
    with a structure of a user's tree has its classes too.
    """
    node = treedef.node_data()
    below = [c for child in treedef.children() for c in classes_of(child)]
    return tuple(below) if node is None else (node[0], *below)


def path_str(path: KeyPath) -> str:
    """Write a leaf's path the way a user would reach it: ``['w'][0]``; ``(the whole)`` at a root."""
    return keystr(path) or "(the whole)"


def name_of(path: KeyPath, separator: str = "_") -> str:
    """Write a leaf's path as one plain name: ``w``, ``layers_0_bias``; ``x`` at a root."""
    parts = [
        str(k.key if isinstance(k, DictKey) else getattr(k, "name", getattr(k, "idx", k)))
        for k in path
        if not isinstance(k, Within)
    ]
    return separator.join(parts) or "x"


def unique_names(paths: Sequence[KeyPath]) -> list[str]:
    """Write paths as plain names, no two of them alike.

    Where one name would be of several leaves, the leaf at the top of the tree has it: beside a leaf
    ``a_b`` the leaf ``b`` of ``a`` is ``a.b``, and ``['a']['b']`` if that is a name at the top too.
    """
    forms = [(name_of(path), name_of(path, "."), path_str(path)) for path in paths]
    chosen = [0] * len(forms)
    while True:
        names = [form[i] for form, i in zip(forms, chosen, strict=True)]
        claims = Counter(names)
        at_top = Counter(name for name, path in zip(names, paths, strict=True) if len(path) <= 1)
        more = [
            claims[name] > 1 and i < 2 and not (len(path) <= 1 and at_top[name] == 1)
            for name, path, i in zip(names, paths, chosen, strict=True)
        ]
        if not any(more):
            return names
        chosen = [i + m for i, m in zip(chosen, more, strict=True)]


def add(x: PyTree, y: PyTree) -> PyTree:
    """Return ``x + y``."""
    return jax.tree.map(jnp.add, x, y)


def sub(x: PyTree, y: PyTree) -> PyTree:
    """Return ``x - y``."""
    return jax.tree.map(jnp.subtract, x, y)


def ones_like(x: PyTree) -> PyTree:
    """Return ones in the shapes and dtypes of the leaves (arrays or `ShapeDtypeStruct`)."""
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), x)


def axpy(a: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    """Return ``a x + y`` for a scalar ``a``, in the dtype of each leaf of ``y``."""
    return jax.tree.map(lambda xi, yi: a.astype(yi.dtype) * xi + yi, x, y)


def where(condition: jax.Array, x: PyTree, y: PyTree) -> PyTree:
    """Select the tree ``x`` where the scalar condition holds, else ``y``."""
    return jax.tree.map(lambda xi, yi: jnp.where(condition, xi, yi), x, y)


def wide(dtype: Any) -> Any:
    """Return the dtype in which numbers of a dtype are summed: floats have 32 bits at least."""
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    return jnp.promote_types(dtype, jnp.float32) if is_floating else dtype


def widened(x: PyTree) -> PyTree:
    """Convert bfloat16 and float16 leaves to float32, so that sums and differences are not rounded."""
    return jax.tree.map(lambda leaf: leaf.astype(wide(leaf.dtype)), x)


def total(x: PyTree) -> jax.Array:
    """Sum of all the elements of all the leaves, in float32 at least."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(widened(x))), start=jnp.zeros(()))


def dot(x: PyTree, y: PyTree) -> jax.Array:
    """Inner product of two trees, summed leaf by leaf."""
    return total(jax.tree.map(jnp.multiply, x, y))


def normal_like(rng_key: jax.Array, tree: PyTree) -> PyTree:
    """Independent standard normals in the shapes and dtypes of the leaves.

    Leaf ``i`` draws from ``fold_in(rng_key, i)``, so values depend on the key and on global
    indices only, never on the layout.
    """
    leaves, treedef = jax.tree.flatten(tree)
    draws = [
        jax.random.normal(jax.random.fold_in(rng_key, i), leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, draws)
