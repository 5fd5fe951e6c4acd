"""Products of bytes and float32, and gradients that are kernels on chips, as far as a CPU can tell."""

import functools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.fused import (
    categorical_linear_gpu,
    categorical_linear_tpu,
    inner_product_terms,
    inner_products_gpu,
    inner_products_tpu,
    tpu_numbers,
)
from gspmd_mcmc.fused.tracing import slope_of_cells
from gspmd_mcmc.targets import linear as linear_module
from gspmd_mcmc.targets.bfloat16_terms import bfloat16_terms, num_terms
from gspmd_mcmc.targets.streaming import tiling
from gspmd_mcmc.targets.streaming.kernels_inside import has_kernel, kernels_where

RNG = np.random.default_rng(0)
ROWS, FEATURES, CLASSES = 304, 200, 10
BYTES = RNG.integers(0, 256, (ROWS, FEATURES))
W = (RNG.normal(size=(FEATURES, CLASSES)) / 255).astype(np.float32)
BIAS = RNG.normal(size=CLASSES).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, ROWS, np.int32)
GRAD = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)
WEIGHTS = RNG.normal(size=ROWS).astype(np.float32)  # cotangents of terms
PRODUCTS = {"full": "highest", "two terms": "high", "one term": "bfloat16"}
DTYPES = {
    "uint8": BYTES.astype(np.uint8),
    "int8": (BYTES - 128).astype(np.int8),
    "bfloat16": BYTES.astype(jnp.bfloat16),
    "float32": RNG.normal(size=(ROWS, FEATURES)).astype(np.float32),
}


def error(got, exact):
    """The largest error, in parts of the largest number."""
    return float(np.max(np.abs(got - exact)) / np.max(np.abs(exact)))


# The product


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_cpu_it_is_the_plain_product_and_so_are_its_derivatives(dtype):
    x = jnp.asarray(DTYPES[dtype])

    def total(form, w):
        return jnp.sum(jnp.sin(form(w)))

    ours = functools.partial(total, functools.partial(gm.linear, x))
    plain = functools.partial(total, lambda w: x.astype(jnp.float32) @ w)
    for make in (lambda f: f, jax.grad, lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,))[1]):
        assert error(make(ours)(W), make(plain)(W)) < 2e-6


def test_it_is_differentiable_in_data_that_are_floating():
    for dtype in ("bfloat16", "float32"):
        x = jnp.asarray(DTYPES[dtype])
        got = jax.grad(lambda x: jnp.sum(gm.linear(x, jnp.asarray(W)) * GRAD))(x)
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got.astype(np.float32), GRAD @ W.T, rtol=1e-2, atol=1e-4)


FORMS = {
    "forward": (linear_module._forward_in_terms, W, lambda x: x @ W.astype(np.float64)),
    "backward": (linear_module._backward_in_terms, GRAD, lambda x: x.T @ GRAD.astype(np.float64)),
    "in blocks": (linear_module._backward_in_blocks, GRAD, lambda x: x.T @ GRAD.astype(np.float64)),
}


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_three_terms_are_float32s_own_product_and_one_is_not(dtype, form):
    """What chips compute, here by a CPU's products of the same terms."""
    function, y, exact = FORMS[form]
    x = jnp.asarray(DTYPES[dtype])
    truth = exact(np.asarray(x, np.float64))
    plain = (x.astype(jnp.float32) @ y) if form == "forward" else x.astype(jnp.float32).T @ y
    own = max(error(plain, truth), 2e-7)
    assert error(function(x, y, 3), truth) <= own
    assert error(function(x, y, 2), truth) < 2e-5
    assert error(function(x, y, 1), truth) > 100 * own


@pytest.mark.parametrize("form", ["forward", "in blocks"])
def test_unsigned_bytes_as_signed_ones_are_mended(form):
    function, y, exact = FORMS[form]
    x = jnp.asarray(DTYPES["uint8"])
    got = linear_module._with_signed_bytes(function, x, y, 2)
    assert error(got, exact(np.asarray(x, np.float64))) < 2e-5


@pytest.mark.parametrize(("form", "axis"), [("forward", 1), ("in blocks", 0)])
def test_unsigned_bytes_as_signed_ones_are_right_to_the_last_bits(form, axis):
    """Also where few bytes are not zero, and the sum of all parameters is far larger than theirs."""
    function, y, _ = FORMS[form]
    sparse = np.where(BYTES.cumsum(axis=axis) < 600, BYTES, 0).astype(np.uint8)
    y = 1 + jnp.abs(y)
    exact = (sparse if form == "forward" else sparse.T) @ np.asarray(y, np.float64)
    own = error(function(sparse.astype(np.int32), y, 3), exact)
    assert error(linear_module._with_signed_bytes(function, jnp.asarray(sparse), y, 3), exact) < 4e-7
    mended = function(sparse.astype(np.int32) - 128, y, 3) + 128 * jnp.sum(y, axis=0)[None]
    assert error(mended, exact) > 10 * own


def test_terms_follow_the_precision_that_is_asked_for():
    found = []
    for precision in (None, "highest", "float32", "high", "bfloat16"):
        with jax.default_matmul_precision(precision):
            found.append(num_terms())
    assert found == [3, 3, 3, 2, 1]


def test_terms_add_up_to_the_number():
    terms = bfloat16_terms(jnp.asarray(GRAD), 3)
    np.testing.assert_array_equal(sum(t.astype(jnp.float32) for t in terms), GRAD)


@pytest.mark.parametrize(
    ("x", "w", "kind", "message"),
    [
        (BYTES.astype(np.int32), W, TypeError, "int32"),
        (DTYPES["uint8"], np.ones((FEATURES, 2), np.int32), TypeError, "floating parameters"),
        (DTYPES["uint8"], W[1:], ValueError, "shapes"),
        (DTYPES["uint8"], W[:, 0], ValueError, "shapes"),
    ],
)
def test_other_arrays_are_refused(x, w, kind, message):
    with pytest.raises(kind, match=message):
        gm.linear(jnp.asarray(x), jnp.asarray(w))


# Kernels, interpreted


def interpreted(chip, *first):
    """Return gradients by a chip's kernel as one program; `first` may be the term of a factor model."""
    return jax.jit(functools.partial(chip.gradients, *first, interpret=True))


def exact_categorical(x, w=W, bias=BIAS, labels=LABELS):
    logits = x @ w[: x.shape[1]].astype(np.float64) + bias
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    residuals = (np.eye(w.shape[1])[labels] - odds / odds.sum(axis=1, keepdims=True)) * WEIGHTS[:, None]
    return x.T @ residuals, residuals.sum(axis=0)


def check_categorical(chip, got, exact, most):
    """Compare derivatives in weights and bias.

    Those in the bias are sums of residuals, and show what logits lose. Those in weights have 8 bits of
    each residual on a GPU, unless all bits are asked.
    """
    of_weights = 3e-3 if chip is categorical_linear_gpu and most > 1e-6 else most
    for one, truth, bound in zip(got, exact, (of_weights, most), strict=True):
        assert error(one, truth) < bound


@pytest.mark.parametrize("chip", [categorical_linear_gpu, categorical_linear_tpu])
@pytest.mark.parametrize(("precision", "most"), [("full", 1e-6), ("two terms", 2e-5)])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "bfloat16"])
@pytest.mark.parametrize("features", [128, FEATURES])  # a TPU stores them by rows, by columns
def test_the_kernel_of_a_categorical_is_right(chip, precision, most, dtype, features):
    x, w = jnp.asarray(DTYPES[dtype][:, :features]), W[:features]
    assert categorical_linear_tpu.lies_by_columns(x) == (features == FEATURES)
    with jax.default_matmul_precision(PRODUCTS[precision]):
        got = interpreted(chip)(x, LABELS, (w, BIAS), WEIGHTS)
    check_categorical(chip, got, exact_categorical(np.asarray(x, np.float64)), most)


@pytest.mark.parametrize(("precision", "most"), [("full", 1e-6), ("two terms", 2e-5)])
@pytest.mark.parametrize("classes", [2, 8, 16, 17, 40])
def test_a_card_s_kernel_takes_terms_of_so_many_classes(classes, precision, most):
    """In blocks side by side, one after the other, and as products of their own."""
    w, bias = (
        np.concatenate([a, -a, 0.5 * a, a[..., ::-1]], axis=-1)[..., :classes] for a in (W, BIAS)
    )
    x, labels = jnp.asarray(DTYPES["uint8"]), LABELS % classes
    with jax.default_matmul_precision(PRODUCTS[precision]):
        got = interpreted(categorical_linear_gpu)(x, labels, (w, bias), WEIGHTS)
    exact = exact_categorical(np.asarray(x, np.float64), w, bias, labels)
    check_categorical(categorical_linear_gpu, got, exact, most)


# By how many chains there are, how many share a tile of a TPU's matrix unit, of two terms and of three,
# and of a GPU.
TOGETHER = {1: (1, 1, 1), 3: (3, 1, 3), 4: (4, 2, 4), 6: (3, 2, 3), 8: (4, 2, 4), 10: (2, 2, 2)}


@pytest.mark.parametrize("chip", [categorical_linear_gpu, categorical_linear_tpu])
@pytest.mark.parametrize(("precision", "most"), [("full", 1e-6), ("two terms", 2e-5)])
@pytest.mark.parametrize("chains", TOGETHER)
def test_chains_share_the_tiles_of_a_kernel(chip, chains, precision, most, monkeypatch):
    sizes = []
    kernel = chip._gradients

    def counted(*args):
        sizes.append(len(args[4][0]))
        return kernel(*args)

    monkeypatch.setattr(chip, "_gradients", counted)
    check_chains(chip, chains, precision, most)
    of_tpu = TOGETHER[chains][precision == "full"]
    assert sizes[-1] == (of_tpu if chip is categorical_linear_tpu else TOGETHER[chains][2])


def check_chains(chip, chains, precision, most):
    """Compare each chain with its own gradient in float64; the cotangent is every chain's."""
    x, scales = jnp.asarray(DTYPES["uint8"]), np.linspace(1, -1, chains).astype(np.float32)
    w, bias = scales[:, None, None] * W, scales[:, None] * BIAS

    of_chains = jax.vmap(interpreted(chip), (None, None, 0, None))
    with jax.default_matmul_precision(PRODUCTS[precision]):
        got = of_chains(x, LABELS, (w, bias), WEIGHTS)
    for chain in range(chains):
        truths = exact_categorical(np.asarray(x, np.float64), w[chain], bias[chain])
        check_categorical(chip, [one[chain] for one in got], truths, most)


@pytest.mark.parametrize("chip", [categorical_linear_gpu, categorical_linear_tpu])
def test_chains_that_are_interchanged_would_be_seen(chip, monkeypatch):
    kernel = chip._gradients

    def interchanged(*args):
        return jax.tree.map(lambda a: a[::-1], kernel(*args))

    monkeypatch.setattr(chip, "_gradients", interchanged)
    with pytest.raises(AssertionError):
        check_chains(chip, 4, "two terms", 2e-5)


@pytest.mark.parametrize("chip", [categorical_linear_gpu, categorical_linear_tpu])
def test_chains_with_rows_of_their_own_are_right(chip):
    x = jnp.asarray(DTYPES["uint8"])
    rows = jnp.stack([x, x[::-1]])
    got = jax.vmap(interpreted(chip), (0, None, None, None))(rows, LABELS, (W, BIAS), WEIGHTS)
    for i in range(2):
        for one, truth in zip(got, exact_categorical(np.asarray(rows[i], np.float64)), strict=True):
            assert error(one[i], truth) < 1e-6


def test_a_kernel_of_one_term_would_be_seen():
    x = jnp.asarray(DTYPES["uint8"])
    with jax.default_matmul_precision(PRODUCTS["one term"]):
        got = interpreted(categorical_linear_gpu)(x, LABELS, (W, BIAS), WEIGHTS)
    assert error(got[1], exact_categorical(np.asarray(x, np.float64))[1]) > 2e-4


COLUMNS, RANK = 1100, 6
FACTORS = tuple(
    0.5 * RNG.normal(size=shape).astype(np.float32)
    for shape in ((ROWS, RANK), (COLUMNS, RANK), (ROWS,), (COLUMNS,))
)
CELLS = RNG.integers(0, 4, (ROWS, COLUMNS)).astype(np.uint8)


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    """Leave a TPU's core so little memory that these few cells are three tiles by three or more."""
    monkeypatch.setattr(inner_products_tpu, "MEMORY", 3 << 20)


def seen(logit, cell):
    """A term of a cell that may be hidden."""
    return jnp.where(cell >= 2, 0.0, gm.bernoulli_logits(logit, cell & 1))


FULL, HIGH = 1e-6, 2e-5  # what derivatives may be off by, and where factors have 16 bits


@pytest.mark.parametrize(
    ("chip", "precision", "most"),
    [
        (inner_products_gpu, "highest", FULL),
        (inner_products_gpu, "high", 3e-3),  # residuals have 8 bits
        (inner_products_tpu, "highest", FULL),
        (inner_products_tpu, "high", 3e-3),
    ],
)
@pytest.mark.parametrize("biases", [True, False])
def test_kernels_of_a_factor_model_are_right(chip, precision, most, biases):
    check_factors(chip, precision, most, biases)


@pytest.fixture
def _whole_residuals(monkeypatch):
    """Residuals that are not rounded, so that what factors lose is seen."""
    of_tpu, of_gpu = tpu_numbers.split, inner_products_gpu.bfloat16_terms

    def terms_of_gpu(x, num, in_kernel=False):
        return [x] if num == 1 else of_gpu(x, num, in_kernel)

    monkeypatch.setattr(tpu_numbers, "split", lambda x, num: [x] if num == 1 else of_tpu(x, num))
    monkeypatch.setattr(inner_products_gpu, "bfloat16_terms", terms_of_gpu)


@pytest.mark.usefixtures("_whole_residuals")
@pytest.mark.parametrize("chip", [inner_products_gpu, inner_products_tpu])
@pytest.mark.parametrize("biases", [True, False])
def test_logits_and_factors_have_two_terms(chip, biases):
    check_factors(chip, "high", HIGH, biases)


@pytest.mark.usefixtures("_whole_residuals")
@pytest.mark.parametrize("part", ["_terms", "_bias_terms"])
def test_a_rest_that_is_left_out_of_logits_would_be_seen(part, monkeypatch):
    def first_alone(x):
        terms = tpu_numbers.split(x, 2)
        return [terms[0], *(0 * x for _ in whole(x)[1:])]

    whole = getattr(inner_products_tpu, part)
    monkeypatch.setattr(inner_products_tpu, part, first_alone)
    with pytest.raises(AssertionError):
        check_factors(inner_products_tpu, "high", HIGH, biases=True)


def test_a_kernel_rounds_to_bfloat16_as_jax_does():
    x = jnp.asarray(np.random.default_rng(1).normal(size=2000) * 10.0 ** RNG.integers(-30, 30, 2000))
    x = x.astype(jnp.float32)
    (rounded,) = tpu_numbers.split(x, 1)
    np.testing.assert_array_equal(rounded, x.astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(sum(tpu_numbers.split(x, 3)), x)
    infinite = jnp.array([jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(tpu_numbers.split(infinite, 1)[0], infinite)


@pytest.mark.parametrize("chip", [inner_products_gpu, inner_products_tpu])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_bias_may_rule_out_a_row_or_a_column(chip, precision):
    *factors, u, v = FACTORS
    u, v = (np.where(np.arange(len(a)) % 7 == i, -np.inf, a) for i, a in enumerate((u, v)))
    most = FULL if precision == "highest" else 3e-3  # residuals have 8 bits
    check_factors(chip, precision, most, True, (*factors, u.astype(np.float32), v.astype(np.float32)))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(
    ("rank", "width", "dtype"),
    [(41, 127, "uint8"), (42, 130, "uint8"), (6, 128, "uint8"), (6, 133, "int32"), (1, 9, "uint8")],
)
def test_a_card_s_kernels_take_every_rank_and_width(rank, width, dtype, precision):
    """Lines of all terms and of one each; rows that begin alike, and of which all begin elsewhere."""
    rng = np.random.default_rng(0)
    sides = [0.5 * rng.normal(size=(n, rank)).astype(np.float32) for n in (70, width)]
    biases = [rng.normal(size=n).astype(np.float32) for n in (70, width)]
    cells = rng.integers(0, 2, (70, width)).astype(dtype)
    weights = rng.uniform(0.5, 2, 70).astype(np.float32)
    args, term = ([cells], (*sides, *biases), weights), gm.bernoulli_logits
    with jax.default_matmul_precision(precision):
        got = interpreted(inner_products_gpu, term)(*args)
    exact = jax.jit(functools.partial(inner_product_terms._plain_gradients, term))(*args)
    for one, truth in zip(got, exact, strict=True):
        off = error(one, np.asarray(truth))
        assert off < (2e-6 if precision == "highest" else 4e-3), off


def exact_factors(factors, biases):
    rows, columns, u, v = (a.astype(np.float64) for a in factors)
    logits = rows @ columns.T + (u[:, None] + v if biases else 0)
    with np.errstate(over="ignore"):
        slope = np.where(CELLS >= 2, 0, (CELLS & 1) - 1 / (1 + np.exp(-logits))) * WEIGHTS[:, None]
    return slope @ columns, slope.T @ rows, slope.sum(1), slope.sum(0)


def with_biases(chip):
    """Return a chip's gradients of `seen`, of factors without biases too."""
    kernel = functools.partial(chip.gradients, interpret=True)
    return jax.jit(functools.partial(inner_product_terms._with_biases, kernel, seen))


def check_factors(chip, precision, most, biases, all_factors=FACTORS):
    exact = exact_factors(all_factors, biases)
    factors = all_factors if biases else (*all_factors[:2], None, None)
    with jax.default_matmul_precision(precision):
        got = with_biases(chip)([CELLS], factors, WEIGHTS)
    assert [a is None for a in got] == [a is None for a in factors]
    for one, truth in zip(got, exact, strict=True):
        assert one is None or error(one, truth) < most


@pytest.mark.parametrize(("chains", "together"), [(1, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("biases", [True, False])
def test_chains_of_a_factor_model_share_the_tiles_of_a_tpu_s_kernel(
    chains, together, biases, monkeypatch
):
    """Two at a time, if they come in pairs; the weights of rows are every chain's."""
    sizes = []
    kernel = inner_products_tpu._gradients

    def counted(*args):
        sizes.append(len(args[-1]))
        return kernel(*args)

    monkeypatch.setattr(inner_products_tpu, "_gradients", counted)
    check_chains_of_factors(chains, biases)
    assert sizes[-1] == together


def check_chains_of_factors(chains, biases):
    scales = np.linspace(1, -0.6, chains).astype(np.float32)
    factors = [scales.reshape(-1, *[1] * a.ndim) * a for a in FACTORS]
    of_chains = jax.vmap(with_biases(inner_products_tpu), (None, 0, None))
    with jax.default_matmul_precision("highest"):
        got = of_chains([CELLS], factors if biases else (*factors[:2], None, None), WEIGHTS)
    for chain in range(chains):
        exact = exact_factors([a[chain] for a in factors], biases)
        for one, truth in zip(got, exact, strict=True):
            assert one is None or error(one[chain], truth) < FULL


def test_chains_of_a_factor_model_with_cells_of_their_own_are_right():
    cells = np.stack([CELLS, CELLS[:, ::-1]])
    of_chains = jax.vmap(interpreted(inner_products_tpu, seen), (0, None, None))
    got = of_chains([cells], FACTORS, WEIGHTS)
    mirrored = (FACTORS[0], FACTORS[1][::-1], FACTORS[2], FACTORS[3][::-1])
    u, v, row_bias, column_bias = exact_factors(mirrored, biases=True)
    second = (u, v[::-1], row_bias, column_bias[::-1])
    for i, exact in enumerate((exact_factors(FACTORS, biases=True), second)):
        for one, truth in zip(got, exact, strict=True):
            assert error(one[i], truth) < FULL


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "mixed"])
def test_cells_of_every_integer_are_read_right_by_a_tpu_s_kernel(dtype):
    """Bytes are unpacked from words, if no other integers are beside them."""
    cells = {
        "uint8": [BYTES],
        "int8": [BYTES - 128],
        "int32": [BYTES - 1000],
        "mixed": [BYTES, BYTES - 1000],
    }[dtype]
    dtypes = ["uint8", "int32"] if dtype == "mixed" else [dtype]
    given = [a.astype(d) for a, d in zip(cells, dtypes, strict=True)]
    factors = (*FACTORS[:1], FACTORS[1][:FEATURES], FACTORS[2], FACTORS[3][:FEATURES])

    def term(logit, *cells):
        return logit * sum(c.astype(jnp.float32) for c in cells)

    got = interpreted(inner_products_tpu, term)(given, factors, WEIGHTS)
    slope = sum(cells) * WEIGHTS[:, None].astype(np.float64)
    exact = (slope @ factors[1], slope.T @ factors[0], slope.sum(1), slope.sum(0))
    for one, truth in zip(got, exact, strict=True):
        assert error(one, truth) < FULL


@pytest.mark.parametrize("chip", [inner_products_gpu, inner_products_tpu])
def test_cells_beyond_the_last_are_not_counted(chip):
    """A tile reaches beyond the cells, where a byte may stand that the term is not defined for."""

    def term(logit, cell):
        return logit * jnp.where((cell >= 1) & (cell <= 4), cell.astype(jnp.float32), jnp.nan)

    cells = CELLS[:300, :1050] + np.uint8(1)
    factors = [a[: cells.shape[i % 2]] for i, a in enumerate(FACTORS)]
    got = interpreted(chip, term)([cells], factors, WEIGHTS[:300])
    slope = WEIGHTS[:300, None] * cells.astype(np.float64)
    exact = (slope @ factors[1], slope.T @ factors[0], slope.sum(1), slope.sum(0))
    for one, truth in zip(got, exact, strict=True):
        assert error(one, truth) < FULL


# Rows, columns and dimensions, bytes of a cell, the precision of products, chains.
TILES = {
    "movielens": ((755, 3706, 24), [1], "high", 1, (768, 3840)),
    "two chains": ((755, 3706, 24), [1], "high", 2, (768, 3712)),
    "highest": ((755, 3706, 24), [1], "highest", 1, (768, 1280)),
    "many cells": ((755, 3706, 24), [4] * 3, "high", 1, (384, 768)),
    "wide factors": ((755, 14_500, 64), [1], "highest", 1, (384, 3072)),
    "few": ((7, 130, 8), [1], "high", 1, (128, 256)),
    "many": ((10**7, 10**4, 8), [1], "high", 1, (1280, 2560)),
}


@pytest.mark.parametrize("case", TILES)
def test_a_tpu_s_tile_is_as_large_as_its_core_has_memory_for(case, monkeypatch):
    """Larger tiles take fewer steps: what compilers make of these is in `chips/test_linear.py`."""
    shape, bytes_of_cells, precision, chains, expected = TILES[case]
    monkeypatch.setattr(inner_products_tpu, "MEMORY", 15 << 20)
    assert tile_of(shape, bytes_of_cells, precision, chains) == expected


def test_a_tile_that_fits_nowhere_is_the_least():
    assert tile_of((755, 10**6, 128), [1], "high", 1) == (128, 256)
    assert tile_of((755, 10**6, 128), [1], "high", 2) == (128, 128)


def tile_of(shape, bytes_of_cells, precision, chains):
    rows, columns, size = shape
    terms = 2 if precision == "high" else 1
    heights = size, (2 * terms - 1) * size + 8, terms * size + 8
    with jax.default_matmul_precision(precision):
        return inner_products_tpu._tile((rows, columns), heights, bytes_of_cells, chains)


@pytest.mark.parametrize("chip", [inner_products_gpu, inner_products_tpu])
def test_a_term_may_multiply_functions_of_its_logit(chip):
    """Their derivatives are added up by an operation of its own."""

    def term(logit, cell):
        return jnp.tanh(logit) * logit * cell.astype(jnp.float32)

    assert slope_of_cells(term, FACTORS[0], [CELLS], (8, 128)) is not None
    got = interpreted(chip, term)([CELLS], FACTORS, WEIGHTS)
    u, v, row_bias, column_bias = (a.astype(np.float64) for a in FACTORS)
    logits = u @ v.T + row_bias[:, None] + column_bias
    slope = WEIGHTS[:, None] * CELLS * (np.tanh(logits) + logits / np.cosh(logits) ** 2)
    for one, truth in zip(got, (slope @ v, slope.T @ u, slope.sum(1), slope.sum(0)), strict=True):
        assert error(one, truth) < FULL


def test_bytes_that_wrap_around_are_not_read_as_wider_numbers():
    """A TPU's kernel computes with no bytes, and leaves such terms to the compiler."""
    logit, cell = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.uint8)
    shape = (8, 128)
    logits, cells = jnp.ones(shape), jnp.arange(1024, dtype=jnp.int32).reshape(shape) % 256
    same = {
        "compared": lambda a, c: a * jnp.where(c >= jnp.iinfo(c.dtype).max, 2.0, 3.0),
        "converted": lambda a, c: jnp.where(c & 1, a, a * c),
        "in a function of its own": lambda a, c: jax.jit(lambda a, c: a * (c == 3))(a, c),
    }
    for term in same.values():
        of_int32: Any = slope_of_cells(term, logit, [cell], shape, of_int32=True)
        of_bytes: Any = slope_of_cells(term, logit, [cell], shape)
        expected = of_bytes(logits, cells.astype(jnp.uint8))
        np.testing.assert_array_equal(of_int32(logits, cells), expected)
    for term in (
        lambda a, c: a * (c - jnp.uint8(1)).astype(jnp.float32),
        lambda a, c: a * jax.jit(lambda c: ~c)(c).astype(jnp.float32),
        lambda a, c: a * (3 * a).astype(jnp.uint8),
    ):
        assert slope_of_cells(term, logit, [cell], shape, of_int32=True) is None
        assert slope_of_cells(term, logit, [cell], shape) is not None
        factors, data = (jnp.ones((8, 3)), jnp.ones((9, 3))), jnp.ones((8, 9), jnp.uint8)
        for platform in ("tpu", "gpu"):
            with kernels_where(platform):
                traced = jax.make_jaxpr(functools.partial(gm.inner_product_terms, term, data))(*factors)
            assert has_kernel(traced.jaxpr) == (platform == "gpu")


def test_factors_have_two_terms_in_the_products_with_residuals():
    """Residuals that bfloat16 holds show it: what is left of the error is the factors'."""
    assert error_of_exact_residuals() < 2e-5


def test_a_rest_that_is_left_out_of_a_product_with_residuals_would_be_seen(monkeypatch):
    def of_first(products, size):
        return products[:size], products[2 * size :]

    monkeypatch.setattr(inner_products_tpu, "_sum_of_terms", of_first)
    assert error_of_exact_residuals() > 2e-4


def error_of_exact_residuals():
    """Of products whose residuals the kernel rounds to what they are: 8 bits hold them."""

    def term(logit, cell):
        return cell.astype(jnp.float32) * logit

    weights = np.exp2(np.arange(ROWS) % 5 - 2).astype(np.float32)
    residuals = CELLS * weights[:, None].astype(np.float64)
    with jax.default_matmul_precision("high"):
        got = interpreted(inner_products_tpu, term)([CELLS], FACTORS, weights)
    truths = residuals @ FACTORS[1], residuals.T @ FACTORS[0]
    return max(error(one, truth) for one, truth in zip(got[:2], truths, strict=True))


def kernel_of(gradients, *args):
    """Return the parameters of the one kernel that a function calls, as it was traced."""
    (kernel,) = kernels_in(jax.make_jaxpr(gradients)(*args).jaxpr)
    return kernel


def kernels_in(jaxpr):
    """Yield the parameters of kernels, also of those within functions that have rules for chains."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params
        elif "call" in equation.params:
            yield from kernels_in(equation.params["call"].jaxpr)


def products_of(jaxpr, times=1):
    """Yield how often each matrix product is made, its rows, terms and columns."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (((axis,), (other,)), _) = equation.params["dimension_numbers"]
            left, right = (x.aval.shape for x in equation.invars)
            yield times, left[1 - axis], left[axis], right[1 - other]
        elif equation.primitive.name == "scan":
            yield from products_of(equation.params["jaxpr"].jaxpr, times * equation.params["length"])


@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize(
    ("precision", "model", "passes"),
    [
        *(("high", "factors", 1), ("default", "factors", 1), ("highest", "factors", 6)),
        *((precision, "classes", 1) for precision in ("high", "default", "highest")),
    ],
)
def test_a_tpu_s_kernel_states_the_products_that_it_makes(precision, model, passes, chains):
    """All strips of them, in a matrix unit of 128 x 128 that takes a float32 product in six passes."""
    factors, weights = tuple(map(jnp.asarray, FACTORS)), jnp.asarray(WEIGHTS)
    parameters = (jnp.asarray(W), jnp.asarray(BIAS))
    of_chains = jax.tree.map(lambda a: jnp.stack([a] * chains), (factors, parameters, weights))
    with jax.default_matmul_precision(precision):
        if model == "factors":
            of_factors = functools.partial(inner_products_tpu.gradients, seen, [jnp.asarray(CELLS)])
            kernel = kernel_of(jax.vmap(of_factors), of_chains[0], of_chains[2])
        else:
            x, labels = jnp.asarray(DTYPES["uint8"]), jnp.asarray(LABELS)
            of_classes = functools.partial(categorical_linear_tpu.gradients, x, labels)
            kernel = kernel_of(jax.vmap(of_classes), *of_chains[1:])
    made = list(products_of(kernel["jaxpr"]))
    assert len(made) >= 2
    flops, tiles = 0, np.prod(kernel["grid_mapping"].grid)
    for times, rows, terms, columns in made:
        narrow, long = sorted((rows, columns))
        flops += times * passes * 2 * long * -(-terms // 128) * 128 * -(-narrow // 128) * 128
    assert kernel["cost_estimate"].flops == tiles * flops


# The functions of the user


def factor_terms(params, cells):
    return gm.inner_product_terms(seen, cells, params["U"], params["V"], params["u"], params["v"])


def plain_terms(params, cells):
    logits = gm.inner_products(params["U"], params["V"], params["u"], params["v"])
    return jnp.sum(seen(logits, cells), axis=1)


POSITION = dict(zip(("U", "V", "u", "v"), map(jnp.asarray, FACTORS), strict=True))


def classes(params, batch):
    return gm.categorical_linear(batch["image"], params["w"], params["b"], batch["label"])


def plain_classes(params, batch):
    logits = batch["image"].astype(jnp.float32) @ params["w"] + params["b"][None]
    return gm.categorical_logits(logits, batch["label"])


IMAGES = {"image": DTYPES["uint8"], "label": LABELS}
PARAMETERS = {"w": jnp.asarray(W), "b": jnp.asarray(BIAS)}
MODELS = {
    "factors": (factor_terms, plain_terms, CELLS, POSITION, ("U", "u")),
    "classes": (classes, plain_classes, IMAGES, PARAMETERS, ()),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_terms_and_derivatives_are_those_of_the_plain_expression(model, platform):
    """Also where the function is traced for a chip: on this device it is the expression then too."""
    ours, plain, data, position, _ = MODELS[model]
    vector = jax.tree.map(
        lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), position
    )
    for make in (
        lambda f: f,
        lambda f: jax.grad(lambda p: jnp.sum(f(p) * WEIGHTS)),
        lambda f: lambda p: jax.jvp(jax.grad(lambda p: jnp.sum(f(p) * WEIGHTS)), (p,), (vector,))[1],
    ):
        with kernels_where(platform):
            got = jax.jit(make(lambda p: ours(p, jax.tree.map(jnp.asarray, data))))(position)
        expected = jax.jit(make(lambda p: plain(p, jax.tree.map(jnp.asarray, data))))(position)
        assert max(jax.tree.leaves(jax.tree.map(error, got, expected))) < 5e-6


@pytest.mark.parametrize("model", MODELS)
def test_a_kernel_is_there_for_chips_alone(model):
    ours, _, data, position, _ = MODELS[model]
    for platform, expected in (("cpu", False), ("gpu", True), ("tpu", True), ("abstract", False)):
        with kernels_where(platform):
            traced = jax.make_jaxpr(lambda p, d: ours(p, d))(position, jax.tree.map(jnp.asarray, data))
        assert has_kernel(traced.jaxpr) == expected


def test_without_pallas_triton_gpus_have_plain_expressions_and_tpus_their_kernels(tmp_path):
    """A later JAX will not have it: then nothing may import it, and a warning says what is slower."""
    code = """
import sys, warnings
sys.modules["jax.experimental.pallas.triton"] = None  # as if it were not there
import jax, numpy as np
import gspmd_mcmc as gm
from gspmd_mcmc.targets.streaming.kernels_inside import has_kernel, kernels_where

data = np.ones((4, 3), np.uint8), np.zeros(4, np.int32)
cells = np.ones((4, 3), np.uint8)

def likelihoods():  # new functions each time, as JAX remembers what it has traced
    yield lambda w: gm.categorical_linear(data[0], w, np.zeros(10, np.float32), data[1]).sum()
    yield lambda w: gm.inner_product_terms(gm.bernoulli_logits, cells, w[:, :4].T, w[:, :3]).sum()

for platform, expected in {"cpu": False, "gpu": False, "tpu": True}.items():
    for likelihood in likelihoods():
        with kernels_where(platform), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = has_kernel(jax.make_jaxpr(likelihood)(np.zeros((3, 10), np.float32)).jaxpr)
            jax.jit(jax.grad(likelihood))(np.zeros((3, 10), np.float32))
        assert found == expected, platform
        is_told = any("has no Triton backend of Pallas" in str(x.message) for x in told)
        assert is_told == (platform == "gpu"), platform
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_alone_have_a_kernel_and_with_terms_they_have_it_on_gpus(model, monkeypatch):
    """Terms that no gradient goes with, the Metropolis test's, have none anywhere."""
    ours, _, data, position, local = MODELS[model]
    found = {}
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(
            "gspmd_mcmc.targets.streaming.rows.platform_of", lambda array, mesh, of=platform: of
        )
        plate = gm.Plate(ours, gm.place(data, gm.make_mesh(data=8), P("data")), local=local)
        methods = (type(plate).grad, type(plate).terms_and_grad, type(plate).terms)
        traced = [str(jax.make_jaxpr(method)(plate, position)) for method in methods]
        found[platform] = ["pallas_call" in text for text in traced]
    assert found == {
        "cpu": [False, False, False],
        "gpu": [True, True, False],
        "tpu": [True, False, False],
    }


@pytest.mark.parametrize(("width", "is_kept"), [(14_000, True), (15_000, False)])
def test_a_gradient_beyond_a_tpu_cores_memory_is_left_to_the_compiler(width, is_kept):
    """Of 64 numbers and a bias a column: padded to 8, 4 MB are those of 14,563."""
    shapes = [jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (ROWS, width)]
    cells = jax.ShapeDtypeStruct((ROWS, width), jnp.uint8)
    for platform in ("gpu", "tpu"):
        with kernels_where(platform), jax.default_matmul_precision("high"):
            traced = jax.make_jaxpr(functools.partial(gm.inner_product_terms, gm.bernoulli_logits))(
                cells, *shapes
            )
        assert has_kernel(traced.jaxpr) == (is_kept or platform == "gpu")


@pytest.mark.parametrize("model", MODELS)
def test_a_block_a_device_gives_the_gradient_with_one_all_reduce(model, monkeypatch):
    """As plates with kernels run on chips: what is mapped over blocks is not left to the compiler."""
    ours, _, data, position, local = MODELS[model]
    data = gm.place(data, gm.make_mesh(data=8), P("data"))
    expected = gm.Plate(ours, data, local=local).grad(position)
    monkeypatch.setattr(tiling, "has_kernel", lambda jaxpr: True)
    gradient = jax.jit(lambda plate, position: plate.grad(position))
    plate = gm.Plate(ours, data, local=local)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), gradient(plate, position), expected
    )
    report = gm.communication(gradient, plate, position)
    assert [c.kind for c in report.collectives] == ["all-reduce"]
    assert "shard_map" in str(jax.make_jaxpr(gradient)(plate, position))


def test_a_term_sees_its_own_cell_alone():
    def shares(logits, cell):
        return jax.nn.log_softmax(logits, axis=-1) * cell

    for platform in ("cpu", "tpu"):
        with kernels_where(platform), pytest.raises(ValueError, match="axis"):
            gm.inner_product_terms(shares, jnp.asarray(CELLS), *map(jnp.asarray, FACTORS))


def test_what_kernels_cannot_do_is_left_to_the_compiler():
    logit, cell = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.uint8)
    table, number = jnp.arange(4.0), jnp.float32(2.0)
    jitted = jax.jit(lambda a, c: jnp.exp(a) * number * c)  # which holds an array, within
    for term in (lambda a, c: jax.lax.lgamma(a) * c, lambda a, c: a * table[c], jitted):
        assert slope_of_cells(term, logit, [cell], (8, 128)) is None
    floats = jnp.asarray(CELLS, jnp.float32)  # they may have a derivative
    with kernels_where("tpu"):
        traced = jax.make_jaxpr(functools.partial(gm.inner_product_terms, gm.bernoulli_logits))(
            floats, *map(jnp.asarray, FACTORS)
        )
    assert not has_kernel(traced.jaxpr)


def test_a_cpus_tile_has_the_floats_that_it_makes_of_bytes():
    """As with the plain expression: they are to fit the caches."""
    data = jax.tree.map(jnp.asarray, IMAGES)

    def product(params, batch):
        logits = gm.linear(batch["image"], params["w"]) + params["b"][None]
        return gm.categorical_logits(logits, batch["label"])

    for ours, plain, rows, position, local in (
        *MODELS.values(),
        (product, plain_classes, data, PARAMETERS, ()),
    ):
        rows = jax.tree.map(lambda a: jnp.tile(a, (200, *(1,) * (a.ndim - 1))), rows)
        position = jax.tree.map(lambda a: a, position)
        for name in local:
            position[name] = jnp.tile(position[name], (200, *(1,) * (position[name].ndim - 1)))
        sizes = [gm.Plate(f, rows, local=local).rows_of_tile(position) for f in (ours, plain)]
        assert sizes[0] == sizes[1] < ROWS * 200
