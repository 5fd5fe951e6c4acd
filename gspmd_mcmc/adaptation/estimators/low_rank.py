"""The estimator of low-rank plus diagonal metrics: a factor model of draws that are never gathered.

Draws of a window stay on the devices of their chain, in the layout of the position. The end of a window
fits covariance ≈ S (Ψ + F Fᵀ) S, with variances S², residual variances Ψ of each element and few
factors F, by subspace iteration: each round reduces ``rank`` inner products of each draw over the
devices of a position, and ``rank`` vectors over chains; no array is d by d.

References
----------
Harman, Modern Factor Analysis (1976): principal factors, iterated. Donoho, Gavish and Johnstone,
"Optimal shrinkage of eigenvalues in the spiked covariance model", Annals of Statistics 46 (2018): the
true values of leading sample eigenvalues and vectors. Stathopoulos and Wu, SIAM J. Sci. Comput. 23
(2002): orthonormal vectors from their Gram matrix.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from gspmd_mcmc import moments as streaming
from gspmd_mcmc import tree
from gspmd_mcmc.adaptation.estimators import estimator
from gspmd_mcmc.kernels.metrics.low_rank_metric import LowRankMetric
from gspmd_mcmc.kernels.metrics.metric import product
from gspmd_mcmc.moments import Moments
from gspmd_mcmc.tree import Pad, PyTree, like_position, pytree, set_fields, static

OVERSAMPLING = 5  # vectors that are iterated in addition to those that are kept
NUM_ROUNDS = 20
LEAST_RESIDUAL = 1e-4  # of an element's variance


@pytree
@dataclass(frozen=True, eq=False)
class LowRankMoments:
    """Moments of all draws of a window, and some of the draws, spread evenly over it."""

    moments: Moments  # of each element by itself
    draws: PyTree = like_position(has_chains=True, num_axes=1, pad=Pad.STAYS)  # [chains, kept, ...]


@pytree
@dataclass(frozen=True, init=False)
class LowRank(estimator.MetricEstimator):
    """Variances of all elements and ``rank`` leading directions, for any layout.

    It finds directions in which the position varies more than its elements do separately: common
    factors, strong correlations along a few directions. It does not find single directions that vary
    less, unless such factors cause them, nor what fewer draws than elements cannot show: sample
    eigenvalues are corrected for that, and directions that noise could explain are left out.

    Parameters
    ----------
    rank
        Directions of the metric. Static.
    num_kept
        Draws of each chain that are kept, a power of two: memory for this many positions a chain.
    """

    rank: int = static()
    num_kept: int = static()

    def __init__(self, rank: int = 10, num_kept: int = 64):
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"LowRank: rank: expected an integer of at least 1, got {rank!r}")
        if not isinstance(num_kept, int) or num_kept < 4 or num_kept & (num_kept - 1):
            raise ValueError(f"LowRank: num_kept: expected a power of two >= 4, got {num_kept!r}")
        set_fields(self, rank=rank, num_kept=num_kept)

    def init(self, positions: PyTree) -> LowRankMoments:
        """Return the moments of no draws."""
        moments = streaming.init(positions)
        draws = jax.tree.map(
            lambda m: jnp.zeros((m.shape[0], self.num_kept, *m.shape[1:]), m.dtype), moments.mean
        )
        return LowRankMoments(moments=moments, draws=draws)

    def update(self, moments: LowRankMoments, positions: PyTree) -> LowRankMoments:
        """Take in one step of all chains."""
        slot = slot_of(moments.moments.count, self.num_kept)
        draws = jax.tree.map(
            lambda kept, x: kept.at[:, slot].set(x.astype(kept.dtype)), moments.draws, positions
        )
        return LowRankMoments(moments=streaming.update(moments.moments, positions), draws=draws)

    def final(self, moments: LowRankMoments, positions: PyTree) -> LowRankMetric:
        """Return the metric that the draws of all chains give."""
        count = jnp.minimum(moments.moments.count, self.num_kept)
        freedom = jnp.maximum(jax.tree.leaves(positions)[0].shape[0] * (count - 1), 1)
        whitened = _whiten(moments, count, freedom)
        residual, vectors, eigenvalues = fit_factors(whitened, freedom, self.rank)
        own = estimator.own_variance(estimator.pooled_variance(moments.moments))
        variances = jax.tree.map(jnp.multiply, own, residual)
        return LowRankMetric(
            variances=estimator.like(variances, positions),
            vectors=estimator.like(vectors, positions),
            eigenvalues=eigenvalues.astype(jnp.result_type(*jax.tree.leaves(positions))),
        )

    def identity(self, positions: PyTree) -> LowRankMetric:
        """Return the metric of unit variances, with directions of zero length that do nothing."""
        nothing = jax.tree.map(lambda x: jnp.zeros((self.rank, *x.shape[1:]), x.dtype), positions)
        ones = jnp.ones(self.rank, jnp.result_type(*jax.tree.leaves(positions)))
        return LowRankMetric(estimator.unit_variances(positions), vectors=nothing, eigenvalues=ones)


def slot_of(draw: jax.Array, num_slots: int) -> jax.Array:
    """Return the slot of a draw, so that the kept draws are always spread over all draws so far.

    While slots are free, draw i has slot i. Then draws come in runs of 2, 4, 8, ...; each run writes to
    one slot, so that its last draw stays, and takes the slot of every other run of half its length.
    That slot is the number of the run with its bits rotated, once for each doubling.
    """
    bits = num_slots.bit_length() - 1
    doublings = jnp.maximum(32 - jax.lax.clz(draw.astype(jnp.int32)) - bits, 0)
    run, turn = draw >> doublings, doublings % bits
    return ((run << turn) | (run >> (bits - turn))) & (num_slots - 1)


def _whiten(moments: LowRankMoments, count: jax.Array, freedom: jax.Array) -> PyTree:
    """Center the kept draws, and scale each element to unit variance; 0 where there is no draw.

    They are centered on the mean of all chains in elements in which chains agree, on their own mean
    elsewhere: a chain that is stuck far away is not a direction to stretch.
    """
    chain_variance = streaming.variance(moments.moments)

    def whiten(draws, mean, variance):
        is_kept = jnp.arange(draws.shape[1]).reshape(1, -1, *(1,) * (mean.ndim - 1)) < count
        # Relative to the first draw: what does not move, as a pad, has deviations of exactly 0.
        first = draws[:, :1]
        change = jnp.where(is_kept, draws - first, 0)
        own = jnp.sum(change, axis=1, keepdims=True) / jnp.maximum(count, 1).astype(mean.dtype)
        between = jnp.sum(estimator.deviation(mean) ** 2, axis=0) / max(mean.shape[0] - 1, 1)
        do_agree = estimator.agrees(jnp.mean(variance, axis=0), between)
        shift = jnp.where(do_agree[None, None], estimator.deviation(first + own), 0)
        centered = jnp.where(is_kept, change - own + shift, 0)
        # Of the kept draws only: a factor must not explain more than all of their variance.
        variance = jnp.sum(centered**2, axis=(0, 1)) / freedom.astype(mean.dtype)
        return centered * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1))[None, None]

    return jax.tree.map(whiten, moments.draws, moments.moments.mean, chain_variance)


def fit_factors(draws: PyTree, freedom: jax.Array, rank: int) -> tuple[PyTree, PyTree, jax.Array]:
    """Fit Ψ + F Fᵀ to centered draws of unit variance, leaves [chains, draws, ...].

    Returns Ψ, a tree like the position; and the eigenvectors [rank, ...] and eigenvalues [rank] of
    Ψ^-½ F Fᵀ Ψ^-½ + I: exactly 1 for vectors that noise could explain.
    """
    shape = rank + OVERSAMPLING
    # Elements that vary; those of a pad do not.
    varies = jax.tree.map(lambda x: jnp.any(x != 0, axis=(0, 1)).astype(x.dtype), draws)
    aspect = tree.total(varies) / freedom
    # Drawn with rows first, so that the rows of a pad come last and do not change the other numbers.
    like_rows = jax.tree.map(lambda x: jnp.zeros((*x.shape[2:], shape), x.dtype), draws)
    start = tree.normal_like(jax.random.key(0), like_rows)
    vectors = jax.tree.map(lambda u: jnp.moveaxis(u, -1, 0), start)
    residual = jax.tree.map(lambda x: jnp.ones(x.shape[2:], x.dtype), draws)

    def one_round(_, carry):
        vectors, eigenvalues, residual = carry
        stretch = (_shrunk(eigenvalues, aspect) - 1)[:rank]
        new = jax.tree.map(partial(_residual, stretch), vectors, residual)
        turned = jax.tree.map(lambda u, old, r: u * jnp.sqrt(old / r)[None], vectors, residual, new)
        return *_improve(turned, draws, new, freedom), new

    carry = vectors, jnp.ones(shape, jnp.result_type(*jax.tree.leaves(draws))), residual
    vectors, eigenvalues, residual = jax.lax.fori_loop(0, NUM_ROUNDS, one_round, carry)
    kept = jax.tree.map(lambda u: u[:rank], vectors)
    return residual, kept, _shrunk(eigenvalues, aspect)[:rank]


def _residual(stretch: jax.Array, vectors: jax.Array, residual: jax.Array) -> jax.Array:
    """Return the part of the unit variances of a leaf that factors do not explain."""
    explained = residual * product(stretch, vectors[: len(stretch)] ** 2, 1)
    return jnp.clip(1 - explained, LEAST_RESIDUAL, 1)


def _improve(
    vectors: PyTree, draws: PyTree, residual: PyTree, freedom: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Multiply vectors by the covariance of the draws in units of the residual, and diagonalize.

    Returns orthonormal vectors [rank, ...] and their variances, the largest first.
    """
    draws = jax.tree.map(lambda x, r: x * jax.lax.rsqrt(r)[None, None], draws, residual)
    along = _inner_products(draws, vectors)
    vectors = _orthonormal(jax.tree.map(lambda x: product(along, x, ((0, 1), (0, 1))), draws))
    along = _inner_products(draws, vectors)
    covariance = product(along, along, ((0, 1), (0, 1))) / freedom.astype(along.dtype)
    eigenvalues, rotation = jnp.linalg.eigh(covariance)
    return _mix(rotation[:, ::-1].T, vectors), eigenvalues[::-1]


def _inner_products(draws: PyTree, vectors: PyTree) -> jax.Array:
    """Return the inner product of each draw with each vector, [chains, draws, rank]."""
    return _sum(jax.tree.leaves(jax.tree.map(partial(_over_elements, batch=2), draws, vectors)))


def _orthonormal(vectors: PyTree) -> PyTree:
    """Make vectors [rank, ...] orthonormal by their inner products, to rounding if they nearly are."""
    gram = _sum([_over_elements(u, u) for u in jax.tree.leaves(vectors)])
    epsilon = jnp.finfo(gram.dtype)
    scale = jax.lax.rsqrt(jnp.maximum(jnp.diagonal(gram), epsilon.tiny))
    eigenvalues, rotation = jnp.linalg.eigh(gram * scale[:, None] * scale[None])
    weight = jax.lax.rsqrt(jnp.maximum(eigenvalues, epsilon.eps * len(gram)))
    return _mix(weight[:, None] * rotation.T * scale[None], vectors)


def _over_elements(x: jax.Array, y: jax.Array, batch: int = 1) -> jax.Array:
    """Return the inner products of x [*batch, ...] with y [rank, ...], shape [*batch, rank]."""
    axes = tuple(range(batch, x.ndim)), tuple(range(1, y.ndim))
    return product(x, y, axes)


def _sum(parts: list[jax.Array]) -> jax.Array:
    return sum(parts, start=jnp.zeros((), jnp.result_type(*parts)))


def _mix(matrix: jax.Array, vectors: PyTree) -> PyTree:
    return jax.tree.map(lambda u: product(matrix, u, 1), vectors)


def _shrunk(eigenvalues: jax.Array, aspect: jax.Array) -> jax.Array:
    """Return the true variances along sample eigenvectors, by their sample eigenvalues λ.

    With aspect γ, elements per draw, and noise of unit variance, a true eigenvalue ℓ gives
    λ = ℓ (1 + γ / (ℓ - 1)), and the cosine c of its vector to the true one has
    c² = (1 - γ / (ℓ - 1)²) / (1 + γ / (ℓ - 1)); the variance along it is ℓ c² + 1 - c². Below
    (1 + √γ)² there is only noise: 1.
    """
    aspect = aspect.astype(eigenvalues.dtype)
    middle = eigenvalues + 1 - aspect
    true = (middle + jnp.sqrt(jnp.maximum(middle**2 - 4 * eigenvalues, 0))) / 2
    spike = jnp.maximum(true - 1, jnp.sqrt(aspect))
    cosine2 = (1 - aspect / spike**2) / (1 + aspect / spike)
    is_signal = eigenvalues > (1 + jnp.sqrt(aspect)) ** 2
    return jnp.where(is_signal, 1 + jnp.maximum(spike * cosine2, 0), 1)
