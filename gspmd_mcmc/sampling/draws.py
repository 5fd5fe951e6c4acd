"""The result of a run."""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.tree import PyTree, name_of

SMALL_LEAF = 1000


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of all chains, in their layout, and what is needed to go on.

    Attributes
    ----------
    position
        Tree of draws, leaves [chains, draws, ...]: the positions, or what ``collect`` returned. jax
        arrays laid out over the mesh; NumPy arrays where draws outgrew their share of device memory.
    stats
        Name to array [chains, draws]: the kernel's info (`HMCInfo`) and ``log_density``. With thinning,
        ``acceptance_rate`` is the mean, ``num_integration_steps`` the sum and ``is_divergent`` whether
        any, over the steps between two draws.
    warmup
        Of warm-up: ``step_size`` [steps], ``acceptance_rate`` and ``log_density`` [chains, steps],
        ``num_divergent`` [chains], and ``leapfrogs``, the number of all chains together. Its
        divergences are counted here, apart from those of the draws.
    kernel
        The tuned kernel; it holds the target.
    state
        The last state of all chains, leaves [chains, ...]: `sample` goes on from it when it is given
        these draws as ``initial_position``.
    num_steps
        Steps taken in all, warm-up included: where the sequence of random numbers goes on.
    """

    position: PyTree
    stats: dict[str, Any]
    warmup: dict[str, Any]
    kernel: Any
    state: Any
    num_steps: int

    @property
    def num_chains(self) -> int:
        """How many chains there are."""
        return self.stats["log_density"].shape[0]

    @property
    def num_draws(self) -> int:
        """How many draws each chain has."""
        return self.stats["log_density"].shape[1]

    @property
    def num_divergent(self) -> np.ndarray:
        """Divergent transitions of each chain after warm-up, shape [chains]."""
        return np.asarray(self.stats["is_divergent"]).sum(axis=1)

    @property
    def acceptance_rate(self) -> np.ndarray:
        """Mean acceptance rate of each chain after warm-up, shape [chains]."""
        return np.asarray(self.stats["acceptance_rate"]).mean(axis=1)

    def to_datatree(self):
        """Return an ArviZ / xarray ``DataTree`` with groups posterior and sample_stats.

        Needs the extra ``arviz``.
        """
        arviz_base = _need("arviz_base")
        renamed = {"is_divergent": "diverging", "log_density": "lp"}
        stats = {renamed.get(name, name): np.asarray(x) for name, x in self.stats.items()}
        return arviz_base.from_dict({"posterior": self._named(), "sample_stats": stats})

    def summary(self):
        """Mean, sd, R-hat and effective sample sizes, as arviz-stats computes them.

        Leaves of over a thousand numbers are left out, and said so; ``log_density`` is always there.
        Needs the extra ``arviz``.
        """
        arviz_base, arviz_stats = _need("arviz_base"), _need("arviz_stats")
        named = self._named()
        large = {n: x.shape[2:] for n, x in named.items() if int(np.prod(x.shape[2:])) > SMALL_LEAF}
        small = {n: x for n, x in named.items() if n not in large}
        small[_free("log_density", small)] = np.asarray(self.stats["log_density"])
        table = arviz_stats.summary(arviz_base.from_dict({"posterior": small}))
        table.attrs["left_out"] = large
        return table

    def _named(self) -> dict[str, np.ndarray]:
        named = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.position):
            named[_free(name_of(path), named)] = _on_host(leaf)
        return named

    def __layout_tree__(self) -> dict[str, Any]:
        """Return what `visualize` shows of a run: the draws and the last state."""
        return {"position": self.position, "state": self.state}

    def __repr__(self) -> str:
        shapes = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", self.position)
        what = f"{self.num_chains} chains x {self.num_draws} draws, {shapes}"
        if not self.num_draws:
            return f"Draws({what})"
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance_rate)
        return f"Draws({what}, acceptance [{rates}], divergent {self.num_divergent.tolist()})"


def _free(name: str, taken: dict) -> str:
    """Lengthen a name that another leaf has already."""
    return _free(f"{name}_", taken) if name in taken else name


def _on_host(leaf) -> np.ndarray:
    """Return a NumPy array of a dtype that NumPy itself knows."""
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == jnp.bfloat16 else array


def _need(module: str):
    """Import a module of the extra ``arviz``, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is missing: pip install 'gspmd_mcmc[arviz]' brings it") from error
