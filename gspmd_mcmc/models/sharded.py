"""Distributions over the rows of a mesh axis: every device holds its rows of a sample.

A `Sharded` is the whole distribution, not a device's part of it. A sample is one global array, and the
log probability is the sum over all rows; the compiler inserts the reduction.
"""

import inspect
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.errors import answers
from gspmd_mcmc.models.tfp import AnswersTFP, refuse_foreign, rows_of_event
from gspmd_mcmc.placement.explicit import OnMesh, on_any_mesh
from gspmd_mcmc.placement.mesh import auto_mesh, axes_of
from gspmd_mcmc.placement.padding import (
    Padded,
    is_real,
    padded_rows,
    real_rows,
    real_shape,
)
from gspmd_mcmc.placement.place import check_spec
from gspmd_mcmc.targets.checks import check_key
from gspmd_mcmc.tree import PyTree, is_staging, pytree, replace, set_fields, static


@pytree
@dataclass(frozen=True, eq=False, init=False)
class Sharded(AnswersTFP, OnMesh):
    """A distribution whose rows lie over a mesh axis.

    It is a pytree: pass it into a program, ``jax.jit(gm.Sharded.log_prob)(sharded, value)``, or make it
    there, of parameters that are being traced. Chains come by `jax.vmap`.

    Parameters
    ----------
    distribution
        Anything with ``sample(rng_key, sample_shape)`` (or ``sample(sample_shape, seed=rng_key)``) and
        ``log_prob(value)``: NumPyro's, TFP's on JAX, your own class. On every device, and of all rows.
    axis
        Name of the mesh axis that the rows lie over, or names: ``("data", "model")`` lays rows over
        both. ``P("data", "model")`` lays rows over the first and the axis after them over the second.
        ``()`` lays nothing and needs no mesh, for code that runs with and without one.
    mesh
        The mesh, needed for sampling. Parts of a joint distribution use that of the joint.
    num_rows
        How many rows are drawn independently: a sample is [num_rows, ...], followed by the shape of the
        distribution's own sample. None if the distribution has the rows itself: they are the first axis
        of its batch shape or, if that is empty, of the sample.
    name
        What a joint distribution calls it.

    Raises
    ------
    TypeError, ValueError
        If ``distribution`` is not a distribution, ``num_rows`` is less than 1, or the mesh has no such
        axis or has axes that are not Auto.
    """

    distribution: Any
    axis: str | tuple[str, ...] | P = static()
    mesh: Mesh | None = static()
    num_rows: int | None = static()
    name: str | None = static()

    @answers(
        "Call it as Sharded(distribution, axis, mesh=mesh, num_rows=rows, name=name), outside pmap",
        shard_axis_name="it is axis= here, an axis of the mesh",
    )
    def __init__(
        self,
        distribution: Any,
        axis: str | tuple[str, ...] | P = "data",
        *,
        mesh: Mesh | None = None,
        num_rows: int | None = None,
        name: str | None = None,
    ):
        _check_axis(axis, mesh)
        if not is_distribution(distribution) or isinstance(distribution, Sharded):
            cure = ""
            if isinstance(distribution, Sharded):
                both = (*distribution.axes, *axes_of(axis))
                cure = f". Rows over the axes of both are Sharded(distribution, axis={both})"
            raise TypeError(
                "Sharded: expected a distribution, with sample and log_prob, got "
                f"{shown(distribution)}{cure}"
            )
        refuse_foreign("Sharded", distribution)
        if num_rows is not None and (
            isinstance(num_rows, bool) or not isinstance(num_rows, int | np.integer) or num_rows < 1
        ):
            raise ValueError(f"Sharded: num_rows: expected an integer of at least 1, got {num_rows!r}")
        axis = axis if isinstance(axis, str | P) else tuple(axis)
        num_rows = None if num_rows is None else int(num_rows)
        set_fields(self, distribution=distribution, axis=axis, mesh=mesh, num_rows=num_rows, name=name)

    @property
    def spec(self) -> P:
        """How a sample lies: the mesh axes of its rows, and of the axes after them."""
        return self.axis if isinstance(self.axis, P) else P(axes_of(self.axis))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that the rows lie over."""
        return axes_of(self.spec[0])

    @answers("Call it as sample(rng_key, sample_shape)", seed="the key comes first here")
    @on_any_mesh
    def sample(self, rng_key: jax.Array, sample_shape: float | tuple[int, ...] = ()) -> Any:
        """Draw one global sample, laid over the mesh.

        Parameters
        ----------
        rng_key
            A typed key, ``jax.random.key(seed)``.
        sample_shape
            Independent samples, in front: [*sample_shape, num_rows, ...].

        Returns
        -------
        jax.Array or Padded
            The same values on every mesh, but for the last digit where the distribution computes them
            in several steps: what is drawn depends on the key and the global shape. Rows that the mesh
            does not divide come back as `Padded`, copies of the last row at the end; so they do inside
            a program, where `Padded` is a pytree like any other, and under `jax.vmap` over keys.

        Raises
        ------
        TypeError, ValueError
            If there is no mesh, the key is not a typed key, the sample has no rows, or there is a
            ``sample_shape`` and the mesh does not divide the rows (use `jax.vmap` over keys).
        """
        check_key(rng_key)
        shape = shape_of(sample_shape)
        if self.mesh is None and any(self.spec):
            raise ValueError(
                "Sharded: to sample takes a mesh: Sharded(..., mesh=gm.make_mesh(...)), or that of a "
                "joint distribution; axis=() lays rows over none"
            )
        _check_axis(self.axis, self.mesh)
        return (_draw_laid if _is_plain(self) else _jit_draw)(self, rng_key, shape)

    @on_any_mesh
    def log_prob(self, value: Any) -> jax.Array:
        """Sum the log probability over all rows: one scalar, the same on every device.

        Parameters
        ----------
        value
            A sample without ``sample_shape`` (vmap over those): an array, placed or not, or `Padded`,
            whose copies do not count.

        Raises
        ------
        ValueError
            If the value has other rows or another shape than the distribution.
        """
        value = value if isinstance(value, Padded) else jnp.asarray(value)
        check_value("Sharded.log_prob", self, value)
        return (_total if _is_plain(self, value) else _jit_total)(self, value)


def shape_of(sample_shape: Any) -> tuple[int, ...]:
    """Return a sample shape as integers: of an integer, a whole number such as 1e5, or several."""
    given = np.asarray(sample_shape)
    is_number = given.ndim < 2 and given.dtype.kind in "iuf" and bool(np.all(np.isfinite(given)))
    if not is_number or np.any(given < 0) or np.any(given != np.round(given)):
        raise ValueError(
            f"sample_shape: expected a whole number of at least 0, or several, got {sample_shape!r}"
        )
    return tuple(int(n) for n in np.ravel(given))


def is_distribution(thing: Any) -> bool:
    """Tell whether something can be sampled and has a log probability; a class does not count."""
    has_both = callable(getattr(thing, "sample", None)) and callable(getattr(thing, "log_prob", None))
    return has_both and not isinstance(thing, type)


def plain(part: Any) -> Any:
    """Return the distribution of a part, `Sharded` or not."""
    return part.distribution if isinstance(part, Sharded) else part


def draw_part(part: Any, rng_key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
    """Draw the values of any distribution, `Sharded` or not: neither laid over a mesh nor padded."""
    if isinstance(part, Sharded) and part.num_rows is not None:
        sample_shape = (*sample_shape, part.num_rows)
    distribution = plain(part)
    is_tfps_way = "seed" in inspect.signature(distribution.sample).parameters
    with jax.numpy_rank_promotion("allow"):  # NumPyro's own code relies on it
        if is_tfps_way:
            value = distribution.sample(sample_shape, seed=rng_key)
        else:
            value = distribution.sample(rng_key, sample_shape)
    if not jax.tree_util.all_leaves([value]):  # arrays in a list would be stacked
        raise TypeError(
            f"{shown(distribution)} draws a {type(value).__name__}, not an array: a joint distribution "
            "is no part of another one. Make its parts parts of the outer one"
        )
    return jnp.asarray(value)


def with_rows_apart(part: Any, ndim: int) -> Any:
    """Return a part that has a log probability for each row of its values, of ``ndim`` axes.

    A `Sharded` whose distribution has the rows in its event, as ``Sample(d, [rows, columns])``, has one
    for all of them together.
    """
    if not isinstance(part, Sharded) or part.num_rows is not None:
        return part
    shapes = (getattr(part.distribution, name, ()) for name in ("batch_shape", "event_shape"))
    batch, event = map(tuple, shapes)
    if batch or not event or ndim != len(event):
        return part
    distribution, num_rows = rows_of_event(part.distribution)
    return replace(part, distribution=distribution, num_rows=num_rows)


def log_prob(distribution: Any, value: jax.Array) -> jax.Array:
    """Log probability under any distribution, of the shape that it gives it."""
    with jax.numpy_rank_promotion("allow"):
        return jnp.asarray(distribution.log_prob(value))


def check_value(what: str, part: Any, value: Any) -> None:
    """Raise where a value has another shape than one sample of a part, as far as that is known.

    It would broadcast against the distribution, and the sum count some values twice.
    """
    if isinstance(value, Padded) and not isinstance(part, Sharded):
        raise ValueError(f"{what}: got {value} for a part that is not Sharded; nothing masks its pad")
    shape = real_shape(value)
    expected = _shapes(part)
    if not any(_matches(shape, pattern) for pattern in expected):
        shapes = " or ".join(_shape_str(pattern) for pattern in expected)
        raise ValueError(
            f"{what}: expected one value of shape {shapes}, got {_shape_str(shape)}. Of many samples, "
            "take jax.vmap"
        )


def shown(thing: Any) -> str:
    """Say in words what was found where a distribution was expected."""
    is_class = isinstance(thing, type)
    return f"the class {thing.__name__}, not one of it" if is_class else f"a {type(thing).__name__}"


def _shapes(part: Any) -> list[tuple]:
    """Shapes that one sample can have; None is an axis of any length, an ellipsis any axes."""
    is_sharded = isinstance(part, Sharded)
    distribution = plain(part)
    rows = part.num_rows if is_sharded else None
    if not (hasattr(distribution, "batch_shape") and hasattr(distribution, "event_shape")):
        return [(rows, ...) if is_sharded else (...,)]
    batch, event = tuple(distribution.batch_shape), tuple(distribution.event_shape)
    if not is_sharded or (rows is None and batch):
        return [(*batch, *event)]
    if rows is None and event:
        return [(None, *event), event]
    return [(rows, *batch, *event)]


def _matches(shape: tuple, pattern: tuple) -> bool:
    if pattern[-1:] == (...,):
        pattern = pattern[:-1]
        shape = shape[: len(pattern)]
    return len(shape) == len(pattern) and all(
        n is None or n == m for n, m in zip(pattern, shape, strict=True)
    )


def _shape_str(pattern: tuple) -> str:
    return f"[{', '.join('rows' if n is None else '...' if n is ... else str(n) for n in pattern)}]"


def _check_axis(axis: Any, mesh: Mesh | None) -> None:
    """Raise unless this is a name or names, of axes that the mesh has if there is one."""
    axes = (axis,) if isinstance(axis, str) else axis
    if isinstance(axis, P) and len(axis):
        axes = [name for entry in axis for name in axes_of(entry)]
    if not isinstance(axes, tuple | list) or not all(isinstance(a, str) for a in axes):
        raise TypeError(
            "Sharded: axis: expected the name of a mesh axis, names, P(...) that begins with the rows, "
            f"or () to lay rows over none, got {axis!r}"
        )
    if len(set(axes)) < len(axes):
        raise ValueError(f"Sharded: axis: expected each mesh axis once, got {axis!r}")
    if mesh is None:
        return
    auto_mesh("Sharded: mesh", mesh)
    unknown = [a for a in axes if a not in mesh.shape]
    if unknown:
        raise ValueError(f"Sharded: the mesh {dict(mesh.shape)} has no axis {unknown[0]!r}")


def _is_plain(*args: PyTree) -> bool:
    """Tell whether a function runs as it is: in a program already, or with what is no array."""
    return is_staging() or not all(
        hasattr(x, "dtype") or isinstance(x, bool | int | float) for x in jax.tree.leaves(args)
    )


def _total(sharded: Sharded, value: Any) -> jax.Array:
    # Cutting the pad off is free inside a program, and leaves nothing to mask.
    return jnp.sum(log_prob(sharded.distribution, real_rows(value)))


def _draw_laid(sharded: Sharded, rng_key: jax.Array, sample_shape: tuple[int, ...]) -> Any:
    """Draw in a program, so that every device draws its own rows."""
    values = draw_part(sharded, rng_key, sample_shape)
    has_rows = sharded.num_rows is not None or bool(getattr(sharded.distribution, "batch_shape", ()))
    row_axis = len(sample_shape) if has_rows else 0
    if values.ndim <= row_axis:
        raise ValueError("Sharded: a scalar has no rows to lay over the mesh: give num_rows=")
    if not any(sharded.spec):
        return values
    assert sharded.mesh is not None
    num_blocks = math.prod(sharded.mesh.shape[a] for a in sharded.axes)
    num_rows = values.shape[row_axis]
    num_pad = padded_rows(num_rows, num_blocks) - num_rows
    check_spec("Sharded", values.shape[row_axis:], sharded.mesh, sharded.spec)
    if len(sharded.axes) > 1 and num_rows < num_blocks and values.ndim > row_axis + 1:
        raise ValueError(
            f"Sharded: axis={sharded.axes} lays rows over both axes, {num_rows} rows over {num_blocks} "
            f"devices. To lay the axis after the rows over the last, axis=P{sharded.axes}"
        )
    if num_pad and row_axis:
        raise ValueError(
            f"Sharded: {num_rows} rows behind sample_shape {values.shape[:row_axis]} do not divide "
            f"over {num_blocks} devices; draw each sample by itself, jax.vmap(sharded.sample)(keys)"
        )
    spec = P(*(None,) * row_axis, *sharded.spec)
    constrain = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(sharded.mesh, spec))
    if not num_pad:
        return constrain(values)
    # With zeros first, and the copies then: to concatenate them would gather all rows.
    zeros = constrain(jnp.pad(values, [(0, num_pad), *[(0, 0)] * (values.ndim - 1)]))
    real = is_real(num_rows, num_rows + num_pad, num_blocks).reshape(-1, *(1,) * (values.ndim - 1))
    return Padded(constrain(jnp.where(real, zeros, values[-1:])), num_rows)


_jit_total = jax.jit(_total)
_jit_draw = jax.jit(_draw_laid, static_argnums=2)
