"""Adversarial targets: is a sampler right, wrong with a warning, or wrong and silent?

The share of draws below exact quantiles is compared with their probabilities. A share is wrong if it is
off by more than 0.02 and 4.5 Monte Carlo standard errors, or by more than 0.1 whatever its error is. A
warning is one of `sample` or of the draws' summary; of NumPyro, what its summary shows: divergences,
R-hat over 1.01, or fewer effective draws than ours asks for.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gspmd_mcmc as gm
from gspmd_mcmc.diagnostics import advice
from gspmd_mcmc.diagnostics.ess import ess_mean
from validation.sections.adversarial_targets import (
    ADVERSARIES,
    FEW_CHAINS,
    MANY_CHAINS,
    Adversary,
    Values,
)

STEPS = {FEW_CHAINS: (1000, 1000), MANY_CHAINS: (500, 200)}  # of warm-up, and draws
QUICK = ("two modes, sd 1 and 0.02", "two modes that mix", "log density + 1e8, added up")
PROBABILITIES = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
NUM_EXACT = 400_000
LEAST_ERROR, GROSS_ERROR, LARGEST_Z = 0.02, 0.1, 4.5
RADIUS = 2.0  # of default starts


@dataclass(frozen=True)
class Verdict:
    """What draws are worth: the largest error of a share, where it is, and what was warned of."""

    error: float
    where: str
    is_right: bool
    warnings: tuple[str, ...]

    @property
    def is_silent_lie(self) -> bool:
        """Whether the answer is wrong and nothing says so."""
        return not self.is_right and not self.warnings

    def __str__(self) -> str:
        words = "right" if self.is_right else f"wrong ({self.where} by {self.error:.2f})"
        return (
            f"{words}, {'warned' if self.warnings else 'silent' if not self.is_right else 'no warning'}"
        )


def judge(found: Values, exact: Values, warned: Iterable[str]) -> Verdict:
    """Compare draws, name -> [chains, draws], with exact ones, name -> [draws]."""
    worst, where, is_right = 0.0, "", True
    for name, values in found.items():
        below = values[..., None] < np.quantile(exact[name], PROBABILITIES)
        errors = np.abs(np.where(np.isfinite(values).all(), below.mean(axis=(0, 1)), 1) - PROBABILITIES)
        # What never changes has no standard error: it is judged as if it had none.
        size = np.nan_to_num(
            np.asarray(ess_mean(jnp.asarray(below, jnp.float32)), np.float64), nan=np.inf
        )
        allowed = LEAST_ERROR + LARGEST_Z * np.sqrt(PROBABILITIES * (1 - PROBABILITIES) / size)
        is_right &= bool(np.all(errors < np.minimum(allowed, GROSS_ERROR)))
        if errors.max() > worst:
            worst, where = float(errors.max()), name
    return Verdict(worst, where, is_right, tuple(warned))


def by_ours(adversary: Adversary, num_chains: int, seed: int) -> Verdict:
    """Sample with all defaults, and judge."""
    target, (num_warmup, num_samples) = adversary.target(), STEPS[num_chains]
    position = adversary.origin
    if adversary.start is not None:
        position = gm.per_chain(adversary.start(np.random.default_rng(seed), num_chains))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gm.SamplingWarning)
        draws = gm.sample(
            jax.random.key(seed),
            target,
            position,
            num_chains=num_chains,
            num_warmup=num_warmup,
            num_samples=num_samples,
            progress=False,
        )
        warned = draws.summary().warnings
    said = [str(w.message) for w in caught if issubclass(w.category, gm.SamplingWarning)]
    return judge(adversary.read(draws.position), _exact(adversary), dict.fromkeys([*said, *warned]))


def by_numpyro(adversary: Adversary, seed: int) -> Verdict:
    """Sample with NumPyro's NUTS as it comes, four chains from the same starts, and judge."""
    from numpyro.infer import MCMC, NUTS

    num_warmup, num_samples = STEPS[FEW_CHAINS]
    density = adversary.density
    kernel = NUTS(adversary.model) if density is None else NUTS(potential_fn=_potential(density))
    run = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=FEW_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    starts = None if density is None else _starts(adversary, np.random.default_rng(seed))
    run.run(jax.random.key(seed), init_params=starts, extra_fields=("diverging",))
    draws = run.get_samples(group_by_chain=True)
    num_divergent = int(np.sum(run.get_extra_fields()["diverging"]))
    return judge(adversary.read(draws), _exact(adversary), _said_by_numpyro(draws, num_divergent))


def _potential(density: Callable) -> Callable:
    return lambda position: -sum(jnp.sum(term) for term in jax.tree.leaves(density(position)))


def _starts(adversary: Adversary, rng: np.random.Generator) -> Any:
    if adversary.start is not None:
        return adversary.start(rng, FEW_CHAINS)
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.uniform(-RADIUS, RADIUS, (FEW_CHAINS, *x.shape)), x.dtype),
        adversary.origin,
    )


def _said_by_numpyro(draws: Any, num_divergent: int) -> list[str]:
    """What its printed summary shows: R-hat and effective draws of each latent, divergences."""
    said = [f"{num_divergent} divergences"] if num_divergent else []
    leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(draws)]
    worst = max(float(jnp.max(jnp.nan_to_num(gm.rhat(x), nan=np.inf))) for x in leaves)
    least = min(float(jnp.min(gm.ess_bulk(x))) for x in leaves)
    if worst > advice.MOST_RHAT:
        said.append(f"R-hat {worst:.3f}")
    if not least >= advice.least_ess(FEW_CHAINS):
        said.append(f"ESS {least:.0f}")
    return said


def _exact(adversary: Adversary) -> Values:
    return adversary.exact(np.random.default_rng(1), NUM_EXACT)


def records(kernel_names: Iterable[str], quick: bool) -> list[dict[str, Any]]:
    """Sample every adversary with all defaults, 4 and 64 chains, and with NumPyro beside them."""
    rows = []
    for name in (QUICK if quick else ADVERSARIES) if "default" in kernel_names else ():
        rows += [record(name, n, s) for n in STEPS for s in ADVERSARIES[name]().seeds]
        jax.clear_caches()
    return rows


def record(name: str, num_chains: int, seed: int) -> dict[str, Any]:
    """Return one row: it fails if the answer is wrong and silent."""
    adversary = ADVERSARIES[name]()
    verdict = by_ours(adversary, num_chains, seed)
    peer = f"; NumPyro: {by_numpyro(adversary, seed)}" if num_chains == FEW_CHAINS else ""
    return {
        "section": "adversarial",
        "kernel": "default",
        "mesh": "1",
        "chains": num_chains,
        "what": f"{name}, seed {seed}: {verdict}{peer}",
        "value": verdict.error,
        "bound": GROSS_ERROR,
        "passed": not verdict.is_silent_lie,
        "right": verdict.is_right,
        "said": list(verdict.warnings),
    }
