"""Start chains at draws from the prior of a model."""

from typing import Any

import jax
from jax.tree_util import Partial

from gspmd_mcmc.functions.function import as_partial
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import PyTree


@on_any_mesh
def prior_start(target: Any) -> Partial:
    """Start each chain at a draw of the latents from their prior.

    Draws are retried until the log density is finite (`sample`). They spread chains as widely as the
    prior does: of a vague one that is far from the posterior, and warm-up takes longer. A latent
    behind an observed site is drawn given the observation.

    Parameters
    ----------
    target
        Made by `from_numpyro`, or by ``condition`` of a joint distribution.

    Returns
    -------
    Partial
        ``start(rng_key) -> position`` of one chain, unconstrained, for `sample`'s
        ``initial_position``; the same values on every mesh. Latents of rows are laid out with those.

    Raises
    ------
    TypeError
        If the target was written as functions, which have no prior to draw from.
    ValueError
        If a distribution of the model, such as an improper one, cannot be drawn from.
    """
    if not isinstance(target, Target) or target.prior is None:
        raise TypeError(
            "prior_start: expected a target made by from_numpyro or by condition of a joint "
            f"distribution, got {type(target).__name__}, which was written as functions and has no "
            "prior to draw from. Pass sample a function rng_key -> position of your own, or "
            "gspmd_mcmc.uniform_start(position)"
        )
    start = as_partial(Partial(_start, target.prior.draw))
    jax.eval_shape(start, jax.random.key(0))
    return start


def _start(draw: Partial, rng_key: jax.Array) -> PyTree:
    return draw(rng_key)
