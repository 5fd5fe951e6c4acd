"""`communication` against programs whose collectives, loops and constants are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.views.communication import KINDS, communication, largest_constant, read_collectives

MESH = gm.make_mesh()
RING = [(i, (i + 1) % 8) for i in range(8)]
BLOCK_BYTES = 8 * 16 * 4  # of a device's block of X


def over_rows(*shape, dtype=jnp.float32):
    """An array that is never made, its rows over 8 devices."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P("data")))


X = over_rows(64, 16)
ROWS = P("data")


def on_blocks(function, out=ROWS):
    """A function of each device's block, with the collectives that it names and no other."""
    return jax.shard_map(function, mesh=MESH, in_specs=ROWS, out_specs=out, check_vma=False)


def psum(x):
    return lax.psum(x, "data")


def ring(x):
    return lax.ppermute(x, "data", RING)


def collectives(function, *args):
    return communication(on_blocks(function), *(args or (X,))).collectives


# Kinds and bytes.


@pytest.mark.parametrize(
    ("function", "out", "kind", "num_bytes"),
    [
        (psum, P(), "all-reduce", BLOCK_BYTES),
        (lambda x: lax.pmax(x, "data"), P(), "all-reduce", BLOCK_BYTES),
        (lambda x: lax.all_gather(x, "data", tiled=True), P(), "all-gather", 8 * BLOCK_BYTES),
        (ring, P("data"), "collective-permute", BLOCK_BYTES),
        (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), P("data"), "all-to-all", BLOCK_BYTES),
        (
            lambda x: lax.psum_scatter(x, "data", tiled=True),
            P("data"),
            "reduce-scatter",
            BLOCK_BYTES // 8,
        ),
    ],
)
def test_each_collective_is_seen_once_with_its_bytes(function, out, kind, num_bytes):
    seen = communication(on_blocks(function, out), X)
    assert [(c.kind, c.num_bytes, c.loops) for c in seen.collectives] == [(kind, num_bytes, ())]
    assert {k: seen.count(k) for k in KINDS} == {k: int(k == kind) for k in KINDS}


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
    seen = communication(function, over_rows(64, 16, dtype=dtype))
    assert [(c.kind, c.num_bytes) for c in seen.collectives] == [("all-reduce", num_bytes)]


def test_the_source_of_a_collective_is_named():
    assert collectives(ring)[0].op_name.endswith("ppermute")


def test_what_needs_no_collective_has_none():
    assert collectives(lambda x: jnp.sin(x) * 2) == ()


def test_one_device_has_no_collective():
    def step(x):
        return lax.fori_loop(0, 3, lambda i, a: jnp.sin(a @ a), x).sum()

    assert communication(step, jnp.ones((8, 8))).collectives == ()


# Loops.


def nested(body):
    """The body 5 times in a loop of 3."""

    def outer(x):
        return lax.fori_loop(0, 3, lambda i, a: lax.fori_loop(0, 5, lambda j, b: body(b), a) + 1, x)

    return outer


def scanned(body):
    """The body 7 times in a scan of 4."""

    def inner(x, _):
        return lax.scan(lambda b, _: (body(b), None), x, None, length=7)[0], None

    return lambda x: lax.scan(inner, x, None, length=4)[0]


def until_large(body):
    return lambda x: lax.while_loop(lambda a: a[0, 0] < 100, body, x)


def one_psum(x):
    return psum(jnp.sin(x)) / 8


def psum_and_ring(x):
    return ring(one_psum(x))


@pytest.mark.parametrize(("loop", "trips"), [(nested, (3, 5)), (scanned, (4, 7))])
def test_collectives_know_the_loops_around_them(loop, trips):
    seen = {c.kind: c.loops for c in collectives(loop(psum_and_ring))}
    assert seen == {"all-reduce": trips, "collective-permute": trips}


@pytest.mark.parametrize(("loop", "trips"), [(nested, (3, 5)), (scanned, (4, 7))])
def test_per_iteration_multiplies_the_loops_further_in(loop, trips):
    seen = communication(on_blocks(loop(one_psum)), X)
    assert seen.count("all-reduce") == 1
    assert seen.per_iteration("all-reduce", depth=0) == trips[0] * trips[1]
    assert seen.per_iteration("all-reduce") == trips[1]
    assert seen.per_iteration("all-reduce", depth=2) == 1
    assert seen.per_iteration("all-reduce", depth=3) == 0
    assert seen.per_iteration("all-gather") == 0


def test_per_iteration_counts_no_collective_outside_the_loops():
    def inside_and_outside(x):
        return psum(nested(one_psum)(ring(x)))

    seen = communication(on_blocks(inside_and_outside), X)
    assert seen.count("all-reduce") == 2
    assert seen.per_iteration("all-reduce") == 5
    assert seen.per_iteration("collective-permute") == 0
    assert seen.per_iteration("collective-permute", depth=0) == 1


def test_a_loop_of_unknown_length_is_known_to_be_unknown():
    seen = communication(on_blocks(until_large(one_psum)), X)
    assert [c.loops for c in seen.collectives] == [(None,)]
    assert seen.per_iteration("all-reduce") == 1
    with pytest.raises(ValueError, match="an inner loop with all-reduce has no known trip count"):
        seen.per_iteration("all-reduce", depth=0)
    assert seen.per_iteration("all-gather", depth=0) == 0


def test_an_unknown_loop_may_stand_inside_a_known_one_and_around_it():
    inside = communication(on_blocks(lambda x: nested(until_large(one_psum))(x)), X)
    assert [c.loops for c in inside.collectives] == [(3, 5, None)]
    with pytest.raises(ValueError, match="no known trip count"):
        inside.per_iteration("all-reduce")
    around = communication(on_blocks(until_large(nested(one_psum))), X)
    assert [c.loops for c in around.collectives] == [(None, 3, 5)]
    assert around.per_iteration("all-reduce") == 15


def test_a_collective_in_the_test_of_a_loop_is_in_the_loop():
    def until_sum_is_large(x):
        return lax.while_loop(lambda a: psum(a[0, 0]) < 100, lambda a: a + 1, x)

    assert [(c.kind, c.num_bytes, c.loops) for c in collectives(until_sum_is_large)] == [
        ("all-reduce", 4, (None,))
    ]


def test_lengths_that_differ_between_chains_show_as_a_reduction_in_every_loop_test():
    def trajectories(lengths, x):
        run = jax.vmap(
            lambda n, a: lax.fori_loop(0, n, lambda i, b: jnp.sin(b), a), spmd_axis_name="data"
        )
        return run(lengths, x)

    seen = communication(trajectories, over_rows(64, dtype=jnp.int32), X)
    assert [(c.kind, c.num_bytes, c.loops) for c in seen.collectives] == [("all-reduce", 1, (None,))]


def test_a_length_that_chains_share_needs_no_reduction():
    def trajectories(length, x):
        run = jax.vmap(
            lambda a: lax.fori_loop(0, length, lambda i, b: jnp.sin(b), a), spmd_axis_name="data"
        )
        return run(x)

    assert communication(trajectories, jnp.int32(5), X).collectives == ()


# Branches.


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_collectives_of_every_branch_are_seen(branch):
    branches = [psum if i == branch else lambda a, i=i: a + i for i in range(3)]

    def switch(x):
        return lax.switch(x[0, 0].astype(int), branches, x)

    assert [c.kind for c in collectives(switch)] == ["all-reduce"]


@pytest.mark.parametrize("sides", [(psum, jnp.sin), (jnp.sin, psum)])
def test_collectives_of_either_side_of_a_condition_are_seen(sides):
    def condition(x):
        return lax.cond(x[0, 0] > 0, *sides, x)

    assert [(c.kind, c.loops) for c in collectives(nested(condition))] == [("all-reduce", (3, 5))]


# Constants and memory.


BIG = np.random.default_rng(0).normal(size=(500, 500)).astype(np.float32)
ROW = jnp.ones((3, 500))


def closing_over(array):
    return lambda x: jnp.sin(x @ array)


@pytest.mark.parametrize("array", [BIG, jnp.asarray(BIG)])
def test_a_closed_over_array_is_a_constant(array):
    assert communication(closing_over(array), ROW).largest_constant_bytes == BIG.nbytes


def test_a_closed_over_sharded_array_is_a_constant_of_full_size():
    placed = gm.place(BIG[:496], MESH, P("data"))
    constant = communication(lambda x: x @ placed, jnp.ones((3, 496))).largest_constant_bytes
    assert constant == placed.nbytes


def test_a_constant_inside_an_inner_program_and_a_loop_is_seen():
    def loop(x):
        return lax.fori_loop(0, 4, lambda i, a: jax.jit(closing_over(BIG))(a), x)

    assert communication(loop, ROW).largest_constant_bytes == BIG.nbytes


def test_a_small_dtype_counts_its_own_bytes():
    bytes_ = np.random.default_rng(1).integers(0, 255, (500, 500), dtype=np.uint8)
    assert (
        communication(lambda x: x + bytes_, jnp.zeros((500, 500), jnp.uint8)).largest_constant_bytes
        == 250_000
    )


def test_an_argument_is_no_constant():
    def product(x, array):
        return jnp.sin(x @ array)

    assert communication(product, ROW, BIG).largest_constant_bytes <= 8


def test_temporaries_are_counted():
    def through_a_matrix(x):
        return jnp.sin(x.T @ x) @ x.T

    temporaries = communication(through_a_matrix, ROW).temporary_bytes
    assert 500 * 500 * 4 <= temporaries < 4 * 500 * 500 * 4
    assert communication(lambda x: x + 1, ROW).temporary_bytes == 0


# What it is given.


def test_nothing_is_run_or_made():
    """Two terabytes in all."""
    seen = communication(lambda x: jnp.sum(x), over_rows(1 << 20, 1 << 19))
    assert seen.count("all-reduce") == 1


def test_a_jitted_function_keeps_its_own_settings():
    jitted = jax.jit(lambda x: x, out_shardings=NamedSharding(MESH, P()))
    assert communication(jitted, X).count("all-gather") == 1
    assert communication(lambda x: x, X).collectives == ()


def log_prior(params):
    return -0.5 * params**2


def row_terms(params, block):
    return -0.5 * (block["x"] @ params) ** 2


def test_a_step_of_a_kernel_reduces_once_a_leapfrog():
    data = gm.place({"x": np.ones((64, 16), np.float32)}, MESH, P("data"))
    kernel = gm.HMC(gm.Posterior(log_prior, gm.Plate(row_terms, data)), 0.1, 5)
    state = kernel.init(jnp.zeros(16))
    seen = communication(jax.jit(gm.HMC.step), kernel, jax.random.key(0), state)
    assert seen.per_iteration("all-reduce") == 1
    assert {c.kind for c in seen.collectives} == {"all-reduce"}
    assert seen.largest_constant_bytes < 1000


# Texts of other compilers.


ASYNCHRONOUS = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[4]) -> (f32[4], f32[32], f32[4]) {
  %p = f32[4]{0:T(128)} parameter(0)
  %ars = f32[4]{0:T(128)} all-reduce-start(%p), channel_id=1, to_apply=%add, metadata={op_name="sum"}
  %ard = f32[4]{0:T(128)} all-reduce-done(%ars), metadata={op_name="sum"}
  %ags = (f32[4]{0:T(128)}, f32[32]{0:T(128)}) all-gather-start(%p), channel_id=2, dimensions={0}
  %agd = f32[32]{0:T(128)} all-gather-done(%ags)
  %cps = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=3
  %cpd = f32[4]{0:T(128)} collective-permute-done(%cps)
  ROOT %out = (f32[4]{0}, f32[32]{0}, f32[4]{0}) tuple(%ard, %agd, %cpd)
}
"""


def test_an_asynchronous_collective_counts_once_with_the_bytes_of_its_result():
    seen = [(c.kind, c.num_bytes) for c in read_collectives(ASYNCHRONOUS)]
    assert seen == [("all-reduce", 16), ("all-gather", 128), ("collective-permute", 16)]


def test_a_text_without_constants_has_none():
    assert largest_constant(ASYNCHRONOUS) == 0


PREDICATED = """HloModule jit_f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%yes (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

%no (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %all-reduce = f32[4]{0} all-reduce(%q), channel_id=1, to_apply=%add
}

ENTRY %main (x: f32[4], c: pred[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %c = pred[] parameter(1)
  ROOT %if = f32[4]{0} conditional(%c, %x, %x), true_computation=%yes, false_computation=%no
}
"""


def test_both_sides_of_a_predicated_conditional_are_read():
    assert [c.kind for c in read_collectives(PREDICATED)] == ["all-reduce"]
