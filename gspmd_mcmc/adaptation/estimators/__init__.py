"""Estimators of the inverse mass matrix: what warm-up learns from the draws."""
