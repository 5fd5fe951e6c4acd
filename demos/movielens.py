# %% [markdown]
"""Who watches what: matrix factorization of MovieLens 1M, with users' latents sharded like their rows.

The model of the notebook "Distributed inference with TFP and JAX": user embeddings U ~ N(0, 1) and
movie embeddings V ~ N(0, 1), 20 dimensions each, biases u, v ~ N(0, 1), and every one of 6,040 x 3,706
cells W_ij ~ Bernoulli(sigmoid(U_i . V_j + u_i + v_j)). Cells stay uint8; users are sharded
over the devices.

    python demos/movielens.py [--devices N] [--data-dir DIR] [--any-size]
                              [--out DIR] [--quick] [--paper]

A fifth of all cells, watched or not, is held out. On these cells the posterior mean of the watch
probability is compared with popularity, with the mode and with single draws. By default 2 chains start
around the mode.

`--paper` is the notebook's own run: no cell is held out, 2 chains start at draws of the prior, 100
leapfrogs a step, 800 steps that tune the step size to an acceptance rate of 0.75, 200 more that are
thrown away, 500 draws. It is saved every minute in the folder `run` under `--out`; start it again and
it continues. U and V are identified only up to rotations, so convergence is judged by logits and by
the log density.
"""

# %%
import dataclasses
import time
from collections import Counter
from functools import partial
from textwrap import shorten

import common
import jax
import jax.numpy as jnp
import matplotlib
import movielens_data
import numpy as np
import numpyro.distributions as dist
from arviz_stats.base.array import array_stats
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from movielens_choices import deciles, entropies, hit_rates, is_hidden, is_watched, logits, predict
from rich.console import Console
from rich.table import Table

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

DIMENSIONS, TOP = 20, 20
NUM_SINGLES = 8  # single draws that are looked at one by one

BEGAN = time.perf_counter()
console = Console()
options = common.parse(
    "Matrix factorization of MovieLens 1M",
    "out/movielens",
    ("--paper", "the notebook's own run: 150,000 leapfrogs from draws of the prior (hours on a CPU)"),
    ("--any-size", "accept files of any size, such as your own in the format of MovieLens 1M"),
)
devices = common.start_devices(options.devices)
sizes = None if options.any_size else movielens_data.MOVIELENS_SIZES
dataset = movielens_data.load_movielens(options.data_dir, sizes=sizes)
hidden_share = 0.0 if options.paper else 0.2
if options.quick:
    dataset = dataclasses.replace(dataset, watched=dataset.watched[:1001, :600])
num_users, num_movies = dataset.watched.shape
console.print(f"data: {dataset.source}")

# %% [markdown]
# ## Cells: watched or not in the first bit, hidden or not in the second


# %%
def hide(watched):
    """Mark a random share of all cells as hidden, by adding 2 to their bytes."""
    rng = np.random.default_rng(0)
    cells = watched.copy()
    for row in cells:
        row += 2 * (rng.random(num_movies, np.float32) < hidden_share).astype(np.uint8)
    return cells


# %% [markdown]
# ## The model, written for one device


# %%
def log_prior(params):
    """Movies, which all users share: N(0, 1), up to a constant, element by element."""
    return -0.5 * params["V"] ** 2, -0.5 * params["v"] ** 2


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


def climb():
    """Find the mode, and its curvature."""
    with console.status("climbing to the mode"):
        mode = gm.find_mode(
            jax.random.key(1),
            target,
            start(jax.random.key(2)),
            max_steps=5 if options.quick else 250,
            tolerance=2.0,
            num_probes=0,
        )
    console.print(f"mode: log density {float(mode.log_density):.0f} after {mode.num_steps} steps")
    visible = plate.data[:num_users]
    return dataclasses.replace(mode, curvature=curvature(mode.position, visible))


# %% [markdown]
# The notebook's model as it is written there, its parts in turn: a joint distribution knows its prior,
# so chains can start at draws from it. `Sharded` marks the parts that have the rows of users.


# %%
def joint_model():
    """Yield movies, users, and for each user which movies are watched."""
    V = yield Root(dist.Normal(jnp.zeros((num_movies, DIMENSIONS)), 1.0), name="V")
    v = yield Root(dist.Normal(jnp.zeros(num_movies), 1.0), name="v")
    embedding = dist.Normal(jnp.zeros(DIMENSIONS), 1.0).to_event(1)
    U = yield Root(gm.Sharded(embedding, num_rows=num_users), name="U")
    u = yield Root(gm.Sharded(dist.Normal(0.0, 1.0), num_rows=num_users), name="u")
    is_watched = dist.Bernoulli(logits=logits({"U": U, "V": V, "u": u, "v": v}))
    yield gm.Sharded(is_watched.to_event(1), name="watched")


Root = gm.JointDistributionCoroutine.Root
num_chains, num_dropped, target_rate, checkpoint, mode = 2, 0, 0.8, None, None
if options.paper:
    num_warmup, num_dropped, num_samples = 800, 200, 500
    target_rate, checkpoint = 0.75, options.out / "run"
    target = gm.JointDistributionCoroutine(joint_model, mesh=mesh).condition(watched=cells)
    initial = gm.prior_start(target)
    kernel = gm.HMC(target, 1e-2, 100)
else:
    mode = climb()
    num_warmup, num_samples, initial = 30, 100, mode.laplace_start()
    kernel = gm.HMC(target, 0.1, 20, inverse_mass_matrix=mode.inverse_mass_matrix, jitter=0.2)
if options.quick:
    num_warmup, num_dropped, num_samples = 2, num_dropped and 2, 4

console.print(f"sampling: {num_chains} chains, {num_warmup} warm-up steps, {num_samples} draws each")
with common.Stopwatch() as watch:
    draws = gm.sample(
        jax.random.key(0),
        target,
        initial,
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
# ## Predictions of every cell, and each draw's choice for every user, in one program
#
# A draw ranks a user's movies on the user's device, so nothing is sent: only the choices and the
# averages leave it.


# %%
def by_users(positions):
    """Lay out [draws, ...] of a position like the cells, padded with copies of the last user."""

    def lay_out(name, x):
        x = jnp.asarray(x)
        if name in "Vv":
            return jax.device_put(x, NamedSharding(mesh, P()))
        pad = [(0, 0), (0, len(plate.data) - num_users)] + [(0, 0)] * (x.ndim - 2)
        return jax.device_put(jnp.pad(x, pad, mode="edge"), NamedSharding(mesh, P(None, "data")))

    return {name: lay_out(name, x) for name, x in positions.items()}


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
    share = jnp.broadcast_to(share, cells.shape)
    return jax.lax.with_sharding_constraint(share, NamedSharding(mesh, P("data")))


def score(probabilities):
    """Return recall and log likelihood as numbers."""
    return [float(x) for x in scores(probabilities[:num_users], all_cells)]


def compare(draws, averaged, mode):
    """Score four predictions of the hidden cells: recall and log likelihood of each."""

    def of_one(position):
        return score(predict(by_users(jax.tree.map(lambda x: x[None], position)), plate.data)[0])

    some = np.linspace(0, num_draws - 1, min(NUM_SINGLES, num_draws)).astype(int)
    singles = [of_one(jax.tree.map(lambda x, i=i: x[i], draws)) for i in some]
    return {
        "bma": score(averaged),
        "single": [float(x) for x in np.mean(singles, axis=0)],
        "mode": of_one(mode.position),
        "popularity": score(popularity(all_cells)),
    }


all_cells = plate.data[:num_users]  # less users that only pad the mesh
flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), draws.position)
num_draws = num_chains * draws.num_draws
with console.status(f"averaging {num_draws} draws"):
    positions = by_users(flat)
    averaged, choices = predict(positions, plate.data)
    choices_report = gm.communication(predict, positions, plate.data)
    results = compare(flat, averaged, mode) if hidden_share else {}
    averaged, choices = np.asarray(averaged)[:num_users], np.asarray(choices)[:, :num_users]

table = Table(title="on the hidden cells")
for column in ("prediction", f"recall@{TOP}", "log likelihood a cell"):
    table.add_column(column)
for name, (recall, log_lik) in results.items():
    table.add_row(name, f"{recall:.4f}", f"{log_lik:.5f}")
console.print(table if results else "no cell is hidden, so there is nothing to score")

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
# ## What uncertainty is for: how much the choice varies from draw to draw
#
# The notebook compares two users, who watched most and who watched least, and finds more variety in
# what draws recommend to the second. Here are all users: the entropy of a user's choice over draws, by
# how many movies the user watched, and how often a choice of a hidden cell was right, by that entropy.
#
# What holds, on all of MovieLens 1M with 200 draws: entropy falls from 2.0 nats in the tenth of users
# that watched least to 0.8 in the tenth that watched most, and it says how far a choice can be trusted.
# 97 % of choices are right in the tenth of users with the least entropy and 44 % in that with the most,
# where the average over draws expects 97 % and 41 %; between, it expects up to 3.4 points too many.
#
# What does not hold: two users show little. Within each tenth of users entropies reach from near 0 to
# 2.5 nats or more, and the user who watched most has more (1.1) than the mean of the last tenth. A
# default run has not converged either (see R-hat): entropies are those of the region that its draws
# have visited.

# %%
counts = dataset.watched.sum(axis=1)
most, least = int(counts.argmax()), int(counts.argmin())
entropy = entropies(choices)
by_watched, by_entropy = deciles(counts), deciles(entropy)
entropy_by_watched = [float(entropy[group].mean()) for group in by_watched]
hits = hit_rates(choices, cells, averaged, by_entropy)
chosen = {user: choices[choices[:, user] >= 0, user] for user in (most, least)}
distinct = {user: len(np.unique(movies)) for user, movies in chosen.items()}

table = Table(title="users by movies watched, and by entropy of their choice")
columns = ["decile", "watched (median)", "entropy (mean)"]
columns += ["entropy (median)", "hit rate", "expected"] if hidden_share else []
for column in columns:
    table.add_column(column)
for i, (group, other, hit) in enumerate(zip(by_watched, by_entropy, hits, strict=True)):
    row = [f"{i + 1}", f"{np.median(counts[group]):.0f}", f"{entropy_by_watched[i]:.2f}"]
    row += [f"{np.median(entropy[other]):.2f}"]
    row += [f"{x:.3f}" if x is not None else "none" for x in (hit["observed"], hit["expected"])]
    table.add_row(*row[: len(columns)])
console.print(table)

# %% [markdown]
# ## Recommendations for who watched most, and who watched least

# %%
has_titles, has_genres = any(dataset.titles), any(dataset.genres)
if not has_titles:
    console.print("The catalogue has no titles: movies go by their column, and are not named.")
if not has_genres:
    console.print("The catalogue has no genres: the figure goes without them.")


def title(movie):
    """Return a movie's title, or its column if it has none."""
    return dataset.titles[movie] or f"movie {movie}"


def listed(user):
    """List the movies that a user most probably watches, of those not known to be watched."""
    best = np.argsort(-averaged[user])
    best = best[cells[user, best] != 1][:TOP]
    return [
        {
            "title": title(m),
            "genres": list(dataset.genres[m]),
            "probability": float(averaged[user, m]),
            "share_of_draws": float(np.mean(choices[:, user] == m)),
            "hidden_and_watched": bool(cells[user, m] == 3),
        }
        for m in best
    ]


best = {user: listed(user) for user in (most, least)}
for user in (most, least):
    rows = Table(
        title=f"for the user who watched {counts[user]} movies; draws choose {distinct[user]} movies"
    )
    for column in ("probability", "chosen by", "movie", "genres", "hidden, and watched"):
        rows.add_column(column)
    for item in best[user][:10]:
        mark = "yes" if item["hidden_and_watched"] else ""
        numbers = f"{item['probability']:.3f}", f"{item['share_of_draws']:.1%}"
        rows.add_row(*numbers, item["title"], ", ".join(item["genres"]), mark)
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
COLORS = {most: "tab:blue", least: "tab:orange"}


def plot_density(axis):
    """Draw log density over iterations, warm-up shaded."""
    traces = [np.asarray(x) for x in (whole.warmup["log_density"], whole.stats["log_density"])]
    axis.plot(np.concatenate(traces, axis=1).T, lw=0.9)
    kept = np.asarray(draws.stats["log_density"])
    reach = max(np.ptp(kept), 1.0)
    axis.set(title="log density", xlabel="iteration (grey: warm-up)")
    axis.set_ylim(kept.min() - 2 * reach, kept.max() + reach)
    axis.axvspan(0, num_warmup + num_dropped, color="0.92")


def plot_ratio(axis):
    """Draw the log acceptance ratio over draws."""
    axis.plot(-np.asarray(draws.stats["energy_error"]).T, lw=0.9)
    axis.axhline(0, color="black", lw=0.6)
    axis.set(title="log acceptance ratio", xlabel="draw")


def plot_score(k, form, axis):
    """Draw recall or log likelihood of the four predictions."""
    labels = {"popularity": "popularity", "single": "one draw", "mode": "mode", "bma": "all draws"}
    values = [results[name][k] for name in labels]
    colors = ["0.6", "tab:blue", "tab:orange", "tab:green"]
    bars = axis.barh(list(labels.values()), values, color=colors)
    axis.bar_label(bars, fmt=form, padding=3)
    axis.margins(x=0.35)
    axis.set(title=f"{(f'recall@{TOP}', 'log likelihood a cell')[k]}, hidden cells")


def plot_entropy(axis):
    """Draw the entropy of each user's choice against movies watched, and means of deciles."""
    axis.plot(counts, entropy, ".", ms=2, color="0.75", label="a user")
    middle = [np.median(counts[group]) for group in by_watched]
    axis.plot(middle, entropy_by_watched, "o-", color="tab:green", label="mean of a tenth of users")
    for user, color in COLORS.items():
        axis.plot(counts[user], entropy[user], "s", color=color, label=f"watched {counts[user]}")
    axis.set(title=f"how much the choice varies over {num_draws} draws", xscale="log")
    axis.set(xlabel="movies watched", ylabel="entropy of the choice (nats)")
    axis.legend(loc="lower left")


def plot_hits(axis):
    """Draw how often choices of hidden cells were right, and what was expected, against entropy."""
    seen = [(np.mean(entropy[g]), hit) for g, hit in zip(by_entropy, hits, strict=True) if hit["count"]]
    places = [x for x, _ in seen]
    observed, expected, errors = (
        [hit[name] for _, hit in seen] for name in ("observed", "expected", "error")
    )
    axis.errorbar(
        places, observed, yerr=errors, fmt="o-", color="tab:green", label="were right", capsize=3
    )
    axis.plot(places, expected, "s--", color="black", label="expected: average over draws")
    axis.set(title="choices of hidden cells that were right, by tenths of users", ylim=(0, 1))
    axis.set(xlabel="entropy of the choice (nats)", ylabel="share")
    axis.legend()


def plot_choices(user, axis):
    """Draw the movies that most draws choose for a user."""
    movies, times = np.unique(chosen[user], return_counts=True)
    order = np.argsort(-times, kind="stable")[:12]
    axis.barh([shorten(title(m), 34) for m in movies[order]], times[order], color=COLORS[user])
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    rest = f", {len(movies) - 12} more not shown" if len(movies) > 12 else ""
    axis.set(title=f"who watched {counts[user]}: {len(movies)} movies{rest}")
    axis.set(xlabel=f"draws of {num_draws} that choose it")


def plot_genres(axis):
    """Draw how many draws choose a movie of each genre, for both users."""
    found = {u: Counter(g for m in chosen[u] for g in dataset.genres[m]) for u in COLORS}
    genres = sorted(set().union(*found.values()))
    for i, (user, color) in enumerate(COLORS.items()):
        heights = [found[user][g] for g in genres]
        label = f"watched {counts[user]}"
        axis.bar(np.arange(len(genres)) + 0.4 * i, heights, width=0.4, color=color, label=label)
    axis.set_xticks(np.arange(len(genres)) + 0.2, genres, rotation=60, ha="right", fontsize=8)
    axis.set(title="genres of what draws choose", ylabel=f"draws of {num_draws}")
    axis.legend()


scored = [partial(plot_score, 0, "%.3f"), partial(plot_score, 1, "%.4f")] if hidden_share else []
panels = [
    [plot_density, plot_ratio, *scored],
    [plot_entropy, *([plot_hits] if hidden_share else [])],
    [partial(plot_choices, most), partial(plot_choices, least), *([plot_genres] if has_genres else [])],
]
figure = plt.figure(figsize=(15, 13), layout="constrained")
lines = figure.add_gridspec(3, 1, height_ratios=[1, 1.2, 1.2])
for number, plots in enumerate(panels):
    axes = figure.add_subfigure(lines[number]).subplots(1, len(plots), squeeze=False)
    for axis, plot in zip(axes[0], plots, strict=True):
        plot(axis)
size = f"{num_users} x {num_movies} cells on {len(devices)} devices"
mixing = f"R-hat of the log density {rhat_log_density:.2f}, of logits up to {rhat_logits.max():.2f}"
mixing += "" if worst <= 1.05 else ": NOT CONVERGED"
figure.suptitle(f"{dataset.name}: {size}, {num_chains} chains x {draws.num_draws} draws\n{mixing}")
figure.savefig(options.out / "movielens.png", dpi=110)
gm.plots.overview(draws, ["u[0]", "v[0]"]).savefig(options.out / "movielens_run.png", dpi=110)

# %%
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
    "step_size": float(draws.kernel.step_size),
    "leapfrogs": watch.leapfrogs // num_chains,  # a leapfrog moves all chains
    "leapfrogs_per_second": watch.leapfrogs_per_second / num_chains,
    "compile_seconds": watch.compile_seconds,
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
    "collectives_of_choices": len(choices_report.collectives),
    "distinct_recommended_most": distinct[most],
    "distinct_recommended_least": distinct[least],
    "watched_by_decile": [float(np.median(counts[group])) for group in by_watched],
    "entropy_by_watched": entropy_by_watched,
    "entropy_by_decile": [float(np.mean(entropy[group])) for group in by_entropy],
    "hit_rate_by_entropy": [hit["observed"] for hit in hits],
    "expected_hit_rate_by_entropy": [hit["expected"] for hit in hits],
    "hit_rate_error_by_entropy": [hit["error"] for hit in hits],
    "recommendations_most": best[most],
    "recommendations_least": best[least],
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
