"""The kernels that are validated: how `sample` is called for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gspmd_mcmc as gm
from validation.judge import EXACT, UNADJUSTED, Bounds

# All chains tune one trajectory length together, which takes many chains.
MANY = (64,)
FEW_AND_MANY = (4, 64)


@dataclass(frozen=True)
class Setting:
    """One way to sample.

    Attributes
    ----------
    arguments
        ``arguments(target)`` -> keyword arguments of `sample`: the kernel, and the warm-up where it
        is not the kernel's own default.
    chains
        The numbers of chains that it is run with.
    is_dense
        Whether it learns a dense metric where that is cheap. Without one ``diamonds`` takes hundreds of
        leapfrogs a draw, and is left out.
    bounds
        The bias that is allowed.
    thin
        Steps from draw to draw; warm-up is as many times longer.
    """

    arguments: Callable[[Any], dict[str, Any]]
    chains: tuple[int, ...] = FEW_AND_MANY
    is_dense: bool = False
    bounds: Bounds = EXACT
    thin: int = 1


def _default(target):
    return {}


def _hmc(target):
    return {"kernel": gm.HMC(target, 0.1, 32, jitter=0.5)}


def _nuts(target):
    return {"kernel": gm.NUTS(target, 0.1)}


def _nuts_diagonal(target):
    return {**_nuts(target), "warmup": gm.WindowAdaptation(metric=gm.Diagonal())}


def _jittered(adaptation: Callable):
    def arguments(target):
        warmup = adaptation(metric=gm.Diagonal())
        return {"kernel": gm.JitteredHMC(target, 0.1, 1.0), "warmup": warmup}

    return arguments


def _mams(target):
    return {"kernel": gm.MAMS(target, 0.1, 1.0)}


def _mclmc(target):
    return {"kernel": gm.MCLMC(target, 0.1, 1.0)}


SETTINGS = {
    "default": Setting(_default, is_dense=True),
    "NUTS": Setting(_nuts, is_dense=True),
    "NUTS, diagonal": Setting(_nuts_diagonal),
    "HMC": Setting(_hmc, is_dense=True),
    "ChEES": Setting(_jittered(gm.ChEESAdaptation), MANY),
    "SNAPER": Setting(_jittered(gm.SNAPERAdaptation), MANY),
    "MAMS": Setting(_mams, is_dense=True),
    # A step is one or two gradients, where a draw of the others is a whole trajectory.
    "MCLMC": Setting(_mclmc, is_dense=True, bounds=UNADJUSTED, thin=16),
}
