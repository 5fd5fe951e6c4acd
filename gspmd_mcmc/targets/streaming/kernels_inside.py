"""Kernels inside a likelihood: a door marks terms whose gradient is a kernel, and a plate allows them.

The compiler cannot cut a kernel over devices, so only a function that runs on one device may hold it.
`stream` runs likelihoods with marked terms so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from gspmd_mcmc import jax_private

MARK = "gspmd_mcmc_kernel"
_platform: ContextVar[str] = ContextVar("platform", default="")


@contextmanager
def kernels_where(platform: str) -> Iterator[None]:
    """Trace functions for a platform, with kernels if it has them."""
    token = _platform.set(platform if platform in ("gpu", "tpu") else "")
    try:
        yield
    finally:
        _platform.reset(token)


def traced_platform() -> str:
    """Return "gpu" or "tpu" if the function that is being traced may hold kernels of one, else ""."""
    return _platform.get()


def marked(terms: jax.Array) -> jax.Array:
    """Mark terms whose gradient is a kernel, so that `has_kernel` finds them."""
    return checkpoint_name(terms, MARK)


def has_kernel(jaxpr: Any) -> bool:
    """Tell whether a traced function holds what is marked, at any depth."""
    return any(
        eqn.params.get("name") == MARK or any(has_kernel(inner) for inner in bodies(eqn))
        for eqn in jaxpr.eqns
    )


def bodies(eqn: Any) -> Iterator[Any]:
    """Yield the programs inside an operation."""
    for value in jax.tree.leaves(eqn.params, is_leaf=jax_private.is_program):
        if jax_private.is_program(value):
            yield jax_private.open_program(value)
