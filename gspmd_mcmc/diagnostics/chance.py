"""How often R-hat is large by chance, although chains agree.

M half chains of n draws have S effective draws in all. If they agree, the variance B of their means is
(M / S) W χ² / (M - 1). W is the variance of the draws, and χ² has M - 1 degrees of freedom. Since
R-hat² = B / W + (n - 1) / n,

    P(R-hat > r) = P(χ² / (M - 1) > (1 / n + r² - 1) S / M).

References
----------
Gelman and Rubin, "Inference from iterative simulation using multiple sequences", Statistical Science 7
(1992), section 3: the distribution of B. Wilson and Hilferty, "The distribution of chi-square", PNAS 17
(1931): the cube root of χ² is nearly normal.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from gspmd_mcmc.diagnostics.ess import LEAST_OF_CHAIN, Sizes
from gspmd_mcmc.diagnostics.rhat import MANY_CHAINS, MOST_RHAT

LEAST_PROBABILITY = 0.01  # of what chance explains


class Chance(NamedTuple):
    """Two probabilities [...] of columns whose chains agree.

    Both are 0 where chance is not an excuse: with fewer than 100 effective draws per chain, and with 32
    chains or more, where `column_rhat_beyond_noise` forgives the noise.
    """

    over: jax.Array  # that R-hat exceeds 1.01
    as_large: jax.Array  # that R-hat exceeds the one of these draws


def column_chance(x: jax.Array, sizes: Sizes, rhat: jax.Array) -> Chance:
    """Compute the probabilities [...] of draws [chains, draws, ...], of which R-hat is known.

    S is by the correlation within chains only. Disagreement between chains would lower it, and so
    excuse itself.
    """
    num_chains, num_draws = x.shape[:2]
    enough = LEAST_OF_CHAIN * num_chains if num_chains < MANY_CHAINS else math.inf
    # A comparison with the NaN of draws that are NaN, or too few, is false.
    is_enough = jnp.minimum(sizes.bulk, sizes.tail) >= enough

    def probability(limit):
        within = (sizes.bulk_within, sizes.folded_within)
        bulk, folded = (_probability(limit, size, num_chains, num_draws) for size in within)
        return jnp.where(is_enough, bulk + folded - bulk * folded, 0)

    return Chance(probability(MOST_RHAT), probability(rhat))


def _probability(limit, size: jax.Array, num_chains: int, num_draws: int) -> jax.Array:
    half_chains, half = 2 * num_chains, max(num_draws // 2, 1)
    ratio = (1 / half + limit**2 - 1) * size / half_chains
    spread = 2 / (9 * (half_chains - 1))
    return ndtr((1 - spread - jnp.cbrt(ratio)) / math.sqrt(spread))


def is_chance(count: int, expected: float, least: float, size: int) -> bool:
    """Tell whether chance explains the numbers whose R-hat is over the limit.

    It does unless so many, or one so large, have a probability of less than 1 %. Their number is nearly
    Poisson distributed.

    Parameters
    ----------
    count, expected
        How many of them there are, and how many chance makes.
    least
        The least probability `Chance.as_large` of them.
    size
        How many numbers are judged.
    """
    return least * size > LEAST_PROBABILITY and _at_least(count, expected) > LEAST_PROBABILITY


def _at_least(count: int, expected: float) -> float:
    """Probability that a Poisson variable is at least ``count``; 1 where it is a half or more."""
    if count <= expected or not expected:
        return float(count <= expected)
    term = total = math.exp(count * math.log(expected) - expected - math.lgamma(count + 1))
    while term > 1e-6 * total:
        count += 1
        term *= expected / count
        total += term
    return total
