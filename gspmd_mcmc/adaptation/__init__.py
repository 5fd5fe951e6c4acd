"""Warm-up: how a kernel is tuned, as pure init/update/final over states that a driver runs."""
