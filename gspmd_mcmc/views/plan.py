"""A program on a mesh that is not there: what it would send and hold."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Group
from rich.jupyter import JupyterMixin
from rich.text import Text

from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.placement.padding import is_padded
from gspmd_mcmc.targets.checks import on_small_data
from gspmd_mcmc.targets.target import Target
from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views import chips
from gspmd_mcmc.views.chips import Accelerator
from gspmd_mcmc.views.communication import describe_argument
from gspmd_mcmc.views.notation import bytes_text
from gspmd_mcmc.views.program.aot_compilation import MOST_DEVICES, build_program, compile_aot, shapes_of
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
    """

    mesh: AbstractMesh
    report: Communication
    layout: LayoutView
    accelerator: Accelerator | None
    rule: Rule | None
    seconds: float
    small_data: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the program fits what JAX has of the accelerator's memory; None if none was named."""
        if self.accelerator is None:
            return None
        return self.report.peak_bytes <= self.accelerator.usable_bytes

    def __rich__(self) -> Group:
        """Draw the layout, the collectives, the memory, and whether they fit."""
        needed = f"at most {bytes_text(self.report.peak_bytes)}"
        verdict = f"needs {needed} on each of {self.mesh.size:,} devices"
        if self.accelerator is not None:
            usable = self.accelerator.usable_bytes
            fits, share = "fits" if self.fits else "DOES NOT FIT", self.report.peak_bytes / usable
            device = f"that JAX has of a {self.accelerator.name} ({share:.1%})"
            verdict = f"{fits}: {needed} of the {bytes_text(usable)} {device}"
        compiled = f"compiled in {self.seconds:.1f} s, for virtual CPU devices"
        how = Text(str(self.rule or compiled), style="dim")
        small_data = [Text(self.small_data)] if self.small_data else []
        return Group(self.layout, draw_report(self.report), Text(verdict), *small_data, how)

    def __str__(self) -> str:
        return plain(self)

    __repr__ = __str__


def plan(
    build: Callable,
    *,
    chains: int | None = None,
    data: int | None = None,
    model: int | None = None,
    accelerator: str | Accelerator | None = None,
    trips: Mapping[str, int] | None = None,
) -> MeshPlan:
    """Compile a program for a mesh that is not there, before anyone pays for it.

    No array is made and no device is needed. For up to 2,048 devices the program is compiled, in a
    process of its own, for as many virtual CPU devices. For more, it is compiled for three smaller
    meshes and extrapolated by a rule that is checked on them (`Rule`). The compiler's partitioner puts
    in the collectives; it is the same for all backends, though a backend may still split or fuse them.
    Temporaries are those of the CPU's compiler: expect another size on an accelerator.

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
    device = chips.accelerator(accelerator) if accelerator is not None else None
    mesh = make_abstract_mesh(chains=chains, data=data, model=model)
    began = time.perf_counter()
    function, args = build_program(build, mesh)
    if mesh.size <= MOST_DEVICES:
        report, rule = compile_aot(function, args, mesh), None
    else:
        shapes_of(args, mesh)  # raises on what lies elsewhere, before anything is compiled
        report, rule = extrapolate(build, mesh)
        report = on_whole_mesh(report, args, mesh)
    report = report.with_trips(**trips) if trips else report
    seconds = time.perf_counter() - began
    layout = visualize(_drawn(report, args, mesh))
    nodes = jax.tree.leaves(args, is_leaf=lambda node: isinstance(node, Target))
    small = [on_small_data(node) for node in nodes if isinstance(node, Target)]
    return MeshPlan(mesh, report, layout, device, rule, seconds, next(filter(None, small), None))


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
        smaller = make_abstract_mesh(**{**mesh.shape, axis: size})
        function, args = build_program(build, smaller)
        reports.append(compile_aot(function, args, smaller))
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
