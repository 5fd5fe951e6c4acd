"""nutpie: its sampler in Rust, a thread for each chain, on a log density that JAX compiled.

A leapfrog calls back into Python for one chain, and no chain waits for another. The sampler computes
in float64, the log density in float32 as everybody's. One call makes warm-up and draws; its time is
parted in proportion to their leapfrogs.
"""

import time

import jax
import numpy as np
import nutpie
from jax.flatten_util import ravel_pytree
from nutpie.compiled_pyfunc import from_pyfunc

from benchmarks.contenders.ess_program import Compiling, Problem, counts

DISTRIBUTIONS = ("nutpie",)


def nuts(task) -> "Nutpie":
    """NUTS with its defaults: a diagonal metric from draws and gradients, for each chain."""
    return Nutpie(task)


class Nutpie:
    """A contender that the worker serves, as `EssProgram` is."""

    def __init__(self, task):
        log_density, self.data, self.start = Problem.of(task).for_peers()
        self.task, self.compiling = task, Compiling()
        first, self.unravel = ravel_pytree(jax.tree.map(lambda x: x[0], self.start))
        self.size, unravel = first.size, self.unravel
        self.gradient = jax.jit(jax.value_and_grad(lambda x, data: log_density(unravel(x), data)))

    def run(self, seed: int, path: str) -> dict:
        """Warm up and sample; write the draws to a file, and return times and counts."""
        compile_s = self._compile()
        start = time.perf_counter()
        trace = nutpie.sample(
            self._model(),
            draws=self.task.num_samples,
            tune=self.task.num_warmup,
            chains=self.task.chains,
            seed=seed,
            progress_bar=False,
        )
        seconds = time.perf_counter() - start
        draws = np.asarray(trace.posterior["position"], np.float32)
        np.savez(path, **jax.tree.map(np.asarray, jax.vmap(jax.vmap(self.unravel))(draws)))
        warm = int(np.nansum(np.asarray(trace.warmup_sample_stats["n_steps"])))
        counted = counts(np.asarray(trace.sample_stats["n_steps"]).astype(np.int64), False)
        share = warm / (warm + counted["leapfrogs"])
        return {
            "warmup": {"seconds": share * seconds, "compile_s": compile_s, "leapfrogs": warm},
            "sampling": {"seconds": (1 - share) * seconds, "compile_s": 0.0} | counted,
        }

    def _compile(self) -> float:
        self.compiling.clear()
        self._log_density(np.zeros(self.size))
        return self.compiling.seconds()

    def _log_density(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = self.gradient(x.astype(np.float32), self.data)
        return float(value), np.asarray(gradient, np.float64)

    def _model(self):
        """Return the log density as nutpie takes it, started where a chain of the others starts."""
        starts = np.asarray(jax.vmap(lambda x: ravel_pytree(x)[0])(self.start), np.float64)
        return from_pyfunc(
            ndim=self.size,
            make_logp_fn=lambda: self._log_density,
            make_expand_fn=lambda *seeds_and_chain: lambda x: {"position": x},
            expanded_dtypes=[np.dtype(np.float64)],
            expanded_shapes=[(self.size,)],
            expanded_names=["position"],
            make_initial_point_fn=lambda seed: starts[seed % len(starts)],
        )
