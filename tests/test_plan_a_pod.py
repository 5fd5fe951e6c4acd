"""The planning demo finds what arithmetic says, and the mistake that was put in."""

import json

import pytest

CHAINS, MOVIES, DIMENSIONS, USERS = 2, 3706, 20, 100_000


@pytest.fixture(scope="module")
def run(run_quick_demo, tmp_path_factory):
    out = tmp_path_factory.mktemp("plan_a_pod")
    done = run_quick_demo("plan_a_pod", out)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((out / "summary.json").read_text()), out


def test_a_leapfrog_sends_the_movies_gradient_once_on_any_mesh(run):
    _, summary, _ = run
    assert summary["sizes"] == [64, 512]
    assert summary["all_reduces_per_leapfrog"] == [1, 1]
    assert summary["bytes_per_leapfrog"] == [CHAINS * MOVIES * DIMENSIONS * 4] * 2
    assert summary["all_gathers"] == 0


def test_a_device_holds_its_share_of_the_users_and_all_movies(run):
    """Cells, and of each chain the position and gradient; of the movies the terms of the prior too."""
    _, summary, _ = run
    for devices, held in zip(summary["sizes"], summary["argument_bytes"], strict=True):
        users = -(-USERS // devices)
        cells, latents = users * MOVIES, 2 * CHAINS * users * DIMENSIONS * 4
        movies = 3 * CHAINS * MOVIES * DIMENSIONS * 4
        assert held == pytest.approx(cells + latents + movies, rel=1e-3)


def test_the_data_set_that_is_whole_on_every_device_is_named(run):
    printed, summary, _ = run
    assert summary["mistaken_bytes"] > USERS * MOVIES
    assert "argument [0].target.plates[0].data uint8[100000, 3706]" in printed
    assert "not within budget" in printed


def test_the_prediction_is_called_one_and_drawn(run):
    printed, summary, out = run
    assert "PREDICTION" in printed
    assert summary["seconds_per_row"] > 0
    assert (out / "plan_a_pod.png").stat().st_size > 20_000
