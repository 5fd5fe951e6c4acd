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
MNIST_KEYS = {
    *("devices", "mesh", "data", "rows", "num_chains", "num_warmup", "num_samples", "mode_accuracy"),
    *("average_accuracy", "bma_accuracy", "acceptance_rate", "num_divergent", "rhat_log_density"),
    *("step_size", "leapfrogs", "leapfrogs_per_second", "compile_seconds"),
    *(
        "all_reduces_per_leapfrog",
        "all_gathers",
        "largest_constant_bytes",
        "peak_rss_mb",
        "wall_seconds",
    ),
}

PREDICTIONS = ("bma", "single", "mode", "popularity")
MOVIELENS_KEYS = {
    *("devices", "mesh", "data", "users", "movies", "num_chains", "num_warmup", "num_samples"),
    *("acceptance_rate", "num_divergent", "energy_error_sd", "leapfrogs", "leapfrogs_per_second"),
    *("step_size", "compile_seconds", "collectives_of_choices", "distinct_recommended_most"),
    *("distinct_recommended_least", "watched_by_decile", "entropy_by_watched", "entropy_by_decile"),
    *("hit_rate_by_entropy", "expected_hit_rate_by_entropy", "hit_rate_error_by_entropy"),
    *("all_reduces_per_leapfrog", "all_reduce_bytes_per_leapfrog", "all_gathers"),
    *("peak_temp_mb_per_device", "peak_rss_mb", "rhat_log_density", "rhat_logit_median"),
    *("rhat_logit_max", "rhat_bias_max", "recommendations_most", "recommendations_least"),
    "wall_seconds",
}
SCORES = {f"{score}_{name}" for score in ("recall_at_20", "heldout_log_lik") for name in PREDICTIONS}


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
    assert set(summary) == MNIST_KEYS
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
    assert set(summary) == MOVIELENS_KEYS | SCORES
    assert (summary["data"], summary["devices"], summary["users"]) == ("synthetic", 4, 1001)
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    # The gradient of what users share, of both chains: embeddings and biases of 600 movies.
    assert summary["all_reduce_bytes_per_leapfrog"] == 2 * 600 * (20 + 1) * 4
    assert summary["recall_at_20_mode"] > summary["recall_at_20_popularity"]
    assert summary["heldout_log_lik_mode"] > summary["heldout_log_lik_popularity"]
    assert len(summary["recommendations_least"]) == 20
    assert summary["collectives_of_choices"] == 0
    assert 1 <= summary["distinct_recommended_most"] <= 8  # draws
    for name in ("entropy_by_watched", "hit_rate_by_entropy"):
        assert len(summary[name]) == 10, name
    assert all(0 <= entropy <= np.log(8) + 1e-9 for entropy in summary["entropy_by_watched"])
    assert "The catalogue has no genres" in done.stdout
    assert "has no titles" not in done.stdout
    assert (tmp_path / "movielens.png").stat().st_size > 50_000


def test_movielens_of_the_notebook_on_files_without_titles_and_genres(tmp_path):
    """With --paper no cell is hidden, and chains start at draws of the prior."""
    watched = np.random.default_rng(0).random((48, 30)) < 0.4
    watched[:2], watched[:, 0] = [[1] * 30, [1] + [0] * 29], True
    ratings = "".join(f"{i + 1}::{j + 1}::5::0\n" for i, j in zip(*np.nonzero(watched), strict=True))
    (tmp_path / "ratings.dat").write_text(ratings)
    (tmp_path / "movies.dat").write_text("".join(f"{j + 1}::::\n" for j in range(30)))
    options = ("--paper", "--quick", "--devices", "2", "--any-size", "--data-dir", str(tmp_path))
    done = run_demo("movielens", tmp_path, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert "The catalogue has no titles" in said and "The catalogue has no genres" in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == MOVIELENS_KEYS
    assert (summary["users"], summary["leapfrogs"]) == (48, 100 * (2 + 2 + 4))
    assert summary["hit_rate_by_entropy"] == [None] * 10
    assert summary["recommendations_least"][0]["title"].startswith("movie ")
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
