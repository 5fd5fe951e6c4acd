"""Adaptation of each chain by itself: an ensemble of one chain, as many times as there are chains.

The kernel that comes of it has a step size [chains], and a metric with leaves [chains, ...].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.adaptation import AcceptanceRates, Adaptation, Transition, Window
from gspmd_mcmc.adaptation.step_size_search import find_step_size
from gspmd_mcmc.adaptation.window import WindowAdaptation, WindowState
from gspmd_mcmc.tree import PyTree, pytree


@pytree
@dataclass(frozen=True, eq=False)
class PerChainAdaptation(Adaptation):
    """Window adaptation in which every chain has a step size and a metric of its own.

    For chains that are to explore different regions, such as modes apart. In a mode that is much
    narrower than the others a chain accepts nothing with their step size; with its own it samples that
    mode. How much mass each mode has, chains that stay in theirs do not tell. Chains share nothing:
    each learns from its own draws only, so that warm-up has to be longer than a pooled one.

    Parameters
    ----------
    adaptation
        What each chain does.
    """

    adaptation: WindowAdaptation = WindowAdaptation()  # frozen

    is_per_chain: ClassVar[bool] = True

    def with_metric(self, choose: Callable[[], Any]) -> "PerChainAdaptation":
        """Return the settings with the estimator that each chain's leave open."""
        return PerChainAdaptation(self.adaptation.with_metric(choose))

    def from_mode(self) -> "PerChainAdaptation":
        """Return the settings for chains that start exactly at a mode."""
        return PerChainAdaptation(self.adaptation.from_mode())

    def windows(self, num_warmup: int) -> list[Window]:
        """Cut warm-up into windows, as the pooled form does."""
        return self.adaptation.windows(num_warmup)

    def prepare(self, kernel: Any, states: Any) -> Any:
        """Return the kernel with settings that have an axis of chains."""
        if kernel.is_per_chain:
            return kernel
        kernel = self.adaptation.prepare(kernel, states)
        num_chains = len(states.log_density)
        settings = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_chains, *x.shape)),
            (kernel.step_size, kernel.inverse_mass_matrix),
        )
        return tree.replace(
            kernel, step_size=settings[0], inverse_mass_matrix=settings[1], is_per_chain=True
        )

    def init(self, kernel: Any, states: Any) -> WindowState:
        """Return the state of every chain, leaves [chains, ...]."""
        return map_chains(self._init, kernel, states)

    def begin(
        self,
        state: WindowState,
        kernel: Any,
        states: Any,
        is_first: jax.Array,
        rng_key: jax.Array,
        acceptance_rates: AcceptanceRates,
    ) -> WindowState:
        """Begin a window: the step sizes of all chains are searched at once, each for itself."""
        found = kernel.step_size
        if self.adaptation.adapt_step_size:
            found = find_step_size(self.final(kernel, state), rng_key, acceptance_rates)
            found = found * jnp.where(is_first, self.adaptation.first_step_factor, 1.0)
        return jax.vmap(lambda s, x, e: self.adaptation.restarted(s, _one(x), e))(state, states, found)

    def tuned(self, kernel: Any, state: WindowState) -> Any:
        """Return the kernel with each chain's step size of this moment."""
        return self._settings(self.adaptation.tuned, kernel, state)

    def update(self, state: WindowState, kernel: Any, transition: Transition) -> WindowState:
        """Take in one step: every chain its own."""

        def update(kernel, state, transition):
            return self.adaptation.update(state, kernel, _one(transition))

        return map_chains(update, kernel, state, transition)

    def end(self, state: WindowState, kernel: Any, states: Any, learns_metric: bool) -> WindowState:
        """End a window: every chain's metric is that of its own moments."""

        def end(kernel, state, states):
            return self.adaptation.end(state, kernel, _one(states), learns_metric)

        return map_chains(end, kernel, state, states)

    def final(self, kernel: Any, state: WindowState) -> Any:
        """Return the kernel with each chain's averaged step size."""
        return self._settings(self.adaptation.final, kernel, state)

    def _init(self, kernel: Any, states: Any) -> WindowState:
        return self.adaptation.init(kernel, _one(states))

    def _settings(self, function: Callable, kernel: Any, state: WindowState) -> Any:
        def settings(kernel, state):
            tuned = function(kernel, state)
            return tuned.step_size, tuned.inverse_mass_matrix

        step_size, metric = map_chains(settings, kernel, state)
        return tree.replace(kernel, step_size=step_size, inverse_mass_matrix=metric)


def _one(chain: PyTree) -> PyTree:
    """Return one chain's tree as that of an ensemble of one."""
    return jax.tree.map(lambda x: x[None], chain)


def map_chains(function: Callable, kernel: Any, *trees: PyTree, vmap: Callable = jax.vmap) -> PyTree:
    """Map ``function(kernel, *trees)`` over chains; of the kernel only what differs between them.

    Parameters
    ----------
    function
        A function of one chain's kernel and trees.
    kernel
        The kernel of all chains, or one whose settings have an axis of chains.
    *trees
        Trees with leaves [chains, ...].
    vmap
        ``vmap(function, in_axes)``.
    """
    if not kernel.is_per_chain:
        return vmap(lambda *one: function(kernel, *one), (0,) * len(trees))(*trees)

    def of_one(step_size, metric, *one):
        own = {"step_size": step_size, "inverse_mass_matrix": metric, "is_per_chain": False}
        return function(tree.replace(kernel, **own), *one)

    settings = (kernel.step_size, kernel.inverse_mass_matrix)
    return vmap(of_one, (0,) * (2 + len(trees)))(*settings, *trees)
