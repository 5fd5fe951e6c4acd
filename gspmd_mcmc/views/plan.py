"""A program on a mesh that is not there: what it would send and hold."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from rich.console import Group
from rich.text import Text

from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views import chips as accelerators
from gspmd_mcmc.views.chips import Accelerator
from gspmd_mcmc.views.program.ahead import MOST_DEVICES, built, compile_ahead, shapes_of
from gspmd_mcmc.views.program.extrapolation import Rule, extrapolate, on_whole_mesh
from gspmd_mcmc.views.program.report import Communication
from gspmd_mcmc.views.program.report_text import draw_report, plain
from gspmd_mcmc.views.units import bytes_text
from gspmd_mcmc.views.visualize import LayoutView, visualize


@dataclass(frozen=True)
class Plan:
    """What a program would send and hold on a mesh.

    Attributes
    ----------
    mesh
        The mesh, of no device.
    report
        As `communication` gives it.
    layout
        Where the arguments would lie, those that the program uses; printing it draws them.
    accelerator
        The kind of device that it is held against, if one was named.
    rule
        How the report was extrapolated; None if the compiler made it.
    seconds
        What tracing and compiling took.
    """

    mesh: AbstractMesh
    report: Communication
    layout: LayoutView
    accelerator: Accelerator | None
    rule: Rule | None
    seconds: float

    @property
    def fits(self) -> bool | None:
        """Whether the program fits what JAX has of the accelerator's memory; None if none was named."""
        if self.accelerator is None:
            return None
        return self.report.peak_bytes <= self.accelerator.usable_bytes

    def __rich__(self) -> Group:
        """Draw the layout, the collectives, the memory."""
        how = (
            str(self.rule)
            if self.rule
            else f"compiled in {self.seconds:.1f} s, for virtual CPU devices"
        )
        return Group(
            self.layout, draw_report(self.report), Text(self._verdict()), Text(how, style="dim")
        )

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__

    def _verdict(self) -> str:
        needed = self.report.peak_bytes
        at_most = f"at most {bytes_text(needed)}"
        if self.accelerator is None:
            return f"needs {at_most} on each of {self.mesh.size:,} devices"
        there, name = self.accelerator.usable_bytes, self.accelerator.name
        fits = "fits" if self.fits else "DOES NOT FIT"
        share = f"{needed / there:.1%}"
        return f"{fits}: {at_most} of the {bytes_text(there)} that JAX has of a {name} ({share})"


def plan(
    build: Callable,
    *,
    chains: int | None = None,
    data: int | None = None,
    model: int | None = None,
    accelerator: str | Accelerator | None = None,
    trips: Mapping[str, int] | None = None,
) -> Plan:
    """Compile a program for a mesh that is not there, before anyone pays for it.

    No array is made and no device is needed. Up to 2,048 devices the program is compiled, in a process
    of its own, for as many virtual CPU devices; beyond, it is compiled for three smaller meshes and
    extrapolated by a rule that is checked on them (`Rule`). Collectives are those that the compiler's
    partitioner puts in; it is the same for all backends, though a backend may still split or fuse
    them. Temporaries are those of the CPU's compiler: expect another size on an accelerator.

    Parameters
    ----------
    build
        ``build(mesh)`` returns ``(function, *arguments)``: a function and arrays or shapes laid on the
        mesh that it is given (`place` with ``jax.ShapeDtypeStruct``). The state of a kernel is
        ``jax.eval_shape(gm.HMC.init, kernel, position)``.
    chains, data, model
        Sizes of the mesh's axes, as in `make_mesh`.
    accelerator
        A name in `ACCELERATORS`, such as "TPU v5e", or an `Accelerator`.
    trips
        How often loops run, as in `communication`.

    Raises
    ------
    ImportError
        If the extra ``plan`` is missing.
    TypeError, ValueError
        If ``build`` returns no function and arrays or shapes on its mesh; if a name is not known.
    RuntimeError
        If the compiler fails, or programs of different meshes are too different to extrapolate.
    """
    device = accelerators.accelerator(accelerator) if accelerator is not None else None
    mesh = make_abstract_mesh(chains=chains, data=data, model=model)
    began = time.perf_counter()
    function, args = built(build, mesh)
    if mesh.size <= MOST_DEVICES:
        report, rule = compile_ahead(function, args, mesh), None
    else:
        shapes_of(args, mesh)  # raises on what lies elsewhere, before anything is compiled
        report, rule = extrapolate(build, mesh)
        report = on_whole_mesh(report, args, mesh)
    report = report.with_trips(**trips) if trips else report
    seconds = time.perf_counter() - began
    return Plan(mesh, report, visualize(_drawn(report, args, mesh)), device, rule, seconds)


def _drawn(report: Communication, args: tuple, mesh: AbstractMesh) -> Any:
    """Return the arguments that are used, as shapes that lie where the program takes them."""
    taken = {a.path: a.spec for a in report.arguments}

    def lay(path, leaf):
        if path_str(path) not in taken:
            return None
        spec = taken[path_str(path)]
        sharding = None if spec is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf), sharding=sharding)

    laid = jax.tree_util.tree_map_with_path(lay, args)

    def is_unused(node) -> bool:
        return is_padded(node) and node.values is None

    return jax.tree.map(lambda node: None if is_unused(node) else node, laid, is_leaf=is_unused)
