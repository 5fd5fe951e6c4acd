"""The kernels that are validated: how `sample` is called for each.

A kernel that this version of the library does not have is a row of the table that says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gspmd_mcmc as gm
from validation.judge import EXACT, UNADJUSTED, Bounds

# Their chains tune one trajectory length together, which takes many.
MANY = (64,)
FEW_AND_MANY = (4, 64)


class NotThere(Exception):
    """The library does not have it."""


@dataclass(frozen=True)
class Setting:
    """One way to sample.

    Attributes
    ----------
    arguments
        ``arguments(target)`` -> keyword arguments of `sample`: the kernel, and the warm-up where it
        is not the kernel's own default.
    chains
        The numbers of chains that suit it.
    is_dense
        Whether it learns a dense metric where that is cheap. Without one ``diamonds`` takes hundreds of
        leapfrogs a draw, and is left out.
    bounds
        The bias that is let pass.
    thin
        Steps from draw to draw; of warm-up there are as many times more.
    """

    arguments: Callable[[Any], dict[str, Any]]
    chains: tuple[int, ...] = FEW_AND_MANY
    is_dense: bool = False
    bounds: Bounds = EXACT
    thin: int = 1


def _the(name: str) -> Any:
    try:
        return getattr(gm, name)
    except AttributeError:
        raise NotThere(f"gspmd_mcmc has no {name}") from None


def _default(target):
    return {}


def _hmc(target):
    return {"kernel": _the("HMC")(target, 0.1, 32, jitter=0.5)}


def _nuts(target):
    return {"kernel": _the("NUTS")(target, 0.1)}


def _nuts_diagonal(target):
    return {**_nuts(target), "warmup": _the("WindowAdaptation")(metric=_the("Diagonal")())}


def _jittered(adaptation: str):
    def arguments(target):
        warmup = _the(adaptation)(metric=_the("Diagonal")())
        return {"kernel": _the("JitteredHMC")(target, 0.1, 1.0), "warmup": warmup}

    return arguments


def _mams(target):
    return {"kernel": _the("MAMS")(target, 0.1, 1.0)}


def _mclmc(target):
    return {"kernel": _the("MCLMC")(target, 0.1, 1.0)}


SETTINGS = {
    "default": Setting(_default, is_dense=True),
    "NUTS": Setting(_nuts, is_dense=True),
    "NUTS, diagonal": Setting(_nuts_diagonal),
    "HMC": Setting(_hmc, is_dense=True),
    "ChEES": Setting(_jittered("ChEESAdaptation"), MANY),
    "SNAPER": Setting(_jittered("SNAPERAdaptation"), MANY),
    "MAMS": Setting(_mams, is_dense=True),
    # A step is one or two gradients, where a draw of the others is a whole trajectory.
    "MCLMC": Setting(_mclmc, is_dense=True, bounds=UNADJUSTED, thin=16),
}
