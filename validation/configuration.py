"""What a row of the validation is: one posterior sampled one way, and its record."""

import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gspmd_mcmc as gm
from gspmd_mcmc.tree import PyTree
from validation.judge import Reference, judge
from validation.kernels import SETTINGS
from validation.posteriors.model import Model

MESHES = {"1": None, "2x4": {"chains": 2, "data": 4}}
NUM_SUPERCHAINS = 8
RADIUS = 2.0  # of the uniform starts, as `sample` and Stan have it
SEED = 0


@dataclass(frozen=True)
class Configuration:
    """One row: a posterior, a kernel, a mesh, a number of chains, a precision.

    ``mesh`` is "1" (one device) or "2x4" (chains x data); ``dtype`` "float32" or "float64".
    """

    posterior: str
    kernel: str
    mesh: str
    chains: int
    dtype: str
    num_warmup: int
    num_samples: int

    @property
    def num_superchains(self) -> int | None:
        """Groups of chains that start at one point each; None for few, long chains."""
        return NUM_SUPERCHAINS if self.chains > 2 * NUM_SUPERCHAINS else None

    def __str__(self) -> str:
        chains = f"{self.chains} chains"
        return f"{self.posterior}, {self.kernel}, mesh {self.mesh}, {chains}, {self.dtype}"


def run(
    configuration: Configuration,
    model: Model,
    data: Mapping[str, Any],
    reference: Reference,
    largest_z: float,
) -> dict[str, Any]:
    """Sample and judge; return the record of a row, ready for JSON."""
    setting = SETTINGS[configuration.kernel]
    axes = MESHES[configuration.mesh]
    mesh = None if axes is None else gm.make_mesh(**axes)
    target = model.target(data, mesh, np.dtype(configuration.dtype))
    arguments = setting.arguments(target)
    start = _start(configuration, target, model.initial_position(data, np.dtype(configuration.dtype)))
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draws = gm.sample(
            jax.random.key(SEED),
            target,
            start,
            mesh=mesh,
            num_chains=configuration.chains,
            num_warmup=configuration.num_warmup * setting.thin,
            num_samples=configuration.num_samples,
            thin=setting.thin,
            progress=False,
            **arguments,
        )
        jax.block_until_ready(draws.position)
    seconds = time.perf_counter() - began
    verdict = judge(
        model.parameters(draws.position),
        reference,
        largest_z,
        bounds=setting.bounds,
        num_superchains=configuration.num_superchains,
    )
    said = sorted({str(w.message) for w in caught if issubclass(w.category, gm.SamplingWarning)})
    return {**asdict(verdict), **_work(draws), "seconds": seconds, "warnings": said}


def _work(draws: gm.Draws) -> dict[str, Any]:
    """Return what a run took: counts over all chains."""
    stats = draws.stats
    return {
        "leapfrogs": int(np.asarray(stats["num_integration_steps"], np.int64).sum()),
        "warmup_leapfrogs": int(np.sum(np.asarray(draws.warmup["leapfrogs"], np.int64))),
        "divergences": int(np.asarray(stats["is_divergent"]).sum()),
        "acceptance_rate": float(np.asarray(stats["acceptance_rate"]).mean()),
        "kernel_class": type(draws.kernel).__name__,
    }


def _start(configuration: Configuration, target: Any, position: PyTree) -> Any:
    """Return the origin, which `sample` spreads; or starts that the chains of a superchain share."""
    if configuration.num_superchains is None:
        return position
    return gm.per_chain(superchain_starts(target, position, configuration.chains, NUM_SUPERCHAINS))


def superchain_starts(target: Any, position: PyTree, num_chains: int, num_superchains: int) -> PyTree:
    """Spread a position over superchains, each start repeated for the chains of its group.

    Raises
    ------
    ValueError
        If there are not that many starts of finite density among ten times as many.
    """
    rng = np.random.default_rng(SEED)
    found = []
    for _ in range(10 * num_superchains):
        start = _spread(rng, position)
        if _is_finite(target, start):
            found.append(start)
        if len(found) == num_superchains:
            break
    else:
        raise ValueError(
            f"superchains: {len(found)} starts have a finite density, not {num_superchains}"
        )
    repeats = num_chains // num_superchains
    return jax.tree.map(lambda *x: jnp.repeat(jnp.stack(x), repeats, axis=0), *found)


def _spread(rng: np.random.Generator, position: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.uniform(-RADIUS, RADIUS, x.shape), x.dtype), position
    )


@jax.jit
def _density_and_slope(target: Any, position: PyTree) -> tuple[jax.Array, jax.Array]:
    terms, grad = target.terms_and_grad(position)
    sizes = [sum(jnp.sum(x) for x in jax.tree.leaves(tree)) for tree in (terms, grad)]
    return jnp.asarray(sizes[0]), jnp.asarray(sizes[1])


def _is_finite(target: Any, position: PyTree) -> bool:
    return bool(np.isfinite(np.asarray(_density_and_slope(target, position))).all())
