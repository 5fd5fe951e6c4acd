"""The demo of a network over a mesh: its model, its layouts, its scores, and that it runs."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from seeds import seed, within

import gspmd_mcmc as gm

# The demos import each other as scripts of one folder do.
sys.path.append(str(Path(__file__).resolve().parent.parent / "demos"))

from demos import neural_network_model as model

SIZES = (12, 8, 8, 8, 4)
NUM_ROWS = 64


# The model


@pytest.fixture(scope="module")
def host():
    """Give parameters and a batch on the host."""
    rng = np.random.default_rng(0)
    image = rng.normal(size=(NUM_ROWS, SIZES[0])).astype(np.float32)
    label = rng.integers(SIZES[-1], size=NUM_ROWS)
    params = jax.device_get(model.init_params(jax.random.key(0), SIZES))
    return params, {"image": image, "label": label}


def test_the_loss_is_that_of_the_network_written_out_in_numpy(host):
    params, batch = host
    x = batch["image"].astype(np.float64)
    for layer in params[:-1]:
        x = np.maximum(x @ layer["w"] + layer["b"], 0)
    scores = x @ params[-1]["w"] + params[-1]["b"]
    odds = np.exp(scores)
    chosen = (odds / odds.sum(axis=1, keepdims=True))[np.arange(NUM_ROWS), batch["label"]]
    np.testing.assert_allclose(model.loss(params, batch), -np.log(chosen).mean(), rtol=1e-5)
    np.testing.assert_allclose(model.probabilities(params, batch["image"]).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.statistical
def test_the_prior_is_normal_and_parameters_are_drawn_from_it():
    init = jax.jit(model.init_params, static_argnums=1)
    params = jax.device_get(init(jax.random.key(seed(1)), (100, 50)))
    weights, biases = params[0]["w"], params[0]["b"]
    # Of 5,000 draws: four standard errors.
    within(abs(weights.var() / (2 / 100) - 1), 4 * np.sqrt(2 / 5000), "of the variance")
    log_prior = model.log_prior(params)
    np.testing.assert_allclose(log_prior[0]["w"], -(weights**2) / (2 * 0.02), rtol=1e-5)
    np.testing.assert_allclose(log_prior[0]["b"], -(biases**2) / 2, rtol=1e-5)


# The layouts


def test_inner_layers_lie_over_the_model_axis_by_columns_and_rows_in_turn():
    weights = [layer["w"] for layer in model.weight_specs(6)]
    columns, rows = P(None, "model"), P("model", None)
    assert weights == [P(), columns, rows, columns, rows, P()]
    assert [layer["b"] for layer in model.weight_specs(4)] == [P(), P("model"), P(), P()]


def test_weights_elsewhere_do_not_pass_for_laid_out(host):
    mesh = gm.make_mesh(data=4, model=2)
    params = gm.place(host[0], mesh, model.weight_specs(len(SIZES) - 1))
    assert model.lies_like(params, params)
    whole = jax.device_put(params[1]["w"], params[0]["w"].sharding)
    assert not model.lies_like([params[0], params[1] | {"w": whole}, *params[2:]], params)


# The scores


def confident(confidence, is_right):
    """Give predictions over 3 classes that name class 0, and labels; `is_right` says which are 0."""
    rest = (1 - np.asarray(confidence)) / 2
    return np.stack([confidence, rest, rest], axis=1), np.where(is_right, 0, 1)


def test_calibration_error_is_what_a_predictor_is_too_sure():
    found = model.reliability(*confident([0.8] * 10, [True] * 8 + [False] * 2))
    assert found.ece == pytest.approx(0, abs=1e-12)
    assert found.counts.sum() == 10 and np.count_nonzero(found.counts) == 1
    found = model.scores(*confident([0.9] * 10, [True] * 5 + [False] * 5))
    assert found["mean_confidence"] - found["accuracy"] == pytest.approx(0.4)


def test_a_bin_holds_its_upper_edge():
    found = model.reliability(*confident([0.5, 0.75, 1.0], [True, True, False]), num_bins=4)
    np.testing.assert_array_equal(found.counts, [0, 1, 1, 1])
    np.testing.assert_array_equal(found.confidence, [np.nan, 0.5, 0.75, 1.0])
    np.testing.assert_array_equal(found.accuracy, [np.nan, 1.0, 1.0, 0.0])


def test_log_scores_and_gains_by_hand():
    predicted, labels = np.array([[0.5, 0.5], [0.2, 0.8]]), np.array([0, 1])
    other = np.array([[0.25, 0.75], [0.2, 0.8]])
    np.testing.assert_allclose(model.log_scores(predicted, labels), np.log([0.5, 0.8]))
    found = model.gain(predicted, other, labels)
    assert found["log_score_gain"] == pytest.approx(np.log(2) / 2)
    # The differences are log 2 and 0: sd log 2 / sqrt(2), over sqrt(2) rows.
    assert found["log_score_se"] == pytest.approx(np.log(2) / 2)
    assert (found["accuracy_gain"], found["accuracy_se"]) == (0.5, 0.5)
    certain = model.log_scores(np.array([[0.0, 1.0]]), np.array([0]))
    assert np.isfinite(certain).all() and certain[0] < -80


# The demo


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_quick_demo):
    """Give the folder of a quick run, on the digits that stand in for MNIST offline."""
    out = tmp_path_factory.mktemp("neural_network")
    done = run_quick_demo("neural_network", out)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_the_demo_is_the_same_on_all_layouts(results):
    summary = json.loads((results / "summary.json").read_text())
    assert (summary["devices"], summary["mesh"]) == (8, {"data": 4, "model": 2})
    assert (summary["data"], summary["sizes"]) == ("digits", [64, 64, 64, 64, 10])
    assert summary["rows"] == 1024
    assert [row["layout"] for row in summary["layouts"]] == ["1 device", "8x1", "4x2"]
    for row in summary["layouts"]:
        assert row["kept"] and row["loss_error"] < 1e-5 and row["grad_error"] < 1e-5
        assert row["sgd_loss"] < row["loss"]
        assert row["sgd_loss"] == pytest.approx(summary["layouts"][0]["sgd_loss"], rel=1e-4)
    assert [(row["data_sums"], row["model_sums"]) for row in summary["layouts"]] == [
        (0, 0),
        (1, 0),
        (1, 2),
    ]


def test_the_demo_plans_the_tutorials_size(results):
    summary = json.loads((results / "summary.json").read_text())
    whole, cut = summary["tutorial_size"]
    inner, outer = 8192 * 8192 * 4 / 1e9, (784 + 10) * 8192 * 4 / 1e9
    batch = 8192 * 785 * 4 / 1e9
    biases = 4e-4  # at most
    assert whole["argument_GB"] == pytest.approx(2 * inner + outer + batch / 8, abs=biases)
    assert cut["argument_GB"] == pytest.approx(inner + outer + batch / 4, abs=biases)
    # Besides the gradient, 4x2 sums the activations of a device's 2,048 rows, forward and backward.
    assert whole["GB"] == pytest.approx(2 * inner + outer, abs=biases)
    assert cut["GB"] == pytest.approx(inner + outer + 2 * 2048 * 8192 * 4 / 1e9, abs=biases)


def test_the_demo_samples_on_the_mesh_and_scores_what_it_drew(results):
    summary = json.loads((results / "summary.json").read_text())
    by_target = {row["target"]: (row["data_sums"], row["model_sums"]) for row in summary["targets"]}
    # Four blocks of 256 rows, so two tiles of 128.
    assert by_target == {"LogDensity": (1, 2), "Plate, 128 rows": (1, 4)}
    assert summary["target"] == "LogDensity"
    assert summary["layout_kept"] and summary["largest_constant_bytes"] < 1e4
    assert summary["num_divergent"] == 0 and summary["acceptance_rate"] > 0.3
    names = ["maximum likelihood", "mode (MAP)", "HMC ensemble", "one draw, on average"]
    scores = {row["prediction"]: row for row in summary["scores"]}
    assert list(scores) == names
    # Guessing would be right in a tenth, and have a log score of -2.3.
    assert min(row["accuracy"] for row in scores.values()) > 0.7
    assert min(row["log_score"] for row in scores.values()) > -1.5
    # The log of an average is at least the average of the logs, image by image (Jensen).
    assert scores["HMC ensemble"]["log_score"] >= scores["one draw, on average"]["log_score"]
    against = summary["gains"][1]["log_score_gain"]
    difference = scores["HMC ensemble"]["log_score"] - scores["mode (MAP)"]["log_score"]
    assert against == pytest.approx(difference, abs=1e-9)
    assert (results / "neural_network.png").stat().st_size > 50_000
