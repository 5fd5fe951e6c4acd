"""The gradient of a factor model's terms as two kernels of a GPU.

One goes over the columns of a few rows, the other over the rows of a few columns. Each makes the logits
anew, which costs less than to write and read them. Programs that go over parts of the same columns or
rows keep sums of their own, which are added up at the end: there are no atomics, and results are the
same each time.

A row's factors and a column's are lines whose product is the logit. They hold the factors in their
terms, those that are multiplied in the same place, and biases beside ones. So a residual times a line
is also what it adds to a bias.

A thread loads 16 bytes at once from a place that is a multiple of 16, and rows begin anywhere. So a
tile takes rows that begin equally far beyond such a place, every second or every sixteenth, and columns
from so much earlier that its lines begin at such places. What lies there, of the row before, is masked.
The columns of a tile are in an order in which those of a thread lie side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspmd_mcmc.fused.gpu_numbers import logistic
from gspmd_mcmc.fused.gpu_settings import settings
from gspmd_mcmc.fused.tracing import slope_of_cells
from gspmd_mcmc.targets.bfloat16_terms import NUM_FULL, bfloat16_terms, num_terms

# Rows and columns of a tile, of so few numbers that a program needs few registers and a core runs many.
SIDE = 64
ALIGNED = 16  # bytes that a thread loads at once
# As many programs as make each core of a large GPU busy; few parts of the columns or rows, as each has
# sums of its own.
PROGRAMS, MOST_PARTS = 384, 8
LEAST_LINE = 16  # that a product of a tile takes
MOST_SIDE_BY_SIDE = 128  # numbers of a line; longer ones are lines of a term each


@dataclass(frozen=True)
class Lines:
    """How lines are made of factors.

    Attributes
    ----------
    terms
        Of a number.
    of_rows, of_columns
        The terms of a factor that each line holds, side by side.
    pairs
        Which lines of rows and of columns are multiplied.
    """

    terms: int
    of_rows: tuple[tuple[int, ...], ...]
    of_columns: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...]


def lines_of(terms: int, rank: int) -> Lines:
    """Return one line that holds all products of terms side by side, or one for each term.

    What is less than the last term of a product is left out.
    """
    pairs = tuple((i, j) for i in range(terms) for j in range(terms - i))
    if len(pairs) * rank + 2 * terms <= MOST_SIDE_BY_SIDE:
        of_rows, of_columns = zip(*pairs, strict=True)
        return Lines(terms, (of_rows,), (of_columns,), ((0, 0),))
    each = tuple((i,) for i in range(terms))
    return Lines(terms, each, each, pairs)


@dataclass(frozen=True)
class Tiles:
    """Which cells a tile takes.

    Attributes
    ----------
    rows, columns
        How many there are.
    align
        Cells that a thread loads at once.
    """

    rows: int
    columns: int
    align: int

    @property
    def period(self) -> int:
        """Of so many rows one after the other each begins elsewhere between two loads."""
        return self.align // gcd(self.columns, self.align)

    @property
    def room(self) -> int:
        """Columns before the first one, and after the last, that a tile may begin or end with."""
        return self.align if self.period > 1 else 0

    @property
    def down(self) -> int:
        """Tiles of the rows that begin alike."""
        return -(-self.rows // (self.period * SIDE))

    @property
    def across(self) -> int:
        """Tiles of a row."""
        return -(-(self.columns + self.room) // SIDE)

    @property
    def height(self) -> int:
        """Rows of all tiles."""
        return self.period * self.down * SIDE


def gradients(
    term: Callable,
    cells: list[jax.Array],
    factors: tuple,
    cotangent: jax.Array,
    interpret: bool = False,
) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in rows, columns and their biases.

    Derivatives of terms in their logits are rounded to bfloat16, unless all bits of products are asked.
    """
    rows, columns, row_bias, column_bias = factors
    (num, rank), width = rows.shape, len(columns)
    lines = lines_of(num_terms(), rank)
    tiles = Tiles(num, width, max((ALIGNED // a.dtype.itemsize for a in cells), default=1))
    slope: Any = slope_of_cells(
        term, rows, cells, (SIDE, SIDE), instead={"logistic": partial(logistic, interpret=interpret)}
    )
    by_row = _in_lines(lines.of_rows, rows, row_bias, True)
    by_row = jnp.pad(by_row, ((0, 0), (0, tiles.height - num), (0, 0)))
    by_column = _in_lines(lines.of_columns, columns, column_bias, False)
    beyond = tiles.across * SIDE - width
    by_column = jnp.pad(by_column, ((0, 0), (tiles.room, beyond), (0, 0)))
    weights = jnp.pad(cotangent, (0, tiles.height - num))
    of_tile = 2 * SIDE * by_row.shape[0] * by_row.shape[2]  # bytes, of one side's lines
    step = of_tile + sum(SIDE * SIDE * a.dtype.itemsize for a in cells)

    def run(axis, of_own, others):
        """Sum over all columns for each row (axis 0), or over all rows for each column."""
        alike = tiles.period if axis else 1  # Programs go over rows that begin alike.
        parts = alike * max(1, min(others, MOST_PARTS // alike, -(-PROGRAMS // (of_own * alike))))
        length = (by_row, by_column)[axis].shape[1]
        sums = pl.pallas_call(
            partial(_kernel, slope, tiles, lines, rank, axis),
            grid=(of_own, parts),
            out_shape=jax.ShapeDtypeStruct((parts * length, rank + 1), rows.dtype),
            compiler_params=settings(step, kept=of_tile),
            interpret=interpret,
            name=("by_rows", "by_columns")[axis],
        )(*(a.reshape(-1) for a in cells), by_row, by_column, weights)
        total = jnp.sum(sums.reshape(parts, length, rank + 1), axis=0)
        return total[:, :rank], total[:, rank]

    of_rows, of_row_bias = (a[:num] for a in run(0, tiles.period * tiles.down, tiles.across))
    of_columns, of_column_bias = (
        a[tiles.room : tiles.room + width] for a in run(1, tiles.across, tiles.down)
    )
    return of_rows * cotangent[:, None], of_columns, of_row_bias * cotangent, of_column_bias


def _in_lines(
    which: tuple[tuple[int, ...], ...], factors: jax.Array, bias: jax.Array, of_rows: bool
) -> jax.Array:
    """Return lines, of shape [lines of a row or column, how many of these, padded numbers]."""
    terms = 1 + max(map(max, which))
    of_factor, of_bias = (bfloat16_terms(a, terms) for a in (factors, bias[:, None]))
    found = []
    for number, places in enumerate(which):
        side_by_side = jnp.stack([of_factor[i] for i in places], axis=2).reshape(len(factors), -1)
        biases = of_bias if len(which) == 1 else of_bias[number : number + 1]
        ones = [jnp.full_like(a, number == 0) for a in biases]
        beside = (biases, ones) if of_rows else (ones, biases)
        found.append(jnp.concatenate([side_by_side, *beside[0], *beside[1]], axis=1))
    size = found[0].shape[1]
    padded = max(LEAST_LINE, 1 << (size - 1).bit_length())
    return jnp.pad(jnp.stack(found), ((0, 0), (0, 0), (0, padded - size)))


@dataclass(frozen=True, eq=False)
class _Operands:
    """What a kernel reads of rows that begin alike.

    Attributes
    ----------
    tiles
        Which cells a tile takes.
    kind
        The first of these rows.
    cells
        Arrays of cells, one row after the other.
    of_rows, of_columns
        Lines.
    """

    tiles: Tiles
    kind: Any
    cells: list[Any]
    of_rows: Any
    of_columns: Any

    @property
    def start(self) -> Any:
        """The last place before the first cell of `kind` that a thread loads from."""
        return jax.lax.div(self.kind * self.tiles.columns, self.tiles.align) * self.tiles.align

    @property
    def shift(self) -> Any:
        """How many cells after that place the row begins."""
        return self.kind * self.tiles.columns - self.start

    def rows(self, tile: Any) -> jax.Array:
        """Return the rows of a tile."""
        return (tile * SIDE + _places()) * self.tiles.period + self.kind

    def columns(self, tile: Any) -> jax.Array:
        """Return the columns of a tile in their order; those before the first one are negative."""
        return tile * SIDE + _in_order(_places(), 0) - self.shift

    def lines_of_rows(self, tile: Any) -> list[jax.Array]:
        """Return the lines of a tile's rows."""
        at = self.rows(tile)
        return [self.of_rows[i, at, :] for i in range(self.of_rows.shape[0])]

    def lines_of_columns(self, tile: Any) -> list[jax.Array]:
        """Return the lines of a tile's columns."""
        at = self.tiles.room + self.columns(tile)
        return [self.of_columns[i, at, :] for i in range(self.of_columns.shape[0])]

    def values(self, row: Any, column: Any) -> list[jax.Array]:
        """Return a tile of each array of cells."""
        tiles, (down, right) = self.tiles, (row * SIDE + _places(), column * SIDE + _places())
        first_of_load = jax.lax.div(right, tiles.align) * tiles.align
        is_loaded = (first_of_load < tiles.columns + self.shift)[None, :]
        mask = (self.rows(row) < tiles.rows)[:, None] & is_loaded
        at = self.start + (down * (tiles.period * tiles.columns))[:, None] + right[None, :]
        return [_in_order(triton.load(a.at[at], mask=mask, other=0), 1) for a in self.cells]

    def of_cells(self, residuals: jax.Array, tile: Any, axis: int) -> jax.Array:
        """Return residuals, zero for columns (axis 0) or rows of a tile that are none.

        Only tiles at an edge have such. Sums of own rows and columns that are none are left out later.
        """
        if axis == 0:
            columns = self.columns(tile)
            is_cell = ((columns >= 0) & (columns < self.tiles.columns))[None, :]
            is_edge = (tile == 0) | ((tile + 1) * SIDE > self.tiles.columns + self.shift)
        else:
            is_cell = (self.rows(tile) < self.tiles.rows)[:, None]
            is_edge = tile == self.tiles.down - 1
        return jax.lax.cond(is_edge, lambda a: jnp.where(is_cell, a, 0.0), lambda a: a, residuals)


def _kernel(slope: Callable, tiles: Tiles, lines: Lines, rank: int, axis: int, *refs: Any) -> None:
    """Add up residuals times lines: of a tile's own rows (axis 0) or columns over a part of the others.

    Weights of rows that are a tile's own are left to whoever takes the sums.
    """
    *cells, of_rows, of_columns, weights, out = refs
    tile, part, parts = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    div, rem = jax.lax.div, jax.lax.rem
    if axis == 0:
        kind, own, begin, stride = div(tile, tiles.down), rem(tile, tiles.down), part, parts
    else:
        kind, own, begin = rem(part, tiles.period), tile, div(part, tiles.period)
        stride = parts // tiles.period
    read = _Operands(tiles, kind, cells, of_rows, of_columns)
    own_lines = read.lines_of_columns(own) if axis else read.lines_of_rows(own)

    def add(step, total):
        other = begin + step * stride
        others = read.lines_of_rows(other) if axis else read.lines_of_columns(other)
        left, right = (others, own_lines) if axis else (own_lines, others)
        logits = sum(_dot(left[i], right[j].T) for i, j in reversed(lines.pairs))
        residuals = slope(logits, *(read.values(other, own) if axis else read.values(own, other)))
        if axis == 1:
            residuals *= weights[read.rows(other)][:, None]
        residuals = read.of_cells(residuals, other, axis)
        num = NUM_FULL if lines.terms == NUM_FULL else 1
        of_residuals = bfloat16_terms(residuals, num, in_kernel=True)
        pairs = [(a, b) for i, a in enumerate(of_residuals) for b in others[: lines.terms - i]]
        return total + sum(_dot(b.T, a) if axis else _dot(a, b) for a, b in reversed(pairs))

    padded, steps = of_rows.shape[2], tiles.down if axis else tiles.across
    total = jnp.zeros((padded, SIDE) if axis else (SIDE, padded))
    total = jax.lax.fori_loop(0, div(steps - begin + stride - 1, stride), add, total)
    found, number, is_found = _of_factors(total.T if axis else total, lines, rank, axis)
    at = tiles.room + read.columns(own) if axis else read.rows(own)
    place = (part * (of_rows, of_columns)[axis].shape[1] + at)[:, None]
    triton.store(out.at[place + 0 * number, number + 0 * place], found, mask=is_found & (place >= 0))


def _places() -> jax.Array:
    return jnp.arange(SIDE, dtype=jnp.int32)


def _in_order(array: jax.Array, axis: int) -> jax.Array:
    """Order an axis so that numbers side by side are those that one thread holds of a product.

    Of eight columns of a product each of four threads holds two.
    """
    shape = array.shape
    split = array.reshape(*shape[:axis], -1, 4, SIDE // 8, 2, *shape[axis + 1 :])  # thread, step, two
    return jnp.swapaxes(split, axis + 1, axis + 2).reshape(shape)


def _of_factors(
    total: jax.Array, lines: Lines, rank: int, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return sums by factor, the factor of each column, after the last one the bias, and a mask.

    Terms that stand side by side are added by products with ones, as a tile has no slices.
    """
    own, others = (lines.of_columns, lines.of_rows) if axis else (lines.of_rows, lines.of_columns)
    num, biases = len(others[0]), lines.terms if len(others) == 1 else 1
    one = rank * num + (biases if axis else 0)
    at = jnp.arange(total.shape[1], dtype=jnp.int32)
    is_used = (at < rank * num) | (at == one)
    if num == 1:
        return total, jnp.where(at == one, rank, at)[None, :], is_used[None, :]
    factor = jnp.arange(max(LEAST_LINE, 1 << rank.bit_length()), dtype=jnp.int32)[None, :]
    is_own = (at[:, None] == one) & (factor == rank)
    for place in (i for i, term in enumerate(own[0]) if term == 0):  # each term of the others once
        is_own |= (at[:, None] == factor * num + place) & (factor < rank)
    ones = jnp.where(is_own, 1.0, 0.0).astype(jnp.bfloat16)
    # Biases may be so large that sums of them are infinite, which times zero is no number.
    terms = bfloat16_terms(jnp.where(is_used, total, 0.0), NUM_FULL, in_kernel=True)
    found = sum((_dot(a, ones) for a in reversed(terms[:-1])), start=_dot(terms[-1], ones))
    return found, factor, factor <= rank


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
