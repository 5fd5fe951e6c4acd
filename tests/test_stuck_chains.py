"""What warm-up does to stuck chains: they walk by themselves, are moved on the record, or are seen."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gspmd_mcmc as gm
from gspmd_mcmc.adaptation import own_step_size, stuck_chains
from gspmd_mcmc.adaptation.stuck_chains import Move, are_stuck_below
from gspmd_mcmc.diagnostics import advice
from gspmd_mcmc.diagnostics.summary import summarize
from gspmd_mcmc.placement.layout import read_layout
from gspmd_mcmc.sampling import run
from gspmd_mcmc.sampling.resumption import Saver

KEY = jax.random.key(0)
MESH = gm.make_mesh(chains=8)


# Who is stuck, and who is moved.


def test_only_chains_that_are_stuck_and_below_the_others_are_helped():
    rates = np.repeat([[0.0], [0.0], [0.12], [0.9], [1.0]], 30, axis=1)
    heights = np.array([-9.0, 0.0, -1.0, -50.0, 1.0])
    np.testing.assert_array_equal(are_stuck_below(rates, heights), [True, False, False, False, False])
    assert not are_stuck_below(np.repeat([[0.0], [0.05], [0.5], [0.9]], 30, axis=1), heights[:4]).any()
    # The memory is that of the recursion that tuning goes by.
    noisy = np.random.default_rng(0).uniform(size=(5, 140)) ** 8
    recent = stuck_chains.no_rates(jnp.zeros(5))
    for step in noisy.T:
        recent = stuck_chains.recent_rates(recent, step)
    assert 1 <= np.sum(recent < stuck_chains.STUCK_RATE) <= 2
    found = are_stuck_below(noisy, np.where(recent < stuck_chains.STUCK_RATE, -1.0, 0.0))
    np.testing.assert_array_equal(found, recent < stuck_chains.STUCK_RATE)


def test_chains_are_moved_to_the_same_others_on_every_mesh():
    rng = np.random.default_rng(2)
    states = {"x": jnp.asarray(rng.normal(size=(16, 3))), "y": jnp.arange(16.0)}
    moves = jnp.zeros(16, bool).at[jnp.asarray([0, 3, 7, 8])].set(True)
    program = jax.jit(lambda key, states, moves: stuck_chains.moved(key, states, moves, ~moves))
    moved = program(KEY, states, moves)
    source = np.asarray(moved["y"], int)
    np.testing.assert_array_equal(source[~moves], np.flatnonzero(~moves))
    assert not np.any(moves[source]) and len(set(source[moves])) > 1
    np.testing.assert_array_equal(moved["x"], np.asarray(states["x"])[source])
    again = program(KEY, *jax.device_put((states, moves), NamedSharding(MESH, P("chains"))))
    jax.tree.map(np.testing.assert_array_equal, again, moved)


def test_chains_walk_alike_on_every_mesh_and_send_nothing_in_a_leapfrog():
    """From places whose scales differ by a million: with one step size for all none of it would do."""
    scales = jnp.logspace(-3, 3, 8)
    target = gm.LogDensity(lambda x: -0.5 * (x / jnp.exp(x[2])) ** 2)
    start = jnp.stack([100 * scales, -100 * scales, jnp.log(scales)], axis=1)
    kernel = gm.NUTS(target, 1.0)

    def walked(layout, states):
        program = jax.jit(lambda k, key, s: own_step_size.walk(k, key, s, layout.vmap))
        return program(kernel, KEY, states), gm.communication(program, kernel, KEY, states)

    states = jax.vmap(kernel.init)(start)
    (expected, rates, count), _ = walked(read_layout(None, target, start, 8, has_chains=True), states)
    assert (np.asarray(rates) > 0.2).all() and count > 8 * 30
    assert (expected.log_density > states.log_density + 1000).all()
    states = jax.device_put(states, NamedSharding(MESH, P("chains")))
    (got, _, _), report = walked(read_layout(MESH, target, start, 8, has_chains=True), states)
    np.testing.assert_allclose(got.position, expected.position, rtol=1e-2, atol=1e-3)
    within = [c for c in report.collectives if c.loops and c.loops[-1].name == "leapfrog"]
    assert within == []


# Modes that chains of another mode's step size cannot move in. One target, so one program a kernel.


def two_modes(x, place, scale, offset, is_cut):
    """A normal mode at 0, another at a place; of all space, or each of its half of the first axis."""
    first = -0.5 * jnp.sum(x**2)
    second = offset - 0.5 * jnp.sum(((x - place) / scale) ** 2) - x.size * jnp.log(scale)
    return jnp.where(is_cut, jnp.where(x[0] > place / 2, second, first), jnp.logaddexp(first, second))


def modes(place, scale, offset=0.0, is_cut=False, log_density=two_modes):
    numbers = [jnp.float32(x) for x in (place, scale, offset)]
    return gm.LogDensity(log_density, *numbers, jnp.asarray(is_cut))


def starts_in(target, share, num_chains, seed):
    """So many of the first chains in the second mode, others in the first; in units of their scales."""
    place, scale = target.data[:2]
    start = np.random.default_rng(seed).normal(size=(num_chains, 2)).astype(np.float32)
    count = round(share * num_chains)
    start[:count] = np.asarray(place) + np.asarray(scale) * start[:count]
    return gm.per_chain(jnp.asarray(start))


def sampled(target, start, num_chains, seed=0, num_warmup=150, **options):
    """Return the draws, and what `sample` said."""
    given = {"num_chains": num_chains, "num_warmup": num_warmup, "num_samples": 100} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = gm.sample(jax.random.key(seed), target, start, progress=False, **given)
    return draws, [str(w.message) for w in caught if issubclass(w.category, gm.SamplingWarning)]


def check_it_is_told(draws):
    """No draw can be right here, as no chain can change modes: R-hat has to say so."""
    worst = draws.summary().worst().value
    assert not worst < 1.1, f"silent: R-hat {worst:.3f}"
    assert draws.warmup["moves"] == []
    assert any("chains do not agree" in text for text in draws.summary().warnings)


@pytest.mark.parametrize("num_chains", [4, 64])
def test_a_narrow_mode_of_half_the_mass_is_seen(num_chains):
    target = modes(place=10.0, scale=0.02)
    for seed in range(3):
        draws, told = sampled(target, starts_in(target, 1 / 4, num_chains, seed), num_chains, seed)
        check_it_is_told(draws)
        assert any("acceptance rates differ" in text for text in told)
        in_narrow = np.linalg.norm(np.asarray(draws.position) - 10, axis=-1) < 1
        assert in_narrow[: num_chains // 4].all()
        assert draws.kernel.step_size > 0.3  # that of the wide mode


@pytest.fixture
def moves_all_stuck_chains(monkeypatch):
    """The rule that was: chains that are stuck are moved, however high they are."""

    def are_stuck(rates, log_densities):
        return are_stuck_below(rates, np.arange(len(rates)) - 1e6 * (rates[:, -10:].mean(1) < 0.1))

    def stays(kernel, rng_key, states, vmap):
        return states, jnp.zeros_like(states.log_density), jnp.int32(0)

    monkeypatch.setattr(run, "are_stuck_below", are_stuck)
    monkeypatch.setattr(own_step_size, "walk", stays)


def test_moving_its_chains_would_hide_it_from_rhat(moves_all_stuck_chains):
    target = modes(10.0, 0.02, log_density=lambda *arguments: two_modes(*arguments))
    draws, told = sampled(target, starts_in(target, 1 / 4, 4, 0), 4)
    assert np.abs(np.asarray(draws.position)).max() < 8
    with pytest.raises(AssertionError, match="silent: R-hat 1.0"):
        check_it_is_told(draws)
    # Such moves would at least be told, and counted.
    assert len({move.chain for move in draws.moves}) == 1
    assert any("R-hat cannot see" in text for text in told)
    summary = draws.summary()
    assert (summary.rhat_before_moves or 0) > 1.1
    assert any("R-hat cannot see" in text for text in summary.warnings)


def test_each_chain_by_itself_samples_the_narrow_mode_too():
    target = modes(place=10.0, scale=0.02)
    options = {"kernel": gm.NUTS(target, 0.1), "warmup": gm.PerChainAdaptation()}
    draws, told = sampled(target, starts_in(target, 1 / 4, 4, 0), 4, **options)
    check_it_is_told(draws)
    x = np.asarray(draws.position)[0]
    assert draws.acceptance_rate[0] > 0.5 and np.abs(x - 10).max() < 0.1
    assert (x.std(axis=0) > 0.013).all() and (x.std(axis=0) < 0.03).all()


def test_modes_apart_are_seen_from_default_starts():
    draws, _ = sampled(modes(10.0, 0.02, is_cut=True), jnp.full(2, 5.0), 64)
    check_it_is_told(draws)
    in_narrow = np.asarray(draws.position)[..., 0].mean(axis=1) > 5
    assert 16 < in_narrow.sum() < 48


def test_a_mode_that_is_forty_nats_lower_is_seen():
    """It is no place to be lost in: its chains accept, and go nowhere else."""
    target = modes(place=30.0, scale=1.0, offset=-40.0)
    draws, _ = sampled(target, starts_in(target, 7 / 64, 64, 0), 64)
    check_it_is_told(draws)
    assert (np.asarray(draws.position)[:7, :, 0] > 15).all()


def test_chains_in_the_neck_of_a_funnel_stay_there_and_are_seen():
    def funnel(x):
        return -0.5 * (x[0] / 3) ** 2, -0.5 * x[1:] ** 2 * jnp.exp(-x[0]) - 0.5 * x[0]

    start = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    start[:, 0], start[0, 0] = 1, -8
    start[0, 1:] *= np.exp(-4)
    draws, told = sampled(gm.LogDensity(funnel), gm.per_chain(jnp.asarray(start)), 4)
    check_it_is_told(draws)
    assert told


# Bad starts: chains walk home, and nothing is said.


def steep(x):
    """Normal, but for what is beyond 10, where steps that suit the middle are refused."""
    return -0.5 * x**2, -(jnp.maximum(jnp.abs(x) - 10, 0) ** 4)


def far_start():
    start = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32) / 2
    start[0] = [100.0, -50.0]
    return gm.per_chain(jnp.asarray(start))


def test_a_chain_that_starts_badly_walks_to_the_others_and_nothing_is_said(monkeypatch):
    walks, walk = [], own_step_size.walk
    monkeypatch.setattr(
        own_step_size, "walk", lambda *given, **named: walks.append(1) or walk(*given, **named)
    )
    draws, told = sampled(gm.LogDensity(steep), far_start(), 4)
    assert walks and told == [] and draws.moves == []
    assert draws.summary().rhat_before_moves is None
    assert np.abs(np.asarray(draws.position)).max() < 7


# A place that no step leaves: its chains are moved, on the record.


def island(x):
    """A normal density, and far away one point beside which it is not a number."""
    near = -0.5 * x**2
    return jnp.where(x > 500, jnp.where(x == 1000, -100.0, jnp.nan), near)


ISLAND = gm.LogDensity(island)
ON_ISLAND = gm.per_chain(jnp.asarray([[0.5], [1000.0], [-0.5], [1.0]]))


@pytest.fixture(scope="module")
def from_island(tmp_path_factory):
    path = tmp_path_factory.mktemp("island") / "draws"
    draws, told = sampled(ISLAND, ON_ISLAND, 4, to=gm.ZarrSink(path))
    return draws, told, path


def test_a_chain_that_cannot_walk_is_moved_and_all_is_told(from_island):
    draws, told, _ = from_island
    (move,) = draws.warmup["moves"]
    assert move.chain == 1 and move.from_log_density == -100 and move.to_log_density > -20
    assert 0 < move.step < 150
    assert draws.warmup["log_density"][1, move.step - 1] == -100
    assert np.abs(np.asarray(draws.position)).max() < 10
    assert len(told) == 1 and "warm-up moved 1 of 4 chains" in told[0]
    assert f"chain 1: {move.to_log_density + 100:.0f}" in told[0]
    summary = draws.summary()
    assert summary.worst().value < 1.1 < summary.rhat_before_moves
    shown = [text for text in summary.warnings if "R-hat cannot see" in text]
    assert len(shown) == 1 and f"log_density is {summary.rhat_before_moves:.2f}" in shown[0]


def test_a_move_is_in_the_store_and_in_what_goes_on_from_the_draws(from_island):
    draws, _, path = from_island
    opened = gm.open_draws(path)
    assert opened.moves == draws.moves and isinstance(opened.moves[0], Move)
    assert json.loads(opened.to_datatree().attrs["moves"]) == [list(draws.moves[0])]
    assert any("R-hat cannot see" in text for text in opened.summary().warnings)
    more, told = sampled(ISLAND, draws, 4, num_warmup=0, num_samples=10)
    assert more.moves == draws.moves and any("R-hat cannot see" in text for text in told)


class Killed(BaseException):
    """The process ends here."""


def test_a_move_outlives_the_run(from_island, tmp_path):
    """It is saved after the move, and the process ends; the run that continues knows of it."""

    def save_and_die(saver):
        if saver.run.moves:
            saver.save()
            saver.checkpoints.finish()
            raise Killed

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Saver, "after_chunk", save_and_die)
        sampled(ISLAND, ON_ISLAND, 4, checkpoint=tmp_path / "run")
    resumed, told = sampled(ISLAND, ON_ISLAND, 4, checkpoint=tmp_path / "run")
    assert any("warm-up moved 1 of 4 chains" in text for text in told)
    assert resumed.moves == from_island[0].moves


def test_nothing_is_moved_when_warm_up_ends_nor_where_each_chain_has_its_own_step():
    """One window; the last of several is no other."""
    draws, told = sampled(ISLAND, ON_ISLAND, 4, num_warmup=15)
    assert draws.moves == [] and (np.asarray(draws.position)[1] == 1000).all() and told
    own = gm.PerChainAdaptation()
    draws, told = sampled(ISLAND, ON_ISLAND, 4, kernel=gm.NUTS(ISLAND, 0.1), warmup=own)
    assert draws.moves == [] and (np.asarray(draws.position)[1] == 1000).all() and told


# Chains that arrive while draws are made.


def levels(num_chains=4, num_draws=1000, seed=0, shape=2.0):
    """Log densities of draws of so many halved degrees of freedom."""
    return -np.random.default_rng(seed).gamma(shape, size=(num_chains, num_draws))


@pytest.mark.parametrize("height", [-40, 30])
def test_a_chain_that_arrives_while_draws_are_made_is_told(height):
    """Forty-five draws in another mode, as Lotka-Volterra's; or higher than all others ever are."""
    log_density = levels()
    assert advice.on_arrivals(log_density) == ""
    log_density[2, :45] += height
    assert "1 of 4 chains had not arrived" in advice.on_arrivals(log_density)
    assert "45 of their first draws" in advice.on_arrivals(log_density)
    stats = {"log_density": log_density.astype(np.float32)}
    found = summarize({"x": levels(seed=1).astype(np.float32)}, stats).warnings
    assert any("had not arrived" in text for text in found)


def test_sample_says_that_a_chain_arrives_while_draws_are_made():
    target = gm.LogDensity(lambda x: -0.5 * x**2)
    start = gm.per_chain(jnp.asarray([[0.0, 0.0], [0.5, 1.0], [60.0, 0.0], [1.0, -1.0]]))
    kernel = gm.HMC(target, 0.1, 4)
    draws, told = sampled(target, start, 4, kernel=kernel, num_warmup=0, num_samples=400)
    assert any("1 of 4 chains had not arrived" in text and "chain 2: " in text for text in told)
    settled, told = sampled(target, draws, 4, num_warmup=0, num_samples=400)
    assert not any("had not arrived" in text for text in told)


def test_tails_are_seldom_taken_for_arrivals():
    """Exponential tails, correlated as slow chains are: 500 runs, of which one may warn by chance."""
    found = 0
    for seed in range(500):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(4, 1020, 1))
        for i in range(1, 1020):
            x[:, i] = 0.9 * x[:, i - 1] + np.sqrt(1 - 0.81) * x[:, i]
        found += advice.on_arrivals(-0.5 * np.sum(x[:, 20:] ** 2, axis=-1)) != ""
    assert found <= 1


# R-hat of many short chains.


@pytest.mark.parametrize(
    ("num_chains", "num_draws", "rhat", "is_excused"),
    [(64, 20, 1.3, True), (64, 20, 1.6, False), (64, 100, 1.05, False), (4, 20, 1.3, False)],
)
def test_a_large_rhat_is_excused_by_few_draws_a_chain_alone(num_chains, num_draws, rhat, is_excused):
    text = advice.on_rhat("rhat_beyond_noise", 1, 1, [("x", rhat)], num_chains, num_draws)
    assert (advice.MANY_SHORT in text) == is_excused


def test_good_chains_of_a_hundred_draws_need_no_excuse():
    draws = np.random.default_rng(0).normal(size=(64, 100)).astype(np.float32)
    assert summarize({"x": draws}, {"log_density": draws}).worst().value < 1.005


def correlated(rng, num_chains, num_draws, rho, size=8):
    """Normal chains of which 1 draw is worth (1 - rho) / (1 + rho)."""
    x = rng.normal(size=(num_chains, num_draws, size))
    for i in range(1, num_draws):
        x[:, i] = rho * x[:, i - 1] + np.sqrt(1 - rho**2) * x[:, i]
    return x.astype(np.float32)


def judged(draws):
    summary = summarize({"x": draws}, {"log_density": draws[..., 0]})
    return sum("chains do not agree" in text for text in summary.warnings), summary


def test_short_chains_that_agree_are_not_said_to_disagree():
    """Four draws are worth one: R-hat is 1.015 in 200 draws, of chains without any fault."""
    for seed in range(5):
        warned, summary = judged(correlated(np.random.default_rng(seed), 64, 200, 0.6))
        assert summary.worst().value > advice.MOST_RHAT
        assert not warned
        assert any("only because chains are short" in note for note in summary.notes)


@pytest.mark.parametrize("fault", ["one chain elsewhere", "two halves", "drift", "slow"])
def test_short_chains_that_disagree_are_told_of(fault):
    """The same chains: one of 64 off by 3 sd, half by 0.8, all drift by 0.8, 40 draws are worth one."""
    for seed in range(5):
        x = correlated(np.random.default_rng(seed), 64, 200, 0.95 if fault == "slow" else 0.6)
        if fault == "one chain elsewhere":
            x[0, :, 3] += 3
        elif fault == "two halves":
            x[:32, :, 3] += 0.8
        elif fault == "drift":
            x[..., 3] += np.linspace(0, 0.8, 200, dtype=np.float32)
        warned, summary = judged(x)
        assert warned
        assert fault == "slow" or any("x[3]" in text for text in summary.warnings)


def test_few_chains_are_judged_by_rhat_as_ever():
    warned, summary = judged(correlated(np.random.default_rng(0), 4, 200, 0.6))
    assert warned
    assert not summary.notes
