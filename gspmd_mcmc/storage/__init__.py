"""Runs and draws on disk: stores, checkpoints, and locks of folders."""
