"""The precision of matrix products: full in a log density's terms, perhaps less in its gradients.

GPUs and TPUs multiply float32 matrices much faster if they may round the factors. Terms decide what is
sampled, in the Metropolis test: their products always have full precision. A gradient only proposes.
Any function of the position in its place, the same one along the whole trajectory, keeps the trajectory
reversible and volume preserving, so that draws stay exact and only the acceptance rate can fall.

References
----------
Rasmussen, "Gaussian processes to speed up hybrid Monte Carlo for expensive Bayesian integrals",
Bayesian Statistics 7 (2003): trajectories by the gradient of an approximation, a test by the density.
"""

from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp

from gspmd_mcmc.targets.target import Target

FULL = "float32"
# The words of `jax.lax.Precision`, and what `jax.default_matmul_precision` calls them.
IN_JAX = {FULL: "highest", "tensorfloat32": "high", "bfloat16_3x": "high", "bfloat16": "default"}
# What gradients have by default comes first. Devices of an abstract mesh may be any.
OF_PLATFORM = {
    "cpu": (FULL,),
    "gpu": ("tensorfloat32", FULL),
    "tpu": ("bfloat16_3x", "bfloat16", FULL),
    "abstract": tuple(IN_JAX),
}


def products_in(precision: str) -> AbstractContextManager:
    """Trace matrix products of this precision, of those that ask for none themselves."""
    return jax.default_matmul_precision(IN_JAX[precision])


def gradient_precision_of(kernel: str, target: Target, given: str | None) -> str:
    """Return the precision of a kernel's gradients; None is the default of the target's devices.

    It is full precision also where ``jax_default_matmul_precision`` asks for that, or numbers are
    float64, whose products no device shortens.

    Raises
    ------
    ValueError
        If there is no such precision, or the devices do not have it.
    """
    on_device = OF_PLATFORM.get(target.platform, (FULL,))
    if given is None:
        asked = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        is_full = asked in (FULL, "highest") or jnp.result_type(float) == jnp.float64
        return FULL if is_full else on_device[0]
    if given not in IN_JAX:
        raise ValueError(
            f"{kernel}: gradient_precision: expected one of {', '.join(IN_JAX)}, or None for the "
            f"default of the devices, got {given!r}"
        )
    if given not in on_device:
        raise ValueError(
            f"{kernel}: gradient_precision: the target is on a {target.platform}, which has no {given} "
            f"products; expected one of {', '.join(on_device)}, or None for its default"
        )
    return given
