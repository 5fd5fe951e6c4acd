"""How a run ends early and keeps its draws: what callbacks return or raise, and signals of any host."""

import contextlib
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gspmd_mcmc as gm
from gspmd_mcmc.sampling import reporting
from gspmd_mcmc.sampling import run as runs

KEY = jax.random.key(0)
TARGET = gm.LogDensity(lambda x: -0.5 * x**2)
WARMUP, DRAWS = 20, 30


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Chunks are of 1, 10, 9 steps of warm-up, then of 1, 10, 10 and 9 draws."""
    monkeypatch.setattr(runs, "next_size", lambda count, seconds: 10)


def sample(**options):
    counts: dict[str, Any] = {"num_chains": 2, "num_warmup": WARMUP, "num_samples": DRAWS}
    kernel = gm.HMC(TARGET, 0.3, 3)
    return gm.sample(KEY, TARGET, jnp.zeros(3), kernel=kernel, progress=False, **counts | options)


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "next_size", lambda count, seconds: 10)
        return np.asarray(sample().position)


def at(phase, done, act):
    """Return a callback that acts when a phase has come so far."""

    def callback(report):
        return act() if (report.phase, report.done) == (phase, done) else None

    return callback


def raises(error):
    def act():
        raise error

    return act


STOPS = {
    "False": lambda: False,
    "a False of NumPy": lambda: np.bool_(False),
    "StopIteration": raises(StopIteration),
}
PLACES = ["memory", "host", "sink", "checkpoint"]


def options_of(place, tmp_path):
    return {
        "memory": {},
        "host": {"device_bytes": 1},  # a draw at a time
        "sink": {"to": gm.ZarrSink(tmp_path / "draws")},
        "checkpoint": {"checkpoint": tmp_path / "run"},
    }[place]


@pytest.mark.parametrize("stop", STOPS)
def test_a_callback_stops_a_run_and_its_draws_are_kept(whole, stop):
    draws = sample(callback=at("sampling", 11, STOPS[stop]))
    np.testing.assert_array_equal(draws.position, whole[:, :11])


@pytest.mark.parametrize("found", [None, True, 0, "", np.zeros(2)], ids=str)
def test_what_else_a_callback_returns_does_not_stop_a_run(found):
    assert sample(callback=lambda report: found).num_draws == DRAWS


@pytest.mark.parametrize("place", PLACES)
def test_a_keyboard_interrupt_in_a_callback_loses_no_draws(whole, tmp_path, place):
    callback = at("sampling", 11, raises(KeyboardInterrupt))
    with pytest.warns(gm.SamplingWarning, match=f"stopped after 11 of {DRAWS} draws"):
        try:
            draws = sample(callback=callback, **options_of(place, tmp_path))
        except KeyboardInterrupt:  # which would end the tests
            pytest.fail("the interrupt was raised")
    np.testing.assert_array_equal(draws.position, whole[:, :11])
    if place == "checkpoint":
        np.testing.assert_array_equal(sample(**options_of(place, tmp_path)).position, whole)


def test_a_callback_that_stops_warm_up_leaves_no_draws():
    with pytest.warns(gm.SamplingWarning, match=f"stopped after 0 of {DRAWS} draws"):
        draws = sample(callback=lambda report: report.phase == "sampling")
    assert draws.num_draws == 0 and draws.num_steps == 1


@pytest.mark.parametrize("place", PLACES)
def test_an_exit_in_a_callback_ends_the_run_and_tells_where_its_draws_are(whole, tmp_path, place):
    callback = at("sampling", 11, raises(SystemExit(3)))
    with pytest.raises(SystemExit) as raised:
        sample(callback=callback, **options_of(place, tmp_path))
    assert raised.value.code == 3
    (note,) = raised.value.__notes__
    assert f"SystemExit, which ended the run after 11 of {DRAWS} draws" in note
    np.testing.assert_array_equal(vars(raised.value)["draws"].position, whole[:, :11])
    if place in ("sink", "checkpoint"):
        folder = tmp_path / ("draws" if place == "sink" else "run/draws")
        assert str(folder) in note
        np.testing.assert_array_equal(gm.open_draws(folder).position, whole[:, :11])
    if place == "checkpoint":
        np.testing.assert_array_equal(sample(**options_of(place, tmp_path)).position, whole)


def test_an_exit_after_ctrl_c_keeps_the_draws_too(whole):
    def both():
        signal.raise_signal(signal.SIGINT)
        raise SystemExit

    with pytest.raises(SystemExit) as raised:
        sample(callback=at("sampling", 11, both))
    np.testing.assert_array_equal(vars(raised.value)["draws"].position, whole[:, :11])


def test_a_second_ctrl_c_in_a_callback_raises():
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        sample(callback=at("sampling", 11, twice))


# Signals.


@pytest.fixture
def foreign(monkeypatch):
    """A process whose handlers of signals were set by a host before Python began.

    `signal.getsignal` and `signal.signal` then return None, and the latter raises for None.
    """
    real, known = signal.signal, {}

    def set_handler(number, handler):
        if handler is None:
            raise TypeError(
                "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object"
            )
        previous = known.get(number)
        known[number] = handler
        real(number, handler)
        return previous

    before = real(signal.SIGINT, signal.SIG_IGN), real(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(signal, "signal", set_handler)
    monkeypatch.setattr(signal, "getsignal", known.get)
    yield known
    real(signal.SIGINT, before[0])
    real(signal.SIGTERM, before[1])


@pytest.mark.parametrize("place", ["memory", "checkpoint"])
def test_handlers_that_are_not_pythons_stay_and_no_draw_is_lost(foreign, whole, tmp_path, place):
    draws = sample(**options_of(place, tmp_path))
    np.testing.assert_array_equal(draws.position, whole)
    assert not foreign


def test_a_run_in_such_a_host_is_stopped_by_its_callback(foreign, whole):
    draws = sample(callback=at("sampling", 11, STOPS["False"]))
    np.testing.assert_array_equal(draws.position, whole[:, :11])


@contextlib.contextmanager
def restored():
    previous = signal.getsignal(signal.SIGINT)
    yield previous
    signal.signal(signal.SIGINT, previous)


def test_a_handler_that_a_callback_sets_stays(whole):
    def own(signum, frame):
        pass

    with restored():
        callback = at("sampling", 11, lambda: signal.signal(signal.SIGINT, own) and None)
        np.testing.assert_array_equal(sample(callback=callback).position, whole)
        assert signal.getsignal(signal.SIGINT) is own


def test_a_run_within_a_callback_leaves_the_handler_of_the_outer_run(whole):
    def inner():
        sample(num_samples=1)
        signal.raise_signal(signal.SIGINT)

    with restored() as handler, pytest.warns(gm.SamplingWarning, match="stopped after 11"):
        assert sample(callback=at("sampling", 11, inner)).num_draws == 11
        assert signal.getsignal(signal.SIGINT) is handler


def test_a_run_in_a_thread_is_stopped_by_its_callback(whole):
    found = []

    def work():
        found.append(sample(callback=at("sampling", 11, STOPS["False"])))
        with pytest.warns(gm.SamplingWarning, match="stopped after 1 of"):
            found.append(sample(callback=at("sampling", 1, raises(KeyboardInterrupt))))

    with restored() as handler:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGINT) is handler
    np.testing.assert_array_equal(found[0].position, whole[:, :11])
    np.testing.assert_array_equal(found[1].position, whole[:, :1])


class Gone:
    """The standard error of a terminal that has been closed."""

    encoding, num_asked = "utf-8", 0

    def write(self, text):
        self.num_asked += 1
        raise OSError(5, "Input/output error")

    flush = write

    def isatty(self):
        return False


def test_a_terminal_that_has_gone_costs_no_draws(whole, monkeypatch):
    gone = Gone()
    monkeypatch.setattr(reporting.sys, "stderr", gone)
    monkeypatch.setattr(reporting, "SECONDS_A_LINE", 0.0)
    kernel = gm.HMC(TARGET, 0.3, 3)
    counts: dict[str, Any] = {"num_chains": 2, "num_warmup": WARMUP}
    draws = gm.sample(KEY, TARGET, jnp.zeros(3), kernel=kernel, num_samples=DRAWS, **counts)
    np.testing.assert_array_equal(draws.position, whole)
    assert gone.num_asked == 1
