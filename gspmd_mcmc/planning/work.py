"""What a compiled program does on one device: bytes moved, kernels, arithmetic, collectives.

All of it is read from the text of the program, as the compiler scheduled it, and nothing is run. An
array that was padded, converted or copied counts as the text has it, not as the user wrote it. How long
the work takes is another question: `gspmd_mcmc.planning.roofline`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gspmd_mcmc.planning.flops import Product, flops_of, is_uncounted, stated_flops
from gspmd_mcmc.planning.memory_traffic import Amount, fused_operations, is_kernel, moved
from gspmd_mcmc.views.program import device_groups
from gspmd_mcmc.views.program.hlo import (
    Operation,
    Program,
    called_computations,
    collective_kind,
    is_start,
    kind_and_result,
    num_bytes_of,
    own_line,
)
from gspmd_mcmc.views.program.report import Traffic

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The computations of these run operation by operation, not as one kernel.
_DESCENDED = frozenset(("while", "call", "conditional", "async-start"))


@dataclass(frozen=True)
class Kernel:
    """One operation that a device starts, and how often it runs; the other numbers are of one run.

    Attributes
    ----------
    name
        As the text has it.
    source
        The line of Python that it comes from: of the caller's own code, if there is one.
    bytes_read, bytes_written, tile_bytes
        As of `Work`.
    products, other_flops
        Matrix products and convolutions with their sizes; floating-point operations of everything else.
    collectives
        What it sends.
    estimated_cycles
        The compiler's own estimate, where the text has it (TPU); of a kernel that is no XLA program,
        the instructions that it scheduled.
    is_counted
        Whether its arithmetic is known. Of a kernel that is no XLA program and states none it is not,
        and not of a scatter or a sort, unless the compiler has estimated or scheduled it.
    stated_flops
        Floating-point operations that such a kernel states of itself, products of bfloat16 numbers.
    """

    name: str
    source: str
    bytes_read: int
    bytes_written: int
    tile_bytes: int
    products: tuple[Product, ...]
    other_flops: int
    collectives: tuple[Traffic, ...]
    estimated_cycles: int | None
    is_counted: bool = True
    stated_flops: int = 0
    runs: int = 1

    @property
    def bytes_moved(self) -> int:
        """Bytes of elements that one run reads and writes."""
        return self.bytes_read + self.bytes_written

    @property
    def memory_bytes(self) -> int:
        """Bytes that pass through memory in one run, with those that tiles add."""
        return self.bytes_moved + self.tile_bytes


@dataclass(frozen=True)
class Work:
    """What a program does on one device, in one call or in one iteration of a loop.

    Attributes
    ----------
    each
        Every kernel, with how often it runs.
    readbacks
        How often a loop whose trip count the compiler does not know tests whether to go on: a GPU's
        host waits for that.
    notes
        What to know about the counts: which branch of a conditional, which loops, whose arithmetic is
        not counted.
    """

    each: tuple[Kernel, ...] = ()
    readbacks: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes_read(self) -> int:
        """Bytes from the device's memory to its processors: the operands of every kernel.

        Of an operand that a kernel only slices, the slice; of an array that is updated in place, the
        update. What stays in a TPU's memory on the chip, by its layout ``S(1)``, is not moved. What a
        GPU finds in its cache is not known to the compiler, and counts.
        """
        return sum(kernel.bytes_read * kernel.runs for kernel in self.each)

    @property
    def bytes_written(self) -> int:
        """Bytes from the processors to memory: the results of every kernel."""
        return sum(kernel.bytes_written * kernel.runs for kernel in self.each)

    @property
    def bytes_moved(self) -> int:
        """Bytes of elements read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def tile_bytes(self) -> int:
        """Bytes that a TPU moves besides, because it lays arrays out in whole tiles.

        A dimension of 10 in tiles of 128 moves 12.8 times its bytes.
        """
        return sum(kernel.tile_bytes * kernel.runs for kernel in self.each)

    @property
    def memory_bytes(self) -> int:
        """Bytes that pass through memory, with those that tiles add."""
        return self.bytes_moved + self.tile_bytes

    @property
    def kernels(self) -> int:
        """Operations that the device starts one after the other; a call of a library counts as one."""
        return sum(kernel.runs for kernel in self.each)

    @property
    def product_flops(self) -> dict[str, int]:
        """Floating-point operations of matrix products and convolutions, by what is multiplied.

        Keys: the dtype of the factors, with the precision that the text states: ``"f32 high"``.
        """
        found: Counter[str] = Counter()
        for kernel in self.each:
            for product in kernel.products:
                found[product.factors] += product.flops * kernel.runs
        return dict(found)

    @property
    def other_flops(self) -> int:
        """Floating-point operations of the rest: one an element of what is computed or reduced."""
        return sum(kernel.other_flops * kernel.runs for kernel in self.each)

    @property
    def stated_flops(self) -> int:
        """Floating-point operations that kernels which are no XLA programs state of themselves."""
        return sum(kernel.stated_flops * kernel.runs for kernel in self.each)

    @property
    def is_counted(self) -> bool:
        """Whether the arithmetic of all kernels is known; where it is not, seconds are too few."""
        return all(kernel.is_counted for kernel in self.each)

    @property
    def collectives(self) -> tuple[Traffic, ...]:
        """What is sent, with how often; where groups could not be read they have 0 devices."""
        return tuple(
            replace(sent, runs=sent.runs * kernel.runs)
            for kernel in self.each
            for sent in kernel.collectives
            if kernel.runs
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of the results of all collectives, each as often as it runs."""
        return sum(c.num_bytes * c.runs for c in self.collectives)

    @property
    def estimated_cycles(self) -> int | None:
        """The sum of the compiler's own estimates, where the text has them (TPU)."""
        known = [k.estimated_cycles * k.runs for k in self.each if k.estimated_cycles is not None]
        return sum(known) if known else None

    def count(self, kind: str) -> int:
        """How often collectives of a kind run, such as ``"all-reduce"``."""
        return sum(c.runs for c in self.collectives if c.kind == kind)

    def __add__(self, other: "Work") -> "Work":
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return Work(self.each + other.each, self.readbacks + other.readbacks, notes)

    def times(self, count: int) -> "Work":
        """Return this work done several times over."""
        each = tuple(replace(kernel, runs=kernel.runs * count) for kernel in self.each)
        return replace(self, each=each, readbacks=self.readbacks * count)


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
    readbacks = Work(readbacks=int(program.loop(loop).trips is None))
    return sum((_computation(program, c, trips) for c in called_computations(loop)), readbacks)


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
    kernel = Kernel(
        name=operation.name,
        source=own_line(program.stack(operation)),
        bytes_read=round(read.num_bytes),
        bytes_written=round(written.num_bytes),
        tile_bytes=round(tiles.tiled_bytes - tiles.num_bytes),
        products=products,
        other_flops=rest,
        collectives=tuple(_collectives(program, operation, siblings)),
        estimated_cycles=int(cycles.group(1)) if cycles else None,
        is_counted=cycles is not None or not is_uncounted(program, operation),
        stated_flops=stated_flops(operation),
    )
    return Work((kernel,), notes=tuple(_doubts(kernel, operation.opcode)))


def _doubts(kernel: Kernel, opcode: str) -> Iterator[str]:
    """Yield what the text of the program does not vouch for."""
    if not kernel.is_counted:
        yield f"{kernel.name}: what this {opcode} computes is not counted"
    if kernel.stated_flops and kernel.estimated_cycles is None:
        yield f"{kernel.name}: its arithmetic is what the kernel states of itself, as bfloat16 products"


def _collectives(
    program: Program,
    operation: Operation,
    siblings: Mapping[str, Operation],
    is_fused: bool = False,
) -> Iterator[Traffic]:
    """Yield the collective that an operation is, or those that are fused in it."""
    inside = fused_operations(program, operation)
    named = {o.name: o for o in inside}
    for inner in inside:
        yield from _collectives(program, inner, named, is_fused=True)
    if collective_kind(operation) and is_start(operation):
        kind, shape = kind_and_result(operation, siblings, is_fused=is_fused)
        operands = (siblings[name].shape for name in operation.operands if name in siblings)
        yield Traffic(
            kind=kind,
            axes=(),
            group_size=_group_size(operation, program.num_devices),
            num_bytes=num_bytes_of(shape),
            operand_bytes=sum(map(num_bytes_of, operands)),
            runs=1,
        )


def _group_size(operation: Operation, num_devices: int) -> int:
    """Return how many devices take part with each other in a collective; 0 if it cannot be read."""
    pairs = device_groups.read_pairs(operation.attributes)
    if pairs is not None:
        return len(np.unique(pairs))
    groups = device_groups.read_groups(operation.attributes, num_devices)
    return 0 if groups is None else groups.shape[1]
