"""A program on a mesh that is not there: what it would send and hold, by the chip's own compiler."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Group
from rich.jupyter import JupyterMixin
from rich.text import Text

from gspmd_mcmc.errors import bytes_text
from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.planning import chips
from gspmd_mcmc.planning.aot_compilation import (
    MOST_DEVICES,
    Compiled,
    Refused,
    build_program,
    compile_aot,
    shapes_of,
)
from gspmd_mcmc.planning.atomics import Atomic, find_atomics
from gspmd_mcmc.planning.chips import Accelerator
from gspmd_mcmc.planning.roofline import Roofline, roofline
from gspmd_mcmc.planning.topologies import Chip, chip_of
from gspmd_mcmc.planning.work import Work, work_of
from gspmd_mcmc.targets.checks import on_small_data
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views.communication import describe_argument
from gspmd_mcmc.views.program.hlo import Program, read_program
from gspmd_mcmc.views.program.report import Collective, Communication
from gspmd_mcmc.views.program.report_views import draw_report, plain
from gspmd_mcmc.views.visualize import LayoutView, visualize

_MEMORY = ("argument_bytes", "output_bytes", "temporary_bytes", "constant_bytes", "alias_bytes")


@dataclass(frozen=True)
class Rule:
    """How a report was extrapolated from those of smaller meshes.

    Bytes on a device are taken as a + b/n for n devices along the axis: arrays that are whole on each,
    and a share of those that are laid over it. Two sizes give a and b. The collectives are the same.
    Arguments are counted from their shapes on the whole mesh instead. For outputs and temporaries the
    rule leaves out the padding of rows that the mesh does not divide, less than a row a device.
    Temporaries that are bounded by a tile on the smaller meshes only do not follow this law: ``error``
    shows it if the bound ends among the three sizes; if it ends beyond them, the rule says too much.

    Attributes
    ----------
    axis
        The mesh axis that was made smaller.
    compiled
        Its three sizes in the meshes that were compiled for, ascending. The last two give a and b.
    error
        How far the rule is off the last size when the first two give a and b: the larger of the error
        of the memory, as a part of all of it, and of any collective's bytes, as a part of them.
    """

    axis: str
    compiled: tuple[int, ...]
    error: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{n:,}" for n in self.compiled)
        return (
            f"extrapolated: compiled for {self.axis} = {sizes}; bytes on a device as a + b/n, which "
            f"from the first two is off by at most {self.error:.2%} on the last"
        )


@dataclass(frozen=True)
class MeshPlan(JupyterMixin):
    """What a program would send and hold on a mesh; what `plan` returns.

    Attributes
    ----------
    mesh
        The mesh, an abstract one.
    report
        The report of `communication`.
    layout
        Where the arguments that the program uses would lie; printing it draws them.
    accelerator
        The kind of device to fit, if one was named.
    rule
        How the report was extrapolated; None if the program was compiled for the whole mesh.
    seconds
        Time that tracing and compiling took.
    small_data
        That one device would be faster, in words, where the targets' data are that small; else None.
    chip
        The chip whose own compiler was asked, if ``on`` named one.
    refusal
        What that compiler says of a program that does not fit; None if it took the program. The report
        is then that of virtual CPU devices.
    compiled
        The program as that compiler made it; None without ``on`` or if it refused the program.
    data_bytes
        Bytes of the targets' data on a device: a gradient must read them once.
    trips
        As `plan` was given them.
    """

    mesh: AbstractMesh
    report: Communication
    layout: LayoutView
    accelerator: Accelerator | None
    rule: Rule | None
    seconds: float
    small_data: str | None = None
    chip: Chip | None = None
    refusal: str | None = None
    compiled: Compiled | None = None
    data_bytes: int = 0
    trips: Mapping[str, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool | None:
        """Whether the program fits the chip's or the accelerator's memory; None if none was named.

        A TPU's compiler refuses what does not fit. Of a GPU, and of an accelerator, it is what JAX has
        of the memory that counts.
        """
        if self.chip is not None:
            return self.refusal is None and self.chip.has_room(self.report.peak_bytes)
        if self.accelerator is None:
            return None
        return self.report.peak_bytes <= self.accelerator.usable_bytes

    def work(self, within: str | None = None) -> Work:
        """Count what the chip's program moves, launches, multiplies and sends on a device.

        Parameters
        ----------
        within
            The name of a loop, such as "leapfrog": in one iteration of it. None: in the whole call.

        Raises
        ------
        ValueError
            If no chip's compiler made the program; if it has no such loop, or one in it whose trip
            count is known neither to the compiler nor by ``trips``.
        """
        return work_of(self._program, within, trips=self.trips)

    def roofline(self, within: str | None = None) -> Roofline:
        """Return the seconds of `work` on the chip at best, and what bounds it: arithmetic, no fact.

        Raises
        ------
        ValueError
            As `work` does.
        """
        work, unit = self.work(within), within or "call"
        chip: Any = self.chip
        return roofline(work, chip.name, data_bytes=self.data_bytes, unit=unit)

    def atomics(self) -> tuple[Atomic, ...]:
        """Return the atomic operations on floats of a GPU's kernels, each with its line and cure.

        Raises
        ------
        ValueError
            If no chip's compiler made the program.
        """
        program = self._program
        return find_atomics(self.compiled.assembly if self.compiled else (), program)

    @cached_property
    def _program(self) -> Program:
        if self.compiled is None:
            raise ValueError(
                "no chip's compiler made this program: plan it with on=..., on a chip it fits"
            )
        return read_program(self.compiled.text)

    def __rich__(self) -> Group:
        """Draw the layout, the collectives, the memory, whether it fits, and the work of a leapfrog."""
        small_data = [self.small_data] if self.small_data else []
        work = [] if self.compiled is None else self._work_lines()
        lines = [Text(line) for line in (self._verdict(), *small_data, *work)]
        return Group(self.layout, draw_report(self.report), *lines, Text(self._how(), style="dim"))

    def _work_lines(self) -> list[str]:
        """Write the roofline of a leapfrog, or of the call if there is no such loop; and atomics."""
        names = {loop.name for nest in self.report.loop_nests for loop in nest}
        try:
            lines = [str(self.roofline("leapfrog" if "leapfrog" in names else None))]
        except ValueError as error:  # A trip count is not known.
            lines = [f"work: {error}"]
        return lines + [f"atomic: {atomic}" for atomic in self.atomics()]

    def _verdict(self) -> str:
        if self.refusal is not None and self.chip is not None:
            return f"DOES NOT FIT: the {self.chip.name}'s own compiler refuses it. {self.refusal}"
        needed = f"at most {bytes_text(self.report.peak_bytes)}"
        device = self.chip or self.accelerator
        if device is None:
            return f"needs {needed} on each of {self.mesh.size:,} devices"
        fits, share = self.fits, self.report.peak_bytes / device.usable_bytes
        usable = f"{bytes_text(device.usable_bytes)} that JAX has of a {device.name} ({share:.1%})"
        return f"{'fits' if fits else 'DOES NOT FIT'}: {needed} of the {usable}"

    def _how(self) -> str:
        if self.rule is not None:
            return str(self.rule)
        took = f"compiled in {self.seconds:.1f} s"
        if self.chip is None or self.refusal is not None:
            return f"{took}, for virtual CPU devices"
        return f"{took}, {self.chip}"

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


def plan(
    build: Callable,
    *,
    chains: int | None = None,
    data: int | None = None,
    model: int | None = None,
    on: str | None = None,
    accelerator: str | Accelerator | None = None,
    trips: Mapping[str, int] | None = None,
) -> MeshPlan:
    """Compile a program for a mesh that is not there, before anyone pays for it.

    No array is made and no device is needed: a process of its own compiles the program.

    With ``on`` it is compiled by the chip's own compiler, for as many of its devices as the mesh has.
    What the compiler says of collectives and memory is then a fact, and a program that does not fit is
    refused. A GPU's compiler would time kernels on a card, and may choose others there.

    Without, it is compiled for as many virtual CPU devices, up to 2,048. For more, it is compiled for
    three smaller meshes and extrapolated by a rule that is checked on them (`Rule`). The compiler's
    partitioner puts in the collectives; it is the same for all backends, though a backend may still
    split or fuse them. Temporaries are those of the CPU's compiler: expect another size on a chip.

    Parameters
    ----------
    build
        ``build(mesh)`` returns ``(function, *arguments)``: a function and arrays or shapes laid on the
        mesh that it is given (`place` with ``jax.ShapeDtypeStruct``). The state of a kernel is
        ``jax.eval_shape(gm.HMC.init, kernel, position)``.
    chains, data, model
        Sizes of the mesh's axes, as in `make_mesh`.
    on
        A chip, "TPU v3" or "H100", or with the number of devices, which is the mesh's, "8 x H100". The
        error of one that is not known lists all. Needs the extra ``tpu`` or ``cuda``.
    accelerator
        Without ``on``: whose memory is to be fit, a name in `ACCELERATORS`, or an `Accelerator`.
    trips
        How often loops run, as in `communication`.

    Raises
    ------
    ImportError
        If the extra ``plan`` is missing, or the one that has the chip's compiler.
    TypeError, ValueError
        If ``build`` returns no function and arrays or shapes on its mesh; if a name is not known; if
        the chip does not come in such a number; if ``on`` and ``accelerator`` are both given.
    RuntimeError
        If the compiler fails, or programs of different meshes are too different to extrapolate.
    """
    mesh = make_abstract_mesh(chains=chains, data=data, model=model)
    mesh, chip, device = read_devices(mesh, on, accelerator)
    return plan_on_mesh(build, mesh, chip, device, trips or {})


def read_devices(
    mesh: AbstractMesh, on: str | None, accelerator: str | Accelerator | None
) -> tuple[AbstractMesh, Chip | None, Accelerator | None]:
    """Return the mesh, and the chip or the accelerator that its devices are to be; see `plan`."""
    if on is not None and accelerator is not None:
        raise ValueError(
            f"on={on!r} is a chip, whose compiler knows its memory, and accelerator={accelerator!r} "
            "another answer to the same question; give one of them"
        )
    if on is None:
        return mesh, None, None if accelerator is None else chips.accelerator(accelerator)
    return *mesh_on(mesh, on), None


def plan_on_mesh(
    build: Callable,
    mesh: AbstractMesh,
    chip: Chip | None,
    device: Accelerator | None,
    trips: Mapping[str, int],
) -> MeshPlan:
    """Do as `plan` says, for a mesh whose devices are the chip's."""
    began = time.perf_counter()
    function, args = build_program(build, mesh)
    compiled, refusal, rule = None, None, None
    if chip is not None:
        try:
            compiled = compile_aot(function, args, mesh, chip)
        except Refused as error:
            refusal = str(error)
    if compiled is not None:
        report = compiled.report
    else:
        report, rule = _for_virtual_devices(build, function, args, mesh)
    report = report.with_trips(**trips) if trips else report
    seconds = time.perf_counter() - began
    layout = visualize(_drawn(report, args, mesh))
    targets = {
        path_str(path): node
        for path, node in jax.tree_util.tree_leaves_with_path(args, is_leaf=_is_target)
        if _is_target(node)
    }
    small = filter(None, map(on_small_data, targets.values()))
    data = [a for a in report.arguments if any(a.path.startswith(path) for path in targets)]
    return MeshPlan(
        mesh=mesh,
        report=report,
        layout=layout,
        accelerator=device,
        rule=rule,
        seconds=seconds,
        small_data=next(small, None),
        chip=chip,
        refusal=refusal,
        compiled=compiled,
        data_bytes=sum(a.bytes_per_device for a in data),
        trips=trips,
    )


def _is_target(node: Any) -> bool:
    return isinstance(node, Target)


def mesh_on(mesh: AbstractMesh, on: str) -> tuple[AbstractMesh, Chip]:
    """Return a mesh whose devices are known to be a chip's, so that targets compute as they do there.

    Raises
    ------
    ValueError, ImportError
        If programs cannot be compiled here for so many of it.
    """
    count, chip = chip_of(on)
    chip.check(count, mesh.size)
    device: Any = AbstractDevice
    try:
        kind = device(device_kind=chip.device_kind, num_cores=chip.num_cores, platform=chip.platform)
    except TypeError as error:
        raise ImportError(f"on={on!r}: jax 0.10.2 or later is needed, got {jax.__version__}") from error
    return mesh.update(abstract_device=kind), chip


def _for_virtual_devices(
    build: Callable, function: Callable, args: tuple, mesh: AbstractMesh
) -> tuple[Communication, Rule | None]:
    """Compile for as many virtual CPU devices as the mesh has, or for fewer and extrapolate."""
    if mesh.size <= MOST_DEVICES:
        return compile_aot(function, args, mesh).report, None
    shapes_of(args, mesh)  # raises on what lies elsewhere, before anything is compiled
    report, rule = extrapolate(build, mesh)
    return on_whole_mesh(report, args, mesh), rule


def _drawn(report: Communication, args: tuple, mesh: AbstractMesh) -> Any:
    """Return the arguments that are used, as shapes that lie where the program takes them."""
    taken = {a.path: a.spec for a in report.arguments}

    def lay(path, leaf):
        if path_str(path) not in taken:
            return None
        spec = taken[path_str(path)]
        sharding = None if spec is None else NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf), sharding=sharding)

    def is_unused(node) -> bool:
        return is_padded(node) and node.values is None

    laid = jax.tree_util.tree_map_with_path(lay, args)
    return jax.tree.map(lambda node: None if is_unused(node) else node, laid, is_leaf=is_unused)


def extrapolate(build: Callable, mesh: AbstractMesh) -> tuple[Communication, Rule]:
    """Compile for three smaller meshes, the largest axis cut, and extrapolate to the whole one."""
    axis, sizes = smaller_sizes(dict(mesh.shape))
    reports = []
    for size in sizes:
        smaller = mesh.update(axis_sizes=tuple({**mesh.shape, axis: size}.values()))
        function, args = build_program(build, smaller)
        reports.append(compile_aot(function, args, smaller).report)
    _require_same(reports, sizes, axis)
    first, second, last = reports
    predicted = predict_report(first, second, sizes[0], sizes[1], axis, sizes[2])
    held = max(last.peak_bytes, 1)
    off = [abs(getattr(predicted, name) - getattr(last, name)) / held for name in _MEMORY]
    for a, b in zip(predicted.collectives, last.collectives, strict=True):
        off.append(abs(a.num_bytes - b.num_bytes) / max(b.num_bytes, 1))
    rule = Rule(axis, sizes, max(off))
    report = predict_report(second, last, sizes[1], sizes[2], axis, mesh.shape[axis])
    return replace(report, num_devices=mesh.size, mesh=dict(mesh.shape)), rule


def smaller_sizes(mesh: dict[str, int]) -> tuple[str, tuple[int, int, int]]:
    """Return the largest axis of a mesh, and three sizes of it that can be compiled for."""
    axis = max(mesh, key=lambda name: mesh[name])
    most = MOST_DEVICES // math.prod(n for name, n in mesh.items() if name != axis)
    if most < 4:
        raise RuntimeError(
            f"mesh {mesh}: at most {MOST_DEVICES} devices can be compiled for, and with the other axes "
            f"whole that leaves {most} along {axis!r}; make them smaller"
        )
    return axis, (most // 4, most // 2, most)


def predict_report(
    small: Communication, large: Communication, num_small: int, num_large: int, axis: str, num: int
) -> Communication:
    """Predict a report for ``num`` devices along an axis from those of two other sizes."""

    def at(x_small: float, x_large: float) -> int:
        share = (x_small - x_large) / (1 / num_small - 1 / num_large)
        return max(0, round(x_large + share * (1 / num - 1 / num_large)))

    def collective(a: Collective, b: Collective) -> Collective:
        num_bytes, operand_bytes = at(a.num_bytes, b.num_bytes), at(a.operand_bytes, b.operand_bytes)
        is_same = operand_bytes == b.operand_bytes
        # A trip count that depends on the mesh is not known on another one.
        pairs = zip(a.loops, b.loops, strict=True)
        return replace(
            b,
            shape=b.shape if num_bytes == b.num_bytes else f"{num_bytes} bytes",
            num_bytes=num_bytes,
            operand_shape=b.operand_shape if is_same else f"{operand_bytes} bytes",
            operand_bytes=operand_bytes,
            group_size=round(b.group_size * (num / num_large if axis in b.axes else 1)),
            loops=tuple(y if x.trips == y.trips else replace(y, trips=None) for x, y in pairs),
        )

    pairs = zip(small.collectives, large.collectives, strict=True)
    return replace(
        large,
        collectives=tuple(collective(a, b) for a, b in pairs),
        **{name: at(getattr(small, name), getattr(large, name)) for name in _MEMORY},
    )


def on_whole_mesh(report: Communication, args: tuple, mesh: AbstractMesh) -> Communication:
    """Give a report's arguments the shapes that they have on a mesh, under the same specs.

    An argument lies whole where the mesh does not divide its axes.
    """
    leaves = {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(args)}
    arguments = []
    for known in report.arguments:
        leaf, spec = leaves[known.path], known.spec
        try:
            sharding = None if spec is None else NamedSharding(mesh, spec)
            arguments.append(describe_argument(known.path, leaf, sharding))
        except ValueError:
            arguments.append(describe_argument(known.path, leaf, NamedSharding(mesh, P())))
    num_bytes = sum(a.bytes_per_device for a in arguments)
    return replace(report, arguments=tuple(arguments), argument_bytes=num_bytes)


def _require_same(reports: list[Communication], sizes: tuple[int, ...], axis: str) -> None:
    """Raise unless all reports have the same collectives in the same loops."""

    def in_words(c: Collective) -> str:
        loops = "".join(f" in {loop.name}" for loop in c.loops)
        return f"{c.kind} over {c.where if c.axes else 'no axis'}{loops}"

    first, *others = ([in_words(c) for c in report.collectives] for report in reports)
    for found, size in zip(others, sizes[1:], strict=True):
        if found == first:
            continue
        only = {sizes[0]: Counter(first) - Counter(found), size: Counter(found) - Counter(first)}
        differences = [f"{n} x {c} only with {axis}={at}" for at in only for c, n in only[at].items()]
        raise RuntimeError(
            "the program is not the same on smaller meshes, so it cannot be extrapolated: "
            f"{'; '.join(differences) or f'the order of collectives differs with {axis}={size}'}. "
            f"Plan a mesh of at most {MOST_DEVICES} devices"
        )
