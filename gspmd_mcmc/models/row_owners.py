"""Which plate's rows the arguments of a model have: a length alone does not tell.

The model is traced with numbers of rows that no other axis has, in the abstract: JAX itself refuses an
argument whose rows are not those of the plate that it meets.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

from gspmd_mcmc.models.index_reads import Program
from gspmd_mcmc.models.site_model import SiteModel
from gspmd_mcmc.placement.padding import values_of


def owners(model: SiteModel, fitting: Sequence[Sequence[str]]) -> tuple[str | None, ...]:
    """Return the plate whose rows each argument has, or None; ``fitting`` are the plates that fit it.

    An argument that the model runs with whatever its length is whole: a table that rows look up, or
    one of which they read a sum. A model that runs with no length but its own leaves the first plate.
    """
    return tuple(_owner(model, fitting, i) for i in range(len(fitting)))


def _owner(model: SiteModel, fitting: Sequence[Sequence[str]], number: int) -> str | None:
    fits = fitting[number]
    if not fits:
        return None
    own, *lengths = unused_lengths(model, 1 + len(model.num_rows))
    sizes = dict(zip(model.num_rows, lengths, strict=True))

    def program(length: int) -> Program | None:
        return _traced(model, sizes, fitting, number, length)

    whole = program(own)
    if whole is not None:
        sources = whole.index_sources(own)
        # Rows that are taken by their number, ``with plate(...) as i: y[i]``, are the plate's own.
        is_by_number = frozenset() in sources
        if not is_by_number:
            # What is read with the latents of a plate, by the same index, lies with them.
            alike = [p for p in fits if sources & whole.index_sources(sizes[p])]
            return alike[0] if alike else None
    if len(fits) == 1:
        return fits[0]
    return next((p for p in fits if program(sizes[p]) is not None), fits[0])


def _traced(
    model: SiteModel,
    sizes: dict[str, int],
    fitting: Sequence[Sequence[str]],
    number: int,
    length: int,
) -> Program | None:
    """Trace the log probabilities of all sites; None where the model does not run.

    Plates have the given sizes, one argument has the given length. Others that may have the rows of a
    plate have one row, which goes with any.
    """

    def shape(i: int, leaf: Any) -> jax.ShapeDtypeStruct:
        x = values_of(leaf)
        lead = x.shape[:1] if not fitting[i] else (length,) if i == number else (1,)
        return jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype)

    leaves = [shape(i, leaf) for i, leaf in enumerate(model.leaves())]
    try:
        return Program(partial(model.log_probs_of_all, sizes), leaves, model.shapes_of(sizes))
    except Exception:  # whatever a model does with other numbers of rows
        return None


def unused_lengths(model: SiteModel, count: int) -> list[int]:
    """Return numbers of rows that no axis of the arguments or latents has."""
    shapes = [values_of(x).shape for x in model.leaves()]
    taken = {n for shape in (*shapes, *(x.shape for x in model.latents.values())) for n in shape}
    return [n for n in range(1009, 1009 + count + len(taken)) if n not in taken][:count]
