"""The report of a program on a mesh that is too large to compile for, from smaller ones."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gspmd_mcmc.placement.mesh import make_abstract_mesh
from gspmd_mcmc.tree import path_str
from gspmd_mcmc.views.program.ahead import MOST_DEVICES, built, compile_ahead
from gspmd_mcmc.views.program.hlo import Loop
from gspmd_mcmc.views.program.parts import Argument, Collective
from gspmd_mcmc.views.program.reading import argument
from gspmd_mcmc.views.program.report import Communication

_MEMORY = ("argument_bytes", "output_bytes", "temporary_bytes", "constant_bytes", "alias_bytes")


@dataclass(frozen=True)
class Rule:
    """How a report was made from those of smaller meshes.

    Bytes on a device are taken as a + b/n over n devices along the axis: what is whole on each, and a
    share of what is laid over it. Collectives are the same ones. Two sizes give a and b. Arguments are
    counted from their shapes on the whole mesh instead. Of outputs and temporaries the rule is short by
    the pad of rows that the mesh does not divide: less than a row a device. Temporaries that a tile
    bounds on the smaller meshes only are not of this law: ``error`` tells where that ends among the
    three; where it ends beyond them, the rule says too much.

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


def extrapolate(build: Callable, mesh: AbstractMesh) -> tuple[Communication, Rule]:
    """Compile for three smaller meshes, the largest axis cut, and extrapolate to the whole one.

    Raises
    ------
    RuntimeError
        If the smaller meshes do not give the same program.
    """
    axis, sizes = smaller_sizes(dict(mesh.shape))
    reports = [_compiled(build, mesh, axis, n) for n in sizes]
    return _rule_applied(reports, axis, sizes, mesh)


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


def _compiled(build: Callable, mesh: AbstractMesh, axis: str, num: int) -> Communication:
    smaller = make_abstract_mesh(**{**mesh.shape, axis: num})
    function, args = built(build, smaller)
    return compile_ahead(function, args, smaller)


def _rule_applied(
    reports: list[Communication], axis: str, sizes: tuple[int, ...], mesh: AbstractMesh
) -> tuple[Communication, Rule]:
    first, second, last = reports
    _require_same(reports, sizes, axis)
    predicted = predict_report(first, second, sizes[0], sizes[1], axis, sizes[2])
    rule = Rule(axis, sizes, relative_error(predicted, last))
    report = predict_report(second, last, sizes[1], sizes[2], axis, mesh.shape[axis])
    return replace(report, num_devices=mesh.size, mesh=dict(mesh.shape)), rule


def predict_report(
    small: Communication, large: Communication, num_small: int, num_large: int, axis: str, num: int
) -> Communication:
    """Predict a report for ``num`` devices along an axis from those of two other sizes."""

    def at(x_small: float, x_large: float) -> int:
        share = (x_small - x_large) / (1 / num_small - 1 / num_large)
        return max(0, round(x_large + share * (1 / num - 1 / num_large)))

    def collective(a: Collective, b: Collective) -> Collective:
        num_bytes, operand_bytes = at(a.num_bytes, b.num_bytes), at(a.operand_bytes, b.operand_bytes)
        grown = num / num_large if axis in b.axes else 1
        return replace(
            b,
            shape=_shape_of(b.shape, b.num_bytes, num_bytes),
            num_bytes=num_bytes,
            operand_shape=_shape_of(b.operand_shape, b.operand_bytes, operand_bytes),
            operand_bytes=operand_bytes,
            group_size=round(b.group_size * grown),
            loops=tuple(map(_same_trips, a.loops, b.loops)),
        )

    pairs = zip(small.collectives, large.collectives, strict=True)
    return replace(
        large,
        collectives=tuple(collective(a, b) for a, b in pairs),
        **{name: at(getattr(small, name), getattr(large, name)) for name in _MEMORY},
    )


def _shape_of(shape: str, num_bytes: int, predicted: int) -> str:
    return shape if predicted == num_bytes else f"{predicted} bytes"


def _same_trips(a: Loop, b: Loop) -> Loop:
    """Forget a trip count that depends on the mesh: nobody knows it on another one."""
    return b if a.trips == b.trips else replace(b, trips=None)


def relative_error(predicted: Communication, true: Communication) -> float:
    """How far a prediction is off, as `Rule.error` has it."""
    held = max(true.peak_bytes, 1)
    memory = [abs(getattr(predicted, name) - getattr(true, name)) / held for name in _MEMORY]
    pairs = zip(predicted.collectives, true.collectives, strict=True)
    sent = [abs(a.num_bytes - b.num_bytes) / max(b.num_bytes, 1) for a, b in pairs]
    return max([*memory, *sent])


def on_whole_mesh(report: Communication, args: tuple, mesh: AbstractMesh) -> Communication:
    """Give a report's arguments the shapes that they have on a mesh, under the same specs."""
    leaves = {path_str(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(args)}
    arguments = tuple(_laid(a, leaves[a.path], mesh) for a in report.arguments)
    return replace(
        report, arguments=arguments, argument_bytes=sum(a.bytes_per_device for a in arguments)
    )


def _laid(known: Argument, leaf: Any, mesh: AbstractMesh) -> Argument:
    """Lay an argument out as on a smaller mesh; whole, where this one does not divide its axes."""
    sharding = None if known.spec is None else NamedSharding(mesh, known.spec)
    try:
        return argument(known.path, leaf, sharding)
    except ValueError:
        return argument(known.path, leaf, NamedSharding(mesh, P()))


def _require_same(reports: list[Communication], sizes: tuple[int, ...], axis: str) -> None:
    """Raise unless all reports have the same collectives in the same loops."""
    seen = [[_in_words(c) for c in report.collectives] for report in reports]
    for found, num in zip(seen[1:], sizes[1:], strict=True):
        if found != seen[0]:
            differences = _differences(seen[0], found, f"{axis}={sizes[0]}", f"{axis}={num}")
            raise RuntimeError(
                "the program is not the same on smaller meshes, so it cannot be extrapolated: "
                f"{differences}. Plan a mesh of at most {MOST_DEVICES} devices"
            )


def _in_words(collective: Collective) -> str:
    loops = "".join(f" in {loop.name}" for loop in collective.loops)
    return f"{collective.kind} over {collective.where if collective.axes else 'no axis'}{loops}"


def _differences(first: list[str], other: list[str], on_first: str, on_other: str) -> str:
    only = ((Counter(first) - Counter(other), on_first), (Counter(other) - Counter(first), on_other))
    found = [f"{n} x {what} only with {where}" for more, where in only for what, n in more.items()]
    return "; ".join(found) or f"its collectives are in another order with {on_other}"
