"""Adaptation of each chain by itself, as an ensemble of one chain.

The resulting kernel has a step size [chains], and a metric with leaves [chains, ...].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import Adaptation, Transition, Window, WindowStart
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True, eq=False)
class PerChainAdaptation(Adaptation):
    """Window adaptation in which every chain has a step size and a metric of its own.

    For chains that explore different regions, such as separate modes. In a mode that is much narrower
    than the others a chain accepts nothing with their step size; with its own it samples that mode.
    Chains that stay in their modes do not tell how much mass each mode has. Each chain learns from its
    own draws only, so that warm-up has to be longer than a pooled one.

    Parameters
    ----------
    adaptation
        What each chain does.
    """

    adaptation: WindowAdaptation = WindowAdaptation()  # frozen

    is_per_chain: ClassVar[bool] = True

    def with_metric(self, choose: Callable[[], Any]) -> "PerChainAdaptation":
        """Return the settings with the estimator ``choose()``, where they leave the metric open."""
        return PerChainAdaptation(self.adaptation.with_metric(choose))

    def from_mode(self) -> "PerChainAdaptation":
        """Return the settings for chains that start exactly at a mode."""
        return PerChainAdaptation(self.adaptation.from_mode())

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows, as `WindowAdaptation` does."""
        return self.adaptation.windows(num_warmup)

    def prepare(self, kernel: Kernel, states: Any) -> Kernel:
        """Return the kernel with settings that have an axis of chains."""
        if kernel.is_per_chain:
            return kernel
        kernel = self.adaptation.prepare(kernel, states)
        num_chains = len(states.log_density)
        step_size, metric = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_chains, *x.shape)),
            (kernel.step_size, kernel.inverse_mass_matrix),
        )
        return tree.replace(kernel, step_size=step_size, inverse_mass_matrix=metric, is_per_chain=True)

    def init(self, kernel: Kernel, states: Any) -> WindowState:
        """Return the state of every chain, leaves [chains, ...]."""
        return _map_chains(lambda kernel, one: self.adaptation.init(kernel, _one(one)), kernel, states)

    def begin(self, state: WindowState, kernel: Kernel, states: Any, start: WindowStart) -> WindowState:
        """Begin a window: search for the step sizes of all chains at once, each independently."""
        found = self.adaptation.searched_step_size(self.final(kernel, state), start)
        return jax.vmap(lambda s, x, e: self.adaptation.restarted(s, _one(x), e))(state, states, found)

    def tuned(self, kernel: Kernel, state: WindowState) -> Kernel:
        """Return the kernel with the current step size of each chain."""
        return self.adaptation.tuned(kernel, state)

    def update(self, state: WindowState, kernel: Kernel, transition: Transition) -> WindowState:
        """Take in one step of every chain."""

        def update(kernel, state, transition):
            return self.adaptation.update(state, kernel, _one(transition))

        return _map_chains(update, kernel, state, transition)

    def end(self, state: WindowState, kernel: Kernel, states: Any, learns_metric: bool) -> WindowState:
        """End a window: every chain learns a metric from its own moments."""

        def end(kernel, state, states):
            return self.adaptation.end(state, kernel, _one(states), learns_metric)

        return _map_chains(end, kernel, state, states)

    def final(self, kernel: Kernel, state: WindowState) -> Kernel:
        """Return the kernel with the averaged step size of each chain."""
        return self.adaptation.final(kernel, state)


def _one(chain: PyTree) -> PyTree:
    """Return the tree of one chain as that of an ensemble of one."""
    return jax.tree.map(lambda x: x[None], chain)


def _map_chains(function: Callable, kernel: Kernel, *trees: PyTree) -> PyTree:
    """Map ``function(kernel, *trees)`` over chains; of the kernel, what differs between them."""

    def of_one(step_size, metric, *one):
        own = {"step_size": step_size, "inverse_mass_matrix": metric, "is_per_chain": False}
        return function(tree.replace(kernel, **own), *one)

    return jax.vmap(of_one)(kernel.step_size, kernel.inverse_mass_matrix, *trees)
