"""Compiled programs: read, counted, compiled ahead of time."""
