"""Which elements of a run are drawn: chosen by name, or evenly spread, and fetched alone."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics.table import element, free_name, named_leaves
from gspmd_mcmc.multihost.processes import to_host

LOG_DENSITY = "log_density"


class Elements(NamedTuple):
    """Traces of scalars, and how many were left out."""

    traces: dict[str, np.ndarray]  # name, such as ``w[3, 2]``, to float64 [chains, draws]
    note: str  # how many elements of how many these are, for the title of a figure


class _Source(NamedTuple):
    """A leaf or a stat, [chains, draws, ...], and the shape of one draw without padding."""

    values: Any
    shape: tuple[int, ...]

    @property
    def is_real(self) -> bool:
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        return any(jnp.issubdtype(self.values.dtype, kind) for kind in kinds)


class _Choice(NamedTuple):
    """The elements of a leaf whose index begins with ``prefix``; all or some, or a single one."""

    leaf: str
    source: _Source
    prefix: tuple[int, ...] = ()
    is_single: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.source.shape[len(self.prefix) :], dtype=int))


def choose(draws: Any, names: str | Sequence[str] | None, limit: int) -> Elements:
    """Choose elements of the leaves and stats of a run, and fetch them.

    Elements named one by one are all taken; of larger leaves as many as ``limit`` leaves room for,
    evenly spread from first to last. No names mean the log density and every leaf of real numbers.
    """
    require_draws(draws)
    sources = _sources(draws)
    names = [names] if isinstance(names, str) else names
    choices = _default(draws, sources) if names is None else [_parse(name, sources) for name in names]
    if not choices:
        raise ValueError("names: expected at least one name, got none")
    is_single = np.array([choice.is_single for choice in choices])
    sizes = np.array([choice.size for choice in choices])
    counts = np.ones(len(choices), int)
    room = max(limit - is_single.sum(), 0 if is_single.any() else 1)
    counts[~is_single] = _share(sizes[~is_single], room)
    traces: dict[str, np.ndarray] = {}
    for choice, count in zip(choices, counts, strict=True):
        index = _spread(choice.prefix, choice.source.shape, count)
        if count:
            labels = [element(choice.leaf, tuple(i)) for i in index.tolist()]
            taken = np.asarray(to_host(_take(choice.source.values, index)), np.float64)
            traces |= dict(zip(labels, np.moveaxis(taken, -1, 0), strict=True))
    shown, total = counts[~is_single].sum(), sizes[~is_single].sum()
    note = "" if shown == total else f"{shown} of {total:,} elements, spread over the leaves"
    return Elements(traces, note)


def require_draws(draws: Any) -> None:
    """Raise if a run has no draw to show."""
    if draws.num_draws == 0:
        raise ValueError(
            "draws: expected at least one draw of each chain, got none (num_samples=0, or a run "
            "stopped before its first draw); plots.warmup shows the warm-up of such a run"
        )


def _sources(draws: Any) -> dict[str, _Source]:
    """Return leaves and stats by name; a leaf keeps its name where a stat has the same."""
    sources: dict[str, _Source] = {}
    for name, leaf in named_leaves(draws.position).items():
        shape = list(leaf.shape)
        if name in getattr(draws, "padded_rows", {}):
            axis, num_rows = draws.padded_rows[name]
            shape[axis] = num_rows
        sources[name] = _Source(leaf, tuple(shape[2:]))
    for name, stat in draws.stats.items():
        sources[free_name(name, sources)] = _Source(stat, stat.shape[2:])
    return sources


def _default(draws: Any, sources: dict[str, _Source]) -> list[_Choice]:
    """Return the log density and all leaves that can be drawn."""
    stat = draws.stats[LOG_DENSITY]
    log_density = next((n for n, s in sources.items() if s.values is stat), LOG_DENSITY)
    leaves = list(sources)[: len(sources) - len(draws.stats)]
    choices = [_Choice(name, sources[name]) for name in leaves if sources[name].is_real]
    log_density_alone = _Choice(log_density, sources[log_density], is_single=True)
    return [log_density_alone, *(c for c in choices if c.size)]


def _parse(name: str, sources: dict[str, _Source]) -> _Choice:
    """Read ``w``, ``w[3]`` or ``w[3, 2]``."""
    match = None if name in sources else re.fullmatch(r"(.+)\[(\s*-?\d+(?:\s*,\s*-?\d+)*\s*)\]", name)
    leaf, text = match.groups() if match else (name, "")
    if leaf not in sources:
        known = ", ".join(f"{n}{list(x.shape) or ''}" for n, x in sources.items())
        raise ValueError(f"names: expected names of leaves or stats, got {name!r}; there are {known}")
    source = sources[leaf]
    if not source.is_real:
        raise TypeError(
            f"names: {leaf} is of {source.values.dtype}, expected real numbers; let `collect` return "
            "its real and imaginary parts, or another real number of it"
        )
    shape = source.shape
    prefix = tuple(int(i) for i in text.split(",")) if text else ()
    fits = len(prefix) <= len(shape) and all(-n <= i < n for i, n in zip(prefix, shape, strict=False))
    prefix = tuple(i % max(n, 1) for i, n in zip(prefix, shape, strict=False))
    choice = _Choice(leaf, source, prefix, is_single=len(prefix) == len(shape))
    if not fits or not choice.size:
        raise ValueError(f"names: no element {name!r}; a draw of {leaf} has shape {list(shape)}")
    return choice


def _share(sizes: np.ndarray, room: int) -> np.ndarray:
    """Share room among leaves: each has the same number, or all that it has if that is less.

    Leaves for which there is no room are left out, evenly over the tree.
    """
    if room < len(sizes):
        counts = np.zeros(len(sizes), int)
        counts[np.linspace(0, len(sizes) - 1, room).round().astype(int)] = 1
        return counts
    fitting = [k for k in range(1, room + 1) if np.minimum(sizes, k).sum() <= room]
    return np.minimum(sizes, fitting[-1]) if len(sizes) else sizes


def _spread(prefix: tuple[int, ...], shape: tuple[int, ...], count: int) -> np.ndarray:
    """Return indices [elements, axes] that are evenly spread over what a prefix leaves open."""
    rest = shape[len(prefix) :]
    flat = np.linspace(0, np.prod(rest, dtype=int) - 1, count).round().astype(int)
    open_axes = np.stack(np.unravel_index(flat, rest), axis=1) if rest else flat[:, None][:, :0]
    return np.concatenate([np.tile(np.array(prefix, int), (count, 1)), open_axes], axis=1)


def _take(leaf: Any, index: Any) -> Any:
    """Gather elements where the leaf lies, [chains, draws, elements]: nothing else of it moves."""
    return leaf[(slice(None), slice(None), *index.T)] if leaf.ndim > 2 else leaf[:, :, None]
