"""What figures say of chains: autocorrelations, rank ECDFs with a band, drift, and R-hat.

Traces are float64 NumPy arrays [chains, draws]. Statistics come from `gspmd_mcmc.diagnostics`, which
computes in JAX's default precision; traces are centered before, so that it is enough.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from gspmd_mcmc.diagnostics.autocovariance import mean_autocovariance
from gspmd_mcmc.diagnostics.energy import bfmi
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.placement.explicit import on_any_mesh

LEVEL = 0.99
NUM_SIMULATIONS = 2000
LEAST_DRAWS = 10  # fewer give a rank test no power, and its band no meaning
DRIFT = 3.0  # standard deviations within thirds
TAIL = 0.4  # distance from the median beyond which a fractional rank is in a tail

_autocovariance = on_any_mesh(jax.jit(mean_autocovariance))


def varies(trace: np.ndarray) -> np.ndarray:
    """Tell which chains [chains] are finite and not constant."""
    return np.isfinite(trace).all(axis=1) & (trace != trace[:, :1]).any(axis=1)


def standardized(trace: np.ndarray) -> np.ndarray:
    """Center each chain and divide it by its largest distance; 0 for chains that do not vary."""

    def in_own_unit(x):
        largest = np.abs(x).max(axis=1, keepdims=True, initial=0.0)
        return x / np.where(largest > 0, largest, 1.0)

    trace = in_own_unit(np.where(varies(trace)[:, None], trace, 0.0))  # so that sums do not overflow
    return in_own_unit(trace - trace.mean(axis=1, keepdims=True))


def autocorrelation(trace: np.ndarray) -> np.ndarray:
    """Return the autocorrelation [chains, draws] of each chain at every lag.

    It is 1 at lag 0, and NaN for chains that are constant or not finite. All lags are divided by the
    number of draws (Brockwell and Davis 1991, section 7.2).
    """
    covariance = np.asarray(_autocovariance(standardized(trace).T[None])).T
    with np.errstate(invalid="ignore"):
        return covariance / covariance[:, :1]


def energy_fractions(energy: np.ndarray) -> np.ndarray:
    """Return BFMI [chains] of energies; NaN for chains that are constant or not finite."""
    return np.asarray(bfmi(standardized(energy)))


def mixing(traces: list[np.ndarray]) -> np.ndarray:
    """Return R-hat [traces] of traces of one shape, all in one program."""
    # About one center for all chains, so that single precision holds what differs between them.
    centers = [np.median(x[np.isfinite(x)]) if np.isfinite(x).any() else 0.0 for x in traces]
    stacked = np.stack([x - center for x, center in zip(traces, centers, strict=True)], axis=-1)
    with np.errstate(over="ignore"):
        return np.asarray(rhat(stacked.astype(np.float32)), np.float64)


def most_rhat(num_draws: int) -> float:
    """Return an R-hat that mixed chains stay under, however many panels there are.

    Of independent draws it is about 1 + (χ² - 1) / draws, with χ² divided by its degrees of freedom.
    """
    return 1 + max(0.05, 5 / num_draws)


def drift(trace: np.ndarray) -> np.ndarray:
    """Tell which chains [chains] still rise, 1, or fall, -1, from third to third of their draws.

    Their last third differs from the first by more than `DRIFT` standard deviations within thirds, and
    the second lies between them. Independent draws never do that.
    """
    num_draws = trace.shape[1] // 3
    if num_draws < LEAST_DRAWS:
        return np.zeros(len(trace), int)
    with np.errstate(invalid="ignore"):
        thirds = trace[:, -3 * num_draws :].reshape(len(trace), 3, num_draws)
        steps = np.diff(thirds.mean(axis=2), axis=1)  # [chains, 2]
        within = np.sqrt(thirds.var(axis=2).mean(axis=1))
        drifts = (np.abs(steps.sum(axis=1)) > DRIFT * within) & (steps.prod(axis=1) > 0)
    return np.where(drifts, np.sign(steps[:, 0]), 0).astype(int)


def independent_spacing(trace: np.ndarray) -> int:
    """Return how many draws apart the draws of a chain are as good as independent.

    It is the smallest lag t such that autocorrelations at t, 2t and 3t, pooled over chains, are within
    0.05, or within three standard errors, of zero; the number of draws if there is none. They are the
    autocorrelations of ranks, of their distance from the median and of both tails, since a chain that
    jumps from side to side can be slow to leave a tail (Vehtari et al. 2021 treat them apart too).
    """
    centered = ranks(trace) / trace.size - 0.5
    views = (centered, np.abs(centered), 1.0 * (centered < -TAIL), 1.0 * (centered > TAIL))
    stacked = np.stack(views, axis=-1)
    covariance = np.asarray(_autocovariance(stacked.astype(np.float32)))
    num_draws = trace.shape[1]
    lags = range(1, num_draws)
    longest = 1
    for view, found in zip(views, covariance.T, strict=True):
        num_varying = varies(view).sum()
        if num_varying:
            limit = max(0.05, 3 / np.sqrt(num_varying * num_draws))
            is_small = np.abs(found / found[0]) < limit
            spacing = next((t for t in lags if is_small[t : 3 * t + 1 : t].all()), num_draws)
            longest = max(longest, spacing)
    return longest


def ranks(trace: np.ndarray) -> np.ndarray:
    """Rank of every draw among the draws of all chains, from 1, ties broken at random.

    Random ties keep the ranks of equal chains uniform, also for integers and after rejections; the mean
    ranks of `gspmd_mcmc.diagnostics` do not, and an ECDF of them would leave the band.
    """
    tie_breaker = np.random.default_rng(0).random(trace.size)
    order = np.lexsort((tie_breaker, trace.ravel()))
    found = np.empty(trace.size, int)
    found[order] = np.arange(1, trace.size + 1)
    return found.reshape(trace.shape)


class RankDifference(NamedTuple):
    """For each chain, the ECDF of its fractional ranks less that of the uniform distribution."""

    points: np.ndarray  # where it is evaluated, in [0, 1], [points]
    difference: np.ndarray  # [chains, points]
    half_width: np.ndarray | None  # of the band around 0, [points]; None if draws are too correlated
    spacing: int  # one draw in this many was ranked

    @property
    def is_outside(self) -> np.ndarray:
        """Which chains leave the band, [chains]."""
        reach = np.inf if self.half_width is None else self.half_width
        return np.asarray((np.abs(self.difference) > reach).any(axis=1))

    @property
    def score(self) -> np.ndarray:
        """Largest difference of each chain [chains], in half widths of the band if there is one."""
        reach = 1.0 if self.half_width is None else np.where(self.half_width > 0, self.half_width, 1.0)
        return (np.abs(self.difference) / reach).max(axis=1)


def rank_difference(trace: np.ndarray) -> RankDifference:
    """Compare chains by their ranks among all draws, as in Säilynoja, Bürkner and Vehtari (2022).

    If the chains' draws are independent and of one distribution, all chains stay within the band with
    probability 0.99, at all points at once (Statistics and Computing 32:32). The band is calibrated on
    simulated ranks, jointly over chains; it is a multiple of the standard deviation at each point.
    Correlated draws are thinned until they are nearly independent (`independent_spacing`).
    """
    spacing = independent_spacing(trace)
    has_band = trace.shape[1] // spacing >= LEAST_DRAWS
    spacing = spacing if has_band else 1
    trace = trace[:, ::spacing]
    num_chains, num_draws = trace.shape
    edges = _edges(num_chains, num_draws)
    ordered = np.sort(ranks(trace), axis=1)
    below = np.stack([np.searchsorted(row, edges, side="right") for row in ordered])
    points, half_width = edges / trace.size, None
    if has_band:
        half_width = _critical(num_chains, num_draws) * _deviation(num_chains, num_draws) / num_draws
    return RankDifference(points, below / num_draws - points, half_width, spacing)


def _edges(num_chains: int, num_draws: int) -> np.ndarray:
    """Ranks at which ECDFs are compared: 2 to 50 steps of some draws of each chain."""
    num_steps = int(np.clip(num_draws // 5, 2, 50))
    return np.linspace(0, num_chains * num_draws, num_steps + 1).round().astype(int)


def _deviation(num_chains: int, num_draws: int) -> np.ndarray:
    """Hypergeometric standard deviation of the number of a chain's draws up to each edge."""
    total, share = num_chains * num_draws, 1 / num_chains
    edges = _edges(num_chains, num_draws)
    return np.sqrt(edges * share * (1 - share) * (total - edges) / max(total - 1, 1))


@functools.lru_cache
def _critical(num_chains: int, num_draws: int) -> float:
    """Return the quantile of the largest deviation of any chain at any edge, in standard deviations."""
    inner = slice(1, -1)  # at the ends there is no deviation
    deviation = _deviation(num_chains, num_draws)[inner]
    edges = _edges(num_chains, num_draws)
    mean = edges[inner] / num_chains
    largest = np.zeros(NUM_SIMULATIONS)
    # All orders of all draws are equally likely: each chain takes its draws from what the chains before
    # it have left in each step between edges.
    rng = np.random.default_rng(0)
    left = np.tile(np.diff(edges), (NUM_SIMULATIONS, 1))
    for _ in range(num_chains):
        counts = np.zeros_like(left)
        elsewhere, wanted = left.sum(axis=1), np.full(NUM_SIMULATIONS, num_draws)
        for step in range(left.shape[1]):
            elsewhere = elsewhere - left[:, step]
            counts[:, step] = rng.hypergeometric(left[:, step], elsewhere, wanted)
            wanted = wanted - counts[:, step]
        left = left - counts
        below = counts.cumsum(axis=1)[:, :-1]
        np.maximum(largest, (np.abs(below - mean) / deviation).max(axis=1), out=largest)
    return float(np.quantile(largest, LEVEL))
