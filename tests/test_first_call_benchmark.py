"""The benchmark of first calls: what it counts, its medians, and that a failure is told."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import compile as first_call
from benchmarks.contenders import first_calls

QUICK = {"num_warmup": 10, "num_samples": 8, "max_tree_depth": 2}
TASK = {"model": "german_credit", "chains": 2, "data_dir": None, "contender": "ours"} | QUICK


@pytest.mark.parametrize("contender", ["ours", "numpyro"])
def test_a_contender_runs_twice_and_its_first_call_compiles(contender):
    assert first_calls.main(TASK | {"contender": contender})["programs"] > 5


def test_calls_are_timed_apart_and_the_programs_of_the_first_are_counted(monkeypatch):
    """Building takes 100 s on this clock, the calls 7 and 2; the first compiles two programs."""
    clock, calls = [0.0], []

    def contender():
        def call(problem, task):
            clock[0] += 100

            def run(key):
                calls.append(key)
                clock[0] += (7, 2)[len(calls) - 1]
                for size in (1001, 1002) if len(calls) == 1 else (1003,):
                    jax.jit(lambda x: 3 * x)(np.zeros(size, np.float32))

            return run

        return call

    monkeypatch.setitem(first_calls.CONTENDERS, "fake", contender)
    monkeypatch.setattr(first_calls, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    jax.random.key(0).block_until_ready()  # no program of a contender's
    found = first_calls.main(TASK | {"contender": "fake"})
    assert found == {"first_s": 107, "second_s": 2, "programs": 2}
    assert [jax.random.key_data(key)[1] for key in calls] == [0, 1]


def test_medians_are_over_rounds_and_leave_out_who_failed():
    def record(contender, first, **more):
        times = {"first_s": first, "second_s": 1.0, "programs": 3, "cached_s": first / 2}
        return {"model": "arK", "contender": contender} | times | more

    records = [record("ours", x) for x in (2.0, 9.0, 4.0)]
    records += [record("numpyro", 1.0), {"model": "arK", "contender": "numpyro", "error": "died"}]
    assert first_call.medians(records) == {
        ("arK", "ours"): {"first_s": 4.0, "programs": 3, "second_s": 1.0, "cached_s": 2.0}
    }


def test_a_failure_is_recorded_with_its_cause(monkeypatch):
    monkeypatch.setitem(first_call.BUDGETS, "arK", QUICK)
    assert "/no/such/folder is none" in first_call.run("arK", "ours", "/no/such/folder")["error"]


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        first_call.main(["--models", "nine_schools"])
    assert "'nine_schools' is not one of eight_schools" in capsys.readouterr().err
