"""Is the run to be trusted: R-hat, effective sample sizes, Monte Carlo errors, where the draws lie.

Draws are trees of arrays [chains, draws, ...]. The axes after the first two are columns: each is judged
alone, on the device that holds it, and results [...] lie as the columns do. All of it is plain JAX, to
be called as it is or inside a program of one's own. The streaming forms judge runs too long to keep.
"""
