"""Autocovariances along draws, by a Fourier transform made of matrix products.

`jnp.fft` gathers an array whose columns lie over devices: XLA does not partition a transform. A
transform of length rows x columns in two passes (Cooley and Tukey 1965) is two matrix products with a
rotation between them, which XLA does partition.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class _Tables(NamedTuple):
    """Real and imaginary parts of the factors of a transform, in axis 0.

    Draws fill half of the rows, and frequencies of a real signal are half of them mirror images.
    """

    rows: jax.Array  # exp(-2πi k₁ n₁ / N₁), [2, N₁/2 + 1, N₁/2]
    rotation: jax.Array  # exp(-2πi k₁ n₂ / (N₁ N₂)), [2, N₁/2 + 1, N₂]
    columns: jax.Array  # exp(-2πi n₂ k₂ / N₂), [2, N₂, N₂]


def mean_autocovariance(x: jax.Array) -> jax.Array:
    """Autocovariances [draws, ...] of [chains, draws, ...], about each chain's own mean.

    c_t = mean over chains of Σ_n (x_n - x̄)(x_{n+t} - x̄) / N, all lags divided by the number of draws N.
    """
    num_chains, num_draws = x.shape[:2]
    width = math.ceil(math.sqrt(num_draws))
    half_height = math.ceil(num_draws / width)
    tables = _tables(half_height, width, x.dtype)
    centered = x - jnp.mean(x, axis=1, keepdims=True)
    missing = half_height * width - num_draws
    padded = jnp.pad(centered, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
    power = _power(padded.reshape(num_chains, half_height, width, *x.shape[2:]), tables)
    products = _inverse(power, tables).reshape(half_height * width, *x.shape[2:])
    return products[:num_draws] / (num_chains * num_draws)


def _tables(half_height: int, width: int, dtype) -> _Tables:
    frequency = np.arange(half_height + 1)

    def factors(x, y, length):
        # The product is reduced as an integer, so that angles are exact for any length.
        angle = 2 * np.pi * (np.multiply.outer(x, y) % length) / length
        return jnp.asarray(np.stack([np.cos(angle), -np.sin(angle)]), dtype)

    columns = np.arange(width)
    return _Tables(
        rows=factors(frequency, np.arange(half_height), 2 * half_height),
        rotation=factors(frequency, columns, 2 * half_height * width),
        columns=factors(columns, columns, width),
    )


def _power(x: jax.Array, tables: _Tables) -> jax.Array:
    """Power spectrum [k₁, k₂, ...], summed over chains, of [chains, n₁, n₂, ...]."""
    real, imag = (_product("kn,cnm...->kcm...", t, x) for t in tables.rows)
    cos, sin = (t.reshape(t.shape[0], 1, t.shape[1], *[1] * (x.ndim - 3)) for t in tables.rotation)
    real, imag = real * cos - imag * sin, real * sin + imag * cos
    cos, sin = tables.columns
    turn = "mj,kcm...->jkc..."
    new_real = _product(turn, cos, real) - _product(turn, sin, imag)
    new_imag = _product(turn, sin, real) + _product(turn, cos, imag)
    return jnp.swapaxes(jnp.sum(new_real**2 + new_imag**2, axis=2), 0, 1)


def _inverse(power: jax.Array, tables: _Tables) -> jax.Array:
    """Inverse transform [n₁, n₂, ...] of a power spectrum [k₁, k₂, ...], at the first half of n₁."""
    half_height, width = tables.rows.shape[2], tables.columns.shape[1]
    cos, sin = (_product("mj,kj...->mk...", t, power) for t in tables.columns)
    real, imag = jnp.swapaxes(cos, 0, 1), -jnp.swapaxes(sin, 0, 1)
    cos, sin = (t.reshape(*t.shape, *[1] * (power.ndim - 2)) for t in tables.rotation)
    real, imag = real * cos + imag * sin, imag * cos - real * sin
    # Frequencies between the first and the last also count for their mirror images.
    weight = np.full((1, half_height + 1, 1), 2.0)
    weight[:, [0, -1]] = 1.0
    cos, sin = tables.rows * jnp.asarray(weight / (2 * half_height * width), power.dtype)
    turn = "kn,km...->nm..."
    return _product(turn, cos, real) + _product(turn, sin, imag)


def _product(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Matrix product in the full precision of the dtype, also where the hardware would round."""
    return jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)
