"""Arithmetic on pytrees, leaf by leaf, and the registration of our own pytree classes.

Nothing here ravels: every result has the structure, the shapes and so the layout of its operands.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import DictKey, GetAttrKey, KeyPath, keystr, register_pytree_with_keys

PyTree = Any


def is_traced(x: Any) -> bool:
    """Tell whether a value is known only inside a program that JAX is tracing."""
    return isinstance(x, Tracer)


def is_staging() -> bool:
    """Tell whether a program is being staged: a fresh array is then a tracer (not so under vmap)."""
    return is_traced(jnp.zeros(()))


T = TypeVar("T")


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
    return cls


def static(**kwargs) -> Any:
    """Return a dataclass field that is metadata of the pytree: hashable, compared by value."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


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


def path_str(path: KeyPath) -> str:
    """Write a leaf's path the way a user would reach it: ``['w'][0]``; ``(the whole)`` at a root."""
    return keystr(path) or "(the whole)"


def name_of(path: KeyPath, separator: str = "_") -> str:
    """Write a leaf's path as one plain name: ``w``, ``layers_0_bias``; ``x`` at a root."""
    parts = [
        str(k.key if isinstance(k, DictKey) else getattr(k, "name", getattr(k, "idx", k))) for k in path
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


def total(x: PyTree) -> jax.Array:
    """Sum of all the elements of all the leaves."""
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(x)), start=jnp.zeros(()))


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
