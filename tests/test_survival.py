"""Runs that are killed at random moments, in processes of their own, lose no draw and double none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KILLS = {"KILL": 8, "TERM": 3}
SAVED = 75  # how a process ends that SIGTERM has reached in its run


@pytest.mark.parametrize("name", KILLS)
def test_no_draw_is_lost_doubled_or_changed(name, tmp_path):
    out = tmp_path / "record.json"
    options = ["--kills", str(KILLS[name]), "--signal", name, "--seed", "1", "--out", str(out)]
    command = [sys.executable, "-W", "error", "-m", "benchmarks", "survival", *options]
    strict = os.environ | {"JAX_NUMPY_RANK_PROMOTION": "raise"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=strict, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert len(record["kills"]) == KILLS[name]
    assert all(not any(run.values()) for run in record["runs"])
    # Some of them hit the run itself: a test whose kills all came before would see nothing.
    if name == "KILL":
        assert len({kill["draws"] for kill in record["kills"]}) > 2
    else:
        assert SAVED in {kill["code"] for kill in record["kills"]}
