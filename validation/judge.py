"""Are draws of the right distribution, and of chains that have converged?

Means of x and of (x - m)^2, m the reference's mean, are compared for every parameter. A difference is
measured in units of its Monte Carlo standard error: ours from the effective sample size of that very
quantity, in quadrature with the reference's own. The largest is held against a Bonferroni threshold.
(The error of a standard deviation by the effective sample size of x itself would be too small for
antithetic chains: squares are not antithetic.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import jax.numpy as jnp
import numpy as np

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.mcse import mcse_mean
from gspmd_mcmc.diagnostics.rhat import rank_nested_rhat

FALSE_ALARM = 1e-3  # of one kernel, mesh and number of chains, over all its posteriors
LARGEST_RHAT = 1.01
LEAST_ESS_OF_MANY = 400  # bulk, where chains are too short for plain R-hat
MOMENTS = ("mean", "variance")


@dataclass(frozen=True, eq=False)
class Reference:
    """What is known of a posterior: arrays [parameters] in the order of ``names``.

    Attributes
    ----------
    names
        Of the parameters.
    mean, variance
        Of each; ``variance`` is the mean of (x - mean)^2.
    errors
        Monte Carlo standard errors of both, shape [2, parameters]; 0 where they are exact.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    variance: np.ndarray
    errors: np.ndarray

    @classmethod
    def from_draws(cls, draws: Mapping[str, np.ndarray]) -> "Reference":
        """Estimate moments from reference draws, name -> [chains, draws]."""
        names = tuple(draws)
        x = columns(draws, names)
        mean = x.mean(axis=(0, 1))
        squares = (x - mean) ** 2
        return cls(names, mean, squares.mean(axis=(0, 1)), np.stack([error_of(x), error_of(squares)]))

    @classmethod
    def exact(cls, mean: Mapping[str, float], variance: Mapping[str, float]) -> "Reference":
        """Take moments that are known."""
        names = tuple(mean)
        m, v = (np.asarray([x[name] for name in names], np.float64) for x in (mean, variance))
        return cls(names, m, v, np.zeros((2, len(names))))


@dataclass(frozen=True)
class Bounds:
    """How large a bias is let pass: of the mean in sd's, of the variance relative to it."""

    mean: float = 0.0
    variance: float = 0.0


EXACT = Bounds()
# Of unadjusted kernels. A mean off by a tenth of a sd moves the coverage of a central 95 % interval by
# 0.1 percentage points, a variance off by a fifth by 3: what a user who takes such a kernel accepts.
UNADJUSTED = Bounds(mean=0.1, variance=0.2)


@dataclass(frozen=True)
class Verdict:
    """What the judge found; ``failures`` is empty where draws pass.

    Attributes
    ----------
    failures
        A sentence for each test that failed.
    worst_z, worst
        The largest difference beyond the bound, in standard errors, and what differs so.
    bias_of_mean, bias_of_variance
        The largest differences themselves, in sd's and relative to the variance, noise included.
    rhat
        The largest: rank-normalised split R-hat, or nested where there are superchains.
    least_ess
        The smallest bulk effective sample size.
    moments
        Parameter -> (mean, its error, variance about the reference's mean, its error).
    """

    failures: list[str]
    worst_z: float
    worst: str
    bias_of_mean: float
    bias_of_variance: float
    rhat: float
    least_ess: float
    moments: dict[str, tuple[float, float, float, float]]


def threshold(num_parameters: int, false_alarm: float = FALSE_ALARM) -> float:
    """Bonferroni's threshold for |z| of both moments of so many parameters, all posteriors together."""
    return -NormalDist().inv_cdf(false_alarm / 2 / (len(MOMENTS) * num_parameters))


def judge(
    draws: Mapping[str, np.ndarray],
    reference: Reference,
    largest_z: float,
    *,
    bounds: Bounds = EXACT,
    num_superchains: int | None = None,
) -> Verdict:
    """Compare draws with a reference, and chains with each other.

    Parameters
    ----------
    draws
        Parameter -> draws [chains, draws]: those of the reference, in any order.
    reference
        What they are compared with.
    largest_z
        The `threshold` of the run.
    bounds
        Biases that are let pass.
    num_superchains
        Where given, chains are in so many groups that started at one point each: nested R-hat and a
        bulk effective sample size of 400 are asked for in place of R-hat.

    Raises
    ------
    ValueError
        If the parameters are not the reference's.
    """
    if set(draws) != set(reference.names):
        raise ValueError(f"draws: expected parameters {reference.names}, got {tuple(draws)}")
    sd = np.sqrt(reference.variance)
    unit = (columns(draws, reference.names) - reference.mean) / sd
    moments = np.stack([unit, unit**2])  # [moments, chains, draws, parameters]
    own = np.stack([error_of(x) for x in moments])
    known = reference.errors / np.stack([sd, reference.variance])
    biases = moments.mean(axis=(1, 2)) - np.array([[0.0], [1.0]])
    z = _beyond(biases, bounds) / np.hypot(own, known)
    converged = _rhat(unit, num_superchains)
    ess = np.asarray(gm.ess_bulk(jnp.asarray(unit)))
    scale, offset = np.stack([sd, reference.variance]), np.stack([reference.mean, 0 * sd])
    estimates = offset + scale * moments.mean(axis=(1, 2))
    return Verdict(
        failures=[
            *_of_moments(z, reference.names, largest_z),
            *_of_chains(converged, ess, reference.names, num_superchains),
        ],
        worst_z=_worst(np.abs(z)),
        worst=_place(z, reference.names),
        bias_of_mean=_worst(np.abs(biases[0])),
        bias_of_variance=_worst(np.abs(biases[1])),
        rhat=_worst(converged),
        least_ess=-_worst(-ess),
        moments={
            name: (estimates[0, i], scale[0, i] * own[0, i], estimates[1, i], scale[1, i] * own[1, i])
            for i, name in enumerate(reference.names)
        },
    )


def columns(draws: Mapping[str, np.ndarray], names: tuple[str, ...]) -> np.ndarray:
    """Stack draws [chains, draws] of parameters to [chains, draws, parameters], in float64."""
    return np.stack([np.asarray(draws[name], np.float64) for name in names], axis=-1)


def error_of(x: np.ndarray) -> np.ndarray:
    """Monte Carlo standard error [parameters] of the mean of x [chains, draws, parameters]."""
    return np.asarray(mcse_mean(jnp.asarray(x)), np.float64)


def _beyond(biases: np.ndarray, bounds: Bounds) -> np.ndarray:
    limits = np.array([[bounds.mean], [bounds.variance]])
    return np.sign(biases) * np.maximum(np.abs(biases) - limits, 0.0)


def _rhat(unit: np.ndarray, num_superchains: int | None) -> np.ndarray:
    x = jnp.asarray(unit)
    return np.asarray(gm.rhat(x) if num_superchains is None else rank_nested_rhat(x, num_superchains))


def _worst(x: np.ndarray) -> float:
    """Return the largest; what is not a number is worse than anything."""
    return float(np.max(np.where(np.isnan(x), np.inf, x)))


def _place(z: np.ndarray, names: tuple[str, ...]) -> str:
    size = np.where(np.isnan(z), np.inf, np.abs(z))
    moment, parameter = np.unravel_index(np.argmax(size), size.shape)
    return f"{MOMENTS[moment]} of {names[parameter]}"


def _of_moments(z: np.ndarray, names: tuple[str, ...], largest_z: float) -> list[str]:
    return [
        f"{MOMENTS[m]} of {names[p]}: off by {z[m, p]:.1f} standard errors, "
        f"where {largest_z:.1f} is the limit"
        for m, p in zip(*np.nonzero(~(np.abs(z) <= largest_z)), strict=True)
    ]


def _of_chains(
    converged: np.ndarray, ess: np.ndarray, names: tuple[str, ...], num_superchains: int | None
) -> list[str]:
    kind = "R-hat" if num_superchains is None else "nested R-hat"
    least = 0.0 if num_superchains is None else LEAST_ESS_OF_MANY
    apart = [
        f"{kind} of {names[i]}: {converged[i]:.3f}, where {LARGEST_RHAT} is the limit"
        for i in np.flatnonzero(~(converged <= LARGEST_RHAT))
    ]
    few = [
        f"bulk ESS of {names[i]}: {ess[i]:.0f}, where {least:.0f} is the least"
        for i in np.flatnonzero(~(ess >= least))
    ]
    return apart + few
