"""Likelihood terms whose gradient does not pay for their value.

`jax.nn.logsumexp` and the like are differentiated through their own steps, so that a gradient alone
computes much of the value too. Here the derivative is written down, and the value drops out of a
program that does not ask for it.
"""

from functools import partial

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
    # Read once more than the gradient reads them: kept for both, they would be floats, one a chain.
    labels = jax.lax.optimization_barrier(labels).astype(logits.dtype)
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


def inner_products(
    rows: jax.Array,
    columns: jax.Array,
    row_bias: jax.Array | None = None,
    column_bias: jax.Array | None = None,
) -> jax.Array:
    """Logits of a factor model: ``rows @ columns.T + row_bias[:, None] + column_bias``.

    On a CPU the biases are further columns of the product, and the product's derivative in ``columns``
    has the narrow factor first: a gradient takes half of the time that the plain expression takes. On
    chips, which round a product's factors, biases are added behind it.
    Differentiable in reverse, and forward over reverse.

    Parameters
    ----------
    rows
        An embedding for each row, shape [rows, k].
    columns
        An embedding for each column, shape [columns, k].
    row_bias, column_bias
        Shapes [rows] and [columns]; left out where None.

    Returns
    -------
    jax.Array
        Shape [rows, columns].
    """
    left, right = [rows], [columns]
    if row_bias is not None:
        left, right = [*left, row_bias[:, None]], [*right, jnp.ones_like(columns[:, :1])]
    if column_bias is not None:
        left, right = [*left, jnp.ones_like(rows[:, :1])], [*right, column_bias[:, None]]
    return _product(jnp.concatenate(left, axis=1), jnp.concatenate(right, axis=1), rows.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, w: jax.Array, rank: int) -> jax.Array:
    return _forward(x, w, rank)


def _forward(x: jax.Array, w: jax.Array, rank: int) -> jax.Array:
    """Return ``x @ w.T``; columns from ``rank`` on are a bias and ones."""
    if x.shape[1] == rank:
        return x @ w.T
    whole, apart = (lambda x, w: x @ w.T), partial(_product_with_exact_biases, rank)
    return jax.lax.platform_dependent(x, w, cpu=whole, default=apart)


def _product_with_exact_biases(rank: int, x: jax.Array, w: jax.Array) -> jax.Array:
    """Add biases behind the product, as chips round its factors: a small move of one would be lost."""
    biases = [x[:, i, None] * w[None, :, i] for i in range(rank, x.shape[1])]
    return sum(biases, x[:, :rank] @ w[:, :rank].T)


def _product_bwd(
    rank: int, inputs: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = inputs
    is_narrow = x.shape[1] <= w.shape[0]
    # Sums over rows, which a plate knows as such.
    return grad @ w, jnp.tensordot(x, grad, (0, 0)).T if is_narrow else jnp.tensordot(grad, x, (0, 0))


_product.defvjp(lambda x, w, rank: (_forward(x, w, rank), (x, w)), _product_bwd)
