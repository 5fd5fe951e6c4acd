"""Programs in which rows read groups by an index, ``effect[patient]``, and the same without the index.

Where a program runs on blocks of rows, and groups are given one to each row, the row's own, what a row
reads is at its own place: a gather becomes a change of axes. It is found in the program's equations,
traced once with numbers of rows and of groups that no other axis has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import jax_private
from gspmd_mcmc.jax_private import (
    evaluate,
    fresh_variable,
    is_literal,
    open_program,
    with_constants,
    without_unused,
)
from gspmd_mcmc.multihost.processes import to_host

# Equations that call a program; what they call is looked into.
CALLS = ("jit", "pjit")


class NotByIndex(ValueError):
    """Rows read groups otherwise than one group a row, by an index that is data."""


@dataclass(frozen=True)
class Read:
    """Where a program gathers from groups; hashable.

    Attributes
    ----------
    number
        Of the gather, among all gathers of the program.
    groups_axis
        The axis of the operand that groups are on.
    rows_axis
        The axis of the indices that rows are on.
    column
        Which of the indices is the group's.
    others
        The other indices, where all rows have the same; None where they are data.
    """

    number: int
    groups_axis: int
    rows_axis: int
    column: int
    others: tuple[int, ...] | None = ()


class Program:
    """What a function computes, as one list of equations.

    Parameters
    ----------
    function, args
        The function, and the shapes of its arguments.
    """

    def __init__(self, function: Callable, *args: Any):
        closed, self.out = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = _flat(closed)
        inner = open_program(flat)
        inner, _ = without_unused(inner, [True] * len(inner.outvars), keep_inputs=True)
        self.closed = with_constants(inner, flat.consts, closed)

    @property
    def gathers(self) -> list[Any]:
        """The equations that gather."""
        return [eqn for eqn in open_program(self.closed).eqns if _is_gather(eqn)]

    def reads(self, num_groups: int, num_rows: int) -> list[Read]:
        """Find the gathers by which rows read groups; no other axis has these lengths.

        Raises
        ------
        NotByIndex
            If groups meet rows in another way: a sum over groups, an index that is no row's.
        """
        found, number = [], -1
        for eqn in open_program(self.closed).eqns:
            number += _is_gather(eqn)
            of_groups = [num_groups in _shape(v) for v in eqn.invars]
            if not any(of_groups) or all(num_groups in _shape(v) for v in eqn.outvars):
                continue
            if not _is_gather(eqn):
                raise NotByIndex(f"all its rows meet in one operation ({eqn.primitive.name})")
            found.append(_read_of(eqn, number, num_groups, num_rows))
        return found

    def index_sources(self, length: int) -> set[frozenset[int]]:
        """Return what the indices are computed from that gather along axes of a length.

        Of each such gather the numbers of the arguments' leaves.
        """

        def is_along(eqn: Any) -> bool:
            axes = eqn.params["dimension_numbers"].start_index_map
            return any(_shape(eqn.invars[0])[axis] == length for axis in axes)

        found = [self._alone(eqn.invars[1])[1] for eqn in self.gathers if is_along(eqn)]
        return {frozenset(i for i, is_read in enumerate(reads) if is_read) for reads in found}

    def _alone(self, wanted: Any) -> tuple[Any, list[bool]]:
        """Return the program of one variable, and for each leaf of the arguments whether it is read."""
        jaxpr = open_program(self.closed)
        alone = jaxpr.replace(outvars=[wanted], debug_info=jaxpr.debug_info.with_unknown_names())
        return without_unused(alone, [True])

    def is_read(self) -> list[bool]:
        """Tell for each leaf of the arguments whether what is computed depends on it."""
        inner = open_program(self.closed)
        return without_unused(inner, [True] * len(inner.outvars))[1]

    def indices(self, number: int, arrays: Sequence[Any]) -> np.ndarray:
        """Compute the indices of a gather from arrays, which are the first arguments.

        Raises
        ------
        NotByIndex
            If they depend on others.
        """
        alone, is_read = self._alone(self.gathers[number].invars[1])
        if any(is_read[len(arrays) :]):
            raise NotByIndex("by an index that is computed from latents")
        read = [x for x, reads in zip(arrays, is_read, strict=False) if reads]
        program = with_constants(alone, self.closed.consts, self.closed)
        return to_host(jax.jit(partial(evaluate, program))(*read)[0])

    def with_own_rows(self, reads: Sequence[Read]) -> Callable:
        """Return the function, of leaves, that takes each row's own group where it was gathered."""
        gathers = dict(enumerate(self.gathers))
        for read in reads:
            shapes = [_shape(v) for v in gathers[read.number].invars] if read.number in gathers else []
            if not shapes or shapes[0][read.groups_axis] != shapes[1][read.rows_axis]:
                raise ValueError(
                    "the model computes otherwise on other numbers of rows, so that its indices cannot "
                    "be followed. Leave the plate that is read by an index out of plates="
                )
        own = {id(gathers[read.number]): _own(gathers[read.number], read) for read in reads}
        eqns = [own.get(id(eqn), eqn) for eqn in open_program(self.closed).eqns]
        return partial(evaluate, jax_private.with_equations(self.closed, eqns))


def _is_gather(eqn: Any) -> bool:
    return eqn.primitive.name == "gather"


def _flat(closed: Any) -> Any:
    """Return the program without calls: what it calls is among its own equations."""
    outer = open_program(closed)
    consts: dict[Any, Any] = dict(zip(outer.constvars, closed.consts, strict=True))

    def equations(jaxpr: Any, names: dict) -> Iterator[Any]:
        def renamed(atoms: Sequence[Any]) -> list:
            return [x if is_literal(x) else names.get(x, x) for x in atoms]

        for eqn in jaxpr.eqns:
            body = eqn.params.get("jaxpr")
            if eqn.primitive.name in CALLS:
                called = open_program(body)
                inner = dict(zip(called.invars, renamed(eqn.invars), strict=True))
                for var, value in zip(called.constvars, body.consts, strict=True):
                    inner[var] = fresh_variable(var)
                    consts[inner[var]] = value
                yield from equations(called, inner)
                outs = [x if is_literal(x) else inner[x] for x in called.outvars]
                names.update(zip(eqn.outvars, outs, strict=True))
            else:
                invars = renamed(eqn.invars)
                names.update({v: fresh_variable(v) for v in eqn.outvars})
                yield eqn.replace(invars=invars, outvars=[names[v] for v in eqn.outvars])

    names = {v: v for v in (*outer.invars, *outer.constvars)}
    eqns = list(equations(outer, names))
    outvars = [x if is_literal(x) else names[x] for x in outer.outvars]
    flat = outer.replace(constvars=list(consts), eqns=eqns, outvars=outvars)
    return with_constants(flat, list(consts.values()), closed)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _read_of(eqn: Any, number: int, num_groups: int, num_rows: int) -> Read:
    """Read a gather from groups; raise where it is not one group for each row."""
    operand, indices = map(_shape, eqn.invars[:2])
    numbers, axis = eqn.params["dimension_numbers"], operand.index(num_groups)
    is_plain = operand.count(num_groups) == 1 and num_groups not in indices
    if not is_plain or axis not in numbers.start_index_map or numbers.operand_batching_dims:
        raise NotByIndex("otherwise than by an index alone")
    if axis not in numbers.collapsed_slice_dims or indices[:-1].count(num_rows) != 1:
        raise NotByIndex("by an index that is not one to each row")
    column = numbers.start_index_map.index(axis)
    return Read(number, axis, indices.index(num_rows), column)


def _own(eqn: Any, read: Read) -> Any:
    """Return the equation that takes what each row reads from the row's own place."""

    @jax.jit
    def own_group(operand: jax.Array, indices: jax.Array) -> jax.Array:
        if read.others is None:
            return _gather_own(operand, indices, eqn.params, read)
        return _take_own(operand, eqn, read)

    (new,) = open_program(jax.make_jaxpr(own_group)(*(v.aval for v in eqn.invars))).eqns
    return new.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _take_own(operand: jax.Array, eqn: Any, read: Read) -> jax.Array:
    """Take what a gather reads where rows have their groups, and other indices are numbers."""
    numbers = eqn.params["dimension_numbers"]
    axes = [axis for axis in numbers.start_index_map if axis != read.groups_axis]
    slices: list[Any] = [slice(size) for size in eqn.params["slice_sizes"]]
    slices[read.groups_axis] = slice(None)
    for axis, number in zip(axes, read.others or (), strict=True):
        slices[axis] = slice(number, number + eqn.params["slice_sizes"][axis])
    taken = operand[tuple(slices)]
    # Behind the groups, the axes that stay: in the result they come where `offset_dims` says.
    taken = jnp.moveaxis(taken, read.groups_axis, 0)
    collapsed = (a for a in numbers.collapsed_slice_dims if a != read.groups_axis)
    taken = jnp.squeeze(taken, [a + (a < read.groups_axis) for a in collapsed])
    shape, offsets = _shape(eqn.outvars[0]), numbers.offset_dims
    batch = [a for a in range(len(shape)) if a not in offsets]
    before = sum(a < batch[read.rows_axis] for a in offsets)
    return jnp.moveaxis(taken, 0, before).reshape(shape)


def _gather_own(operand: jax.Array, indices: jax.Array, params: dict, read: Read) -> jax.Array:
    """Gather what is left to gather, of each row's own group."""
    numbers = params["dimension_numbers"]
    numbers = numbers._replace(
        collapsed_slice_dims=tuple(a for a in numbers.collapsed_slice_dims if a != read.groups_axis),
        start_index_map=tuple(a for a in numbers.start_index_map if a != read.groups_axis),
        operand_batching_dims=(read.groups_axis,),
        start_indices_batching_dims=(read.rows_axis,),
    )
    return jax.lax.gather(
        operand,
        jnp.delete(indices, read.column, axis=-1, assume_unique_indices=True),
        numbers,
        params["slice_sizes"],
        mode=params["mode"],
        fill_value=params["fill_value"],
    )
