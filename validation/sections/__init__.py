"""Tests besides posteriors: calibration, Geweke's test, hard shapes, adversarial targets; a job is one
for one kernel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from validation.kernels import SETTINGS
from validation.sections import adversarial, geweke, sbc, shapes

SECTIONS = {"sbc": sbc, "geweke": geweke, "shapes": shapes, "adversarial": adversarial}
KERNELS = {
    "sbc": tuple(sbc.KERNELS),
    "geweke": tuple(sbc.KERNELS),
    # `default` is NUTS at the number of chains that shapes are sampled with.
    "shapes": tuple(name for name in SETTINGS if name != "default"),
    "adversarial": ("default",),
}
QUICK_KERNELS = {"sbc": ("HMC",), "geweke": ("HMC",), "shapes": ("NUTS",), "adversarial": ("default",)}


@dataclass(frozen=True)
class Job:
    """The tests of one section for one kernel."""

    section: str
    kernel: str
    is_quick: bool

    def __str__(self) -> str:
        return f"{self.section}, {self.kernel}"


def jobs(sections: Sequence[str], kernels: Sequence[str] | None, is_quick: bool) -> Iterator[Job]:
    """List jobs, those of one section after one another; None is every kernel."""
    for section in (name for name in SECTIONS if name in sections):
        usual = QUICK_KERNELS if is_quick and kernels is None else KERNELS
        for kernel in usual[section]:
            if kernels is None or kernel in kernels:
                yield Job(section, kernel, is_quick)


def run(job: Job) -> dict[str, Any]:
    """Test; return ``tests``, the records of the section's module."""
    return {"tests": SECTIONS[job.section].records([job.kernel], job.is_quick)}
