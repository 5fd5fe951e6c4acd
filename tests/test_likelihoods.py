"""Likelihood terms: values, gradients and second derivatives against JAX's own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm


def plain(logits, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


@pytest.mark.parametrize("spread", [1.0, 30.0, 1000.0])
def test_categorical_logits_equals_log_softmax(spread):
    logits = spread * jax.random.normal(jax.random.key(0), (50, 7))
    labels = jax.random.randint(jax.random.key(1), (50,), 0, 7)
    weights = jax.random.normal(jax.random.key(2), (50,))
    np.testing.assert_allclose(
        gm.categorical_logits(logits, labels), plain(logits, labels), rtol=2e-6, atol=2e-6
    )
    ours, theirs = (
        jax.grad(lambda x, f=f: f(x, labels) @ weights)(logits) for f in (gm.categorical_logits, plain)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_second_derivatives_of_categorical_logits():
    logits = jax.random.normal(jax.random.key(0), (3, 4))
    labels = jnp.array([0, 3, 2])
    ours, theirs = (
        jax.hessian(lambda x, f=f: f(x, labels).sum())(logits) for f in (gm.categorical_logits, plain)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def bernoulli(logits, labels):
    """In NumPy's float64: log(1 / (1 + exp(-l))) for a one, of -l for a zero."""
    signed = np.where(np.asarray(labels, bool), 1, -1) * np.asarray(logits, np.float64)
    return np.minimum(signed, 0) - np.log1p(np.exp(-np.abs(signed)))


EXTREMES = np.array([-100, -30, -5, -0.1, 0, 0.1, 5, 30, 100], np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.float32, np.int32])
@pytest.mark.parametrize("label", [0, 1])
def test_bernoulli_logits_at_the_extremes(label, dtype):
    """Tiny terms are as exact as large ones, down to the least number that float32 has."""
    labels = jnp.full(EXTREMES.shape, label, dtype)
    got = gm.bernoulli_logits(jnp.asarray(EXTREMES), labels)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, bernoulli(EXTREMES, labels), rtol=2e-6, atol=1e-38)
    slope = jax.grad(lambda x: gm.bernoulli_logits(x, labels).sum())(jnp.asarray(EXTREMES))
    sign = 2 * label - 1
    expected = sign / (1 + np.exp(np.float64(sign * EXTREMES)))
    np.testing.assert_allclose(slope, expected, rtol=2e-6, atol=1e-7)


def test_softplus_that_is_taken_from_the_logit_loses_tiny_terms():
    def careless(logits):
        return logits - jnp.maximum(logits, 0) - jnp.log(1 + jnp.exp(-jnp.abs(logits)))

    with pytest.raises(AssertionError, match="Not equal"):
        np.testing.assert_allclose(careless(EXTREMES), bernoulli(EXTREMES, 1), rtol=2e-6, atol=1e-38)


def test_second_derivatives_of_bernoulli_logits():
    labels = jnp.ones(EXTREMES.shape, jnp.uint8)
    gradient = jax.grad(lambda x: gm.bernoulli_logits(x, labels).sum())
    _, got = jax.jvp(gradient, (jnp.asarray(EXTREMES),), (jnp.ones(EXTREMES.shape),))
    s = 1 / (1 + np.exp(-np.float64(EXTREMES)))
    np.testing.assert_allclose(got, -s * (1 - s), rtol=1e-5, atol=1e-7)


def labels_of(likelihood):
    return lambda x: likelihood(x, jnp.ones(8, jnp.uint8))


@pytest.mark.parametrize(
    ("likelihood", "have_logarithms"),
    [
        (labels_of(gm.bernoulli_logits), [False, True]),
        (labels_of(lambda x, labels: jax.nn.log_sigmoid(x) * labels), [True, True]),
        (lambda x: gm.categorical_logits(x[None], jnp.zeros(1, jnp.int32)), [False, True]),
    ],
)
def test_the_gradient_alone_takes_no_logarithm(likelihood, have_logarithms):
    """But that of `log_sigmoid` does: programs of the gradient, and of the value."""

    def value(x):
        return likelihood(x).sum()

    texts = [jax.jit(f).lower(jnp.zeros(8)).compile().as_text() for f in (jax.grad(value), value)]
    found = [any(f" {op}(" in str(text) for op in ("log", "log-plus-one")) for text in texts]
    assert found == have_logarithms


COUNTS = np.array([0, 1, 2, 5, 17, 100], np.uint8)
LOG_RATES = np.array([-3, 0.5, 1, 1.5, 3, 4.6], np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32])
def test_poisson_log_rate_equals_its_formula(dtype):
    log_factorial = np.array([math.lgamma(float(n) + 1) for n in COUNTS])
    rate = np.exp(np.float64(LOG_RATES))
    expected = COUNTS * np.float64(LOG_RATES) - rate - log_factorial
    log_rates, counts = jnp.asarray(LOG_RATES), jnp.asarray(COUNTS, dtype)
    got = gm.poisson_log_rate(log_rates, counts)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    slope = jax.grad(lambda x: gm.poisson_log_rate(x, counts).sum())(log_rates)
    np.testing.assert_allclose(slope, COUNTS - rate, rtol=1e-5, atol=1e-4)


# Factor models on chips, which round a product's factors: biases are to be none of them.


def products_of(function, platform, *args):
    """Shapes that the products of a program for a platform contract, as StableHLO writes them."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return [line.rsplit(" : (")[1] for line in text.splitlines() if "dot_general" in line]


@pytest.mark.parametrize(("platform", "width"), [("cpu", 6), ("tpu", 4), ("cuda", 4)])
def test_biases_are_no_columns_of_a_product_on_a_chip_that_rounds_it(platform, width):
    args = jnp.ones((50, 4)), jnp.ones((30, 4)), jnp.ones(50), jnp.ones(30)
    (found,) = products_of(gm.inner_products, platform, *args)
    assert found.startswith(f"tensor<50x{width}xf32>, tensor<{width}x30xf32>")
    derivative = jax.grad(lambda *args: jnp.sum(jnp.sin(gm.inner_products(*args))))
    assert products_of(derivative, platform, *args)[0].startswith(f"tensor<50x{width}xf32>")


# Memory: what a pass that returns terms and gradient holds of a tile

ROWS, COLUMNS, CHAINS = 512, 1024, 2


def kept_labels(logits, labels):
    """As `bernoulli_logits`, but for the barrier before the labels."""
    return kept_labels_of(logits, labels.astype(logits.dtype))


@jax.custom_jvp
def kept_labels_of(logits, labels):
    return (labels * logits - jnp.maximum(logits, 0)) - jnp.log1p(jnp.exp(-jnp.abs(logits)))


@kept_labels_of.defjvp
def _(primals, tangents):
    logits, labels = primals
    return kept_labels_of(logits, labels), (labels - jax.nn.sigmoid(logits)) * tangents[0]


def arrays_held(likelihood):
    """Bytes of temporaries, in arrays of all chains' logits."""

    def terms(params, watched):
        return likelihood(gm.inner_products(params["U"], params["V"]), watched).sum(1)

    watched = jnp.ones((ROWS, COLUMNS), jnp.uint8)
    plate = gm.Plate(terms, watched, local="U", tile_rows=ROWS)
    target = gm.Posterior(lambda params: -0.5 * params["V"] ** 2, plate)
    position = {"U": jnp.ones((CHAINS, ROWS, 4)), "V": jnp.ones((CHAINS, COLUMNS, 4))}
    of_chains = jax.jit(jax.vmap(gm.Posterior.terms_and_grad, (None, 0)))
    report = gm.communication(of_chains, target, position)
    return report.temporary_bytes / (CHAINS * ROWS * COLUMNS * 4)


def test_terms_and_gradient_hold_two_arrays_of_logits_at_most():
    assert arrays_held(gm.bernoulli_logits) < 2.2


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLA holds two arrays either way")
def test_labels_that_are_kept_as_floats_are_seen():
    """They are one array more. A barrier behind the conversion keeps them however much XLA fuses."""

    def kept_by_a_barrier(logits, labels):
        return kept_labels_of(logits, jax.lax.optimization_barrier(labels.astype(logits.dtype)))

    assert arrays_held(kept_by_a_barrier) > 2.2
    assert arrays_held(kept_labels) > arrays_held(gm.bernoulli_logits) + 0.9
