# %% [markdown]
"""Independent chains over devices that send each other nothing.

The first example of the notebook "Distributed inference with TFP and JAX": 16 chains of a correlated
Gaussian in the plane, two on each of 8 devices. The loop over steps is our own, and one program.

    python demos/independent_chains.py [--devices N] [--out DIR] [--quick]

It needs no data.
"""

# %%
import functools
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from arviz_stats.base.array import array_stats
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

BEGAN = time.perf_counter()
console = Console()
options = common.parse("Independent chains of a Gaussian in the plane", "out/independent_chains")
devices = common.start_devices(options.devices)
num_chains, num_warmup = 16, 50
num_samples = 200 if options.quick else 2000
if num_chains % len(devices):
    raise SystemExit(f"{len(devices)} devices: {num_chains} chains do not divide evenly over them")

# %% [markdown]
# ## The target, and where everything lies
#
# The mean and the precision are replicated on every device. Each device has its own chains and their
# numbers, from which the random keys are derived.

# %%
MEAN = np.array([1.0, -1.0], np.float32)
COVARIANCE = np.array([[1.0, 0.9], [0.9, 1.0]], np.float32)


def log_density(position, mean, precision):
    """Of N(mean, precision⁻¹), up to a constant."""
    return -0.5 * (position - mean) @ precision @ (position - mean)


mesh = gm.make_mesh(chains=len(devices), devices=devices)
mean, precision = gm.place((MEAN, np.linalg.inv(COVARIANCE)), mesh, P())
chains = gm.place(np.arange(num_chains), mesh, P("chains"))
# Further apart than the target is wide, as R-hat requires.
start = np.random.default_rng(0).normal(scale=3, size=(num_chains, 2)).astype(np.float32)
start = gm.place(start, mesh, P("chains"))

# %% [markdown]
# ## One program for all steps
#
# A chain's key depends on the step and on the chain, never on the device, so the draws are the same on
# any mesh.

# %%
# Eight leapfrogs of 0.3 are about a quarter turn along the long axis, and five along the short one.
kernel = gm.HMC(gm.LogDensity(log_density, mean, precision), 0.3, 8)
init = jax.vmap(gm.HMC.init, in_axes=(None, 0), spmd_axis_name="chains")
step = jax.vmap(gm.HMC.step, in_axes=(None, 0, 0), spmd_axis_name="chains")


@functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(None, "chains")))
def run(kernel, rng_key, start, chains, steps):
    """Take the numbered steps; return positions [steps, chains, 2] and infos [steps, chains]."""

    def one(state, number):
        step_key = jax.random.fold_in(rng_key, number)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, chains)
        state, info = step(kernel, keys, state)
        return state, (state.position, info)

    return jax.lax.scan(one, init(kernel, start), steps)[1]


arguments = (kernel, jax.random.key(0), start, chains, jnp.arange(num_warmup + num_samples))
report = gm.communication(run, *arguments)
console.print(report)
console.print(
    f"mesh {dict(mesh.shape)}, {num_chains} chains, {num_warmup} + {num_samples} steps: "
    f"{len(report.collectives)} collectives in the program"
)
positions, infos = jax.block_until_ready(run(*arguments))
console.print(
    gm.visualize(
        {"start": start, "draws": positions, "accepted": infos.is_accepted, "precision": precision},
    )
)

# %% [markdown]
# ## Against the truth, in units of the Monte Carlo standard error

# %%
draws = np.asarray(positions, np.float64)[num_warmup:]  # [draws, chains, 2]


def ess(values):
    """Effective sample size for the mean of values [draws, chains]."""
    return float(np.asarray(array_stats.ess(values, chain_axis=1, draw_axis=0, method="mean")))


def rhat(values):
    """R-hat of values [draws, chains]."""
    return float(np.asarray(array_stats.rhat(values, chain_axis=1, draw_axis=0)))


def error(values, truth):
    """Of the mean of values [draws, chains], in standard errors."""
    return float((values.mean() - truth) / (values.std() / np.sqrt(ess(values))))


centred = draws - MEAN
errors = {f"mean {i}": error(draws[..., i], float(MEAN[i])) for i in range(2)}
for i, j in ((0, 0), (0, 1), (1, 1)):
    errors[f"covariance {i}{j}"] = error(centred[..., i] * centred[..., j], float(COVARIANCE[i, j]))
for name, value in errors.items():
    console.print(f"{name}: {value:+.2f} standard errors from the truth")

# %% [markdown]
# ## The figure

# %%
# The device of each chain's draws, read from the array itself.
device_of = np.empty(num_chains, int)
for shard in positions.addressable_shards:
    device_of[shard.index[1]] = devices.index(shard.device)
colors = plt.colormaps["tab10"](np.arange(len(devices)) % 10)


def plot_draws(axis):
    """Scatter some draws of every chain over contours of the density."""
    shown = draws[:: max(num_samples // 100, 1)]
    for device, color in enumerate(colors):
        own = shown[:, device_of == device].reshape(-1, 2)
        axis.scatter(*own.T, s=7, color=color, alpha=0.6, lw=0, label=f"device {device}")
    grid = np.moveaxis(np.mgrid[-4:4:200j, -4:4:200j], 0, -1) + MEAN
    away = grid - MEAN
    distance = np.sqrt(np.sum(away @ np.linalg.inv(COVARIANCE) * away, axis=-1))
    levels = axis.contour(grid[..., 0], grid[..., 1], distance, [1, 2, 3], colors="black", linewidths=1)
    axis.clabel(levels, fmt="%d sd")
    axis.set(title=f"draws of {num_chains} chains", xlabel="x₀", ylabel="x₁", aspect="equal")
    axis.legend(loc="upper left", markerscale=2, fontsize=8)


def plot_traces(axis):
    """Draw the first coordinate of every chain over steps from its start, one above the other."""
    traces = np.concatenate([np.asarray(start)[None], np.asarray(positions)])[..., 0] - MEAN[0]
    shown, spacing = traces[: num_warmup + 150], 6.0
    for chain in range(num_chains):
        axis.plot(shown[:, chain] + spacing * chain, color=colors[device_of[chain]], lw=0.8)
    axis.axvspan(0, num_warmup, color="0.92", zorder=0)
    axis.set(title="traces of x₀", xlabel="step (grey: warm-up)", ylabel="chain", xlim=(0, len(shown)))
    axis.set_yticks(spacing * np.arange(num_chains), range(num_chains))


figure, axes = plt.subplots(1, 2, figsize=(14, 7), layout="constrained")
plot_draws(axes[0])
plot_traces(axes[1])
figure.suptitle(
    f"{num_chains} independent chains on {len(devices)} devices: {len(report.collectives)} collectives"
)
figure.savefig(options.out / "independent_chains.png", dpi=110)

# %%
summary = {
    "devices": len(devices),
    "mesh": dict(mesh.shape),
    "num_chains": num_chains,
    "num_warmup": num_warmup,
    "num_samples": num_samples,
    "collectives": len(report.collectives),
    "largest_constant_bytes": report.largest_constant_bytes,
    "mean": draws.mean(axis=(0, 1)).tolist(),
    "covariance": np.cov(draws.reshape(-1, 2).T).tolist(),
    "errors_in_mcse": errors,
    "ess": min(ess(draws[..., i]) for i in range(2)),
    "rhat": max(rhat(draws[..., i]) for i in range(2)),
    "acceptance_rate": float(infos.acceptance_rate[num_warmup:].mean()),
    "num_divergent": int(infos.is_divergent[num_warmup:].sum()),
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
