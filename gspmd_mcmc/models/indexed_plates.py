"""Plates that read another plate by an index: visits of patients, ``effect[patient]``.

Such rows are laid with the groups that they read, `Groups`. A block of rows has its groups one to each
row, so that the model is run with as many groups as rows, each row's own in its place.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from gspmd_mcmc import jax_private
from gspmd_mcmc.groups.groups import Groups
from gspmd_mcmc.groups.keys import TAKEN_NAMES
from gspmd_mcmc.models.index_reads import NotByIndex, Program, Read
from gspmd_mcmc.models.row_owners import unused_lengths
from gspmd_mcmc.models.site_model import CannotStream, SiteModel, Streamed, fails_on_block
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.mesh import axes_of, named_sharding
from gspmd_mcmc.placement.padding import real_rows, values_of
from gspmd_mcmc.tree import PyTree


@dataclass(frozen=True, eq=False)
class Indexed:
    """A plate of rows, each of which reads one row of another plate.

    Attributes
    ----------
    rows, groups
        Names of the plate that reads, and of the one that it reads.
    keys
        Which of the groups each row reads.
    reads
        The gathers by which it does.
    arguments, latents
        Which leaves of the arguments, and which latents, of the groups it reads.
    """

    rows: str
    groups: str
    keys: np.ndarray
    reads: tuple[Read, ...]
    arguments: tuple[int, ...]
    latents: tuple[str, ...]


def streamed(
    model: SiteModel, over: dict[str, Any], leaves: list, dummies: dict
) -> dict[str, Streamed]:
    """Say of each plate how it is streamed: with the groups that its rows read, or alone.

    ``over`` are the mesh axes of the plates; ``leaves`` and ``dummies`` stand for rows of others.

    Raises
    ------
    CannotStream
        As `SiteModel.posterior`.
    """
    indexed = {}
    for plate in model.num_rows:
        if model.leaves_of(plate):
            owners = {owner for owner, _ in model.foreign_reads(plate, leaves, dummies)}
            if owners:
                indexed[plate] = _indexed(model, over, plate, owners, leaves, dummies)
    for x in indexed.values():
        if x.groups in indexed:
            raise CannotStream(
                indexed[x.groups].groups,
                f"plate {x.groups!r} reads it, and is itself read by plate {x.rows!r}",
                x.groups,
            )
    groups: dict[str, Groups] = {}
    for x in indexed.values():
        groups[x.groups] = groups.get(x.groups) or _groups(model, x)
    for plate in (*model.num_rows, None):
        if plate not in indexed:
            model.check_apart(plate, leaves, dummies, plate in groups)
    return {plate: _streamed(model, plate, indexed.get(plate), groups) for plate in model.num_rows}


def _streamed(
    model: SiteModel, plate: str, indexed: Indexed | None, groups: dict[str, Groups]
) -> Streamed:
    if indexed is None:
        alone = model.streamed_alone(plate)
        if plate not in groups:
            return alone
        return replace(alone, data=groups[plate].place(alone.data or [groups[plate].sizes]))
    terms = partial(
        _terms, model.without_arrays(), plate, indexed.groups, indexed.reads, indexed.arguments
    )
    rows = [
        leaf if owner == plate else to_host(real_rows(leaf))[indexed.keys]
        for i, (leaf, owner) in enumerate(zip(model.leaves(), model.plate_of_leaf, strict=True))
        if owner == plate or i in indexed.arguments
    ]
    data = groups[indexed.groups].place_rows(rows, indexed.keys)
    return Streamed(terms, data, indexed.latents, indexed.groups)


def _groups(model: SiteModel, indexed: Indexed) -> Groups:
    """Lay the groups of a plate's rows, which have its name, where that plate's arguments lie."""
    placed = [values_of(x) for x in model.leaves_of(indexed.rows)]
    shardings = [s for s in map(named_sharding, placed) if s is not None]
    mesh, spec = (shardings[0].mesh, P(*shardings[0].spec[:1])) if shardings else (None, None)
    return Groups(
        indexed.keys,
        mesh,
        spec,
        labels=np.arange(model.num_rows[indexed.groups]),
        name="" if indexed.groups in TAKEN_NAMES else indexed.groups,
        allow_empty=True,
    )


def _terms(
    model: SiteModel,
    plate: str,
    groups: str,
    reads: tuple[Read, ...],
    arguments: tuple[int, ...],
    leaves: list,
    dummies: dict,
    params: PyTree,
    block: list,
) -> jax.Array:
    """Terms of the rows of a block, whose groups' latents and arguments come one to each row."""
    num, rows = len(block[0]), iter(block)

    def spread(x: jax.Array) -> jax.Array:  # what no row reads, in the right shape
        return jnp.broadcast_to(x, (num, *x.shape[1:]))

    leaves = [
        next(rows) if owner == plate or i in arguments else spread(x) if owner == groups else x
        for i, (x, owner) in enumerate(zip(leaves, model.plate_of_leaf, strict=True))
    ]
    values = dummies | {name: spread(dummies[name]) for name in model.latents_of(groups)} | params
    program = Program(partial(model.terms_of, plate, {plate: num, groups: num}), leaves, values)
    (terms,) = program.with_own_rows(reads)(*jax.tree.leaves((leaves, values)))
    return terms


def _indexed(
    model: SiteModel,
    over: dict[str, Any],
    plate: str,
    owners: set[str],
    leaves: list,
    dummies: dict,
) -> Indexed:
    """Find the index by which a plate's rows read another plate: of several the one with most latents.

    Raises
    ------
    CannotStream
        Of the plate that is to be whole instead, with the reason.
    """
    groups, *others = sorted(owners, key=lambda name: (-_num_latents(model, name), name))
    whole = groups
    try:
        if not jax_private.can_rewrite():
            raise NotByIndex(f"by an index that cannot be followed with JAX {jax.__version__}")
        if model.latents_of(plate):
            raise NotByIndex("has latents of its own, which lie with its rows")
        if axes_of(over[plate]) != axes_of(over[groups]):
            raise NotByIndex("lies over other axes of the mesh")
        found = _found(model, plate, groups, leaves, dummies)
        if others:
            whole = others[0]
            raise NotByIndex(f"lies with plate {groups!r}, which has more latents")
    except NotByIndex as error:
        raise CannotStream(whole, f"plate {plate!r} reads it, and {error}", plate) from error
    return found


def _num_latents(model: SiteModel, plate: str) -> int:
    return sum(int(np.prod(model.latents[name].shape)) for name in model.latents_of(plate))


def _found(model: SiteModel, plate: str, groups: str, leaves: list, dummies: dict) -> Indexed:
    num_groups, num_rows = unused_lengths(model, 2)
    program = _program(model, {plate: num_rows, groups: num_groups}, leaves, dummies)
    reads = program.reads(num_groups, num_rows)
    is_read = program.is_read()
    arguments = tuple(
        i for i, owner in enumerate(model.plate_of_leaf) if owner == groups and is_read[i]
    )
    of_values = dict(zip(sorted(model.latents), is_read[len(leaves) :], strict=True))
    latents = tuple(name for name in model.latents_of(groups) if of_values[name])
    keys, reads = _keys(model, plate, groups, reads, leaves, dummies)
    return Indexed(plate, groups, keys, reads, arguments, latents)


def _program(model: SiteModel, sizes: dict[str, int], leaves: list, dummies: dict) -> Program:
    """Trace the terms of the first plate where it and the second have these sizes."""
    plate, groups = sizes
    leaves = [
        jax.ShapeDtypeStruct((sizes[owner], *x.shape[1:]), x.dtype) if owner in sizes else x
        for x, owner in zip(leaves, model.plate_of_leaf, strict=True)
    ]
    try:
        return Program(partial(model.terms_of, plate, sizes), leaves, dummies | model.shapes_of(sizes))
    except Exception as error:  # anything that a model does on other numbers of rows
        raise fails_on_block(groups, sizes[groups], error) from error


def _keys(
    model: SiteModel,
    plate: str,
    groups: str,
    reads: list[Read],
    leaves: list,
    dummies: dict,
) -> tuple[np.ndarray, tuple[Read, ...]]:
    """Compute which group each row reads, the same by each of the reads, and what else they read."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model.args)):
        raise NotByIndex("by what index is not known, as arguments are shapes alone")
    sizes = {name: model.num_rows[name] for name in (plate, groups)}
    whole = _program(model, sizes, leaves, dummies)
    arrays = [
        real_rows(x) if owner in sizes else standin
        for x, standin, owner in zip(model.leaves(), leaves, model.plate_of_leaf, strict=True)
    ]
    keys, found = [], []
    for read in reads:
        index = np.moveaxis(whole.indices(read.number, arrays), read.rows_axis, 0)
        index = index.reshape(sizes[plate], -1, index.shape[-1])
        key, others = index[..., read.column], np.delete(index, read.column, axis=2)
        if (key != key[:, :1]).any():
            raise NotByIndex("by an index that is not one to each row")
        keys.append(key[:, 0])
        is_number = index.shape[1] == 1 and (others == others[:1]).all()
        found.append(replace(read, others=tuple(map(int, others[0, 0])) if is_number else None))
    if not keys or any((key != keys[0]).any() for key in keys):
        raise NotByIndex("by more than one index" if keys else "by no index at all")
    wrong = np.flatnonzero((keys[0] < 0) | (keys[0] >= sizes[groups]))
    if wrong.size:
        raise ValueError(
            f"plates: {wrong.size} rows of {plate!r} read rows of {groups!r} that are not there, the "
            f"first is row {wrong[0]} with {keys[0][wrong[0]]}; {groups!r} has the rows 0 to "
            f"{sizes[groups] - 1}, and NumPyro would take others in their place"
        )
    return keys[0], tuple(found)
