"""All that a summary says of each column, from one program: draws are put in order once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gspmd_mcmc.diagnostics.columns import per_leaf
from gspmd_mcmc.diagnostics.ess import column_sizes
from gspmd_mcmc.diagnostics.mcse import column_mcse_mean, column_mcse_sd, column_mean, column_sd
from gspmd_mcmc.diagnostics.quantiles import column_quantile
from gspmd_mcmc.diagnostics.rhat import column_rhat, column_rhat_beyond_noise
from gspmd_mcmc.tree import PyTree

COPIES = 28  # see `per_leaf`


class Statistics(NamedTuple):
    """Statistics of columns, each a tree like the draws with leaves [...]; q5, q95 are quantiles.

    ``spacings`` is the standard deviation in distances of floating-point numbers of the mean's size;
    infinite of draws that are all equal.
    """

    mean: PyTree
    sd: PyTree
    mcse_mean: PyTree
    mcse_sd: PyTree
    q5: PyTree
    q95: PyTree
    ess_bulk: PyTree
    ess_tail: PyTree
    rhat: PyTree
    rhat_beyond_noise: PyTree
    spacings: PyTree


def statistics(draws: PyTree) -> Statistics:
    """Compute the `Statistics` of draws, a tree with leaves [chains, draws, ...]."""
    found = per_leaf(column_statistics, draws, copies=COPIES)
    inner = jax.tree.structure(Statistics(*range(len(Statistics._fields))))
    return jax.tree.transpose(jax.tree.structure(draws), inner, found)


def column_statistics(x: jax.Array) -> Statistics:
    """Statistics [...] of draws [chains, draws, ...]."""
    mean, sd, sizes = column_mean(x), column_sd(x), column_sizes(x)
    spacing = jnp.abs(mean) * jnp.finfo(x.dtype).eps
    return Statistics(
        mean=mean,
        sd=sd,
        mcse_mean=column_mcse_mean(x, sizes.mean),
        mcse_sd=column_mcse_sd(x, sizes.sd),
        q5=column_quantile(x, 0.05),
        q95=column_quantile(x, 0.95),
        ess_bulk=sizes.bulk,
        ess_tail=sizes.tail,
        rhat=column_rhat(x),
        rhat_beyond_noise=column_rhat_beyond_noise(x),
        spacings=jnp.where(sd > 0, sd / spacing, jnp.inf),
    )
