"""How to draw the latents of a model from their prior: beside its target, no part of its programs."""

from dataclasses import dataclass
from typing import Any

from jax.tree_util import Partial

from gspmd_mcmc import tree
from gspmd_mcmc.targets.posterior import Posterior


@dataclass(frozen=True, eq=False)
class PriorDraw:
    """``draw(rng_key) -> unconstrained latents by name``, as metadata of a target.

    All of them are equal: no program of the sampler takes one, or the arguments of the model that it
    holds, so that equal models share programs.
    """

    draw: Partial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PriorDraw)

    def __hash__(self) -> int:
        return hash(PriorDraw)


def with_prior(target: Posterior, draw: Partial) -> Posterior:
    """Return a copy of the target that tells how its latents are drawn."""
    return tree.replace(target, prior=PriorDraw(draw))


def cannot_draw(what: str, distribution: Any) -> ValueError:
    """Return the error of a distribution that has no draws."""
    return ValueError(
        f"prior_start: {what} has a distribution that cannot be drawn from, "
        f"{type(distribution).__name__}. Give it a proper prior, or start around a position: "
        "gspmd_mcmc.uniform_start(target.origin())"
    )
