"""Runs that are ended at random moments, in processes of their own, lose no draw and double none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.survival import differences

ROOT = Path(__file__).resolve().parent.parent
KILLS, TERMS = 3, 2
SAVED = 75  # how a process ends that SIGTERM has reached in its run


def test_no_draw_is_lost_doubled_or_changed(tmp_path):
    out = tmp_path / "record.json"
    options = ["--kills", str(KILLS), "--terms", str(TERMS), "--seed", "1", "--out", str(out)]
    command = [sys.executable, "-W", "error", "-m", "benchmarks", "survival", *options]
    strict = os.environ | {"JAX_NUMPY_RANK_PROMOTION": "raise"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=strict, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert len(record["ends"]) == KILLS + TERMS
    assert all(not any(run.values()) for run in record["runs"])
    # Ends that all came before the first chunk, or after the last, would show nothing.
    assert len({end["draws"] for end in record["ends"]}) > 2
    assert SAVED in {end["code"] for end in record["ends"]}


X = {"x": np.arange(24.0).reshape(2, 6, 2), "lp": np.arange(12.0).reshape(2, 6)}


@pytest.mark.parametrize(
    ("order", "found"),
    [
        (range(5), {"missing": 1}),
        ([0, 1, 1, 2, 3, 4, 5], {"too_many": 1, "different": 4}),
        ([0, 1, 3, 4, 5, 5], {"different": 3}),
        (range(6), {}),
    ],
)
def test_the_comparison_sees_draws_that_are_missing_doubled_or_changed(order, found):
    report = differences({name: x[:, list(order)] for name, x in X.items()}, X)
    assert {name: value for name, value in report.items() if value} == found


def test_the_comparison_sees_arrays_of_other_lengths_and_missing_ones():
    assert differences({"x": X["x"], "lp": X["lp"][:, 1:]}, X) == {"lengths": [5, 6]}
    assert differences({"x": X["x"]}, X)["arrays_missing"] == ["lp"]
