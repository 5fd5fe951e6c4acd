"""The adversarial targets' own samplers are exact, and their judge finds lies."""

import numpy as np
import pytest

from validation.sections import adversarial
from validation.sections.adversarial_targets import ADVERSARIES

NUM = 20_000


@pytest.fixture(scope="module")
def exact():
    return {name: make().exact(np.random.default_rng(0), NUM) for name, make in ADVERSARIES.items()}


def as_chains(values):
    """Independent draws as those of four chains."""
    return {name: x.reshape(4, -1) for name, x in values.items()}


def judged(name, values, exact, warned=()):
    return adversarial.judge(as_chains(values), exact[name], warned)


def test_there_are_at_least_26_adversaries():
    assert len(ADVERSARIES) >= 26


@pytest.mark.parametrize("name", ADVERSARIES)
def test_exact_draws_are_right_and_those_of_a_wrong_law_are_not(name, exact):
    own = ADVERSARIES[name]().exact(np.random.default_rng(1), NUM)
    assert judged(name, own, exact).is_right
    of_one = next(iter(own))
    # One coordinate's lowest tenth is never visited.
    lost = own | {of_one: np.maximum(own[of_one], np.quantile(own[of_one], 0.1))}
    verdict = judged(name, lost, exact)
    assert not verdict.is_right and verdict.is_silent_lie
    assert not judged(name, lost, exact, ["R-hat"]).is_silent_lie


def test_what_never_moves_is_wrong(exact):
    name = "two modes that mix"
    still = {key: np.full(NUM, np.median(x)) for key, x in exact[name].items()}
    assert judged(name, still, exact).is_silent_lie


def test_draws_that_are_not_finite_are_wrong(exact):
    name = "two modes that mix"
    bad = {key: np.where(np.arange(NUM) == 7, np.nan, x) for key, x in exact[name].items()}
    assert not judged(name, bad, exact).is_right
