"""R-hat, effective sample sizes, Monte Carlo errors, quantiles, and a summary with warnings.

Draws are trees of arrays [chains, draws, ...]. The axes after the first two are columns: each is judged
separately, on the device that holds it, and results [...] are laid out as the columns are. All of it is
plain JAX, to be called directly or inside a program of your own. The streaming forms serve runs that
are too long to store.
"""
