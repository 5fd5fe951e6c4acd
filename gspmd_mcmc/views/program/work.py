"""What a compiled program does on one device: bytes moved, kernels, arithmetic, collectives.

All of it is read from the text of the program, as the compiler scheduled it, and nothing is run. An
array that was padded, converted or copied counts as the text has it, not as the user wrote it. How long
the work takes is another question: `gspmd_mcmc.views.roofline`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gspmd_mcmc.views.program import device_groups
from gspmd_mcmc.views.program.flops import Product, flops_of
from gspmd_mcmc.views.program.hlo import (
    Operation,
    Program,
    called_computations,
    collective_kind,
    is_start,
    num_bytes_of,
    result_shape,
)
from gspmd_mcmc.views.program.memory_traffic import Amount, fused_operations, is_kernel, moved
from gspmd_mcmc.views.program.report import Traffic

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The computations of these run operation by operation, not as one kernel.
_DESCENDED = frozenset(("while", "call", "conditional", "async-start"))
_Scheduled = tuple[Operation, Mapping[str, Operation]]  # an operation and those beside it


@dataclass(frozen=True)
class Work:
    """What a program does on one device, in one call or in one iteration of a loop.

    Attributes
    ----------
    bytes_read, bytes_written
        Between the device's memory and its processors: the operands and results of every kernel. Of an
        operand that a kernel only slices, the slice; of an array that is updated in place, the update.
        What stays in a TPU's memory on the chip, by its layout ``S(1)``, is not moved. What a GPU finds
        in its cache is not known to the compiler, and counts.
    tile_bytes
        What a TPU moves besides, because it lays arrays out in whole tiles: a dimension of 10 in tiles
        of 128 moves 12.8 times its bytes.
    kernels
        Operations that the device starts one after the other. A call of a library counts as one.
    products
        Matrix products and convolutions, each with its sizes and how often it runs.
    other_flops
        All others: one an element of each elementwise operation or reduction.
    collectives
        What is sent, each kind and size with how often it runs. Groups of unknown size have 0 devices.
    estimated_cycles
        The sum of the compiler's own estimates, where the text has them (TPU); None where it has none.
    notes
        What to know about the counts: which branch of a conditional, which loops.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    tile_bytes: int = 0
    kernels: int = 0
    products: tuple[Product, ...] = ()
    other_flops: int = 0
    collectives: tuple[Traffic, ...] = ()
    estimated_cycles: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def bytes_moved(self) -> int:
        """Bytes of elements read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def product_flops(self) -> dict[str, int]:
        """Floating-point operations of products, by what is multiplied: ``"bf16"``, ``"f32 high"``."""
        found: Counter[str] = Counter()
        for product in self.products:
            found[product.factors] += product.flops
        return dict(found)

    @property
    def memory_bytes(self) -> int:
        """Bytes that pass through memory, with those that tiles add."""
        return self.bytes_moved + self.tile_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes of the results of all collectives, each as often as it runs."""
        return sum(c.num_bytes * c.runs for c in self.collectives)

    def runs(self, kind: str) -> int:
        """How often collectives of a kind run, ``"all-reduce"``."""
        return sum(c.runs for c in self.collectives if c.kind == kind)

    def __add__(self, other: "Work") -> "Work":
        counted = [n for n in (self.estimated_cycles, other.estimated_cycles) if n is not None]
        return Work(
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            tile_bytes=self.tile_bytes + other.tile_bytes,
            kernels=self.kernels + other.kernels,
            products=self.products + other.products,
            other_flops=self.other_flops + other.other_flops,
            collectives=self.collectives + other.collectives,
            estimated_cycles=sum(counted) if counted else None,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
        )

    def times(self, count: int) -> "Work":
        """Return this work done several times over."""
        cycles = self.estimated_cycles
        return Work(
            bytes_read=self.bytes_read * count,
            bytes_written=self.bytes_written * count,
            tile_bytes=self.tile_bytes * count,
            kernels=self.kernels * count,
            products=tuple(replace(p, runs=p.runs * count) for p in self.products if count),
            other_flops=self.other_flops * count,
            collectives=tuple(replace(c, runs=c.runs * count) for c in self.collectives if count),
            estimated_cycles=None if cycles is None else cycles * count,
            notes=self.notes,
        )


def work_of(
    program: Program, within: str | None = None, *, trips: Mapping[str, int] | None = None
) -> Work:
    """Count what a compiled program does on one device.

    Parameters
    ----------
    program
        What `hlo.read_program` made of ``compiled.as_text()``.
    within
        The name of a loop: count one iteration of it, its condition included. None: the whole call.
        Several loops of that name count together, and a note says so.
    trips
        How often loops run whose trip count the compiler does not know, by name.

    Raises
    ------
    ValueError
        If the program has no loop of that name, or if a loop in what is counted has no trip count that
        is known.
    """
    given = trips or {}
    if within is None:
        return _computation(program, program.entry, given)
    loops = list(_loops_named(program, program.entry, within))
    if not loops:
        names = sorted({loop.name for nest in program.loop_nests() for loop in nest})
        raise ValueError(
            f"the program has no loop {within!r}; it has {names}. A loop that runs once, or is "
            "unrolled, is none in the compiled program"
        )
    work = sum((_iteration(program, loop, given) for loop in loops), Work())
    several = (f"{len(loops)} loops are named {within!r}: they count together",)
    return replace(work, notes=work.notes + several) if len(loops) > 1 else work


def scheduled(program: Program, within: str) -> Iterator[Operation]:
    """Yield the kernels of one iteration of a loop, in all branches, inner loops once."""
    for loop in _loops_named(program, program.entry, within):
        for name in called_computations(loop):
            yield from (o for o, _ in _flat(program, name) if is_kernel(o))


def _flat(program: Program, computation: str) -> Iterator[_Scheduled]:
    """Yield what a computation runs, with the computations that it calls, each once."""
    operations = program.computations.get(computation, ())
    siblings = {o.name: o for o in operations}
    for operation in operations:
        if operation.opcode not in _DESCENDED:
            yield operation, siblings
            continue
        for name in called_computations(operation):
            yield from _flat(program, name)


def _loops_named(program: Program, computation: str, name: str) -> Iterator[Operation]:
    """Find the loops of a name; those inside of one are part of its iteration."""
    for operation in program.computations.get(computation, ()):
        if operation.opcode not in _DESCENDED:
            continue
        if operation.opcode == "while" and program.loop(operation).name == name:
            yield operation
        else:
            for called in called_computations(operation):
                yield from _loops_named(program, called, name)


def _iteration(program: Program, loop: Operation, trips: Mapping[str, int]) -> Work:
    """Return the work of a loop's condition and body."""
    return sum((_computation(program, c, trips) for c in called_computations(loop)), Work())


def _computation(program: Program, name: str, trips: Mapping[str, int]) -> Work:
    """Return the work of a computation that runs operation by operation."""
    operations = program.computations.get(name, ())
    siblings = {o.name: o for o in operations}
    return sum((_operation(program, o, siblings, trips) for o in operations), Work())


def _operation(
    program: Program, operation: Operation, siblings: Mapping[str, Operation], trips: Mapping[str, int]
) -> Work:
    if operation.opcode == "while":
        loop = program.loop(operation)
        count = loop.trips if loop.trips is not None else trips.get(loop.name)
        if count is None:
            raise ValueError(
                f"loop {loop.name!r} ({loop.source or 'no known source'}) has no trip count that the "
                f"compiler knows: give trips={{{loop.name!r}: ...}}, or count within={loop.name!r}"
            )
        return _iteration(program, operation, trips).times(count)
    if operation.opcode == "conditional":
        return _largest_branch(program, operation, trips)
    if operation.opcode in _DESCENDED:
        return sum((_computation(program, c, trips) for c in called_computations(operation)), Work())
    if not is_kernel(operation):
        return Work()
    return _kernel(program, operation, siblings)


def _largest_branch(program: Program, operation: Operation, trips: Mapping[str, int]) -> Work:
    """Return the work of the branch that moves most."""
    names = called_computations(operation)
    branches = [_computation(program, name, trips) for name in names]
    moved_bytes = [branch.memory_bytes for branch in branches]
    largest = moved_bytes.index(max(moved_bytes))
    note = (
        f"{operation.name}: branch {largest} of {len(names)} counts, which moves most "
        f"({moved_bytes[largest]:,} bytes; the least, {min(moved_bytes):,})"
    )
    return replace(branches[largest], notes=(*branches[largest].notes, note))


def _kernel(program: Program, operation: Operation, siblings: Mapping[str, Operation]) -> Work:
    read, written = moved(program, operation, siblings)
    products, rest = flops_of(program, operation, siblings)
    tiles: Amount = read + written
    cycles = _CYCLES.search(operation.attributes)
    return Work(
        bytes_read=round(read.num_bytes),
        bytes_written=round(written.num_bytes),
        tile_bytes=round(tiles.tiled_bytes - tiles.num_bytes),
        kernels=1,
        products=products,
        other_flops=rest,
        collectives=tuple(_collectives(program, operation, siblings)),
        estimated_cycles=int(cycles.group(1)) if cycles else None,
    )


def _collectives(
    program: Program, operation: Operation, siblings: Mapping[str, Operation]
) -> Iterator[Traffic]:
    """Yield the collective that an operation is, or those that are fused in it."""
    inside = fused_operations(program, operation)
    named = {o.name: o for o in inside}
    for inner in inside:
        yield from _collectives(program, inner, named)
    kind = collective_kind(operation)
    if kind and is_start(operation):
        groups = device_groups.read_groups(operation.attributes, program.num_devices)
        operands = (siblings[name].shape for name in operation.operands if name in siblings)
        yield Traffic(
            kind=kind,
            axes=(),
            group_size=0 if groups is None else groups.shape[1],
            num_bytes=num_bytes_of(result_shape(operation, siblings)),
            operand_bytes=sum(map(num_bytes_of, operands)),
            runs=1,
        )
