"""What a sink costs, on MNIST: wall time beside a run that keeps its draws in memory, and peak memory.

``python -m benchmarks sink [--data-dir DIR] [--rounds 7] [--out FILE.json] [--quick]``. Logistic
regression on all images, one chain, HMC. Runs with and without a sink take turns, each in a process of
its own; shares are taken within a round. Then the peak resident memory of runs of 20 N draws with a
sink, after N draws and at the end: what compiling leaves behind is 200 MB and varies from process to
process by more than draws add, so both are of one process; and beside it what is in use of C's heap, as
resident memory holds what its allocator keeps. ``--rounds 0`` leaves the wall time out.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks import data, environment, mnist_data

LEAPFROGS, TIMES_MORE = 20, 20
ROUNDS, MEMORY_ROUNDS = 7, 5
# A share and a ratio that are aimed at.
MOST_SHARE, MOST_RATIO = 0.05, 1.05


def main(argv: list[str]) -> int:
    """Measure, print, write JSON; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks sink", description=__doc__)
    data.add_option(parser)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of both timed runs")
    parser.add_argument("--quick", action="store_true", help="short runs: whether it works")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        print(json.dumps(run(options.data_dir, **options.run)))
        return 0
    with data.folder_of([data.MNIST], options.data_dir) as (folder, sources):
        print(f"Data: {sources[data.MNIST]}", flush=True)
        found = measure(folder, options.rounds, options.quick)
    _show(found)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"benchmark": "sink", "machine": environment.record(), **found}
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def measure(data_dir: str, rounds: int, quick: bool) -> dict:
    """Return the rounds of both runs, and the runs whose memory was watched."""
    draws, few = (10, 30) if quick else (150, 250)
    rounds, memory_rounds = (min(rounds, 2), 1) if quick else (rounds, MEMORY_ROUNDS)
    timed = {"num_samples": draws, "leapfrogs": LEAPFROGS, "flush_seconds": 2.0}
    found = [
        {
            name: _in_process(data_dir, {**timed, "has_sink": name == "sink"})
            for name in ("memory", "sink")
        }
        for _ in range(rounds)
    ]
    watched = {**timed, "num_samples": TIMES_MORE * few, "leapfrogs": 1, "has_sink": True, "first": few}
    memory = [_in_process(data_dir, watched) for _ in range(memory_rounds)]
    shares = [each["sink"]["seconds"] / each["memory"]["seconds"] - 1 for each in found]
    ratios = [each["peak_rss_bytes"] / each["first_peak_rss_bytes"] for each in memory]
    return {
        "rounds": found,
        "share": statistics.median(shares) if shares else None,
        "shares": shares,
        "memory": memory,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def run(
    data_dir: str,
    num_samples: int,
    leapfrogs: int,
    flush_seconds: float,
    has_sink: bool,
    first: int | None = None,
) -> dict:
    """Sample in this process; return its seconds and its peak memory, after the first draws too."""
    import jax

    import gspmd_mcmc as gm

    kernel = kernel_on_mnist(data_dir, leapfrogs)
    folder = Path(tempfile.mkdtemp(prefix="sink-"))
    to = gm.ZarrSink(folder / "draws", chunk_bytes=2**22, flush_seconds=flush_seconds)
    seen = []

    def note_memory(report):
        seen.append((report.done, environment.peak_rss_bytes(), environment.heap_bytes() or 0))

    began = time.perf_counter()
    draws = sample_one_chain(
        kernel, num_samples=num_samples, to=to if has_sink else None, callback=note_memory
    )
    jax.block_until_ready(draws.state)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    found = {"seconds": seconds, "peak_rss_bytes": environment.peak_rss_bytes()}
    return found if first is None else found | _memory_of(seen, first)


def _memory_of(seen: list[tuple[int, int, int]], first: int) -> dict[str, int]:
    """Return the peak of resident memory and of the heap in use to the first draws, and the heap's."""
    end = next(i for i, (done, *_) in enumerate(seen) if done >= first) + 1
    return {
        "first_peak_rss_bytes": seen[end - 1][1],
        "first_heap_bytes": max(heap for *_, heap in seen[:end]),
        "heap_bytes": max(heap for *_, heap in seen),
    }


def kernel_on_mnist(data_dir: str, leapfrogs: int):
    """Return HMC on the regression of all images, on one device."""
    import jax

    import gspmd_mcmc as gm

    mnist = mnist_data.load(data_dir)
    mesh = gm.make_mesh(data=1, devices=jax.devices()[:1])
    rows = gm.place({"image": mnist.images, "label": mnist.labels}, mesh, PartitionSpec("data"))
    return gm.HMC(gm.Posterior(log_prior, gm.Plate(log_likelihood, rows)), 1e-3, leapfrogs)


def sample_one_chain(kernel: Any, **options):
    """Sample from the fixed start, without warm-up."""
    import jax

    import gspmd_mcmc as gm

    given = {"kernel": kernel, "num_chains": 1, "num_warmup": 0, "progress": False} | options
    return gm.sample(jax.random.key(0), kernel.target, mnist_data.start_position(1), **given)


def log_prior(params):
    return -0.5 * params["w"] ** 2, -0.5 * params["b"] ** 2


def log_likelihood(params, batch):
    import gspmd_mcmc as gm

    logits = batch["image"].astype(jnp.float32) @ (params["w"] / 255) + params["b"]
    return gm.categorical_logits(logits, batch["label"])


def _in_process(data_dir: str, task: dict) -> dict:
    command = [sys.executable, "-m", "benchmarks", "sink", "--data-dir", data_dir]
    done = subprocess.run(
        [*command, "--run", json.dumps(task)], stdout=subprocess.PIPE, text=True, check=True
    )
    return task | json.loads(done.stdout.splitlines()[-1])


def _show(found: dict) -> None:
    if shares := found["shares"]:
        spread = f"({min(shares):+.1%} to {max(shares):+.1%})"
        print(f"wall time: {found['share']:+.1%} {spread}; aimed at: {MOST_SHARE:.0%}")
    for each in found["memory"]:
        few, many = each["first_peak_rss_bytes"] / 1e6, each["peak_rss_bytes"] / 1e6
        print(
            f"peak memory: {few:.0f} MB after {each['first']} draws, {many:.0f} MB after "
            f"{each['num_samples']}: ratio {many / few:.3f}; aimed at: {MOST_RATIO} (in use at most "
            f"{each['first_heap_bytes'] / 1e6:.0f} and {each['heap_bytes'] / 1e6:.0f} MB)"
        )
