"""How long `sample` takes to trace and compile on MNIST, and what further calls compile.

``python -m benchmarks recompile [--data-dir DIR] [--rows N] [--out FILE.json]``. Logistic regression on
all images, 4 chains, each kernel that `sample` takes by default, on meshes of 1 and 8 devices; a fresh
process each, so that nothing is compiled yet. Two more calls follow, with the images in other orders,
other keys and another number of steps of warm-up: they should compile nothing.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from benchmarks import data, environment, mnist_data
from benchmarks.contenders.ess_program import Compiling
from benchmarks.sink import log_likelihood, log_prior

DEVICES, CHAINS = 8, 4
MESHES = {"1": {"data": 1}, "8": {"data": 8}, "2x4": {"chains": 2, "data": 4}}
KERNELS = ("NUTS", "JitteredHMC")
MOST_SECONDS = 20.0  # aimed at, on two cores
COMPILED = "/jax/core/compile/backend_compile_duration"


def main(argv: list[str]) -> int:
    """Measure, print, write JSON; return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks recompile", description=__doc__)
    data.add_option(parser)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run:
        print(json.dumps(calls(options.data_dir, **options.run)))
        return 0
    tasks = [{"kernel": k, "mesh": m, "rows": options.rows} for k in KERNELS for m in MESHES]
    with data.folder_of([data.MNIST], options.data_dir) as (folder, sources):
        print(f"Data: {sources[data.MNIST]}", flush=True)
        found = [_in_process(folder, task) for task in tasks]
    _show(found)
    environment.save(options.out, "recompile", runs=found)
    return 0


def calls(data_dir: str, kernel: str, mesh: str, rows: int) -> dict:
    """Call `sample` three times in this process; return seconds and programs of the first and later."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    compiling, names = Compiling(), []

    def listen(event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILED:
            names.append(str(details.get("fun_name", event)))

    mnist = mnist_data.load(data_dir)
    jax.monitoring.register_event_duration_secs_listener(listen)
    found = []
    for call in range(3):
        order = np.random.default_rng(call).permutation(len(mnist.labels))[:rows]
        target = _regression(mnist.images[order], mnist.labels[order], mesh)
        compiling.clear()
        names.clear()
        _sample(target, kernel, call)
        found.append({"seconds": compiling.seconds(), "programs": list(names)})
    return {"first": found[0], "later": found[1:]}


def _regression(images: np.ndarray, labels: np.ndarray, mesh: str):
    import gspmd_mcmc as gm

    size = int(np.prod(list(MESHES[mesh].values())))
    devices = gm.make_mesh(**MESHES[mesh], devices=jax.devices()[:size])
    placed = gm.place({"image": images, "label": labels}, devices, P("data"))
    return gm.Posterior(log_prior, gm.Plate(log_likelihood, placed))


def _sample(target, name: str, call: int) -> None:
    import gspmd_mcmc as gm

    # Short trajectories: the program is the same, but for the length of NUTS' stack of states.
    if name == "NUTS":
        kernel = gm.NUTS(target, 0.1, max_tree_depth=3)
    else:
        kernel = gm.JitteredHMC(target, 0.1, 0.5, max_leapfrogs=8)
    gm.sample(
        jax.random.key(call),
        target,
        mnist_data.start_position(CHAINS),
        num_chains=CHAINS,
        num_warmup=24 - call // 2,  # with a window in which the metric is learned
        num_samples=4,
        kernel=kernel,
        progress=False,
    )


def _in_process(data_dir: str, task: dict) -> dict:
    command = [sys.executable, "-m", "benchmarks", "recompile", "--data-dir", data_dir]
    done = subprocess.run(
        [*command, "--run", json.dumps(task)], stdout=subprocess.PIPE, text=True, check=True
    )
    return task | json.loads(done.stdout.splitlines()[-1])


def _show(found: list[dict]) -> None:
    table = Table(title=f"`sample` on MNIST, {found[0]['rows']:,} rows, {CHAINS} chains")
    for column in ("kernel", "mesh", "first call, s", "programs", "compiled by later calls"):
        table.add_column(column)
    for run in found:
        first, later = run["first"], sum((each["programs"] for each in run["later"]), [])
        seconds = f"{first['seconds']:.1f}" + ("" if first["seconds"] < MOST_SECONDS else " (!)")
        table.add_row(
            run["kernel"], run["mesh"], seconds, str(len(first["programs"])), ", ".join(later) or "0"
        )
    Console().print(table)
    print(f"aimed at: {MOST_SECONDS:.0f} s on two cores, and no program in later calls")
