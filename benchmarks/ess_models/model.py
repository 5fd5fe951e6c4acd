"""What a model is to the benchmark, and the terms that several models share.

A model is plain JAX on an unconstrained position: its Jacobian is among its terms. Nothing of this
package is imported here, so that peers run the very same functions in their own environment.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
START_RADIUS, MAX_TRIES = 2.0, 100
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Budget:
    """How long a run is: chains, steps of warm-up, draws of each chain."""

    chains: int
    num_warmup: int
    num_samples: int


FEW = Budget(4, 1000, 1000)
MANY = Budget(64, 500, 200)


@dataclass(frozen=True)
class Form:
    """A likelihood rearranged for peers: what it reads, and the sum over all rows."""

    arrange: Callable[[Arrays], Arrays]
    log_likelihood: Callable[[Any, Any], jax.Array]


@dataclass(frozen=True)
class Model:
    """A posterior on an unconstrained position.

    Attributes
    ----------
    name, about
        As on the command line; what it is, in a few words.
    load
        ``load(data_dir)`` -> the arrays that it reads. Simulated data come of a fixed seed.
    shapes
        ``shapes(data)`` -> name of each latent to its shape.
    log_prior
        ``log_prior(params)`` -> summands of the latents that rows share; None of a model without rows.
    log_likelihood
        ``log_likelihood(params, rows)`` -> one term a row, shape [rows], priors of local latents among
        them. Of a model without rows: ``(params, data)`` -> summands of the whole log density.
    local
        Latents with one row for each row of data.
    peers
        The likelihood in the form that is fastest for peers, where that is another.
    few, many
        The budgets of samplers of a few chains, and of those that tune many together.
    start_radius
        Chains start uniformly within this distance of the origin in each coordinate.
    rotations
        ``rotations(data)`` -> what `gspmd_mcmc.Rotated` takes, where the data tell of such axes.
    data_set
        ``"mnist"`` or ``"posteriordb"`` where ``load`` reads files of it.
    left_out
        Contenders that a run without ``--contenders`` leaves out, for its time.
    """

    name: str
    about: str
    load: Callable[[str | None], Arrays]
    shapes: Callable[[Arrays], dict[str, tuple[int, ...]]]
    log_prior: Callable[[Any], Any] | None
    log_likelihood: Callable[[Any, Any], Any]
    local: tuple[str, ...] = ()
    peers: Form | None = None
    few: Budget = FEW
    many: Budget = MANY
    start_radius: float = START_RADIUS
    rotations: Callable[[Arrays], dict[str, tuple[np.ndarray | None, ...]]] | None = None
    data_set: str = ""
    left_out: tuple[str, ...] = ()

    def log_density(self, params: Any, data: Any) -> jax.Array:
        """Return the log density of everything at once, a scalar."""
        terms = self.log_likelihood(params, data)
        prior = () if self.log_prior is None else self.log_prior(params)
        return _total(prior) + _total(terms)

    def for_peers(self, data: Arrays) -> tuple[Callable[[Any, Any], jax.Array], Arrays]:
        """Return the log density that peers sample, and the arrays that it reads."""
        if self.peers is None or self.log_prior is None:
            return self.log_density, data
        log_prior, log_likelihood = self.log_prior, self.peers.log_likelihood

        def log_density(params, data):
            return _total(log_prior(params)) + log_likelihood(params, data)

        return log_density, self.peers.arrange(data)

    def start(self, data: Arrays, chains: int, seed: int) -> Arrays:
        """Return the positions [chains, ...] at which all contenders start.

        A start where the density of ours or of the peers, or its gradient, is not finite is drawn
        again, for all contenders alike.
        """
        rng, radius = np.random.default_rng(seed), self.start_radius
        found: Arrays = {}
        is_bad = np.ones(chains, bool)
        for _ in range(MAX_TRIES):
            for name, shape in self.shapes(data).items():
                drawn = rng.uniform(-radius, radius, (chains, *shape)).astype(np.float32)
                found[name] = np.where(_like(is_bad, drawn), drawn, found.get(name, drawn))
            is_bad = ~self._are_finite(found, data)
            if not is_bad.any():
                return found
        raise ValueError(f"{self.name}: {is_bad.sum()} of {chains} starts have no finite log density")

    def _are_finite(self, positions: Arrays, data: Arrays) -> np.ndarray:
        """Tell of each chain's position whether every contender's density and gradient are finite."""
        forms = [(self.log_density, data)] + ([self.for_peers(data)] if self.peers else [])
        return np.all([_finite(*form, positions) for form in forms], axis=0)


def _like(flags: np.ndarray, array: np.ndarray) -> np.ndarray:
    return flags.reshape(-1, *(1,) * (array.ndim - 1))


def _finite(log_density: Callable, data: Arrays, positions: Arrays) -> np.ndarray:
    """Tell of each position [chains, ...] whether a density and its gradient are finite there."""

    @jax.jit
    def are_finite(positions, data):
        def is_finite(position):  # one at a time: rows times chains may not fit
            leaves = jax.tree.leaves(jax.value_and_grad(log_density)(position, data))
            return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))

        return jax.lax.map(is_finite, positions)

    with jax.numpy_rank_promotion("allow"):
        return np.asarray(are_finite(positions, data))


def _total(terms: Any) -> jax.Array:
    return sum((jnp.sum(term) for term in jax.tree.leaves(terms)), start=jnp.zeros(()))


def single(arrays: Mapping[str, Any]) -> Arrays:
    """Return float arrays in single precision; others as they are."""
    return {
        name: np.asarray(x, np.float32 if np.asarray(x).dtype.kind == "f" else None)
        for name, x in arrays.items()
    }


def normal(x: jax.Array, mean: Any = 0.0, sd: Any = 1.0) -> jax.Array:
    """Log density of a normal distribution."""
    return -0.5 * ((x - mean) / sd) ** 2 - jnp.log(sd) - HALF_LOG_TWO_PI


def half_normal(x: jax.Array, sd: float) -> jax.Array:
    """Log density of the size of a centred normal variable, at x > 0."""
    return normal(x, 0.0, sd) + math.log(2)


def half_cauchy(x: jax.Array, scale: float) -> jax.Array:
    """Log density of the size of a centred Cauchy variable, at x > 0."""
    return math.log(2 / (math.pi * scale)) - jnp.log1p((x / scale) ** 2)


@jax.custom_jvp
def bernoulli(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Log probability of labels, zeros and ones, under sigmoid(logits).

    Its derivative is written down, so that a gradient does not pay for the value: all contenders gain.
    """
    return labels * logits - jnp.maximum(logits, 0) - jnp.log1p(jnp.exp(-jnp.abs(logits)))


@bernoulli.defjvp
def _(primals, tangents):
    logits, labels = primals
    return bernoulli(logits, labels), (labels - jax.nn.sigmoid(logits)) * tangents[0]
