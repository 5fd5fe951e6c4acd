# %% [markdown]
"""Bayesian logistic regression on all of MNIST, in one program over all devices.

The model of the notebook "Distributed inference with TFP and JAX": w ~ N(0, 1) [784, 10],
b ~ N(0, 1) [10], label ~ Categorical(softmax(image w + b)), pixels in [0, 1].

    python demos/mnist_logistic.py [--devices N] [--data-dir DIR] [--out DIR] [--quick] [--paper]

By default 4 chains start around the mode and move in rotated coordinates z, w = U z Vᵀ, in which the
posterior is nearly uncorrelated. U are the eigenvectors of XᵀX, V those of mean(diag p - p pᵀ). The
N(0, 1) prior is the same for z as for w, and the images stay uint8.

`--paper` is the notebook's own run: 1 chain from a draw of the prior, 100 leapfrogs a step, 500 steps
that tune the step size to an acceptance rate of 0.75, 500 more that are thrown away, 1,000 draws, no
rotation. It is saved every minute in the folder `run` under `--out`; start it again and it continues.
"""

# %%
import dataclasses
import math
import time

import common
import datasets
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist
from arviz_stats.base.array import array_stats
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from rich.console import Console

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

BEGAN = time.perf_counter()
console = Console()
options = common.parse(
    "Bayesian logistic regression on MNIST",
    "out/mnist_logistic",
    ("--paper", "the notebook's own run: 200,000 leapfrogs from a draw of the prior (long on a CPU)"),
)
devices = common.start_devices(options.devices)
dataset = datasets.load_mnist(options.data_dir)
console.print(f"data: {dataset.source}")

# %% [markdown]
# ## The model, written for one device


# %%
def log_prior(params):
    """Independent N(0, 1), up to a constant, element by element."""
    return -0.5 * params["w"] ** 2, -0.5 * params["b"] ** 2


def logits(params, images, scale):
    """Logits of pixels stored as uint8: [rows, pixels] -> [rows, classes]."""
    return images.astype(jnp.float32) @ (params["w"] / scale) + params["b"]


def log_likelihood(scale, params, batch):
    """Log probability of each row's label, [rows]."""
    return gm.categorical_logits(logits(params, batch["image"], scale), batch["label"])


def rotate(left, right, position):
    """Return the parameters at a rotated position: w = U z Vᵀ, b = V c."""
    return {"w": left @ position["w"] @ right.T, "b": right @ position["b"]}


# %% [markdown]
# ## Placement: rows of data sharded over the devices, latents replicated

# %%
mesh = gm.make_mesh(data=len(devices), devices=devices)
data = gm.place({"image": dataset.train_images, "label": dataset.train_labels}, mesh, P("data"))
scale = jnp.float32(dataset.scale)
plate = gm.Plate(Partial(log_likelihood, scale), data)
num_pixels, num_classes = dataset.train_images.shape[1], dataset.num_classes
tests = gm.place({"image": dataset.test_images, "label": dataset.test_labels}, mesh, P("data"))
test_plate = gm.Plate(Partial(log_likelihood, scale), tests)
origin = {"w": jnp.zeros((num_pixels, num_classes)), "b": jnp.zeros(num_classes)}
console.print(f"mesh {dict(mesh.shape)}, {plate}")

# %% [markdown]
# ## The mode, and the rotation that it gives


# %%
@jax.jit
def predict(params, plate):
    """Accuracy of each draw [draws], and probabilities averaged over draws [rows, classes].

    Every device predicts its own rows, for up to 20 draws at a time: bytes become floats once for all
    of them. Only hits are added over devices.
    """

    def add(mean, some):
        log_odds = jax.vmap(logits, in_axes=(0, None, None))(some, plate.data["image"], scale)
        is_right = jnp.argmax(log_odds, axis=2) == plate.data["label"][None]
        mean += jnp.sum(jax.nn.softmax(log_odds), axis=0) / num_draws
        return mean, is_right & is_real[None]

    num_draws = len(jax.tree.leaves(params)[0])
    size = math.gcd(num_draws, 20)
    batches = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), params)
    is_real = jnp.arange(len(plate.data["label"])) < plate.rows.num_rows
    zeros = jnp.zeros((len(is_real), num_classes))
    zeros = jax.lax.with_sharding_constraint(zeros, NamedSharding(mesh, P("data")))
    averaged, hits = jax.lax.scan(add, zeros, batches)
    return averaged, jnp.sum(hits, axis=2).reshape(-1) / plate.rows.num_rows


@jax.jit
def rotation(plate, params):
    """Eigenvectors of XᵀX and of mean(diag p - p pᵀ) over the rows of a plate."""
    images = plate.data["image"].astype(jnp.float32) / scale
    probabilities = jax.nn.softmax(logits(params, plate.data["image"], scale))
    spread = jnp.diag(probabilities.mean(0)) - probabilities.T @ probabilities / len(probabilities)
    return jnp.linalg.eigh(images.T @ images)[1], jnp.linalg.eigh(spread)[1]


@jax.jit
def laplace_curvature(plate, params, left, right):
    """Diagonal of minus the Hessian in rotated coordinates, like the position.

    With p the probabilities of a row x and S = diag p - p pᵀ, that of z_ij is
    1 + sum over rows of (x·u_i)² v_jᵀ S v_j.
    """
    images = plate.data["image"].astype(jnp.float32) / scale
    probabilities = jax.nn.softmax(logits(params, plate.data["image"], scale))
    is_real = jnp.arange(len(images)) < plate.rows.num_rows
    across = jnp.where(is_real[:, None], probabilities @ right**2 - (probabilities @ right) ** 2, 0)
    return {"w": 1 + ((images @ left) ** 2).T @ across, "b": 1 + jnp.sum(across, axis=0)}


target = gm.Posterior(log_prior, plate)
with console.status("climbing to the mode"):
    # The posterior lies some 4,000 nats below its mode: half a nat is near enough to start from.
    mode = gm.find_mode(jax.random.key(1), target, origin, tolerance=0.5, num_probes=0)
at_mode = jax.tree.map(lambda x: x[None], mode.position)
mode_accuracy = float(predict(at_mode, test_plate)[1][0])
console.print(f"mode: log density {float(mode.log_density):.1f}, test accuracy {mode_accuracy:.4f}")

# %% [markdown]
# ## Sampling
#
# The notebook's model as it is written there, its parts in turn: a joint distribution knows its prior,
# so chains can start at draws from it. `Sharded` marks the part that has the rows of the data.


# %%
def joint_model(scale, images):
    """Yield weights, biases and, for each image, its label."""
    w = yield Root(dist.Normal(jnp.zeros((num_pixels, num_classes)), 1.0), name="w")
    b = yield Root(dist.Normal(jnp.zeros(num_classes), 1.0), name="b")
    label = dist.Categorical(logits=logits({"w": w, "b": b}, images, scale))
    yield gm.Sharded(label, name="label")


Root = gm.JointDistributionCoroutine.Root
num_dropped, target_rate, checkpoint = 0, 0.8, None
if options.paper:
    num_chains, num_warmup, num_dropped, num_samples = 1, 500, 500, 1000
    target_rate, checkpoint = 0.75, options.out / "run"
    joint = gm.JointDistributionCoroutine(joint_model, scale, plate.data["image"], mesh=mesh)
    target = joint.condition(label=plate.data["label"])
    kernel = gm.HMC(target, 1e-2, 100)
    start = gm.prior_start(target)
else:
    num_chains, num_warmup, num_samples = (4, 40, 240) if dataset.name == "mnist" else (4, 100, 1000)
    left, right = rotation(plate, mode.position)
    target = gm.Posterior(log_prior, plate, transform=Partial(rotate, left, right))
    turned = {"w": left.T @ mode.position["w"] @ right, "b": right.T @ mode.position["b"]}
    curvature = laplace_curvature(plate, mode.position, left, right)
    mode = dataclasses.replace(mode, position=turned, curvature=curvature)
    # 7,850 nearly independent latents: two gradients a step, but steps of three times the leapfrog's.
    splitting, metric = gm.MINIMAL_NORM, mode.inverse_mass_matrix
    kernel = gm.HMC(target, 0.6, 3, inverse_mass_matrix=metric, jitter=0.2, splitting=splitting)
    start = mode.laplace_start()
if options.quick:
    num_warmup, num_dropped, num_samples = 10, num_dropped and 5, 20

console.print(f"sampling: {num_chains} chains, {num_warmup} warm-up steps, {num_samples} draws each")
with common.Stopwatch() as watch:
    draws = gm.sample(
        jax.random.key(0),
        target,
        start,
        mesh=mesh,
        num_chains=num_chains,
        num_warmup=num_warmup,
        num_samples=num_dropped + num_samples,
        kernel=kernel,
        warmup=gm.WindowAdaptation(target_acceptance_rate=target_rate, adapt_mass_matrix=False),
        checkpoint=checkpoint,
        callback=watch,
    )
whole, draws = draws, common.without_first(draws, num_dropped)

# %% [markdown]
# ## Predictions on the test images: of each draw, and of their average


# %%
# Draws are parameters: of a rotated target, after the rotation.
flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws.position)
averaged, accuracies = predict(flat, test_plate)
weight_mean, weight_sd = flat["w"].mean(0), flat["w"].std(0)
averaged = np.asarray(averaged)[: test_plate.rows.num_rows]
accuracies = np.asarray(accuracies).reshape(num_chains, -1)
average_accuracy = float(accuracies.mean())
bma_accuracy = float(np.mean(averaged.argmax(axis=1) == dataset.test_labels))

log_density = np.asarray(draws.stats["log_density"], np.float64)
# With one chain, compare its halves.
traces = log_density if num_chains > 1 else log_density.reshape(2, -1)
rhat = float(np.asarray(array_stats.rhat(traces, chain_axis=0, draw_axis=1)))
if rhat > 1.05:
    console.print(
        f"R-hat of the log density is {rhat:.2f}: the chains have not converged; take more draws"
    )
table = draws.summary()
rhat_max = max(float(np.max(x)) for x in jax.tree.leaves(table.rhat))
mixing = f"R-hat of the log density {rhat:.2f}, of single latents up to {rhat_max:.2f}"
mixing += ": not all have mixed" if not rhat_max <= 1.05 else ""
console.print(mixing)
of_paper = {}
if options.paper:
    console.print(table)
    of_paper["ess_min"] = min(float(np.min(x)) for x in jax.tree.leaves(table.ess_bulk))
for i in range(0, num_samples, max(num_samples // 8, 1)):
    console.print(
        f"draw {i:4d}: log density {log_density[:, i].mean():.1f}, "
        f"accuracy {accuracies[:, i].mean():.4f}, step size {float(draws.kernel.step_size):.4g}"
    )
console.print(
    f"single draws {average_accuracy:.4f}, their average {bma_accuracy:.4f} "
    f"({bma_accuracy - average_accuracy:+.4f}), the mode {mode_accuracy:.4f}"
)

# %% [markdown]
# ## Where arrays lie, and what a step sends

# %%
console.print(
    gm.visualize(
        {
            "train images": plate.data["image"],
            "w": draws.state.position["w"],
            "draws of w": draws.position["w"],
            "terms of a state": jax.tree.leaves(draws.state.terms["plates"])[0],
        },
    )
)
step = jax.jit(jax.vmap(gm.HMC.step, in_axes=(None, 0, 0)))
keys = jax.random.split(jax.random.key(0), num_chains)
report = gm.communication(step, draws.kernel, keys, draws.state)
console.print(report)

# %% [markdown]
# ## The figure


# %%
def plot_traces(axes):
    """Draw log density, accuracy and step size over iterations, warm-up shaded."""
    num_grey = num_warmup + num_dropped
    steps = np.arange(num_grey + num_samples)
    kept = steps[num_grey:]
    trace = [whole.warmup["log_density"], np.asarray(whole.stats["log_density"])]
    axes[0].plot(np.concatenate(trace, axis=1).T, lw=0.8)
    axes[0].set(title="log density", ylim=(log_density.min() - 150, log_density.max() + 150))
    axes[1].plot(kept, accuracies.T, lw=0.6, alpha=0.7)
    axes[1].axhline(bma_accuracy, color="black", label=f"average of all draws {bma_accuracy:.4f}")
    axes[1].axhline(average_accuracy, color="black", ls=":", label=f"one draw {average_accuracy:.4f}")
    axes[1].set(title="test accuracy of each draw")
    axes[1].legend(loc="lower left", bbox_to_anchor=(0, 0.55))
    axes[2].plot(steps[:num_warmup], draws.warmup["step_size"], color="tab:blue")
    axes[2].plot(
        steps[num_warmup:], [float(draws.kernel.step_size)] * len(steps[num_warmup:]), "tab:blue"
    )
    axes[2].set(title="step size", yscale="log")
    for axis in axes:
        axis.axvspan(0, num_grey, color="0.92")
        axis.set(xlabel="iteration (grey: warm-up)", xlim=(0, len(steps) - 1))


def plot_images(axes, images, title, **style):
    """Draw one image for each class in a row."""
    for k, axis in enumerate(axes):
        axis.imshow(np.asarray(images)[:, k].reshape(dataset.shape), **style)
        axis.set_axis_off()
        axis.set_title(f"{title} {k}" if k == 0 else str(k), fontsize=9)


def plot_doubt(axes):
    """Draw the test images whose averaged prediction is the least certain."""
    entropy = -np.sum(averaged * np.log(np.maximum(averaged, 1e-12)), axis=1)
    for axis, n in zip(axes, np.argsort(-entropy), strict=False):
        first, second = np.argsort(-averaged[n])[:2]
        axis.imshow(dataset.test_images[n].reshape(dataset.shape), cmap="gray_r")
        axis.set_title(
            f"{first} ({averaged[n, first]:.2f}) or {second} ({averaged[n, second]:.2f})\nis "
            f"{dataset.test_labels[n]}",
            fontsize=8,
        )
        axis.set_axis_off()


figure = plt.figure(figsize=(15, 9.5), layout="constrained")
rows = figure.add_gridspec(3, 1, height_ratios=[1.5, 1.5, 1])
top, middle, bottom = (figure.add_subfigure(rows[i]) for i in range(3))
plot_traces(top.subplots(1, 3))
grid = middle.subplots(2, num_classes)
reach = float(np.quantile(np.abs(weight_mean), 0.995))
plot_images(grid[0], weight_mean, "mean weights", cmap="RdBu", vmin=-reach, vmax=reach)
plot_images(grid[1], weight_sd, "their sd", cmap="viridis", vmin=0)
plot_doubt(bottom.subplots(1, 8))
bottom.suptitle("the test images that the average of all draws is least sure of", fontsize=10)
figure.suptitle(
    f"{dataset.name}: {plate.rows.num_rows} rows on {len(devices)} devices, {num_chains} chains\n"
    f"{mixing}"
)
figure.savefig(options.out / "mnist_logistic.png", dpi=110)
gm.plots.overview(draws).savefig(options.out / "mnist_logistic_run.png", dpi=110)

# %%
summary = {
    "devices": len(devices),
    "mesh": dict(mesh.shape),
    "data": dataset.name,
    "rows": plate.rows.num_rows,
    "num_chains": num_chains,
    "num_warmup": num_warmup,
    "num_samples": num_samples,
    "mode_accuracy": mode_accuracy,
    "average_accuracy": average_accuracy,
    "bma_accuracy": bma_accuracy,
    "acceptance_rate": float(draws.acceptance_rate.mean()),
    "num_divergent": int(draws.num_divergent.sum()),
    "step_size": float(draws.kernel.step_size),
    "rhat_log_density": rhat,
    "rhat_max": rhat_max,
    "leapfrogs": watch.leapfrogs,
    "leapfrogs_per_second": watch.leapfrogs_per_second,
    "compile_seconds": watch.compile_seconds,
    "all_reduces_per_leapfrog": report.runs("all-reduce", within="leapfrog"),
    "all_gathers": report.count("all-gather"),
    "largest_constant_bytes": report.largest_constant_bytes,
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
    **of_paper,
}
common.write_summary(console, options.out, summary)
