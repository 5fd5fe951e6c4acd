"""Layouts of a tree: read, put in words, and drawn as text, HTML and figures."""
