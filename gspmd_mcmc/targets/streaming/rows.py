"""Where the rows of a plate live: static facts, read from its arrays outside jit."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.groups.orders import Order
from gspmd_mcmc.multihost.processes import put
from gspmd_mcmc.placement import padding
from gspmd_mcmc.placement.mesh import auto_mesh, axes_of, named_sharding
from gspmd_mcmc.placement.numbers import as_array, refuse_sparse
from gspmd_mcmc.placement.padding import Padded, is_padded, num_real_rows, require_order, values_of
from gspmd_mcmc.tree import PyTree, is_traced, path_str


@dataclass(frozen=True)
class Rows:
    """How the rows of a plate are laid out; hashable, so that it is metadata of a pytree.

    Attributes
    ----------
    num_rows
        Real rows; they come first.
    num_padded
        Rows of the arrays, copies at the end included; a multiple of the number of blocks.
    mesh, axes
        The mesh, and the axes of it that the rows lie over; None and () for unplaced arrays.
    specs
        For each leaf of the data, the spec of its axes after the rows.
    platform
        Where the arrays are: "cpu", "gpu", "tpu".
    order
        Of rows that lie in another order than the user's, the digest of it; see `Order`.
    """

    num_rows: int
    num_padded: int
    mesh: Mesh | None
    axes: tuple[str, ...]
    specs: tuple[tuple, ...]
    platform: str
    order: str = ""

    def __getstate__(self) -> dict:
        if self.mesh is not None:
            raise TypeError(
                "pickle: rows lie over a mesh, and its devices are those of this process. Pickle "
                "jax.tree.map(numpy.asarray, draws.position), keep draws.to_datatree(), or sample with "
                "to=ZarrSink(folder)"
            )
        return vars(self)

    @property
    def num_blocks(self) -> int:
        """In how many blocks the rows lie: the product of their mesh axes."""
        return math.prod(self.mesh.shape[a] for a in self.axes) if self.mesh else 1

    @property
    def block_rows(self) -> int:
        """Rows of one block."""
        return self.num_padded // self.num_blocks

    def blocks(self, data: PyTree) -> PyTree:
        """Reshape each leaf from [rows, ...] to [blocks, rows of a block, ...], each on its device."""
        leaves, treedef = jax.tree.flatten(data)
        pairs = zip(leaves, self.specs, strict=True)
        return treedef.unflatten([self._constrain(self._cut(a), (None, *spec)) for a, spec in pairs])

    def local_blocks(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Reshape local latents as `blocks` does data; the compiler lays their other axes."""
        return self.per_block([self._cut(a) for a in leaves])

    def join(self, array: jax.Array) -> jax.Array:
        """Undo the reshape of `local_blocks`."""
        return self.lay(array.reshape(self.num_padded, *array.shape[2:]))

    def _cut(self, array: jax.Array) -> jax.Array:
        return array.reshape(self.num_blocks, self.block_rows, *array.shape[1:])

    def per_block(self, tree: PyTree) -> PyTree:
        """Keep arrays of shape [blocks, ...] with their blocks; the compiler lays the other axes."""
        return jax.tree.map(lambda a: self._constrain(a, (P.UNCONSTRAINED,) * (a.ndim - 1)), tree)

    def lay(self, array: jax.Array) -> jax.Array:
        """Lay an array [rows, ...] where the rows lie; its other axes stay as they are."""
        if self.mesh is None or is_traced(array):
            rest = (P.UNCONSTRAINED,) * (jnp.ndim(array) - 1)
            return self._constrain(jnp.asarray(array), rest)
        placed = named_sharding(array)
        rest = placed.spec[1:] if placed is not None and placed.mesh == self.mesh else ()
        return put(array, NamedSharding(self.mesh, P(self.axes, *rest)))

    @property
    def is_plain(self) -> bool:
        """Whether there is neither pad nor another order, so that local latents are plain arrays."""
        return self.num_rows == self.num_padded and not self.order

    def hold(self, laid: Any) -> Any:
        """Give an array that `lay` has laid, or its shape, the type that tells its pad and order."""
        return laid if self.is_plain else Padded(laid, self.num_rows, self.order)

    def holds(self, leaf: Any) -> bool:
        """Tell by its type whether a leaf is one that `hold` has returned."""
        if self.is_plain or not is_padded(leaf):
            return self.is_plain and not is_padded(leaf)
        ours = self.num_rows, self.num_padded, self.order, 0
        return (leaf.num_rows, leaf.num_padded, leaf.order, leaf.axis) == ours

    def lay_shape(self, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return a shape with all rows, padded, where they lie: `lay` of an array that is not there."""
        shape = (self.num_padded, *like.shape[1:])
        if self.mesh is None:
            return jax.ShapeDtypeStruct(shape, like.dtype)
        sharding = NamedSharding(self.mesh, P(self.axes, *_rest_of_spec(like)))
        return jax.ShapeDtypeStruct(shape, like.dtype, sharding=sharding)

    def is_real(self, ndim: int) -> jax.Array:
        """Tell real rows from pad, shape [rows, 1, ...] of ``ndim`` axes."""
        is_real = padding.is_real(self.num_rows, self.num_padded, self.num_blocks)
        return is_real.reshape(-1, *(1,) * (ndim - 1))

    def is_same(self, other: "Rows") -> bool:
        """Tell whether other rows are as many and lie alike."""
        one, two = ((r.num_rows, r.num_padded, r.mesh, r.axes, r.order) for r in (self, other))
        return one == two

    def _constrain(self, array: jax.Array, rest: tuple) -> jax.Array:
        if self.mesh is None or not self.axes:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, P(self.axes, *rest)))

    def __str__(self) -> str:
        pad = self.num_padded - self.num_rows
        over = f" over {'x'.join(self.axes)}={self.num_blocks}" if self.axes else ""
        return f"{self.num_rows} rows{f' + {pad} pad' if pad else ''}{over}"


class HasLocalRows(Protocol):
    """A target, or a plate: it tells which leaves are local to rows."""

    def local_rows(self, position: PyTree) -> list[Rows | None]:
        """Return for each leaf the rows that it is local to, or None."""
        ...

    def local_orders(self, position: PyTree) -> list[Order | None]:
        """Return for each leaf the order in which its rows lie; None where it is the user's."""
        ...

    def local_axes(self, position: PyTree) -> list[int]:
        """Return for each leaf the axis that parameters have its rows on; positions have the first."""
        ...


def read_rows(data: PyTree, order: str = "") -> tuple[PyTree, Rows]:
    """Return the plate's arrays without their `Padded` wrappers, and how their rows lie.

    ``order`` is the digest of the order that padded rows have; "" for the user's.

    Raises
    ------
    ValueError
        If leaves disagree in their number of rows or in the mesh axes of the rows, or there are none.
    """
    refuse_sparse("plate data ", data)
    nodes = jax.tree_util.tree_leaves_with_path(data, is_leaf=is_padded)
    if not nodes:
        raise ValueError("a plate needs data: expected a tree with at least one array, got no leaf")
    arrays: dict[str, Any] = {}
    for path, node in nodes:
        name = path_str(path)
        require_order(node, order)
        arrays[name] = as_array(f"plate data {name}", values_of(node))
        if not arrays[name].ndim:
            raise ValueError(
                f"plate data {name}: expected a leading axis of rows, got a scalar. What is not one "
                "per row goes into the function: jax.tree_util.Partial(log_likelihood, value)"
            )
    num_real = [num_real_rows(node, f"plate data {path_str(path)}") for path, node in nodes]
    num_rows, num_padded = _counts(arrays, num_real)
    mesh, axes = _mesh_and_axes(arrays)
    specs = tuple(map(_rest_of_spec, arrays.values()))
    platform = platform_of(next(iter(arrays.values())), mesh)
    rows = Rows(num_rows, num_padded, mesh, axes, specs, platform, order)
    if num_padded % rows.num_blocks:
        raise ValueError(
            f"plate data: {num_padded} rows do not cut into {rows.num_blocks} blocks; use place"
        )
    most = jnp.iinfo(jnp.arange(0).dtype).max
    if rows.block_rows > most:
        raise ValueError(
            f"plate data: {rows.block_rows} rows on one device, and its indices count to {most}; "
            "lay them over more devices, or set jax_enable_x64"
        )
    return jax.tree.structure(data, is_leaf=is_padded).unflatten(arrays.values()), rows


def _counts(arrays: dict[str, Any], num_real: list) -> tuple[int, int]:
    """Return how many rows are real, and how many there are: the same of every leaf."""
    counts = {name: (n, a.shape[0]) for (name, a), n in zip(arrays.items(), num_real, strict=True)}
    if len(set(counts.values())) > 1:
        shown = ", ".join(
            f"{n} has {r}{f' (+{p - r} pad)' if p > r else ''}" for n, (r, p) in counts.items()
        )
        raise ValueError(
            f"plate data: every leaf has the same rows, but {shown}. Lay leaves that belong together "
            "out by one call of place, with the same spec for their rows"
        )
    name, (num_rows, num_padded) = next(iter(counts.items()))
    if num_rows == 0:
        raise ValueError(f"plate data: expected at least one row, got none in {name}")
    return num_rows, num_padded


def _mesh_and_axes(arrays: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Find the mesh and the axes that rows lie over: the same for every leaf that lies over any."""
    mesh, axes, first, placed = None, (), "", ""
    for name, array in arrays.items():
        sharding = named_sharding(array)
        if sharding is None:
            continue
        its_mesh = auto_mesh(f"plate data {name}", sharding.mesh)
        if mesh is None:
            mesh, placed = its_mesh, name
        if its_mesh != mesh:
            raise ValueError(
                f"plate data: {placed} and {name} lie on different meshes; place them on one"
            )
        here = row_axes(array) or ()
        if axes and here and here != axes:
            raise ValueError(
                f"plate data: rows of {first} lie over {axes}, those of {name} over {here}"
            )
        if here and not axes:
            axes, first = here, name
    return mesh, axes


def row_axes(array: Any) -> tuple[str, ...] | None:
    """Return the mesh axes that an array's rows lie over; None if no mesh has placed it."""
    sharding = named_sharding(array)
    return None if sharding is None else axes_of(sharding.spec[0] if len(sharding.spec) else None)


def _rest_of_spec(array: Any) -> tuple:
    sharding = named_sharding(array)
    return tuple(sharding.spec[1:]) if sharding else ()


def platform_of(array: Any, mesh: Mesh | AbstractMesh | None) -> str:
    """Tell what computes with an array that a mesh, or none, has placed: "cpu", "gpu", "tpu"."""
    if isinstance(mesh, AbstractMesh):
        # Devices that are not there are accelerators, not this machine's cores. Which, a mesh may say;
        # in JAX 0.9 none does.
        return getattr(mesh.abstract_device, "platform", "abstract")
    if mesh is not None:
        return mesh.devices.flat[0].platform
    if isinstance(array, jax.Array) and not is_traced(array):
        return next(iter(array.devices())).platform
    return jax.default_backend()
