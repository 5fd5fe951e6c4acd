"""What is suspicious about a run, before it and after, in plain words."""

import warnings

import jax
import numpy as np

from gspmd_mcmc.diagnostics import advice
from gspmd_mcmc.errors import SamplingWarning
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.run import Plan
from gspmd_mcmc.sampling.run_state import keep_position
from gspmd_mcmc.targets.resolution import on_coarse_terms, on_rounded_bijections
from gspmd_mcmc.targets.target import Target

# A logistic regression of 0.8 MB took 2.1 times as long on 2 virtual CPU devices as on one, and 2.5 on
# 8; of 8 MB as long, of 8 kB 3.6 and 14.5 times.
LEAST_BYTES = 1 << 20


def warn_of_small_data(target: Target) -> None:
    """Warn where rows on several devices are so few that one of them would be faster.

    A large plate pays for small ones beside it.
    """
    spread = [plate for plate in target.plates if plate.rows.num_blocks > 1]
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves([p.data for p in spread]))
    if spread and num_bytes < LEAST_BYTES:
        warnings.warn(
            f"small data on many devices: {' and '.join(map(str, spread))}, {num_bytes / 1e6:.2f} MB "
            f"of rows on {spread[0].rows.num_blocks} devices. If their terms are as cheap as a "
            "regression's, each gradient waits for the devices longer than one of them takes for all "
            "rows. Lay chains over the mesh, make_mesh(chains=...), or take one device",
            SamplingWarning,
            stacklevel=4,
        )


def warn_of(draws: Draws, plan: Plan) -> None:
    """Say in plain words what is suspicious about a run."""
    if draws.num_draws < plan.num_samples:
        message = f"stopped after {draws.num_draws} of {plan.num_samples} draws"
        warnings.warn(message, SamplingWarning, stacklevel=4)
    if not draws.num_draws:
        return
    names = ("acceptance_rate", "is_divergent", "log_density")
    stats = {name: np.asarray(draws.stats[name]) for name in names}
    values = draws.position if plan.collect.func is keep_position else None
    found = (
        advice.on_acceptance(stats),
        advice.on_divergences(stats),
        advice.on_arrivals(stats["log_density"]),
        advice.on_moves(draws.moves, draws.num_chains),
        on_coarse_terms(draws.kernel.target, draws.state),
        on_rounded_bijections(draws.kernel.target, values),
    )
    for warning in found:
        if warning:
            warnings.warn(warning, SamplingWarning, stacklevel=4)
