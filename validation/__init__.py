"""Whether the samplers are right: posteriors with reference draws, calibration, hard targets."""
