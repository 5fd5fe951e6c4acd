# %% [markdown]
"""A neural network over a 4x2 mesh: trained, then sampled, with one unchanged model.

The network of JAX's tutorial "Distributed arrays and automatic parallelization", fully connected with
relu: first with the batch over all devices, then with the batch over half as many and the inner
layers' weights over two. The demo then goes beyond the tutorial: it samples the posterior of those
weights by HMC on the same mesh in a plain training loop, and measures the calibration of the
predictions.

    python demos/neural_network.py [--devices N] [--data-dir DIR] [--out DIR] [--quick] [--paper]

Layers are (784, 64, 64, 64, 10), and the training set is the first 4,096 images, sized for 2 cores.
`--paper` uses the tutorial's 8,192 units per layer and 8,192 images: 141 million weights, for
accelerators.
"""

# %%
import functools
import time

import common
import datasets
import jax
import jax.numpy as jnp
import matplotlib
import neural_network_model as model
import numpy as np
import optax
from arviz_stats.base.array import array_stats
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gspmd_mcmc as gm
from gspmd_mcmc import tree
from gspmd_mcmc.adaptation import dual_averaging

matplotlib.use("agg")
import matplotlib.pyplot as plt

BEGAN = time.perf_counter()
console = Console()
options = common.parse(
    "A neural network over a mesh, trained and sampled",
    "out/neural_network",
    ("--paper", "the tutorial's 8192 units a layer and 8192 images (for accelerators)"),
)
devices = common.start_devices(options.devices)
num_devices = len(devices)
if num_devices % 2:
    raise SystemExit(f"{num_devices} devices: expected an even number, as weights lie over two")
width, num_rows = (8192, 8192) if options.paper else (64, 4096)
num_sgd, num_adam, num_timings = 30, 600, 11
num_burn_in, num_draws, num_leapfrogs = 20, 40, 140
if options.quick:
    num_rows, num_sgd, num_adam, num_timings = 1024, 5, 60, 3
    num_burn_in, num_draws, num_leapfrogs = 8, 6, 10


def show(title, rows):
    """Print a table of dictionaries that have the same keys."""
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
    console.print(table)


# %% [markdown]
# ## The data
#
# The tutorial's inputs are standard normal; here pixels are shifted and scaled by the mean and the sd
# of all training pixels. The training set is cut to a multiple of the number of devices, because
# `LogDensity`, below, accepts no padded rows.

# %%
dataset = datasets.load_mnist(options.data_dir)
num_rows = min(num_rows, len(dataset.train_images)) // num_devices * num_devices
pixels = dataset.train_images[:num_rows].astype(np.float32)
train = {"image": (pixels - pixels.mean()) / pixels.std(), "label": dataset.train_labels[:num_rows]}
test_inputs = (dataset.test_images.astype(np.float32) - pixels.mean()) / pixels.std()
test_labels = dataset.test_labels
sizes = (pixels.shape[1], width, width, width, dataset.num_classes)
console.print(f"data: {dataset.source}")
console.print(f"layers {sizes}, {num_rows} training images, {len(test_labels)} test images")

# %% [markdown]
# ## One model, three layouts
#
# Only the placement differs. The tutorial shards the second layer's weights over the model axis by
# columns and the third layer's by rows; the first and the last layer are replicated.

# %%
one, by_rows, by_both = "1 device", f"{num_devices}x1", f"{num_devices // 2}x2"
meshes = {
    one: gm.make_mesh(data=1, devices=devices[:1]),
    by_rows: gm.make_mesh(data=num_devices, devices=devices),
    by_both: gm.make_mesh(data=num_devices // 2, model=2, devices=devices),
}
weight_specs = model.weight_specs(len(sizes) - 1)
specs = {one: P(), by_rows: P(), by_both: weight_specs}
drawn_params = jax.device_get(model.init_params(jax.random.key(0), sizes))
params = {name: gm.place(drawn_params, mesh, specs[name]) for name, mesh in meshes.items()}
batches = {name: gm.place(train, mesh, P("data")) for name, mesh in meshes.items()}
for name in (by_rows, by_both):
    console.print(f"\n[bold]{name}[/bold]")
    console.print(gm.visualize({"batch": batches[name], "params": params[name]}))

# %% [markdown]
# ## The same loss, the same gradient
#
# With the batch over all devices, a gradient ends in one sum of all weights over "data". With weights
# over "model" too there is a sum of activations over "model" in the forward pass, where the columns of
# the second layer meet the rows of the third, and one in the backward pass; "data" sums half of the
# inner weights.

# %%
loss_and_grad = jax.jit(jax.value_and_grad(model.loss))
compiled = {n: loss_and_grad.lower(params[n], batches[n]).compile() for n in meshes}
reports = {n: gm.communication(compiled[n], params[n], batches[n]) for n in meshes}
results = {n: jax.device_get(compiled[n](params[n], batches[n])) for n in meshes}


def milliseconds(programs):
    """Return the median time of each program; they run in turn, to share what disturbs them."""
    times = {name: [] for name in programs}
    for _ in range(num_timings):
        for name, run in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(t)) * 1e3 for name, t in times.items()}


def over(report, axis, within=None):
    """Count how often collectives of any kind run over a mesh axis."""
    return sum(c.times(within) for c in report.collectives if c.axes == (axis,))


@jax.jit
def sgd_step(params, batch):
    value, grads = jax.value_and_grad(model.loss)(params, batch)
    return jax.tree.map(lambda x, g: x - 0.05 * g, params, grads), value


def sgd(name):
    """Take the tutorial's steps from the first parameters, laid out as they are."""
    trained = params[name]
    for _ in range(num_sgd):
        # Virtual devices share a pool of threads, in which several programs with collectives can starve
        # each other. Wait for each step, so that one program at a time runs.
        trained, _ = jax.block_until_ready(sgd_step(trained, batches[name]))
    return trained


gradient_ms = milliseconds({n: functools.partial(compiled[n], params[n], batches[n]) for n in meshes})
trained = {name: sgd(name) for name in meshes}
layouts = [
    {
        "layout": name,
        "loss": float(results[name][0]),
        "loss_error": float(abs(results[name][0] / results[one][0] - 1)),
        "grad_error": model.largest_difference(results[name][1], results[one][1]),
        "data_sums": over(reports[name], "data"),
        "model_sums": over(reports[name], "model"),
        "kB": reports[name].sent_bytes() / 1e3,
        "ms": gradient_ms[name],
        "sgd_loss": float(compiled[name](trained[name], batches[name])[0]),
        "kept": model.lies_like(trained[name], params[name]),
    }
    for name in meshes
]
equality = ("layout", "loss", "loss_error", "grad_error", "sgd_loss", "kept")
costs = ("layout", "data_sums", "model_sums", "kB", "ms")
show("relative errors against 1 device", [{k: row[k] for k in equality} for row in layouts])
console.print(f"sgd loss: after {num_sgd} steps; kept: whether the weights kept their layout")
show("sums over mesh axes in a gradient, and their kB", [{k: row[k] for k in costs} for row in layouts])
for name in (by_rows, by_both):
    console.print(f"\n[bold]{name}[/bold]", reports[name], sep="\n")
if devices[0].platform == "cpu":
    console.print(
        "Virtual devices share the cores of one processor: these times show what a layout costs, not "
        f"what it gains. On {by_both} both devices of a pair compute the first layer, as its weights "
        "are whole: most of the work at this size, and little of it at the tutorial's."
    )

# %% [markdown]
# ## At the tutorial's size, compiled but not run
#
# Shapes with shardings are enough to see what a gradient sends and what each device holds.

# %%
paper_params = jax.eval_shape(lambda: model.init_params(jax.random.key(0), (784, *[8192] * 3, 10)))
paper_batch = {
    "image": jax.ShapeDtypeStruct((8192, 784), "float32"),
    "label": jax.ShapeDtypeStruct((8192,), "int32"),
}
tutorial_size = []
for name, spec in ((by_rows, jax.tree.map(lambda _: P(), weight_specs)), (by_both, weight_specs)):
    laid_batch = model.shapes_on(meshes[name], paper_batch, {"image": P("data"), "label": P("data")})
    report = gm.communication(
        loss_and_grad, model.shapes_on(meshes[name], paper_params, spec), laid_batch
    )
    tutorial_size.append(
        {
            "layout": name,
            "data_sums": over(report, "data"),
            "model_sums": over(report, "model"),
            "GB": report.sent_bytes() / 1e9,
            "argument_GB": report.argument_bytes / 1e9,
            "temporary_GB": report.temporary_bytes / 1e9,
        }
    )
show("a gradient at the tutorial's size, on each device", tutorial_size)

# %% [markdown]
# ## Optax first: two single networks
#
# Both start from one draw of the prior: N(0, 2 / fan_in) for weights and N(0, 1) for biases. One
# maximizes the likelihood; the other maximizes the posterior density, and the chain starts there.

# %%
mesh, batch = meshes[by_both], batches[by_both]


def likelihood_alone(params, batch):
    return model.log_likelihood(params, batch)


def maximize(summands):
    """Run Adam on a sum; return parameters, and log prior and log likelihood by step, [steps, 2]."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, num_adam))

    def objective(params, batch):
        parts = jnp.stack([tree.total(x) for x in model.log_density(params, batch)])
        return -tree.total(summands(params, batch)) / num_rows, parts

    @jax.jit
    def train_step(params, optimizer_state, batch):
        grads, parts = jax.grad(objective, has_aux=True)(params, batch)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, parts

    found, optimizer_state, parts_by_step = params[by_both], optimizer.init(params[by_both]), []
    for _ in track(range(num_adam), f"Adam on {summands.__name__}", console=console):
        found, optimizer_state, parts = train_step(found, optimizer_state, batch)
        parts_by_step.append(np.asarray(parts))  # and wait
    return found, np.array(parts_by_step)


likelihood_params, _ = maximize(likelihood_alone)
map_params, adam_trace = maximize(model.log_density)
mode_prior, mode_likelihood = adam_trace[-1].tolist()
console.print(f"the mode: log prior {mode_prior:.1f}, log likelihood {mode_likelihood:.1f}")

# %% [markdown]
# ## Which target is right for weights over "model"?
#
# The two sums over "model" belong to a block of rows. A `Plate` streams its rows in tiles and does both
# sums in every tile, but its temporaries have the size of a tile. `LogDensity` takes all rows at once
# and does them once. Either way the gradient ends in one sum over "data".

# %%
block_rows = num_rows // mesh.shape["data"]


def posterior(tile_rows):
    return gm.Posterior(model.log_prior, gm.Plate(model.log_likelihood, batch, tile_rows=tile_rows))


candidates = {"LogDensity": gm.LogDensity(model.log_density, batch), "Plate, 128 rows": posterior(128)}
if not options.quick:
    candidates |= {"Plate, one tile": posterior(block_rows), "Plate, default tiles": posterior(None)}
variances = gm.place(jax.device_get(model.prior_variances(drawn_params)), mesh, weight_specs)
init, step = jax.jit(gm.HMC.init), jax.jit(gm.HMC.step)
arguments, step_programs = {}, {}
for name, target in candidates.items():
    kernel = gm.HMC(target, 1e-4, 10, inverse_mass_matrix=variances)
    arguments[name] = kernel, jax.random.key(0), jax.block_until_ready(init(kernel, map_params))
    step_programs[name] = step.lower(*arguments[name]).compile()
step_reports = {n: gm.communication(program, *arguments[n]) for n, program in step_programs.items()}
step_ms = milliseconds({n: functools.partial(p, *arguments[n]) for n, p in step_programs.items()})
targets = [
    {
        "target": name,
        "model_sums": over(report, "model", "leapfrog"),
        "data_sums": over(report, "data", "leapfrog"),
        "kB": report.sent_bytes("leapfrog") / 1e3,
        "ms": step_ms[name] / 10,
        "temporary_MB": report.temporary_bytes / 1e6,
    }
    for name, report in step_reports.items()
]
show("a leapfrog of each target (of a step of 10), memory on each device", targets)
# Collectives decide: real devices wait for each other in every one, and the times of virtual devices do
# not show that. Memory decides between equals; if it were short, take a plate with the largest tiles.
chosen = min(targets, key=lambda row: (row["model_sums"], row["temporary_MB"]))["target"]
console.print(
    f"Chosen: {chosen}. No target sends less often, and of those that send as seldom it needs the "
    "least memory, which at this size is little. Tiles send the same bytes in more pieces."
)
console.print(step_reports[chosen])

# %% [markdown]
# ## HMC, in the same kind of loop
#
# The kernel and its data are arguments; another step size does not recompile. The metric is that of the
# prior. During burn-in, dual averaging moves the step size toward an acceptance rate of 0.8; all kept
# draws come from one kernel. Nothing is tempered.

# %%
kernel, _, state = arguments[chosen]
kernel = kernel.with_step_size(2e-3).with_num_integration_steps(num_leapfrogs)
averaging = dual_averaging.init(kernel.step_size)
placed = gm.place(test_inputs, mesh, P("data"))
placed = getattr(placed, "values", placed)  # rows of pad, if any, are cut off again below
probabilities = jax.jit(model.probabilities)


def predict(params):
    """Return class probabilities of the test images, on the host."""
    return np.asarray(probabilities(params, placed), np.float64)[: len(test_labels)]


@jax.jit
def metrics(kernel, state, info):
    log_prior = tree.total(model.log_prior(state.position))
    return {
        "log_prior": log_prior,
        "log_likelihood": state.log_density - log_prior,
        "step_size": kernel.step_size,
        "acceptance_rate": info.acceptance_rate,
        "energy": info.energy,
        "energy_error": info.energy_error,
        "is_divergent": info.is_divergent,
    }


history, drawn = [], []
sampling_began = time.perf_counter()
for number in track(range(num_burn_in + num_draws), "HMC", console=console):
    state, info = step(kernel, jax.random.fold_in(jax.random.key(1), number), state)
    history.append(jax.device_get(metrics(kernel, state, info)))
    if number >= num_burn_in:
        drawn.append(predict(state.position))
        continue
    averaging = dual_averaging.update(averaging, info.acceptance_rate, 0.8)
    is_last = number == num_burn_in - 1
    tuned = dual_averaging.final_step_size(averaging) if is_last else jnp.exp(averaging.log_step_size)
    kernel = kernel.with_step_size(tuned)
sampling_seconds = time.perf_counter() - sampling_began
trace = {name: np.array([h[name] for h in history]) for name in history[0]}
kept = {name: values[num_burn_in:] for name, values in trace.items()}
layout_kept = model.lies_like(state.position, params[by_both])
console.print(f"after the last step the weights are laid out as at the first: {layout_kept}")

# %% [markdown]
# ## Calibration on the test images
#
# The ensemble predicts with the average of the draws' probabilities. Where draws disagree, it is less
# confident than each draw, which corrects overconfidence and may overshoot. The log score is the mean
# log probability of the true class; larger is better. The expected calibration error (ECE) uses 15 bins
# of equal width (Guo et al., 2017); smaller is better.

# %%
singles = {"maximum likelihood": predict(likelihood_params), "mode (MAP)": predict(map_params)}
ensemble = np.mean(drawn, axis=0)
predicted = singles | {"HMC ensemble": ensemble}
of_draws = [model.scores(p, test_labels) for p in drawn]
mean_of_draws = {k: float(np.mean([s[k] for s in of_draws])) for k in of_draws[0]}
scores = {name: model.scores(p, test_labels) for name, p in predicted.items()}
scores["one draw, on average"] = mean_of_draws
gains = {
    n: model.gain(predicted["HMC ensemble"], predicted[n], test_labels) for n in list(predicted)[:2]
}
show(f"{len(test_labels)} test images", [{"prediction": n} | s for n, s in scores.items()])
show("what the ensemble gains over", [{"single network": n} | g for n, g in gains.items()])
for name, found in gains.items():
    ratio = found["log_score_gain"] / found["log_score_se"]
    verdict = "better than" if ratio > 2 else "worse than" if ratio < -2 else "as good as"
    console.print(f"log score: the ensemble is {verdict} {name} ({ratio:+.1f} standard errors)")
if options.quick:
    console.print("A --quick chain is far too short to judge the ensemble.")
for name, found in scores.items():
    bias = found["mean_confidence"] - found["accuracy"]
    console.print(f"{name}: {'over' if bias > 0 else 'under'}confident by {abs(bias):.4f}")

# %% [markdown]
# ## The figure


# %%
def plot_layouts(axes):
    """Draw where the inner layers' weights live, on both meshes."""
    for axis, (name, i) in zip(axes, ((n, i) for n in (by_rows, by_both) for i in (1, 2)), strict=True):
        gm.visualize({f"{name}, layer {i + 1}": params[name][i]["w"]}, ax=axis)


def plot_descent(axes):
    """Draw minus log prior and minus log likelihood along Adam, and then along HMC."""
    of_hmc = np.stack([trace["log_prior"], trace["log_likelihood"]], axis=1)
    for axis, parts in zip(axes, (adam_trace, of_hmc), strict=True):
        axis.plot(-parts[:, 0], color="#0072B2", label="minus log prior")
        axis.plot(-parts[:, 1], color="#D55E00", label="minus log likelihood")
        axis.plot(-parts.sum(axis=1), color="black", lw=1, label="minus log density")
        axis.set(xlabel="step", yscale="log", xlim=(0, len(parts) - 1))
    axes[0].set(title="Adam to the mode", ylabel="nats")
    axes[1].set(title="then HMC (grey: burn-in)")
    axes[1].axvspan(0, num_burn_in, color="0.92", zorder=0)
    axes[1].legend(loc="center right", fontsize=8)


figure = plt.figure(figsize=(16, 9), layout="constrained")
rows = figure.add_gridspec(2, 1, height_ratios=[0.8, 1.3])
thirds = rows[1].subgridspec(1, 3, width_ratios=[1, 1.3, 1])
descent = thirds[1].subgridspec(1, 2, wspace=0.05).subplots(sharey=True)
plot_layouts(rows[0].subgridspec(1, 4).subplots())
model.plot_reliability(figure.add_subplot(thirds[0]), predicted, test_labels)
plot_descent(descent)
model.plot_running_score(figure.add_subplot(thirds[2]), drawn, singles, test_labels)
figure.suptitle(
    f"{dataset.name}: layers {sizes}, trained and sampled on a {by_both} mesh, {num_rows} images"
)
figure.savefig(options.out / "neural_network.png", dpi=110)
plt.close(figure)

# %%
one_chain = kept["log_likelihood"][None]
halves = one_chain.reshape(2, -1)
summary = {
    "devices": num_devices,
    "mesh": dict(mesh.shape),
    "data": dataset.name,
    "sizes": list(sizes),
    "rows": num_rows,
    "layouts": layouts,
    "tutorial_size": tutorial_size,
    "log_prior_at_mode": mode_prior,
    "log_likelihood_at_mode": mode_likelihood,
    "targets": targets,
    "target": chosen,
    "num_burn_in": num_burn_in,
    "num_draws": num_draws,
    "num_leapfrogs": num_leapfrogs,
    "step_size": float(kernel.step_size),
    "acceptance_rate": float(kept["acceptance_rate"].mean()),
    "num_divergent": int(kept["is_divergent"].sum()),
    "num_divergent_in_burn_in": int(trace["is_divergent"][:num_burn_in].sum()),
    "energy": float(kept["energy"].mean()),
    "energy_sd": float(kept["energy"].std()),
    "energy_error_sd": float(kept["energy_error"].std()),
    "log_prior": float(kept["log_prior"].mean()),
    "log_likelihood": float(one_chain.mean()),
    "rhat_of_halves": float(np.asarray(array_stats.rhat(halves, chain_axis=0, draw_axis=1))),
    "ess_log_likelihood": float(np.asarray(array_stats.ess(one_chain, chain_axis=0, draw_axis=1))),
    "layout_kept": layout_kept,
    "scores": [{"prediction": n} | s for n, s in scores.items()],
    "gains": [{"single network": n} | g for n, g in gains.items()],
    "ms_per_leapfrog": sampling_seconds / len(history) / num_leapfrogs * 1e3,
    "largest_constant_bytes": step_reports[chosen].largest_constant_bytes,
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
