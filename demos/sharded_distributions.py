# %% [markdown]
"""Distributions over devices: `Sharded`, joint distributions, and their posteriors.

This follows the part on `tfp.experimental.distribute` in the notebook "Distributed inference with TFP
and JAX", with its printed samples and log probabilities. There is no pmap and no psum: a `Sharded`
distribution is one distribution, its sample is one array, and the compiler reduces over devices.

    python demos/sharded_distributions.py [--devices N] [--out DIR] [--quick]

It needs no data.
"""

# %%
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist
from arviz_stats.base.array import array_stats
from jax.sharding import PartitionSpec as P
from rich.console import Console

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

BEGAN = time.perf_counter()
console = Console()
options = common.parse("Distributions over devices", "out/sharded_distributions")
devices = common.start_devices(options.devices)
mesh = gm.make_mesh(data=len(devices), devices=devices)
Root = gm.JointDistributionCoroutine.Root

# %% [markdown]
# ## One distribution, its rows over the devices
#
# The notebook's sample, and the log probability that it prints.

# %%
NOTEBOOK_SAMPLE = np.array(
    [1.2152631, 0.7818249, 0.32549605, 0.6828047, 1.3973192, -0.57830244, 0.37862757, 2.7706041]
)
sharded = gm.Sharded(dist.Normal(0.0, 1.0), mesh=mesh, num_rows=8)
placed = gm.place(NOTEBOOK_SAMPLE, mesh, P("data"))
sharded_log_prob = float(sharded.log_prob(placed))
report = gm.communication(gm.Sharded.log_prob, sharded, placed)
sent = [f"{c.kind} of {c.num_bytes} bytes" for c in report.collectives]
console.print(f"gm.Sharded(Normal(0, 1)).log_prob: {sharded_log_prob:.6f}, the notebook -13.734921")
console.print(f"over {len(devices)} devices it sends: {', '.join(sent) or 'nothing'}")

# %% [markdown]
# ## The same key gives the same values on every mesh
#
# 1,003 rows divide evenly only over one device: on other meshes they are padded.


# %%
def values_of(sample):
    """Return the real rows of a sample, on the host."""
    return sample.unpad() if isinstance(sample, gm.Padded) else np.asarray(sample)


counts = [n for n in (1, 2, 4, 8) if n <= len(devices)]
meshes = {n: gm.make_mesh(data=n, devices=devices[:n]) for n in counts}
samples = {
    n: gm.Sharded(dist.Normal(0.0, 1.0), mesh=m, num_rows=1003).sample(jax.random.key(0))
    for n, m in meshes.items()
}
apart = {n: float(np.abs(values_of(s) - values_of(samples[1])).max()) for n, s in samples.items()}
console.print(gm.visualize({f"on {n}": sample for n, sample in samples.items()}))
for n, sample in samples.items():
    console.print(f"{n} devices: {sample!r:.60}, largest difference from one device {apart[n]}")

# %% [markdown]
# ## Gradients of parameters that all rows share
#
# With pmap each device has its own gradient until the program adds them up. Here it is one number,
# compared with the sum in float64.


# %%
def log_prob_of(parameters, value):
    """Log probability of rows under parameters that they share: made anew inside the program."""
    location, scale = parameters
    return gm.Sharded(dist.Normal(location, scale)).log_prob(value)


away = values_of(samples[1]).astype(float) - np.float32(0.3)
exact = (np.sum(away) / 1.5**2, np.sum(away**2 / 1.5**3 - 1 / 1.5))
gradient_errors = {}
for n, sample in samples.items():
    gradients = jax.jit(jax.grad(log_prob_of))((jnp.float32(0.3), jnp.float32(1.5)), sample)
    errors = [abs(float(ours) / truth - 1) for ours, truth in zip(gradients, exact, strict=True)]
    gradient_errors[n] = float(max(errors))
console.print(f"gradients, relative error against float64 by devices: {gradient_errors}")

# %% [markdown]
# ## Joint distributions, in three forms
#
# A list, a dict or a generator function give the same parts, the same draws from one key and the same
# log probability, which is the notebook's.

# %%
NOTEBOOK_VALUE = (
    1.6121525,
    np.array(
        [0.8690128, -0.83167845, 1.2209264, 0.88412696, 0.76478404, -0.66208494, -0.0129658, 0.7391483]
    ),
)
rows = gm.Sharded(dist.Normal(0.0, 1.0), num_rows=8)


def two_parts():
    """Yield a number, and rows that do not depend on it."""
    yield Root(dist.Normal(0.0, 1.0))
    yield Root(rows)


forms = {
    "sequential": gm.JointDistributionSequential([dist.Normal(0.0, 1.0), rows], mesh=mesh),
    "named": gm.JointDistributionNamed({"var0": dist.Normal(0.0, 1.0), "var1": rows}, mesh=mesh),
    "coroutine": gm.JointDistributionCoroutine(two_parts, mesh=mesh),
}
joint_log_probs = {}
for form, joint in forms.items():
    structure = dict(zip(joint.names, NOTEBOOK_VALUE, strict=True))
    value = structure if form == "named" else list(NOTEBOOK_VALUE)
    joint_log_probs[form] = float(joint.log_prob(value))
    console.print(f"{form:>10}: {joint_log_probs[form]:.6f}, the notebook -12.214451")

# %% [markdown]
# ## A regression as a generator, conditioned and sampled
#
# Each row has a latent, its level, which is measured once. All rows share a line and the spread of the
# levels around it. Levels are sharded like their rows and are streamed with them.

# %%
num_rows = 203 if options.quick else 403
TRUTH = {"intercept": -0.4, "slope": 1.3, "spread": 0.8}
NOISE = 0.3


def regression(x):
    """Yield a line, a level near it for each row, and what is measured."""
    intercept = yield Root(dist.Normal(0.0, 2.0), name="intercept")
    slope = yield Root(dist.Normal(0.0, 2.0), name="slope")
    spread = yield Root(dist.HalfNormal(1.0), name="spread")
    level = yield gm.Sharded(dist.Normal(intercept + slope * x, spread), name="level")
    yield gm.Sharded(dist.Normal(level, NOISE), name="y")


rng = np.random.default_rng(0)
x = np.sort(rng.uniform(-2, 2, num_rows)).astype(np.float32)
level = TRUTH["intercept"] + TRUTH["slope"] * x + TRUTH["spread"] * rng.normal(size=num_rows)
y = (level + NOISE * rng.normal(size=num_rows)).astype(np.float32)
joint = gm.JointDistributionCoroutine(regression, gm.place(x, mesh, P("data")), mesh=mesh)
prior = joint.sample(jax.random.key(2))
target = joint.condition(y=gm.place(y, mesh, P("data")))
console.print(f"{joint}, conditioned: {target}")

kernel = gm.HMC(target, 0.1, 10, jitter=0.3)
step = gm.communication(gm.HMC.step, kernel, jax.random.key(0), kernel.init(target.origin()))
all_reduces = step.runs("all-reduce", within="leapfrog")
num_warmup, num_samples = (150, 100) if options.quick else (200, 400)
draws = gm.sample(
    jax.random.key(1),
    target,
    mesh=mesh,
    kernel=kernel,
    num_chains=4,
    num_warmup=num_warmup,
    num_samples=num_samples,
)
console.print(draws)
posterior = {name: np.asarray(x, float) for name, x in draws.position.items()}

# %% [markdown]
# ## Against the exact posterior
#
# With the levels integrated out, y ~ N(intercept + slope x, spread² + noise²). A grid over the spread
# with a Gaussian at each of its points gives the posterior in float64, without sampling.


# %%
def exact_posterior(grid):
    """Return weights of the grid, and mean [grid, 2] and covariance [grid, 2, 2] of the line."""
    design = np.stack([np.ones(num_rows), x.astype(float)], axis=1)
    outcome = y.astype(float)
    variance = grid**2 + NOISE**2
    precision = design.T @ design / variance[:, None, None] + np.eye(2) / 2.0**2
    covariance = np.linalg.inv(precision)
    projected = design.T @ outcome / variance[:, None]
    mean = np.einsum("gij,gj->gi", covariance, projected)
    log_weight = -0.5 * (num_rows * np.log(variance) + outcome @ outcome / variance + grid**2)
    log_weight += 0.5 * np.einsum("gi,gi->g", projected, mean)
    log_weight += 0.5 * np.log(np.linalg.det(covariance))
    weight = np.exp(log_weight - log_weight.max())
    return weight / weight.sum(), mean, covariance


grid = np.linspace(0.3, 1.3, 2001)
weight, line_mean, line_covariance = exact_posterior(grid)
exact_mean = {
    "intercept": float(weight @ line_mean[:, 0]),
    "slope": float(weight @ line_mean[:, 1]),
    "spread": float(weight @ grid),
}
errors_in_mcse = {}
for name, mean in exact_mean.items():
    values = posterior[name]  # [chains, draws]
    ess = float(np.asarray(array_stats.ess(values, chain_axis=0, draw_axis=1, method="mean")))
    errors_in_mcse[name] = float((values.mean() - mean) / (values.std() / np.sqrt(ess)))
    console.print(
        f"{name}: {values.mean():.4f}, exactly {mean:.4f}, {errors_in_mcse[name]:+.2f} standard errors "
        f"off; made with {TRUTH[name]}"
    )
levels = posterior["level"]
level_mean, level_sd = levels.mean(axis=(0, 1)), levels.std(axis=(0, 1))
coverage = float(np.mean(np.abs(level_mean - level) < 1.6449 * level_sd))
console.print(f"{coverage:.3f} of {num_rows} levels lie in their 90% intervals")

# %% [markdown]
# ## The figure

# %%
colors = plt.colormaps["tab10"](np.arange(len(devices)) % 10)


def device_of_rows(sample):
    """Return the device of each real row, read from the array itself."""
    values = getattr(sample, "values", sample)
    found = np.empty(len(values), int)
    for shard in values.addressable_shards:
        found[shard.index[0]] = devices.index(shard.device)
    return found[: len(values_of(sample))]


device_of = device_of_rows(prior.y)


def plot_shards(axis):
    """Show the rows of one draw of the joint distribution, each device's in its color."""
    values = values_of(prior.y)
    for device, color in enumerate(colors):
        own = np.flatnonzero(device_of == device)
        axis.axvspan(own[0] - 0.5, own[-1] + 0.5, color=color, alpha=0.12, lw=0)
        axis.scatter(own, values[own], s=9, color=color, lw=0)
        top = values.max() + 0.06 * np.ptp(values)
        axis.text(own.mean(), top, f"device {device}\n{len(own)} rows", ha="center", fontsize=8)
    axis.set(title="one draw of the joint distribution: where each row of y lies")
    axis.set(xlabel="row, in order of x", ylabel="y, drawn from the prior", xlim=(-0.5, num_rows - 0.5))
    axis.set_ylim(top=values.max() + 0.22 * np.ptp(values))


def plot_line(axis):
    """Show the observed rows by device, the posterior's lines, and the true one."""
    axis.scatter(x, y, s=12, c=colors[device_of], lw=0)
    ends = np.array([-2.0, 2.0])
    shown = np.random.default_rng(0).integers(0, posterior["slope"].size, 60)
    lines = posterior["intercept"].reshape(-1, 1) + posterior["slope"].reshape(-1, 1) * ends
    axis.plot(ends, lines[shown].T, color="black", lw=0.5, alpha=0.15)
    axis.plot(ends, TRUTH["intercept"] + TRUTH["slope"] * ends, color="red", lw=1.5, ls="--")
    axis.plot([], [], color="black", lw=0.8, label="60 draws")
    axis.plot([], [], color="red", lw=1.5, ls="--", label="truth")
    axis.legend(loc="upper left", fontsize=8)
    axis.set(title="observed y, and the line", xlabel="x", ylabel="y")


def exact_density(name, values):
    """Posterior density of one parameter by the grid."""
    if name == "spread":
        return np.interp(values, grid, weight / (grid[1] - grid[0]))
    i = ("intercept", "slope").index(name)
    scale = np.sqrt(line_covariance[:, i, i])
    each = np.exp(-0.5 * ((values[:, None] - line_mean[:, i]) / scale) ** 2) / scale
    return each @ weight / np.sqrt(2 * np.pi)


def plot_marginal(axis, name):
    """Show draws of a parameter, its exact posterior density, and the truth."""
    values = posterior[name].ravel()
    axis.hist(values, bins=40, density=True, color="0.8", label="draws")
    where = np.linspace(values.min(), values.max(), 300)
    axis.plot(where, exact_density(name, where), color="black", lw=1.5, label="exact")
    axis.axvline(TRUTH[name], color="red", ls="--", lw=1.5, label="truth")
    axis.set(title=name, yticks=[])
    axis.locator_params(axis="x", nbins=5)


def plot_levels(axis):
    """Show how far each row's level lies from the line: 90% interval against the truth, by device."""
    line = TRUTH["intercept"] + TRUTH["slope"] * x
    true, found = level - line, level_mean - line
    for device, color in enumerate(colors):
        own = device_of == device
        bars = 1.6449 * level_sd[own]
        axis.errorbar(true[own], found[own], bars, fmt="o", ms=2.5, color=color, lw=0.4)
    ends = np.array([true.min(), true.max()])
    axis.plot(ends, ends, color="red", ls="--", lw=1.5, zorder=5)
    axis.set(title=f"a latent for each row: {100 * coverage:.0f}% of 90% intervals hold the truth")
    axis.set(xlabel="true distance from the line", ylabel="posterior mean, 90% interval")


figure = plt.figure(figsize=(15, 9), layout="constrained")
top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.1], squeeze=False)[:, 0]
plot_shards(top.subplots())
left, middle, right = bottom.subfigures(1, 3, width_ratios=[1.2, 0.8, 1.2], squeeze=False)[0]
plot_line(left.subplots())
marginals = middle.subplots(3, 1)
for panel, name in zip(marginals, TRUTH, strict=True):
    plot_marginal(panel, name)
marginals[0].legend(fontsize=7)
plot_levels(right.subplots())
figure.suptitle(
    f"{num_rows} rows and their latents on {len(devices)} devices: "
    f"{all_reduces} all-reduce a leapfrog, no row is sent"
)
figure.savefig(options.out / "sharded_distributions.png", dpi=110)

# %%
summary = {
    "devices": len(devices),
    "mesh": dict(mesh.shape),
    "sharded_log_prob": sharded_log_prob,
    "sharded_collectives": sent,
    "sample_differences_by_devices": apart,
    "gradient_errors_by_devices": gradient_errors,
    "joint_log_probs": joint_log_probs,
    "rows": num_rows,
    "num_chains": draws.num_chains,
    "num_warmup": num_warmup,
    "num_samples": num_samples,
    "all_reduces_per_leapfrog": all_reduces,
    "all_gathers": step.count("all-gather"),
    "largest_constant_bytes": step.largest_constant_bytes,
    "truth": TRUTH,
    "posterior_mean": {name: float(posterior[name].mean()) for name in TRUTH},
    "exact_posterior_mean": exact_mean,
    "errors_in_mcse": errors_in_mcse,
    "level_coverage_90": coverage,
    "acceptance_rate": float(draws.acceptance_rate.mean()),
    "num_divergent": int(draws.num_divergent.sum()),
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
