"""Groups within groups, such as the classes of schools: numbered in each, and laid with it."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Subgroups:
    """The groups within groups; see `Groups.subgroups`.

    Attributes
    ----------
    number
        Which of its group's subgroups each row belongs to: a column for `Groups.place_rows`, int32
        [rows]. What `lookup_within` takes.
    is_there
        Which subgroups each group has: a column for `Groups.place`, False where it has fewer than the
        group with most; shape [groups, most].
    labels
        What each is called, masked where there is none; shape [groups, most].
    """

    number: np.ndarray
    is_there: np.ndarray
    labels: np.ma.MaskedArray

    def __len__(self) -> int:
        """Return how many subgroups there are in all."""
        return int(self.is_there.sum())

    def __repr__(self) -> str:
        num_groups, most = self.is_there.shape
        return f"Subgroups({len(self)} in {num_groups} groups, at most {most} in one)"


def number_within(
    group: np.ndarray, num_groups: int, inner: np.ndarray, labels: np.ndarray
) -> Subgroups:
    """Return the subgroups of each group, numbered in the order of their labels.

    Parameters
    ----------
    group, num_groups
        The group of each row, and how many groups there are.
    inner, labels
        The key of each row's subgroup as an index of the labels; one key in two groups names two.
    """
    pairs, pair_of_row = np.unique(group.astype(np.int64) * len(labels) + inner, return_inverse=True)
    of_group, label = np.divmod(pairs, len(labels))
    counts = np.bincount(of_group, minlength=num_groups)
    number = np.arange(len(pairs)) - (np.cumsum(counts) - counts)[of_group]
    is_there = np.arange(counts.max()) < counts[:, None]
    named = np.ma.MaskedArray(np.zeros(is_there.shape, labels.dtype), ~is_there)
    named[is_there] = labels[label]
    return Subgroups(number[pair_of_row].astype(np.int32), is_there, named)
