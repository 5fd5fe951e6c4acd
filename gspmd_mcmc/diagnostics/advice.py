"""Warnings about a run in plain words, each with what to do; no warning is an empty text.

References
----------
Vehtari, Gelman, Simpson, Carpenter and Bürkner, Bayesian Analysis 16 (2021), section 4: R-hat under
1.01, and 100 effective draws for each of four chains.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gspmd_mcmc.diagnostics.energy import OF_STEPS, bfmi_of_steps
from gspmd_mcmc.diagnostics.ess import LEAST_OF_CHAIN
from gspmd_mcmc.diagnostics.rhat import (
    LEAST_DRAWS,
    LEAST_TO_SETTLE,
    LONGEST_CORRELATION,
    MANY_CHAINS,
    MOST_RHAT,
)

Worst = Sequence[tuple[str, float]]  # names and values of the worst numbers, the worst first
LEAST_BFMI = 0.3
LEAST_SPACINGS = 10.0  # of floating-point numbers, in a standard deviation
ACCEPTANCE_SPREAD = 0.15
LEAST_ACCEPTANCE = 0.1
MOST_SATURATED = 0.01  # share of trajectories that reached their largest depth
MOST_NAMED = 4  # chains, or numbers, that a warning names
ALL_EQUAL = (
    "log_density is the same in all draws: no chain has moved. Look at the acceptance rate, and make "
    "the step size smaller."
)
MANY_SHORT = (
    "Of so few draws a chain R-hat can be that large even if chains mix well: draw more. If chains "
    "started in groups of one point each, see nested R-hat: summary(num_superchains=...)."
)


def least_ess(num_chains: int) -> float:
    """Return the effective size that is enough: 100 for each chain, and 400 for four and more."""
    return LEAST_OF_CHAIN * min(num_chains, 4)


def on_transitions(
    stats: dict[str, Any], max_tree_depth: int | None, judges_energy: bool, thin: int
) -> list[str]:
    """Warn of divergences, trees that are cut short, energies, acceptance rates and late arrivals.

    Of ``stats`` [chains, draws] those that are missing are not judged. E-BFMI assumes that each
    transition draws its momentum anew: ``judges_energy``. A draw has ``thin`` steps.
    """
    stats = {name: np.asarray(x) for name, x in stats.items()}
    log_density = stats.get("log_density")
    found = [
        on_divergences(stats),
        _on_depth(stats, max_tree_depth),
        _on_energy(bfmi_of_steps(stats, thin)) if judges_energy else "",
        on_acceptance(stats),
        "" if log_density is None else on_arrivals(log_density),
    ]
    return [text for text in found if text]


def on_divergences(stats: dict[str, np.ndarray]) -> str:
    """Warn of divergent transitions."""
    if "is_divergent" not in stats or not stats["is_divergent"].any():
        return ""
    by_chain = stats["is_divergent"].sum(axis=1)
    shown = _chains(np.argsort(-by_chain, kind="stable")[: np.count_nonzero(by_chain)], by_chain, "d")
    count = f"{by_chain.sum()} of {stats['is_divergent'].size} transitions after warm-up diverged"
    if stats["is_divergent"].all():
        return (
            f"{count} ({shown}): no chain has moved. The log density or its gradient is NaN or "
            "infinite around there: evaluate both near draws.state.position. If they are finite, use a "
            "smaller step size."
        )
    return (
        f"{count} ({shown}): the step is too large in some region, and draws there are missing. Sample "
        "with a higher target_acceptance_rate, 0.95 or 0.99 (MCLMC has none: lower the energy_variance "
        "of its warm-up); if divergences remain, reparameterize."
    )


def _on_depth(stats: dict[str, np.ndarray], max_tree_depth: int | None) -> str:
    if max_tree_depth is None or "is_turning" not in stats or "is_divergent" not in stats:
        return ""
    share = np.mean(~stats["is_turning"] & ~stats["is_divergent"]) if stats["is_turning"].size else 0
    if share <= MOST_SATURATED:
        return ""
    return (
        f"{share:.0%} of trajectories reached max_tree_depth={max_tree_depth} and had not turned yet: "
        "the draws are valid, but each costs more than it should. Warm up longer, or bring latents to "
        "one scale; if that does not help, sample with a larger max_tree_depth."
    )


def _on_energy(fraction: np.ndarray) -> str:
    low = np.flatnonzero(fraction < LEAST_BFMI)
    if not low.size:
        return ""
    shown = _chains(low[np.argsort(fraction[low])], fraction, ".2f")
    return (
        f"E-BFMI is under {LEAST_BFMI} ({shown}): each new momentum changes the energy too little, so "
        "that chains seldom visit the tails. Reparameterize, or warm up longer and draw more."
    )


def on_unknown_energy(stats: dict[str, Any], thin: int) -> str:
    """Say that E-BFMI is not known, of thinned draws in a store of an earlier version."""
    if thin == 1 or "energy" not in stats or stats.keys() >= set(OF_STEPS):
        return ""
    return (
        f"E-BFMI is not known: one of {thin} steps is kept, and nothing of the energies of the others."
    )


def on_acceptance(stats: dict[str, np.ndarray]) -> str:
    """Warn of chains that accept next to nothing, or differ by more than noise."""
    if "acceptance_rate" not in stats or not stats["acceptance_rate"].size:
        return ""
    rates = stats["acceptance_rate"].mean(axis=1)
    is_divergent = stats.get("is_divergent", np.zeros(()))
    if np.median(rates) < LEAST_ACCEPTANCE and not np.all(is_divergent):
        return (
            f"next to no proposal is accepted: the median acceptance rate of chains is "
            f"{np.median(rates):.2g}, and the draws show where chains are, not the target. Use a "
            "smaller step size, or warm up longer."
        )
    # The means of few draws of many chains spread by noise, about six standard errors.
    noise = np.median(stats["acceptance_rate"].std(axis=1)) / np.sqrt(stats["acceptance_rate"].shape[1])
    if not np.ptp(rates) > ACCEPTANCE_SPREAD + 6 * noise:
        return ""
    return (
        f"acceptance rates differ between chains ({_chains(np.argsort(rates), rates, '.2f')}), the "
        f"median is {np.median(rates):.2f}. The lowest chain may be stuck, or in a narrower mode: look "
        "at its trace, start it elsewhere, warm up longer, or give each chain its own step size by "
        "PerChainAdaptation."
    )


def _chains(chains: Sequence[int] | np.ndarray, values: Any, form: str) -> str:
    shown = ", ".join(f"chain {c}: {values[c]:{form}}" for c in chains[:MOST_NAMED])
    more = len(chains) - MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def on_number_of_draws(num_chains: int, num_draws: int) -> list[str]:
    """Warn of too few draws, and of a single chain."""
    few = (
        f"{num_draws} draws of each chain: too few to judge. Draw at least {LEAST_DRAWS}, and hundreds "
        "for reliable results."
    )
    single = "one chain: R-hat only compares its halves, and does not show what it has missed. Run 4."
    return [few] * (num_draws < LEAST_DRAWS) + [single] * (num_chains == 1)


def on_arrivals(log_density: np.ndarray) -> str:
    """Warn of chains that reached the others, by log density [chains, draws], only after warm-up.

    The first draw of such a chain is twice as far from the median as any draw on that side in the
    second halves. With n draws of an exponential tail this happens by chance about twice in n² runs.
    """
    num_chains, num_draws = log_density.shape
    if num_draws < LEAST_TO_SETTLE or not np.isfinite(log_density).all():
        return ""
    settled = log_density[:, num_draws // 2 :]
    middle = np.median(settled)
    low, high = (middle + 2 * (extreme - middle) for extreme in (settled.min(), settled.max()))
    is_away = (log_density < low) | (log_density > high)
    lengths = np.argmin(is_away, axis=1)
    away = np.abs(log_density[:, 0] - middle)
    late = np.flatnonzero(lengths)
    if not late.size:
        return ""
    late = late[np.argsort(-away[late], kind="stable")]
    return (
        f"{late.size} of {num_chains} chains had not arrived when sampling began: up to "
        f"{lengths.max()} of their first draws are away from where all chains are later, by nats of "
        f"log_density ({_chains(late, away, '.0f')}). Warm up longer. They may have come from a mode "
        "that the other chains have not visited: look at the trace."
    )


def on_moves(moves: Sequence[Any], num_chains: int, rhat_before: float | None = None) -> str:
    """Warn of chains that warm-up has moved; ``rhat_before`` has them where they were, if known."""
    if not moves:
        return ""
    gains = {move.chain: move.to_log_density - move.from_log_density for move in moves}
    worst = sorted(gains, key=lambda chain: -gains[chain])
    found = (
        f"warm-up moved {len(gains)} of {num_chains} chains to where others are, because where they "
        f"were, lower by nats ({_chains(worst, gains, '.0f')}), no step of any size was accepted: "
        "R-hat cannot see what they saw there. Start elsewhere, or evaluate the density and its "
        "gradient there."
    )
    if rhat_before is None:
        return found
    return f"{found} With these chains where they were, R-hat of log_density is {rhat_before:.2f}."


def on_rhat(name: str, count: int, size: int, worst: Worst, num_chains: int, num_draws: int) -> str:
    """Warn of chains that do not agree: ``count`` of ``size`` numbers exceed the limit of R-hat."""
    what = "nested R-hat" if name == "nested_rhat" else "R-hat"
    found = (
        f"{what} is over {MOST_RHAT} for {count} of {size} numbers, worst {_numbers(worst, '.3f')}: "
        "chains do not agree. Do not use these draws yet: warm up and draw longer, start elsewhere, or "
        "reparameterize."
    )
    # If t draws are worth one, R-hat of short chains that agree is about 1 + (t - 1) / draws.
    is_excused = num_draws < LEAST_TO_SETTLE and worst[0][1] <= 1 + LONGEST_CORRELATION / num_draws
    is_excused &= name != "nested_rhat" and num_chains >= MANY_CHAINS
    return f"{found} {MANY_SHORT}" if is_excused else found


def on_noise(count: int) -> str:
    """Say for how many numbers R-hat exceeds its limit by noise."""
    found = (
        f"R-hat of {count} numbers is over {MOST_RHAT} only because chains are short: they differ from "
        "each other no more than the halves of each chain do."
    )
    return found if count else ""


def on_chance(count: int, size: int, worst: Worst, expected: float) -> str:
    """Report that R-hat exceeds its limit for about as many numbers as it does by chance."""
    return (
        f"R-hat is over {MOST_RHAT} for {count} of {size} numbers, worst {_numbers(worst, '.3f')}. If "
        f"all chains agree, chance makes it so for about {expected:.2g} of {size}, because the chains "
        "are short. Draw more, and R-hat falls."
    )


def on_ess(what: str, limit: float, count: int, size: int, worst: Worst) -> str:
    """Warn of few effective draws; arguments as in `on_rhat`."""
    unreliable = "means and medians" if what == "bulk" else "quantiles of the tails"
    return (
        f"{what} ESS is under {limit:.0f} for {count} of {size} numbers, least "
        f"{_numbers(worst, '.0f')}: {unreliable}, and R-hat itself, are not reliable yet. Draw more."
    )


def on_spacing(count: int, worst: Worst) -> str:
    """Warn of draws that hardly differ by more than the spacing of floating-point numbers."""
    return (
        f"the standard deviation of {count} numbers is under {LEAST_SPACINGS:.0f} times the distance "
        f"of floating-point numbers of their size, least {_numbers(worst, '.1f')} times: steps are "
        "rounded, and draws may be wrong. Subtract an offset from these latents, or use float64."
    )


def on_not_finite(count: int, worst: Worst) -> str:
    """Warn of draws that are NaN or infinite."""
    return (
        f"draws of {count} numbers are not finite: {', '.join(name for name, _ in worst[:MOST_NAMED])}."
    )


def _numbers(worst: Worst, form: str) -> str:
    return ", ".join(f"{name} ({value:{form}})" for name, value in worst[:MOST_NAMED])
