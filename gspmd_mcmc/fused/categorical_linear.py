"""Multinomial logistic regression, whose gradient is a kernel on chips: it reads the data once."""

from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc.fused.tracing import has_triton, platform_of_kernels
from gspmd_mcmc.targets.bfloat16_terms import num_terms
from gspmd_mcmc.targets.likelihoods import categorical_logits
from gspmd_mcmc.targets.linear import forward, is_exact_in_bfloat16, linear
from gspmd_mcmc.targets.streaming.kernels_inside import marked

MOST_WEIGHTS = (
    1 << 14
)  # classes, as a chip pads them, times features: what a kernel keeps of a gradient
MOST_CLASSES = 128


def categorical_linear(x: jax.Array, w: jax.Array, bias: jax.Array, labels: jax.Array) -> jax.Array:
    """Log probability of labels under softmax(x @ w + bias): multinomial logistic regression.

    The value is that of ``categorical_logits(linear(x, w) + bias, labels)``. In the gradient of a
    `Plate` on a TPU or an NVIDIA GPU it is one kernel, if ``x`` are bytes or bfloat16: the data are
    read once, and logits and residuals are never written to memory. Elsewhere it is that expression.
    Where a GPU's gradients have less than full precision, residuals are rounded to bfloat16 there.
    Differentiable in reverse, and forward over reverse.

    Parameters
    ----------
    x
        Features of each row, shape [rows, features], as `linear` takes them.
    w, bias
        Weights and their bias, float32 of shapes [features, classes] and [classes].
    labels
        Integers in 0 ... classes - 1, shape [rows].

    Returns
    -------
    jax.Array
        One term a row, shape [rows], in nats.
    """
    if platform_of_kernels() and _fits(x, w, bias):
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
        return marked(_terms(precision, x, labels, (w, bias)))
    return _plain(x, labels, (w, bias))


def _fits(x: jax.Array, w: jax.Array, bias: jax.Array) -> bool:
    padded = max(16, 1 << (w.shape[1] - 1).bit_length())
    are_floats = w.dtype == bias.dtype == jnp.float32
    is_small = padded <= MOST_CLASSES and padded * w.shape[0] <= MOST_WEIGHTS
    return are_floats and is_small and is_exact_in_bfloat16(x)


def _plain(x: jax.Array, labels: jax.Array, parameters: tuple) -> jax.Array:
    w, bias = parameters
    return categorical_logits(linear(x, w) + bias[None], labels)


def _forward(x: jax.Array, labels: jax.Array, parameters: tuple) -> jax.Array:
    """Compute as `_plain` does, differentiable forward: its derivative backward is not used."""
    w, bias = parameters
    return categorical_logits(forward(x, w, num_terms()) + bias[None], labels)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _terms(precision: str | None, x: jax.Array, labels: jax.Array, parameters: tuple) -> jax.Array:
    return _forward(x, labels, parameters)


def _bwd(precision: str | None, inputs: tuple, cotangent: jax.Array) -> tuple:
    x, labels, parameters = inputs
    of_x = None
    with jax.default_matmul_precision(precision):
        if jnp.issubdtype(x.dtype, jnp.floating):  # not computed where nothing reads it
            of_x = jax.vjp(lambda x: _plain(x, labels, parameters), x)[1](cotangent)[0]
        return of_x, None, _gradients(x, labels, parameters, cotangent)


_terms.defvjp(lambda precision, *inputs: (_forward(*inputs), inputs), _bwd)


@jax.custom_jvp
def _gradients(x: jax.Array, labels: jax.Array, parameters: tuple, cotangent: jax.Array) -> tuple:
    """Return the derivatives of ``cotangent · terms`` in the parameters."""
    # Here, as who samples on a CPU need not wait for the compiler of kernels to be imported.
    from gspmd_mcmc.fused import categorical_linear_tpu

    kernels = {"tpu": categorical_linear_tpu.gradients}
    if has_triton():
        from gspmd_mcmc.fused import categorical_linear_gpu

        kernels["cuda"] = categorical_linear_gpu.gradients
    args = x, labels, parameters, cotangent
    return jax.lax.platform_dependent(*args, default=_plain_gradients, **kernels)


def _plain_gradients(x: jax.Array, labels: jax.Array, parameters: tuple, cotangent: jax.Array) -> tuple:
    return jax.vjp(partial(_plain, x, labels), parameters)[1](cotangent)[0]


@_gradients.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    """Differentiate once more, without a kernel."""
    return jax.jvp(_plain_gradients, primals, tangents)
