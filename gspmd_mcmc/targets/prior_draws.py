"""What a model's target remembers of its model: how to draw the latents from their prior.

It is kept on the object alone, and is no part of the pytree: no program of the sampler takes it, or the
arguments of the model that it holds.
"""

from typing import Any

from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.targets.posterior import Posterior

_NAME = "_prior_draw"


def with_prior(target: Posterior, draw: Partial) -> Posterior:
    """Return a copy of the target that remembers ``draw(rng_key) -> unconstrained latents by name``."""
    return tree.replace(target, **{_NAME: draw})


def prior_of(target: Any) -> Partial | None:
    """Return how to draw the latents, of a target that was made of a model; None of others."""
    return getattr(target, _NAME, None)


def cannot_draw(what: str, distribution: Any) -> ValueError:
    """Return the error of a distribution that has no draws."""
    return ValueError(
        f"prior_start: {what} has a distribution that cannot be drawn from, "
        f"{type(distribution).__name__}. Give it a proper prior, or start around a position: "
        "gspmd_mcmc.uniform_start(target.origin())"
    )
