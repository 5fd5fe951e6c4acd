"""A sharding written as an array of device sets, as JAX had until 0.6 and its tutorials still teach.

`PositionalSharding` subclasses `jax.sharding.NamedSharding`, because ``device_put`` to another order of
the same devices asserts that both shardings are `NamedSharding` (JAX 0.10). Its mesh holds the devices
in the order given, cut into the prime factors of their number, so that all reshapes, transposes and
replications of 8 devices are specs on one mesh. JAX refuses two meshes in a program that has a
``pure_callback``, and names outputs on one mesh only.
"""

import string
from collections.abc import Callable, Sequence
from functools import cache, reduce
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import jax_private

LOWERINGS = ("to_sdy_sharding", "to_xla_hlo_sharding")  # of `jax_private.NAMES`
Factor = tuple[int, int]  # Size of a mesh axis, and its stride in the flat order of the devices.


class PositionalSharding(NamedSharding):
    """An array of device sets, whose axes match the axes of a data array.

    The data array is cut along axis i into ``shape[i]`` equal blocks. Every device of the set at a
    position holds the block at that position. Pass it wherever JAX takes a sharding:
    ``jax.device_put``, ``with_sharding_constraint``, ``in_shardings``, ``out_shardings``,
    ``jax.ShapeDtypeStruct``.

    A data array must have the rank of the sharding, with two exceptions that the tutorial uses: a
    fully replicated sharding serves any rank, and leading axes of one set may be missing from the
    data. Shape (1, 2) lays out a bias of rank 1 in two blocks; ``x.sharding.spec`` is then longer
    than the rank, and ``x.sharding.named(x.ndim)`` is not.

    Parameters
    ----------
    devices
        Devices, as an array or a nested sequence of any rank, such as
        ``jax.experimental.mesh_utils.create_device_mesh((8,))``. Each starts as a set of its own.
    memory_kind
        Kind of memory that holds the blocks; the default of the devices when None.

    Attributes
    ----------
    shape
        The number of blocks along each axis.
    mesh, spec
        The same layout by names. Axes are ``"a"``, ``"b"``, ... of prime size; `named` returns
        coarser ones, which are easier to read. Axes that the spec does not name hold copies.

    Raises
    ------
    ValueError
        If ``devices`` is empty, holds something else, or holds a device twice.
        `check_compatible_aval`, which JAX calls before it places an array, refuses data of a shape
        that does not fit.

    Notes
    -----
    Arrays mix in one computation if their shardings list the same devices in the same order.
    Where the number of devices is no power of a prime, ``reshape(2, 3)`` and ``reshape(3, 2)`` have
    different meshes, and ``reshape`` after ``transpose`` can deal devices out as no mesh in their
    order does: ``reshape(3, 2).T.reshape(3, 2)``. Its blocks are right, but its mesh lists the devices
    in the order of the blocks, so that its arrays do not mix with the others.
    The first `PositionalSharding` of a process adds the class to a private table of JAX, so that
    outputs have names. Importing the package does not.

    References
    ----------
    The ``jax.Array`` tutorial of JAX 0.4, "Distributed arrays and automatic parallelization".
    """

    _devices: tuple[Any, ...]
    _sets: np.ndarray  # Of frozensets of positions in _devices, disjoint and of one size.

    def __init__(self, devices: Any, *, memory_kind: str | None = None):
        grid = _device_grid(devices)
        sets = np.array([frozenset({i}) for i in range(grid.size)]).reshape(grid.shape)
        self._lay_out(tuple(grid.flat), sets, memory_kind)

    def _lay_out(self, devices: tuple, sets: np.ndarray, memory_kind: str | None) -> None:
        _name_outputs()
        self._devices, self._sets = devices, sets
        mesh, spec = _mesh_and_spec(devices, self._blocks(), _into_primes)
        super().__init__(mesh, spec, memory_kind=memory_kind)
        self._identity = (devices, sets.shape, tuple(sets.flat), self.memory_kind)
        self._identity_hash = hash(self._identity)  # JAX hashes an argument's sharding at each call.

    def _blocks(self) -> np.ndarray:
        """Positions of the devices, shape [*shape, devices in a set]."""
        members = [sorted(members) for members in self._sets.flat]
        return np.array(members).reshape(*self.shape, len(members[0]))

    @property
    def shape(self) -> tuple[int, ...]:
        """Into how many blocks each axis of a data array is cut."""
        return self._sets.shape

    @property
    def ndim(self) -> int:
        """Rank of the array of sets."""
        return self._sets.ndim

    def reshape(self, *shape) -> "PositionalSharding":
        """Give the array of sets another shape, as `numpy.ndarray.reshape` does; -1 is inferred."""
        return self._changed(f"reshape{shape}", lambda sets: sets.reshape(*shape))

    def transpose(self, *axes) -> "PositionalSharding":
        """Permute the axes of the array of sets, as `numpy.ndarray.transpose` does."""
        return self._changed(f"transpose{axes}", lambda sets: sets.transpose(*axes))

    @property
    def T(self) -> "PositionalSharding":  # noqa: N802 - NumPy's name
        """The array of sets with its axes reversed."""
        return self.transpose()

    def replicate(
        self, axis: int | tuple[int, ...] | None = None, keepdims: bool = True
    ) -> "PositionalSharding":
        """Unite the sets along an axis: their devices will hold copies of one block.

        Parameters
        ----------
        axis
            One axis, several, or None for all of them.
        keepdims
            Keep a united axis with length 1, or drop it. Unlike in NumPy's reductions the default is
            to keep it, so that the sharding still fits arrays of the same rank.
        """
        what = f"replicate(axis={axis}, keepdims={keepdims})"
        return self._changed(
            what, lambda sets: np.bitwise_or.reduce(sets, axis=axis, keepdims=keepdims)
        )

    def _changed(self, what: str, change: Callable[[np.ndarray], Any]) -> "PositionalSharding":
        try:
            sets = np.asarray(change(self._sets), dtype=object)  # One set for all comes bare.
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"PositionalSharding.{what}: {error}. The sharding is an array of "
                f"{self._sets.size} device sets, shape {self.shape}"
            ) from error
        return _remake(self._devices, sets, self.memory_kind)

    def with_memory_kind(self, kind: str) -> "PositionalSharding":
        """Return the same layout in another kind of memory, such as ``"pinned_host"``."""
        return _remake(self._devices, self._sets, kind)

    def named(self, ndim: int | None = None) -> NamedSharding:
        """Return the plain `NamedSharding` of this layout, with as few mesh axes as it takes.

        ``reshape(4, 2)`` has the mesh ``Mesh("a": 4, "b": 2)`` and the spec ``P("a", "b")``, its
        transpose the same mesh and ``P("b", "a")``. The axes that a spec does not name hold copies.

        Parameters
        ----------
        ndim
            Rank of the data array; the rank of the sharding when None.

        Raises
        ------
        ValueError
            If the sharding does not fit data of that rank.
        """
        mesh, spec = _mesh_and_spec(self._devices, self._blocks(), lambda factor: [factor])
        if ndim is not None:
            self._check_rank(ndim)
            spec = _for_rank(spec, ndim)
        return NamedSharding(mesh, spec, memory_kind=self.memory_kind)

    def spec_at(self, ndim: int) -> P:
        """Return the spec on `mesh` that lays out data of a rank; ValueError if none does."""
        self._check_rank(ndim)
        return _for_rank(self.spec, ndim)

    def check_compatible_aval(self, aval_shape: Sequence[int]) -> None:
        """Raise ValueError unless the sharding is congruent with the shape of a data array."""
        ndim = len(aval_shape)
        self._check_rank(ndim)
        has_other_rank = not self.is_fully_replicated and ndim != self.ndim
        if has_other_rank and not all(map(jax_private.found, LOWERINGS)):
            raise NotImplementedError(
                f"a PositionalSharding of rank {self.ndim} does not fit an array of rank {ndim} in JAX "
                f"{jax.__version__}. Call sharding.reshape with one number for each axis of the array, "
                f"pass sharding.named({ndim}), or install an earlier JAX"
            )
        cuts = (1,) * ndim if self.is_fully_replicated else self.shape[self.ndim - ndim :]
        for axis, (size, cut) in enumerate(zip(aval_shape, cuts, strict=True)):
            if size % cut:
                raise ValueError(
                    f"{cut} blocks do not divide axis {axis} of an array of shape {tuple(aval_shape)} "
                    f"evenly, under a PositionalSharding of shape {self.shape}. Reshape the sharding "
                    f"or replicate it along that axis, or pad the array to a multiple of {cut}"
                )

    def shard_shape(self, global_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a block; raise ValueError as `check_compatible_aval` does."""
        self.check_compatible_aval(global_shape)  # Not every maker of arrays asks it by itself.
        return super().shard_shape(global_shape)

    def _check_rank(self, ndim: int) -> None:
        missing = self.ndim - ndim
        if self.is_fully_replicated or missing == 0:
            return
        if missing < 0 or self.shape[:missing] != (1,) * missing:
            raise ValueError(
                f"a PositionalSharding of shape {self.shape} fits arrays of rank {self.ndim}, but "
                f"this one has rank {ndim}. Call sharding.reshape with one number for each of its "
                "axes (1 where it is not cut), or sharding.replicate() for a copy on every device"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PositionalSharding):
            return False
        return self is other or self._identity == other._identity

    def __hash__(self) -> int:
        return self._identity_hash

    def __repr__(self) -> str:
        prefix = "PositionalSharding("
        formatter: Any = {"object": self._set_repr}
        sets = np.array2string(
            self._sets, formatter=formatter, prefix=prefix, suffix=")", max_line_width=100
        )
        default = self._devices[0].default_memory().kind
        memory = "" if self.memory_kind == default else f", memory_kind={self.memory_kind}"
        return f"{prefix}{sets}{memory}, shape={self.shape})"

    def _set_repr(self, members: frozenset[int]) -> str:
        ids = sorted(self._devices[i].id for i in members)
        return f"{{{self._devices[0].platform.upper()} {', '.join(map(str, ids))}}}"

    def __reduce__(self):
        return _remake, (self._devices, self._sets, self.memory_kind)

    # JAX calls these private methods (`LOWERINGS`) to lower the layout for the partitioner and for the
    # map of blocks. A spec has one length, but leading axes of one set may be missing from the data.
    # Only here is the rank of the data known.

    def _to_sdy_sharding(self, num_dimensions: int, *args, **kwargs):
        return self._at_rank(num_dimensions)._to_sdy_sharding(num_dimensions, *args, **kwargs)

    def _to_xla_hlo_sharding(self, num_dimensions: int):
        return self._at_rank(num_dimensions)._to_xla_hlo_sharding(num_dimensions)

    def _at_rank(self, ndim: int) -> NamedSharding:
        return NamedSharding(self.mesh, _for_rank(self.spec, ndim), memory_kind=self.memory_kind)


@cache
def _name_outputs() -> None:
    """Have JAX translate the compiler's layouts to names on the mesh, as it does for `NamedSharding`.

    The first `PositionalSharding` of a process registers the class with JAX, which has no public way
    to do so. JAX looks the translator up by the exact type of an input's sharding. Without an entry an
    output's sharding is a ``GSPMDSharding``, with no mesh and no spec, and ``vmap`` over a
    ``with_sharding_constraint`` fails. Values and layouts are right.
    """
    handlers = jax_private.found("out_sharding_handlers")
    if handlers is not None and NamedSharding in handlers:
        handlers[PositionalSharding] = handlers[NamedSharding]


def _remake(devices: tuple, sets: np.ndarray, memory_kind: str | None) -> PositionalSharding:
    sharding = PositionalSharding.__new__(PositionalSharding)
    sharding._lay_out(devices, sets, memory_kind)
    return sharding


def _device_grid(devices: Any) -> np.ndarray:
    grid = np.asarray(devices, dtype=object)
    if not grid.size:
        raise ValueError(f"PositionalSharding: expected at least one device, got {devices!r}")
    wrong = [d for d in grid.flat if not isinstance(d, jax.Device)]
    if wrong:
        raise ValueError(
            "PositionalSharding: expected an array or a nested sequence of jax devices, its rows of "
            f"one length, got the element {wrong[0]!r}. Pass jax.devices() or "
            "jax.experimental.mesh_utils.create_device_mesh(shape)"
        )
    if len(set(grid.flat)) < grid.size:
        raise ValueError(f"PositionalSharding: a device is listed twice in {devices!r}; list each once")
    return grid


def _for_rank(spec: P, ndim: int) -> P:
    """Drop the leading entries that data of a lower rank does not have; they cut nothing."""
    return P(*tuple(spec)[max(len(spec) - ndim, 0) :])


def _mesh_and_spec(
    devices: tuple, blocks: np.ndarray, split: Callable[[Factor], list[Factor]]
) -> tuple[Mesh, P]:
    """Find a mesh whose named axes put each device on its block; ``split`` cuts its axes finer."""
    axes = _mesh_axes(blocks)
    if axes is None:  # No mesh in this order of the devices: take the order of the blocks.
        devices = tuple(devices[i] for i in blocks.flat)
        axes = _mesh_axes(np.arange(blocks.size).reshape(blocks.shape)) or []
    axes = [[part for factor in axis for part in split(factor)] for axis in axes]
    factors = sorted((f for axis in axes for f in axis), key=lambda f: -f[1]) or [(1, 1)]
    names = dict(zip(factors, string.ascii_lowercase, strict=False))
    grid = np.array(devices, dtype=object).reshape([size for size, _ in factors])
    mesh = Mesh(grid, tuple(names.values()), axis_types=(AxisType.Auto,) * len(names))
    cuts = [tuple(names[f] for f in axis) for axis in axes[:-1]]  # The last axis: copies.
    entries = [cut[0] if len(cut) == 1 else cut or None for cut in cuts]
    return mesh, P(*entries) if any(entries) else P()


def _mesh_axes(blocks: np.ndarray) -> list[list[Factor]] | None:
    """Factor each axis of the blocks into mesh axes, major first; None if that is impossible."""
    lines = [np.moveaxis(blocks, i, -1).reshape(-1, size)[0] for i, size in enumerate(blocks.shape)]
    axes = [_factors(line) for line in lines]
    steps = [reduce(np.add.outer, [t * np.arange(s) for s, t in axis], np.array(0)) for axis in axes]
    again = reduce(np.add.outer, [step.ravel() for step in steps])
    return axes if np.array_equal(again, blocks) else None


def _factors(line: np.ndarray) -> list[Factor]:
    """Read the mesh axes off the device numbers along one axis, which start at 0; major first."""
    factors = []
    while line.size > 1:
        steady = line == line[1] * np.arange(line.size)
        size = line.size if steady.all() else int(np.argmin(steady))
        factors.insert(0, (size, int(line[1])))
        line = line[::size]
    return factors


def _into_primes(factor: Factor) -> list[Factor]:
    size, stride = factor
    primes = []
    while size > 1:
        prime = next(p for p in range(2, size + 1) if size % p == 0)
        size //= prime
        primes.append((prime, stride * size))
    return primes
