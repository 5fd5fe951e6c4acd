"""Warm-up on the devices: windows of steps, a search for the first step size of each."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import welford
from gspmd_mcmc.adaptation.window import Window, WindowAdaptation, WindowState, find_step_size
from gspmd_mcmc.sampling.chunks import advance, bucket, no_tally, run_chunks, tally
from gspmd_mcmc.sampling.layout import Layout, Pins
from gspmd_mcmc.sampling.progress import Report, Stop

# Folded into a step's key, sets the search's random numbers apart from the step's own two keys.
SEARCH = 2


class Warmup:
    """The running warm-up of all chains.

    Parameters
    ----------
    settings
        What is adapted, and towards what.
    kernel, states
        The kernel to tune, and the chains' states, whose buffers are taken over.
    rng_key, first_step
        Step i draws from ``fold_in(rng_key, i)``; the first is ``first_step``.
    layout
        The layout of the chains.
    """

    def __init__(
        self,
        settings: WindowAdaptation,
        kernel: Any,
        states: Any,
        rng_key: jax.Array,
        first_step: int,
        layout: Layout,
    ):
        self.settings, self.rng_key, self.layout = settings, rng_key, layout
        self.kernel, self.states = kernel, states
        self._traces: dict[str, jax.Array] = {}
        self.first_step = self.num_steps = first_step
        num_chains = states.log_density.shape[0]
        self.num_divergent = np.zeros(num_chains, int)
        self.leapfrogs = 0

    def run(self, num_warmup: int, report: Report, stop: Stop) -> None:
        """Run all windows, or as many steps as there are before a stop."""
        self._traces = _no_traces(self.states, bucket(num_warmup), layout=self.layout)
        if not num_warmup:
            return
        if self.settings.adapt_mass_matrix and self.kernel.inverse_mass_matrix is None:
            identity = _identity(self.states.position, layout=self.layout)
            self.kernel = self.kernel.with_inverse_mass_matrix(identity)
        report.phase("warm-up", num_warmup)
        for window in self.settings.windows(num_warmup):
            if not stop.is_asked:
                self._run_window(window, report, stop)

    def summary(self) -> dict[str, Any]:
        """Return what `Draws.warmup` holds."""
        num_steps = self.num_steps - self.first_step
        traces = {name: np.asarray(x)[..., :num_steps] for name, x in self._traces.items()}
        return traces | {"num_divergent": self.num_divergent, "leapfrogs": self.leapfrogs}

    def _run_window(self, window: Window, report: Report, stop: Stop) -> None:
        settings, layout = self.settings, self.layout
        if settings.adapt_step_size:
            search_key = jax.random.fold_in(jax.random.fold_in(self.rng_key, self.num_steps), SEARCH)
            found = _search(self.kernel, self.states, search_key, layout=layout)
            factor = 1.0 if window.start else settings.first_step_factor
            self.kernel = self.kernel.with_step_size(found * factor)
        adaptation = _begin(self.kernel, self.states, settings=settings, layout=layout)
        self._pins = Pins.of((self.states, adaptation, self._traces))
        self._adaptation = adaptation

        run_chunks(window.end - window.start, lambda _, count: self._run_chunk(count, report), stop)
        self.kernel = settings.final(self.kernel, self._adaptation)
        if window.learns_metric and not stop.is_asked:
            metric = _metric(self._adaptation.moments, self.states.position, layout=layout)
            self.kernel = self.kernel.with_inverse_mass_matrix(metric)

    def _run_chunk(self, count: int, report: Report) -> None:
        (self.states, self._adaptation, self._traces), counts = _chunk(
            self.kernel,
            (self.states, self._adaptation, self._traces),
            self.rng_key,
            self.num_steps,
            self.num_steps - self.first_step,
            count,
            settings=self.settings,
            layout=self.layout,
            pins=self._pins,
        )
        counts = jax.device_get(counts)
        self.num_steps += count
        self.num_divergent += counts["num_divergent"]
        self.leapfrogs += int(counts["leapfrogs"])
        report.advance(
            count,
            leapfrogs=int(counts["leapfrogs"]),
            acceptance_rate=float(counts["acceptance_rate"].mean()) / count,
            divergences=int(self.num_divergent.sum()),
            step_size=float(jnp.exp(self._adaptation.step_size.log_step_size)),
        )


@partial(jax.jit, static_argnames=("settings", "layout", "pins"), donate_argnames="carry")
def _chunk(kernel, carry, rng_key, first_step, slot, count, *, settings, layout, pins):
    def body(i, carry):
        (states, adaptation, traces), counts = carry
        tuned = settings.tuned(kernel, adaptation)
        states, info = advance(tuned, rng_key, first_step + i, states, layout)
        adaptation = settings.update(adaptation, states.position, info.acceptance_rate)
        seen = {
            "step_size": tuned.step_size,
            "acceptance_rate": info.acceptance_rate,
            "log_density": states.log_density,
        }
        traces = {name: traces[name].at[..., slot + i].set(x) for name, x in seen.items()}
        return (states, adaptation, traces), tally(counts, info)

    with jax.named_scope("steps"):
        carry, counts = jax.lax.fori_loop(0, count, body, (carry, no_tally(carry[0])))
    return pins(carry), counts


@partial(jax.jit, static_argnames=("size", "layout"))
def _no_traces(states, size: int, *, layout: Layout) -> dict[str, jax.Array]:
    per_chain = layout.pin_chains(
        jnp.zeros((*states.log_density.shape, size), states.log_density.dtype)
    )
    return {
        "step_size": jnp.zeros(size, jnp.result_type(float)),
        "acceptance_rate": per_chain,
        "log_density": per_chain,
    }


@partial(jax.jit, static_argnames=("settings", "layout"))
def _begin(kernel, states, *, settings: WindowAdaptation, layout: Layout) -> WindowState:
    adaptation = settings.init(kernel.step_size, states.position)
    moments = tree.replace(
        adaptation.moments,
        mean=layout.pin(adaptation.moments.mean, layout.chain_axis),
        sum_of_squares=layout.pin(adaptation.moments.sum_of_squares, layout.chain_axis),
    )
    return tree.replace(adaptation, moments=moments)


@partial(jax.jit, static_argnames="layout")
def _search(kernel, states, rng_key, *, layout: Layout) -> jax.Array:
    def mean_acceptance_rate(kernel, key):
        return jnp.mean(
            advance(kernel, key, jnp.zeros((), jnp.int32), states, layout)[1].acceptance_rate
        )

    return find_step_size(kernel, rng_key, mean_acceptance_rate)


@partial(jax.jit, static_argnames="layout")
def _metric(moments: welford.Moments, positions, *, layout: Layout):
    variance = welford.regularised_variance(moments)
    return layout.pin(jax.tree.map(lambda v, x: v.astype(x.dtype), variance, positions))


@partial(jax.jit, static_argnames="layout")
def _identity(positions, *, layout: Layout):
    return layout.pin(jax.tree.map(lambda x: jnp.ones(x.shape[1:], x.dtype), positions))
