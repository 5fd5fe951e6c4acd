"""The contract of a sink: a place that draws are written to as they are made."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.tree import PyTree


class Sink(ABC):
    """Where `sample` writes its draws to, with ``to=``; `ZarrSink` is one.

    A run calls `reserve` before it computes anything, and `check` and `buffer_rows` when it knows the
    shapes of a draw. It calls `begin` before the first draw, `write` for each full buffer and when
    `is_due`, `flush` before each checkpoint and at the end, then `saved`; and `close`, however it ends.

    Attributes
    ----------
    path
        The folder that holds the draws.
    attributes
        What the run is, as `begin` was told.
    groups
        By name of a leaf, what the groups are called that its rows are of; the run sets it before
        `begin`. A sink may leave it.
    """

    path: Path
    attributes: dict[str, Any]
    groups: Mapping[str, GroupLabels] = MappingProxyType({})

    @abstractmethod
    def reserve(self, is_resumed: bool = False) -> None:
        """Take the folder; raise if it holds draws, unless the run continues."""

    def check(self, collected: PyTree) -> None:  # noqa: B027  a sink may take all
        """Raise unless leaves of these shapes [chains, ...] can be written."""

    @abstractmethod
    def buffer_rows(self, shapes: PyTree) -> int:
        """Return the number of draws, of these shapes [chains, ...], in each of a run's two buffers."""

    @abstractmethod
    def begin(
        self, buffers: PyTree, num_samples: int, attributes: dict[str, Any], *, first_draw: int = 0
    ) -> None:
        """Make room for draws, or continue with those that are there.

        Parameters
        ----------
        buffers
            What was collected, and the stats: leaves [chains, draws of a buffer, ...].
        num_samples
            All draws of the run, those on disk included.
        attributes
            What the run is.
        first_draw
            Draws to keep; those beyond are written again.
        """

    def is_due(self) -> bool:
        """Tell whether to write before a buffer is full; every process has the same answer."""
        return False

    @abstractmethod
    def write(self, buffers: PyTree, count: int, start: int = 0) -> None:
        """Write ``count`` draws of the buffers, from draw ``start``.

        It may return before they are written; the buffers stay as they are until the next call.
        """

    @abstractmethod
    def flush(self) -> int:
        """Wait until all draws that were given are written; return how many there are."""

    @abstractmethod
    def saved(self) -> tuple[PyTree, dict[str, Any]]:
        """Return what was collected and the stats, arrays [chains, draws, ...] of any kind."""

    def close(self) -> None:  # noqa: B027  a sink may hold nothing
        """Let the folder go; draws that were written stay. Never raises."""
