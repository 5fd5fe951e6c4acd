"""Which numbers of a run are drawn: they have names, are chosen sparingly, and fetched alone."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.table import free_name, named_leaves
from gspmd_mcmc.multihost.processes import to_host

LOG_DENSITY = "log_density"


class Elements(NamedTuple):
    """Traces of scalars, and what was left out.

    Attributes
    ----------
    traces
        Name, such as ``w[3, 2]``, to float64 [chains, draws] on the host.
    note
        How many of how many are there: for the title of a figure.
    """

    traces: dict[str, np.ndarray]
    note: str


class _Source(NamedTuple):
    """A leaf or a stat, [chains, draws, ...], and the shape of a draw of it: without pad."""

    values: Any
    shape: tuple[int, ...]


class _Wanted(NamedTuple):
    """Elements of one leaf: their indices, or as many as there is room for of a range of them."""

    leaf: str
    prefix: tuple[int, ...] = ()
    is_single: bool = False


def choose(draws: Any, names: str | Sequence[str] | None, limit: int) -> Elements:
    """Choose elements of the leaves and stats of a run, and fetch them.

    Parameters
    ----------
    draws
        With ``position``, a tree of leaves [chains, draws, ...], and ``stats``, [chains, draws].
    names
        Leaves (``w``), parts of them (``w[3]``), elements (``w[3, 2]``), stats (``energy``); None is
        the log density and every leaf. Elements named one by one are all taken; of what is larger,
        as many as ``limit`` leaves room for, evenly spread from the first element to the last.
    limit
        How many elements at most, if the names leave a choice.

    Raises
    ------
    ValueError
        If a name is not there, or an index is out of range; the message lists what is there. If
        there are no draws.
    TypeError
        If a named leaf is not of real numbers.
    """
    require_draws(draws)
    sources = _sources(draws)
    wanted = _default(draws, sources) if names is None else _named(names, sources)
    if not wanted:
        raise ValueError("names: expected at least one name, got none")
    sizes = np.array([_size(sources[w.leaf], len(w.prefix)) for w in wanted])
    counts = _counts(wanted, sizes, limit)
    traces: dict[str, np.ndarray] = {}
    for want, count in zip(wanted, counts, strict=True):
        source = sources[want.leaf]
        index = _spread(want.prefix, source.shape, count)
        labels = [_label(want.leaf, i) for i in index]
        traces |= dict(zip(labels, _fetch(source.values, index), strict=True))
    return Elements(traces, _note(wanted, sizes, counts))


def require_draws(draws: Any) -> None:
    """Raise if a run has no draw to show."""
    if draws.num_draws == 0:
        raise ValueError(
            "draws: expected at least one draw of each chain, got none (num_samples=0, or a run "
            "stopped before its first draw); plots.warmup shows the warm-up of such a run"
        )


def _sources(draws: Any) -> dict[str, _Source]:
    """Name to what is there of it; a leaf keeps its name where a stat has the same."""
    sources: dict[str, _Source] = {}
    for name, leaf in named_leaves(draws.position).items():
        rows = getattr(draws, "padded_rows", {}).get(name)
        shape = leaf.shape[2:] if rows is None else (rows, *leaf.shape[3:])
        sources[name] = _Source(leaf, shape)
    for name, stat in draws.stats.items():
        sources[free_name(name, sources)] = _Source(stat, stat.shape[2:])
    return sources


def _default(draws: Any, sources: dict[str, _Source]) -> list[_Wanted]:
    """Return the log density and all leaves that can be drawn."""
    leaves = list(sources)[: len(sources) - len(draws.stats)]
    stat = draws.stats[LOG_DENSITY]
    log_density = next((n for n, x in sources.items() if x.values is stat), LOG_DENSITY)
    drawn = [name for name in leaves if _is_real(sources[name].values) and _size(sources[name])]
    return [_Wanted(log_density, is_single=True), *(_Wanted(name) for name in drawn)]


def _named(names: str | Sequence[str], sources: dict[str, _Source]) -> list[_Wanted]:
    return [_parse(name, sources) for name in ([names] if isinstance(names, str) else names)]


def _parse(name: str, sources: dict[str, _Source]) -> _Wanted:
    """Read ``w``, ``w[3]`` or ``w[3, 2]``."""
    match = None if name in sources else re.fullmatch(r"(.+)\[(\s*-?\d+(?:\s*,\s*-?\d+)*\s*)\]", name)
    leaf, text = match.groups() if match else (name, "")
    if leaf not in sources:
        there = ", ".join(f"{n}{list(x.shape) or ''}" for n, x in sources.items())
        raise ValueError(f"names: expected names of leaves or stats, got {name!r}; there are {there}")
    source = sources[leaf]
    if not _is_real(source.values):
        raise TypeError(
            f"names: {leaf} is of {source.values.dtype}, expected real numbers; let `collect` return "
            "its real and imaginary part, or another real number of it"
        )
    shape = source.shape
    prefix = tuple(int(i) for i in text.split(",")) if text else ()
    fits = len(prefix) <= len(shape) and all(-n <= i < n for i, n in zip(prefix, shape, strict=False))
    if not fits or not _size(source):
        raise ValueError(f"names: no element {name!r}; a draw of {leaf} has shape {list(shape)}")
    prefix = tuple(i % n for i, n in zip(prefix, shape, strict=False))
    return _Wanted(leaf, prefix, is_single=len(prefix) == len(shape))


def _is_real(leaf: Any) -> bool:
    return leaf.dtype == bool or (
        jnp.issubdtype(leaf.dtype, jnp.number) and not jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    )


def _size(source: _Source, num_fixed: int = 0) -> int:
    """Return how many elements a draw has, under some fixed indices."""
    return int(np.prod(source.shape[num_fixed:], dtype=int))


def _counts(wanted: list[_Wanted], sizes: np.ndarray, limit: int) -> np.ndarray:
    """Return how many elements to take of each: ``limit`` in all, if single ones leave room."""
    is_single = np.array([w.is_single for w in wanted])
    room = max(limit - is_single.sum(), 0 if is_single.any() else 1)
    counts = np.ones(len(wanted), int)
    counts[~is_single] = _share(sizes[~is_single], room)
    return counts


def _spread(prefix: tuple[int, ...], shape: tuple[int, ...], count: int) -> np.ndarray:
    """Return indices [elements, axes] that are evenly spread over what a prefix leaves open."""
    rest = shape[len(prefix) :]
    flat = np.linspace(0, np.prod(rest, dtype=int) - 1, count).round().astype(int)
    open_axes = np.stack(np.unravel_index(flat, rest), axis=1) if rest else flat[:, None][:, :0]
    return np.concatenate([np.tile(np.array(prefix, int), (count, 1)), open_axes], axis=1)


def _share(sizes: np.ndarray, room: int) -> np.ndarray:
    """Share room among leaves: each has the same number, less what it is too small for.

    Leaves for which there is no room are left out, evenly over the tree.
    """
    if not len(sizes):
        return np.zeros(0, int)
    if room < len(sizes):
        counts = np.zeros(len(sizes), int)
        counts[np.linspace(0, len(sizes) - 1, room).round().astype(int)] = 1
        return counts
    each = max(k for k in range(1, room + 1) if np.minimum(sizes, k).sum() <= room)
    return np.minimum(sizes, each)


def _label(leaf: str, index: np.ndarray) -> str:
    return f"{leaf}{index.tolist()}" if len(index) else leaf


def _fetch(leaf: Any, index: np.ndarray) -> np.ndarray:
    """Copy elements of a leaf to the host, [elements, chains, draws]."""
    if not len(index):
        return np.zeros((0, *leaf.shape[:2]))
    taken = np.asarray(to_host(_take(leaf, index)))
    return np.moveaxis(taken.astype(np.float64), -1, 0)


def _take(leaf: Any, index: Any) -> Any:
    """Gather elements where the leaf lies, [chains, draws, elements]: nothing else of it moves."""
    return leaf[(slice(None), slice(None), *index.T)] if leaf.ndim > 2 else leaf[:, :, None]


def _note(wanted: list[_Wanted], sizes: np.ndarray, counts: np.ndarray) -> str:
    """Say how much is shown of what was not named element by element."""
    is_range = np.array([not w.is_single for w in wanted])
    shown, there = counts[is_range].sum(), sizes[is_range].sum()
    return "" if shown == there else f"{shown} of {there:,} elements, spread over the leaves"
