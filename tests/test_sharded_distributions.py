"""The demo of `Sharded` and joint distributions: the notebook's figures, and the exact posterior."""

import json

import numpy as np

KEYS = {
    *("devices", "mesh", "sharded_log_prob", "sharded_collectives", "sample_differences_by_devices"),
    *("gradient_errors_by_devices", "joint_log_probs", "rows", "num_chains", "num_warmup"),
    *("num_samples", "all_reduces_per_leapfrog", "all_gathers", "largest_constant_bytes", "truth"),
    *("posterior_mean", "exact_posterior_mean", "errors_in_mcse", "level_coverage_90"),
    *("acceptance_rate", "num_divergent", "peak_rss_mb", "wall_seconds"),
}


def test_the_notebooks_figures_and_the_exact_posterior(run_quick_demo, tmp_path):
    """To the bit where it says 0, so compiled as a user's."""
    done = run_quick_demo("sharded_distributions", tmp_path, as_a_users=True)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == KEYS
    assert (summary["devices"], summary["mesh"]) == (8, {"data": 8})
    assert abs(summary["sharded_log_prob"] - -13.7349205) < 5e-6
    np.testing.assert_allclose(list(summary["joint_log_probs"].values()), [-12.214451] * 3, atol=5e-6)
    assert set(summary["sample_differences_by_devices"].values()) == {0}
    assert max(summary["gradient_errors_by_devices"].values()) < 1e-6
    assert summary["sharded_collectives"] == ["all-reduce of 4 bytes"]
    assert (summary["all_reduces_per_leapfrog"], summary["all_gathers"]) == (1, 0)
    # Three numbers: 3.9 leaves a false alarm in 1 of 3,000; of 203 intervals 0.08 is 3.8 errors.
    assert max(abs(error) for error in summary["errors_in_mcse"].values()) < 3.9
    assert abs(summary["level_coverage_90"] - 0.9) < 0.08
    assert summary["acceptance_rate"] > 0.6 and summary["num_divergent"] == 0
    assert (tmp_path / "sharded_distributions.png").stat().st_size > 50_000
