"""The result of a run: its draws, and what is needed to continue it."""

import copy
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.stuck_chains import Move
from gspmd_mcmc.diagnostics.energy import bfmi_of_steps
from gspmd_mcmc.diagnostics.summary import MAX_ROWS, Summary, summarize
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.multihost.processes import is_local
from gspmd_mcmc.storage.datatree import to_datatree
from gspmd_mcmc.tree import PyTree


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of all chains, in their layout, and what is needed to continue the run.

    Attributes
    ----------
    position
        Tree of draws, leaves [chains, draws, ...]: the parameters (`Target.params`) of the positions,
        or what ``collect`` returned. jax arrays laid out over the mesh; NumPy arrays where draws
        outgrew their share of device memory; arrays on disk, read by ``x[index]`` and
        ``np.asarray(x)``, of a run with a sink.
    stats
        Name to array [chains, draws]: the kernel's info (`Info`) and ``log_density``. With thinning,
        ``acceptance_rate`` is the mean, ``num_integration_steps`` the sum and ``is_divergent`` whether
        any, over the steps of a draw; ``energy_first``, ``energy_mean`` (less the first),
        ``energy_squares`` (about the mean) and ``energy_changes`` (squared) sum up their energies.
    warmup
        What happened in warm-up: ``step_size`` [steps], ``acceptance_rate`` and ``log_density``
        [chains, steps], ``num_divergent`` [chains], ``leapfrogs``, the number of all chains together,
        and ``moves``, a list of `Move`: the chains that could not leave where they were and took the
        state of another. Divergences of warm-up are counted here, apart from those of the draws.
    kernel
        The tuned kernel; it holds the target. None of draws that `open_draws` has read.
    state
        The last state of all chains, leaves [chains, ...]. `sample` continues from it when it is given
        these draws as ``initial_position``.
    num_steps
        All steps taken, warm-up included: the position in the sequence of random numbers.
    thin
        Steps of each draw.
    padded_rows
        Of a run on several processes, by name of a leaf: the axis of its rows, and how many of them are
        real. The others fill the mesh and copy the last real one. Leaves without pad are not named.
    groups
        By name of a leaf that has one row for each group (`Groups`): name, ``labels`` and ``sizes`` of
        the groups. Not of what ``collect`` returned.
    meanings
        What the target's functions meant when these draws were made.

    On several processes ``position`` and ``state`` stay laid out over all of them: a process holds its
    shards (``x.addressable_shards``), programs on them are run by every process, and so is `summary`.
    ``stats`` and ``warmup`` are whole on each, and what reads them alone (`acceptance_rate`, ``print``)
    one may do by itself.

    Draws pickle. Where the target has no pickle (a lambda, rows on a mesh), what is unpickled has a
    kernel without target, and arrays on the host: everything but continuing works. Start another run
    there by ``per_chain(draws.state.position)``.
    """

    position: PyTree
    stats: dict[str, Any]
    warmup: dict[str, Any]
    kernel: Kernel
    state: Any
    num_steps: int
    thin: int = 1
    padded_rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    groups: Mapping[str, GroupLabels] = field(default_factory=dict)
    meanings: tuple = field(default=(), repr=False)

    @property
    def num_chains(self) -> int:
        """The number of chains."""
        return self.stats["log_density"].shape[0]

    @property
    def num_draws(self) -> int:
        """The number of draws of each chain."""
        return self.stats["log_density"].shape[1]

    @property
    def moves(self) -> list[Move]:
        """The chains that warm-up moved: R-hat cannot see what they saw before."""
        return self.warmup.get("moves", [])

    @property
    def num_divergent(self) -> np.ndarray:
        """Divergent transitions of each chain after warm-up, shape [chains]."""
        return np.asarray(self.stats["is_divergent"]).sum(axis=1)

    @property
    def acceptance_rate(self) -> np.ndarray:
        """Mean acceptance rate of each chain after warm-up, shape [chains]."""
        return np.asarray(self.stats["acceptance_rate"]).mean(axis=1)

    @property
    def bfmi(self) -> np.ndarray:
        """E-BFMI of each chain over every step after warm-up, whatever ``thin``; shape [chains].

        Below 0.3, chains seldom visit the tails. NaN where it is not known.
        """
        return bfmi_of_steps(self.stats, self.thin)

    def to_datatree(self):
        """Return an ArviZ / xarray ``DataTree`` with groups posterior and sample_stats.

        A latent that has the name of a coordinate, such as ``chain``, gets an underscore. Latents of
        groups have the labels as a coordinate, of the name that `Groups` was given, and the rows of
        each group stand in the group constant_data.

        On several processes it holds the part of this process: its chains, and its share of leaves that
        lie over processes, with their place in the whole as coordinates. Needs the extra ``arviz``.
        """
        return to_datatree(self.position, self.stats, self.padded_rows, self.groups)

    def summary(
        self,
        num_superchains: int | None = None,
        max_rows: int = MAX_ROWS,
        groups: str | None = None,
        names: str | Iterable[str] | None = None,
    ) -> Summary:
        """Summarize the draws: a table with the worst numbers first, and warnings with what to do.

        Each device computes the statistics of its own columns. Draws on the host go there in slices.

        Parameters
        ----------
        num_superchains
            If chains started in groups of one point each, one group after the other, the number of
            groups. Nested R-hat then judges convergence, which plain R-hat cannot do for many short
            chains.
        max_rows
            Lines of the table. A leaf of over a thousand numbers has one line, ``log_density`` its own.
        groups
            The name of groups (`Groups`): the table then has a line for each group, by its label, with
            its rows, the statistics of its worst number, and the least ESS of all of its numbers. What
            is judged stays the same.
        names
            The leaves, ``"w"``, and the numbers, ``"w[3, 1]"`` or ``"effect[station=Denver]"``, that
            the table shows. By default it shows the worst of all numbers. Warnings are always about all
            numbers.

        Returns
        -------
        Summary
            ``print`` it; ``.rhat`` and others are trees like the draws.

        Raises
        ------
        ValueError, TypeError
            If superchains differ in size, a collected leaf does not hold real numbers, no latents are
            of groups of that name, or the draws have no leaf or number of a name.

        Examples
        --------
        >>> print(draws.summary(names=["mean", "sd"]))  # doctest: +SKIP
        """
        return summarize(
            self.position,
            self.stats,
            num_superchains=num_superchains,
            max_rows=max_rows,
            names=names,
            groups=groups,
            labels=self.groups,
            moves=self.moves,
            thin=self.thin,
            **self._of_kernel(),
        )

    def _of_kernel(self) -> dict[str, Any]:
        """Return what a summary asks the kernel."""
        kernel = self.kernel
        momenta, depth = kernel.draws_momenta, kernel.max_tree_depth
        return {"judges_energy": momenta, "max_tree_depth": depth, "note": kernel.note}

    def __layout_tree__(self) -> dict[str, Any]:
        """Return what `visualize` shows of a run: the draws and the last state."""
        return {"position": self.position, "state": self.state}

    def __copy__(self) -> Self:
        return replace(self)

    def __deepcopy__(self, memo: dict) -> Self:
        # Nothing changes the kernel, its target and the state.
        own = {
            name: copy.deepcopy(getattr(self, name), memo) for name in ("position", "stats", "warmup")
        }
        return replace(self, **own)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all fields, or those that can be."""
        fields = dict(vars(self))
        if not all(map(is_local, jax.tree.leaves((self.position, self.state)))):
            raise TypeError(
                "pickle: these draws lie over several processes. Write them to disk as they are made, "
                "sample(..., to=ZarrSink(path)), or keep draws.to_datatree() of each process"
            )
        try:
            # Buffers are not copied: this only asks whether it can be done.
            pickle.dumps((self.kernel, self.meanings), protocol=5, buffer_callback=lambda _: None)
        except Exception:  # Whatever the parts of a user's target raise.
            kernel = tree.replace(self.kernel, target=None)
            without = fields | {"kernel": kernel, "meanings": ()}
            return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, without)
        return fields

    def __repr__(self) -> str:
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", self.position)
        what = f"{self.num_chains} chains x {self.num_draws} draws, {shapes}"
        if not self.num_draws:
            return f"Draws({what})"
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance_rate)
        return f"Draws({what}, acceptance [{rates}], divergent {self.num_divergent.tolist()})"
