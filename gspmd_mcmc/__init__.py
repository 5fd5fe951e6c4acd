"""Markov chain Monte Carlo over a device mesh, on JAX."""

from gspmd_mcmc.adaptation.window import WindowAdaptation
from gspmd_mcmc.kernels.hmc import HMC, HMCInfo, HMCState
from gspmd_mcmc.kernels.nuts import NUTS, NUTSInfo
from gspmd_mcmc.placement.mesh import make_abstract_mesh, make_mesh
from gspmd_mcmc.placement.padding import Padded
from gspmd_mcmc.placement.place import place
from gspmd_mcmc.placement.positional import PositionalSharding
from gspmd_mcmc.sampling.draws import Draws
from gspmd_mcmc.sampling.mode import Mode, find_mode
from gspmd_mcmc.sampling.sample import SamplingWarning, sample
from gspmd_mcmc.sampling.start import per_chain, uniform_start
from gspmd_mcmc.targets.checks import NonFiniteStart
from gspmd_mcmc.targets.joint import (
    JointDistributionCoroutine,
    JointDistributionNamed,
    JointDistributionSequential,
)
from gspmd_mcmc.targets.likelihoods import (
    bernoulli_logits,
    categorical_logits,
    inner_products,
    poisson_log_rate,
)
from gspmd_mcmc.targets.log_density import LogDensity
from gspmd_mcmc.targets.numpyro import from_numpyro
from gspmd_mcmc.targets.plate import Plate
from gspmd_mcmc.targets.posterior import Posterior
from gspmd_mcmc.targets.sharded import Sharded
from gspmd_mcmc.views import cost, plots
from gspmd_mcmc.views.communication import communication
from gspmd_mcmc.views.plan import plan
from gspmd_mcmc.views.program.accelerators import Accelerator
from gspmd_mcmc.views.program.report import BudgetExceeded
from gspmd_mcmc.views.visualize import LayoutView, visualize

__version__ = "0.1.0"
__all__ = [
    "Accelerator",
    "BudgetExceeded",
    "plan",
    "plots",
    "visualize",
    "Draws",
    "Mode",
    "SamplingWarning",
    "WindowAdaptation",
    "bernoulli_logits",
    "categorical_logits",
    "communication",
    "cost",
    "find_mode",
    "from_numpyro",
    "inner_products",
    "per_chain",
    "poisson_log_rate",
    "sample",
    "uniform_start",
    "HMC",
    "HMCInfo",
    "HMCState",
    "JointDistributionCoroutine",
    "JointDistributionNamed",
    "JointDistributionSequential",
    "LayoutView",
    "LogDensity",
    "NUTS",
    "NUTSInfo",
    "NonFiniteStart",
    "Padded",
    "PositionalSharding",
    "Plate",
    "Posterior",
    "Sharded",
    "make_abstract_mesh",
    "make_mesh",
    "place",
]
