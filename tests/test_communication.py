"""`communication` against programs whose collectives, loops, branches and sources are known."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import (
    BLOCK_BYTES,
    MESH,
    ROWS,
    X,
    collectives,
    nested,
    on_blocks,
    one_psum,
    over_rows,
    psum,
    psum_and_ring,
    ring,
    scanned,
    scoped,
    until_large,
)
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc import communication
from gspmd_mcmc.views.program.hlo import KINDS

HERE = "tests/test_communication.py"


# Kinds and bytes.


@pytest.mark.parametrize(
    ("function", "out", "kind", "shape", "num_bytes"),
    [
        (psum, P(), "all-reduce", "f32[8,16]", BLOCK_BYTES),
        (lambda x: lax.pmax(x, "data"), P(), "all-reduce", "f32[8,16]", BLOCK_BYTES),
        (
            lambda x: lax.all_gather(x, "data", tiled=True),
            *(P(), "all-gather", "f32[64,16]", 8 * BLOCK_BYTES),
        ),
        (ring, ROWS, "collective-permute", "f32[8,16]", BLOCK_BYTES),
        (
            lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True),
            *(ROWS, "all-to-all", ", ".join(["f32[8,2]"] * 8), BLOCK_BYTES),
        ),
        (
            lambda x: lax.psum_scatter(x, "data", tiled=True),
            *(ROWS, "reduce-scatter", "f32[1,16]", BLOCK_BYTES // 8),
        ),
    ],
)
def test_each_collective_is_seen_once_with_its_bytes(function, out, kind, shape, num_bytes):
    """An all-to-all is one of 8 arrays; the others put the block in as it is."""
    report = communication(on_blocks(function, out), X)
    (found,) = report.collectives
    assert (found.kind, found.shape, found.num_bytes) == (kind, shape, num_bytes)
    operand = shape if kind == "all-to-all" else "f32[8,16]"
    assert (found.operand_shape, found.operand_bytes) == (operand, BLOCK_BYTES)
    assert (found.axes, found.group_size, found.loops) == (("data",), 8, ())
    assert {k: report.count(k) for k in KINDS} == {k: int(k == kind) for k in KINDS}
    assert report.unknown == ()


@pytest.mark.parametrize(
    ("dtype", "function", "num_bytes"),
    [
        (jnp.float32, lambda x: jnp.sum(x, axis=0), 64),
        (jnp.complex64, lambda x: jnp.sum(x, axis=0), 128),
        (jnp.int32, lambda x: jnp.sum(x, axis=0), 64),
        (jnp.float32, lambda x: jnp.all(x > 0), 1),
        (jnp.float32, lambda x: (jnp.sum(x, axis=0), jnp.sum(x**2)), 64 + 4),
    ],
)
def test_a_reduction_that_the_compiler_placed_is_one_all_reduce(dtype, function, num_bytes):
    """Two sums in one are a fused tuple, which counts as one."""
    (found,) = communication(function, over_rows(64, 16, dtype=dtype)).collectives
    assert (found.kind, found.num_bytes, found.operand_bytes) == ("all-reduce", num_bytes, num_bytes)


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [(jnp.bool_, 128), (jnp.int8, 128), (jnp.int16, 256), (jnp.complex64, 1024), (jnp.int2, 32)],
)
def test_bytes_follow_the_dtype(dtype, num_bytes):
    """Those that a CPU sends as they are; it widens bfloat16, float8 and int4 before it sends them."""
    sharding = NamedSharding(MESH, P("data"))
    x = jax.ShapeDtypeStruct((128,), dtype, sharding=sharding)
    (found,) = collectives(lambda x: lax.all_gather(x, "data", tiled=True), x)
    assert (found.kind, found.num_bytes, found.operand_bytes) == (
        "all-gather",
        num_bytes,
        num_bytes // 8,
    )


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (P("data"), P(), ["all-gather"]),
        (P("data"), P(None, "data"), ["all-to-all"]),
        (P(), P("data"), []),
        (P("data"), P("data"), []),
    ],
)
def test_a_change_of_layout_costs_what_it_must(before, after, kinds):
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(MESH, before))
    moved = jax.jit(lambda x: x, out_shardings=NamedSharding(MESH, after))
    assert [c.kind for c in communication(moved, x).collectives] == kinds


def test_one_device_has_no_collective():
    def step(x):
        return lax.fori_loop(0, 3, lambda i, a: jnp.sin(a @ a), x).sum()

    report = communication(step, jnp.ones((8, 8)))
    assert (report.collectives, report.num_devices, report.mesh) == ((), 1, {})
    assert "└── no collective" in str(report)
    assert report.runs("all-reduce", within="test_one_device_has_no_collective.<locals>.step") == 0


def test_what_is_compiled_already_is_read_as_it_is():
    jitted = jax.jit(on_blocks(psum))
    lowered = jitted.lower(X)
    reports = [communication(x) for x in (lowered, lowered.compile())] + [communication(jitted, X)]
    assert len({str(report) for report in reports}) == 1
    assert [len(report.arguments) for report in reports] == [1, 1, 1]


def test_nothing_is_run_or_made():
    """Two terabytes in all."""
    seen = communication(lambda x: jnp.sum(x), over_rows(1 << 20, 1 << 19))
    assert seen.count("all-reduce") == 1


# What it adds up to.


def test_traffic_and_bytes_count_each_collective_as_often_as_it_runs():
    report = communication(on_blocks(lambda x: psum(scoped("leapfrog", nested(psum_and_ring))(x))), X)
    traffic = sorted((t.kind, t.runs, t.num_bytes, t.axes, t.group_size) for t in report.traffic())
    assert traffic == [
        ("all-reduce", 1, BLOCK_BYTES, ("data",), 8),
        ("all-reduce", 15, BLOCK_BYTES, ("data",), 8),
        ("collective-permute", 15, BLOCK_BYTES, ("data",), 8),
    ]
    assert report.sent_bytes() == 31 * BLOCK_BYTES
    assert report.sent_bytes(within="leapfrog") == 10 * BLOCK_BYTES
    assert [t.runs for t in report.traffic(within="leapfrog")] == [5, 5]
    with pytest.raises(ValueError, match="no loop 'leapforg'"):
        report.traffic(within="leapforg")


# Loops: their names, how often they run.


@pytest.mark.parametrize(("loop", "trips"), [(nested, (3, 5)), (scanned, (4, 7))])
def test_runs_multiply_the_loops_further_in(loop, trips):
    report = communication(on_blocks(loop(psum_and_ring)), X)
    seen = {c.kind: c.trips for c in report.collectives}
    assert seen == {"all-reduce": trips, "collective-permute": trips}
    assert report.count("all-reduce") == 1
    assert report.runs("all-reduce") == report.runs("all-reduce", within=0) == trips[0] * trips[1]
    assert report.runs("all-reduce", within=1) == trips[1]
    assert report.runs("all-reduce", within=2) == 1
    assert report.runs("all-gather", within=1) == 0
    with pytest.raises(ValueError, match="the program has loops 2 deep; got within=3"):
        report.runs("all-reduce", within=3)


def test_loops_have_names_and_counts_by_name():
    inner = scoped("tile", lambda x: lax.fori_loop(0, 2, lambda _, a: one_psum(a), x))
    middle = scoped("leapfrog", lambda x: until_large(inner)(x))
    outer = scoped("step", lambda x: lax.fori_loop(0, 3, lambda _, a: middle(a), x))
    report = communication(on_blocks(outer), X)
    assert [str(x) for x in report.loops] == ["step x 3", "leapfrog x ?", "tile x 2"]
    assert report.runs("all-reduce", within="leapfrog") == 2
    known = report.with_trips(leapfrog=10, tile=99)
    assert known.collectives[0].trips == (3, 10, 2)  # a count that is known is kept
    assert known.runs("all-reduce") == 60
    assert known.runs("all-reduce", within="step") == 20
    assert communication(on_blocks(outer), X, trips={"leapfrog": 10}).runs("all-reduce") == 60
    with pytest.raises(ValueError, match=r"no loop 'steps'; it has \['leapfrog', 'step', 'tile'\]"):
        report.with_trips(steps=3)
    with pytest.raises(ValueError, match="no loop 'steps'"):
        report.runs("all-reduce", within="steps")


TRANSFORMS = [
    lambda loop: loop,
    jax.jit,
    lambda loop: jax.grad(lambda x: loop(x).sum()),
    jax.checkpoint,
    lambda loop: jax.grad(lambda x: jax.checkpoint(loop)(x).sum()),
    lambda loop: lambda x: jax.vmap(loop)(x[None])[0],
    lambda loop: lambda x: lax.cond(x[0, 0] > 0, loop, jnp.sin, x),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_scope_names_its_loop_through_transformations(transform):
    loop = scoped("leapfrog", lambda x: lax.fori_loop(0, 5, lambda _, a: one_psum(a), x))
    found = collectives(transform(loop))
    assert {c.kind for c in found} == {"all-reduce"}
    assert {str(loop) for c in found for loop in c.loops} == {"leapfrog x 5"}


def test_a_loop_without_a_scope_has_the_name_of_its_function():
    (found,) = collectives(nested(one_psum))
    assert [x.name for x in found.loops] == [
        "nested.<locals>.outer",
        "nested.<locals>.outer.<locals>.<lambda>",
    ]
    line = inspect.getsourcelines(nested)[1] + 4
    assert {x.source.partition(" ")[0] for x in found.loops} == {f"tests/blocks.py:{line}"}


def test_a_loop_of_unknown_length_is_known_to_be_unknown():
    report = communication(on_blocks(until_large(one_psum)), X)
    assert [c.trips for c in report.collectives] == [(None,)]
    assert report.runs("all-reduce", within=1) == 1
    with pytest.raises(ValueError, match="how often all-reduce runs is not known") as raised:
        report.runs("all-reduce")
    assert f"loop {report.loops[0].name!r} (tests/blocks.py:" in str(raised.value)
    assert report.runs("all-gather") == 0
    assert report.with_trips(**{report.loops[0].name: 9}).runs("all-reduce") == 9


def test_a_collective_in_the_test_of_a_loop_is_in_the_loop():
    def until_sum_is_large(x):
        return lax.while_loop(lambda a: psum(a[0, 0]) < 100, lambda a: a + 1, x)

    (found,) = collectives(until_sum_is_large)
    assert (found.kind, found.num_bytes, found.trips) == ("all-reduce", 4, (None,))


def test_lengths_that_differ_between_chains_show_as_a_reduction_in_every_loop_test():
    def trajectory(length, x):
        return lax.fori_loop(0, length, lambda i, a: jnp.sin(a), x)

    each = jax.vmap(trajectory, spmd_axis_name="data")
    (found,) = communication(each, over_rows(64, dtype=jnp.int32), X).collectives
    assert (found.kind, found.num_bytes, found.trips) == ("all-reduce", 1, (None,))
    shared = jax.vmap(trajectory, in_axes=(None, 0), spmd_axis_name="data")
    assert communication(shared, jnp.int32(5), X).collectives == ()


# Branches.


@pytest.mark.parametrize("sides", [(psum, jnp.sin), (jnp.sin, psum)])
def test_collectives_of_either_side_of_a_condition_are_seen(sides):
    def condition(x):
        return lax.cond(x[0, 0] > 0, *sides, x)

    assert [(c.kind, c.trips) for c in collectives(nested(condition))] == [("all-reduce", (3, 5))]


# Sources.


def two_sums(x):
    total = x.sum()
    centred = x - total

    return jnp.sin(centred).max()


def test_the_source_is_the_line_that_caused_the_collective():
    first = inspect.getsourcelines(two_sums)[1]
    found = communication(calls_two_sums, X).collectives
    # The stack leads from the line outwards, and ends before the report.
    assert [frame.function for frame in found[1].stack] == ["two_sums", "calls_two_sums"]
    assert [c.source for c in found] == [f"{HERE}:{first + line} (two_sums)" for line in (1, 4)]
    assert [c.library_source for c in found] == ["", ""]
    assert found[0].op_name.endswith("reduce_sum")


def calls_two_sums(x):
    return two_sums(x) + 1


def log_prior(params):
    return -0.5 * params**2


def row_terms(params, block):
    return -0.5 * (block["x"] @ params) ** 2


@pytest.fixture(scope="module")
def hmc_report():
    data = gm.place({"x": np.ones((64, 16), np.float32)}, MESH, P("data"))
    kernel = gm.HMC(gm.Posterior(log_prior, gm.Plate(row_terms, data)), 0.1, 5)
    state = jax.eval_shape(gm.HMC.init, kernel, jnp.zeros(16))
    return communication(jax.jit(gm.HMC.step), kernel, jax.random.key(0), state)


def test_a_step_of_a_kernel_reduces_once_a_leapfrog(hmc_report):
    """The terms go with the last gradient, after the loop of the others."""
    assert hmc_report.runs("all-reduce", within="leapfrog") == 1
    assert hmc_report.sent_bytes(within="leapfrog") == 16 * 4
    assert {c.kind for c in hmc_report.collectives} == {"all-reduce"}
    assert hmc_report.largest_constant_bytes < 1000
    assert [x.name for x in hmc_report.loops] == ["leapfrog"]
    step = hmc_report.with_trips(leapfrog=4)
    assert step.runs("all-reduce") == 5
    assert step.sent_bytes() == 5 * 16 * 4 + 2 * 4  # a two-float sum of the terms
    # A collective of the library names the library's line.
    (found,) = (c for c in hmc_report.collectives if c.loops)
    assert found.library_source.startswith("gspmd_mcmc/")
    assert found.source == found.library_source  # no line of this file stands between
    assert any(frame.function == "HMC.step" for frame in found.stack)


# The drawing.


def is_plain(text):
    return "\x1b" not in text and max(map(len, text.splitlines())) <= 100


def three_steps(x):
    leapfrogs = scoped("leapfrog", until_large(one_psum))
    return scoped("step", lambda y: lax.fori_loop(0, 3, lambda _, a: leapfrogs(a), y))(x)


def test_the_drawing_shows_nesting_sources_and_memory():
    report = communication(on_blocks(three_steps), X)
    text = str(report)
    lines = text.splitlines()
    assert is_plain(text)
    assert lines[0] == "8 devices, data=8"
    assert lines[1] == "└── loop step, 3 times"
    line = inspect.getsourcelines(three_steps)[1] + 2
    assert lines[2].startswith(f"    {HERE}:{line} (three_steps")
    assert lines[3] == "    └── loop leapfrog, ? times"
    assert lines[5] == "        └── all-reduce f32[8,16] 512 B over data"
    assert lines[6].strip().startswith("tests/blocks.py:")
    assert any(line.split() == ["arguments", "512", "B"] for line in lines)
    # It adds up what each loop and the call send.
    lines = [" ".join(line.split()) for line in lines]
    assert "one leapfrog 1 all-reduce, 512 B" in lines
    assert "one step unknown: give trip counts by report.with_trips(...)" in lines
    lines = [" ".join(line.split()) for line in str(report.with_trips(leapfrog=10)).splitlines()]
    assert "one step 10 all-reduce, 5.1 kB" in lines
    assert "the whole call 30 all-reduce, 15.4 kB" in lines


def test_the_drawing_shows_what_goes_in_where_it_is_not_what_comes_out():
    whole = jax.jit(lambda x: 1 * x, out_shardings=NamedSharding(X.sharding.mesh, P()))
    assert "all-gather f32[8,16] -> f32[64,16] 4.1 kB over data" in str(communication(whole, X))


def test_long_shapes_and_unknown_lines_are_cut_to_the_width():
    many = [over_rows(64, n) for n in range(1, 40)]
    text = str(communication(lambda *xs: [jnp.sum(x, axis=0) for x in xs], *many))
    assert is_plain(text)
    assert "… (39 arrays)" in text


def test_a_notebook_has_it_in_bold(hmc_report):
    page = hmc_report._repr_mimebundle_([], [])["text/html"]
    assert '<span style="font-weight: bold">all-reduce</span>' in page
    assert repr(hmc_report) == str(hmc_report)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="expected a function, .* got str"):
        gm.communication("f")  # pyright: ignore
