"""What draws lose in the dtype that they are stored in: each chunk is compared as it is written."""

from collections.abc import Iterator

import numpy as np

from gspmd_mcmc.diagnostics.table import element

MOST_ROUNDING = 0.05  # of the standard deviation of a number: its variance grows by a quarter percent
LEAST_DRAWS = 100  # of all chains, from which a standard deviation is judged before the run ends
BATCH = 1 << 20  # numbers that are compared at a time


class Rounding:
    """How far stored draws of a leaf are from those that were drawn, number by number.

    It keeps four numbers of each number of the leaf that this process writes, whatever the draws.
    """

    def __init__(self, name: str, dtype: np.dtype):
        self.name, self.dtype = name, dtype
        # By the place of a shard: how many draws, their mean, and sums of squares about the mean and
        # of the errors.
        self._sums: dict[tuple[int, ...], tuple] = {}
        self._num_infinite = 0
        self._told: set[str] = set()

    def add(self, place: tuple[int, ...], drawn: np.ndarray, stored: np.ndarray) -> None:
        """Compare draws [chains, draws, ...] of a shard that begins at a place of the latent axes."""
        step = max(1, BATCH * len(drawn) // max(drawn.size, 1))
        with np.errstate(all="ignore"):
            for i in range(0, len(drawn), step):
                self._add(place, *(x[i : i + step].astype(float) for x in (drawn, stored)))

    def _add(self, place: tuple[int, ...], drawn: np.ndarray, stored: np.ndarray) -> None:
        is_infinite = np.isfinite(drawn) & ~np.isfinite(stored)
        self._num_infinite += int(is_infinite.sum())
        count, mean = drawn.shape[0] * drawn.shape[1], drawn.mean(axis=(0, 1))
        squares = np.square(drawn - mean).sum(axis=(0, 1))
        errors = np.square(np.where(is_infinite, 0, stored - drawn)).sum(axis=(0, 1))
        if place in self._sums:  # Chan, Golub and LeVeque, The American Statistician 37 (1983)
            num, old_mean, old_squares, old_errors = self._sums[place]
            count, change = num + count, mean - old_mean
            squares += old_squares + np.square(change) * num * (count - num) / count
            mean = old_mean + change * (count - num) / count
            errors += old_errors
        self._sums[place] = count, mean, squares, errors

    def warnings(self, *, is_final: bool) -> Iterator[str]:
        """Yield in words what is lost and has not been told; a spread is judged from enough draws."""
        cure = "Store it as it is drawn: leave it out of ZarrSink(dtype=...)"
        name, dtype = self.name, self.dtype
        if self._num_infinite and "infinite" not in self._told:
            self._told.add("infinite")
            yield (
                f"to: {self._num_infinite} draws of {name} are beyond {np.finfo(dtype).max:.6g}, the "
                f"largest {dtype}, and were stored as infinity. {cure}"
            )
        found = [x for x in map(self._worst, self._sums.items()) if is_final or x[0] >= LEAST_DRAWS]
        count = sum(num for _, num, _, _ in found)
        if count and "rounded" not in self._told:
            self._told.add("rounded")
            _, _, worst, where = max(found, key=lambda x: x[2])
            yield (
                f"to: {dtype} is too coarse for {count} numbers of {name}: it moves their draws by up "
                f"to {worst:.2g} of their standard deviation ({where}). {cure}, or collect it without "
                "its offset, in other units"
            )

    def _worst(self, item: tuple) -> tuple[int, int, float, str]:
        """Return the draws of a shard, how many of its numbers are too coarse, and the worst error."""
        place, (count, mean, squares, errors) = item
        with np.errstate(all="ignore"):
            # A number that never changes is compared with its size.
            scale = np.where(squares > 0, squares, count * np.square(mean))
            share = np.where(errors > 0, np.sqrt(errors / scale), 0)
        share = np.nan_to_num(share, nan=0.0)
        index = np.unravel_index(int(share.argmax()), share.shape) if share.size else ()
        where = element(self.name, tuple(int(i) + at for i, at in zip(index, place, strict=True)))
        return count, int((share > MOST_ROUNDING).sum()), float(share.max(initial=0)), where
