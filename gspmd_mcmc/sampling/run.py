"""A run as a thing with a state, which can be saved and put back between any two chunks."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.adaptation.stuck_chains import Move
from gspmd_mcmc.sampling.collecting import Collecting
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.errors import SamplingWarning
from gspmd_mcmc.sampling.layout import Layout
from gspmd_mcmc.sampling.progress import Report, Stop
from gspmd_mcmc.sampling.warmup import Warmup
from gspmd_mcmc.storage.saved_draws import SavedDraws
from gspmd_mcmc.storage.zarr_store import ZarrSink
from gspmd_mcmc.targets.retracing import changes, meanings
from gspmd_mcmc.tree import PyTree


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run is to do, and keep of it; see `sample`."""

    adaptation: Adaptation
    collect: Partial
    num_warmup: int
    num_samples: int
    thin: int
    device_bytes: int | None
    attributes: dict[str, Any]  # what the store of its draws says of it


class Run:
    """Warm-up and sampling of all chains.

    Parameters
    ----------
    plan
        What is to be done.
    kernel, states
        The kernel to tune, and the chains' states, whose buffers are taken over.
    rng_key, first_step
        Step i draws from ``fold_in(rng_key, i)``; the first is ``first_step``.
    layout
        The layout of the chains.
    sink
        Where draws are written as they are made, if anywhere.
    moves
        Of chains in the warm-up of an earlier run that this one goes on from.
    """

    def __init__(
        self,
        plan: Plan,
        kernel: Any,
        states: Any,
        rng_key: jax.Array,
        first_step: int,
        layout: Layout,
        sink: ZarrSink | None = None,
        moves: Sequence[Move] = (),
    ):
        self.plan, self.rng_key, self.layout, self.sink = plan, rng_key, layout, sink
        self.is_resumed = False
        self.warmup = Warmup(plan.adaptation, kernel, states, rng_key, first_step, layout, moves)
        self.collecting: Collecting | None = None

    def go(self, report: Report, stop: Stop, after: Any = lambda: None) -> Draws:
        """Run to the end, or to a stop; call ``after`` when a chunk has ended.

        Returns
        -------
        Draws
            Those that were made.
        """
        plan = self.plan
        self._meanings = meanings((self.target, plan.collect))

        def after_chunk() -> None:
            after()
            self._end_if_changed(stop)

        if self.collecting is None:
            self.warmup.run(plan.num_warmup, report, stop, after_chunk)
            self.collecting = self._collecting()
        attributes = plan.attributes | {"moves": json.dumps(self.warmup.moves)}
        self.collecting.run(plan.num_samples, plan.device_bytes, report, stop, after_chunk, attributes)
        return self._draws(self.collecting)

    def _end_if_changed(self, stop: Stop) -> None:
        """End the run where the next chunk would be of another model than those before."""
        what = "" if stop.is_asked else changes(self._meanings)
        if what:
            stop.end()
            warnings.warn(
                f"the target changed while the run was going on ({what}), so it ends here: draws until "
                "now are of the target that it began with. A callback may not set what a target reads",
                SamplingWarning,
                stacklevel=2,
            )

    def _draws(self, collecting: Collecting) -> Draws:
        collected, stats, padded_rows = collecting.draws()
        draws = Draws(
            position=collected,
            stats=stats,
            warmup=self.warmup.summary(),
            kernel=collecting.kernel,
            state=collecting.states,
            num_steps=collecting.num_steps,
            padded_rows=padded_rows,
            meanings=self._meanings,
        )
        if self.sink is None:
            return draws
        return SavedDraws(**vars(draws), path=self.sink.path, attributes=self.sink.attributes)

    def require_room(self) -> None:
        """Raise, on every process, unless the devices hold all draws."""
        self._collecting().require_room(self.plan.num_samples, self.plan.device_bytes)

    @property
    def phase(self) -> Warmup | Collecting:
        """Warm-up until it is over, then sampling."""
        return self.warmup if self.collecting is None else self.collecting

    @property
    def target(self) -> Any:
        """The target."""
        return self.phase.kernel.target

    def flush(self) -> None:
        """Wait until all draws that were made are on disk, where that is where they go."""
        if self.collecting is not None:
            self.collecting.flush()

    def state(self) -> tuple[PyTree, dict[str, Any]]:
        """Return all that the rest of the run depends on: a tree of arrays, and counts.

        The kernel is without its target, whose data and functions are given anew to a resumed run.
        """
        phase = self.phase
        arrays = {
            "kernel": tree.replace(phase.kernel, target=None),
            "states": phase.states,
            "adaptation": self.warmup.state if self.collecting is None else None,
            "traces": self.warmup.traces,
            "rng_key": jax.random.key_data(self.rng_key),
        }
        sampling = None if self.collecting is None else self.collecting.counts()
        return arrays, {"warmup": self.warmup.counts(), "sampling": sampling}

    def put_back(self, arrays: PyTree, counts: dict[str, Any]) -> None:
        """Go on from the `state` of another such run."""
        self.is_resumed = True
        self.warmup.put_back(arrays["adaptation"], arrays["traces"], counts["warmup"])
        if counts["sampling"] is not None:
            self.collecting = self._collecting()
            self.collecting.put_back(counts["sampling"])

    def _collecting(self) -> Collecting:
        warmup, plan = self.warmup, self.plan
        return Collecting(
            warmup.kernel,
            warmup.states,
            self.rng_key,
            warmup.num_steps,
            collect=plan.collect,
            thin=plan.thin,
            layout=self.layout,
            sink=self.sink,
            is_resumed=self.is_resumed,
        )
