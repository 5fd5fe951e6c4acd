# %% [markdown]
"""Who watches what: matrix factorization of MovieLens 1M, with users' latents sharded like their rows.

The model of the notebook "Distributed inference with TFP and JAX": user embeddings U ~ N(0, 1) and
movie embeddings V ~ N(0, 1), 20 dimensions each, biases u, v ~ N(0, 1), and every one of 6,040 x 3,706
cells W_ij ~ Bernoulli(sigmoid(U_i . V_j + u_i + v_j)). Cells stay uint8; users are sharded
over the devices.

    python demos/movielens.py [--devices N] [--data-dir DIR] [--out DIR] [--quick] [--paper]

A fifth of all cells, watched or not, is held out. On these cells the posterior mean of the watch
probability is compared with popularity, with the mode and with single draws. By default 2 chains start
around the mode; `--paper` uses the settings of the notebook: 100 leapfrogs, 1000 + 500 steps. U and V
are identified only up to rotations, so convergence is judged by logits and by the log density.
"""

# %%
import dataclasses
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import movielens_data
import numpy as np
from arviz_stats.base.array import array_stats
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

DIMENSIONS, HIDDEN_SHARE, TOP = 20, 0.2, 20
NUM_SINGLES = 8  # single draws that are looked at one by one

BEGAN = time.perf_counter()
console = Console()
options = common.parse(
    "Matrix factorization of MovieLens 1M",
    "out/movielens",
    ("--paper", "the notebook's setting: 100 leapfrogs, 1000 + 500 steps (hours on a CPU)"),
)
devices = common.start_devices(options.devices)
dataset = movielens_data.load_movielens(options.data_dir)
if options.quick:
    dataset = dataclasses.replace(dataset, watched=dataset.watched[:1001, :600])
num_users, num_movies = dataset.watched.shape
console.print(f"data: {dataset.source}")

# %% [markdown]
# ## Cells: watched or not in the first bit, hidden or not in the second


# %%
def hide(watched):
    """Mark a random fifth of all cells as hidden, by adding 2 to their bytes."""
    rng = np.random.default_rng(0)
    cells = watched.copy()
    for row in cells:
        row += 2 * (rng.random(num_movies, np.float32) < HIDDEN_SHARE).astype(np.uint8)
    return cells


def is_watched(cells):
    """Tell for each cell whether the user has watched the movie."""
    return cells & 1


def is_hidden(cells):
    """Tell for each cell whether it is hidden from the likelihood."""
    return cells >= 2


# %% [markdown]
# ## The model, written for one device


# %%
def log_prior(params):
    """Movies, which all users share: N(0, 1), up to a constant, element by element."""
    return -0.5 * params["V"] ** 2, -0.5 * params["v"] ** 2


def logits(params):
    """Log odds of watching, [users, movies], of any block of users."""
    return gm.inner_products(params["U"], params["V"], params["u"], params["v"])


def log_likelihood(params, cells):
    """Terms of each user: visible cells, and the user's own N(0, 1) prior, [users]."""
    log_prob = gm.bernoulli_logits(logits(params), is_watched(cells))
    prior = -0.5 * jnp.sum(params["U"] ** 2, axis=1) - 0.5 * params["u"] ** 2
    return jnp.sum(jnp.where(is_hidden(cells), 0.0, log_prob), axis=1) + prior


# %% [markdown]
# ## Placement: users' rows and latents sharded over the devices, movies replicated

# %%
mesh = gm.make_mesh(data=len(devices), devices=devices)
cells = hide(dataset.watched)
plate = gm.Plate(log_likelihood, gm.place(cells, mesh, P("data")), local=("U", "u"))
target = gm.Posterior(log_prior, plate)
console.print(f"mesh {dict(mesh.shape)}, {plate}, {plate.data.nbytes / 1e6:.1f} MB of cells")


def start(rng_key):
    """Draw a start with embeddings near zero, and biases at the log odds of being watched."""
    u_key, v_key = jax.random.split(rng_key)
    return {
        "U": 0.3 * jax.random.normal(u_key, (num_users, DIMENSIONS)),
        "V": 0.3 * jax.random.normal(v_key, (num_movies, DIMENSIONS)),
        "u": jnp.zeros(num_users),
        "v": jnp.full(num_movies, odds),
    }


odds = float(np.log(dataset.watched.mean() / (1 - dataset.watched.mean())))

# %% [markdown]
# ## Sampling


# %%
@jax.jit
def curvature(params, cells):
    """Diagonal of minus the Hessian, in closed form: a cell of probability p weighs p (1 - p)."""
    p = jax.nn.sigmoid(logits(params))
    weight = jnp.where(is_hidden(cells), 0.0, p * (1 - p))
    return {
        "U": 1 + weight @ params["V"] ** 2,
        "V": 1 + weight.T @ params["U"] ** 2,
        "u": 1 + jnp.sum(weight, axis=1),
        "v": 1 + jnp.sum(weight, axis=0),
    }


num_chains = 2
with console.status("climbing to the mode"):
    mode = gm.find_mode(
        jax.random.key(1),
        target,
        start(jax.random.key(2)),
        max_steps=5 if options.quick else 250,
        tolerance=2.0,
        num_probes=0,
    )
mode = dataclasses.replace(mode, curvature=curvature(mode.position, plate.data[:num_users]))
console.print(f"mode: log density {float(mode.log_density):.0f} after {mode.num_steps} steps")
if options.paper:
    num_warmup, num_samples, initial = 1000, 500, start
    kernel = gm.HMC(target, 1e-3, 100)
else:
    num_warmup, num_samples, initial = 30, 100, mode.laplace_start()
    kernel = gm.HMC(target, 0.1, 20, inverse_mass_matrix=mode.inverse_mass_matrix, jitter=0.2)
if options.quick:
    num_warmup, num_samples = 2, 4

console.print(f"sampling: {num_chains} chains, {num_warmup} warm-up steps, {num_samples} draws each")
sampling_began = time.perf_counter()
draws = gm.sample(
    jax.random.key(0),
    target,
    initial,
    mesh=mesh,
    num_chains=num_chains,
    num_warmup=num_warmup,
    num_samples=num_samples,
    kernel=kernel,
    warmup=gm.WindowAdaptation(adapt_mass_matrix=False),
)
sampling_seconds = time.perf_counter() - sampling_began

# %% [markdown]
# ## Predictions for every cell, averaged over all draws, in one program


# %%
def by_rows(array):
    """Keep an array of users with the users' devices."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P("data")))


@jax.jit
def watch_probabilities(positions):
    """Average watch probability of every cell over positions [draws, ...]: [users, movies]."""

    def add(total, position):
        return by_rows(total + jax.nn.sigmoid(logits(position)) / num), None

    num = len(positions["u"])
    zeros = by_rows(jnp.zeros((positions["u"].shape[1], num_movies)))
    return jax.lax.scan(add, zeros, positions)[0]


@jax.jit
def scores(probabilities, cells):
    """Recall@20 of each user's hidden cells, averaged over users, and log likelihood a hidden cell.

    A user's recall is the share of hits among the 20 hidden cells that are ranked first, of as many
    as there could be: 20, or all the watched ones among the hidden. Users without any do not count.
    """
    hidden, watched = is_hidden(cells), is_watched(cells) * is_hidden(cells)
    # A sort stays on the users' devices; top_k would gather all users on every device.
    ranked = jnp.sort(jnp.where(hidden, probabilities, -1.0), axis=1, descending=True)
    is_first = hidden & (probabilities >= ranked[:, TOP - 1 : TOP])
    hits = jnp.sum(watched * is_first, axis=1, dtype=jnp.int32)
    possible = jnp.minimum(jnp.sum(watched, axis=1, dtype=jnp.int32), TOP)
    recall = jnp.sum(jnp.minimum(hits, possible) / jnp.maximum(possible, 1)) / jnp.sum(possible > 0)
    p = jnp.clip(probabilities, 1e-6, 1 - 1e-6)
    log_lik = jnp.where(is_watched(cells) == 1, jnp.log(p), jnp.log1p(-p))
    return recall, jnp.sum(jnp.where(hidden, log_lik, 0.0)) / jnp.sum(hidden)


@jax.jit
def popularity(cells):
    """Each movie's share of watchers among the users whose cell is visible, in every row."""
    seen = ~is_hidden(cells)
    counts = jnp.sum(is_watched(cells) * seen, axis=0, dtype=jnp.int32)
    share = (counts + 1) / (jnp.sum(seen, axis=0) + 2)
    return by_rows(jnp.broadcast_to(share, cells.shape))


def score(probabilities):
    """Return recall and log likelihood as numbers."""
    return [float(x) for x in scores(probabilities, all_cells)]


all_cells = plate.data[:num_users]  # less users that only pad the mesh
flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), draws.position)
num_draws = num_chains * draws.num_draws
with console.status(f"averaging {num_draws} draws"):
    averaged = watch_probabilities(flat)
    chosen = np.linspace(0, num_draws - 1, min(NUM_SINGLES, num_draws)).astype(int)
    singles = [
        score(watch_probabilities(jax.tree.map(lambda x, i=i: x[i][None], flat))) for i in chosen
    ]
    results = {
        "bma": score(averaged),
        "single": [float(x) for x in np.mean(singles, axis=0)],
        "mode": score(watch_probabilities(jax.tree.map(lambda x: x[None], mode.position))),
        "popularity": score(popularity(all_cells)),
    }

table = Table(title="on the hidden cells")
for column in ("prediction", f"recall@{TOP}", "log likelihood a cell"):
    table.add_column(column)
for name, (recall, log_lik) in results.items():
    table.add_row(name, f"{recall:.4f}", f"{log_lik:.5f}")
console.print(table)

# %% [markdown]
# ## Convergence, judged by logits of random cells, never by U or V themselves


# %%
def rhat(values):
    """R-hat of [chains, draws, ...], element by element."""
    return np.asarray(array_stats.rhat(np.asarray(values, np.float64), chain_axis=0, draw_axis=1))


rng = np.random.default_rng(1)
users, movies = rng.integers(0, num_users, 400), rng.integers(0, num_movies, 400)
U, u = (np.asarray(draws.position[name])[:, :, users] for name in "Uu")
V, v = (np.asarray(draws.position[name])[:, :, movies] for name in "Vv")
rhat_logits = rhat(np.sum(U * V, axis=-1) + u + v)
rhat_biases = rhat(np.concatenate([u, v], axis=2))
rhat_log_density = float(rhat(draws.stats["log_density"]))
worst = max(rhat_log_density, float(rhat_logits.max()))
console.print(
    f"R-hat: log density {rhat_log_density:.2f}, logits of 400 cells {np.median(rhat_logits):.2f} "
    f"(median) to {rhat_logits.max():.2f}, biases up to {rhat_biases.max():.2f}"
)
if worst > 1.05:
    console.print(
        "The chains have [bold]not converged[/bold]: averages cover only the region that "
        f"{draws.num_draws} draws per chain have visited. Take more draws, or use --paper."
    )

# %% [markdown]
# ## Recommendations for who watched most, and who watched least


# %%
def recommend(user):
    """Return the movies that a user most probably watches, of those not known to be watched."""
    probability = np.asarray(averaged[user])
    is_known = (cells[user] & 1).astype(bool) & (cells[user] < 2)
    return [int(m) for m in np.argsort(np.where(is_known, 1.0, -probability))[:TOP]]


def listed(user, best):
    """Return titles, genres and probabilities, for the summary."""
    probability = np.asarray(averaged[user])
    return [
        {
            "title": dataset.titles[m],
            "genres": list(dataset.genres[m]),
            "probability": float(probability[m]),
            "hidden_and_watched": bool(dataset.watched[user, m]),
        }
        for m in best
    ]


counts = dataset.watched.sum(axis=1)
most, least = int(counts.argmax()), int(counts.argmin())
best = {user: recommend(user) for user in (most, least)}
for user in (most, least):
    rows = Table(title=f"for the user who watched {counts[user]} movies")
    for column in ("probability", "movie", "genres", "hidden, and watched"):
        rows.add_column(column)
    for item in listed(user, best[user])[:10]:
        mark = "yes" if item["hidden_and_watched"] else ""
        rows.add_row(f"{item['probability']:.3f}", item["title"], ", ".join(item["genres"]), mark)
    console.print(rows)

# %% [markdown]
# ## Where arrays lie, and what a step sends

# %%
console.print(
    gm.visualize(
        {
            "cells": plate.data,
            "U": draws.state.position["U"],
            "gradient of U": draws.state.log_density_grad["U"],
            "V": draws.state.position["V"],
        },
    )
)
step = jax.jit(jax.vmap(gm.HMC.step, in_axes=(None, 0, 0)))
keys = jax.random.split(jax.random.key(0), num_chains)
report = gm.communication(step, draws.kernel, keys, draws.state)
console.print(report)
in_loop = [c for c in report.collectives if c.kind == "all-reduce" and c.loops]

# %% [markdown]
# ## The figure


# %%
def plot_traces(axes):
    """Draw log density and log acceptance ratio over iterations, warm-up shaded."""
    before = np.asarray(draws.warmup["log_density"])
    trace = np.concatenate([before, np.asarray(draws.stats["log_density"])], axis=1)
    axes[0].plot(trace.T, lw=0.9)
    axes[0].set(title="log density", xlabel="iteration (grey: warm-up)")
    axes[0].axvspan(0, before.shape[1], color="0.92")
    axes[1].plot(-np.asarray(draws.stats["energy_error"]).T, lw=0.9)
    axes[1].axhline(0, color="black", lw=0.6)
    axes[1].set(title="log acceptance ratio", xlabel="draw")


def plot_scores(axes):
    """Draw recall and log likelihood of the four predictions."""
    names = ["popularity", "single", "mode", "bma"]
    labels = ["popularity", "one draw", "mode", "all draws"]
    colors = ["0.6", "tab:blue", "tab:orange", "tab:green"]
    for axis, k, title in zip(axes, (0, 1), (f"recall@{TOP}", "log likelihood a cell"), strict=True):
        values = [results[name][k] for name in names]
        bars = axis.barh(labels, values, color=colors)
        axis.bar_label(bars, fmt="%.3f" if k == 0 else "%.4f", padding=3)
        axis.margins(x=0.35)
        axis.set(title=f"{title}, hidden cells")


def plot_genres(axis, user):
    """Draw the shares of genres among a user's watched movies and the recommended ones."""
    groups = {"watched": np.flatnonzero(dataset.watched[user]), "recommended": best[user]}
    genres = sorted({g for m in groups["watched"] for g in dataset.genres[m]})
    genres = sorted(set(genres) | {g for m in best[user] for g in dataset.genres[m]})
    for i, (name, group) in enumerate(groups.items()):
        shares = [np.mean([g in dataset.genres[m] for m in group]) for g in genres]
        axis.bar(np.arange(len(genres)) + 0.4 * i, shares, width=0.4, label=name)
    axis.set_xticks(np.arange(len(genres)) + 0.2, genres, rotation=60, ha="right", fontsize=8)
    axis.set(title=f"genres, the user who watched {counts[user]}", ylabel="share of movies")
    axis.legend()


figure = plt.figure(figsize=(15, 9), layout="constrained")
axes = figure.subplots(2, 4, gridspec_kw={"height_ratios": [1, 1.2]})
plot_traces(axes[0, :2])
plot_scores(axes[0, 2:])
for axis in axes[1]:
    axis.remove()
lower = axes[1, 0].get_gridspec()
plot_genres(figure.add_subplot(lower[1, :2]), most)
plot_genres(figure.add_subplot(lower[1, 2:]), least)
size = f"{num_users} x {num_movies} cells on {len(devices)} devices"
figure.suptitle(f"{dataset.name}: {size}, {num_chains} chains x {draws.num_draws} draws")
figure.savefig(options.out / "movielens.png", dpi=110)
gm.plots.overview(draws, ["u[0]", "v[0]"]).savefig(options.out / "movielens_run.png", dpi=110)

# %%
leapfrogs = int(np.asarray(draws.stats["num_integration_steps"])[0].sum())
leapfrogs += draws.warmup["leapfrogs"] // num_chains  # a leapfrog moves all chains
summary = {
    "devices": len(devices),
    "mesh": dict(mesh.shape),
    "data": dataset.name,
    "users": num_users,
    "movies": num_movies,
    "num_chains": num_chains,
    "num_warmup": num_warmup,
    "num_samples": num_samples,
    "acceptance_rate": float(draws.acceptance_rate.mean()),
    "num_divergent": int(draws.num_divergent.sum()),
    "energy_error_sd": float(np.std(np.asarray(draws.stats["energy_error"], np.float64))),
    "leapfrogs": leapfrogs,
    "leapfrogs_per_second": leapfrogs / sampling_seconds,
    "all_reduces_per_leapfrog": report.runs("all-reduce", within="leapfrog"),
    "all_reduce_bytes_per_leapfrog": sum(c.num_bytes for c in in_loop),
    "all_gathers": report.count("all-gather"),
    "peak_temp_mb_per_device": report.temporary_bytes / 1e6,
    "peak_rss_mb": common.peak_rss_mb(),
    "rhat_log_density": rhat_log_density,
    "rhat_logit_median": float(np.median(rhat_logits)),
    "rhat_logit_max": float(rhat_logits.max()),
    "rhat_bias_max": float(rhat_biases.max()),
    **{f"recall_at_20_{name}": recall for name, (recall, _) in results.items()},
    **{f"heldout_log_lik_{name}": log_lik for name, (_, log_lik) in results.items()},
    "recommendations_most": listed(most, best[most]),
    "recommendations_least": listed(least, best[least]),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
