# %% [markdown]
r"""MovieLens on several hosts: two processes with four devices each, started by one command.

    python demos/multi_host.py [--devices N] [--data-dir DIR] [--out DIR] [--quick]

On one machine the script starts two processes of itself, each with half of ``--devices`` (8) virtual
devices; they connect over loopback. On a cluster every host runs the same command with ``--cluster``,
and JAX finds the others:

    srun --nodes=2 --ntasks-per-node=1 python demos/multi_host.py --cluster --out /shared/out   # Slurm

    gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker=all \
        --command "python demos/multi_host.py --cluster --out /shared/out"   # TPU pod

    # Kubernetes: an indexed job behind a headless service "movielens", in an image with jax[k8s]; its
    # service account may list pods and services, and get jobs
    apiVersion: batch/v1
    kind: Job
    metadata: {name: movielens}
    spec:
      completions: 2
      parallelism: 2
      completionMode: Indexed
      template:
        spec:
          subdomain: movielens
          restartPolicy: Never
          containers:
          - name: worker
            image: IMAGE
            command: [python, demos/multi_host.py, --cluster, --out, /shared/out]

The model is that of `movielens.py`. Process 0 writes the cells to one file in a shared folder; each
process then maps the file and reads only the rows of its own users. Users' latents lie with their
rows, movies are replicated on every device, and each device predicts its own cells.
"""

# %%
import os
import socket
import subprocess
import sys
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import movielens_data
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.rhat import rhat

matplotlib.use("agg")
import matplotlib.pyplot as plt

PROCESSES, DIMENSIONS, HIDDEN_SHARE, TOP = 2, 20, 0.2, 20
CHILD = "MULTI_HOST_CHILD"  # address and number, of a process that this script has started
BEGAN = time.perf_counter()
options = common.parse(
    "MovieLens on several hosts",
    "out/multi_host",
    ("--cluster", "one process of a cluster, whose others JAX finds"),
)


def start_processes():
    """Start the processes of one machine, wait for them, and end as the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, *(f"-W{x}" for x in sys.warnoptions), *sys.argv]
    # Do not use a proxy for loopback.
    shared = os.environ | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    processes = [
        subprocess.Popen(command, env=shared | {CHILD: f"{address} {i}"}) for i in range(PROCESSES)
    ]
    return max(abs(process.wait()) for process in processes)


if not options.cluster and CHILD not in os.environ:
    sys.exit(start_processes())

# %% [markdown]
# ## Joining, before JAX is used

# %%
if options.cluster:
    gm.initialize(exit_on_error=True)
else:
    address, number = os.environ[CHILD].split()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", (options.devices or 8) // PROCESSES)
    gm.initialize(address, PROCESSES, int(number), heartbeat_seconds=100, exit_on_error=True)
is_first = jax.process_index() == 0
console = Console(quiet=not is_first)
mesh = gm.make_mesh(data=-1)
console.print(f"{jax.process_count()} processes, {jax.device_count()} devices, mesh {dict(mesh.shape)}")

# %% [markdown]
# ## Cells: one file, from which each process reads the rows of its users

# %%
path = options.out / "cells.npy"


def write_cells():
    """Write cells as in `movielens.py`: watched in the first bit, a random fifth hidden, the second."""
    dataset = movielens_data.load_movielens(options.data_dir)
    watched = dataset.watched[:1001, :600] if options.quick else dataset.watched
    hidden = np.random.default_rng(0).random(watched.shape, np.float32) < HIDDEN_SHARE
    np.save(path, watched + 2 * hidden.astype(np.uint8))
    console.print(f"data: {dataset.source}")
    return dataset.name


name = write_cells() if is_first else ""
multihost_utils.sync_global_devices("cells are written")
mapped = np.load(path, mmap_mode="r")
num_users, num_movies = mapped.shape
cells = gm.place_from_reader(lambda a, b: mapped[a:b], mapped.shape, np.uint8, mesh, P("data"))


def log_prior(params):
    """Movies, which all users share: N(0, 1), up to a constant, element by element."""
    return -0.5 * params["V"] ** 2, -0.5 * params["v"] ** 2


def logits(params):
    """Log odds of watching, [users, movies], of any block of users."""
    return gm.inner_products(params["U"], params["V"], params["u"], params["v"])


def log_likelihood(params, cells):
    """Terms of each user: visible cells, and the user's own N(0, 1) prior, [users]."""
    log_prob = gm.bernoulli_logits(logits(params), cells & 1)
    prior = -0.5 * jnp.sum(params["U"] ** 2, axis=1) - 0.5 * params["u"] ** 2
    return jnp.sum(jnp.where(cells >= 2, 0.0, log_prob), axis=1) + prior


plate = gm.Plate(log_likelihood, cells, local=("U", "u"))
target = gm.Posterior(log_prior, plate)
held = sum(shard.data.nbytes for shard in plate.data.addressable_shards)
held_by = multihost_utils.process_allgather(np.float32(held / 1e6)).ravel().tolist()
console.print(f"{plate}; MB of cells by process: {[round(x, 2) for x in held_by]}")

# %% [markdown]
# ## Sampling: the same call as in one process


# %%
def start(rng_key):
    """Draw a start near no taste at all, with low odds of watching."""
    u_key, v_key = jax.random.split(rng_key)
    return {
        "U": 0.3 * jax.random.normal(u_key, (num_users, DIMENSIONS)),
        "V": 0.3 * jax.random.normal(v_key, (num_movies, DIMENSIONS)),
        "u": jnp.zeros(num_users),
        "v": jnp.full(num_movies, -3.0),
    }


num_chains, num_warmup, num_samples = (2, 0, 4) if options.quick else (2, 150, 100)
sampling_began = time.perf_counter()
draws = gm.sample(
    jax.random.key(0),
    target,
    start,
    mesh=mesh,
    num_chains=num_chains,
    num_warmup=num_warmup,
    num_samples=num_samples,
    kernel=gm.HMC(target, 0.02, 2 if options.quick else 20, jitter=0.2),
)
sampling_seconds = time.perf_counter() - sampling_began
console.print(repr(draws))

# %% [markdown]
# ## Predictions for the hidden cells where they lie; only scalars are sent


# %%
@jax.jit
def scores(positions, cells):
    """Recall@20 and log likelihood a hidden cell, of the average over draws and of popularity."""

    def add(total, position):
        total = total + jax.nn.sigmoid(logits(position)) / len(positions["u"])
        return jax.lax.with_sharding_constraint(total, NamedSharding(mesh, P("data"))), None

    is_user = (jnp.arange(len(cells)) < num_users)[:, None]  # not a copy that fills the mesh
    hidden, seen, watched = (cells >= 2) & is_user, (cells < 2) & is_user, (cells & 1) == 1
    average = jax.lax.scan(add, jnp.zeros(cells.shape), positions)[0]
    share = (jnp.sum(seen & watched, axis=0) + 1) / (jnp.sum(seen, axis=0) + 2)
    popularity = jnp.broadcast_to(share, cells.shape)
    return [_scores(p, hidden, watched) for p in (average, popularity)]


def _scores(probability, hidden, watched):
    ranked = jnp.sort(jnp.where(hidden, probability, -1.0), axis=1, descending=True)
    hits = jnp.sum(watched & hidden & (probability >= ranked[:, TOP - 1 : TOP]), axis=1)
    possible = jnp.minimum(jnp.sum(watched & hidden, axis=1), TOP)
    recall = jnp.sum(jnp.minimum(hits, possible) / jnp.maximum(possible, 1)) / jnp.sum(possible > 0)
    log_lik = jnp.log(jnp.clip(jnp.where(watched, probability, 1 - probability), 1e-6))
    return recall, jnp.sum(jnp.where(hidden, log_lik, 0.0)) / jnp.sum(hidden)


flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws.position)
found = [[float(x) for x in pair] for pair in scores(flat, plate.data)]
rhat_log_density = float(rhat(draws.stats["log_density"]))

# %% [markdown]
# ## The figure and the summary, from process 0


# %%
def draw():
    """Draw what each process holds, the traces, and the scores."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    axes[0].bar([f"process {i}" for i in range(len(held_by))], held_by)
    axes[0].axhline(sum(held_by), color="0.5", ls="--", label="all cells")
    axes[0].set(title="cells held", ylabel="MB")
    axes[0].legend()
    trace = np.concatenate([draws.warmup["log_density"], draws.stats["log_density"]], axis=1)
    axes[1].plot(trace.T, lw=0.9)
    axes[1].axvspan(0, num_warmup, color="0.92")
    axes[1].set(title="log density of each chain", xlabel="iteration (grey: warm-up)")
    bars = axes[2].barh(["all draws", "popularity"], [pair[0] for pair in found])
    axes[2].bar_label(bars, fmt="%.3f", padding=3)
    axes[2].margins(x=0.2)
    axes[2].set(title=f"recall@{TOP}, hidden cells")
    size = f"{num_users} x {num_movies} cells, {jax.process_count()} processes"
    figure.suptitle(f"{name}: {size}, {jax.device_count()} devices")
    figure.savefig(options.out / "multi_host.png", dpi=110)


if is_first:
    draw()
    leapfrogs = int(draws.stats["num_integration_steps"][0].sum())
    leapfrogs += draws.warmup["leapfrogs"] // num_chains
    summary = {
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "mesh": dict(mesh.shape),
        "data": name,
        "users": num_users,
        "movies": num_movies,
        "num_chains": num_chains,
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "cells_mb": mapped.nbytes / 1e6,
        "cells_mb_by_process": held_by,
        "acceptance_rate": float(draws.acceptance_rate.mean()),
        "num_divergent": int(draws.num_divergent.sum()),
        "leapfrogs": leapfrogs,
        "leapfrogs_per_second": leapfrogs / sampling_seconds,
        "rhat_log_density": rhat_log_density,
        "recall_at_20_bma": found[0][0],
        "recall_at_20_popularity": found[1][0],
        "heldout_log_lik_bma": found[0][1],
        "heldout_log_lik_popularity": found[1][1],
        "peak_rss_mb": common.peak_rss_mb(),
        "wall_seconds": time.perf_counter() - BEGAN,
    }
    common.write_summary(console, options.out, summary)
