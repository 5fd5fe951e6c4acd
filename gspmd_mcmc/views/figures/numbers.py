"""The numbers behind the figures of a run: NumPy on traces [chains, draws], in float64."""

import functools
from typing import NamedTuple

import numpy as np

from gspmd_mcmc.diagnostics.rhat import rhat

LEVEL = 0.99
NUM_SIMULATIONS = 2000
# Below, a rank test has no power, and its band no meaning.
LEAST_DRAWS = 10
DRIFT = 3.0
TAIL = 0.4  # draws whose fractional rank is further than this from the median


def autocorrelation(trace: np.ndarray) -> np.ndarray:
    """Autocorrelation of each chain at every lag, by fast Fourier transforms.

    ρ_t = Σ_n (x_n - x̄)(x_{n+t} - x̄) / Σ_n (x_n - x̄)², the estimate that divides all lags by the
    number of draws (Brockwell and Davis 1991, section 7.2).

    Parameters
    ----------
    trace
        Shape [chains, draws].

    Returns
    -------
    array
        Shape [chains, draws], 1 at lag 0; NaN for chains that are constant or not finite.
    """
    covariance = _autocovariance(trace)
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / covariance[:, :1]


def _autocovariance(trace: np.ndarray) -> np.ndarray:
    """Autocovariance [chains, lags] up to a common factor; NaN for chains that do not vary."""
    num_draws = trace.shape[1]
    is_fit = varies(trace)[:, None]
    centred = _centred(np.where(is_fit, trace, 0.0))
    spectrum = np.fft.rfft(centred, 2 * num_draws, axis=1)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :num_draws] / num_draws
    return np.where(is_fit, covariance, np.nan)


def _centred(trace: np.ndarray) -> np.ndarray:
    """Take off each chain's mean, in a unit whose squares neither over- nor underflow."""
    scaled = trace / (np.abs(trace).max(initial=0.0) or 1.0)
    centred = scaled - scaled.mean(axis=1, keepdims=True)
    return centred / (np.abs(centred).max(initial=0.0) or 1.0)


def varies(trace: np.ndarray) -> np.ndarray:
    """Tell which chains [chains] are finite and not constant."""
    return np.isfinite(trace).all(axis=1) & (trace != trace[:, :1]).any(axis=1)


def independent_spacing(trace: np.ndarray) -> int:
    """Return how many draws apart the draws of a chain are as good as independent.

    It is the smallest lag t such that autocorrelations at t, 2t and 3t, pooled over chains, are within
    0.05, or within three standard errors of zero; the number of draws if there is none. They are those
    of ranks, of their distance from the median and of both tails, since a chain that leaps from side
    to side can be slow to leave a tail (Vehtari et al. 2021 treat them apart likewise).
    """
    centred = ranks(trace) / trace.size - 0.5
    seen = (centred, np.abs(centred), 1.0 * (centred < -TAIL), 1.0 * (centred > TAIL))
    return max(_spacing(x) for x in seen)


def _spacing(trace: np.ndarray) -> int:
    covariance = _autocovariance(trace[varies(trace)])
    num_chains, num_draws = covariance.shape
    if not num_chains:
        return 1
    correlation = np.abs(covariance.mean(axis=0) / covariance[:, 0].mean())
    limit = max(0.05, 3 / np.sqrt(num_chains * num_draws))
    lags = range(1, num_draws)
    return next((t for t in lags if (correlation[t : 3 * t + 1 : t] < limit).all()), num_draws)


def bfmi(energy: np.ndarray) -> np.ndarray:
    """Energy Bayesian fraction of missing information of each chain.

    Σ (E_n - E_{n-1})² / Σ (E_n - Ē)² (Betancourt 2016, arXiv:1604.00695). Below 0.3 the momenta that
    are drawn at each step change the energy too little to explore its range.

    Parameters
    ----------
    energy
        The Hamiltonian at the end of each transition, [chains, draws].

    Returns
    -------
    array
        Shape [chains]; NaN for chains that are constant or not finite.
    """
    ratio = np.full(len(energy), np.nan)
    centred = _centred(energy[varies(energy)])
    ratio[varies(energy)] = (np.diff(centred, axis=1) ** 2).sum(axis=1) / (centred**2).sum(axis=1)
    return ratio


def ranks(trace: np.ndarray) -> np.ndarray:
    """Rank of every draw among the draws of all chains, from 1, ties broken at random.

    Random ties keep the ranks of equal chains uniform, also for integers and after rejections.
    """
    tie_breaker = np.random.default_rng(0).random(trace.size)
    order = np.lexsort((tie_breaker, trace.ravel()))
    found = np.empty(trace.size, int)
    found[order] = np.arange(1, trace.size + 1)
    return found.reshape(trace.shape)


def mixing(traces: list[np.ndarray]) -> np.ndarray:
    """Return R-hat [traces] of traces [chains, draws] of one shape, all in one program."""
    # About one centre for all chains, so that single precision holds what differs between them.
    centres = [np.median(x[np.isfinite(x)]) if np.isfinite(x).any() else 0.0 for x in traces]
    together = np.stack([x - centre for x, centre in zip(traces, centres, strict=True)], axis=-1)
    with np.errstate(over="ignore"):
        return np.asarray(rhat(together.astype(np.float32)), np.float64)


def most_rhat(num_draws: int) -> float:
    """Return an R-hat that chains which have mixed stay under, however many panels there are.

    Of independent draws it is 1 + (χ² - 1) / draws, about, χ² over its degrees of freedom.
    """
    return 1 + max(0.05, 5 / num_draws)


def drift(trace: np.ndarray) -> np.ndarray:
    """Tell which chains [chains] still rise, 1, or fall, -1, from third to third of their draws.

    Their last third is away from the first, with the second between them, by `DRIFT` times the
    standard deviation within thirds. Of independent draws it never is.
    """
    num_draws = trace.shape[1] // 3
    if num_draws < LEAST_DRAWS:
        return np.zeros(len(trace), int)
    with np.errstate(invalid="ignore"):
        thirds = trace[:, -3 * num_draws :].reshape(len(trace), 3, num_draws)
        steps = np.diff(thirds.mean(axis=2), axis=1)  # [chains, 2]
        within = np.sqrt(thirds.var(axis=2).mean(axis=1))
        goes_on = (np.abs(steps.sum(axis=1)) > DRIFT * within) & (steps.prod(axis=1) > 0)
    return np.where(goes_on, np.sign(steps[:, 0]), 0).astype(int)


class RankDifference(NamedTuple):
    """Of each chain, the ECDF of its fractional ranks less that of the uniform distribution.

    Attributes
    ----------
    points
        Where it is evaluated, in [0, 1], shape [points].
    difference
        Shape [chains, points].
    half_width
        Of the simultaneous band around 0, shape [points]; None if draws are too correlated for one.
    spacing
        Every how many draws one was ranked.
    """

    points: np.ndarray
    difference: np.ndarray
    half_width: np.ndarray | None
    spacing: int

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
    So that draws are nearly independent, they are taken some way apart (`independent_spacing`).
    """
    spacing = independent_spacing(trace)
    has_band = trace.shape[1] // spacing >= LEAST_DRAWS
    spacing = spacing if has_band else 1
    trace = trace[:, ::spacing]
    num_chains, num_draws = trace.shape
    edges = _edges(num_chains, num_draws)
    points = edges / trace.size
    ordered = np.sort(ranks(trace), axis=1)
    below = np.stack([np.searchsorted(row, edges, side="right") for row in ordered])
    half_width = _half_width(num_chains, num_draws) if has_band else None
    return RankDifference(points, below / num_draws - points, half_width, spacing)


def _half_width(num_chains: int, num_draws: int) -> np.ndarray:
    return _critical(num_chains, num_draws) * _deviation(num_chains, num_draws) / num_draws


def _edges(num_chains: int, num_draws: int) -> np.ndarray:
    """Ranks at which ECDFs are compared: 2 to 50 steps of some draws of each chain."""
    num_steps = int(np.clip(num_draws // 5, 2, 50))
    return np.linspace(0, num_chains * num_draws, num_steps + 1).round().astype(int)


def _deviation(num_chains: int, num_draws: int) -> np.ndarray:
    """Of the number of a chain's draws up to each edge: the hypergeometric standard deviation."""
    total = num_chains * num_draws
    edges = _edges(num_chains, num_draws)
    share = 1 / num_chains
    return np.sqrt(edges * share * (1 - share) * (total - edges) / max(total - 1, 1))


@functools.lru_cache
def _critical(num_chains: int, num_draws: int) -> float:
    """Return the quantile of the largest deviation of any chain at any edge, in standard deviations."""
    inner = slice(1, -1)  # at the ends there is no deviation
    deviation = _deviation(num_chains, num_draws)[inner]
    mean = _edges(num_chains, num_draws)[inner] / num_chains
    largest = np.zeros(NUM_SIMULATIONS)
    for counts in _simulated_counts(num_chains, num_draws):
        below = counts.cumsum(axis=1)[:, :-1]
        np.maximum(largest, (np.abs(below - mean) / deviation).max(axis=1), out=largest)
    return float(np.quantile(largest, LEVEL))


def _simulated_counts(num_chains: int, num_draws: int):
    """Yield, chain by chain, how many of its draws fall between edges, [simulations, steps].

    All orders of the draws of all chains are equally likely: each chain takes its draws from what the
    chains before it have left in each step.
    """
    rng = np.random.default_rng(0)
    left = np.tile(np.diff(_edges(num_chains, num_draws)), (NUM_SIMULATIONS, 1))
    for _ in range(num_chains):
        counts = np.zeros_like(left)
        elsewhere, wanted = left.sum(axis=1), np.full(NUM_SIMULATIONS, num_draws)
        for step in range(left.shape[1]):
            elsewhere = elsewhere - left[:, step]
            counts[:, step] = rng.hypergeometric(left[:, step], elsewhere, wanted)
            wanted = wanted - counts[:, step]
        left = left - counts
        yield counts
