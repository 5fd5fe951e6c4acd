"""The demos run as a user runs them, and write what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# Nothing listens there: the mirrors are out of reach, and the offline default is used.
NO_NETWORK = {"https_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}


def run_demo(name: str, out: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "GSPMD_MCMC_DATA"}
    environment |= NO_NETWORK | {"XDG_CACHE_HOME": str(out / "cache")}
    command = [sys.executable, str(ROOT / "demos" / f"{name}.py"), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def test_mnist_logistic_offline(tmp_path):
    done = run_demo("mnist_logistic", tmp_path, "--quick", "--devices", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "digits" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["data"], summary["devices"], summary["rows"]) == ("digits", 4, 1437)
    assert summary["bma_accuracy"] > 0.95
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    assert (tmp_path / "mnist_logistic.png").stat().st_size > 50_000


def test_a_folder_without_the_data_is_an_error(tmp_path):
    done = run_demo("mnist_logistic", tmp_path, "--quick", "--data-dir", str(tmp_path / "none"))
    assert done.returncode != 0
    assert "none" in done.stderr
    assert not (tmp_path / "summary.json").exists()


def test_movielens_offline_on_uneven_rows(tmp_path):
    done = run_demo("movielens", tmp_path, "--quick", "--devices", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "synthetic" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["data"], summary["devices"], summary["users"]) == ("synthetic", 4, 1001)
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    # The gradient of what users share, of both chains: embeddings and biases of 600 movies.
    assert summary["all_reduce_bytes_per_leapfrog"] == 2 * 600 * (20 + 1) * 4
    assert summary["recall_at_20_mode"] > summary["recall_at_20_popularity"]
    assert summary["heldout_log_lik_mode"] > summary["heldout_log_lik_popularity"]
    assert len(summary["recommendations_least"]) == 20
    assert (tmp_path / "movielens.png").stat().st_size > 50_000


def test_movielens_on_two_processes(tmp_path):
    done = run_demo("multi_host", tmp_path, "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["processes"], summary["devices"], summary["users"]) == (2, 8, 1001)
    # 1,001 users fill eight devices with 126 each, of which the last seven are pad.
    assert np.allclose(summary["cells_mb_by_process"], 4 * 126 * 600 / 1e6)
    assert summary["acceptance_rate"] > 0.1
    assert (tmp_path / "multi_host.png").stat().st_size > 20_000
