"""Likelihood terms whose gradient does not pay for their value.

`jax.nn.logsumexp` and the like are differentiated through their own steps, so that a gradient alone
computes much of the value too. Here the derivative is written down, and the value drops out of a
program that does not ask for it.
"""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def categorical_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Log probability of labels under softmax(logits).

    Parameters
    ----------
    logits
        Unnormalised log probabilities, shape [rows, classes].
    labels
        Integers in 0 ... classes - 1, shape [rows].

    Returns
    -------
    jax.Array
        One term a row, shape [rows], in nats.
    """
    shifted = _by_class(logits)
    chosen = jnp.sum(jnp.where(_is_label(shifted, labels), shifted, 0), axis=0)
    return chosen - jnp.log(jnp.sum(jnp.exp(shifted), axis=0))


@categorical_logits.defjvp
def _(primals, tangents):
    logits, labels = primals
    odds = jnp.exp(_by_class(logits))
    slope = _is_label(odds, labels) - odds / jnp.sum(odds, axis=0, keepdims=True)
    return categorical_logits(logits, labels), jnp.sum(slope * tangents[0].T, axis=0)


@jax.custom_jvp
def bernoulli_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Log probability of labels under sigmoid(logits), element by element.

    Parameters
    ----------
    logits
        Log odds of a one, any shape.
    labels
        Zeros and ones of any dtype (bytes, booleans, floats), a shape that broadcasts with the logits.

    Returns
    -------
    jax.Array
        One term an element, in nats and in the dtype of the logits.
    """
    labels = labels.astype(logits.dtype)
    # The first two cancel exactly where the label is the likelier one.
    return (labels * logits - jnp.maximum(logits, 0)) - jnp.log1p(jnp.exp(-jnp.abs(logits)))


@bernoulli_logits.defjvp
def _(primals, tangents):
    logits, labels = primals
    slope = labels.astype(logits.dtype) - jax.nn.sigmoid(logits)
    tangent = slope * tangents[0]
    if jnp.issubdtype(labels.dtype, jnp.floating):
        tangent = tangent + logits * tangents[1].astype(logits.dtype)
    return bernoulli_logits(logits, labels), tangent


def poisson_log_rate(log_rate: jax.Array, counts: jax.Array) -> jax.Array:
    """Log probability of counts under a Poisson distribution of rate exp(log_rate).

    Parameters
    ----------
    log_rate
        Logarithm of the mean, any shape.
    counts
        Whole numbers of any dtype, a shape that broadcasts with the rates.

    Returns
    -------
    jax.Array
        One term an element, in nats and in the dtype of the rates.
    """
    counts = counts.astype(log_rate.dtype)
    return counts * log_rate - jnp.exp(log_rate) - jax.scipy.special.gammaln(counts + 1)


def _by_class(logits: jax.Array) -> jax.Array:
    """Shift each row's largest logit to 0; classes first, so that rows fill the vector lanes."""
    by_class = logits.T
    return by_class - jnp.max(by_class, axis=0, keepdims=True)


def _is_label(by_class: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.arange(by_class.shape[0])[:, None] == labels[None]
