"""The work of programs as the chips' own compilers make them: bytes that are known beforehand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from programs import build

import gspmd_mcmc as gm
from gspmd_mcmc.targets.streaming.two_float import two_float_sum

S = jax.ShapeDtypeStruct
ROWS, COLUMNS = 1 << 14, 1 << 10
WHOLE, ROW = 4 * ROWS * COLUMNS, 4 * COLUMNS  # 64 MB: more than a TPU v3 or a card's cache holds
CHIPS = ("TPU v3", "H100")


def loop(body, trips, x, *others):
    """A loop whose trips no compiler knows."""
    return jax.lax.fori_loop(0, trips, functools.partial(body, *others), x)


def doubled(i, x):
    return 2 * x + i


def row_written(i, x):
    return jax.lax.dynamic_update_slice(x, jnp.full((1, COLUMNS), i, jnp.float32), (i, 0))


def row_read(table, i, x):
    return x + jax.lax.dynamic_slice(table, (i, 0), (1, COLUMNS))


def product(table, i, x):
    return jnp.tanh(table.T @ (table @ x))


TABLE, LINE = S((ROWS, COLUMNS), jnp.float32), S((1, COLUMNS), jnp.float32)
VECTORS = S((COLUMNS, 16), jnp.float32)
# What an iteration must move, and what it may move besides.
MOVED = {
    "each element is read and written": (doubled, (TABLE,), 2 * WHOLE, 2 * WHOLE + 100),
    "one row is written in place": (row_written, (TABLE,), ROW, 4 * ROW),
    "one row is read": (row_read, (LINE, TABLE), 3 * ROW, 5 * ROW),
    # A TPU's compiler makes the table bfloat16 before the loop, and both products in one kernel.
    "a table is read for two products": (product, (VECTORS, TABLE), WHOLE / 2, 6.5 * WHOLE),
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", MOVED)
def test_an_iteration_moves_what_it_must(name, chip):
    body, shapes, least, most = MOVED[name]

    def build_loop(mesh):
        def leapfrogs(trips, *args):
            with jax.named_scope("leapfrog"):
                return loop(body, trips, *args)

        return leapfrogs, S((), jnp.int32), *gm.place(shapes, mesh, jax.P())

    work = gm.plan(build_loop, data=1, on=chip).work("leapfrog")
    assert least <= work.bytes_moved <= most
    assert work.readbacks == 1 and work.kernels >= 1
    if body is product:
        # Split-K may pad: never fewer operations than the products have.
        exact = 2 * 2 * ROWS * COLUMNS * 16
        assert exact <= sum(work.product_flops.values()) <= 1.05 * exact


# The reference notebook's models: bytes a leapfrog and device, at most what they were when measured
# first (HMC, one chain, 2026); less is the aim.
FIRST = [
    ("mnist", "TPU v3", 8, 5.9e6, 13.8e6),
    ("movielens", "TPU v3", 8, 2.8e6, 41.5e6),  # residuals in float32; 25 MB where in bfloat16
    ("mnist", "H100", 1, 47e6, 1013e6),
    ("movielens", "H100", 1, 22.4e6, 964e6),
]


@pytest.mark.parametrize(("model", "chip", "devices", "data", "most"), FIRST)
def test_a_leapfrog_moves_the_data_and_not_more_than_it_did(model, chip, devices, data, most):
    plan = gm.plan(build(model, "HMC", num_chains=1), data=devices, on=chip)
    work = plan.work("leapfrog")
    assert data <= work.bytes_moved <= 1.05 * most
    assert work.count("all-reduce") == (devices > 1) and work.count("all-gather") == 0
    said = str(plan)
    assert "as its compiler has it (facts)" in said and "at best" in said


# NUTS by likelihoods whose gradients are kernels, of one chain on one card: terms are the compiler's.
# Kernels that moved less (194 and 286 MB) took four times as long on a card; MNIST's sums over rows, in
# as many blocks as a large card runs at a time, are 2.4 MB.
NUTS_IN_KERNELS = [("mnist in a kernel", 240e6, 41), ("movielens in kernels", 303e6, 68)]


@pytest.mark.parametrize(("model", "most", "kernels"), NUTS_IN_KERNELS)
def test_a_leapfrog_of_nuts_has_the_gradient_s_kernels(model, most, kernels):
    plan = gm.plan(build(model, "NUTS", num_chains=1), data=1, on="H100")
    work = plan.work("leapfrog")
    assert plan.data_bytes < work.bytes_moved <= most
    assert work.kernels <= kernels
    assert plan.atomics() == ()


# Sums of terms: what rounding loses is there in the programs of chips, in a reduction of few kernels.
MANY = 60_000
SUMS = [(two_float_sum, True), (jnp.sum, False)]


def plan_of_sum(total, chip):
    def build_sum(mesh):
        return total, gm.place(S((MANY,), jnp.float32), mesh, jax.P())

    return gm.plan(build_sum, data=1, on=chip)


@pytest.mark.parametrize(("total", "is_kept"), SUMS)
def test_a_two_float_sum_on_a_card_subtracts_what_it_rounds(total, is_kept):
    """TwoSum subtracts four times; a compiler that knew better would not subtract at all."""
    compiled = plan_of_sum(total, "H100").compiled
    assert compiled is not None
    assembly = "\n".join(compiled.assembly)
    assert 1 <= assembly.count(".visible .entry") <= 3
    subtractions = assembly.count("sub.rn.f32")
    assert subtractions >= 40 if is_kept else subtractions == 0


@pytest.mark.parametrize(("total", "is_kept"), SUMS)
def test_a_two_float_sum_on_a_tpu_subtracts_what_it_rounds(total, is_kept):
    """In the program that its compiler has optimized: its machine code is not to be had."""
    compiled = plan_of_sum(total, "TPU v3").compiled
    assert compiled is not None
    # Four in the reduction's own addition, and four in the one at the end.
    assert compiled.text.count(" subtract(") == (8 if is_kept else 0)
