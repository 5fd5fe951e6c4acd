"""Likelihoods whose gradient is one kernel on a chip: logits and residuals never leave it."""
