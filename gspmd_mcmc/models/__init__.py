"""Models written elsewhere: NumPyro models, joint distributions, and distributions laid over a mesh."""
