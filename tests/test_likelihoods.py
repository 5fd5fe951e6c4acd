"""Likelihood terms: values, gradients and second derivatives against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm


def plain(logits, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


BOTH = (gm.categorical_logits, plain)


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


def test_the_gradient_alone_takes_no_logarithm():
    logits, labels = jnp.zeros((8, 3)), jnp.zeros(8, jnp.int32)
    gradient = jax.jit(jax.grad(lambda x: gm.categorical_logits(x, labels).sum()))
    value = jax.jit(lambda x: gm.categorical_logits(x, labels).sum())
    assert " log(" not in str(gradient.lower(logits).compile().as_text())
    assert " log(" in str(value.lower(logits).compile().as_text())
