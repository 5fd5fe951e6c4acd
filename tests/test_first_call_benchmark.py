"""The benchmark of first calls: what it counts, its medians, and that a failure is told."""

import pytest

from benchmarks import first_call
from benchmarks.contenders import first_calls

QUICK = {"num_warmup": 10, "num_samples": 8, "max_tree_depth": 2}
TASK = {"model": "german_credit", "chains": 2, "data_dir": None, "contender": "ours"} | QUICK


def test_a_first_call_compiles_and_both_calls_are_timed():
    found = first_calls.main(TASK)
    assert found["programs"] > 0
    assert found["first_s"] > 0
    assert found["second_s"] > 0


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
