"""Draws on disk: the store that a run writes, how it is read again, and locks of folders."""
