"""Parameters by an index that is data, with gradients that scatter nothing.

The gradient of ``table[index]`` adds the rows' gradients up by their index. XLA makes a scatter of it:
on a GPU a loop of compare-and-swap for each number, whose order, and so whose rounding, changes from
run to run. Here, except on CPUs, rows are sorted by their index and summed in an order that is always
the same. Where the order is known from placing, the rows of an entry are gathered into blocks of one
width, and summed as rows of groups are.
"""

from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc.groups.lookup_index import IN_BOUNDS, LookupIndex, RowsByEntry

# Rows that are summed by comparing all pairs of them.
CHUNK = 32
# Columns that fill the lanes of a TPU: of fewer, most of each register is pad.
LANES = 128


def lookup(table: jax.Array, index: jax.Array | LookupIndex) -> jax.Array:
    """Return for each row the entry of a table that its index names: ``table[index]``.

    For tables that all rows share (a latent per film, item or teacher), in a log likelihood. A plain
    index outside of the table gives NaN, which `sample` reports with the row, where ``table[index]``
    would take the nearest entry; a `LookupIndex` refuses it when it is made.

    Parameters
    ----------
    table
        Parameters, shape [entries, ...].
    index
        Integers from 0 to entries - 1: data, shape [rows]. A `LookupIndex` of the rows was sorted when
        they were placed; others are sorted in each gradient, on GPUs and TPUs.

    Returns
    -------
    jax.Array
        Shape [rows, ...]. Differentiable in ``table``, in reverse, and forward over reverse. On GPUs
        and TPUs the gradient is the same to the bit in every run.

    Raises
    ------
    TypeError, ValueError
        If the index is not one integer per row, or the table is no array of floating numbers, or has
        another number of entries than a `LookupIndex` says.
    """
    is_checked = isinstance(index, LookupIndex)
    if not is_checked:
        rows, order = index, None
    elif jnp.shape(table)[:1] == (index.entries,):
        rows, order = index.index, index.order
    else:
        raise ValueError(
            f"lookup: table: expected {index.entries} entries, as {index} has, got shape "
            f"{list(jnp.shape(table))}"
        )
    _check("lookup", "table", table, rows, ("entries",))
    return _lookup(table, rows, order, is_checked)


def lookup_within(values: jax.Array, index: jax.Array) -> jax.Array:
    """Return for each row one of its own values, that which its index names.

    For groups within groups, where a row has a latent for each subgroup of its group: ``values`` are
    those of the row's school, ``index`` is the number of the row's class in it; see `Groups.subgroups`.
    It reads all values of a row, and neither gathers nor scatters. An index outside of the values gives
    NaN, which `sample` reports with the row.

    Parameters
    ----------
    values
        Parameters, shape [rows, values of a row, ...].
    index
        Integers from 0 to the number of a row's values - 1: data, shape [rows].

    Returns
    -------
    jax.Array
        Shape [rows, ...].

    Raises
    ------
    TypeError, ValueError
        If the index is not one integer per row, or the values are no array of floating numbers with the
        rows that the index has.
    """
    _check("lookup_within", "values", values, index, ("rows", "values of a row"))
    if len(values) != len(index):
        raise ValueError(
            f"lookup_within: values: expected those of {len(index)} rows, as the index has, got "
            f"{list(jnp.shape(values))}"
        )
    index = index.astype(jnp.promote_types(index.dtype, jnp.int32))  # bytes may not count the values
    numbers = jnp.arange(values.shape[1], dtype=index.dtype)
    is_named = (index[:, None] == numbers[None]).reshape(*values.shape[:2], *(1,) * (values.ndim - 2))
    # A row's other values may be infinite, which zeros would turn into NaN.
    found = jnp.sum(jnp.where(is_named, values, 0), axis=1)
    return jnp.where(jnp.any(is_named, axis=1), found, jnp.nan)


def _check(
    function: str, name: str, values: jax.Array, index: jax.Array, axes: tuple[str, ...]
) -> None:
    if not jnp.issubdtype(jnp.result_type(index), jnp.integer) or jnp.ndim(index) != 1:
        raise TypeError(
            f"{function}: index: expected one integer per row, shape [rows], got "
            f"{jnp.result_type(index)}{list(jnp.shape(index))}"
        )
    is_floating = jnp.issubdtype(jnp.result_type(values), jnp.floating)
    if jnp.ndim(values) < len(axes) or not is_floating:
        raise ValueError(
            f"{function}: {name}: expected floating parameters, shape [{', '.join(axes)}, ...], got "
            f"{jnp.result_type(values)}{list(jnp.shape(values))}"
        )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _lookup(
    table: jax.Array, index: jax.Array, order: RowsByEntry | None, is_checked: bool
) -> jax.Array:
    return _at(table, index, order, is_checked)


def _at(table: jax.Array, index: jax.Array, order: RowsByEntry | None, is_checked: bool) -> jax.Array:
    if not is_checked:
        return table.at[index].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    rows = _rows_at(table, index)
    if order is not None:
        rows = _columns(rows).T
    return rows.reshape(len(index), *table.shape[1:])


def _fwd(
    table: jax.Array, index: jax.Array, order: RowsByEntry | None, is_checked: bool
) -> tuple[jax.Array, tuple]:
    # Of the table only the number of entries is needed: a column of no width keeps that.
    return _at(table, index, order, is_checked), (table[:, None][:, :0], index, order)


def _bwd(is_checked: bool, saved: tuple, grad: jax.Array) -> tuple:
    like, index, order = saved
    num = len(like)
    if order is not None:
        sums = _sums_of_entries(grad.reshape(len(grad), -1), order)
        return sums.reshape(num, *grad.shape[1:]), None, None
    of_table = jax.lax.platform_dependent(
        *(grad, index),
        cpu=lambda grad, index: _scattered(grad, index, num),
        default=lambda grad, index: _summed_by_index(grad, index, num),
    )
    return of_table, None, None


_lookup.defvjp(_fwd, _bwd)


def _sums_of_entries(rows: jax.Array, order: RowsByEntry) -> jax.Array:
    """Sum rows [rows, columns] by the entry that they name: [entries, columns]."""
    columns = _columns(_rows_at(rows, jnp.minimum(order.row, len(rows) - 1)))
    columns = jnp.where((order.row < len(rows))[None], columns, 0)
    columns = jnp.sum(columns.reshape(len(columns), order.tiles.chunk, -1), axis=1)
    sums, first = [], 0
    for num, width in order.tiles.widths:
        of_width = columns[:, first : first + num * width].reshape(-1, width, num)
        sums.append(jnp.sum(of_width, axis=1))
        first += num * width
    found = _rows_at(jnp.concatenate(sums, axis=1).T, jnp.maximum(order.slot, 0))
    return jnp.where((order.slot >= 0)[:, None], found, 0)


def _rows_at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Take rows, [n, ...] to [rows, columns], by an index that is known to be in bounds."""
    return array.reshape(len(array), -1).at[index].get(**IN_BOUNDS)


def _columns(rows: jax.Array) -> jax.Array:
    """Transpose [rows, columns]; rows that were gathered by a TPU, by a product that does nothing else.

    There a row of few columns takes a register for itself, and XLA's transposes of such arrays take
    several times as long as what they are for.
    """
    if not 1 < rows.shape[1] < LANES:
        return rows.T
    return jax.lax.platform_dependent(rows, tpu=_columns_by_product, default=jnp.transpose)


def _columns_by_product(rows: jax.Array) -> jax.Array:
    # All bits of a number times one are that number. Zero times one that is not finite is NaN: such a
    # row is NaN throughout, and its step rejected as it would be anyway.
    one_each = jnp.eye(rows.shape[1], dtype=rows.dtype)
    return jnp.einsum("jk,rk->jr", one_each, rows, precision=jax.lax.Precision.HIGHEST)


def _scattered(grad: jax.Array, index: jax.Array, num: int) -> jax.Array:
    zeros = jnp.zeros((num, *grad.shape[1:]), grad.dtype)
    return zeros.at[index].add(grad, mode="drop", wrap_negative_indices=False)


def _summed_by_index(grad: jax.Array, index: jax.Array, num: int) -> jax.Array:
    """Sum rows [rows, ...] of the same index: [num, ...]."""
    index = index.astype(jnp.promote_types(index.dtype, jnp.int32))  # bytes may not hold `num`
    order = jnp.argsort(index)
    index, rows = index[order], grad[order].reshape(len(order), -1)
    entries = jnp.arange(num, dtype=index.dtype)
    end = jnp.maximum(jnp.searchsorted(index, entries, side="right") - 1, 0)
    within, before, goes_on = _sums_so_far(rows, index, num)
    sums = within[end] + jnp.where(goes_on[end][:, None], before[end // CHUNK], 0)
    return jnp.where((index[end] == entries)[:, None], sums, 0).reshape(num, *grad.shape[1:])


def _sums_so_far(rows: jax.Array, index: jax.Array, num: int) -> tuple[jax.Array, ...]:
    """Sum sorted rows of the same index, up to each.

    Within its chunk, [rows, columns]; in the chunks before, of the index that the last of them ends
    with, [chunks, columns]; and whether a row has that index, [rows]. Chunks that end with the same
    index stand together as rows do: what they end with is summed in the same way.
    """
    pad = -len(index) % CHUNK
    index = jnp.pad(index, (0, pad), constant_values=num)  # no entry has that number
    rows = jnp.pad(rows, ((0, pad), (0, 0))).reshape(-1, CHUNK, rows.shape[-1])
    of_chunks = index.reshape(-1, CHUNK)
    is_before = jnp.tri(CHUNK, dtype=bool)[None] & (of_chunks[:, :, None] == of_chunks[:, None, :])
    within = jnp.einsum(
        *("bij,bjd->bid", is_before.astype(rows.dtype), rows), precision=jax.lax.Precision.HIGHEST
    )
    lasts, ends = within[:, -1], of_chunks[:, -1]
    if len(lasts) > 1:
        so_far, before, goes_on = _sums_so_far(lasts, ends, num)
        of_each = jnp.repeat(before, CHUNK, axis=0)[: len(lasts)]
        lasts = so_far[: len(lasts)] + jnp.where(goes_on[: len(lasts)][:, None], of_each, 0)
    before = jnp.concatenate([jnp.zeros_like(lasts[:1]), lasts[:-1]])
    ends = jnp.concatenate([jnp.full_like(ends[:1], -1), ends[:-1]])
    goes_on = (of_chunks == ends[:, None]).reshape(-1)
    return within.reshape(-1, rows.shape[-1]), before, goes_on
