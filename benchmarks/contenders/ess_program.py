"""What every contender of the benchmark `ess` is: a warm-up and a run after it, both timed.

Leapfrogs are counted as the sampler itself reports them, one gradient each; gradients of a search
for the first step size are nobody's.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ess_models import MODELS

COMPILING = "/jax/core/compile/"


class Problem(NamedTuple):
    """A model with its data and the starts of all chains, [chains, ...] by name."""

    model: Any
    data: dict[str, np.ndarray]
    start: dict[str, np.ndarray]

    @classmethod
    def of(cls, task: Any) -> "Problem":
        """Return the problem of a task."""
        model = MODELS[task.model]
        data = model.load(task.data_dir)
        return cls(model, data, model.start(data, task.chains, seed=0))

    def for_peers(self) -> tuple[Callable, dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the log density, its data, and the starts, on the device."""
        log_density, data = self.model.for_peers(self.data)
        return log_density, jax.tree.map(jnp.asarray, data), jax.tree.map(jnp.asarray, self.start)


class Sampled(NamedTuple):
    """What a run after warm-up gives.

    Attributes
    ----------
    draws
        Name of each latent to its draws, [chains, draws, ...], unconstrained.
    leapfrogs
        Of each chain and draw, [chains, draws].
    """

    draws: dict[str, Any]
    leapfrogs: Any


class EssProgram:
    """A contender that the worker serves.

    Parameters
    ----------
    warm_up
        ``warm_up(rng_key)`` -> what to go on from, and the leapfrogs of all chains together.
    sample
        ``sample(rng_key, warm)`` -> `Sampled`.
    in_lock_step
        Whether the chains step as one program: then every step costs each chain the leapfrogs of the
        chain with the most.
    """

    def __init__(self, warm_up: Callable, sample: Callable, in_lock_step: bool = True):
        self.warm_up, self.sample, self.in_lock_step = warm_up, sample, in_lock_step
        self.compiling = Compiling()

    def run(self, seed: int, path: str) -> dict:
        """Warm up and sample; write the draws to a file, and return times and counts."""
        warm_key, sample_key = jax.random.split(jax.random.key(seed))
        (warm, warm_leapfrogs), warmup = self._timed(lambda: self.warm_up(warm_key))
        sampled, sampling = self._timed(lambda: self.sample(sample_key, warm))
        np.savez(path, **{name: np.asarray(x) for name, x in sampled.draws.items()})
        leapfrogs = np.asarray(sampled.leapfrogs).astype(np.int64)
        return {
            "warmup": warmup | {"leapfrogs": int(np.sum(np.asarray(warm_leapfrogs, np.int64)))},
            "sampling": sampling | counts(leapfrogs, self.in_lock_step),
        }

    def _timed(self, work: Callable) -> tuple[Any, dict[str, float]]:
        """Do the work; return seconds without those of compiling, those, and the processor's in all.

        Work runs one program after another, each waited for: what compiled while another ran would be
        taken off that one's time.
        """
        self.compiling.clear()
        start, cpu_start = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(work())
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        compiling = min(self.compiling.seconds(), seconds)
        return result, {"seconds": seconds - compiling, "compile_s": compiling, "cpu_s": cpu_s}


def counts(leapfrogs: np.ndarray, in_lock_step: bool) -> dict[str, int]:
    """Count the leapfrogs [chains, draws] that chains took, and those that were evaluated.

    In lock-step a chain whose trajectory has ended waits for the others, and the gradients that the
    program evaluates for it meanwhile are thrown away.
    """
    taken = int(leapfrogs.sum())
    evaluated = int(leapfrogs.max(axis=0).sum()) * len(leapfrogs) if in_lock_step else taken
    return {"leapfrogs": taken, "evaluated": evaluated}


class Compiling:
    """Time spent tracing and compiling, as JAX reports it: by intervals, which nest."""

    def __init__(self):
        self._intervals: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def clear(self) -> None:
        """Forget what was."""
        self._intervals.clear()

    def seconds(self) -> float:
        """Return the length of the intervals' union."""
        return union(self._intervals)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith(COMPILING):
            end = time.perf_counter()
            self._intervals.append((end - duration, end))


def union(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end)."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return float(total)


def by_chain(tree: Any) -> Any:
    """Turn what a scan over steps stacked, [draws, chains, ...], into [chains, draws, ...]."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tree)
