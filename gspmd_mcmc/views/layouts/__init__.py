"""Layouts of the leaves of a tree: read, and drawn as text, HTML and figures."""
