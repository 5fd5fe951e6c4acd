"""How many numbers exceed R-hat 1.01 by chance: the formula against simulation, and what it may excuse.

Chains are autoregressions, of which the truth is known: they agree, or by how much they do not.
"""

import numpy as np
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics.chance import is_chance
from gspmd_mcmc.diagnostics.statistics import statistics
from gspmd_mcmc.diagnostics.summary import summarize

SEED = 0


def chains(num_chains, num_draws, rho, size, seed=SEED):
    """Normal draws [chains, draws, size] that agree; one is worth (1 - rho) / (1 + rho)."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(num_draws, num_chains, size)).astype(np.float32)
    x = noise.copy()
    for i in range(1, num_draws):
        x[i] = rho * x[i - 1] + np.sqrt(1 - rho**2) * noise[i]
    return np.ascontiguousarray(x.swapaxes(0, 1), dtype=np.float32)


def summary_of(x):
    """Judge numbers [chains, draws, size] with a log density of independent draws."""
    log_density = chains(x.shape[0], x.shape[1], 0.0, 1, seed=99)[..., 0]
    return summarize({"effect": x}, {"log_density": log_density})


def disagreements(summary):
    return [text for text in summary.warnings if "chains do not agree" in text]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("num_chains", "num_draws", "rho"),
    [(4, 500, 0.5), (4, 1000, 0.7), (2, 600, 0.5), (8, 500, 0.55), (4, 500, -0.7)],
)
def test_the_expected_number_is_that_of_simulated_chains_that_agree(num_chains, num_draws, rho):
    """Of 1,000 independent numbers; a count has a standard deviation of its square root."""
    found = statistics(chains(num_chains, num_draws, rho, 1000))
    count, expected = np.sum(found.rhat > 1.01), np.sum(found.rhat_by_chance)
    assert abs(count - expected) <= 4 * np.sqrt(expected) + 0.15 * expected + 1
    # The formula without the effective size, as if draws were independent, is told apart.
    assert rho < 0 or count > 10


@pytest.mark.statistical
@pytest.mark.parametrize("seed", range(3))
def test_300_effects_that_agree_are_not_said_to_disagree(seed):
    """As a hierarchical model by NUTS: means are antithetic, squares are worth a third of the draws."""
    x = chains(4, 500, -0.7, 300, seed)
    summary = summary_of(x)
    assert summary.worst().value > 1.01
    assert not summary.warnings
    (note,) = summary.notes
    count = int(np.sum(summary.rhat["effect"] > 1.01))
    assert f"R-hat is over 1.01 for {count} of 301 numbers, worst {summary.worst().name} (" in note
    assert "chance makes it so for about" in note and note in " ".join(str(summary).split())


FAULTS = {
    "one number of one chain elsewhere": lambda x: x + 0.5 * first_chain(x, [3]),
    "all numbers of one chain elsewhere": lambda x: x + 0.5 * first_chain(x, slice(None)),
    "one number wider in one chain": lambda x: x * (1 + first_chain(x, [3])),
    "all numbers slightly wider in one chain": lambda x: x * (1 + 0.4 * first_chain(x, slice(None))),
    "one number drifts": lambda x: x + drift(x, 3),
}


def first_chain(x, columns):
    found = np.zeros_like(x)
    found[0][:, columns] = 1
    return found


def drift(x, column):
    found = np.zeros_like(x)
    found[..., column] = np.linspace(0, 1, x.shape[1])
    return found


@pytest.mark.statistical
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rho", [-0.7, 0.0, 0.5])
def test_chains_that_have_not_mixed_are_told_of_among_300_numbers(fault, rho):
    """The same chains with a fault: no number that chance makes of the others excuses it."""
    found = disagreements(summary_of(FAULTS[fault](chains(4, 500, rho, 300))))
    assert len(found) == 1 and "Do not use these draws yet" in found[0]
    if fault.startswith("one"):
        assert "effect[3]" in found[0]


def test_a_disagreement_does_not_excuse_itself():
    """One number mixes fast, and one of its chains is off by 0.35 sd, among 300 slow ones that agree.

    The shift lowers the effective size in all, by which an R-hat of 1.02 would be chance.
    """
    slow = chains(4, 500, 0.5, 300)
    assert not disagreements(summary_of(slow))
    for seed in range(1, 4):
        fast = chains(4, 500, 0.0, 1, seed)
        assert disagreements(
            summary_of(np.concatenate([fast + 0.35 * first_chain(fast, [0]), slow], axis=2))
        )


def test_chains_too_slow_to_judge_are_told_of():
    """Forty draws are worth one: chance makes R-hat as large, and is no excuse."""
    summary = summary_of(chains(4, 500, 0.95, 300))
    assert disagreements(summary) and any("ESS" in text for text in summary.warnings)


def test_a_single_number_of_a_few_over_the_limit_is_told_of():
    """R-hat of independent draws is never over 1.01 by chance: a chain off by 0.3 sd is told of."""
    x = chains(4, 1000, 0.0, 3)
    assert disagreements(summary_of(x + 0.3 * first_chain(x, [1])))
    assert not disagreements(summary_of(x)) and not summary_of(x).notes


def test_a_large_leaf_is_judged_like_its_parts():
    """Of over a thousand numbers only scalars are known on the host."""
    x = chains(4, 500, 0.5, 1200)
    whole = summary_of(x)
    parts = summarize(
        {"a": x[..., :600], "b": x[..., 600:]}, {"log_density": x[..., 0] * 0 + x[..., 7]}
    )
    assert not disagreements(whole) and not disagreements(parts)
    count = int(np.sum(np.asarray(whole.rhat["effect"]) > 1.01))
    assert f"{count} of 1201 numbers" in whole.notes[0]
    assert disagreements(summary_of(x + 0.8 * first_chain(x, [3])))


def test_a_count_is_chance_unless_it_is_improbable():
    """Poisson: P(N >= 4 | 1) = 0.01899, P(N >= 5 | 1) = 0.00366, P(N >= 1 | 0.005) = 0.00499."""

    def is_so(count, expected, least=1e-3):
        return is_chance(count, expected, least, size=300)

    assert is_so(4, 1.0) and not is_so(5, 1.0)
    assert not is_so(1, 0.005) and is_so(1, 0.02)
    assert is_so(14, 11.6) and is_so(3, 40.0) and not is_so(40, 10.0)
    assert not is_so(1, 0.0)
    # One of 300 whose own probability is 1 in 100,000.
    assert not is_so(14, 11.6, least=1e-5) and is_so(14, 11.6, least=1e-4)


def test_draws_have_the_probability_by_leaf():
    found = summary_of(chains(4, 500, 0.5, 5)).rhat_by_chance["effect"]
    assert found.shape == (5,) and np.all((found > 0) & (found < 0.5))
    assert gm.rhat(chains(4, 500, 0.5, 5)).shape == found.shape
