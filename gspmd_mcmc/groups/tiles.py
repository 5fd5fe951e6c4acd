"""Where rows of groups lie, as indices on the host: whole groups in a block.

For chips in tiles of one shape, whose groups are slices of one width after the other. For CPUs in
chunks, one group after the other, of which a tile takes as many as it likes.
"""

from dataclasses import dataclass

import numpy as np

# Groups of a tile share a width if the widest has at most so many times the rows of the narrowest.
STEP = 1.15
# Rows of a group are counted in chunks of at most so many: spreading over them is one broadcast, and
# only over chunks are there as many as there are widths, which are small and quick to compile.
MOST_CHUNK = 64
# What larger chunks, and again what smaller tiles, may cost in padding.
MOST_PADDING = 1.06
GOLDEN = (5**0.5 - 1) / 2
# Rows of a CPU's chunks, if they are not more, and what they may cost in padding. The latents of fewer
# rows are not worth copying: XLA computes them for each row again. Each row is then a chunk.
COPIES, MOST_PADDING_FOR_COPIES = (32, 16, 8), 1.12
# What chunks may cost in padding for a number of them that tiles divide.
MOST_PADDING_OF_CHUNKS = 1.01


@dataclass(frozen=True)
class Tiles:
    """What all tiles of rows of groups have in common; hashable.

    A tile's rows are [rows of a chunk, chunks]: each chunk belongs to one group.

    Attributes
    ----------
    count
        Tiles of a block.
    chunk
        Rows of a chunk.
    widths
        ``(groups, chunks of each)``, the widest first.
    """

    count: int
    chunk: int
    widths: tuple[tuple[int, int], ...]

    @property
    def slots(self) -> int:
        """Groups of a tile."""
        return sum(n for n, _ in self.widths)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.chunk * sum(n * width for n, width in self.widths)

    def slot_of_row(self) -> np.ndarray:
        """Return which of a tile's groups each of its rows belongs to, int32 [rows]."""
        parts, first = [], 0
        for n, width in self.widths:
            parts.append(np.tile(np.arange(first, first + n, dtype=np.int32), width))
            first += n
        return np.tile(np.concatenate(parts), self.chunk)


@dataclass(frozen=True)
class Chunks:
    """What all chunks of rows of groups have in common; hashable.

    The rows of a chunk follow one another, and belong to one group.

    Attributes
    ----------
    count
        Chunks of a block.
    rows
        Rows of a chunk.
    has_bare_block
        Whether a block has no rows.
    """

    count: int
    rows: int
    has_bare_block: bool


def laid_order(sizes: np.ndarray) -> np.ndarray:
    """Return which group lies at each place: any run of places has large and small ones alike.

    Multiples of the golden ratio, modulo 1, are spread evenly in every run of them; the size of the
    group at each place has the rank that the multiple has. So the order does not depend on the mesh.
    """
    spread = np.arange(len(sizes)) * GOLDEN % 1.0
    rank = np.argsort(np.argsort(spread))
    return np.argsort(-sizes, kind="stable")[rank]


@dataclass(frozen=True)
class LaidRows:
    """Rows laid with their groups, as indices on the host; see `GroupedRows`."""

    tiles: Tiles
    row: np.ndarray
    is_real: np.ndarray
    slot_group: np.ndarray
    group_slot: np.ndarray
    place_of_row: np.ndarray


@dataclass(frozen=True)
class LaidChunks:
    """Rows laid with their groups in chunks, as indices on the host; see `GroupedRows`."""

    tiles: Chunks
    row: np.ndarray
    is_real: np.ndarray
    slot_group: np.ndarray
    place_of_row: np.ndarray


def lay_chunks(place_of_row: np.ndarray, num_blocks: int, block_groups: int) -> LaidChunks:
    """Lay rows by the place of their group, in chunks."""
    sizes = np.bincount(place_of_row, minlength=num_blocks * block_groups)
    starts = np.cumsum(sizes) - sizes
    by_group = np.argsort(place_of_row, kind="stable")
    chunk = _choose_chunk(sizes)
    if chunk < max(COPIES):
        padding_allows = (n for n in COPIES if _padding(sizes, n) <= MOST_PADDING_FOR_COPIES)
        chunk = next(padding_allows, 1)
    chunks_of = -(-sizes // chunk).reshape(num_blocks, block_groups)
    count = _choose_count(max(1, int(chunks_of.sum(axis=1).max())))
    slot_group = np.zeros((num_blocks, count), np.int32)
    first_row = np.zeros(slot_group.shape, np.int64)  # of the chunk, within its group
    is_taken = np.zeros(slot_group.shape, bool)
    for block, chunks in enumerate(chunks_of):
        num = int(chunks.sum())
        # A chunk that is left over copies rows of the block's last group that has some.
        groups = np.repeat(np.arange(block_groups), chunks) if num else np.zeros(1, int)
        slot_group[block] = np.pad(groups, (0, count - len(groups)), mode="edge")
        before = np.cumsum(chunks) - chunks
        first_row[block, :num] = chunk * (np.arange(num) - before[groups][:num])
        is_taken[block, :num] = True
    place = slot_group + block_groups * np.arange(num_blocks)[:, None]
    nth = first_row[..., None] + np.arange(chunk)
    row = starts[place][..., None] + np.minimum(nth, np.maximum(sizes[place] - 1, 0)[..., None])
    is_real = ((nth < sizes[place][..., None]) & is_taken[..., None]).ravel()
    row = by_group[np.minimum(row.ravel(), len(by_group) - 1)]
    tiles = Chunks(count, chunk, not chunks_of.any(axis=1).all())
    return LaidChunks(tiles, row, is_real, slot_group, _where(row, is_real))


def lay_rows(
    place_of_row: np.ndarray,
    num_blocks: int,
    block_groups: int,
    most: int,
    steps: tuple[float, ...] = (STEP,),
    kernel_rows: float = 0.0,
) -> LaidRows:
    """Lay rows by the place of their group; tiles have about as many rows as asked.

    Of several steps the one that costs least is taken: a width costs as much as ``kernel_rows`` rows.
    """
    sizes = np.bincount(place_of_row, minlength=num_blocks * block_groups)
    starts = np.cumsum(sizes) - sizes
    by_group = np.argsort(place_of_row, kind="stable")
    of_blocks = sizes.reshape(num_blocks, block_groups)
    largest_first = np.argsort(-of_blocks, axis=1, kind="stable")
    in_order = np.take_along_axis(of_blocks, largest_first, 1)
    tiles = min(
        (_choose_tiles(in_order, most, step) for step in steps),
        key=lambda tiles: tiles.count * (tiles.rows + kernel_rows * len(tiles.widths)),
    )
    slot_group, is_taken = _fill_slots(largest_first, of_blocks, tiles)
    place = slot_group + block_groups * np.arange(num_blocks)[:, None, None]
    rows, real, first = [], [], 0
    for n, width in tiles.widths:
        # [blocks, tiles, rows of a chunk, chunks of a group, groups]
        here = place[:, :, None, None, first : first + n]
        nth = np.arange(tiles.chunk)[:, None] + tiles.chunk * np.arange(width)
        nth = nth[None, None, :, :, None]
        # A copy stands for a row that is not there; a block without any has copies of the first row.
        rows.append(starts[here] + np.minimum(nth, np.maximum(sizes[here] - 1, 0)))
        real.append((nth < sizes[here]) & is_taken[:, :, None, None, first : first + n])
        first += n
    lead = (num_blocks, tiles.count, tiles.chunk)
    row, is_real = (
        np.concatenate([x.reshape(*lead, -1) for x in parts], axis=3).ravel() for parts in (rows, real)
    )
    row = by_group[np.minimum(row, len(by_group) - 1)]
    group_slot = np.full((num_blocks, block_groups), -1)
    block, slot = np.nonzero(is_taken.reshape(num_blocks, -1))
    slots = slot_group.reshape(num_blocks, -1)
    group_slot[block, slots[block, slot]] = slot
    slot_group, group_slot = slots.astype(np.int32), group_slot.astype(np.int32)
    return LaidRows(tiles, row, is_real, slot_group, group_slot, _where(row, is_real))


def _where(row: np.ndarray, is_real: np.ndarray) -> np.ndarray:
    """Return where each row lies."""
    where = np.empty(np.count_nonzero(is_real), np.int64)
    where[row[is_real]] = np.flatnonzero(is_real)
    return where


def _choose_chunk(sizes: np.ndarray) -> int:
    """Choose the rows of a chunk: as many as pad little."""
    chunk = MOST_CHUNK
    while chunk > 1 and _padding(sizes, chunk) > MOST_PADDING:
        chunk //= 2
    return chunk


def _choose_count(num_chunks: int) -> int:
    """Choose how many chunks a block has: a multiple of as large a power of two as pads little."""
    allowed = int((MOST_PADDING_OF_CHUNKS - 1) * num_chunks)
    power = 1 << max(allowed.bit_length() - 1, 0)
    return -(-num_chunks // power) * power


def _padding(sizes: np.ndarray, chunk: int) -> float:
    """Return how many times the rows there are their chunks hold."""
    return float((-(-sizes // chunk) * chunk).sum() / max(1, sizes.sum()))


def _choose_tiles(sizes: np.ndarray, most: int, step: float) -> Tiles:
    """Cut blocks of groups, sizes [blocks, groups] with the largest first, into tiles of one shape."""
    chunk = _choose_chunk(sizes)
    whole = _tiles_of(sizes, 1, chunk, step)
    count = max(1, int(sizes.sum(axis=1).max()) // most)
    while count > 1:
        tiles = _tiles_of(sizes, count, chunk, step)
        if tiles.count * tiles.rows <= MOST_PADDING * whole.rows:
            return tiles
        count //= 2
    return whole


def _tiles_of(sizes: np.ndarray, count: int, chunk: int, step: float) -> Tiles:
    """Deal the groups of each block out to tiles; what is dealt at once has one width, the largest."""
    num = max(1, int((sizes > 0).sum(axis=1).max()))
    dealt = -(-sizes[:, :num].max(axis=0)[::count] // chunk)
    widths: list[list[int]] = []
    for width in map(int, np.maximum(dealt, 1)):
        if widths and widths[-1][1] <= step * width:
            widths[-1][0] += 1
        else:
            widths.append([1, width])
    return Tiles(count, chunk, tuple((n, width) for n, width in widths))


def _fill_slots(largest_first: np.ndarray, sizes: np.ndarray, tiles: Tiles) -> tuple:
    """Say which group each slot holds, and whether it is its own; both [blocks, tiles, slots].

    A slot that is left over holds the block's largest group again, whose likelihood is defined.
    """
    num_blocks, num = largest_first.shape[0], tiles.count * tiles.slots
    held = np.repeat(largest_first[:, :1], num, axis=1)
    few = min(num, largest_first.shape[1])
    held[:, :few] = largest_first[:, :few]
    is_taken = np.zeros((num_blocks, num), bool)
    is_taken[:, :few] = np.take_along_axis(sizes, held[:, :few], 1) > 0
    held = np.where(is_taken, held, largest_first[:, :1])
    shape = (num_blocks, tiles.slots, tiles.count)
    return tuple(x.reshape(shape).swapaxes(1, 2) for x in (held, is_taken))
