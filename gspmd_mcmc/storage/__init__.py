"""Runs and draws on disk."""
