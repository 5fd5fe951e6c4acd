"""Markov chain Monte Carlo over a device mesh, on JAX."""

import gspmd_mcmc.versions  # noqa: F401  first: it says so if JAX is too old for the rest

# isort: split
from gspmd_mcmc.adaptation.adaptation import Adaptation, Stage, Transition, Window
from gspmd_mcmc.adaptation.chees import ChEESAdaptation
from gspmd_mcmc.adaptation.estimators.dense import Dense, DenseBlock
from gspmd_mcmc.adaptation.estimators.diagonal import Diagonal
from gspmd_mcmc.adaptation.estimators.low_rank import LowRank
from gspmd_mcmc.adaptation.estimators.rotated import Rotated
from gspmd_mcmc.adaptation.mams_adaptation import MAMSAdaptation
from gspmd_mcmc.adaptation.mclmc_adaptation import MCLMCAdaptation
from gspmd_mcmc.adaptation.per_chain import PerChainAdaptation
from gspmd_mcmc.adaptation.snaper import SNAPERAdaptation
from gspmd_mcmc.adaptation.window import WindowAdaptation
from gspmd_mcmc.diagnostics.ess import ess_bulk, ess_tail
from gspmd_mcmc.diagnostics.rhat import rhat
from gspmd_mcmc.diagnostics.summary import Summary
from gspmd_mcmc.errors import CheckpointNotSaved, Preempted, SamplingWarning
from gspmd_mcmc.kernels.hmc import HMC, HMCInfo, HMCState
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.kernel import Info, Kernel
from gspmd_mcmc.kernels.mams import MAMS, MAMSInfo
from gspmd_mcmc.kernels.mclmc import MCLMC, MCLMCInfo, MCLMCState
from gspmd_mcmc.kernels.nuts import NUTS, NUTSInfo
from gspmd_mcmc.models.joint import (
    JointDistributionCoroutine,
    JointDistributionNamed,
    JointDistributionSequential,
)
from gspmd_mcmc.models.numpyro import from_numpyro
from gspmd_mcmc.models.sharded import Sharded
from gspmd_mcmc.multihost.agreement import ProcessesDisagree, ProcessLost
from gspmd_mcmc.multihost.processes import initialize, to_host
from gspmd_mcmc.placement.local_rows import local_rows, place_from_reader, place_local
from gspmd_mcmc.placement.mesh import make_abstract_mesh, make_mesh
from gspmd_mcmc.placement.padding import Padded
from gspmd_mcmc.placement.place import place
from gspmd_mcmc.placement.positional import PositionalSharding
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.memory import OutOfDeviceMemory
from gspmd_mcmc.sampling.mode import Mode, find_mode
from gspmd_mcmc.sampling.reporting import ChunkReport, JSONLines
from gspmd_mcmc.sampling.sample import sample
from gspmd_mcmc.sampling.start import per_chain, prior_start, uniform_start
from gspmd_mcmc.storage.saved_draws import SavedDraws, open_draws
from gspmd_mcmc.storage.zarr_store import DrawsNotSaved, ZarrSink
from gspmd_mcmc.targets.checks import NonFiniteStart
from gspmd_mcmc.targets.independence import CoupledRows
from gspmd_mcmc.targets.likelihoods import (
    bernoulli_logits,
    categorical_logits,
    inner_products,
    poisson_log_rate,
)
from gspmd_mcmc.targets.log_density import LogDensity
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.streaming.plate import Plate
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import Pad, derived, each_chain, like_position, over_steps, pytree, shared, static
from gspmd_mcmc.views import cost, plots
from gspmd_mcmc.views.chips import Accelerator
from gspmd_mcmc.views.communication import communication
from gspmd_mcmc.views.plan import plan
from gspmd_mcmc.views.program.report import BudgetExceeded
from gspmd_mcmc.views.visualize import LayoutView, visualize

__version__ = "0.1.0"
__all__ = [
    "Adaptation",
    "Info",
    "Kernel",
    "Pad",
    "Stage",
    "Target",
    "Transition",
    "Window",
    "derived",
    "each_chain",
    "like_position",
    "over_steps",
    "pytree",
    "shared",
    "static",
    "Accelerator",
    "BudgetExceeded",
    "CheckpointNotSaved",
    "Preempted",
    "plan",
    "plots",
    "visualize",
    "ChEESAdaptation",
    "ChunkReport",
    "CoupledRows",
    "Dense",
    "DenseBlock",
    "Diagonal",
    "Draws",
    "DrawsNotSaved",
    "JSONLines",
    "LowRank",
    "MAMSAdaptation",
    "MCLMCAdaptation",
    "Mode",
    "PerChainAdaptation",
    "Rotated",
    "SNAPERAdaptation",
    "SavedDraws",
    "SamplingWarning",
    "WindowAdaptation",
    "ZarrSink",
    "bernoulli_logits",
    "categorical_logits",
    "communication",
    "cost",
    "ess_bulk",
    "ess_tail",
    "rhat",
    "find_mode",
    "from_numpyro",
    "inner_products",
    "open_draws",
    "per_chain",
    "poisson_log_rate",
    "prior_start",
    "sample",
    "uniform_start",
    "HMC",
    "HMCInfo",
    "HMCState",
    "JitteredHMC",
    "JointDistributionCoroutine",
    "JointDistributionNamed",
    "JointDistributionSequential",
    "LayoutView",
    "LogDensity",
    "MAMS",
    "MAMSInfo",
    "MCLMC",
    "MCLMCInfo",
    "MCLMCState",
    "NUTS",
    "NUTSInfo",
    "NonFiniteStart",
    "OutOfDeviceMemory",
    "Padded",
    "PositionalSharding",
    "Plate",
    "Posterior",
    "Sharded",
    "Summary",
    "make_abstract_mesh",
    "make_mesh",
    "ProcessLost",
    "ProcessesDisagree",
    "initialize",
    "local_rows",
    "place",
    "place_from_reader",
    "place_local",
    "to_host",
]
