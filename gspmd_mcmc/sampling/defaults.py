"""What `sample` does when it is not told: the kernel, how it is tuned, the kind of its metric."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.adaptation.estimators.dense import Dense
from gspmd_mcmc.adaptation.estimators.estimator import Diagonal, MetricEstimator
from gspmd_mcmc.adaptation.mams_adaptation import MAMSAdaptation
from gspmd_mcmc.adaptation.mclmc_adaptation import MCLMCAdaptation
from gspmd_mcmc.adaptation.snaper import SNAPERAdaptation
from gspmd_mcmc.adaptation.window import WindowAdaptation
from gspmd_mcmc.kernels.jittered_hmc import JitteredHMC
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.kernels.nuts import NUTS
from gspmd_mcmc.placement.layout import Layout
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.target import Target

# From this many chains on, a trajectory length that they tune together beats a tree for each: in
# lock-step every chain waits for the deepest tree.
MANY_CHAINS = 32
# Per gradient a dense metric is worth no less even where it costs draws, and no rule on the
# correlations that warm-up sees separates such posteriors: docs/everyday.md has the figures.
DENSE_SIZE = 100
# The first that says it is the default for a kernel is taken.
WARMUPS = (SNAPERAdaptation(), WindowAdaptation(), MAMSAdaptation(), MCLMCAdaptation())


def chosen_kernel(
    kernel: Kernel | None, target: Target, num_chains: int, max_tree_depth: int | None
) -> Kernel:
    """Return the kernel given or the default one; raise unless it is a kernel on this target."""
    if kernel is None:
        return kernel_for(target, num_chains, max_tree_depth)
    checks.require_kind("kernel", kernel, Kernel, "NUTS(target, step_size=0.1)")
    if kernel.target is not target:
        raise ValueError("kernel: it was built on another target; build it on the one given here")
    if max_tree_depth is not None:
        raise TypeError(
            "max_tree_depth: it is a setting of the kernel, and a kernel is given; write "
            f"kernel=NUTS(target, step_size=0.1, max_tree_depth={max_tree_depth})"
        )
    made, now = jnp.result_type(kernel.step_size), jnp.zeros(()).dtype
    if made != now:
        raise ValueError(
            f"kernel: its numbers are {made}, and JAX now computes in {now}: jax_enable_x64 was "
            "switched since it was made. Make kernel and target after that"
        )
    return kernel


def chosen_warmup(
    warmup: Adaptation | None, kernel: Kernel, num_warmup: int, settings: dict[str, Any]
) -> Adaptation:
    """Return the warm-up given, or the kernel's with these settings; raise where both are given."""
    settings = {name: value for name, value in settings.items() if value is not None}
    if "metric" in settings:
        checks.require_kind("metric", settings["metric"], MetricEstimator, "Diagonal()")
    if settings and not num_warmup:
        raise ValueError(f"{', '.join(settings)}: num_warmup=0 tunes nothing; warm up, or leave it out")
    if warmup is None:
        own: Any = warmup_for(kernel)
        names = [field.name for field in dataclasses.fields(own)]
        for name in settings.keys() - set(names):
            raise TypeError(
                f"{name}: the kernel's warm-up is {type(own).__name__}, which has no such setting; "
                f"it has {', '.join(names)}"
            )
        return dataclasses.replace(own, **settings)
    checks.require_kind("warmup", warmup, Adaptation, "WindowAdaptation()")
    for name, value in settings.items():
        raise TypeError(
            f"{name}: it is a setting of the warm-up, and a warm-up is given; write "
            f"warmup={type(warmup).__name__}({name}={value!r})"
        )
    return warmup


def kernel_for(target: Target, num_chains: int, max_tree_depth: int | None = None) -> Kernel:
    """Return the default kernel; raise if a depth is given, and so many chains build no trees."""
    depth: dict[str, Any] = {} if max_tree_depth is None else {"max_tree_depth": max_tree_depth}
    if num_chains < MANY_CHAINS:
        return NUTS(target, 0.1, **depth)
    if depth:
        raise TypeError(
            f"max_tree_depth: from {MANY_CHAINS} chains the default kernel is JitteredHMC, which has "
            f"no trees; give kernel=NUTS(target, step_size=0.1, max_tree_depth={max_tree_depth})"
        )
    return JitteredHMC(target, 0.1, 1.0)


def warmup_for(kernel: Kernel) -> Adaptation:
    """Return the warm-up that a kernel asks for, or else its default; raise if there is none."""
    own = kernel.default_warmup()
    if own is not None:
        return own
    for warmup in WARMUPS:
        if isinstance(kernel, warmup.default_for):
            return warmup
    raise TypeError(
        f"warmup: no warm-up is known for {type(kernel).__name__}; give sample one as warmup=..., such "
        "as gspmd_mcmc.Untuned()"
    )


def with_metric(warmup: Adaptation, kernel: Kernel, layout: Layout) -> Adaptation:
    """Return the warm-up with a kind of metric, if it names none.

    A metric that the kernel has already is learned on if it is diagonal, and kept if not.
    """
    if isinstance(warmup.metric, type):
        checks.require_kind("metric", warmup.metric, MetricEstimator, "Diagonal()")

    def choose() -> Any:
        own = kernel.inverse_mass_matrix
        if own is not None:
            return Diagonal() if jax.tree.structure(own) == layout.treedef else None
        size = sum(math.prod(shape) for shape, _ in layout.shapes)
        return Dense() if layout.is_whole and size <= DENSE_SIZE else Diagonal()

    return warmup.with_metric(choose)
