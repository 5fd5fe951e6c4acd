"""Gradients that are kernels on chips: the bytes that they move, and what a program must hold to."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from audit import violations
from programs import build

import gspmd_mcmc as gm

S = jax.ShapeDtypeStruct
# Bytes of a device's data, and at most how many times those a leapfrog moves.
MOST = [
    ("mnist in a kernel", "H100", 1, 60_000 * (784 + 4), 2.2),
    ("movielens in kernels", "H100", 1, 6040 * 3706, 6),
    ("mnist in a kernel", "TPU v3", 8, 7_500 * (784 + 4), 2.2),
    ("movielens in kernels", "TPU v3", 8, 755 * 3706, 5),
]


@pytest.mark.parametrize(("model", "chip", "devices", "data", "times"), MOST)
def test_a_leapfrog_moves_the_data_a_few_times(model, chip, devices, data, times):
    program = build(model, "HMC", num_chains=1)
    plan = gm.plan(program, data=devices, on=chip)
    assert data <= plan.work("leapfrog").bytes_moved <= times * data
    assert not violations(program, plan, 300e6)


# Chains, and cycles of a TPU's core that its compiler schedules for their gradients, on eight of them.
CYCLES = [
    ("TPU v3", "mnist in a kernel", 1, 64_050),
    ("TPU v3", "movielens in kernels", 1, 35_488),
    ("TPU v3", "movielens in kernels", 2, 71_195),
    ("TPU v5e", "mnist in a kernel", 1, 17_160),
    ("TPU v5e", "movielens in kernels", 1, 17_377),
]


@pytest.mark.parametrize(("chip", "model", "chains", "now"), CYCLES)
def test_a_tpu_s_kernel_takes_the_cycles_that_it_took(chip, model, chains, now):
    """By the compiler's schedule, which predictions count in place of what a kernel states."""
    plan = gm.plan(build(model, "HMC", num_chains=chains), data=8, on=chip)
    kernel: Any
    (kernel,) = (k for k in plan.work("leapfrog").each if k.stated_flops)
    print(chip, model, chains, kernel.estimated_cycles)
    assert now / 1.1 < kernel.estimated_cycles < 1.05 * now
    found = plan.roofline("leapfrog")
    clock: Any = found.throughput.clock_hz
    assert found.predicted_seconds > kernel.estimated_cycles / clock


def gradient_of_factors(
    rank, width, term: Callable = gm.bernoulli_logits, dtypes=(jnp.uint8,), chains=1
):
    """The gradient of a factor model's terms, of all chains."""

    def terms(params, cells):
        return gm.inner_product_terms(term, cells, params["U"], params["V"])

    def build_gradient(mesh):
        cells = [S((6040, width), dtype) for dtype in dtypes]
        plate = gm.Plate(terms, gm.place(cells, mesh, jax.P("data")), local="U")
        rows = gm.place(S((chains, 6040, rank), jnp.float32), mesh, jax.P(None, "data"))
        params = {"U": rows, "V": gm.place(S((chains, width, rank), jnp.float32), mesh, jax.P())}
        grad = jax.vmap(lambda plate, params: plate.grad(params), in_axes=(None, 0))
        return grad, plate, params

    return build_gradient


def in_precision(precision, build_gradient):
    """Trace the products of a gradient in a precision."""

    def build(mesh):
        gradient, *args = build_gradient(mesh)

        def gradient_in_precision(*args):
            with jax.default_matmul_precision(precision):
                return gradient(*args)

        return gradient_in_precision, *args

    return build


@pytest.mark.parametrize("chip", ["TPU v2", "TPU v3"])
@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize(("rank", "width"), [(64, 14_500), (128, 7_600)])
@pytest.mark.parametrize("chains", [1, 2])
def test_the_widest_factors_that_have_a_kernel_fit_a_core(chip, precision, rank, width, chains):
    """Near the limit of what `inner_product_terms` leaves to the compiler, on chips of 16 MB a core."""
    gradient = gradient_of_factors(rank, width, chains=chains)
    plan = gm.plan(in_precision(precision, gradient), data=8, on=chip)
    assert plan.fits
    assert any(kernel.stated_flops for kernel in plan.work().each)


def long_term(logit, *cells):
    """A term that keeps much at once."""
    x = cells[0].astype(jnp.float32)
    z = jnp.tanh(logit) * jnp.exp(-x * x) + jnp.log1p(jnp.exp(logit)) - jnp.sqrt(1 + logit**2) * x
    of_cells = sum(gm.bernoulli_logits(logit * (1.0 + i), cell) for i, cell in enumerate(cells))
    return of_cells + z + jnp.log(1 + z * z) * jnp.where(logit > 0, z, logit * x)


@pytest.mark.parametrize("chip", ["TPU v2", "TPU v3"])
@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize("dtypes", [[jnp.uint8] * 2, [jnp.int32] * 3, [jnp.uint8, jnp.int32]])
def test_tiles_of_long_terms_and_many_cells_fit_a_core(chip, precision, dtypes):
    gradient = in_precision(precision, gradient_of_factors(20, 3706, long_term, dtypes))
    plan = gm.plan(gradient, data=8, on=chip)
    assert plan.fits
    assert any(kernel.stated_flops for kernel in plan.work().each)


@pytest.mark.parametrize("chip", ["TPU v3", "TPU v5e", "H100"])
def test_a_term_whose_bytes_wrap_around_compiles(chip):
    """A TPU's compiler of kernels has no arithmetic of bytes, so that there it has none."""

    def term(logit, cell):
        return logit * (cell + cell).astype(jnp.float32)

    plan = gm.plan(in_precision("high", gradient_of_factors(20, 900, term)), data=8, on=chip)
    assert not any(kernel.stated_flops for kernel in plan.work().each)


def gradient_of_classes(features, classes, chains):
    """The gradient of a logistic regression with several chains, on one device."""

    def terms(params, block):
        return gm.categorical_linear(block["x"], params["w"], params["b"], block["label"])

    def build_gradient(mesh):
        shapes = {"x": S((6000, features), jnp.uint8), "label": S((6000,), jnp.int32)}
        plate = gm.Plate(terms, gm.place(shapes, mesh, jax.P("data")))
        params = {
            "w": S((chains, features, classes), jnp.float32),
            "b": S((chains, classes), jnp.float32),
        }
        grad = jax.vmap(lambda plate, params: plate.grad(params), in_axes=(None, 0))
        return grad, plate, gm.place(params, mesh, jax.P())

    return build_gradient


LARGEST = [
    ("high", gradient_of_classes(784, 10, 8)),
    ("highest", gradient_of_classes(784, 10, 8)),
    ("highest", gradient_of_classes(128, 128, 1)),
    ("highest", gradient_of_classes(512, 21, 4)),
    ("high", gradient_of_classes(128, 128, 1)),
    ("default", gradient_of_factors(128, 1000)),
    ("high", gradient_of_factors(126, 1000)),
    ("highest", gradient_of_factors(62, 1000)),
    ("high", gradient_of_factors(126, 1000, long_term, [jnp.uint8] * 2)),
]


@pytest.mark.parametrize("chip", ["L4", "A100 80GB", "H100"])
@pytest.mark.parametrize(("precision", "program"), LARGEST)
def test_the_largest_kernels_fit_the_shared_memory_of_every_card(precision, program, chip):
    plan = gm.plan(in_precision(precision, program), data=1, on=chip)
    assert plan.fits
    assert any("pallas_call" in note for note in plan.work().notes)  # it is a kernel


@pytest.mark.parametrize("chip", ["L4", "H100"])
def test_factors_of_more_numbers_than_a_card_holds_are_left_to_the_compiler(chip):
    plan = gm.plan(in_precision("highest", gradient_of_factors(80, 1000)), data=1, on=chip)
    assert plan.fits
    assert not any("pallas_call" in note for note in plan.work().notes)


def test_chains_read_the_data_of_a_tpu_together():
    """Four chains move hardly more, and take hardly longer: their classes fill the matrix unit."""
    one, four = (
        gm.plan(build("mnist in a kernel", "HMC", num_chains=n), data=8, on="TPU v3") for n in (1, 4)
    )
    assert four.work("leapfrog").bytes_moved < 1.9 * 7_500 * (784 + 4)
    seconds = [1 / plan.roofline("leapfrog").per_second for plan in (one, four)]
    assert seconds[1] < 1.5 * seconds[0]


@pytest.mark.parametrize("model", ["mnist in a kernel", "movielens in kernels"])
@pytest.mark.parametrize("kernel", ["NUTS", "MAMS", "MCLMC"])
@pytest.mark.parametrize(
    ("chip", "mesh"), [("TPU v5e", {"chains": 2, "data": 4}), ("H100", {"data": 8})]
)
def test_kernels_compile_on_meshes(model, kernel, chip, mesh):
    program = build(model, kernel)
    assert gm.plan(program, **mesh, on=chip).fits


def rows_times_weights(form):
    """A gradient of logits of a million rows of bytes, in a form of the product."""

    def build_gradient(mesh):
        def total(w, x, target):
            return jnp.sum(jnp.square(form(x, w) - target))

        x, target = gm.place(
            (S((1 << 17, 512), jnp.uint8), S((1 << 17, 8), jnp.float32)), mesh, jax.P()
        )
        return jax.grad(total), gm.place(S((512, 8), jnp.float32), mesh, jax.P()), x, target

    return build_gradient


def test_bytes_stay_bytes_in_a_product_of_its_own():
    """On a GPU `linear` moves a fraction of what the plain expression does."""

    def moved(form):
        with jax.default_matmul_precision("high"):
            return gm.plan(rows_times_weights(form), data=1, on="H100").work().bytes_moved

    data = (1 << 17) * 512
    plain = moved(lambda x, w: x.astype(jnp.float32) @ w)
    ours = moved(gm.linear)
    assert plain > 12 * data
    assert ours < 7 * data
