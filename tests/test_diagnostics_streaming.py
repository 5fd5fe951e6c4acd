"""Streaming moments, R-hat and batch means equal what the whole run gives, however it is cut."""

import jax
import numpy as np
import pytest
from models import autoregression as chains
from seeds import seed, within

from gspmd_mcmc.diagnostics import streaming, streaming_ess
from gspmd_mcmc.diagnostics.rhat import nested_rhat

CUTS = [[300], [1, 299], [100, 0, 137, 63], [7] * 42 + [6]]


def draws_of(shape=(4, 300), offset=0.0):
    return {"w": offset + chains(0.5, (*shape, 3)), "n": np.round(chains(0.2, shape)).astype(np.int32)}


def streamed(module, draws, cuts, **options):
    state = module.init(jax.tree.map(lambda x: x[:, 0], draws), **options)
    ends = np.cumsum(cuts)
    for start, stop in zip(ends - cuts, ends, strict=True):
        state = module.update(state, jax.tree.map(lambda x: x[:, start:stop], draws))  # noqa: B023
    return state


def gelman_rubin(x):
    num_draws = x.shape[1]
    within = x.var(axis=1, ddof=1).mean(axis=0)
    between = num_draws * x.mean(axis=1).var(axis=0, ddof=1)
    return np.sqrt(((num_draws - 1) / num_draws * within + between / num_draws) / within)


@pytest.mark.parametrize("cuts", CUTS[1:3])
def test_moments_and_rhat_are_those_of_the_whole_run(cuts):
    draws = draws_of()
    with jax.enable_x64(True):
        moments = streamed(streaming, draws, cuts)
        assert moments.count == 300
        for name, x in draws.items():
            flat = x.reshape(1200, *x.shape[2:])
            np.testing.assert_allclose(streaming.mean(moments)[name], flat.mean(axis=0), atol=1e-13)
            np.testing.assert_allclose(streaming.variance(moments)[name], flat.var(axis=0, ddof=1))
            np.testing.assert_allclose(streaming.rhat(moments)[name], gelman_rubin(x), rtol=1e-12)
        found = streaming.nested_rhat(moments, 2)
        np.testing.assert_allclose(found["w"], nested_rhat(draws, 2)["w"], rtol=1e-12)


def test_streamed_rhat_flags_a_shifted_chain_and_infinitely_chains_that_stand_still():
    good = chains(0.0, (4, 300))
    shifted = good + 2 * (np.arange(4) == 1)[:, None]
    still = np.broadcast_to(np.arange(4.0)[:, None] / 10, (4, 300))
    found = [streaming.rhat(streamed(streaming, x, [100, 200])) for x in (good, shifted, still)]
    assert found[0] < 1.01 < 1.2 < found[1]
    assert found[2] == np.inf


def test_float32_moments_keep_their_digits_far_from_zero():
    """A sum of squares would lose them all: 1e4 squared is 1e8, and the variance is near 1."""
    x = draws_of(offset=1e4)["w"].astype(np.float32)
    moments = streamed(streaming, x, [7] * 42 + [6])
    expected = x.astype(float).reshape(1200, 3).var(axis=0, ddof=1)
    np.testing.assert_allclose(streaming.variance(moments), expected, rtol=1e-3)


def test_before_the_second_draw_there_is_no_variance_of_one_chain():
    x = chains(0.0, (1, 5))
    assert np.isnan(streaming.variance(streaming.init(x[:, 0])))
    assert np.isnan(streaming.variance(streamed(streaming, x, [1])))
    assert np.isnan(streaming.rhat(streamed(streaming, x, [5])))


def batch_estimate(x, num_batches):
    """Effective size and error of the mean of [chains, draws], with NumPy on the whole run."""
    num_chains, num_draws = x.shape
    length = 1
    while num_draws // length >= num_batches:
        length *= 2
    number = num_draws // length
    means = x[:, : number * length].reshape(num_chains, number, length).mean(axis=2)
    spread = length * means.var(ddof=1)
    return x.size * x.var(ddof=1) / spread, np.sqrt(spread / x.size)


@pytest.mark.parametrize(("num_draws", "num_batches"), [(300, 6), (64, 64), (63, 64)])
def test_batch_means_equal_those_of_the_whole_run(num_draws, num_batches):
    x = chains(0.5, (3, num_draws))
    cuts = [num_draws // 2, num_draws - num_draws // 2]
    with jax.enable_x64(True):
        state = streamed(streaming_ess, x, cuts, num_batches=num_batches)
        size, error = batch_estimate(x, num_batches)
        np.testing.assert_allclose(streaming_ess.ess(state), size, rtol=1e-10)
        np.testing.assert_allclose(streaming_ess.mcse(state), error, rtol=1e-10)


def test_chunks_do_not_change_batch_means_by_a_bit():
    draws = draws_of()
    states = [streamed(streaming_ess, draws, cuts, num_batches=16) for cuts in CUTS]
    for state in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, state, states[0])


@pytest.mark.statistical
def test_batch_means_find_the_effective_size_of_an_autoregression():
    """64 columns: the mean of their estimates scatters by 2 %, and batches of 64 are short by 5 %."""
    x = chains(0.5, (4, 4000, 64), seed(0)).astype(np.float32)
    found = np.mean(streaming_ess.ess(streamed(streaming_ess, x, [1000] * 4)))
    within(abs(found / (16000 / 3) - 1), 0.12, "of the effective size")


def test_batch_means_see_chains_that_disagree():
    """Of 4,000 draws; plain effective sizes of each chain would add up to all of them."""
    x = chains(0.0, (4, 1000)) + 2 * np.arange(4)[:, None]
    assert streaming_ess.ess(streamed(streaming_ess, x, [1000])) < 400


def test_equal_draws_and_too_few():
    same = np.full((2, 40), 0.1)
    assert streaming_ess.ess(streamed(streaming_ess, same, [40])) == 80
    assert streaming_ess.mcse(streamed(streaming_ess, same, [40])) == 0
    assert np.isnan(streaming_ess.ess(streaming_ess.init(same[:, 0])))
    assert np.isnan(streaming_ess.ess(streamed(streaming_ess, chains(0.0, (2, 1)), [1])))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="even number, 4 or more"):
        streaming_ess.init(np.zeros(3), num_batches=5)
    for module in (streaming, streaming_ess):
        state = module.init({"w": np.zeros(3)})
        with pytest.raises(ValueError, match=r"\['w'\].*\[chains, draws, \.\.\.\]"):
            module.update(state, {"w": np.zeros(3)})
        # The moments of one leaf would be merged with the weights of the other.
        state = module.init({"a": np.zeros(4), "b": np.zeros((4, 2))})
        uneven = {"a": np.zeros((4, 10)), "b": np.zeros((4, 20, 2))}
        with pytest.raises(ValueError, match=r"at \['b'\]: expected 10 draws .* \['a'\], got 20"):
            module.update(state, uneven)
    with pytest.raises(ValueError, match="divisor of the number of chains"):
        streaming.nested_rhat(streaming.init(np.zeros((6, 2))), 4)
