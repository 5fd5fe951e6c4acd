"""A whole run on a mesh that is not there: every program of `sample`, and what devices would hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jax.sharding import AbstractMesh
from rich.console import Group
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from gspmd_mcmc.adaptation.adaptation import Adaptation
from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.kernels.kernel import Kernel
from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.planning.chips import Accelerator
from gspmd_mcmc.planning.plan import MeshPlan, plan_on_mesh, read_devices
from gspmd_mcmc.planning.roofline import Roofline
from gspmd_mcmc.planning.run_programs import (
    DATA,
    START,
    STEPS,
    RunPrograms,
    RunSettings,
    programs_of,
)
from gspmd_mcmc.planning.topologies import Chip
from gspmd_mcmc.sampling.run import DEVICE_SHARE
from gspmd_mcmc.sampling.run_state import keep_position
from gspmd_mcmc.sampling.sample import check_arguments
from gspmd_mcmc.storage.sink import Sink
from gspmd_mcmc.targets import checks
from gspmd_mcmc.targets.function import as_partial
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.views.program.report_views import plain


@dataclass(frozen=True)
class PlannedProgram:
    """One program of a run.

    Attributes
    ----------
    plan
        What `plan` says of it.
    beside_bytes
        Bytes on a device that the run holds while it runs, besides its arguments.
    """

    plan: MeshPlan
    beside_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes that a device needs at most while it runs."""
        return self.plan.report.peak_bytes + self.beside_bytes

    def fits(self, usable_bytes: int) -> bool:
        """Tell whether it fits a device's memory; where nothing lies beside it, by the compiler."""
        if self.plan.refusal is not None or not self.beside_bytes:
            return self.plan.fits is not False
        return self.peak_bytes <= usable_bytes


@dataclass(frozen=True)
class SamplePlan(JupyterMixin):
    """What a run of `sample` would hold on a mesh, program by program; what `plan_sample` returns.

    Attributes
    ----------
    mesh
        The mesh, an abstract one.
    programs
        Every program, by name, in the order in which they run. Those that only copy, select or test
        chains are left out.
    num_chains, num_samples
        As `plan_sample` was given them.
    buffer_draws
        Draws of each chain that a device has room for; the others go to the host or the sink.
    device
        The chip whose own compiler was asked, or the accelerator that was named; None.
    """

    mesh: AbstractMesh
    programs: Mapping[str, PlannedProgram]
    num_chains: int
    num_samples: int
    buffer_draws: int
    device: Chip | Accelerator | None

    @property
    def largest(self) -> str:
        """The name of the program that needs most."""
        return max(self.programs, key=lambda name: self.programs[name].peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes that a device needs at most, at any time of the run, draws included."""
        return self.programs[self.largest].peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether every program fits the device's memory; None if no device was named."""
        if self.device is None:
            return None
        return all(program.fits(self.device.usable_bytes) for program in self.programs.values())

    @property
    def compile_seconds(self) -> float:
        """Seconds that all programs took to trace and compile, one after the other, on this machine."""
        return sum(program.plan.seconds for program in self.programs.values())

    def roofline(self) -> Roofline:
        """Return the seconds of a leapfrog of all chains on the chip at best.

        Of kernels whose steps have no loop of leapfrogs, those of a step.

        Raises
        ------
        ValueError
            If no chip's compiler was asked, or a loop in it has no trip count that is known.
        """
        steps = [program.plan for name, program in self.programs.items() if name.startswith(STEPS)][-1]
        names = {loop.name for nest in steps.report.loop_nests for loop in nest}
        found = steps.roofline("leapfrog" if "leapfrog" in names else STEPS)
        return replace(found, unit="leapfrog" if "leapfrog" in names else "step")

    def __rich__(self) -> Group:
        """Draw a table of the programs, the greatest memory, whether it fits, and the speed."""
        table = Table(box=None)
        for name in ("program", "its own", "beside", "together", "seconds"):
            table.add_column(name, justify="left" if name == "program" else "right")
        for name, program in self.programs.items():
            own, beside = program.plan.report.peak_bytes, program.beside_bytes
            sizes = [bytes_text(n) for n in (own, beside, program.peak_bytes)]
            table.add_row(name, *sizes, f"{program.plan.seconds:.1f}")
        return Group(table, *(Text(line) for line in self._lines()))

    def _lines(self) -> list[str]:
        over = " x ".join(f"{name}={n}" for name, n in self.mesh.shape.items())
        most = f"at most {bytes_text(self.peak_bytes)} on each of {self.mesh.size:,} devices, {over}"
        lines = [f"needs {most}, in {self.largest!r}"]
        if self.device is not None:
            usable = (
                f"of the {bytes_text(self.device.usable_bytes)} that JAX has of a {self.device.name}"
            )
            lines = [
                f"{'fits' if self.fits else 'DOES NOT FIT'}: {most}, {usable}, in {self.largest!r}"
            ]
        refused = ((name, p.plan.refusal) for name, p in self.programs.items() if p.plan.refusal)
        lines += [f"{name}: the chip's own compiler refuses it. {text}" for name, text in refused]
        if self.buffer_draws < self.num_samples:
            lines.append(
                f"a device has room for {self.buffer_draws:,} of {self.num_samples:,} draws; buffers "
                "that are full go to the host or the sink"
            )
        lines.append(f"compiled in {self.compile_seconds:.0f} s on this machine, one after the other")
        if isinstance(self.device, Chip) and not any(p.plan.refusal for p in self.programs.values()):
            lines += self._speed()
        return lines

    def _speed(self) -> list[str]:
        try:
            found = self.roofline()
        except ValueError as error:  # Of some program a trip count is not known.
            return [f"speed: {error}"]
        chains = f"{self.num_chains} chains" if self.num_chains > 1 else "one chain"
        rate = found.per_second * self.num_chains
        return [
            f"predicted at best: {found.rate_is}{rate:,.0f} {found.unit}s a second, {chains} together, "
            f"bound by {found.bound} (arithmetic on the compiler's figures)"
        ]

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


def plan_sample(
    build: Callable,
    *,
    chains: int | None = None,
    data: int | None = None,
    model: int | None = None,
    on: str | None = None,
    accelerator: str | Accelerator | None = None,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    thin: int = 1,
    kernel: Callable[[Target], Kernel] | None = None,
    warmup: Adaptation | None = None,
    target_acceptance_rate: float | None = None,
    max_tree_depth: int | None = None,
    metric: Any = None,
    collect: Callable = keep_position,
    to: Sink | None = None,
    device_bytes: int | None = None,
) -> SamplePlan:
    """Compile every program of a run for a mesh that is not there, to learn whether the run will fit.

    Nothing is run and no array is made. What chains start from, warm-up by stages, chunks of draws,
    what is done between windows, and the statistics of a summary are compiled as `plan` compiles a
    program, each in a process of its own: expect a minute.

    Parameters
    ----------
    build
        ``build(mesh)`` returns ``(target, initial_position)``, laid on the mesh that it is given, as
        `sample` takes them; shapes (``jax.ShapeDtypeStruct``) in place of arrays.
    chains, data, model, on, accelerator
        The mesh and the chip, as in `plan`.
    kernel
        The kernel as a function of the target: ``functools.partial(gm.HMC, step_size=0.1,
        num_integration_steps=10)``. None: as `sample` chooses it.
    num_chains, num_warmup, num_samples, thin, warmup, target_acceptance_rate, max_tree_depth, metric
        As in `sample`.
    collect, to, device_bytes
        As in `sample`. The share of memory that draws take is that of the chip or accelerator.

    Returns
    -------
    SamplePlan
        ``print`` it: each program's memory, and what the run holds beside it.

    Raises
    ------
    ImportError, TypeError, ValueError, RuntimeError
        As `plan` and `sample` do.
    """
    counts = {"num_chains": num_chains, "num_warmup": num_warmup, "num_samples": num_samples}
    counts["thin"] = thin
    tuning = {"target_acceptance_rate": target_acceptance_rate, "metric": metric}
    check_arguments(counts | tuning | {"device_bytes": device_bytes, "collect": collect})
    if to is not None:
        checks.require_kind("to", to, Sink, 'ZarrSink("draws.zarr")')
    abstract = make_abstract_mesh(chains=chains, data=data, model=model)
    mesh, chip, named = read_devices(abstract, on, accelerator)
    device = chip or named
    if device_bytes is None and device is not None:
        device_bytes = int(DEVICE_SHARE * device.usable_bytes)
    settings = RunSettings(
        kernel, max_tree_depth, warmup, tuning, as_partial(collect), to, device_bytes, **counts
    )
    run = programs_of(build, settings, mesh)
    plans = {
        name: plan_on_mesh(partial(_program, name, build, settings), mesh, chip, named, {})
        for name in run.calls
    }
    beside = _beside(run, plans)
    return SamplePlan(
        mesh=mesh,
        programs={name: PlannedProgram(found, beside[name]) for name, found in plans.items()},
        num_chains=settings.num_chains,
        num_samples=settings.num_samples,
        buffer_draws=run.buffer_draws,
        device=device,
    )


def _program(name: str, build: Callable, settings: RunSettings, mesh: AbstractMesh) -> tuple:
    """Return a program of the run for a mesh, as `plan` takes it."""
    return programs_of(build, settings, mesh).calls[name]


def _beside(run: RunPrograms, plans: Mapping[str, MeshPlan]) -> dict[str, int]:
    """Return for each program the bytes on a device that its run holds besides its arguments."""
    held = {name: found.report.output_bytes for name, found in plans.items()}
    held[DATA] = plans[START].data_bytes
    parts = {name: plans[name].report.argument_bytes if name in run.parts else 0 for name in plans}
    return {name: max(0, sum(held[x] for x in run.beside[name]) - parts[name]) for name in plans}
