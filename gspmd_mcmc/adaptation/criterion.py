"""What trajectories are to change, for the adaptations that tune their length by it.

A criterion names functions of the position whose expected squared change over a trajectory is to be
large: E[|f' - f|²]. Positions are centred, and in units of their scales.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.tree import Pad, PyTree, like_position, pytree


class Trajectories(NamedTuple):
    """What a criterion measures trajectories by.

    Attributes
    ----------
    before, end, velocity
        Positions where they began and where they ended, and the velocities there, leaves [chains, ...].
    variances
        The squares of the positions' scales, a tree like one position.
    """

    before: PyTree
    end: PyTree
    velocity: PyTree
    variances: PyTree


class Criterion(Protocol):
    """What a trajectory is to change most: functions f of where it is."""

    def init(self, target: Any, positions: PyTree) -> Any:
        """Return the state before any step."""
        ...

    def measure(self, state: Any, trajectories: Trajectories) -> tuple[Any, jax.Array, jax.Array]:
        """Return what is for `update`, and the trajectories' |f' - f|² and their rates, [chains]."""
        ...

    def update(self, state: Any, measured: Any, trajectories: Trajectories, target: Any) -> Any:
        """Take in where the chains were."""
        ...


@pytree
@dataclass(frozen=True, eq=False)
class RunningMean:
    """The mean over chains and recent steps: of the last eighth of them, about."""

    count: jax.Array  # []
    mean: PyTree = like_position(pad=Pad.ZERO)

    @classmethod
    def of(cls, mean: PyTree) -> "RunningMean":
        """Begin at a first guess, which the first step replaces."""
        return cls(jnp.zeros(()), mean)

    def add(self, mean: PyTree) -> "RunningMean":
        """Take in one step's mean over chains."""
        weight = 1 / (1 + self.count / 8)
        moved = tree.axpy(weight, tree.sub(mean, self.mean), self.mean)
        return RunningMean(self.count + 1, moved)


@dataclass(frozen=True)
class ChangeOfSquares:
    """The ChEES criterion's f: |z|², the squared distance from the mean in units of the scales."""

    def init(self, target: Any, positions: PyTree) -> RunningMean:
        """Begin at the mean over chains."""
        return RunningMean.of(mean_of_chains(positions))

    def measure(self, state: RunningMean, trajectories: Trajectories) -> tuple[Any, Any, Any]:
        """Return nothing, the square of |z'|² - |z|², and its rate at the end."""
        before, end, velocity, variances = trajectories

        def products(before, end, velocity):
            moved, from_mean = tree.sub(end, before), tree.sub(end, state.mean)
            weigh = jax.tree.map(jnp.divide, (moved, velocity), (variances, variances))
            # Summed over differences, so that what stands still, as pads do, counts for nothing.
            both = tree.add(from_mean, tree.sub(before, state.mean))
            change, rate = tree.dot(weigh[0], both), 2 * tree.dot(weigh[1], from_mean)
            return change**2, 2 * change * rate

        return ((), *jax.vmap(products)(before, end, velocity))

    def update(
        self, state: RunningMean, measured: Any, trajectories: Trajectories, target: Any
    ) -> RunningMean:
        """Take in where the chains were."""
        return state.add(mean_of_chains(trajectories.before))


def mean_of_chains(x: PyTree) -> PyTree:
    """Return the mean over chains of leaves [chains, ...]."""
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), x)
