# %% [markdown]
"""A tour of arrays over 8 devices: JAX's `jax.Array` tutorial, with every array drawn.

This is "Distributed arrays and automatic parallelization" from the time when it taught
`PositionalSharding`, which JAX removed in 0.7. Its lines run here with that class from `gspmd_mcmc`,
next to the equivalent `NamedSharding`; the demo draws every array and counts the collectives of every
program. The part on neural networks is `neural_network.py`.

    python demos/array_shardings.py [--devices N] [--out DIR] [--quick]

It needs 8 devices, like the tutorial, and no data.
"""

# %%
import time

import common
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pmap_race import Pair, largest_difference, race
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import gspmd_mcmc as gm

matplotlib.use("agg")
import matplotlib.pyplot as plt

BEGAN = time.perf_counter()
console = Console()
options = common.parse("A tour of arrays over 8 devices", "out/array_shardings")
devices = common.start_devices(options.devices)
if len(devices) < 8:
    raise SystemExit(
        f"{len(devices)} devices: the tutorial's layouts need 8 (JAX_PLATFORMS=cpu has them)"
    )
devices = devices[:8]
# The tutorial's matrix has 8,192 rows. On a CPU the devices share its cores: 2,048 there.
size = 512 if options.quick else 2048 if devices[0].platform == "cpu" else 8192
ROUNDS = 5 if options.quick else 15
pictures: dict[str, dict] = {}
programs: list[dict] = []


def holders(array):
    """Return who holds which block: rows of blocks, each a list of device numbers."""
    blocks: dict[tuple[int, ...], list[int]] = {}
    for shard in array.addressable_shards:
        begin = tuple(part.start or 0 for part in shard.index)
        blocks.setdefault((0,) * (2 - len(begin)) + begin, []).append(devices.index(shard.device))
    rows, columns = ({begin[axis] for begin in blocks} for axis in (0, 1))
    return [[sorted(blocks[r, c]) for c in sorted(columns)] for r in sorted(rows)]


def show(name, array):
    """Draw where an array lies, and record it."""
    console.rule(escape(name))
    console.print(gm.visualize({name: array}))
    megabytes = array.addressable_shards[0].data.nbytes / 1e6
    pictures[name] = {"holders": holders(array), "megabytes_per_device": megabytes}


def audit(name, function, *args):
    """Print what a program sends, and record it."""
    report = gm.communication(function, *args)
    sends = [
        {"kind": one.kind, "bytes": one.num_bytes, "group": one.group_size}
        for one in report.collectives
    ]
    words = "\n  ".join(["sends", *map(str, report.collectives)] if sends else ["sends nothing"])
    console.print(f"[bold]{escape(name)}[/bold] {escape(words)}")
    programs.append({"program": name, "collectives": sends, "bytes_sent": report.sent_bytes()})


# %% [markdown]
# ## A quick example
#
# One array of random numbers is spread over 8 devices by a sharding of shape 4×2. Its sine is spread
# in the same way: each device computed its own part.

# %%
sharding = gm.PositionalSharding(mesh_utils.create_device_mesh((8,), devices))
x = jax.device_put(jax.random.normal(jax.random.key(0), (size, size)), devices[0])
show("x", x)
y = jax.device_put(x, sharding.reshape(4, 2))
show("y", y)
z = jnp.sin(y)
show("sin(y)", z)
audit("sin(y)", jnp.sin, y)
print(f"{sharding}\n{sharding.reshape(8, 1)}\n{sharding.reshape(4, 2)}")

# %% [markdown]
# ## Layouts by position, and the same layouts by name
#
# A `PositionalSharding` is an array of sets of devices. `reshape` aligns it with the axes of an array,
# and `replicate` merges sets, whose devices then hold copies. A `NamedSharding` names the axes of a
# mesh: the array is cut along the axes in the spec and copied along the others.

# %%
sharding = sharding.reshape(4, 2)
mesh = Mesh(mesh_utils.create_device_mesh((4, 2), devices), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
LAYOUTS = {
    "reshape(8, 1)": (sharding.reshape(8, 1), P(("a", "b"), None)),
    "reshape(4, 2)": (sharding, P("a", "b")),
    "reshape(1, 8)": (sharding.reshape(1, 8), P(None, ("a", "b"))),
    "replicate(0)": (sharding.replicate(axis=0, keepdims=True), P(None, "b")),
    "replicate(1)": (sharding.replicate(1), P("a", None)),
    "T": (sharding.T, P("b", "a")),
    "T.replicate(0)": (sharding.T.replicate(0), P(None, "a")),
    "replicate()": (sharding.replicate(), P()),
}
same = Table(title="by position, and by name over mesh a=4, b=2", show_lines=True)
for heading in ("sharding", "shape", ".named()", "spec", "equivalent"):
    same.add_column(heading)
for name, (positional, spec) in LAYOUTS.items():
    placed, named = jax.device_put(x, positional), jax.device_put(x, NamedSharding(mesh, spec))
    show(name, placed)
    equal = placed.sharding.is_equivalent_to(named.sharding, x.ndim)
    assert equal and holders(placed) == holders(named) and np.array_equal(placed, x)
    pictures[name] |= {"shape": list(positional.shape), "spec": str(spec), "equivalent": equal}
    print(positional)
    own = positional.named(x.ndim)
    cells = (name, str(positional.shape), f"{dict(own.mesh.shape)} {own.spec}", str(spec), str(equal))
    same.add_row(*map(escape, cells))
console.print(same)


# %% [markdown]
# A sharding that does not fit is refused: a sharding and an array must have the same rank (a fully
# replicated one fits any), and a block must be a whole number of rows.

# %%
refused: list[dict[str, str]] = []


def refuse(what, function):
    """Run what must fail, print the error, and record it."""
    try:
        function()
    except ValueError as error:
        console.print(f"[bold]{escape(what)}[/bold]: {type(error).__name__}: {escape(str(error))}")
        refused.append({"what": what, "error": str(error)})
    else:
        raise AssertionError(f"{what}: expected an error, got none")


refuse("a matrix under reshape(8)", lambda: jax.device_put(x, sharding.reshape(8)))
refuse("8 blocks of 12 rows", lambda: jax.device_put(jnp.ones((12, 4)), sharding.reshape(8, 1)))

# %% [markdown]
# `gm.place` accepts such rows: it pads them with copies of the last row, and a `Plate` masks them.

# %%
padded = gm.place(np.ones((12, 4), np.float32), mesh, P(("a", "b")))
console.print(escape(str(padded)))

# %% [markdown]
# ## Computation follows sharding
#
# Rows of one operand and columns of the other give a block of the product, on the device that holds
# both: nothing is sent. (If they are cut along the axis that is summed, every device has a partial sum
# of every element of the product, and an all-reduce of the whole product adds them up.)

# %%
left = jax.device_put(x, sharding.replicate(1))
right = jax.device_put(x, sharding.replicate(0))
product = jnp.dot(left, right)
show("left", left)
show("right", right)
show("dot(left, right)", product)
audit("dot(left, right)", jnp.dot, left, right)
show("copy", jnp.copy(product))
audit("copy", jnp.copy, product)
along = jax.device_put(x, sharding.reshape(1, 8)), jax.device_put(x, sharding.reshape(8, 1))
audit("dot along the sum", jnp.dot, *along)

product_of_one = jnp.dot(x, x)
dot_difference = largest_difference(product, product_of_one)
sin_difference = largest_difference(z, jnp.sin(x))
console.print(f"from the product on one device: {dot_difference:.1e} of its largest number")
assert dot_difference < 1e-5 and sin_difference < 1e-6

# %% [markdown]
# ### The timing experiment
#
# On 8 TPU cores the tutorial measures 9.69 ms for the sine on one device and 1.86 on eight; for the dot
# product 19.3 and 3.25. Virtual devices share the cores of a machine, which one device already uses
# fully: the best possible ratio here is near 1, and the difference is the overhead of eight devices.

# %%
sin_times = race(Pair(jnp.sin, (x,), jnp.sin, (y,), None), ROUNDS)
dot_times = race(Pair(jnp.dot, (x, x), jnp.dot, (left, right), None), ROUNDS)
TUTORIAL_MS = {"sin": (9.69, 1.86), "dot": (19.3, 3.25)}
times = Table(title=f"{size}×{size}, 1 device and 8 ({devices[0].platform}), median of {ROUNDS} rounds")
for heading in ("", "1 device, ms", "8 devices, ms", "8 ÷ 1", "quartiles", "tutorial's 8 ÷ 1"):
    times.add_column(heading)
for name, raced in (("sin", sin_times), ("dot", dot_times)):
    quartiles = f"{raced['ratio_low']:.2f}–{raced['ratio_high']:.2f}"
    theirs = f"{TUTORIAL_MS[name][1] / TUTORIAL_MS[name][0]:.2f}"
    row = (
        f"{raced['old_ms']:.3g}",
        f"{raced['new_ms']:.3g}",
        f"{raced['ratio']:.2f}",
        quartiles,
        theirs,
    )
    times.add_row(name, *row)
console.print(times)

# %% [markdown]
# ### Where shardings disagree
#
# Placed arrays stay where they are: arrays on different devices, or on the same devices in another
# order, cannot be combined. Arrays that were not placed can be combined with any others.

# %%
first, second = gm.PositionalSharding(devices[:4]), gm.PositionalSharding(devices[4:])
on_first, on_second = (jax.device_put(x, half.reshape(2, 2)) for half in (first, second))
refuse("sum over other devices", lambda: on_first + on_second)
permuted = gm.PositionalSharding([devices[i] for i in (0, 1, 2, 3, 6, 7, 4, 5)])
in_other_order = jax.device_put(x, permuted.reshape(4, 2))
show("permuted", in_other_order)
refuse("sum over another order", lambda: y + in_other_order)
for name, free in (("ones", jnp.ones_like(y)), ("arange", jnp.arange(y.size).reshape(y.shape))):
    console.print(f"y + {name}: no error, on {(y + free).sharding.spec}")

# %% [markdown]
# ## Constraints inside a program
#
# `with_sharding_constraint` lays out an intermediate value; the compiler inserts what must be sent.


# %%
@jax.jit
def to_two_by_four(x):
    """Add one, and lay the sum out in another shape."""
    return lax.with_sharding_constraint(x + 1, sharding.reshape(2, 4))


@jax.jit
def to_all(x):
    """Add one, and give every device all of the sum."""
    return lax.with_sharding_constraint(x + 1, sharding.replicate())


for name, function in (("to 2×4", to_two_by_four), ("to all", to_all)):
    show(name, function(y))
    audit(name, function, y)
    assert np.array_equal(function(y), np.asarray(x) + 1)

# %% [markdown]
# ## Random numbers
#
# When the tutorial was written, drawing random numbers over a sharding needed communication. Numbers
# from a `threefry` key now depend only on the key and the index in the global array
# (`jax_threefry_partitionable`, the default since JAX 0.5): every layout gives the same numbers, and
# nothing is sent.


# %%
def add_numbers(key, x):
    """Add a random number to each element."""
    return x + jax.random.uniform(key, x.shape)


key, line = jax.random.key(42), jax.device_put(jnp.arange(24), sharding.reshape(8))
drawn = {}
for name, flag in (("stable", False), ("partitionable", True)):
    with jax.threefry_partitionable(flag):
        program = jax.jit(add_numbers)  # a program of its own: the flag is read when it is traced
        audit(f"uniform, {name}", program, key, line)
        drawn[name] = np.asarray(program(key, line))
        print(name, drawn[name][:6], "...")
show("x + uniform", jax.jit(add_numbers)(key, line))


def normal_under(spec):
    """Draw a matrix of normal numbers straight into a layout."""
    out = NamedSharding(mesh, spec)
    return jax.jit(jax.random.normal, static_argnums=1, out_shardings=out)(key, (64, 64))


one_device = np.asarray(jax.random.normal(key, (64, 64)))
layouts = [spec for _, spec in LAYOUTS.values()]
num_same = sum(np.array_equal(normal_under(spec), one_device) for spec in layouts)
console.print(f"normal numbers: the same as on one device under {num_same} of {len(layouts)} layouts")

# %% [markdown]
# ## The figure

# %%
figure, axes = plt.subplots(3, 4, figsize=(15, 11), layout="constrained")
panels = {
    "x: one device": x,
    "reshape(8, 1)": jax.device_put(x, sharding.reshape(8, 1)),
    "reshape(4, 2)": y,
    "reshape(1, 8)": jax.device_put(x, sharding.reshape(1, 8)),
    "reshape(4, 2).T": jax.device_put(x, sharding.T),
    "reshape(4, 2).replicate(0)": right,
    "reshape(4, 2).replicate(1)": left,
    "replicate()": jax.device_put(x, sharding.replicate()),
    "dot(rows, columns): sends nothing": product,
    "constraint to 2×4": to_two_by_four(y),
    "another order of devices": in_other_order,
}
for axis, (title, array) in zip(axes.flat, panels.items(), strict=False):
    gm.visualize(array, ax=axis)
    axis.set_title(title, loc="left", fontsize=11)
bars, ratios = axes.flat[-1], (sin_times, dot_times)
for offset, label, color, heights in (
    (-0.2, f"here ({devices[0].platform})", "#0072b2", [raced["ratio"] for raced in ratios]),
    (0.2, "tutorial, 8 TPU cores", "#e69f00", [eight / one for one, eight in TUTORIAL_MS.values()]),
):
    bars.bar(np.arange(2) + offset, heights, 0.4, color=color, label=label)
spread = [[r["ratio"] - r["ratio_low"] for r in ratios], [r["ratio_high"] - r["ratio"] for r in ratios]]
bars.errorbar(
    np.arange(2) - 0.2, [r["ratio"] for r in ratios], spread, fmt="none", ecolor="black", capsize=3
)
bars.axhline(1, color="black", lw=1, ls="--")
bars.set_xticks(range(2), ["sin", "dot"])
bars.set_title("time on 8 devices ÷ time on 1", loc="left", fontsize=11)
bars.legend(fontsize=8, loc="upper left")
bars.set_ylim(0, 1.35 * max(1, *(raced["ratio_high"] for raced in ratios)))
figure.suptitle(f"One array of {size}×{size} numbers over 8 devices: which device holds which block")
figure.savefig(options.out / "array_shardings.png", dpi=110)
plt.close(figure)

# %%
summary = {
    "devices": len(devices),
    "jax": jax.__version__,
    "size": size,
    "rounds": ROUNDS,
    "dot_difference": dot_difference,
    "sin_difference": sin_difference,
    **{f"sin_{name}": value for name, value in sin_times.items()},
    **{f"dot_{name}": value for name, value in dot_times.items()},
    "layouts_with_the_same_numbers": num_same,
    "num_layouts": len(layouts),
    "padded_rows": padded.values.shape[0],
    "pictures": [{"name": name, **picture} for name, picture in pictures.items()],
    "programs": programs,
    "refused": refused,
    "uniform_stable": drawn["stable"].tolist(),
    "uniform_partitionable": drawn["partitionable"].tolist(),
    "peak_rss_mb": common.peak_rss_mb(),
    "wall_seconds": time.perf_counter() - BEGAN,
}
common.write_summary(console, options.out, summary)
