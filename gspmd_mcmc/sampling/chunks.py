"""Chunks of steps, each about a second long: one program whatever their length."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc.adaptation.per_chain import map_chains
from gspmd_mcmc.sampling.layout import Layout
from gspmd_mcmc.sampling.progress import Stop

CHUNK_SECONDS = 1.0
# What a chunk may be expected to take that is more than `MOST_GROWTH` times as long as the one before:
# were its steps a hundred times as slow, it would still end soon.
SHORT_SECONDS = 0.05
MOST_GROWTH = 8


def run_chunks(
    num_steps: int,
    run: Callable[[int, int], None],
    stop: Stop,
    capacity: int | None = None,
    *,
    after: Callable[[], None],
    done: int = 0,
    size: int = 1,
) -> int:
    """Run steps in chunks sized to about a second, until done or asked to stop.

    Parameters
    ----------
    num_steps
        Steps in all.
    run
        ``run(start, count)``: take ``count`` steps from step ``start``, and wait for them.
    stop
        Looked at between chunks.
    capacity
        Chunks do not straddle multiples of it.
    after
        Called when a chunk has ended.
    done
        Steps that were taken before.
    size
        Steps of the first chunk: one, or what `run_chunks` has returned of steps like these.

    Returns
    -------
    int
        What the size of the next chunk would be.
    """
    while done < num_steps and not stop.is_asked:
        room = num_steps if capacity is None else capacity - done % capacity
        count = min(size, num_steps - done, room)
        began = time.perf_counter()
        run(done, count)
        done += count
        size = stop.agreed(next_size(count, time.perf_counter() - began))
        after()
    return size


def next_size(count: int, seconds: float) -> int:
    """Size the next chunk by what the last one took; a long one grows by `MOST_GROWTH` at most."""
    in_a_second = count / max(seconds, 1e-9)
    most = max(MOST_GROWTH * count, int(SHORT_SECONDS * in_a_second))
    return max(1, min(int(CHUNK_SECONDS * in_a_second), most))


def bucket(count: int) -> int:
    """Round a count up to three binary digits, so that few counts need a program of their own."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -(-count // step) * step


def draw_kernel(kernel: Any, rng_key: jax.Array, step: jax.Array) -> tuple[Any, jax.Array]:
    """Draw what all chains share at step number ``step``; return that kernel, and the chains' key.

    What is drawn once for all chains (the trajectory's length) is drawn outside the map over chains:
    were it to differ between them, every leapfrog would have to ask every chain whether to go on.
    """
    shared_key, chains_key = jax.random.split(jax.random.fold_in(rng_key, step))
    return kernel.drawn(shared_key, step), chains_key


@partial(jax.jit, static_argnames=("layout", "method"), inline=True)
def step_chains(kernel: Any, rng_key: jax.Array, states: Any, layout: Layout, method: str):
    """Step every chain, each with the key of its number, by that method of the kernel.

    A run's programs that step chains share one trace of a step, which `jax.jit` remembers; inlined, it
    leaves the programs as they would be without.
    """
    num_chains = states.log_density.shape[0]
    keys = jax.vmap(lambda c: jax.random.fold_in(rng_key, c))(jnp.arange(num_chains))
    return map_chains(getattr(type(kernel), method), kernel, keys, states, vmap=layout.vmap)


def advance(kernel: Any, rng_key: jax.Array, step: jax.Array, states: Any, layout: Layout):
    """Take step number ``step`` of all chains; randomness depends on the key and numbers alone."""
    return step_chains(*draw_kernel(kernel, rng_key, step), states, layout, "step")


def no_tally(states: Any) -> dict[str, jax.Array]:
    """Return the counts of a chunk that has taken no step."""
    zeros = jnp.zeros_like(states.log_density)
    return {
        "acceptance_rate": zeros,  # [chains], a sum over steps
        "num_divergent": zeros.astype(jnp.int32),  # [chains]
        "leapfrogs": jnp.zeros((), jnp.int32),
    }


def tally(counts: dict[str, jax.Array], info: Any) -> dict[str, jax.Array]:
    """Add one step's info of all chains to the counts."""
    return {
        "acceptance_rate": counts["acceptance_rate"] + info.acceptance_rate,
        "num_divergent": counts["num_divergent"] + info.is_divergent,
        "leapfrogs": counts["leapfrogs"] + jnp.sum(info.num_integration_steps, dtype=jnp.int32),
    }
