# %% [markdown]
"""The cases of the `pmap` tutorials by placement: old line, new line, the same values, and the times.

`pmap` writes the number of devices into the program: arrays get a leading axis of that length, and
communication is spelled out with axis names. Here the program is written for one device, arrays are
placed on a mesh, and `jit` does the rest. Cases are from JAX's "Pmap Cookbook" and "Parallel
Evaluation in JAX", from the notebook to chapter 7 of Sapunov's "Deep Learning with JAX" (the dot
products), from JAX's README (per-example gradients) and QuantEcon's lecture on JAX (nested vmap).

    python demos/pmap_to_jit.py [--devices N] [--out DIR] [--quick]

It needs no data.
"""

# %%
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import grad, jit, lax, vmap
from jax.sharding import PartitionSpec as P
from pmap_crossover import crossover, measure, plot_crossover
from pmap_race import Pair, compare, draw_table, largest_difference, plot_ratios, pmap
from rich.console import Console
from rich.markup import escape
from rich.progress import track

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

BEGAN = time.perf_counter()
console = Console()
options = common.parse("The cases of the pmap tutorials, by placement", "out/pmap_to_jit")
devices = common.start_devices(options.devices)
n = len(devices)
if n % 2:
    raise SystemExit(f"{n} devices: an even number is needed, for a mesh of {n}/2 × 2")
mesh = gm.make_mesh(data=n, devices=devices)
grid = gm.make_mesh(data=n // 2, model=2, devices=devices)
ROUNDS = 5 if options.quick else 25


def place(spec, *arrays, on=mesh):
    """Lay arrays over a mesh, all by one spec."""
    return tuple(gm.place(array, on, spec) for array in arrays)


# %% [markdown]
# ## Pure maps
#
# A case is a function with an assignment to `old` and one to `new`. The table shows these two lines,
# and they are what runs. Old arguments lie where `pmap` wants them: neither side moves data when timed.


# %%
def squares():
    """Map over an axis."""
    (x,) = place(P("data"), np.arange(float(n), dtype=np.float32))
    old = pmap(lambda x: x**2)
    new = jit(vmap(lambda x: x**2))
    return Pair(old, (x,), new, (x,), np.arange(n) ** 2)


def convolve(x, w):
    """Slide a window of three over a row."""
    return jnp.array([jnp.dot(x[i - 1 : i + 2], w) for i in range(1, len(x) - 1)])


def convolutions():
    """One window for all rows."""
    rows, window = np.arange(5.0 * n, dtype=np.float32).reshape(n, 5), np.array([2, 3, 4], np.float32)
    args = *place(P("data"), rows), *place(P(), window)
    old = pmap(convolve, in_axes=(0, None))
    new = jit(vmap(convolve, in_axes=(0, None)))
    truth = np.stack([np.correlate(row, window, "valid") for row in rows])
    return Pair(old, args, new, args, truth)


with jax.threefry_partitionable(False):  # the tutorial's numbers were drawn before that was the default
    small = np.asarray(jax.random.normal(jax.random.key(42), (2 * n, 3)))


def scaled_dot(vectors, k):
    """Multiply a dot product by a number."""
    return k * jnp.vdot(vectors["a"], vectors["b"])


def trees_of_axes():
    """Axes for each leaf of a tree."""
    args = gm.place(
        ({"a": small[:n], "b": small[n:].T}, np.float32(1)),
        mesh,
        ({"a": P("data"), "b": P(None, "data")}, P()),
    )
    old = pmap(scaled_dot, in_axes=({"a": 0, "b": 1}, None))
    new = jit(vmap(scaled_dot, in_axes=({"a": 0, "b": 1}, None)))
    return Pair(old, args, new, args, np.sum(small[:n] * small[n:], axis=1))


def out_axes():
    """Put the mapped axis second in the result."""
    args = *place(P("data"), small[:n]), *place(P(), np.float32(2))
    old = pmap(lambda v, k: k * v, in_axes=(0, None), out_axes=1)
    new = jit(vmap(lambda v, k: k * v, in_axes=(0, None), out_axes=1))
    return Pair(old, args, new, args, 2 * small[:n].T)


def random_matrices():
    """Multiply a random matrix with itself, on each device."""
    shape = (100, 120) if options.quick else (500, 600)
    keys = jax.random.split(jax.random.key(0), n)
    (placed,) = place(P("data"), keys)

    def product(key):
        # With x @ x.T, vmap and jit multiply by a transposed copy: 1.3 times the time of pmap on a CPU.
        x = jax.random.normal(key, shape)
        return jnp.einsum("ij,kj->ik", x, x)

    old = pmap(product)
    new = jit(vmap(product))
    return Pair(old, (placed,), new, (placed,), np.stack([product(key) for key in keys]))


# %% [markdown]
# ## Ten million dot products of vectors of length 3
#
# `pmap` alone would need a device for each; the tutorial uses `pmap(vmap(...))`, over a new axis with
# one entry per device. It reports 51.5 ms on 8 TPU cores; copies of its notebook print 9.9 ms. With
# placement the arrays keep their shape.

# %%
num_dots = n * ((50_000 if options.quick else 10_000_000) // n)
with jax.threefry_partitionable(False):
    vectors = np.asarray(jax.random.normal(jax.random.key(42), (2 * num_dots, 3)))
first, second = vectors[:num_dots], vectors[num_dots:]
true_dots = np.einsum("ij,ij->i", first, second, dtype=np.float64)


def dot_products():
    """Dot products of rows."""
    old_args = place(P("data"), first.reshape(n, -1, 3), second.reshape(n, -1, 3))
    new_args = place(P("data"), first, second)
    old = pmap(vmap(jnp.vdot))
    new = jit(vmap(jnp.vdot))
    return Pair(old, old_args, new, new_args, true_dots)


def dots_of_columns():
    """Dot products of columns."""
    old_args = place(P(None, "data"), first.T.reshape(3, n, -1), second.T.reshape(3, n, -1))
    new_args = place(P(None, "data"), first.T, second.T)
    old = pmap(vmap(jnp.vdot, in_axes=1), in_axes=1)
    new = jit(vmap(jnp.vdot, in_axes=1))
    return Pair(old, old_args, new, new_args, true_dots)


def uneven():
    """Map over more rows than there are devices."""
    rows = first[: n + 2], second[: n + 2]
    old = pmap(jnp.vdot)
    new = jit(lambda a, b: vmap(jnp.vdot)(a.values, b.values))
    # Rows at the end of a `Padded` array are copies of its last one; `unpad` drops them.
    return Pair(old, rows, new, place(P("data"), *rows), np.pad(true_dots[: n + 2], (0, n - 2), "edge"))


# %% [markdown]
# ## Collectives
#
# What `psum` and similar functions did by name is a sum over an axis of the array. If that axis is
# sharded over the mesh, the compiler inserts the collective.


# %%
table = np.arange(25.0 * n, dtype=np.float32).reshape(n, 25)


def normalise():
    """Divide by the sum over all devices."""
    args = place(P("data"), table)
    old = pmap(lambda x: x / lax.psum(x.sum(), "p"), axis_name="p")
    new = jit(lambda x: x / x.sum())
    return Pair(old, args, new, args, table / table.sum())


PAIRS = [[i, i + 1] for i in range(0, n, 2)]


def groups():
    """Divide by the sum over groups of two devices."""
    old_args = place(P("data"), table)
    new_args = place(P("data", "model"), table.reshape(n // 2, 2, 25), on=grid)
    old = pmap(lambda x: x / lax.psum(x.sum(), "p", axis_index_groups=PAIRS), axis_name="p")
    new = jit(lambda x: x / x.sum((1, 2), keepdims=True))
    whole = table.reshape(n // 2, 2, 25)
    return Pair(old, old_args, new, new_args, whole / whole.sum((1, 2), keepdims=True))


def two_names():
    """Take maxima over two named axes."""
    args = place(P("data"), table)
    old = pmap(vmap(lambda x: lax.pmax(x, "v") / lax.pmax(x, "p"), axis_name="v"), axis_name="p")
    new = jit(lambda x: x.max(1, keepdims=True) / x.max(0, keepdims=True))
    return Pair(old, args, new, args, table.max(1, keepdims=True) / table.max(0))


def by_names(x):
    """Divide by sums over rows, over columns and over both, by the names of the axes."""
    return x / lax.psum(x, "data"), x / lax.psum(x, "model"), x / lax.psum(x, ("data", "model"))


def by_axes(x):
    """Divide by sums over rows, over columns and over both, by the axes of the array."""
    return x / x.sum(0, keepdims=True), x / x.sum(1, keepdims=True), x / x.sum()


def nested():
    """Sum over two mapped axes."""
    (x,) = place(P("data", "model"), np.arange(float(n), dtype=np.float32).reshape(n // 2, 2), on=grid)
    old = pmap(pmap(by_names, axis_name="model"), axis_name="data")
    new = jit(by_axes)
    whole = np.arange(float(n)).reshape(n // 2, 2)
    return Pair(old, (x,), new, (x,), by_axes(whole))


def kept_body():
    """Keep a body that has names in it."""
    args = place(P("data"), table)

    def body(x):
        return x / lax.psum(x.sum(), "data")

    old = pmap(body, axis_name="data")
    new = jit(jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    return Pair(old, args, new, args, table / table.sum(), names_mesh=True)


# %% [markdown]
# Neighbors: Wolfram's rule 30 on a ring of cells, with one stretch per device. The old program
# sends the ends of a stretch to the left and to the right; the new one rolls the whole board.

# %%
num_steps = 31 if options.quick else 255
cells = np.zeros(n * (16 if options.quick else 64), bool)
cells[len(cells) // 2] = True
RIGHT, LEFT = [(i, (i + 1) % n) for i in range(n)], [((i + 1) % n, i) for i in range(n)]


def roll_stretch(stretch):
    """Return the left and right neighbors of a stretch, its ends from the adjacent devices."""
    from_left, from_right = lax.ppermute(stretch[-1:], "i", RIGHT), lax.ppermute(stretch[:1], "i", LEFT)
    return jnp.append(from_left, stretch[:-1]), jnp.append(stretch[1:], from_right)


def evolve(neighbors):
    """Make a function from a board to its history [steps, cells], by a function for the neighbors."""

    def one(board, _):
        left, right = neighbors(board)
        return left ^ (board | right), board

    return lambda board: lax.scan(one, board, length=num_steps)[1]


def history(board):
    """Rule 30 by NumPy."""
    boards = [board]
    while len(boards) < num_steps:
        boards.append(np.roll(boards[-1], 1) ^ (boards[-1] | np.roll(boards[-1], -1)))
    return np.stack(boards)


def rule_30():
    """Talk to neighbors in a loop."""
    old_args, new_args = place(P("data"), cells.reshape(n, -1)), place(P("data"), cells)
    old = pmap(evolve(roll_stretch), axis_name="i", out_axes=1)
    new = jit(evolve(lambda board: (jnp.roll(board, 1), jnp.roll(board, -1))))
    return Pair(old, old_args, new, new_args, history(cells))


# %% [markdown]
# ## Gradients
#
# A step of gradient descent on data split over the devices. The old program averages losses and
# gradients by hand; the new one takes the mean over all rows, which becomes an all-reduce.

# %%
rng = np.random.default_rng(0)
xs = rng.normal(size=16 * n).astype(np.float32)
ys = (2 * xs - 1 + 0.5 * rng.normal(size=16 * n)).astype(np.float32)


def squared_error(params, xs, ys):
    """Of a line."""
    weight, bias = params
    return jnp.mean((weight * xs + bias - ys) ** 2)


def update(params, xs, ys):
    """Take one step down."""
    loss, grads = jax.value_and_grad(squared_error)(params, xs, ys)
    return jax.tree.map(lambda p, g: p - 0.005 * g, params, grads), loss


def update_on_each(params, xs, ys):
    """Take one step down, with means over devices."""
    loss, grads = lax.pmean(jax.value_and_grad(squared_error)(params, xs, ys), "d")
    return jax.tree.map(lambda p, g: p - 0.005 * g, params, grads), loss


def descent():
    """Take a data-parallel step of gradient descent."""
    params = place(P(), np.float32(0.5), np.float32(0.25))
    old_args = params, *place(P("data"), xs.reshape(n, -1), ys.reshape(n, -1))
    new_args = params, *place(P("data"), xs, ys)
    old = pmap(update_on_each, axis_name="d", in_axes=(None, 0, 0), out_axes=None)
    new = jit(update)
    residual = 0.5 * xs.astype(np.float64) + 0.25 - ys
    truth = (0.5 - 0.01 * np.mean(residual * xs), 0.25 - 0.01 * np.mean(residual)), np.mean(residual**2)
    return Pair(old, old_args, new, new_args, truth)


num_examples, sizes = 16 * n, (8, 4)
inputs = rng.normal(size=(num_examples, sizes[0])).astype(np.float32)
targets = rng.normal(size=(num_examples, sizes[1])).astype(np.float32)
weights = rng.normal(size=sizes).astype(np.float32), rng.normal(size=sizes[1]).astype(np.float32)


def loss_of_one(weights, x, y):
    """Squared error of one example under one layer of tanh."""
    return jnp.sum((jnp.tanh(x @ weights[0] + weights[1]) - y) ** 2)


def each_gradient():
    """Differentiate that by hand, for all examples."""
    activation = np.tanh(inputs.astype(np.float64) @ weights[0] + weights[1])
    delta = 2 * (activation - targets) * (1 - activation**2)
    return inputs[:, :, None] * delta[:, None, :], delta


def per_example_gradients():
    """Give each example its gradient."""
    placed = place(P(), *weights)
    old_args = placed, *place(P("data"), inputs.reshape(n, -1, 8), targets.reshape(n, -1, 4))
    new_args = placed, *place(P("data"), inputs, targets)
    old = pmap(vmap(grad(loss_of_one), in_axes=(None, 0, 0)), in_axes=(None, 0, 0))
    new = jit(vmap(grad(loss_of_one), in_axes=(None, 0, 0)))
    return Pair(old, old_args, new, new_args, each_gradient())


def through():
    """Differentiate through the map."""
    args = place(P("data"), table / table.size)
    old = jit(grad(lambda x: pmap(lambda row: jnp.sin(row) * jnp.tanh(row).sum())(x).sum()))
    new = jit(grad(lambda x: vmap(lambda row: jnp.sin(row) * jnp.tanh(row).sum())(x).sum()))
    x = (table / table.size).astype(np.float64)
    sums = [np.sum(f(x), axis=1, keepdims=True) for f in (np.sin, np.tanh)]
    return Pair(old, args, new, args, np.cos(x) * sums[1] + sums[0] / np.cosh(x) ** 2)


# %% [markdown]
# ## Cartesian products
#
# Two `vmap`s turn a function of two numbers into one of two axes of numbers. `pmap` cuts one of them;
# on a mesh with two axes both are cut, and each device has a block of the plane.

# %%
num_points = n * (24 if options.quick else 375)
ticks = np.linspace(-3, 3, num_points, dtype=np.float32)


def ripple(x, y):
    """Give a hill with rings around it; its top is 1, at (0, 0)."""
    return jnp.cos(x**2 + y**2) / (1 + x**2 + y**2)


def plane():
    """Evaluate a function at all pairs of two axes."""
    old_args = *place(P("data"), ticks.reshape(n, -1)), *place(P(), ticks)
    new_args = *place(P("data"), ticks, on=grid), *place(P("model"), ticks, on=grid)
    old = pmap(vmap(vmap(ripple, in_axes=(None, 0)), in_axes=(0, None)), in_axes=(0, None))
    new = jit(vmap(vmap(ripple, in_axes=(None, 0)), in_axes=(0, None)))
    square = np.add.outer(ticks.astype(np.float64) ** 2, ticks.astype(np.float64) ** 2)
    return Pair(old, old_args, new, new_args, np.cos(square) / (1 + square))


# %% [markdown]
# ## The same values, and the times
#
# A round calls one program, then the other, each often enough to last five milliseconds; the order
# alternates. The ratio is the new program's time divided by the old one's in the same round; the table
# has the median over rounds and the quartiles. The last column but one has the new program on one
# device. Virtual devices share the machine's cores: the ratios compare the overhead of the ways, not
# their time on a pod.


# %%
CASES = [
    *(squares, convolutions, trees_of_axes, out_axes, random_matrices, dot_products, dots_of_columns),
    *(uneven, normalise, groups, two_names, nested, kept_body, rule_30),
    *(descent, per_example_gradients, through, plane),
]
found = [compare(case, ROUNDS) for case in track(CASES, "cases", console=console, transient=True)]
raced = [row for row in found if "ratio" in row]

# %%
console.print(draw_table(found, n))
for row in found:
    if "refused" in row:
        console.print(f"{row['what']}, by pmap: {escape(row['refused'])}")

# %% [markdown]
# The tutorial prints these dot products (its last digits are a TPU's), drawn with the key 42:
# 0.51048726, -0.7174605, ... of 8 pairs of vectors; 1.1981742, -3.0097814, -2.539115, ... of 10⁷ pairs.

# %%
small_dots = np.asarray(trees_of_axes().new(*trees_of_axes().new_args)).tolist()
console.print(f"{n} dot products:", ", ".join(f"{x:.4f}" for x in small_dots))
console.print(f"{num_dots:,} dot products:", ", ".join(f"{x:.4f}" for x in true_dots[:3]), "…")

# %% [markdown]
# ## A pitfall of `pmap`: it returns sums that nobody asked for
#
# `vdot` flattens its arguments. Over a new axis of devices, `pmap(jnp.vdot)` without the `vmap` inside
# takes each device's whole block for one vector: it returns one sum per device, without a warning, in
# the shape that one would expect of a map over devices. Placed arrays have no such axis: without
# `vmap`, `jit(jnp.vdot)` returns a single number, which nobody takes for a dot product per row.

# %%
blocks = first.reshape(n, -1, 3), second.reshape(n, -1, 3)
wrong = np.asarray(pmap(jnp.vdot)(*blocks))
right = np.asarray(jit(vmap(jnp.vdot))(*place(P("data"), first, second)))
pitfall = {
    "rows": num_dots,
    "pmap_of_dot_shape": list(wrong.shape),
    "placed_shape": list(right.shape),
    "distance_from_sums_of_blocks": largest_difference(wrong, true_dots.reshape(n, -1).sum(axis=1)),
    "distance_from_dot_products": largest_difference(right, true_dots),
}
console.print(
    f"pmap(jnp.vdot) of two arrays {blocks[0].shape} has shape {wrong.shape}: each number sums "
    f"over all {num_dots // n:,} rows of a device. jit(vmap(jnp.vdot)) of placed arrays {first.shape} "
    f"has shape {right.shape}, a dot product for each row."
)

# %% [markdown]
# ## When one device is better
#
# A call on several devices costs a fixed time per device, whatever the size. The tutorial's last cells
# take 8 dot products: one device needs 2.33 ms, the three forms of `pmap` 24.5 to 47.4 ms, 10 to 20
# times as long. Here all ways compute the same dot products, from 8 rows to millions.

# %%
ROWS = [n * 4**k for k in ((0, 4) if options.quick else range(11))]
times = measure(devices, ROWS, 3 if options.quick else 9)
for way in ("pmap(vmap)", "placed, jit(vmap)"):
    least = [row for row in times if row["rows"] == ROWS[0] and row["devices"] in (1, n)]
    one = next(row["ms"] for row in least if row["devices"] == 1)
    here = next(row["ms"] for row in least if row["way"] == way)
    begins = crossover(times, way, n)
    console.print(
        f"{way} on {n} devices: {here / one:.1f} times the time of one device for {ROWS[0]} rows; "
        + (f"faster than one device from {begins:,} rows on" if begins else "never faster, up to here")
    )

# %% [markdown]
# ## The figure


# %%
def plot_plane(figure, axis):
    """Draw contours of the function, and the block of each device."""
    values = plane().new(*plane().new_args)
    thin = max(num_points // 500, 1)
    seen = ticks[::thin], ticks[::thin], np.asarray(values)[::thin, ::thin].T
    filled = axis.contourf(*seen, levels=np.linspace(-0.3, 1, 27), cmap="cividis")
    axis.contour(*seen, levels=np.linspace(-0.2, 1, 7), colors="black", linewidths=0.4)
    figure.colorbar(filled, ax=axis, label="cos(x² + y²) / (1 + x² + y²)", ticks=[-0.2, 0, 0.5, 1])
    for shard in values.addressable_shards:
        left, bottom = (ticks[part.start or 0] for part in shard.index)
        right, top = (ticks[(part.stop or num_points) - 1] for part in shard.index)
        outline = Rectangle((left, bottom), right - left, top - bottom, fill=False, ec="white", lw=2)
        axis.add_patch(outline)
        name = f"device {devices.index(shard.device)}"
        shade = {"facecolor": "black", "alpha": 0.4, "linewidth": 0}
        axis.text(left + 0.1, top - 0.1, name, color="white", va="top", fontsize=9, bbox=shade)
    axis.set(title="a plane by two vmaps, cut both ways: nothing is sent", aspect="equal")
    axis.set(
        xlabel="x, over mesh axis data", ylabel="y, over mesh axis model", xlim=(-3, 3), ylim=(-3, 3)
    )


def plot_rule(axis):
    """Draw rule 30, and where a device's stretch ends."""
    boards = np.asarray(rule_30().new(*rule_30().new_args))
    axis.imshow(boards, cmap="binary", aspect="auto", interpolation="nearest")
    for edge in range(1, n):
        axis.axvline(edge * len(cells) // n - 0.5, color="#d55e00", lw=0.8)
    trips = sum(next(row for row in raced if row["case"] == "rule_30")["collectives"].values())
    axis.set(title=f"rule 30 on {n} devices: {trips} collective-permutes", xlabel="cell", ylabel="step")


figure = plt.figure(figsize=(15, 13), layout="constrained")
panels = figure.subplot_mosaic("PR;CR;XX", width_ratios=[1, 1.05], height_ratios=[1.9, 1, 1.4])
plot_plane(figure, panels["P"])
plot_ratios(panels["R"], raced)
plot_rule(panels["C"])
plot_crossover(panels["X"], times)
figure.suptitle(f"pmap's cases by placement on {n} devices")
figure.savefig(options.out / "pmap_to_jit.png", dpi=110)
plt.close(figure)

# %%
summary = {
    "devices": n,
    "jax": jax.__version__,
    "rounds": ROUNDS,
    "num_dots": num_dots,
    "num_points": num_points,
    "num_steps": num_steps,
    "identical": sum(row["difference"] == 0 for row in raced),
    "refused_by_pmap": len(found) - len(raced),
    "geometric_mean_ratio": float(np.exp(np.mean([np.log(row["ratio"]) for row in raced]))),
    "largest_error": max(row["error"] for row in found),
    "small_dots": small_dots,
    "first_dots": true_dots[:3].tolist(),
    "pitfall": [pitfall],
    "crossover_rows_pmap": crossover(times, "pmap(vmap)", n),
    "crossover_rows_placed": crossover(times, "placed, jit(vmap)", n),
    "crossover": times,
    "cases": found,
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
