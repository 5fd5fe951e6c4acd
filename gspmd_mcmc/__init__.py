"""Markov chain Monte Carlo over a device mesh, on JAX.

The import loads what `sample` calls by default. Every other public name loads when it is first used.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

# isort: off
import gspmd_mcmc.versions  # noqa: F401  first: it says so if JAX is too old for the rest

# Place: meshes, and arrays on them
from gspmd_mcmc.placement.mesh import make_abstract_mesh, make_mesh
from gspmd_mcmc.placement.padding import Padded
from gspmd_mcmc.placement.place import place

# Targets: log densities
from gspmd_mcmc.targets.log_density import LogDensity
from gspmd_mcmc.groups.groups import Groups
from gspmd_mcmc.groups.lookup_index import LookupIndex
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.likelihoods import (
    bernoulli_logits,
    categorical_logits,
    inner_products,
    poisson_log_rate,
)
from gspmd_mcmc.targets.linear import linear
from gspmd_mcmc.targets.lookup import lookup, lookup_within
from gspmd_mcmc.targets.checks import NonFiniteStart
from gspmd_mcmc.targets.independence import CoupledRows

# Kernels, their states and infos, their metrics and splittings
from gspmd_mcmc.kernels.metrics.dense_metric import DenseMetric
from gspmd_mcmc.kernels.integrators import LEAPFROG, MINIMAL_NORM
from gspmd_mcmc.kernels.hmc import HMC, HMCState
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.mams import MAMS
from gspmd_mcmc.kernels.mclmc import MCLMC, MCLMCState
from gspmd_mcmc.kernels.nuts import NUTS, NUTSInfo

# Warm-ups, and the metrics that they learn
from gspmd_mcmc.adaptation.chees import ChEESAdaptation
from gspmd_mcmc.adaptation.mams_adaptation import MAMSAdaptation
from gspmd_mcmc.adaptation.mclmc_adaptation import MCLMCAdaptation
from gspmd_mcmc.adaptation.snaper import SNAPERAdaptation
from gspmd_mcmc.adaptation.window import WindowAdaptation
from gspmd_mcmc.adaptation.estimators.dense import Dense, DenseBlock
from gspmd_mcmc.adaptation.estimators.estimator import Diagonal

# Sample: where chains start, and what comes back
from gspmd_mcmc.sampling.sample import sample
from gspmd_mcmc.storage.draws import Draws
from gspmd_mcmc.sampling.start import per_chain, prior_start, uniform_start
from gspmd_mcmc.sampling.mode import Mode, find_mode
from gspmd_mcmc.sampling.reporting import ChunkReport, JSONLines
from gspmd_mcmc.sampling.memory import OutOfDeviceMemory
from gspmd_mcmc.errors import SamplingWarning

# Storage: draws on disk, and runs that continue after they were killed
from gspmd_mcmc.storage.saved_draws import SavedDraws, open_draws
from gspmd_mcmc.storage.zarr_store import DrawsNotSaved, ZarrSink
from gspmd_mcmc.errors import CheckpointNotSaved, Preempted

# Diagnostics (the others are in `gspmd_mcmc.diagnostics`)
from gspmd_mcmc.diagnostics.ess import ess_bulk, ess_tail
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.diagnostics.summary import Summary

# Several processes
from gspmd_mcmc.multihost.processes import initialize, to_host
from gspmd_mcmc.multihost.agreement import ProcessesDisagree, ProcessLost

# Bring your own: protocols to implement, and what the fields of a state declare
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.kernels.metrics.metric import Metric
from gspmd_mcmc.adaptation.estimators.estimator import MetricEstimator
from gspmd_mcmc.adaptation.adaptation import Adaptation, Stage, Transition, Untuned, Window, WindowStart
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.tree import Pad, derived, each_chain, like_position, over_steps, pytree, shared, static

if TYPE_CHECKING:
    # Shardings by position, and tables of other libraries
    from gspmd_mcmc.compat.positional import PositionalSharding
    from gspmd_mcmc.compat.tables import Table, read_table

    # Models written elsewhere, and distributions over a mesh
    from gspmd_mcmc.models.joint import (
        JointDistributionCoroutine,
        JointDistributionNamed,
        JointDistributionSequential,
    )
    from gspmd_mcmc.models.numpyro import from_numpyro
    from gspmd_mcmc.models.sharded import Sharded

    # Likelihoods whose gradient is a fused kernel
    from gspmd_mcmc.fused.categorical_linear import categorical_linear
    from gspmd_mcmc.fused.inner_product_terms import inner_product_terms

    # Warm-ups and metrics that no default is
    from gspmd_mcmc.adaptation.per_chain import PerChainAdaptation
    from gspmd_mcmc.adaptation.estimators.low_rank import LowRank
    from gspmd_mcmc.adaptation.estimators.rotated import Rotated

    # Rows that each process reads
    from gspmd_mcmc.placement.local_rows import local_rows, place_from_reader, place_local

    # Views: layouts, communication, plans and figures
    from gspmd_mcmc.planning.sample_plan import plan_sample
    from gspmd_mcmc.views.visualize import LayoutView, visualize
    from gspmd_mcmc.views.communication import communication
    from gspmd_mcmc.views.program.report import BudgetExceeded
    from gspmd_mcmc.planning.plan import plan
    from gspmd_mcmc.planning.chips import Accelerator
    from gspmd_mcmc.views import plots

# isort: on

__version__ = "0.1.0"
__all__ = [
    # Place
    "Padded",
    "PositionalSharding",
    "Table",
    "make_abstract_mesh",
    "make_mesh",
    "place",
    "read_table",
    # Targets
    "CoupledRows",
    "LogDensity",
    "NonFiniteStart",
    "Groups",
    "Plate",
    "Posterior",
    "bernoulli_logits",
    "categorical_linear",
    "categorical_logits",
    "inner_product_terms",
    "inner_products",
    "linear",
    "LookupIndex",
    "lookup",
    "lookup_within",
    "poisson_log_rate",
    # Models
    "JointDistributionCoroutine",
    "JointDistributionNamed",
    "JointDistributionSequential",
    "Sharded",
    "from_numpyro",
    # Kernels
    "DenseMetric",
    "HMC",
    "HMCState",
    "JitteredHMC",
    "LEAPFROG",
    "MAMS",
    "MCLMC",
    "MCLMCState",
    "MINIMAL_NORM",
    "NUTS",
    "NUTSInfo",
    # Warm-ups
    "ChEESAdaptation",
    "Dense",
    "DenseBlock",
    "Diagonal",
    "LowRank",
    "MAMSAdaptation",
    "MCLMCAdaptation",
    "PerChainAdaptation",
    "Rotated",
    "SNAPERAdaptation",
    "WindowAdaptation",
    # Sample
    "ChunkReport",
    "Draws",
    "JSONLines",
    "Mode",
    "OutOfDeviceMemory",
    "SamplingWarning",
    "find_mode",
    "per_chain",
    "plan_sample",
    "prior_start",
    "sample",
    "uniform_start",
    # Storage
    "CheckpointNotSaved",
    "DrawsNotSaved",
    "Preempted",
    "SavedDraws",
    "ZarrSink",
    "open_draws",
    # Diagnostics
    "Summary",
    "ess_bulk",
    "ess_tail",
    "rhat",
    # Views
    "Accelerator",
    "BudgetExceeded",
    "LayoutView",
    "communication",
    "plan",
    "plots",
    "visualize",
    # Several processes
    "ProcessLost",
    "ProcessesDisagree",
    "initialize",
    "local_rows",
    "place_from_reader",
    "place_local",
    "to_host",
    # Bring your own
    "Adaptation",
    "Info",
    "Kernel",
    "Metric",
    "MetricEstimator",
    "Pad",
    "Sink",
    "Stage",
    "Target",
    "Transition",
    "Untuned",
    "Window",
    "WindowStart",
    "derived",
    "each_chain",
    "like_position",
    "over_steps",
    "pytree",
    "shared",
    "static",
]

# Where the names that load on first use are: a module and a name in it, or a module.
_ON_FIRST_USE = {
    "PositionalSharding": "compat.positional:PositionalSharding",
    "Table": "compat.tables:Table",
    "read_table": "compat.tables:read_table",
    "categorical_linear": "fused.categorical_linear:categorical_linear",
    "inner_product_terms": "fused.inner_product_terms:inner_product_terms",
    "JointDistributionCoroutine": "models.joint:JointDistributionCoroutine",
    "JointDistributionNamed": "models.joint:JointDistributionNamed",
    "JointDistributionSequential": "models.joint:JointDistributionSequential",
    "from_numpyro": "models.numpyro:from_numpyro",
    "Sharded": "models.sharded:Sharded",
    "PerChainAdaptation": "adaptation.per_chain:PerChainAdaptation",
    "LowRank": "adaptation.estimators.low_rank:LowRank",
    "Rotated": "adaptation.estimators.rotated:Rotated",
    "local_rows": "placement.local_rows:local_rows",
    "place_from_reader": "placement.local_rows:place_from_reader",
    "place_local": "placement.local_rows:place_local",
    "plan_sample": "planning.sample_plan:plan_sample",
    "LayoutView": "views.visualize:LayoutView",
    "visualize": "views.visualize:visualize",
    "communication": "views.communication:communication",
    "BudgetExceeded": "views.program.report:BudgetExceeded",
    "plan": "planning.plan:plan",
    "Accelerator": "planning.chips:Accelerator",
    "plots": "views.plots",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = resolve_name(f"{__name__}.{_ON_FIRST_USE[name]}")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
