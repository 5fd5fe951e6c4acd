# %% [markdown]
"""How many stars: matrix factorization of the 1,000,209 ratings of MovieLens 1M.

A rating is Gaussian around mean + b_user + b_film + U_user · V_film, 8 dimensions, with a noise that is
learned. A user has from 20 to 2,314 ratings: the user's latents lie with them on one device
(`gm.Groups`), and films are whole on every device. A tenth of the ratings, always the same, is held
out. On these the average over draws is compared with the mode of the same density and with biases by
regularized least squares.

    python demos/ratings.py [--devices N] [--data-dir DIR] [--any-size] [--out DIR] [--quick]

MovieLens is read from a folder, the cache, or GroupLens; offline, ratings of the same shape are
simulated. U and V are identified only up to rotations, so convergence is judged by the log density
and by predictions.
"""

# %%
import dataclasses
import time
from functools import partial
from textwrap import shorten

import common
import jax
import jax.numpy as jnp
import matplotlib
import movielens_data
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

DIMENSIONS, HELD_OUT, TOP = 8, 0.1, 8
# Standard deviations of the prior: biases in stars; products of eight factors have one of 0.4 in all.
PRIOR_SD = {"user_bias": 0.4, "user": 1.0, "film_bias": 0.6, "film": 0.15, "log_noise": 1.0}
USERS_OF_QUICK = 300

BEGAN = time.perf_counter()
console = Console()
options = common.parse(
    "Matrix factorization of MovieLens' ratings",
    "out/ratings",
    ("--any-size", "accept files of any size, such as your own in the format of MovieLens 1M"),
)
devices = common.start_devices(options.devices)
sizes = None if options.any_size else movielens_data.MOVIELENS_SIZES
dataset = movielens_data.load_ratings(options.data_dir, sizes=sizes)
console.print(f"data: {dataset.source}")

# %% [markdown]
# ## Ratings to learn from, and ratings held out


# %%
def first_users(ratings, number):
    """Leave the first users, and the films that these rated."""
    is_kept = ratings.user < number
    films, film = np.unique(ratings.film[is_kept], return_inverse=True)
    return dataclasses.replace(
        ratings,
        user=ratings.user[is_kept],
        film=film.astype(np.int32),
        stars=ratings.stars[is_kept],
        titles=[ratings.titles[i] for i in films],
    )


def hide(user):
    """Mark a random tenth of all ratings as held out, but never the first of a user."""
    is_hidden = np.random.default_rng(0).random(len(user)) < HELD_OUT
    is_hidden[np.unique(user, return_index=True)[1]] = False
    return is_hidden


if options.quick:
    dataset = first_users(dataset, USERS_OF_QUICK)
num_rows, num_users, num_films = len(dataset.stars), dataset.user.max() + 1, dataset.film.max() + 1
is_hidden = hide(dataset.user)
user, film = dataset.user[~is_hidden], dataset.film[~is_hidden]
hidden_user, hidden_film = dataset.user[is_hidden], dataset.film[is_hidden]
center = float(dataset.stars[~is_hidden].mean())
stars = dataset.stars[~is_hidden].astype(np.float32) - center
hidden_stars = dataset.stars[is_hidden].astype(np.float64) - center
console.print(
    f"{num_rows:,} ratings of {num_films:,} films by {num_users:,} users, "
    f"{len(hidden_stars):,} of them held out"
)

# %% [markdown]
# ## The model, written for one device


# %%
def log_normal(params, name):
    """Log density of a latent's prior, element by element, up to a constant."""
    return -0.5 * (params[name] / PRIOR_SD[name]) ** 2


def log_prior(params):
    """Films, which all users share, and the noise."""
    return [log_normal(params, name) for name in ("film_bias", "film", "log_noise")]


def user_log_prior(params, user):
    """Each user's bias and factors, [users]."""
    return log_normal(params, "user_bias") + jnp.sum(log_normal(params, "user"), axis=1)


def expected_stars(params, take_user, take_film):
    """Return the stars above the mean, [ratings], by what takes a rating's user, and its film."""
    products = jnp.sum(take_user(params["user"]) * take_film(params["film"]), axis=1)
    return take_user(params["user_bias"]) + take_film(params["film_bias"]) + products


def log_likelihood(params, rating):
    """Log density of each rating, [rows]; ``params["user"]`` is that of the rating's own user."""
    expected = expected_stars(params, lambda x: x, lambda table: gm.lookup(table, rating["film"]))
    z = (rating["stars"] - expected) * jnp.exp(-params["log_noise"])
    return -0.5 * z**2 - params["log_noise"]


# %% [markdown]
# ## Placement: ratings and latents of a user on one device, films whole on each

# %%
num_chains = 2
# A chain to each half of the devices: two on one took three times as long as one, on CPUs.
is_halved = len(devices) > 2 and len(devices) % 2 == 0
axes = {"chains": 2, "data": len(devices) // 2} if is_halved else {"data": len(devices)}
mesh = gm.make_mesh(**axes, devices=devices)
groups = gm.Groups(user, mesh, P("data"))
columns = {"film": gm.LookupIndex(film, num_films), "stars": stars}
local = ("user_bias", "user")
ratings = gm.Plate(log_likelihood, groups.place_rows(columns), local=local)
target = gm.Posterior(log_prior, gm.Plate(user_log_prior, groups.place(), local=local), ratings)
console.print(f"mesh {dict(mesh.shape)}, {groups}")

# %% [markdown]
# ## A popular baseline, and the mode


# %%
def biases():
    """Fit biases of users and films by regularized least squares, in turn; also the noise left."""
    of_user, of_film, noise = np.zeros(num_users), np.zeros(num_films), 0.9
    for _ in range(20):
        for one, number, other, sd in (
            (of_film, film, of_user[user], PRIOR_SD["film_bias"]),
            (of_user, user, of_film[film], PRIOR_SD["user_bias"]),
        ):
            sums = np.bincount(number, stars - other, minlength=len(one))
            one[:] = sums / (np.bincount(number, minlength=len(one)) + (noise / sd) ** 2)
        noise = float(np.std(stars - of_user[user] - of_film[film]))
    return of_user, of_film, noise


def start(rng_key):
    """Draw a start: the baseline's biases, and factors off zero, where the gradient vanishes."""
    user_key, film_key = jax.random.split(rng_key)
    of_users = 0.5 * jax.random.normal(user_key, (num_users, DIMENSIONS))
    of_films = 0.5 * jax.random.normal(film_key, (num_films, DIMENSIONS))
    return {
        "user_bias": jnp.float32(user_bias),
        "user": PRIOR_SD["user"] * of_users,
        "film_bias": jnp.float32(film_bias),
        "film": PRIOR_SD["film"] * of_films,
        "log_noise": jnp.log(jnp.float32(bias_noise)),
    }


def curvature(position):
    """Return minus the Hessian's diagonal: a rating tells 1 / noise² times the other side's square."""
    users, films = (np.array(position[name], np.float64) for name in ("user", "film"))
    precision = np.exp(-2 * float(position["log_noise"]))

    def tells(number, size, other):
        sums = [np.bincount(number, column**2, minlength=size) for column in other.T]
        return precision * np.stack(sums, axis=1)

    of_data = {
        "user_bias": precision * np.bincount(user, minlength=num_users),
        "user": tells(user, num_users, films[film]),
        "film_bias": precision * np.bincount(film, minlength=num_films),
        "film": tells(film, num_films, users[user]),
        "log_noise": 2 * len(stars),
    }
    return {name: jnp.float32(PRIOR_SD[name] ** -2 + x) for name, x in of_data.items()}


user_bias, film_bias, bias_noise = biases()
with console.status("climbing to the mode"):
    mode = gm.find_mode(
        jax.random.key(1),
        target,
        start(jax.random.key(2)),
        max_steps=20 if options.quick else 200,
        tolerance=2.0,
        num_probes=0,
    )
mode = dataclasses.replace(mode, curvature=curvature(mode.position))
console.print(f"mode: log density {float(mode.log_density):.0f} after {mode.num_steps} steps")

# %% [markdown]
# ## Sampling

# %%
num_warmup, num_samples = 160, 320
if options.quick:
    num_warmup, num_samples = 10, 16
# Many latents on known scales: two gradients a step, but steps of more than twice the leapfrog's.
splitting, metric = gm.MINIMAL_NORM, mode.inverse_mass_matrix
kernel = gm.HMC(target, 0.4, 4, inverse_mass_matrix=metric, jitter=0.2, splitting=splitting)
console.print(f"sampling: {num_chains} chains, {num_warmup} warm-up steps, {num_samples} draws each")
with common.Stopwatch() as watch:
    draws = gm.sample(
        jax.random.key(0),
        target,
        mode.laplace_start(),
        mesh=mesh,
        num_chains=num_chains,
        num_warmup=num_warmup,
        num_samples=num_samples,
        kernel=kernel,
        warmup=gm.WindowAdaptation(target_acceptance_rate=0.7, adapt_mass_matrix=False),
        callback=watch,
    )

# %% [markdown]
# ## Predictions of the ratings held out


# %%
@jax.jit
def predict(positions, user, film):
    """Return the stars above the mean that each draw expects of pairs, [draws, pairs]."""
    return jax.lax.map(lambda x: expected_stars(x, lambda t: t[user], lambda t: t[film]), positions)


def gaussian(expected, noise):
    """Log density of the stars held out."""
    return -0.5 * ((hidden_stars - expected) / noise) ** 2 - np.log(noise) - 0.5 * np.log(2 * np.pi)


def score(expected, log_densities):
    """Return the root of the mean squared error, of stars between 1 and 5, and the mean log density."""
    error = np.clip(expected + center, 1, 5) - center - hidden_stars
    return {"rmse": float(np.sqrt(np.mean(error**2))), "log_score": float(np.mean(log_densities))}


flat = {name: np.asarray(x).reshape(-1, *x.shape[2:]) for name, x in draws.position.items()}
at_mode = jax.tree.map(lambda x: np.asarray(x)[None], mode.position)
noises = np.exp(flat["log_noise"].astype(np.float64))
expected = np.asarray(predict(flat, hidden_user, hidden_film), np.float64)
averaged = expected.mean(axis=0)
per_draw = gaussian(expected, noises[:, None])
shift = per_draw.max(axis=0)
of_average = shift + np.log(np.mean(np.exp(per_draw - shift), axis=0))
mode_expected = np.asarray(predict(at_mode, hidden_user, hidden_film), np.float64)[0]
baseline = user_bias[hidden_user] + film_bias[hidden_film]
results = {
    "bma": score(averaged, of_average),
    "single": score(expected[-1], per_draw[-1]),
    "mode": score(mode_expected, gaussian(mode_expected, float(np.exp(mode.position["log_noise"])))),
    "baseline": score(baseline, gaussian(baseline, bias_noise)),
}
NAMES = {"baseline": "biases", "single": "one draw", "mode": "mode", "bma": "all draws"}
table = Table(title=f"{len(hidden_stars):,} ratings held out")
for column in ("prediction", "rmse (stars)", "log density a rating"):
    table.add_column(column)
for name in NAMES:
    table.add_row(NAMES[name], f"{results[name]['rmse']:.4f}", f"{results[name]['log_score']:.4f}")
console.print(table)

# %% [markdown]
# ## Convergence, judged by the log density and by predictions, never by U or V themselves

# %%
by_chain = expected.reshape(num_chains, num_samples, -1)[:, :, :: max(len(hidden_stars) // 1000, 1)]
rhat_log_density = float(gm.rhat(draws.stats["log_density"]))
rhat_noise = float(gm.rhat(draws.position["log_noise"]))
rhat_predictions = np.asarray(gm.rhat(jnp.asarray(by_chain, jnp.float32)))
console.print(
    f"R-hat: log density {rhat_log_density:.3f}, noise {rhat_noise:.3f}, {len(rhat_predictions)} "
    f"predictions {np.median(rhat_predictions):.3f} (median) to {rhat_predictions.max():.3f}"
)
if rhat_log_density > 1.05:
    console.print("The chains have [bold]not converged[/bold]: take more draws")

# %% [markdown]
# ## What an interval promises, and for whom averaging matters
#
# The log score of a group of users, by how many ratings they gave: who gave few gains most from the
# average, since a mode has no doubt about them.

# %%
spread = np.sqrt(np.mean(noises**2) + expected.var(axis=0))
covered = float(np.mean(np.abs(hidden_stars - averaged) < 1.6449 * spread))
counts = np.bincount(user, minlength=num_users)
by_count = np.array_split(np.argsort(counts[hidden_user], kind="stable"), 8)
of_mode = gaussian(mode_expected, float(np.exp(mode.position["log_noise"])))
gain = [float(np.mean(of_average[part] - of_mode[part])) for part in by_count]
gain_error = [float(np.std(of_average[p] - of_mode[p]) / np.sqrt(len(p))) for p in by_count]
middle = [float(np.median(counts[hidden_user[part]])) for part in by_count]
console.print(f"{covered:.1%} of the ratings held out lie in their 90 % intervals")

# %% [markdown]
# ## Recommendations for who rated most, who rated least, and one between


# %%
def recommend(one):
    """List the films that a user has not rated in order of expected stars, with their doubt."""
    unrated = np.setdiff1d(np.arange(num_films), dataset.film[dataset.user == one])
    stars = center + np.asarray(predict(flat, np.full(len(unrated), one), unrated))
    mean, sd = stars.mean(axis=0), stars.std(axis=0)
    best = np.argsort(-mean)[:TOP]
    return [
        {
            "title": dataset.titles[unrated[i]] or f"film {unrated[i]}",
            "stars": float(mean[i]),
            "sd": float(sd[i]),
            "ratings": int(rated[unrated[i]]),
        }
        for i in best
    ]


rated = np.bincount(dataset.film, minlength=num_films)
by_ratings = np.argsort(counts, kind="stable")
chosen = {"most": by_ratings[-1], "median": by_ratings[num_users // 2], "least": by_ratings[0]}
best = {name: recommend(one) for name, one in chosen.items()}
for name, items in best.items():
    rows = Table(title=f"for a user who gave {counts[chosen[name]]} ratings")
    for column in ("stars", "sd", "ratings of it", "film"):
        rows.add_column(column)
    for item in items[:5]:
        numbers = f"{item['stars']:.2f}", f"{item['sd']:.2f}", f"{item['ratings']}"
        rows.add_row(*numbers, item["title"])
    console.print(rows)

# %% [markdown]
# ## Where arrays lie, and what a step sends

# %%
console.print(
    gm.visualize(
        {
            "stars": ratings.data["stars"],
            "users": draws.state.position["user"],
            "gradient of users": draws.state.log_density_grad["user"],
            "films": draws.state.position["film"],
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
def plot_density(axis):
    """Draw the log density over iterations, warm-up shaded."""
    traces = [np.asarray(x) for x in (draws.warmup["log_density"], draws.stats["log_density"])]
    axis.plot(np.concatenate(traces, axis=1).T, lw=0.9)
    reach = max(np.ptp(traces[1]), 1.0)
    axis.set_ylim(traces[1].min() - 2 * reach, traces[1].max() + reach)
    axis.axvspan(0, num_warmup, color="0.92")
    axis.set(title="log density", xlabel="iteration (grey: warm-up)")


def plot_scores(measure, title, axis):
    """Draw a score of the four predictions."""
    values = [results[name][measure] for name in NAMES]
    bars = axis.barh(list(NAMES.values()), values, color=["0.6", "tab:blue", "tab:orange", "tab:green"])
    axis.bar_label(bars, fmt="%.4f", padding=3)
    reach = np.ptp(values)
    axis.set(title=title, xlim=(min(values) - 0.3 * reach, max(values) + 0.5 * reach))


def plot_gain(axis):
    """Draw what averaging gains in log score, by how many ratings a user gave."""
    axis.errorbar(middle, gain, yerr=gain_error, fmt="o-", color="tab:green", capsize=3)
    axis.axhline(0, color="black", lw=0.6)
    axis.set(title="all draws over the mode, by ratings of the user", xscale="log", ylim=(0, None))
    axis.set(xlabel="ratings that the user gave", ylabel="log score gained a rating")


def plot_doubt(axis):
    """Draw each user's doubt about their own bias, by ratings."""
    sd = flat["user_bias"].std(axis=0)
    axis.plot(counts, sd, ".", ms=2, color="0.6", label="a user")
    few = np.geomspace(counts.min(), counts.max())
    alone = 1 / np.sqrt(PRIOR_SD["user_bias"] ** -2 + few / np.mean(noises) ** 2)
    axis.plot(few, alone, color="black", lw=0.8, label="if films were known")
    axis.set(title="doubt about a user's bias", xscale="log", yscale="log")
    axis.set(xlabel="ratings that the user gave", ylabel="posterior sd (stars)")
    axis.legend()


def plot_best(name, axis):
    """Draw the films recommended to a user, with 90 % intervals of the expected stars."""
    items = best[name][::-1]
    titles = [shorten(item["title"], 36) for item in items]
    mean, reach = [item["stars"] for item in items], [1.6449 * item["sd"] for item in items]
    axis.errorbar(mean, np.arange(len(items)), xerr=reach, fmt="o", capsize=2)
    axis.set_yticks(np.arange(len(items)), titles, fontsize=8)
    axis.set(title=f"for who gave {counts[chosen[name]]} ratings", xlabel="expected stars, 90 %")


figure = plt.figure(figsize=(15, 12), layout="constrained")
parts = figure.add_gridspec(3, 1)
scored = [
    partial(plot_scores, "rmse", "rmse of ratings held out (less is better)"),
    partial(plot_scores, "log_score", "log density of a rating held out"),
]
for number, plots in enumerate(
    ([plot_density, *scored], [plot_gain, plot_doubt], [partial(plot_best, name) for name in best])
):
    axes = figure.add_subfigure(parts[number]).subplots(1, len(plots))
    for axis, plot in zip(axes, plots, strict=True):
        plot(axis)
size = f"{len(stars):,} ratings of {num_users:,} users on {len(devices)} devices"
figure.suptitle(f"{dataset.name}: {size}, {num_chains} chains x {num_samples} draws")
figure.savefig(options.out / "ratings.png", dpi=110)

# %%
summary = {
    "devices": len(devices),
    "mesh": dict(mesh.shape),
    "data": dataset.name,
    "rows": num_rows,
    "rows_held_out": len(hidden_stars),
    "users": int(num_users),
    "films": int(num_films),
    "dimensions": DIMENSIONS,
    "num_chains": num_chains,
    "num_warmup": num_warmup,
    "num_samples": num_samples,
    **{f"rmse_{name}": found["rmse"] for name, found in results.items()},
    **{f"log_score_{name}": found["log_score"] for name, found in results.items()},
    "covered_by_90_percent": covered,
    "gain_by_ratings": gain,
    "ratings_by_eighth": middle,
    "noise": float(noises.mean()),
    "rhat_log_density": rhat_log_density,
    "rhat_noise": rhat_noise,
    "rhat_predictions_median": float(np.median(rhat_predictions)),
    "rhat_predictions_max": float(rhat_predictions.max()),
    "mode_steps": mode.num_steps,
    "acceptance_rate": float(draws.acceptance_rate.mean()),
    "num_divergent": int(draws.num_divergent.sum()),
    "step_size": float(draws.kernel.step_size),
    "leapfrogs": watch.leapfrogs // num_chains,  # a leapfrog moves all chains
    "leapfrogs_per_second": watch.leapfrogs_per_second / num_chains,
    "compile_seconds": watch.compile_seconds,
    "all_reduces_per_leapfrog": report.runs("all-reduce", within="leapfrog"),
    "all_reduce_bytes_per_leapfrog": sum(c.num_bytes for c in in_loop),
    "all_gathers": report.count("all-gather"),
    "peak_temp_mb_per_device": report.temporary_bytes / 1e6,
    "peak_rss_mb": common.peak_rss_mb(),
    **{f"recommendations_{name}": items for name, items in best.items()},
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
