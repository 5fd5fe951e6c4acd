# %% [markdown]
"""A step planned for thousands of devices on a laptop.

The model is MovieLens for 2.5 million users. From shapes alone, its HMC step is planned for meshes of
up to 8,192 devices (compiled for up to 2,048, extrapolated beyond): what a leapfrog sends, what a
device holds, and whether that fits an accelerator. The plan finds a mistake that would be expensive on
a pod: a data set that is replicated on every device. A calculation then shows how far a step scales,
from the compute time per row measured on this machine.

    python demos/plan_a_pod.py [--devices N] [--out DIR] [--quick]

It needs no data: only shapes matter. ``--devices`` changes nothing here.
"""

# %%
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gspmd_mcmc as gm
from gspmd_mcmc.planning.chips import ETHERNET_10G
from gspmd_mcmc.planning.collective_times import collective_seconds

matplotlib.use("agg")

BEGAN = time.perf_counter()
console = Console()
options = common.parse("A step planned for thousands of devices", "out/plan_a_pod")
common.start_devices(options.devices)
NUM_MOVIES, DIMENSIONS, ACCELERATOR = 3706, 20, "TPU v5e"
BY_ROWS = P("data")
num_users = 100_000 if options.quick else 2_500_000
sizes = (64, 512) if options.quick else (64, 512, 2048, 8192)

# %% [markdown]
# ## The model, written for one device; and its step on any mesh
#
# `build` is the program for real devices, with shapes instead of arrays.


# %%
def log_prior(params):
    """Movies, which all users share: N(0, 1), up to a constant."""
    return -0.5 * params["V"] ** 2


def log_likelihood(params, watched):
    """Terms of each user: all movies, and the user's own N(0, 1) prior, [users]."""
    log_prob = gm.bernoulli_logits(gm.inner_products(params["U"], params["V"]), watched)
    return jnp.sum(log_prob, axis=1) - 0.5 * jnp.sum(params["U"] ** 2, axis=1)


def kernel_on(mesh, watched, spec):
    """HMC of the model, users laid out by a spec."""
    plate = gm.Plate(log_likelihood, gm.place(watched, mesh, spec), local="U")
    return gm.HMC(gm.Posterior(log_prior, plate), step_size=0.01, num_integration_steps=100)


def build(mesh, spec=BY_ROWS):
    """Return the step of two chains, and the shapes of its arguments."""
    kernel = kernel_on(mesh, jax.ShapeDtypeStruct((num_users, NUM_MOVIES), jnp.uint8), spec)
    users = jax.ShapeDtypeStruct((2, num_users, DIMENSIONS), jnp.float32)
    movies = jax.ShapeDtypeStruct((2, NUM_MOVIES, DIMENSIONS), jnp.float32)
    init = jax.vmap(gm.HMC.init, in_axes=(None, 0))
    step = jax.jit(jax.vmap(gm.HMC.step, in_axes=(None, 0, 0)))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    return step, kernel, keys, jax.eval_shape(init, kernel, {"U": users, "V": movies})


plans = {n: gm.plan(build, data=n, accelerator=ACCELERATOR) for n in track(sizes, "compiling")}
console.print(plans[512])

# %%
table = Table(title=f"{num_users:,} users, 2 chains: a leapfrog sends, a device holds")
for name in ("devices", "all-reduces", "bytes", "arguments", "temporaries", ACCELERATOR, "s"):
    table.add_column(name, justify="right", no_wrap=True)
for n, plan in plans.items():
    report = plan.report
    table.add_row(
        f"{n:,}",
        str(report.runs("all-reduce", within="leapfrog")),
        f"{report.sent_bytes(within='leapfrog'):,}",
        f"{report.argument_bytes / 1e6:.1f} MB",
        f"{report.temporary_bytes / 1e6:.1f} MB",
        "fits" if plan.fits else "too large",
        f"{plan.seconds:.1f}",
    )
console.print(table)
rule = plans[sizes[-1]].rule
if rule:
    console.print(f"{sizes[-1]:,} devices: {rule}")

# %% [markdown]
# ## A mistake that is cheap to find here
#
# With `P()` instead of `P("data")` every device holds all users. Nothing fails, but the program is slow
# and needs much memory.

# %%
mistaken = gm.plan(lambda mesh: build(mesh, P()), data=64, accelerator=ACCELERATOR).report
console.print("with P(), replicated on each of 64 devices:")
for text in mistaken.whole:
    console.print(f"  {text}")
try:
    mistaken.check(whole_bytes=10e6)
except gm.BudgetExceeded as error:
    console.print(f"check(whole_bytes=10e6): {error}")

# %% [markdown]
# ## How far it scales, by calculation
#
# Measured: the seconds of a leapfrog on one device of this machine, for several numbers of users. The
# rest is calculated for the 6,040 users of MovieLens 1M, on machines like this one with 10 Gb Ethernet.


# %%
def seconds_of_a_leapfrog(users, leapfrogs=5, rounds=5):
    """Return the best of some rounds: other work on the machine can only add time."""
    watched = np.random.default_rng(0).integers(0, 2, (users, NUM_MOVIES), np.uint8)
    kernel = kernel_on(gm.make_mesh(devices=jax.devices()[:1]), watched, P())
    kernel = kernel.with_num_integration_steps(leapfrogs)
    shapes = {"U": (users, DIMENSIONS), "V": (NUM_MOVIES, DIMENSIONS)}
    state = kernel.init({name: jnp.full(shape, 0.1) for name, shape in shapes.items()})
    step = jax.jit(gm.HMC.step)
    times = []
    for i in range(rounds + 1):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(kernel, jax.random.key(i), state))
        times.append((time.perf_counter() - began) / leapfrogs)
    return min(times[1:])


rows = (100, 200, 400) if options.quick else (250, 500, 1000, 2000, 4000)
measured = [(n, seconds_of_a_leapfrog(n)) for n in track(rows, "measuring")]
users, seconds = np.array(measured).T
seconds_per_row, fixed_seconds = np.polyfit(users, seconds, 1, w=1 / seconds)
fit_error = max(abs(seconds_per_row * users + fixed_seconds - seconds) / seconds)
sent = plans[64].report.traffic("leapfrog")
USERS, devices = 6040, 2 ** np.arange(13)


def compute_seconds(users_per_device):
    """Two chains; a line in the users of a device."""
    return 2 * (seconds_per_row * users_per_device + max(fixed_seconds, 0))


def wire_seconds(n):
    """Seconds of all collectives of the compiled leapfrog, by a ring or a double tree."""
    return sum(t.runs * collective_seconds(t.kind, t.operand_bytes, n, [ETHERNET_10G]) for t in sent)


compute = np.array([compute_seconds(-(-USERS // n)) for n in devices])
wire = np.array([wire_seconds(int(n)) for n in devices])
table = Table(
    title=f"PREDICTION, not a measurement: a leapfrog of {USERS:,} users, {ETHERNET_10G.name}"
)
for name in ("devices", "compute", "wire", "speedup"):
    table.add_column(name, justify="right")
for n, c, w in list(zip(devices, compute, wire, strict=True))[::2]:
    table.add_row(f"{n:,}", f"{c * 1e3:.2f} ms", f"{w * 1e3:.2f} ms", f"{compute[0] / (c + w):.1f}")
console.print(table)
console.print(
    "It assumes that compute and communication do not overlap, and that devices and links are equally "
    "fast and wait for nothing else."
)
is_bound_by_wire = wire > compute
crossover = int(devices[np.argmax(is_bound_by_wire)]) if is_bound_by_wire.any() else None
# Compute is 90 % of a leapfrog where it takes nine times as long as the wire.
users_needed = int((9 * wire[-1] / 2 - max(fixed_seconds, 0)) / seconds_per_row)
console.print(f"on 4,096 devices compute is 90 % of a leapfrog from {users_needed:,} users on each")

figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
axes.loglog(devices, 1e3 * compute, label="compute, a measured line in users per device")
axes.loglog(devices[1:], 1e3 * wire[1:], label=f"all-reduce over {ETHERNET_10G.name}, calculated")
axes.loglog(devices, 1e3 * (compute + wire), "k--", label="a leapfrog")
axes.set(xlabel="devices", ylabel="milliseconds", title="Predicted: MovieLens 1M, two chains")
axes.legend(frameon=False)
figure.savefig(options.out / "plan_a_pod.png", dpi=110)

# %%
summary = {
    "users": num_users,
    "sizes": list(plans),
    "all_reduces_per_leapfrog": [p.report.runs("all-reduce", "leapfrog") for p in plans.values()],
    "bytes_per_leapfrog": [p.report.sent_bytes("leapfrog") for p in plans.values()],
    "all_gathers": sum(p.report.count("all-gather") for p in plans.values()),
    "argument_bytes": [p.report.argument_bytes for p in plans.values()],
    "temporary_bytes": [p.report.temporary_bytes for p in plans.values()],
    "compile_seconds": [p.seconds for p in plans.values()],
    "rule_error": rule.error if rule else None,
    "mistaken_bytes": mistaken.argument_bytes,
    "measured_seconds": measured,
    "seconds_per_row": seconds_per_row,
    "fixed_seconds": fixed_seconds,
    "fit_error": fit_error,
    "predicted_seconds": dict(zip(devices.tolist(), (compute + wire).tolist(), strict=True)),
    "predicted_crossover": crossover,
    "users_needed_a_device": users_needed,
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
